"""`linnet reproduce report`: one page of all that was run."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="The --out folder of linnet reproduce.")] = Path("reproductions"),
    out: Annotated[
        Path | None, typer.Option(help="The page. Default: FOLDER/report/index.html.", show_default=False)
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Write one page of all items that were run: printed numbers beside measured ones, verdicts and costs.

    The page needs no network. [bold]linnet reproduce report reproductions/[/]
    """
    import webbrowser

    from linnet.report.reproduce import write_reproductions

    page = write_reproductions(folder, out)
    typer.echo(page)
    if open_:
        webbrowser.open(page.resolve().as_uri())
