"""`linnet report`: a page and pictures from a study folder, or from the run of an image classifier."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    study: Annotated[
        Path,
        typer.Argument(
            help="The folder that linnet study made, a folder of runs, or the run of an image model.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; the pictures go beside it. Default: STUDY/report/index.html.", show_default=False),
    ] = None,
    bootstrap: Annotated[int, typer.Option(help="Resamples for the 95 % intervals; 0 for none.", min=0)] = 1000,
    laws: Annotated[bool, typer.Option(help="Fit the further laws too (docs/laws.md).")] = True,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave runs out of the fits, such as run=NAME, as in linnet fit.", metavar="COLUMN=VALUE"),
    ] = None,
    best_of: Annotated[
        bool, typer.Option("--best-of", help="Fit the lowest loss of each architecture, N and D (after a sweep).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's path and its conclusions as JSON.")] = False,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Write the report of a study: one page that needs no network, and a PNG and an SVG of each figure.

    It shows the laws of all architectures with their intervals, loss against
    compute, training curves, IsoFLOP curves, optimal sizes, state size and
    cost. If runs were evaluated (docs/evaluation.md), it also shows each metric
    against compute, and the fits from compute to loss to metric, which are
    printed too. Hover over a point to see its run; numbers link to run folders.
    The command trains nothing, and also works on an unfinished study.

    [bold]linnet report studies/demo --open[/]
    """
    import json
    import webbrowser
    from contextlib import nullcontext

    from rich.console import Console

    from linnet.config import FIGURES, FITS, check_study

    check_study(FIGURES + FITS, "report")
    from linnet.report import write_report
    from linnet.report.page import CONCLUSIONS
    from linnet.report.run.page import writer_of

    console, lines = Console(stderr=True, highlight=False, soft_wrap=True, markup=False), [CONCLUSIONS]
    write_run = writer_of(study)
    with console.status("fitting the laws, drawing the figures") if console.is_terminal else nullcontext():
        if write_run is not None:
            page = write_run(study, out)
        else:
            left_out, lines = {"exclude": exclude or (), "best_of": best_of}, []
            page = write_report(study, out, bootstrap=bootstrap, laws=laws, **left_out, tell=lines.append)
    found = {"page": str(page), "conclusions": lines[lines.index(CONCLUSIONS) + 1 :]}
    typer.echo(json.dumps(found) if as_json else page)
    for line in lines if write_run is None else ():
        console.print(line)
    if open_:
        webbrowser.open(page.resolve().as_uri())
