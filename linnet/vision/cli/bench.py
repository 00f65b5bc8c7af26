"""`linnet bench vision`: training and inference of image classifiers against the side of their images."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from linnet.cli.bench import check_machine, keep_rows
from linnet.options import RULED, Count, echo_json, make_table, options

if TYPE_CHECKING:
    from linnet.vision.throughput import Form, Mode, System

# Models, peers, sides and tokens per batch. The GPU's are those of paper 003, Figure 1, at the level of whole models.
GPU = (["lightnet-vit-s", "hgrn2-vit-s", "deit-s"], ["deit-s"], [224, 384, 512, 768, 1024, 1536, 2048], 65_536)
CPU = (["lightnet-vit-28px", "hgrn2-vit-28px", "vit-28px"], ["vit-28px"], [28, 56, 112], 784)


@options
def vision(
    models: Annotated[
        list[str] | None, typer.Argument(show_default=f"{' '.join(GPU[0])} on a GPU, {' '.join(CPU[0])} on a CPU")
    ] = None,
    *,
    side: Annotated[list[int] | None, typer.Option(min=1)] = None,
    tokens: Annotated[int | None, typer.Option(min=1, show_default=f"{GPU[3]:,} on a GPU, {CPU[3]} on a CPU")] = None,
    mode: list[str] | None = None,
    form: list[str] | None = None,
    peer: Annotated[list[str] | None, typer.Option(show_default=f"{GPU[1][0]} on a GPU, {CPU[1][0]} on a CPU")] = None,
    least: Count = 3,
    device: str = "auto",
    dtype: str | None = None,
    out: Path | None = None,
    json_: bool = False,
) -> None:
    """Time image classifiers at several sides, with the same number of patches per batch.

    Images and pixels per second of training and inference, beside transformers'
    ViT with SDPA; the faster form of each counts. A model whose cost per token
    does not grow has the same pixels per second at every side.

    [bold]linnet bench vision[/]
    [bold]linnet bench vision lightnet-vit-s --side 224 --side 1024 --peer deit-s --form eager --form compiled[/]

    Args:
        models: Recipes of image classifiers, with random weights.
        side: Pixels per side of the images; may be given again (default: 224 to 2048 on a GPU, 28 to 112 on a CPU).
        tokens: Patches per batch, at every side; at least one image.
        mode: [bold]training[/] (with AdamW) or [bold]inference[/]; may be given again (default: both).
        form: [bold]eager[/], [bold]compiled[/] (torch.compile), [bold]autotuned[/] (its mode max-autotune), [bold]eager
            graph[/] or [bold]compiled graph[/] (one CUDA graph per call); may be given again (default: eager and
            compiled on a GPU, eager on a CPU).
        peer: Also time transformers' ViT in the shape of this recipe; [bold]none[/] times no peer.
        least: Timed calls per case, at least; medians count.
        device: auto (the GPU if there is one), cpu or cuda.
        dtype: float32 or bfloat16 (default: bfloat16 on a GPU, else float32).
        out: Folder for vision.csv.
        json_: Print the rows as JSON.
    """

    console = Console(stderr=True, soft_wrap=True)
    measured = measure_all(models, side, tokens, mode, form, peer, least, device, dtype, out, console)
    rows = keep_rows(measured, _line, console, out and out / "vision.csv")
    if json_:
        echo_json(rows)
    else:
        show(rows)


def measure_all(models, sides, tokens, modes, forms, peers, least, device, dtype, out, console) -> Iterator[dict]:
    """Checks all options, then measures one system after the other, so that memory holds one model at a time."""
    import torch

    from linnet import provenance
    from linnet.vision.throughput import FORMS, MODES, Case, measure, versions

    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    usual = GPU if device == "cuda" else CPU
    models, sides, tokens = models or usual[0], sides or usual[2], tokens or usual[3]
    peers = [] if peers == ["none"] else peers or usual[1]
    modes, forms = modes or list(MODES), forms or (["eager", "compiled"] if device == "cuda" else ["eager"])
    systems = _check(models, peers, sides, modes, forms, device, dtype, out, tuple(FORMS), MODES)
    number = getattr(torch, dtype or ("bfloat16" if device == "cuda" else "float32"))
    what = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console.print(f"{what}: {tokens:,} patches per batch", highlight=False)
    constants = {"device": what, "tokens": tokens} | versions()
    constants["commit"] = provenance.commit() or f"release {provenance.versions()['linnet']}"
    cases = [Case(side, tokens, mode, form) for side in sides for mode in modes for form in forms]
    for name, system in systems:
        for row in measure(system, name, cases, torch.device(device), number, least):
            yield row | constants


def _check(
    models, peers, sides, modes: "list[Mode]", forms: "list[Form]", device, dtype, out, known_forms, known_modes
) -> "list[tuple[str, System]]":
    """Returns the systems to measure, by name of recipe. Raises ConfigError with all problems of the options."""
    from linnet.config import gather, not_installed, refuse, unknown
    from linnet.install import install_command
    from linnet.models import get_recipe, kind_of_recipe
    from linnet.models.registry import unknown_recipe
    from linnet.vision.throughput import Linnet, Transformers, at_side

    problems: list[str] = []
    systems: list[tuple[str, System]] = []
    patches: dict[int, str] = {}
    for name in dict.fromkeys([*models, *peers]):
        kind = kind_of_recipe(name)
        if kind != "classifier":
            other = f"{name}: is not an image classifier; linnet models --vision lists those"
            problems.append(unknown_recipe(name) if kind is None else other)
            continue
        config = get_recipe(name)
        patches.setdefault(config.patch, name)
        for side in sides:
            with gather(problems):
                at_side(config, side)
        if name in models:
            systems.append((name, Linnet(config)))
        if name in peers:
            with gather(problems):
                systems.append((name, Transformers(config, name)))
    if peers and len(patches) > 1:
        told = ", ".join(f"{size} ({name})" for size, name in patches.items())
        fix = "name a peer with the patches of the models, or --peer none"
        problems.append(f"--peer: patches of {told} pixels cannot be compared; {fix}")
    if peers and not_installed(["transformers"]):
        fix = f"install it: {install_command('hf')}, or give --peer none"
        problems.append(f"--peer needs transformers, which is not installed; {fix}")
    problems += unknown("--mode", modes, known_modes) + unknown("--form", forms, known_forms)
    check_machine(device, dtype, out, problems)
    refuse(problems, "linnet bench vision")
    return systems


def _line(row: dict) -> str:
    head = f"{row['model']:<20} {row['system']:<12} {row['form']:<9} {row['mode']:<9} side {row['side']:>5}  "
    head += f"batch {row['batch']:>5}  "
    if row["error"]:
        return head + row["error"]
    return head + f"{row['milliseconds']:.2f} ms  {row['images_per_second']:,.0f} images/s"


def show(rows: list[dict]) -> None:
    """Prints all rows, then the speed of Linnet's models relative to the fastest peer."""
    from linnet.report import units
    from linnet.vision.throughput import rivals

    style = RULED | {"padding": (0, 1, 0, 0)}
    names = ("#side", "#batch", "#ms", "#images/s", "#pixels/s", "#MiB/image")
    table = make_table("~model, system, form", "mode", *names, no_wrap=True, style=style)
    table.columns[1].no_wrap = False
    for row in rows:
        start = [f"{row['model']}, {row['system']}, {row['form']}", row["mode"], str(row["side"]), f"{row['batch']:,}"]
        if row["error"]:
            table.add_row(*start, row["error"])
            continue
        memory = f"{row['memory_per_image_mib']:,.1f}" if "memory_per_image_mib" in row else ""
        table.add_row(
            *start,
            f"{row['milliseconds']:,.2f}",
            f"{row['images_per_second']:,.0f}",
            units.count(row["pixels_per_second"]),
            memory,
        )
    console = Console()
    console.print(table)
    comparisons = [row for row in rivals(rows) if row["times"] is not None]
    if comparisons:
        names = ("model, form", "mode", "#side", "#pixels/s", "#times", "peer")
        table = make_table(*names, style=style | {"title": "against the fastest peer"})
        table.columns[-1].overflow = "fold"
        for row in comparisons:
            cells = (f"{row['model']}, {row['form']}", row["mode"], str(row["side"]))
            table.add_row(*cells, units.count(row["pixels_per_second"]), f"{row['times']:.2f}", row["rival"])
        console.print(table)
