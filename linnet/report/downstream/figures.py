"""The figures of evaluations: each metric against compute, tokens and size, and the two steps from compute to it."""

import math
from html import escape
from pathlib import Path

from linnet.laws.fit.downstream import BEYOND
from linnet.report import downstream, drawing, shell, style, units
from linnet.report.downstream import Series
from linnet.report.downstream import figures as downstream_figures
from linnet.report.drawing import Canvas, Figure, run_row
from linnet.report.records import OneRun, Study, check_table, finite
from linnet.runs.files import write_atomic

MOST = 8  # metrics that are drawn; the table has all
WIDTH, HEIGHT = 262, 215  # of a panel, three in a row
FIELDS = ("run", "architecture", "N", "D", "C", "loss", "metric", "folder")


def draw(study: Study, series: list[Series]) -> list[Figure]:
    """The figures that the points allow."""
    if not series:
        return []
    figures = [against(study, series[:MOST])]
    fitted = [one for one in series if any(not fit.transfer.refused for fit in one.fits.values())]
    return figures + ([two_steps(study, fitted[:MOST])] if fitted else [])


def against(study: Study, series: list[Series]) -> Figure:
    """Each metric against training compute, tokens and size."""
    canvas = Canvas(study)
    rows = []
    for number, one in enumerate(series):
        panels = []
        points = _points(study, one)
        reach = [row["value"] for row in points] + ([one.chance] if one.chance is not None else [])
        for column, kind in (("C_", "flops"), ("D_", "tokens"), ("N_", "params")):
            x = canvas.alt.X(f"{column}:Q", **style.axis(canvas.alt, kind, _domain(points, column), most=5))
            y = canvas.alt.Y("value:Q", **_metric(canvas, one, reach, named=not panels))
            legend = number == 0 and not panels
            layers = [_chance(canvas, one, y)]
            if column == "C_":
                path = canvas.chart(points).mark_line(strokeWidth=1, clip=True)
                hue = _colour(canvas, legend)
                layers.append(path.encode(x, y, hue, detail="run:N", strokeOpacity=canvas.fade(0.3)))
            for last in (False, True):
                if column == "C_" or last:
                    layers.append(_dots(canvas, points, last, x, y, legend))
            panels.append(canvas.layer(*layers).properties(width=WIDTH, height=HEIGHT))
        rows.append(_row(canvas, panels, one))
    caption = (
        "What each run came to on data that it was not trained on: large marks stand for the last checkpoint of a run, "
        "small ones, joined by a line, for those on the way there. Where answers are counted, the dashed line is "
        "guessing. A metric of one model depends on its size and on its tokens as well as on compute, so marks of one "
        "colour need not lie on one curve."
    )
    drawn = _stacked(canvas, rows)
    return canvas.figure("evaluations", "Evaluations against compute, tokens and size", caption, drawn)


def over_steps(run: OneRun) -> Figure | None:
    """Each metric of the evaluations that the training of a run made, over its steps; None if it made none."""
    chances: dict[tuple[str, str], float | None] = {}
    points: dict[tuple[str, str], list[dict]] = {}
    for row in run.evaluations:
        for metric in row["shown"]:
            if finite(value := row["metrics"][metric]):
                key = row["evaluation"], metric
                chances[key] = row["chance"].get(metric)
                points.setdefault(key, []).append({"step": row["step"], "value": value})
    if not points:
        return None
    canvas = Canvas(run)
    alt, panels = canvas.alt, []
    last = max(row["step"] for row in (*run.curve, *run.validations, *run.evaluations))
    x = alt.X("step:Q", title="step", scale=alt.Scale(domain=[0, last], nice=False)).axis(format=",.0f", tickCount=5)
    for key, rows in points.items():
        one = Series(*key, chances[key], None)
        reach = [row["value"] for row in rows] + ([one.chance] if one.chance is not None else [])
        y = alt.Y("value:Q", **_metric(canvas, one, reach, named=False))
        told = [row | {"metric": f"{one.shown(row['value'])} at step {row['step']:,}"} for row in rows]
        base = canvas.chart(told)
        line = base.mark_line(style=style.INK, strokeWidth=1.8).encode(x, y)
        dots = base.mark_point(style=style.INK, size=34, filled=True, opacity=1)
        dots = dots.encode(x, y, tooltip=canvas.tooltip(("metric",)))
        panel = canvas.layer(_chance(canvas, one, y), line, dots)
        panels.append(panel.properties(width=WIDTH, height=HEIGHT, title=one.title))
    caption = (
        "The evaluations that the training made, with the averaged weights if the run keeps an average. "
        "Shares are of right answers, and the dashed line is guessing; of other metrics less is better. The name of a "
        "distance contains its network, and only distances of equal networks and numbers of samples are comparable."
    )
    drawn = canvas.grid(panels, drawing.columns_for(len(panels)))
    return canvas.figure("evaluations", "Evaluations during training", caption, drawn)


def two_steps(study: Study, series: list[Series]) -> Figure:
    """Compute to loss, loss to metric, and both together, for each metric that could be fitted."""
    canvas = Canvas(study)
    alt = canvas.alt
    rows = []
    for number, one in enumerate(series):
        points = [row for row in _points(study, one) if row["loss_"] is not None]
        last = [row for row in points if row["last"]]
        laws, curves, both = _laws(one), _curves(one), _both(one)
        compute = _domain([*last, *laws, *both], "C_")
        loss = style.padded([row["loss_"] for row in [*points, *curves]], False)
        reach = [row["value"] for row in [*points, *curves, *both]]
        reach += [] if one.chance is None else [one.chance]

        x = alt.X("C_:Q", **style.axis(alt, "flops", compute, most=5))
        seen = [row["loss_"] for row in [*last, *laws] if row["loss_"]]
        y = style.axis(alt, "loss", style.padded(seen, False), most=6, logarithmic=False)
        legend = number == 0
        dots = _dots(canvas, last, True, x, alt.Y("loss_:Q", **y), legend)
        first = canvas.layer(*_curve(canvas, laws, x, y, "loss_", legend), dots)

        x = alt.X("loss_:Q", **style.axis(alt, "loss", loss, most=6, logarithmic=False))
        y = _metric(canvas, one, reach)
        at = alt.Y("value:Q", **y)
        dots = [_dots(canvas, points, which, x, at, False) for which in (False, True)]
        second = canvas.layer(_chance(canvas, one, at), *_curve(canvas, curves, x, y, "value"), *dots)

        x = alt.X("C_:Q", **style.axis(alt, "flops", compute, most=5))
        dots = _dots(canvas, last, True, x, at, False)
        third = canvas.layer(_chance(canvas, one, at), *_curve(canvas, both, x, y, "value"), dots)
        panels = [panel.properties(width=WIDTH, height=HEIGHT) for panel in (first, second, third)]
        rows.append(_row(canvas, panels, one))
    caption = (
        "A metric of a task has no law of compute, but the loss has one, and the metric follows the loss. Left: the "
        "held-out loss of the last checkpoints and its law. Centre: the metric against the loss at the same step, all "
        "checkpoints; shares of right answers follow a logistic curve from guessing to 1, other metrics a power of "
        "the loss. Right: both together, dashed beyond the runs. Bands are 95 % bootstrap intervals over runs."
    )
    drawn = _stacked(canvas, rows)
    return canvas.figure("compute-to-metric", "From compute to each metric in two steps", caption, drawn)


def _row(canvas: Canvas, panels: list, series: Series):
    title = canvas.alt.TitleParams(text=series.title)
    # Each panel has its own legend, of which all but the first are none.
    return canvas.alt.hconcat(*panels, spacing=26, title=title).resolve_scale(color="independent", shape="independent")


def _stacked(canvas: Canvas, rows: list):
    return canvas.alt.vconcat(*rows, spacing=22).resolve_scale(color="independent", shape="independent")


def _points(study: Study, series: Series) -> list[dict]:
    """Returns one row per point: the numbers to draw, and the text of its tooltip."""
    known = {row["run"]: run_row(row) for _, row in study.table.iterrows()}
    found = []
    for _, point in series.points.iterrows():
        loss = point["loss"] if math.isfinite(point["loss"]) else None
        row = {**known[point["run"]], "D": f"{units.count(point['D'])} tokens", "C": units.flops(point["C"])}
        row |= {
            "loss": f"{units.loss(loss)} nats per token",
            "metric": f"{series.title} {series.shown(point['value'])}",
        }
        row |= {"N_": point["N"], "D_": point["D"], "C_": point["C"], "loss_": loss, "value": point["value"]}
        found.append(row | {"last": bool(point["last"])})
    return found


def _laws(series: Series) -> list[dict]:
    """L(C) of each architecture, as far as both steps together are drawn."""
    return [
        {"architecture": name, "C_": row.pop("C"), "loss_": row.pop("value"), **row}
        for name, fit in series.fits.items()
        for row in drawing.line(fit.law, BEYOND)
    ]


def _curves(series: Series) -> list[dict]:
    fitted = {name: fit.transfer for name, fit in series.fits.items() if not fit.transfer.refused}
    return [
        {"architecture": name, "loss_": row["loss"], "value": row["value"], "low": row["low"], "high": row["high"],
         "beyond": False}
        for name, step in fitted.items()
        for row in step.band
    ]  # fmt: skip


def _both(series: Series) -> list[dict]:
    return [
        {"architecture": name, **{k: row[k] for k in ("value", "low", "high", "beyond")}, "C_": row["C"]}
        for name, fit in series.fits.items()
        for row in fit.curve
    ]


def _curve(canvas: Canvas, rows: list[dict], x, y: dict, of: str, legend: bool = False) -> list:
    """A band, the curve, and its dashed part beyond the data; `y` is of `style.axis`, `of` the field on it."""
    alt, hue = canvas.alt, _colour(canvas, legend)
    banded = [row for row in rows if row["low"] is not None]
    area = canvas.chart(banded).mark_area(clip=True, opacity=1)
    low, high = alt.Y("low:Q", **y), alt.Y2("high:Q")
    layers = [area.encode(x, low, high, hue, fillOpacity=canvas.fade(0.12))]
    for beyond in (False, True):
        width, dash, strength = (1.4, [5, 4], 0.7) if beyond else (2, [1, 0], 1.0)
        line = canvas.chart([row for row in rows if row["beyond"] == beyond])
        line = line.mark_line(strokeWidth=width, strokeDash=dash, clip=True)
        layers.append(line.encode(x, alt.Y(f"{of}:Q", **y), hue, strokeOpacity=canvas.fade(strength)))
    return layers


def _dots(canvas: Canvas, points: list[dict], last: bool, x, y, legend: bool):
    rows = [row for row in points if row["last"] == last]
    size, strength = (48, 1.0) if last else (14, 0.55)
    dots = canvas.chart(rows).mark_point(size=size, filled=True, opacity=1, clip=True)
    look = {"fillOpacity": canvas.fade(strength), "tooltip": canvas.tooltip(FIELDS)}
    return dots.encode(x, y, _colour(canvas, legend), _shape(canvas, legend), **look)


def _colour(canvas: Canvas, legend: bool):
    return _keyed(canvas, canvas.alt.Color, style.colours(canvas.study.architectures), legend)


def _shape(canvas: Canvas, legend: bool):
    return _keyed(canvas, canvas.alt.Shape, style.shapes(canvas.study.architectures), legend)


def _keyed(canvas: Canvas, channel, known: dict[str, str], legend: bool):
    alt = canvas.alt
    shown = alt.Legend(title=None, orient="top", columns=4, symbolOpacity=1) if legend and len(known) > 1 else None
    return channel("architecture:N", scale=alt.Scale(domain=list(known), range=list(known.values())), legend=shown)


def _metric(canvas: Canvas, series: Series, reach: list[float], named: bool = True) -> dict:
    domain = style.padded([value for value in reach if value is not None], False)
    if series.chance is not None:
        domain = [max(domain[0], -0.02), min(domain[1], 1.02)]
    settings = style.axis(canvas.alt, "loss", domain, series.unit if named else None, most=6, logarithmic=False)
    settings["axis"]["minExtent"] = 32  # so that rows begin in one place, however long their numbers are
    return settings


def _chance(canvas: Canvas, series: Series, y):
    rows = [] if series.chance is None else [{"value": series.chance}]
    return canvas.chart(rows).mark_rule(style=style.QUIET, strokeDash=[3, 3], strokeWidth=1).encode(y)


def _domain(rows: list[dict], column: str) -> list[float]:
    return style.padded([row[column] for row in rows], True, least=1.5)


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
