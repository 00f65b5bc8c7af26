"""`linnet report`: a page and pictures from a study folder, or from the run of an image classifier."""

from pathlib import Path
from typing import Annotated

import typer

from linnet.options import AsJson, open_page, options, working


@options
def report(
    study: Path,
    *,
    out: Path | None = None,
    bootstrap: Annotated[int, typer.Option(min=0)] = 1000,
    laws: bool = True,
    exclude: list[str] | None = None,
    best_of: bool = False,
    as_json: AsJson = False,
    open_: bool = False,
) -> None:
    """Write the report of a study: one page that needs no network, and a PNG and an SVG of each figure.

    It shows the laws of all architectures with their intervals, loss against
    compute, training curves, IsoFLOP curves, optimal sizes, state size and
    cost. If runs were evaluated (docs/evaluation.md), it also shows each metric
    against compute, and the fits from compute to loss to metric, which are
    printed too. Hover over a point to see its run; numbers link to run folders.
    The command trains nothing, and also works on an unfinished study.

    [bold]linnet report studies/demo --open[/]

    Args:
        study: The folder that linnet study made, a folder of runs, or the run of an image model.
        out: The page; the pictures go beside it. Default: STUDY/report/index.html.
        bootstrap: Resamples for the 95 % intervals; 0 for none.
        laws: Fit the further laws too (docs/laws.md).
        exclude (COLUMN=VALUE): Leave runs out of the fits, such as run=NAME, as in linnet fit.
        best_of: Fit the lowest loss of each architecture, N and D (after a sweep).
        as_json: Print the page's path and its conclusions as JSON.
        open_: Show the page in the browser.
    """
    import json

    from rich.console import Console

    from linnet.config import FIGURES, FITS, check_study

    check_study(FIGURES + FITS, "report")
    from linnet.report import write_report
    from linnet.report.page import CONCLUSIONS
    from linnet.report.run import writer_of

    console, lines = Console(stderr=True, highlight=False, soft_wrap=True, markup=False), [CONCLUSIONS]
    write_run = writer_of(study)
    with working("fitting the laws, drawing the figures", console):
        if write_run is not None:
            page = write_run(study, out)
        else:
            left_out, lines = {"exclude": exclude or (), "best_of": best_of}, []
            page = write_report(study, out, bootstrap=bootstrap, laws=laws, **left_out, tell=lines.append)
    record = {"page": str(page), "conclusions": lines[lines.index(CONCLUSIONS) + 1 :]}
    typer.echo(json.dumps(record) if as_json else page)
    for line in lines if write_run is None else ():
        console.print(line)
    if open_:
        open_page(page)
