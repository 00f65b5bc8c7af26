"""`linnet mad report` and `linnet mad correlate`: pages about the scores of a MAD folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linnet.config import FIGURES, FITS, check_study, gather, refuse
from linnet.options import RULED, AsJson, echo_json, make_table, options, working


@options
def report(
    folder: Path,
    *,
    out: Path | None = None,
    metric: str | None = None,
    legacy: bool | None = None,
    open_: bool = False,
) -> None:
    """Write the report of MAD scores: one page that needs no network, and a PNG and an SVG of each figure.

    It shows the heatmap of architectures and tasks, how each task gets harder,
    score against state and parameters, and the paper's findings (stripes,
    heads, experts) as checks with numbers. Nothing is trained.

    [bold]linnet mad report mad/core --open[/]

    Args:
        folder: The folder that linnet mad run made.
        out: The page; the pictures go beside it. Default: FOLDER/report/index.html.
        metric (accuracy|macro_batch): Metric of a run, on the test split (default: that of the budget: accuracy;
            published: macro_batch).
        legacy: Select runs on the test split, as the published implementation did (default: only of the budget
            published).
        open_: Show the page in the browser.
    """
    import webbrowser

    from linnet.mad.page import write_mad_report

    with working("drawing the figures"):
        page = write_mad_report(folder, out, metric=metric, legacy=legacy)
    typer.echo(page)
    if open_:
        webbrowser.open(page.resolve().as_uri())


@options
def correlate(
    folder: Path,
    *,
    study: Path,
    at: float | None = None,
    pair: list[str] | None = None,
    metric: str = "accuracy",
    legacy: bool = False,
    bootstrap: Annotated[int, typer.Option(min=0)] = 1000,
    seed: int = 0,
    out: Path | None = None,
    page: bool = True,
    as_json: AsJson = False,
) -> None:
    """Correlate MAD scores with the compute-optimal loss of a study: do the scores tell how architectures scale?

    Linear (Pearson) and rank (Spearman) correlation over all architectures,
    inside families and between them, and of each task alone. A value near -1
    means that the scores predict the loss: the higher the score, the lower the
    loss. With --metric loss it is +1.

    [bold]linnet mad correlate mad/core --study studies/ladder --at 1e12[/]

    Args:
        folder: The folder that linnet mad run made.
        study: The folder that linnet study made, of the same architectures.
        at: FLOPs at which losses are compared. Default: the largest that all laws were fitted to.
        pair (SCORED=STUDIED): Where the study has another name: --pair mad-gla-swiglu=gla; may be given again.
        metric (METRIC): accuracy, macro_batch or loss of a run, on the test split; loss is in nats per target, and also
            shown as perplexity.
        legacy: Select runs on the test split, as the published implementation did.
        bootstrap: Resamples for the 95 % intervals; 0 for none.
        seed: Seed of the resampling.
        out: The page; the pictures go beside it. Default: correlate.html in FOLDER/report.
        page: Write a page with the scatter of scores and losses.
        as_json: Print one JSON object, in full precision.
    """
    from linnet.mad.correlate import correlate as compute
    from linnet.mad.correlate import read

    problems: list[str] = []
    names, sources = {}, None
    page = page and (out is not None or not as_json)
    with gather(problems):
        check_study(FITS, "correlate")
    readable = not problems
    if page:
        with gather(problems):
            check_study(FIGURES, "correlate", ", or give --no-page")
        if out is not None or folder.is_dir():  # reading reports the problems of any other folder
            from linnet.report.shell import CORRELATION, check_page, page_name

            with gather(problems):
                check_page(page_name(folder, out, CORRELATION))
    if at is not None and not 0 < at < float("inf"):
        problems.append(f"--at {at:g}: give FLOPs above zero, such as 1e12")
    with gather(problems):
        names = _names(pair or [])
    if readable:
        with gather(problems):
            sources = read(folder, study, metric=metric, legacy=legacy)
    refuse(problems, "correlate")
    with working("fitting the laws") as show:
        correlations = compute(
            sources,
            names,
            compute=at,
            resamples=bootstrap,
            seed=seed,
            progress=show,
        )
    if as_json:
        echo_json(correlations.to_dict(), allow_nan=False)
    else:
        _print(correlations)
    if page:
        from linnet.mad.page.correlate import write_correlate_page

        written = write_correlate_page(correlations, folder, study, out)
        typer.echo(f"page: {written}", err=as_json)


def _names(pairs: list[str]) -> dict[str, str]:

    names, problems = {}, []
    for text in pairs:
        scored, equals, studied = (part.strip() for part in text.partition("="))
        if not (scored and equals and studied):
            problems.append(f"--pair {text!r}: write SCORED=STUDIED, such as mad-gla-swiglu=gla")
        elif scored in names:
            problems.append(f"--pair {text!r}: {scored} is paired with {names[scored]} already; drop one of the pairs")
        else:
            names[scored] = studied
    refuse(problems, "command line")
    return names


def _print(correlations) -> None:
    from linnet.mad.page.correlate import cells, near, titles
    from linnet.report import units

    console = Console(soft_wrap=True, highlight=False)
    where = units.flops(correlations.compute)
    style = RULED | {"title": f"MAD score and compute-optimal loss at {where}", "title_style": ""}
    columns = [f"#{title.replace('MAD', 'mad').lower()}" for title in titles(correlations.metric)]
    fold = "~" if len(columns) > 2 else ""  # perplexities need the width
    points = make_table(f"{fold}architecture", "family", *columns, "#95 %", no_wrap=True, style=style)
    for point in sorted(correlations.points, key=lambda point: point.architecture):
        named = point.architecture
        named += f" = {point.study_name}" if point.study_name != point.architecture else ""
        span = " to ".join(units.loss(end) for end in point.loss_interval) if point.loss_interval else units.MISSING
        points.add_row(named, point.family, *cells(point, correlations.metric), span)
    console.print(points)
    table = make_table("correlation", "#n", "#rank", "#95 %", "#linear", "#95 %", no_wrap=True, style=RULED)
    for group in (correlations.overall, correlations.tasks):
        for row in group.values():
            _add(table, row)
        table.add_section()
    console.print(table)
    console.print(f"{near(correlations.metric)}. With few architectures, intervals are wide.")
    refused = [f"{row.group}: {row.refused}" for row in correlations.overall.values() if row.refused]
    for note in [*refused, *correlations.notes]:
        console.print(f"note: {note}", markup=False, style="yellow")


def _add(table, row) -> None:
    from linnet.mad.page.figures import task_name

    name = task_name(row.group)
    if row.refused:
        table.add_row(name, str(row.architectures), "–", "–", "–", "–")
        return
    spans = [
        f"{span[0]:+.2f} to {span[1]:+.2f}" if span else "–" for span in (row.spearman_interval, row.pearson_interval)
    ]
    table.add_row(name, str(row.architectures), f"{row.spearman:+.3f}", spans[0], f"{row.pearson:+.3f}", spans[1])
