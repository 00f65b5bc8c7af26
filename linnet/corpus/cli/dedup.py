"""`linnet corpus dedup`: removes copies, and text of evaluation sets."""

from rich.console import Console
from rich.markup import escape

from linnet.corpus.cli.stages import Anew, AsJson, Bar, Engine, Out, TextKey, Workers, connect, run_and_show
from linnet.options import make_table, options, parse_options

EXAMPLES, SHOWN = 3, 60  # examples per reason, and characters of each text


@options
def dedup(
    folder: list[str],
    *,
    out: Out,
    level: str = "document",
    threshold: float = 0.8,
    verify: bool = False,
    against: list[str] | None = None,
    overlap: float = 0.7,
    line_words: int = 10,
    text_key: TextKey = "text",
    engine: Engine = "local",
    workers: Workers = 1,
    anew: Anew = False,
    as_json: AsJson = False,
) -> None:
    """Remove exact and near copies of documents, or copied lines.

    The first document of a cluster of copies stays, in the order of the input.
    stage.json shows removed documents with their similarity to what they are
    copies of.

    Example: [bold]linnet corpus dedup clean --out unique --verify --against test.jsonl[/]

    Args:
        folder (FOLDER): Folders of earlier stages, or any SOURCE of clean.
        level: [bold]document[/], or [bold]line[/]: remove lines that came before.
        threshold: Similarity of near copies, above 0 to 1: Jaccard of their 5-grams of words.
        verify: Compare near copies exactly; none below the threshold is removed.
        against: Evaluation set, any SOURCE; documents that hold its items are removed. Repeatable.
        overlap: Share of an item's 8-grams that counts as holding it, above 0 to 1.
        line_words: With --level line: shorter lines are never removed.
    """
    from linnet.corpus.dedup import DedupConfig
    from linnet.corpus.dedup import dedup as run_dedup

    given = {"level": level, "threshold": threshold, "verify": verify, "overlap": overlap, "line_words": line_words}
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
