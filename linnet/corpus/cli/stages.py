"""`linnet corpus clean` and `dedup`, and what the verbs share: options, the bar, and the summary of a stage."""

import os
from collections.abc import Callable
from glob import escape as escape_glob
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.config import ConfigError, unwritable
from linnet.options import AsJson, Bar, Count, echo_json, make_table, options, parse_options

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
    from linnet.corpus.rules import FILTERS, NAMES, Clean, Rules
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


# `linnet corpus tokenizer`: learn the tokenizer of a corpus.


@options
def tokenizer(
    folders: list[str],
    *,
    out: Path = Path("tokenizer.json"),
    vocab: Annotated[int, typer.Option(min=257, max=1 << 20)] = 64_000,
    cjk: Annotated[int, typer.Option(min=0)] = 0,
    train_bytes: Count = 100_000_000,
    text_key: TextKey = "text",
    as_json: AsJson = False,
) -> None:
    """Learn a BPE with a byte fall-back and whole Han characters, and write a tokenizer.json.

    Each token is whole characters, or one byte of a character that has no
    token. All text and all bytes come back exactly. The same text gives the
    same file, in any order and with any number of threads. linnet data
    --tokenizer, linnet train --set data.tokenizer=FILE and transformers read
    it.

    Example: [bold]linnet corpus tokenizer cleaned --vocab 64000 --cjk 8000 --out tokenizer.json[/]

    Args:
        folders (FOLDER): Folders of stages, or any SOURCE of clean.
        out: The file to write.
        vocab: Exact number of tokens.
        cjk: Han characters that are tokens: the most frequent ones of the corpus, then frequent ones of the national
            standards. With 0 they are tokens only where the text has them often.
        train_bytes: Bytes of text from which merges are learned; characters are counted in all.
        as_json: Print one JSON object.
    """
    from linnet.corpus.bpe import learn_tokenizer
    from linnet.runs.files import write_atomic

    _check_out(out)
    with Bar(Console(stderr=True)) as bar:
        found = learn_tokenizer(folders, vocab, cjk, train_bytes=train_bytes, text_key=text_key, progress=bar)
    out.parent.mkdir(parents=True, exist_ok=True)
    for half in out.parent.glob(f".{escape_glob(out.name)}.*.tmp"):  # what a killed command was writing
        half.unlink(missing_ok=True)
    write_atomic(out, found.tokenizer.to_json())
    values = {
        "path": str(out),
        "digest": found.tokenizer.digest,
        "vocab_size": found.tokenizer.vocab_size,
        "tokens": found.tokens,
        "documents": found.documents,
        "bytes": found.bytes,
        "learned_bytes": found.learned_bytes,
        "measured_bytes": found.measured_bytes,
        "scripts": {name: vars(share) for name, share in found.scripts.items()},
    }
    if as_json:
        echo_json(values, ensure_ascii=False)
        return
    _show_tokenizer(values)


def _check_out(out: Path) -> None:
    """Raises ConfigError before anything is read if the file cannot be written, or would not be read as a tokenizer."""
    if out.is_dir() or out.suffix != ".json":
        raise ConfigError([f"--out {out}: name a file that ends in .json, such as tokenizer.json"], "corpus tokenizer")
    if reason := unwritable(out.parent):
        raise ConfigError([f"--out {out}: its folder {reason}; name another place"], "corpus tokenizer")


def _show_tokenizer(values: dict) -> None:
    console = Console(soft_wrap=True, highlight=False)
    kinds = ", ".join(f"{number:,} {name}" for name, number in values["tokens"].items() if number)
    console.print(f"{values['vocab_size']:,} tokens: {kinds}")
    learned = f"merges learned from {values['learned_bytes']:,} of {values['bytes']:,} bytes"
    console.print(f"{learned} in {values['documents']:,} documents")
    table = make_table("script", "#bytes", "#tokens", "#characters/token", "#bytes/token")
    for name, share in values["scripts"].items():
        ratios = (f"{share[key] / share['tokens']:.2f}" for key in ("characters", "bytes"))
        table.add_row(name, f"{share['bytes']:,}", f"{share['tokens']:,}", *ratios)
    console.print(table)
    console.print(f"{escape(values['path'])} (digest {values['digest']})")
    console.print(f"train with it: linnet train --data FOLDER --set data.tokenizer={escape(values['path'])}")


# `linnet corpus report`: what a corpus holds and what each stage did to it.


@options
def report(
    folders: list[str],
    *,
    tokenizer: str | None = None,
    measure_bytes: Annotated[int | None, typer.Option(min=0)] = None,
    out: Path | None = None,
    as_json: AsJson = False,
    open_: bool = False,
) -> None:
    """Show what a corpus holds and what each stage did: tables here, and one page that needs no network.

    Documents, bytes, tokens and shares by source and by script (paper 001,
    Table 10), what was left out by stage and reason, duplicates, scores,
    characters per token, and examples before and after. Unfinished pipelines
    are shown as far as they are.

    Example: [bold]linnet corpus report clean dedup --tokenizer tokenizer.json --open[/]

    Args:
        folders (FOLDER): Folders of stages. The last of a chain is enough for all counts; each has its own examples.
        tokenizer: tokenizer.json, byte or hf:NAME: counts tokens (default: no tokens are counted).
        measure_bytes: Bytes of text that are read for scripts, scores and tokens; 0: all (default: 64 MiB).
        out: The page; the pictures go beside it. Default: report/index.html in the last FOLDER.
        as_json: Print one JSON object; writes no page.
        open_: Show the page in the browser.
    """
    import webbrowser

    from linnet.config import FIGURES, check_study, parse
    from linnet.corpus.page.records import MEASURED, read_corpus
    from linnet.data import DataConfig, given_tokenizer

    if not as_json:
        check_study(FIGURES, "corpus report", "; or use --json, which draws nothing")
    counter, measured = None, MEASURED if measure_bytes is None else measure_bytes
    if tokenizer is not None:
        counter = given_tokenizer(parse(DataConfig, {"tokenizer": tokenizer}, "corpus report").tokenizer)
    with Bar(Console(stderr=True)) as bar:
        if as_json:
            found, page = read_corpus(folders, counter, measure_bytes=measured, progress=bar), None
        else:
            from linnet.corpus.page import write_corpus

            page, found = write_corpus(
                folders,
                out,
                tokenizer=counter,
                tokenizer_name=tokenizer,
                measure_bytes=measured,
                progress=bar,
            )
    if page is None:
        echo_json(found.values(), ensure_ascii=False)
        return
    _show_report(found.values())
    typer.echo(page)
    if open_:
        webbrowser.open(page.resolve().as_uri())


def _show_report(values: dict) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for problem in values["problems"]:
        console.print(f"[yellow]{escape(problem)}[/]")
    for kind in ("source", "script"):
        console.print(_tallies(kind, values[f"{kind}s"], values["total"]))
    if values["measured"] < 1:
        share = f"{values['measured']:.2%}"
        console.print(f"scripts and tokens are estimates from {share} of the bytes; --measure-bytes 0 takes all")
    table = make_table("stage", "reason", "#documents left out", "#of those read")
    for stage in values["stages"]:
        for reason, number in stage["drops"].items():
            share = number / stage["documents read"] if stage["documents read"] else 0
            table.add_row(escape(stage["name"]), escape(reason), f"{number:,}", f"{share:.2%}")
    if table.row_count:
        console.print(table)
    if values["token_scripts"]:
        rows = [
            (escape(name), *(f"{share[key] / share['tokens']:.2f}" for key in ("characters", "bytes")))
            for name, share in values["token_scripts"].items()
        ]
        console.print(make_table("script", "#characters/token", "#bytes/token", rows=rows))


def _tallies(kind: str, rows: dict[str, dict], total: dict) -> Table:
    by = "tokens" if total["tokens"] else "bytes"
    table = make_table(kind, "#documents", "#bytes", "#tokens", f"#share of {by}")
    for name, row in [*rows.items(), ("total", total)]:
        numbers = ["-" if row[key] is None else f"{row[key]:,}" for key in ("documents", "bytes", "tokens")]
        share = (row[by] or 0) / total[by] if total[by] else 0
        table.add_row(escape(name), *numbers, f"{share:.1%}")
    return table
