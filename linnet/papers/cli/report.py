"""`linnet reproduce report`: one page of all that was run."""

from pathlib import Path

import typer

from linnet.options import options


@options
def report(
    folder: Path = Path("reproductions"),
    *,
    out: Path | None = None,
    open_: bool = False,
) -> None:
    """Write one page of all items that were run: printed numbers beside measured ones, verdicts and costs.

    The page needs no network. [bold]linnet reproduce report reproductions/[/]

    Args:
        folder: The --out folder of linnet reproduce.
        out: The page. Default: FOLDER/report/index.html.
        open_: Show the page in the browser.
    """
    import webbrowser

    from linnet.papers.page import write_reproductions

    page = write_reproductions(folder, out)
    typer.echo(page)
    if open_:
        webbrowser.open(page.resolve().as_uri())
