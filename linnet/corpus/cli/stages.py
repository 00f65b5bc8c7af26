"""`linnet corpus clean` and `dedup`, and what the verbs share: options, the bar, and the summary of a stage."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linnet.config import ConfigError
from linnet.options import Bar, echo_json, make_table, options, parse_options

SHOWN = 60  # characters of a sample in the table
GROUPS = 12  # most rows of a group of counts

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="Text files, JSONL, Parquet (also .gz and .zst), folders of them, globs in quotes, folders of stages, "
        "[bold]hf:NAME:CONFIG:SPLIT[/] or [bold]stdlib[/]; [bold]label=SOURCE[/] gives a label.",
    ),
]
Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of an earlier stage, or any SOURCE of clean.")]
Out = Annotated[Path, typer.Option(help="Folder to write; the same command resumes in it.", show_default=False)]
Engine = Annotated[
    str,
    typer.Option(
        help="[bold]local[/]: processes of this machine; [bold]ray[/]: tasks of the Ray cluster at RAY_ADDRESS, or of "
        "one that is started on this machine (extra cluster)."
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Processes; the result does not depend on them.")]
TextKey = Annotated[str, typer.Option(help="Key (JSONL) or column (Parquet) of the text.")]
Anew = Annotated[bool, typer.Option("--anew", help="Replace the stage that OUT holds.")]
StageJson = Annotated[bool, typer.Option("--json", help="Print stage.json.")]


def connect(engine: str, workers: int) -> None:
    """Connects this process to Ray if the engine is Ray. Raises ConfigError for an unknown engine or no cluster."""
    if engine == "ray":
        from linnet.train.processes import cluster

        ray = cluster.import_ray("--engine ray")
        cluster.connect(ray, os.environ.get("RAY_ADDRESS"), workers, "RAY_ADDRESS")
    elif engine != "local":
        raise ConfigError([f"--engine {engine}: is unknown; use local or ray"], "command line")


def run_and_show(run: Callable[[Bar], dict], out: Path, as_json: bool, order: tuple[str, ...] = ()) -> None:
    """Runs a stage with a progress bar and prints what it did.

    Args:
        run: called with the bar, which is the stage's `progress`; returns `stage.json`.
        order: names of counts in the order of the table; others follow in the order of the alphabet.
    """
    with Bar(Console(stderr=True, soft_wrap=True)) as bar:
        stage = run(bar)
    if as_json:
        echo_json({"folder": str(out), **stage}, ensure_ascii=False)
    else:
        show_stage(stage, out, order)


def show_stage(stage: dict, out: Path, order: tuple[str, ...] = ()) -> None:
    """Prints documents and bytes by source, counts by name with a sample each, and the folder."""
    console, counts = Console(soft_wrap=True), stage["counts"]
    rows = [[escape(label)] for label in stage["labels"]]
    for row, label in zip(rows, stage["labels"], strict=True):
        for unit in ("documents", "bytes"):
            read, written = (counts.get(f"{unit} {done}/{label}", 0) for done in ("read", "written"))
            row += [f"{read:,}", f"{written:,} ({written / read:.1%})" if read else f"{written:,}"]
    console.print(make_table("source", "#documents", "#kept", "#bytes", "#kept", rows=rows))
    groups = _groups(counts, order)
    removed = groups.pop("removed", []) if "changed" in groups else []
    for group, names in groups.items():
        with_removed = removed and group == "changed"
        table = make_table(group, "#documents", *["#characters removed"] * bool(with_removed), "for example")
        for name in names[:GROUPS]:
            key = f"{group}.{name}"
            row = [escape(name), f"{counts[key]:,}", escape(_example(stage["samples"].get(key, [])))]
            if with_removed:
                row.insert(2, f"{counts.get(f'removed.{name}', 0):,}")
            table.add_row(*row)
        if len(names) > GROUPS:
            table.add_row(f"... {len(names) - GROUPS} more")
        console.print(table)
    if stage["skipped"]:
        console.print(f"{stage['skipped']:,} files skipped, for example {escape(stage['skipped_files'][0])}")
    kept = f"{stage['documents']:,} documents, {stage['text_bytes']:,} bytes of text"
    console.print(f"{kept} in {escape(str(out))}; counts and samples in {escape(str(out / 'stage.json'))}")


def _groups(counts: dict, order: tuple[str, ...]) -> dict[str, list[str]]:
    """Returns the names of counts `GROUP.NAME` by group."""
    found: dict[str, list[str]] = {}
    for key in counts:
        group, dot, name = key.partition(".")
        if dot and "/" not in group:
            found.setdefault(group, []).append(name)
    place = {name: number for number, name in enumerate(order)}
    return {
        group: sorted(names, key=lambda name: (place.get(name, len(place)), name)) for group, names in found.items()
    }


def _example(samples: list[dict]) -> str:
    if not samples:
        return ""
    sample = samples[0]
    where = f"{sample['source']}/{sample['file']}:{sample['row']}"
    shown = [_short(sample[key]) for key in ("reason", "before", "after", "text") if isinstance(sample.get(key), str)]
    return f"{where} {' -> '.join(shown)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


@options
def clean(
    source: Sources,
    *,
    out: Out,
    rules: Path | None = None,
    text_key: TextKey = "text",
    workers: Workers = 1,
    anew: Anew = False,
    as_json: StageJson = False,
) -> None:
    """Apply cleaning rules and document filters to text.

    Documents keep (source, file, row). Rows that cannot be read are counted and
    named. Markdown, LaTeX and code spans stay as they are.

    Example: [bold]linnet corpus clean stdlib pages.jsonl.gz --out clean --workers 2[/]

    Args:
        rules: YAML file of rules and filters (default: all rules).
    """
    from linnet.config import ConfigError, gather
    from linnet.corpus.documents import check_sources
    from linnet.corpus.rules import FILTERS, NAMES, Rules
    from linnet.corpus.rules.work import Clean
    from linnet.corpus.stage import run_stage

    problems: list[str] = []
    settings = Rules()
    with gather(problems):
        settings = settings if rules is None else Rules.read(rules)
    if problems:
        check_sources(source, "SOURCE", problems)
        raise ConfigError(problems, "clean")

    def run(bar: Bar) -> dict:
        options = {"workers": workers, "text_key": text_key, "anew": anew, "progress": bar}
        return run_stage("clean", source, out, settings, Clean(settings), **options)

    run_and_show(run, out, as_json, (*NAMES, *FILTERS))


EXAMPLES = 3  # per reason


@options
def dedup(
    folder: list[str],
    *,
    out: Out,
    level: str = "document",
    near: bool = False,
    threshold: float = 0.8,
    verify: bool = False,
    against: list[str] | None = None,
    overlap: float = 0.7,
    line_words: int = 10,
    text_key: TextKey = "text",
    engine: Engine = "local",
    workers: Workers = 1,
    anew: Anew = False,
    as_json: StageJson = False,
) -> None:
    """Remove exact and near copies of documents, or copied lines.

    The first document of a cluster of copies stays, in the order of the input.
    stage.json shows removed documents with their similarity to what they are
    copies of.

    Example: [bold]linnet corpus dedup clean --out unique --verify --against test.jsonl[/]

    Args:
        folder (FOLDER): Folders of earlier stages, or any SOURCE of clean.
        level: [bold]document[/], or [bold]line[/]: remove lines that came before.
        near: With --level line: remove near copies of lines too, such as a notice with another date.
        threshold: Similarity of near copies, above 0 to 1: Jaccard of their 5-grams of words.
        verify: Compare near copies exactly; none below the threshold is removed.
        against: Evaluation set, any SOURCE; documents that hold its items are removed. Repeatable.
        overlap: Share of an item's 8-grams that counts as holding it, above 0 to 1.
        line_words: With --level line: shorter lines are never removed.
    """
    from linnet.corpus.dedup import DedupConfig
    from linnet.corpus.dedup import dedup as run_dedup

    given = {
        "level": level,
        "near": near,
        "threshold": threshold,
        "verify": verify,
        "overlap": overlap,
        "line_words": line_words,
    }
    settings = parse_options(DedupConfig, given, "dedup")
    connect(engine, workers)
    results: dict = {}

    def run(bar: Bar) -> dict:
        options = {"workers": workers, "engine": engine, "text_key": text_key, "anew": anew, "progress": bar}
        stage = run_dedup(folder, out, settings, against=against or (), **options)
        results.update(stage["results"])
        return stage

    run_and_show(run, out, as_json)
    if not as_json:
        _show(results)


def _show(results: dict) -> None:
    console = Console(soft_wrap=True, highlight=False)
    numbers = {name: value for name, value in results.items() if isinstance(value, int)}
    console.print(", ".join(f"{name} {value:,}" for name, value in numbers.items()))
    for reason, examples in results.get("examples", {}).items():
        rows = [
            (_place(example["removed"]), _place(example["because of"]), f"{example['similarity']:.2f}")
            for example in examples[:EXAMPLES]
        ]
        console.print(make_table(f"{reason}, removed", "because of", "#similarity", rows=rows))


def _place(one: dict) -> str:
    return escape(f"{one['source']}/{one['file']}:{one['row']} {one['text'][:SHOWN]!r}")
