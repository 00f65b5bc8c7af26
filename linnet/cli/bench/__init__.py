"""`linnet bench`: speed on this machine."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linnet.config import ConfigError, gather, refuse, unknown
from linnet.options import RULED, Count, echo_json, make_table, options

bench = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Measure speed on this machine.")


@bench.command()
@options
def generate(
    models: list[str] | None = None,
    *,
    batch: list[str] | None = None,
    prompt: Count = 512,
    new: Annotated[int, typer.Option(min=2)] = 1024,
    repeats: Count = 3,
    context: Annotated[list[int] | None, typer.Option(min=1)] = None,
    context_new: Annotated[int, typer.Option(min=2)] = 64,
    peer: list[str] | None = None,
    peer_size: str | None = None,
    only_peers: bool = False,
    room: Annotated[int, typer.Option(min=0)] = 0,
    device: str = "auto",
    dtype: str | None = None,
    out: Path | None = None,
    json_: bool = False,
) -> None:
    """Time generation: first token, tokens per second by batch and context, bytes, share of memory bandwidth.

    The defaults are the protocol of paper 001, Figure 5, with fewer repeats.

    [bold]linnet bench generate --batch 1 --batch 64[/]
    [bold]linnet bench generate tnl-410m --context 1024 --context 131072[/]
    [bold]linnet bench generate tnl-7b --batch max --peer transformers --peer transformers-static[/]

    Args:
        models: Recipes, with random weights (default: tnl-410m hgrn2-410m on a GPU, tnl-10m on a CPU).
        batch: Sequences at once, or [bold]max[/]: as many as fit; may be given again (default: 1).
        prompt: Tokens of a prompt (paper 001, Figure 5: 512).
        new: Tokens to generate (Figure 5: 1024).
        repeats: Timed runs of a case (Figure 5: 20); medians count.
        context: Also time tokens after a prompt of this length, at the first batch; may be given again.
        context_new: Tokens to generate after each --context.
        peer: Another library to time: [bold]transformers[/] (its Llama), [bold]transformers-static[/] (the same, with a
            static cache, compiled) or [bold]fla[/] (its HGRN2); may be given again.
        peer_size: Size of the peers' models, such as 410m (default: the first model's).
        only_peers: Leave Linnet's models out.
        room: With --batch max: tokens that a sequence may grow to (default: prompt + new).
        device: auto (the GPU if there is one), cpu or cuda.
        dtype: float32 or bfloat16 (default: bfloat16 on a GPU, else float32).
        out: Folder for generate.csv and the picture.
        json_: Print the rows as JSON.
    """

    console = Console(stderr=True, soft_wrap=True)
    measured = _measure(
        models, batch or ["1"], (prompt, new, repeats, room), (context or [], context_new),
        (peer or [], peer_size, only_peers), device, dtype, out, console,
    )  # fmt: skip
    rows = keep_rows(measured, _line, console, out and out / "generate.csv")
    if json_:
        echo_json(rows)
    else:
        _show(rows)
    if out is not None:
        _draw(rows, out, console)


@bench.command()
@options
def draw(
    folder: Path,
) -> None:
    """Draw the picture of a folder's generate.csv again, without measuring.

    Args:
        folder: The --out folder of [bold]linnet bench generate[/].
    """
    from linnet.report.throughput import read_rows, write_throughput

    for path in write_throughput(read_rows(folder / "generate.csv"), folder):
        typer.echo(path)


def _measure(models, batches, protocol, contexts, peers, device, dtype, out, console) -> Iterator[dict]:
    """Checks all options, then measures one system after the other, so that memory holds one model at a time."""
    from functools import partial

    import torch

    from linnet import provenance
    from linnet.inference import benchmark
    from linnet.inference.benchmark import FILL, Case, Linnet, copy_bandwidth, measure
    from linnet.models import RECIPES, get_recipe
    from linnet.models.registry import unknown_recipe

    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    models = models or (["tnl-410m", "hgrn2-410m"] if device == "cuda" else ["tnl-10m"])
    names, size, only_peers = peers
    size = size or models[0].rpartition("-")[2]
    recipes = {name: f"{benchmark.PEERS[name]}-{size}" for name in names if name in benchmark.PEERS}
    problems = [f"--batch {text!r}: give a number above 0, or {FILL}" for text in batches if not _is_batch(text, FILL)]
    asked = dict.fromkeys([*models, *recipes.values()])
    problems += [unknown_recipe(name) for name in asked if name not in RECIPES]
    problems += unknown("--peer", names, benchmark.PEERS)
    problems += benchmark.missing(list(recipes))
    if only_peers and not names:
        problems.append("--only-peers: needs a --peer; name one")
    check_machine(device, dtype, out, problems)
    refuse(problems, "linnet bench generate")
    number = getattr(torch, dtype or ("bfloat16" if device == "cuda" else "float32"))
    prompt, new, repeats, room = protocol
    cases = [Case(text if text == FILL else int(text), prompt, new, room) for text in batches]
    cases += [Case(cases[0].batch, length, contexts[1], room) for length in contexts[0]]
    makers = []
    for name in [] if only_peers else models:
        makers.append(partial(Linnet, get_recipe(name), name, device, number))
    for name in names:
        makers.append(partial(benchmark.make_peer, name, get_recipe(recipes[name]), recipes[name], device, number))
    bandwidth = copy_bandwidth(torch.device(device))
    what = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console.print(f"{what}: a copy moves {bandwidth / 1e9:,.0f} GB per second", highlight=False)
    constants = {"device": what, "dtype": str(number).removeprefix("torch."), "copy_bytes_per_second": bandwidth}
    constants["commit"] = provenance.commit() or f"release {provenance.versions()['linnet']}"
    for make in makers:
        system = make()
        for row in measure(system, cases, repeats, bandwidth):
            yield row | constants | benchmark.versions()
        del system


def _is_batch(text: str, fill: str) -> bool:
    return text == fill or (text.isascii() and text.isdigit() and int(text) > 0)


def _line(row: dict) -> str:
    head = f"{row['model']:<28} {row['system']:<19} batch {row['batch']:>5}  prompt {row['prompt']:>7,}  "
    if row["error"]:
        return head + row["error"]
    return head + (
        f"first token {row['first_token_s']:.3f} s  {row['token_ms']:.3f} ms per token  "
        f"{row['decode_tokens_per_second']:,.0f} tokens/s"
    )


def _show(rows: list[dict]) -> None:
    from linnet.report import units

    caption = (
        "first: seconds until the first token of the whole batch; ms: per later token; tokens/s: over those; "
        "all/s: new tokens over the whole time; carried: bytes of state per sequence at the end; "
        "band: share of the bandwidth of a copy."
    )
    style = RULED | {"padding": (0, 1, 0, 0), "caption": caption, "caption_justify": "left"}
    names = ("#batch", "#prompt", "#first", "#ms", "#tokens/s", "#all/s", "#carried", "#band")
    table = make_table("~model, system", *names, no_wrap=True, style=style)
    for row in rows:
        start = [f"{row['model']}, {row['system']}", f"{row['batch']:,}", f"{row['prompt']:,}"]
        if row["error"]:
            table.add_row(*start, row["error"])
            continue
        table.add_row(
            *start,
            f"{row['first_token_s']:.3f}",
            f"{row['token_ms']:.3f}",
            f"{row['decode_tokens_per_second']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            units.size(row["carried_bytes"]),
            units.percent(row["bandwidth_share"]),
        )
    Console().print(table)


def _draw(rows: list[dict], out: Path, console) -> None:
    from linnet.report.throughput import write_throughput

    console.print(f"in {out}: generate.csv", highlight=False, markup=False)
    try:
        write_throughput(rows, out)
    except ConfigError as error:  # a GPU machine may lack the extra `study`; the message contains '.[study]', no markup
        console.print(f"no picture: {error.problems[0]}", highlight=False, markup=False)


def keep_rows(measured: Iterable[dict], line: Callable[[dict], str], console, file: Path | None) -> list[dict]:
    """Prints a line per measurement and returns them all; writes after each, so that an interrupted run keeps them."""
    rows = []
    for row in measured:
        rows.append(row)
        console.print(line(row), highlight=False, markup=False)
        if file is not None:
            write_rows(rows, file)
    return rows


def write_rows(rows: list[dict], file: Path) -> None:
    """Writes measurements, with the command that made them."""
    import shlex
    import sys

    from linnet.runs.files import csv_text, write_atomic

    file.parent.mkdir(parents=True, exist_ok=True)
    command = {"command": f"linnet {shlex.join(sys.argv[1:])}"}
    columns = dict.fromkeys(name for row in rows for name in row)
    write_atomic(file, csv_text([*columns, "command"], (row | command for row in rows), "\r\n"))


def check_machine(device: str, dtype: str | None, out: Path | None, problems: list[str]) -> None:
    """Adds what is wrong with the device, the precision and the folder, since measuring may take hours."""
    import torch

    from linnet.report.shell import check_folder

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        problems.append(f"--device: {device!r} is not available here; use cpu")
    if dtype not in (None, "float32", "bfloat16"):
        problems.append(f"--dtype: {dtype!r} is unknown; use float32 or bfloat16")
    with gather(problems):
        if out is not None:
            check_folder(out, out)
