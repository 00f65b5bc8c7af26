"""The figures of MAD scores: the heatmap, difficulty curves of each task, score against state and parameters."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from linnet.mad.checks import Check
from linnet.mad.results import Result
from linnet.mad.scores import LOSS, Score, Scores, SettingScore, TaskScore, score
from linnet.mad.settings import mad_settings
from linnet.report import style, units
from linnet.report.drawing import Canvas, Figure

ROW, CELL = 27, 102  # height and width of a cell of the heatmap
LIGHT = 0.46  # accuracy from which dark text is easier to read on the colour of a cell than white
NARROW = 0.03  # of a size: what an axis shows to both sides at least
WIDTHS = {1: 430, 2: 390, 3: 252, 4: 182}  # of the panels of a row, by their number
SAMPLES = "samples"
LEGEND = {"columns": 3, "labelLimit": 280}
VARIABLES = {
    "seq_len": "sequence length",
    "vocab_size": "vocabulary",
    SAMPLES: "training samples (thousands)",
    "frac_noise": "share of noise",
    "tokens_to_copy": "tokens to copy",
}


@dataclass
class Records:
    """What a MAD report is drawn from.

    Attributes:
        architectures: those of `Scores.whole` first; of both kinds by name.
    """

    folder: Path
    results: list[Result]
    scores: Scores
    checks: list[Check]

    @property
    def architectures(self) -> list[str]:
        whole = self.scores.whole
        return [*whole, *(name for name in self.scores if name not in whole)]


def draw(records: Records) -> list[Figure]:
    """All figures that the runs allow, in the order of the page."""
    curves = [difficulty(records, task) for task in records.scores.tasks]
    return [figure for figure in (heatmap(records), losses(records), *curves, sizes(records)) if figure is not None]


def task_name(task: str) -> str:
    return task.replace("_", " ").replace("in context", "in-context")


def points(value: float) -> str:
    """Returns an accuracy in per cent with one decimal, and without a minus sign if it rounds to zero."""
    return f"{round(100 * value, 1) or 0.0:.1f}".replace("-", "−")


def losses(records: Records) -> Figure | None:
    """The heatmap by evaluation loss (004, Figure B.1, right); None if a run has no loss."""
    if any(math.isnan(result.loss) for result in records.results if result.ended):
        return None
    return heatmap(replace(records, scores=score(records.results, metric=LOSS, legacy=records.scores.legacy)))


def bare_score(value: float, metric: str) -> str:
    """Returns a score without its unit: per cent, or nats per target."""
    return units.loss(value) if metric == LOSS else points(value)


def shown_score(value: float, metric: str) -> str:
    return bare_score(value, metric) + (" nats" if metric == LOSS else " %")


def heatmap(records: Records) -> Figure:
    """Architectures by tasks (004, Figure 3.7)."""
    canvas = Canvas(records)
    alt = canvas.alt
    rows, totals, metric = [], [], records.scores.metric
    for mad_score in records.scores.values():
        totals.append(
            _cell(mad_score, mad_score if mad_score.architecture in records.scores.whole else None, "score", metric)
        )
        rows += [_cell(mad_score, mad_score.tasks.get(task), task_name(task), metric) for task in records.scores.tasks]
    most = max(row["value"] for row in [*rows, *totals] if row["value"] is not None) if metric == LOSS else None
    y = alt.Y("architecture:N", sort=records.architectures, title=None)
    named = y.axis(domain=False, ticks=False, labelLimit=320, labelFontSize=12, labelPadding=8)
    parts = [_cells(canvas, totals, named, ["score"], most)]
    parts.append(_cells(canvas, rows, y.axis(None), [task_name(task) for task in records.scores.tasks], most))
    by_loss = metric == LOSS
    caption = (
        f"{'Nats per target' if by_loss else 'Accuracy in per cent'} on the test split ({_metric(records.scores)}): of "
        "each task the mean over its settings, and the score, the mean over the tasks. Hover over a cell for its "
        "settings and the spread over seeds."
    )
    if not by_loss and (guesses := chances(records)):
        shown = units.listed([f"{points(chance)} % ({units.listed(names)})" for chance, names in guesses.items()])
        caption += f" By guessing: {shown}."
    if not all(score.comparable for score in records.scores.whole.values()):
        caption += " A score with an asterisk is not comparable with others."
    if any(row["value"] is None for row in rows):
        caption += (
            " A dash is a task of which no run has ended; without all settings that others have there is no score."
        )
    drawn = canvas.joined("hconcat", parts, 12)
    title = "Architectures and tasks" + (", by evaluation loss" if by_loss else "")
    return canvas.figure("losses" if by_loss else "scores", title, caption, drawn)


def chances(records: Records) -> dict[float, list[str]]:
    """Returns what guessing gives on the tasks: the mean over the settings that were run -> names of the tasks."""
    known = {
        (spec, setting.name): setting.task.chance for spec in ("paper", "mad-lab") for setting in mad_settings(spec)
    }
    guesses: dict[float, list[str]] = {}
    for task in records.scores.tasks:
        ran = {(result.spec or "paper", result.setting) for result in records.results if result.task == task}
        if levels := [known[setting] for setting in ran if setting in known]:
            guesses.setdefault(round(fmean(levels), 6), []).append(task_name(task))
    return guesses


def difficulty(records: Records, task: str) -> Figure | None:
    """Draws the accuracy on one task as one variable makes it harder, one panel per variable."""
    canvas = Canvas(records)
    alt = canvas.alt
    varied = dict.fromkeys(
        setting.varied
        for score in records.scores.values()
        if task in score.tasks
        for setting in score.tasks[task].settings.values()
        if setting.varied
    )
    panels = []
    for variable in varied:
        rows = _curve_rows(records, task, variable)
        places = sorted({row["value"] for row in rows}, reverse=variable == SAMPLES)
        if len(places) < 2:
            continue
        x = alt.X(
            "place:N",
            sort=[_value(place, variable) for place in places],
            title=VARIABLES.get(variable, variable.replace("_", " ")),
            axis=alt.Axis(labelAngle=0),
        )
        title = "accuracy" if not panels else None
        y = alt.Y("score:Q", title=title, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=5))
        base = canvas.chart(rows)
        lines = base.mark_line(strokeWidth=1.6)
        lines = lines.encode(x, y, _colour(canvas), strokeOpacity=canvas.fade(0.75))
        dots = base.mark_point(size=46, filled=True, opacity=1)
        tooltip = canvas.tooltip(("architecture", "setting", "accuracy", "spread", "learning rate", "weight decay"))
        dots = dots.encode(x, y, _colour(canvas), _shape(canvas), fillOpacity=canvas.fade(), tooltip=tooltip)
        panels.append(canvas.layer(lines, dots))
    if not panels:
        return None
    width = WIDTHS.get(len(panels), 182)
    panels = [panel.properties(width=width, height=230) for panel in panels]
    drawn = canvas.grid(panels, 4, 18)
    caption = "One variable changes at a time, easy on the left and hard on the right; the others stay at the baseline."
    name = f"difficulty-{task.replace('_', '-')}"
    title = f"{task_name(task).capitalize()}, as it gets harder"
    return canvas.figure(name, title, caption, drawn)


def sizes(records: Records) -> Figure | None:
    """The score against the fixed state of the model and against its parameters."""
    canvas = Canvas(records)
    alt = canvas.alt
    rows = [_size_row(score) for score in records.scores.whole.values()]
    ends = [row[end] for row in rows for end in ("low", "high")]
    panels = []
    for field, what in (("state", "fixed state of the model (numbers)"), ("parameters", "parameters of the model")):
        known = [row for row in rows if row[field]]
        if not known:
            continue
        values = [row[field] for row in known]
        wide = [min(values) * (1 - NARROW), max(values) * (1 + NARROW)]  # else equal models have an axis of equal ticks
        x = alt.X(f"{field}:Q", **style.axis(alt, "params", style.padded(wide, True), what, 5))
        axis = alt.Axis(format=".1~%", tickCount=6)
        scale = alt.Scale(domain=style.padded(ends, False), zero=False, nice=False)
        common = {"title": None if panels else "score", "scale": scale, "axis": axis}
        bars = canvas.chart([row for row in known if row["low"] < row["high"]]).mark_rule(strokeWidth=1.4)
        low, high = alt.Y("low:Q", **common), alt.Y2("high:Q")
        layers = [bars.encode(x, low, high, _colour(canvas), strokeOpacity=canvas.fade(0.7))]
        for comparable in (True, False):
            dots = canvas.chart([row for row in known if row["comparable"] == comparable])
            dots = dots.mark_point(size=76, filled=comparable, strokeWidth=1.8, opacity=1)
            shown = ("architecture", "accuracy", "spread", "state size", "size", "standing")
            tooltip, y = canvas.tooltip(shown), alt.Y("score:Q", **common)
            layers.append(dots.encode(x, y, _colour(canvas), _shape(canvas), opacity=canvas.fade(), tooltip=tooltip))
        panels.append(canvas.layer(*layers).properties(width=395, height=330))
    if not panels:
        return None
    caption = (
        "The score against what a sequence carries from token to token, and against parameters at the baseline of the "
        "first task."
    )
    if any(row["low"] < row["high"] for row in rows):
        caption += " Bars are one standard deviation over seeds to both sides."
    if not all(row["comparable"] for row in rows):
        caption += " Hollow points are scores that are not comparable with the others."
    without = [row["architecture"] for row in rows if not row["state"]]
    if without and len(without) < len(rows):
        caption += f" Without a fixed state, so not in the first panel: {units.listed(without)}."
    drawn = canvas.joined("hconcat", panels, 20)
    return canvas.figure("score-against-size", "Score against state and parameters", caption, drawn)


def _cell(score: Score, part: Score | TaskScore | None, column: str, metric: str) -> dict:
    where = {"run": score.architecture, "architecture": score.architecture, "task": column}
    if part is None:
        return where | {"value": None, "text": units.MISSING}
    return where | {
        "value": part.score,
        "text": bare_score(part.score, metric) + ("" if score.comparable or column != "score" else "*"),
        "loss" if metric == LOSS else "accuracy": shown_score(part.score, metric),
        "spread": _spread(part.spread, metric),
        "settings": str(len(part.settings)),
    }


def _cells(canvas: Canvas, rows: list[dict], y, columns: list[str], most: float | None):
    # A loss of 0 has the colour of an accuracy of 1, and the largest loss that of 0.
    alt = canvas.alt
    axis = alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False, labelFontSize=11, labelLimit=CELL + 8)
    x = alt.X("task:N", sort=columns, title=None, axis=axis)
    scale = alt.Scale(domain=[0, 1] if most is None else [most, 0], scheme="viridis")
    colour = alt.Color("value:Q", scale=scale, legend=None)
    tooltip = canvas.tooltip(("architecture", "task", "accuracy" if most is None else "loss", "spread", "settings"))
    base = canvas.chart(rows)
    known = base if all(row["value"] is not None for row in rows) else base.transform_filter("datum.value !== null")
    cells = known.mark_rect().encode(x, y, colour, fillOpacity=canvas.fade(), tooltip=tooltip)
    light = f"datum.value {'>' if most is None else '<'} {LIGHT if most is None else (1 - LIGHT) * most}"
    light = f"datum.value === null || {light}"
    dark = alt.condition(light, alt.value("#14141a"), alt.value("#ffffff"))
    text = base.mark_text(fontSize=12).encode(x, y, text="text:N", color=dark, opacity=canvas.fade())
    names = len(canvas.study.architectures)
    return canvas.layer(cells, text).properties(width=CELL * len(columns), height=ROW * names)


def _curve_rows(records: Records, task: str, variable: str) -> list[dict]:
    rows = []
    for name, mad_score in records.scores.items():
        settings = mad_score.tasks[task].settings.values() if task in mad_score.tasks else ()
        for setting in settings:
            if setting.varied in ("", variable):
                value = _place(setting, task, variable)
                if value is not None:
                    rows.append(_curve_row(name, setting, (value, variable), records.scores.metric))
    return rows


def _curve_row(name: str, setting: SettingScore, place: tuple[float, str], metric: str) -> dict:
    best = list(setting.best.values())
    ends = [getattr(run, metric) for run in best]
    return {
        "run": name,
        "architecture": name,
        "setting": setting.name,
        "value": place[0],
        "place": _value(*place),
        "score": setting.score,
        "accuracy": points(setting.score) + " %",
        "spread": f"{points(min(ends))} to {points(max(ends))} over {len(ends)} seeds" if len(ends) > 1 else "one seed",
        "learning rate": ", ".join(dict.fromkeys(f"{run.learning_rate:g}" for run in best)),
        "weight decay": ", ".join(dict.fromkeys(f"{run.weight_decay:g}" for run in best)),
    }


def _place(setting: SettingScore, task: str, variable: str) -> float | None:
    """The value of the variable in a setting; that of the baseline is known from the benchmark."""
    if setting.varied:
        return float(setting.name.rpartition("=")[2])
    spec = next(iter(setting.best.values())).spec or "paper"
    for known in mad_settings(spec):
        if known.task.name == task and not known.varied:
            return float(known.train_samples if variable == SAMPLES else getattr(known.task, variable))
    return None


def _value(value: float, variable: str) -> str:
    """Returns a short label for an axis, where five sample counts must fit."""
    if variable == SAMPLES:
        return f"{value / 1000:g}"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _size_row(score: Score) -> dict:
    spread = score.spread or 0.0
    return {
        "run": score.architecture,
        "architecture": score.architecture,
        "score": score.score,
        "low": score.score - spread,
        "high": score.score + spread,
        "state": score.state_size or 0,
        "parameters": score.parameters or 0,
        "comparable": score.comparable,
        "accuracy": points(score.score) + " %",
        "spread": _spread(score.spread),
        "state size": f"{score.state_size:,} numbers" if score.state_size else "none that is fixed",
        "size": f"{score.parameters:,} parameters" if score.parameters else units.MISSING,
        "standing": "comparable" if score.comparable else "not comparable: " + "; ".join(score.reasons),
    }


def _spread(spread: float | None, metric: str = "") -> str:
    return "not known: fewer than two seeds" if spread is None else f"± {bare_score(spread, metric)} over seeds"


def _metric(scores: Scores) -> str:
    names = {"accuracy": "accuracy of tokens", LOSS: "evaluation loss"}
    metric = names.get(scores.metric, "mean over classes and batches")
    return f"{metric}; runs selected on the {'test split itself' if scores.legacy else 'validation split'}"


def by_name(canvas: Canvas, channel: str, legend: dict[str, int], field: str = "architecture"):
    """Returns the channel "Color" or "Shape" of names, with a legend below the panels where there are several.

    Args:
        legend: options of the legend.
        field: the column of the rows that has the names.
    """
    alt, names = canvas.alt, canvas.study.architectures
    known = {"Color": style.colours, "Shape": style.shapes}[channel](names)
    below = alt.Legend(title=None, orient="bottom", symbolOpacity=1, **legend) if len(names) > 1 else None
    scale = alt.Scale(domain=list(known), range=list(known.values()))
    return getattr(alt, channel)(f"{field}:N", scale=scale, legend=below)


def _colour(canvas: Canvas):
    return by_name(canvas, "Color", LEGEND)


def _shape(canvas: Canvas):
    return by_name(canvas, "Shape", LEGEND)
