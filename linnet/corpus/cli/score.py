"""The verbs of `linnet corpus` on scores: score, filter, sample, verdicts and loop."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linnet.config import ConfigError
from linnet.corpus.cli.stages import (
    Anew,
    Bar,
    Engine,
    Folder,
    Out,
    Sources,
    StageJson,
    TextKey,
    Workers,
    connect,
    run_and_show,
)
from linnet.options import AsJson, Count, Device, Dtype, echo_json, make_table, options, parse_options


@options
def score(
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

    The score is stored as nats_per_byte beside the text. Documents under 64 bytes get none and are counted.

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


SHOWN = 90  # characters of a document


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
    found: dict = {}

    def run(bar: Bar) -> dict:
        found.update(filter_stage([folder], out, settings, workers=workers, engine=engine, anew=anew, progress=bar))
        return found

    run_and_show(run, out, as_json)
    if not as_json:
        show_tails(found["results"], per)


def show_tails(results: dict, per: str) -> None:
    """Prints the thresholds of each group and the documents at both ends of its scores."""
    console = Console(soft_wrap=True)
    ends = ("#lowest", "#median", "#highest", "#kept from", "#kept to")
    table = make_table(f"scores in nats per {per}", "#scored", *ends, "#below", "#above")
    for name, one in results.items():
        numbers = [f"{one['quantiles'][q]:.3f}" for q in ("0", "0.5", "1")]
        cuts = ["-" if one[key] is None else f"{one[key]:.3f}" for key in ("low", "high")]
        table.add_row(escape(name), f"{one['scored']:,}", *numbers, *cuts, f"{one['below']:,}", f"{one['above']:,}")
    console.print(table)
    for title, key in (("highest scores", "highest"), ("lowest scores", "lowest")):
        table = make_table(title, "document", "begins with")
        for one in (shown for group in results.values() for shown in group[key]):
            where = f"{one['source']}/{one['file']}:{one['row']}"
            table.add_row(f"{one['score']:.3f}", escape(where), escape(repr(one["text"][:SHOWN])))
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
    counts = {stratum: sum(one.stratum == stratum for one in drawn.drawn) for stratum in sorted(drawn.sizes)}
    if as_json:
        strata = [
            {"source": one.source, "decile": one.decile, "documents": drawn.sizes[one], "drawn": count}
            for one, count in counts.items()
        ]
        echo_json({"page": str(review), "sample": drawn.digest, "seed": seed, "strata": strata})
        return
    console = Console(soft_wrap=True)
    rows = [(escape(one.name), f"{drawn.sizes[one]:,}", f"{count:,}") for one, count in counts.items()]
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
        pass_rate: Share of good documents that is asked for, from 0 to 1.
        as_json: Print one JSON object.
    """
    from linnet.config import ConfigError
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
        for one in rates:
            low, high = one.interval
            shown = ("-", "-") if one.rate is None else (f"{one.rate:.1%}", f"{low:.1%} to {high:.1%}")
            table.add_row(escape(one.name), *(f"{n:,}" for n in (one.good, one.bad, one.unsure, one.open)), *shown)
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
        rounds: Most rounds (default: as in CONFIG, or 3).
        set_ (KEY=VALUE): Change a key, for example train.steps=300.
        anew: Remove the rounds of another loop in OUT.
        as_json: Print loop.json.
    """
    from linnet.config import override, parse, read_yaml
    from linnet.corpus.scoring.loop import REVIEW, VERDICTS, LoopConfig, run_loop
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
