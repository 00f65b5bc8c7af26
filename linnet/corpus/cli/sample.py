"""`linnet corpus sample`: documents for people to judge."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linnet.config import ConfigError
from linnet.corpus.cli.stages import Sources, TextKey
from linnet.options import AsJson, echo_json, make_table, options


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
    from linnet.corpus.page.review import write_review
    from linnet.corpus.scoring.sample import draw_sample
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
