"""`linnet corpus loop`: rounds of training, scoring, filtering and sampling."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from linnet.corpus.cli.stages import Bar, Workers
from linnet.options import AsJson, Count, echo_json, options


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
    from linnet.corpus.page.review import write_review
    from linnet.corpus.scoring.loop import REVIEW, VERDICTS, LoopConfig, run_loop

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
