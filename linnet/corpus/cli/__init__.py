"""`linnet corpus`: makes a corpus to train on from raw text, in stages that resume."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.config import FIGURES, ConfigError, check_study, gather, override, parse, read_yaml, unwritable
from linnet.options import AsJson, Bar, Count, Device, Dtype, echo_json, make_table, open_page, options, parse_options

# `linnet corpus clean` and `dedup`, and what the verbs share: options, the bar, and the summary of a stage.

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


def run_and_show(run: Callable[[Bar], dict], out: Path, as_json: bool, order: tuple[str, ...] = ()) -> dict:
    """Runs a stage with a progress bar, prints what it did and returns `stage.json`.

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
    return stage


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
    groups: dict[str, list[str]] = {}
    for key in counts:
        group, dot, name = key.partition(".")
        if dot and "/" not in group:
            groups.setdefault(group, []).append(name)
    ranks = {name: number for number, name in enumerate(order)}
    return {
        group: sorted(names, key=lambda name: (ranks.get(name, len(ranks)), name)) for group, names in groups.items()
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

    chosen = {
        "level": level,
        "near": near,
        "threshold": threshold,
        "verify": verify,
        "overlap": overlap,
        "line_words": line_words,
    }
    settings = parse_options(DedupConfig, chosen, "dedup")
    connect(engine, workers)

    def run(bar: Bar) -> dict:
        options = {"workers": workers, "engine": engine, "text_key": text_key, "anew": anew, "progress": bar}
        return run_dedup(folder, out, settings, against=against or (), **options)

    stage = run_and_show(run, out, as_json)
    if not as_json:
        _show(stage["results"])


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


def _place(document: dict) -> str:
    return escape(f"{document['source']}/{document['file']}:{document['row']} {document['text'][:SHOWN]!r}")


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

    if out.is_dir() or out.suffix != ".json":
        raise ConfigError([f"--out {out}: name a file that ends in .json, such as tokenizer.json"], "corpus tokenizer")
    if reason := unwritable(out.parent):
        raise ConfigError([f"--out {out}: its folder {reason}; name another place"], "corpus tokenizer")
    with Bar(Console(stderr=True)) as bar:
        learned = learn_tokenizer(folders, vocab, cjk, train_bytes=train_bytes, text_key=text_key, progress=bar)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, learned.tokenizer.to_json())
    values = {
        "path": str(out),
        "digest": learned.tokenizer.digest,
        "vocab_size": learned.tokenizer.vocab_size,
        "tokens": learned.tokens,
        "documents": learned.documents,
        "bytes": learned.bytes,
        "learned_bytes": learned.learned_bytes,
        "measured_bytes": learned.measured_bytes,
        "scripts": {name: vars(share) for name, share in learned.scripts.items()},
    }
    if as_json:
        echo_json(values, ensure_ascii=False)
        return
    _show_tokenizer(values)


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
    from linnet.corpus.page.records import MEASURED, read_corpus
    from linnet.data import DataConfig, given_tokenizer

    if not as_json:
        check_study(FIGURES, "corpus report", "; or use --json, which draws nothing")
    counter, measured = None, MEASURED if measure_bytes is None else measure_bytes
    if tokenizer is not None:
        counter = given_tokenizer(parse(DataConfig, {"tokenizer": tokenizer}, "corpus report").tokenizer)
    with Bar(Console(stderr=True)) as bar:
        if as_json:
            corpus, page = read_corpus(folders, counter, measure_bytes=measured, progress=bar), None
        else:
            from linnet.corpus.page import write_corpus

            page, corpus = write_corpus(
                folders,
                out,
                tokenizer=counter,
                tokenizer_name=tokenizer,
                measure_bytes=measured,
                progress=bar,
            )
    if page is None:
        echo_json(corpus.values(), ensure_ascii=False)
        return
    _show_report(corpus.values())
    typer.echo(page)
    if open_:
        open_page(page)


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


# The verbs of `linnet corpus` on scores: score, filter, sample, verdicts and loop.


@options
def score_documents(
    source: Sources,
    *,
    model: list[Path],
    out: Out,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1)] = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    text_key: TextKey = "text",
    engine: Engine = "local",
    workers: Workers = 1,
    anew: Anew = False,
    allow_plugins: Annotated[bool, typer.Option("--allow-plugins/--no-allow-plugins")] = False,
    as_json: StageJson = False,
) -> None:
    """Score every document by nats per letter and byte, with the state carried from its beginning to its end.

    The scores are nats_per_byte and nats_per_letter, under extra. Documents under 64 bytes get none and are counted.

    Example: [bold]linnet corpus score unique --model runs/tnl-10m-1a2b3c4d5e6f --out scored[/]

    Args:
        model (RUN): Run or model folder. Given twice: the first was trained on half 0 of the documents, the second on
            half 1, and each scores the half that it has not read.
        seed: Seed of the halves, if two models are given.
        device: auto is the GPU if there is one.
        dtype: Number format of weights and products.
        allow_plugins: Run the Python files that the folder's config.yaml names as plugins. Only if you trust them.
    """
    from linnet.corpus.scoring.score import score_stage
    from linnet.train import device as devices

    connect(engine, workers)

    def run(bar: Bar) -> dict:
        chosen = str(devices.choose(device))
        options = {"seed": seed, "precision": dtype, "workers": workers, "engine": engine}
        options |= {"text_key": text_key, "anew": anew}
        return score_stage(source, model, out, device=chosen, allow_plugins=allow_plugins, progress=bar, **options)

    run_and_show(run, out, as_json)


SHOWN_SCORES = 90  # characters of a document


@options
def filter_(
    folder: Folder,
    *,
    out: Out,
    keep: float = 0.9,
    by: str = "source",
    per: str = "letter",
    low: float = 0.0,
    engine: Engine = "local",
    workers: Workers = 1,
    anew: Anew = False,
    as_json: StageJson = False,
) -> None:
    """Leave out the documents with the worst scores of each source, and show both tails.

    Documents without a score are kept. The low tail, which holds repetitions, is cut only with --low.

    Example: [bold]linnet corpus filter scored --keep 0.9 --out kept[/]

    Args:
        keep: Share of the scored documents to keep, above 0 and at most 1.
        by: source: a threshold for each source; all: one threshold.
        per: letter: nats per letter, which treats all alphabets alike; byte: nats per byte.
        low: Share of the scored documents with the lowest scores to leave out; 0 leaves out none.
    """
    from linnet.corpus.scoring.score import FilterConfig, filter_stage

    settings = parse_options(FilterConfig, {"keep": keep, "by": by, "per": per, "low": low}, "filter")
    connect(engine, workers)

    def run(bar: Bar) -> dict:
        return filter_stage([folder], out, settings, workers=workers, engine=engine, anew=anew, progress=bar)

    stage = run_and_show(run, out, as_json)
    if not as_json:
        show_tails(stage["results"], per)


def show_tails(results: dict, per: str) -> None:
    """Prints the thresholds of each group and the documents at both ends of its scores."""
    console = Console(soft_wrap=True)
    ends = ("#lowest", "#median", "#highest", "#kept from", "#kept to")
    table = make_table(f"scores in nats per {per}", "#scored", *ends, "#below", "#above")
    for name, result in results.items():
        numbers = [f"{result['quantiles'][q]:.3f}" for q in ("0", "0.5", "1")]
        cuts = ["-" if result[key] is None else f"{result[key]:.3f}" for key in ("low", "high")]
        table.add_row(
            escape(name), f"{result['scored']:,}", *numbers, *cuts, f"{result['below']:,}", f"{result['above']:,}"
        )
    console.print(table)
    for title, key in (("highest scores", "highest"), ("lowest scores", "lowest")):
        table = make_table(title, "document", "begins with")
        for sample in (shown for group in results.values() for shown in group[key]):
            where = f"{sample['source']}/{sample['file']}:{sample['row']}"
            table.add_row(f"{sample['score']:.3f}", escape(where), escape(repr(sample["text"][:SHOWN_SCORES])))
        console.print(table)


@options
def sample(
    source: Sources,
    *,
    n: Annotated[int, typer.Option("--n", min=1, max=100_000)] = 200,
    review: Path = Path("review.html"),
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1)] = 0,
    per: str = "letter",
    text_key: TextKey = "text",
    as_json: AsJson = False,
) -> None:
    """Draw documents from each source and each tenth of its scores, and write a page on which people judge them.

    The page is one file that works offline. The keys 1, 2 and 3 judge a
    document as good, unsure or bad; progress is kept in the browser. Save
    verdicts.json and give it to [bold]linnet corpus verdicts[/].

    Example: [bold]linnet corpus sample kept --n 200 --review review.html[/]

    Args:
        n: Number of documents.
        review (PAGE): The HTML page to write.
        seed: Seed of the choice.
        per: Scores in nats per letter or byte, as in linnet corpus filter.
        as_json: Print one JSON object.
    """
    from linnet.corpus.scoring.sample import draw_sample, write_review
    from linnet.report.shell import check_page

    if per not in ("byte", "letter"):
        raise ConfigError([f"--per {per}: is unknown; use byte or letter"], "sample")
    check_page(review)
    drawn = draw_sample(source, n, seed, per, text_key)
    review.parent.mkdir(parents=True, exist_ok=True)
    write_review(drawn, review)
    counts = {stratum: sum(document.stratum == stratum for document in drawn.drawn) for stratum in sorted(drawn.sizes)}
    if as_json:
        strata = [
            {"source": stratum.source, "decile": stratum.decile, "documents": drawn.sizes[stratum], "drawn": count}
            for stratum, count in counts.items()
        ]
        echo_json({"page": str(review), "sample": drawn.digest, "seed": seed, "strata": strata})
        return
    console = Console(soft_wrap=True)
    rows = [(escape(stratum.name), f"{drawn.sizes[stratum]:,}", f"{count:,}") for stratum, count in counts.items()]
    console.print(make_table("stratum", "#documents", "#drawn", rows=rows))
    console.print(f"{len(drawn.drawn):,} documents in {escape(str(review))}; open it in a browser", highlight=False)


@options
def verdicts(
    file: Path,
    *,
    pass_rate: float = 0.9,
    as_json: AsJson = False,
) -> None:
    """Print pass rates with Wilson intervals by source, decile and stratum, and the decision: go or stop.

    Stop: the lower end of the interval of all documents reaches --pass-rate.
    Go: another round is needed, or more verdicts. Unsure documents are counted,
    but not in the rate.

    Example: [bold]linnet corpus verdicts verdicts.json --pass-rate 0.95[/]

    Args:
        file (VERDICTS.json): The file that the review page saved.
        pass_rate: Share of good documents that is enough, from 0 to 1.
        as_json: Print one JSON object.
    """
    from linnet.corpus.scoring.sample import decide, read_verdicts

    if not 0 < pass_rate <= 1:
        raise ConfigError(
            [f"--pass-rate {pass_rate:g}: is not above 0 and at most 1; use 0.9, for example"], "verdicts"
        )
    decision = decide(read_verdicts(file), pass_rate)
    if as_json:
        echo_json(decision.to_dict(), ensure_ascii=False)
        return
    console = Console(soft_wrap=True)
    groups = {"by source": decision.sources, "by decile": decision.deciles, "by stratum": decision.strata}
    for title, rates in {"": [decision.total], **groups}.items():
        table = make_table(title, "#good", "#bad", "#unsure", "#not judged", "#pass rate", "#95 % interval")
        for rate in rates:
            low, high = rate.interval
            shown = ("-", "-") if rate.rate is None else (f"{rate.rate:.1%}", f"{low:.1%} to {high:.1%}")
            table.add_row(escape(rate.name), *(f"{n:,}" for n in (rate.good, rate.bad, rate.unsure, rate.open)), *shown)
        console.print(table)
    console.print(f"[bold]{'stop' if decision.stop else 'go'}[/]: {decision.reason}", highlight=False)


@options
def loop(
    config: Path,
    *,
    out: Path = Path("loop"),
    rounds: Count | None = None,
    set_: list[str] | None = None,
    workers: Workers = 1,
    anew: bool = False,
    as_json: AsJson = False,
) -> None:
    """Clean a corpus in rounds: train a model on each half of what is left, score each half with the other's model.

    Each round scores all documents, leaves out the worst of each source, and
    writes review.html with a sample of what it kept. The loop stops when two
    rounds agree on 99 % of the documents, when verdicts.json beside the page
    says stop, or after the last round.

    Example: [bold]linnet corpus loop loop.yaml --rounds 3 --out loop[/]

    Args:
        config (CONFIG.yaml): The loop: source, train, keep.
        out: Folder of the rounds; the same command resumes in it.
        rounds: Rounds after which it stops at the latest (default: as in CONFIG, or 3).
        set_ (KEY=VALUE): Change a key, for example train.steps=300.
        anew: Remove the rounds of another loop in OUT.
        as_json: Print loop.json.
    """
    from linnet.corpus.scoring import REVIEW, VERDICTS, LoopConfig, run_loop
    from linnet.corpus.scoring.sample import write_review

    values = override(read_yaml(config), set_ or [])
    if rounds is not None:
        values["rounds"] = rounds
    settings = parse(LoopConfig, values, str(config))
    errors = Console(stderr=True, soft_wrap=True)
    with Bar(errors) as bar:

        def say(line: str) -> None:
            if not as_json:
                bar.console.print(line, highlight=False, markup=False)

        result = run_loop(settings, out, review=write_review, workers=workers, anew=anew, progress=bar, say=say)
    if as_json:
        record = {"stopped": result.stopped, "kept": str(result.kept), "rounds": result.rounds}
        echo_json(record, ensure_ascii=False)
        return
    page = result.kept.parent / REVIEW
    reasons = {
        "agreement": "two rounds agree",
        "verdicts": "the verdicts say stop",
        "rounds": "the last round is done",
        "waiting": f"judge {page}, save {page.with_name(VERDICTS)}, and give the same command again",
    }
    Console(soft_wrap=True, highlight=False).print(
        f"{escape(reasons[result.stopped])}; documents in {escape(str(result.kept))}, sample in {escape(str(page))}"
    )


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make a corpus to train on from raw text: clean, deduplicate, score, review, tokenize.",
    epilog="Each stage reads sources or the folder of an earlier stage, and writes a folder that training takes: "
    "[bold]linnet train --data FOLDER[/]. A command that was stopped resumes when it is given again.",
)
app.command(name="clean")(clean)
app.command(name="dedup")(dedup)
app.command(name="score")(score_documents)
app.command(name="filter")(filter_)
app.command(name="sample")(sample)
app.command(name="verdicts")(verdicts)
app.command(name="loop")(loop)
app.command(name="tokenizer")(tokenizer)
app.command(name="report")(report)
