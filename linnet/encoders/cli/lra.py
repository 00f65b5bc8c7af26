"""`linnet data lra`: make a task of the Long Range Arena, and look at it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from linnet.config import gather, refuse
from linnet.options import AsJson, Count, by_option, echo_json, make_table, options

SHOWN = 400  # characters of a previewed text
COLUMNS = 8  # images in a row of the contact sheet
SIDE = 256  # pixels to which a previewed image is enlarged, about
SHEET = "preview.png"
HELD = ("validation", "test")


@options
def make_lra(
    task: str,
    source: str | None = None,
    *,
    out: Path,
    samples: str | None = None,
    size: str = "full",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    selection: str = "validation",
    workers: Count = 1,
    preview: Annotated[int, typer.Option(min=0)] = 0,
    anew: bool = False,
    as_json: AsJson = False,
) -> None:
    """Make a task of the Long Range Arena: generate it, or read the published files.

    Writes shards of 1,000 rows, then stage.json with the counts and SHA-256 of
    all. The first rows do not depend on how many are generated. A preview shows
    trees as text, and writes images as one sheet, preview.png.

    Example: [bold]linnet data lra listops --out lra/listops --workers 4 --preview 3[/]

    Args:
        task (TASK): listops, pathfinder or path-x, which are generated; text, retrieval, image (grey) or
            image-as-published (colour, augmented).
        out: Folder to write; the same command resumes in it.
        source ([FOLDER]): Folder of the published files to read; see docs/lra.md for the names (default: generate).
        samples: Rows that are generated: of train, or of train,validation,test (default: as published; of train alone,
            the others in proportion).
        size: full, or reduced (short trees, images of 16 x 16 pixels).
        seed: Seed of what is generated.
        selection: Split that chooses the best epoch; test holds nothing out of train, as published for text.
        workers: Processes; the result does not depend on them.
        preview: Rows of the test split to show; 0 shows none.
        anew: Replace the task that OUT holds.
        as_json: Print stage.json.
    """
    from linnet.encoders.lra import LraCorpus
    from linnet.encoders.lra.corpus import find_maker
    from linnet.encoders.lra.stage import write_lra

    config = _config(task, source, samples, size, seed, selection)
    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("reading", total=None)
        stage = write_lra(
            find_maker(config, None),
            out,
            workers=workers,
            anew=anew,
            progress=lambda what, done, total: bar.update(line, description=what, completed=done, total=total),
        )
    corpus = LraCorpus(out, config.model_copy(update={"samples": None}))
    if as_json:
        echo_json({"folder": str(out), **stage})
        return
    _show(stage, out)
    if preview:
        _preview(corpus.test, min(preview, len(corpus.test)), out)


def _config(task: str, source: str | None, samples: str | None, size: str, seed: int, selection: str):
    """Returns the configuration. Raises ConfigError with the problems of all options, under their names."""
    from linnet.config import parse
    from linnet.encoders.lra import LraDataConfig
    from linnet.encoders.lra.task import COUNTS

    values = {"task": task, "source": source, "size": size, "seed": seed, "selection": selection}
    problems = []
    if samples is not None:
        try:
            counts = [int(part.replace("_", "")) for part in samples.split(",")]
        except ValueError:
            counts = []
        if len(counts) not in (1, 3) or min(counts, default=0) < 1:
            problems.append(
                f"--samples: {samples!r} is not one or three positive numbers; write 96000 or 96000,2000,2000"
            )
        elif source is not None:
            problems.append("--samples: published files have their own number of rows; leave it out, or FOLDER")
        elif (task, size) in COUNTS:
            published = COUNTS[task, size]
            rest = [max(1, counts[0] * count // published[0]) for count in published[1:]] if len(counts) == 1 else []
            values["samples"] = dict(zip(("train", *HELD), [*counts, *rest], strict=True))
    with gather(problems, by_option(LraDataConfig.model_fields, task="TASK", source="FOLDER")):
        config = parse(LraDataConfig, values)
    refuse(problems, "linnet data lra")
    return config


def _show(stage: dict, out: Path) -> None:
    console = Console(soft_wrap=True)
    table = make_table("label", *(f"#{split}" for split in stage["labels"]))
    for label in range(stage["task"]["classes"]):
        table.add_row(str(label), *(f"{counts[label]:,}" for counts in stage["labels"].values()))
    table.add_row("[bold]all[/]", *(f"{count:,}" for count in stage["rows"].values()))
    console.print(table)
    task = stage["task"]
    if task["kind"] == "pixels":
        form = " x ".join(map(str, [task["channels"], *task["grid"]]))
        console.print(f"images of {form} (channels x height x width)")
    else:
        texts = "two texts" if task["kind"] == "pairs" else "one text"
        console.print(f"{texts} of at most {task['max_length']:,} tokens; {task['num_tokens']} ids")
    size = sum(shard["bytes"] for shard in stage["shards"])
    console.print(f"{size:,} bytes in {len(stage['shards'])} shards, in {escape(str(out))}")


def _preview(split, count: int, out: Path) -> None:
    import numpy as np

    console = Console(soft_wrap=True)
    rows = split.rows(np.arange(count))
    if split.task.kind == "pixels":
        from linnet.data.images.decode import encode_png, picture_grid
        from linnet.runs.files import write_atomic

        larger = max(1, SIDE // rows.inputs.shape[-1])
        images = rows.inputs.numpy().repeat(larger, axis=2).repeat(larger, axis=3)
        write_atomic(out / SHEET, encode_png(picture_grid(images, COLUMNS)))
        labels = rows.labels.tolist()
        lines = (" ".join(map(str, labels[at : at + COLUMNS])) for at in range(0, count, COLUMNS))
        console.print(f"{escape(str(out / SHEET))}: {count} images; labels row by row: {' / '.join(lines)}")
        return
    for ids, label in zip(rows.inputs.reshape(count, -1, rows.inputs.shape[-1]), rows.labels.tolist(), strict=True):
        for number, text in enumerate(ids.tolist()):
            name = f"label {label}: " if number == 0 else "  second: "
            console.print(escape(name + _text(split.task, text)), highlight=False)


def _text(task, ids: list[int]) -> str:
    """Returns the beginning of a row as text."""
    from linnet.encoders.lra.task import END, SYMBOLS

    space = " " if task.name == "listops" else ""
    names = [task.symbols[number - SYMBOLS] if number >= SYMBOLS else "?" for number in ids if number > END]
    text = space.join(names)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(names):,} symbols)"
