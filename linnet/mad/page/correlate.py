"""The page of `linnet mad correlate`: MAD scores against compute-optimal loss (paper 004, Figure 5.1)."""

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from linnet.config import FIGURES, check_study
from linnet.mad.correlate import Correlation, Correlations, Point
from linnet.mad.page.figures import bare_score, by_name, points, shown_score, task_name
from linnet.mad.scores import LOSS
from linnet.report import shell, style, units
from linnet.report.drawing import Canvas, Figure
from linnet.study.collect import RUNS

SCORED = ("MAD score", "MAD loss (nats per target)")
NAMED = 14  # points up to which each has its name beside it
ALL = "all"


@dataclass
class Families:
    """What the page brings forward in place of architectures: their families, those with the most members first."""

    architectures: list[str]

    @classmethod
    def of(cls, found: Correlations) -> "Families":
        members = [point.family for point in found.points]
        return cls(sorted(set(members), key=lambda name: (-members.count(name), name)))


def write_correlate_page(
    found: Correlations, folder: str | Path, study: str | Path, out: str | Path | None = None
) -> Path:
    """Writes the page and its pictures; nothing is fitted.

    Args:
        folder: of the scores, study: of the laws; both to be named.
        out: the page; default `report/correlate.html` in the folder of the scores.

    Raises:
        ConfigError: the extra `study` is not installed, or the page cannot be written.
    """
    check_study(FIGURES, "report")
    page = shell.page_path(folder, out, shell.CORRELATION)
    families = Families.of(found)
    figures = [scatter(found, families), by_task(found, families)]
    command = _command(found, folder, study, out)
    facts = {
        "Scores": f"{found.metric.replace('_', ' ')} on the test split, of runs selected on "
        + ("the test split itself (legacy)" if found.legacy else "the validation split"),
        "Losses": f"of the laws that were fitted to the study ({escape(found.method)}), at one compute budget",
        "Intervals": f"95{units.SPACE}%: architectures drawn with replacement, and with each its law",
        "Scores trained with": shell.made_by(Path(folder) / RUNS),
        "Losses trained with": shell.made_by(Path(study) / RUNS),
    }
    parts = [
        f'<p class="lead">{escape(_summary(found))}</p>',
        *(f'<p class="notice">{escape(note[0].upper() + note[1:])}.</p>' for note in found.notes),
        *shell.findings(headlines(found)),
        shell.key(families.architectures),
        *(shell.section(figure, command) for figure in figures),
        *_tables(found, families),
        *shell.how_made(command, "the result rows of both folders", facts),
    ]
    title = f"MAD scores and scaling: {Path(folder).resolve().name}"
    shell.write_page(page, shell.document(title, parts), figures)
    return page


def _command(correlations: Correlations, folder: str | Path, study: str | Path, out: str | Path | None) -> str:
    """Returns the command that makes the same page again."""
    compute = f"{correlations.compute:.10g}"  # with fewer digits it could round up to a value outside the data of a law
    words = ["linnet", "mad", "correlate", folder, "--study", study, "--at", compute]
    for point in correlations.points:
        if point.study_name != point.architecture:
            words += ["--pair", f"{point.architecture}={point.study_name}"]
    options = {"metric": "metric", "legacy": "legacy", "bootstrap": "resamples", "seed": "seed"}
    changed = {
        option: getattr(correlations, name)
        for option, name in options.items()
        if getattr(correlations, name) != getattr(Correlations, name)  # what is given where nothing is
    }
    return shell.typed(*words, out=out, **changed)


def headlines(found: Correlations) -> list[str]:
    """The correlations in words, as HTML."""
    lines = [_told(correlation) for correlation in found.overall.values()]
    known = {task: correlation for task, correlation in found.tasks.items() if not correlation.refused}
    if known:
        picks = (max, min) if found.metric == LOSS else (min, max)
        best, worst = (pick(known, key=lambda task: known[task].spearman) for pick in picks)
        ranks = [_sign(known[task].spearman) for task in (best, worst)]
        ends = [known[task].spearman_interval for task in (best, worst)]
        low, high = ends[::-1] if found.metric == LOSS else ends
        if low and high and low[1] < high[0]:
            lines.append(
                f"Of single tasks <b>{task_name(best)}</b> (rank {ranks[0]}) tells more than "
                f"<b>{task_name(worst)}</b> ({ranks[1]})."
            )
        elif len(known) > 1:
            lines.append(f"How much single tasks tell cannot be told apart: rank {' to '.join(dict.fromkeys(ranks))}.")
    return lines


def titles(metric: str) -> tuple[str, ...]:
    """Returns the titles of the columns of `cells`."""
    return ("MAD loss", "MAD perplexity", "Loss", "Perplexity") if metric == LOSS else ("Score", "Loss")


def cells(point: Point, metric: str) -> tuple[str, ...]:
    """Returns score and compute-optimal loss of an architecture; by loss both also as perplexities."""
    if metric != LOSS:
        return points(point.score), units.loss(point.loss)
    return tuple(show(value) for value in (point.score, point.loss) for show in (units.loss, _perplexity))


def near(metric: str) -> str:
    """Returns what a correlation says that is as strong as can be."""
    if metric == LOSS:
        return "Near +1 losses on MAD tell how architectures scale: the lower the one, the lower the other"
    return "Near -1 the scores tell how architectures scale: the higher the score, the lower the loss"


def _perplexity(loss: float) -> str:
    return units.significant(math.exp(loss))


def scatter(found: Correlations, families: Families) -> Figure:
    """Score against compute-optimal loss (004, Figure 5.1), families coloured, with the intervals of both."""
    canvas = Canvas(families)
    rows = [_row(point, point.score, point.spread, found.metric) for point in found.points]
    drawn = _panel(canvas, rows, SCORED[found.metric == LOSS], len(rows) <= NAMED).properties(width=760, height=440)
    what = "mean loss on the tasks" if found.metric == LOSS else "score"
    caption = f"The {what} of each architecture against the loss of its law at {units.flops(found.compute)}."
    bars = ["95 % of the fit up and down"] * any(point.loss_interval is not None for point in found.points)
    bars += ["one standard deviation over seeds to the sides"] * any(point.spread for point in found.points)
    caption += f" Bars: {', '.join(bars)}." if bars else ""
    caption += " The dashed line is the straight one with the least squares."
    if any(point.beyond for point in found.points):
        caption += " Hollow points: the law is extrapolated there."
    return canvas.figure("scaling", "Score against compute-optimal loss", caption, drawn)


def by_task(found: Correlations, families: Families) -> Figure:
    """Draws the same figure for each task alone."""
    canvas = Canvas(families)
    panels = []
    for task, correlation in found.tasks.items():
        rows = [_row(point, point.tasks[task], None, found.metric) for point in found.points if task in point.tasks]
        title = task_name(task) + ("" if correlation.refused else f": rank {_sign(correlation.spearman)}")
        panel = _panel(canvas, rows, ("accuracy", SCORED[1])[found.metric == LOSS], False).properties(
            width=252, height=220
        )
        panels.append(panel.properties(title=title))
    drawn = canvas.grid(panels, 3)
    what = "evaluation loss" if found.metric == LOSS else "accuracy"
    caption = f"The {what} on each task in place of the score, with its rank correlation."
    return canvas.figure("scaling-by-task", "Each task alone", caption, drawn)


def _panel(canvas: Canvas, rows: list[dict], title: str, named: bool):
    alt = canvas.alt
    lows, highs = [row["low"] for row in rows], [row["high"] for row in rows]
    spans = [row[end] for row in rows for end in ("left", "right")]
    axis = alt.Axis(tickCount=6) if title == SCORED[1] else alt.Axis(format=".1~%", tickCount=6)
    across = {"title": title, "scale": alt.Scale(domain=style.padded(spans, False), nice=False, zero=False)}
    x = alt.X("score:Q", axis=axis, **across)
    y = style.axis(alt, "loss", style.padded(lows + highs, False), "compute-optimal loss", 7, logarithmic=False)
    up, colour = alt.Y("loss:Q", **y), by_name(canvas, "Color", {"columns": 6}, "family")
    base = canvas.chart(rows)
    line = canvas.chart(_line(rows)).mark_line(strokeDash=[5, 4], color="#8a8a8f", strokeWidth=1.2, clip=True)
    rule = {"strokeWidth": 1.3}
    bars = base.mark_rule(**rule).encode(x, alt.Y("low:Q", **y), alt.Y2("high:Q"), colour)
    sides = base.mark_rule(**rule).encode(alt.X("left:Q", axis=axis, **across), up, alt.X2("right:Q"), colour)
    layers = [line.encode(x, up)]
    layers += [mark.encode(strokeOpacity=canvas.fade(0.6)) for mark in (bars, sides)]
    tooltip = canvas.tooltip(("name", "family", "score of it", "loss of it", "law"))
    shape = by_name(canvas, "Shape", {"columns": 6}, "family")
    for beyond in (False, True):
        dots = canvas.chart([row for row in rows if row["beyond"] == beyond])
        dots = dots.mark_point(size=84, filled=not beyond, strokeWidth=1.8, opacity=1)
        layers.append(dots.encode(x, up, colour, shape, opacity=canvas.fade(), tooltip=tooltip))
    if named:
        text = base.mark_text(align="left", dx=9, dy=-7, fontSize=11)
        layers.append(text.encode(x, up, text="name:N", color=colour, opacity=canvas.fade()))
    return canvas.layer(*layers)


def _row(point: Point, score: float, spread: float | None, metric: str) -> dict:
    low, high = point.loss_interval or (point.loss, point.loss)
    span = f" ({units.loss(low)} to {units.loss(high)})" if point.loss_interval else ""
    return {
        "run": point.architecture,
        "architecture": point.family,  # what is brought forward here
        "name": point.architecture,
        "family": point.family,
        "score": score,
        "left": score - (spread or 0.0),
        "right": score + (spread or 0.0),
        "loss": point.loss,
        "low": low,
        "high": high,
        "beyond": point.beyond,
        "score of it": shown_score(score, metric) + (f" ± {bare_score(spread, metric)}" if spread else ""),
        "loss of it": f"{units.loss(point.loss)} nats per token{span}",
        "law": f"{point.study_name}, {'extrapolated' if point.beyond else 'inside its data'}",
    }


def _line(rows: list[dict]) -> list[dict]:
    """Returns the ends of the least-squares line through the points; none if all scores are equal."""
    scores, losses = (np.array([row[key] for row in rows]) for key in ("score", "loss"))
    if len(rows) < 2 or np.ptp(scores) < 1e-12:
        return []
    slope, offset = np.polyfit(scores, losses, 1)
    ends = (float(scores.min()), float(scores.max()))
    return [{"score": end, "loss": float(offset + slope * end), "architecture": ""} for end in ends]


def _summary(correlations: Correlations) -> str:
    families = len({point.family for point in correlations.points})
    word = "family" if families == 1 else "families"
    number, compute = len(correlations.points), units.flops(correlations.compute)
    return f"{number} architectures of {families} {word}, at {compute} of training."


def _told(row: Correlation) -> str:
    name = "Over all architectures" if row.group == ALL else row.group.capitalize()
    if row.refused:
        return f"{escape(name)}: <b>no number</b>, {escape(row.refused)}."
    text = f"{escape(name)} ({row.architectures}): rank correlation <b>{_sign(row.spearman)}</b>"
    text += (
        f" (95{units.SPACE}%: {_span(row.spearman_interval)})" if row.spearman_interval else ", too few for an interval"
    )
    return f"{text}, linear {_sign(row.pearson)}."


def _tables(correlations: Correlations, families: Families) -> list[str]:
    rows: list[tuple] = []
    for row in (*correlations.overall.values(), *correlations.tasks.values()):
        numbers = (_sign(row.spearman), _span(row.spearman_interval), _sign(row.pearson), _span(row.pearson_interval))
        rows.append((escape(task_name(row.group)), row.architectures, *numbers))
    table = shell.table("correlations", ("Group", "#n", "#Rank", "#95 %", "#Linear", "#95 %"), rows)
    caption = (
        f"{near(correlations.metric).replace('-1', '−1')}. Few architectures make wide intervals. Within families: "
        "after the mean of each is taken out; between families: of their means."
    )
    parts = shell.captioned("Correlations", caption, table)
    rows = []
    for point in sorted(correlations.points, key=lambda point: point.architecture):
        swatch = shell.swatch(families.architectures, point.family)
        span = " to ".join(map(units.loss, point.loss_interval)) if point.loss_interval else units.MISSING
        names = (escape(point.architecture), escape(point.study_name), swatch)
        rows.append((*names, *cells(point, correlations.metric), span))
    columns = ("Architecture", "In the study", "Family", *(f"#{name}" for name in titles(correlations.metric)), "#95 %")
    return [*parts, "<h2>Architectures</h2>", shell.table("points", columns, rows, "sortable")]


def _sign(value: float | None) -> str:
    return units.MISSING if value is None else f"{value:+.2f}".replace("-", "−")


def _span(ends: tuple[float, float] | None) -> str:
    return units.MISSING if ends is None else f"{_sign(ends[0])} to {_sign(ends[1])}"
