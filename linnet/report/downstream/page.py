"""The page of `linnet fit --downstream`: metrics of a table of evaluated checkpoints, without a study folder."""

from html import escape
from pathlib import Path

from linnet.report import downstream, shell
from linnet.report.downstream import figures as downstream_figures
from linnet.report.records import Study, check_table
from linnet.runs.files import write_atomic


def write_points(source: Path, points, series: list[downstream.Series], out: Path) -> Path:
    """Writes the page and its figures.

    Args:
        source: the table that was read, for the title and the command.
        points: from `linnet.laws.fit.table.load_points`.
        series: one per task, with fits.
        out: the page.

    Returns:
        The path of the page.
    """
    shell.check_page(out)
    runs = points[points["last"]].drop_duplicates(["architecture", "run"])
    rows = runs.rename(columns={"N": "params_non_embedding", "D": "tokens", "C": "flops"}).assign(
        status="done", path=None
    )
    study = Study(source.parent, {}, check_table(rows), None, planned=False)
    command = shell.typed("linnet", "fit", source, downstream=True, out=out)
    figures = downstream_figures.draw(study, series)
    for figure in figures:
        shell.write_pictures(out.parent, figure)
    parts = [
        f'<ul class="findings">{"".join(f"<li>{line}</li>" for line in downstream.finding(series))}</ul>',
        shell.key(study.architectures),
        *(shell.section(figure, command) for figure in figures),
        "<h2>From compute to metrics</h2>",
        downstream.table(study, series),
        *(f'<p class="fine">{escape(line)}</p>' for line in downstream.lines(series)),
    ]
    write_atomic(out, shell.document(f"Metrics: {source.name}", parts))
    return out
