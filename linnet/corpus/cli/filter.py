"""`linnet corpus filter`: leaves out the documents with the worst scores."""

from rich.console import Console
from rich.markup import escape

from linnet.corpus.cli.stages import Anew, AsJson, Bar, Engine, Folder, Out, Workers, connect, run_and_show
from linnet.options import make_table, options, parse_options

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
    as_json: AsJson = False,
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
    from linnet.corpus.scoring.filter import FilterConfig, filter_stage

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
