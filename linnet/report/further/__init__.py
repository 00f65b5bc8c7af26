"""The section of the further laws (`linnet.laws.further`) on the page of a study."""

from collections.abc import Callable, Sequence
from html import escape

from linnet.config import ConfigError
from linnet.laws.fit import load_table
from linnet.laws.fit.table import POINT
from linnet.laws.further import LawFit, Options, fit_laws
from linnet.report import drawing, shell, style, units
from linnet.report.drawing import Canvas, Figure, columns_for
from linnet.report.records import Study
from linnet.study.collect import complete_table

# Figures of the further laws (`linnet.laws.further`), one function per law; each is a pure function of its result.

SIZE = {"width": 620, "height": 330}
OFFSET = 0.75  # largest offset below the optimum that is drawn


def draw(study: Study, law: LawFit) -> Figure | None:
    """The figure of a law, or None if its result has nothing to draw."""
    maker = MAKERS.get(law.law)
    return maker(study, law) if maker and not law.refused else None


def allocation(study: Study, law: LawFit) -> Figure | None:
    """Differences of a between architectures, with their intervals."""
    caption = (
        "Differences of the exponent a of N_opt between two architectures, with 95 % intervals from joint resamples. "
        "An interval that crosses the line at zero does not tell the two apart."
    )
    return _forest(study, law, "a difference", "difference of a", caption)


def joint(study: Study, law: LawFit) -> Figure | None:
    """Differences of a between the surfaces of architectures."""
    caption = (
        "Differences of a = beta / (alpha + beta) between the surfaces of two architectures, with 95 % intervals of a "
        "wild bootstrap. The tests below say which numbers the architectures may share."
    )
    return _forest(study, law, "a difference", "difference of a", caption)


def topology(study: Study, law: LawFit) -> Figure | None:
    """Differences of the loss to the reference topology, paired by seed."""
    caption = (
        "Mean difference of the loss to the reference over the same seeds, with the 95 % interval of each alone "
        "(Student's t). The table says which differences are not zero, by a test of all of them together."
    )
    return _forest(study, law, "difference", "difference of the loss (nats per token)", caption)


def efficiency(study: Study, law: LawFit) -> Figure | None:
    """Compute at equal loss, relative to the first architecture of each pair."""
    rows = law.points.get("factors", [])
    firsts = list(dict.fromkeys(row["first"] for row in rows))
    rows = [row | {"architecture": row["second"], "value": row["kappa"]} for row in rows if row["first"] in firsts[:1]]
    if not rows:
        return None
    canvas = Canvas(study)
    values = [row[key] for row in rows for key in ("value", "low", "high") if row[key] is not None] + [1.0]
    x = style.axis(canvas.alt, "flops", style.padded([row["C"] for row in rows], True))
    y = style.axis(canvas.alt, "factor", style.padded(values, True))
    layers = [_rule(canvas, "y", 1.0, y), *_with_spans(canvas, rows, "C", x, y)]
    caption = (
        f"How many times the compute of {firsts[0]} each architecture needs for the same loss, at the budgets of "
        f"{firsts[0]} whose optimal loss the other reaches. Bars are 95 % intervals of each alone; the table says "
        "which mean factors are not 1, by a test of all of them together. These compare optima of the budgets; the "
        "conclusions at the top compare laws through all budgets, in all pairs and quantities together, and so tell "
        "fewer apart."
    )
    return canvas.figure("compute-at-equal-loss", law.title, caption, canvas.layer(*layers).properties(**SIZE))


def over_training(study: Study, law: LawFit) -> Figure | None:
    """Loss against tokens per parameter, with the law at each budget."""
    budgets = [(row, float(f"{row['C']:.1e}")) for row in law.points["runs"]]
    rows = [row | {"budget": budget, "label": units.scientific(budget, 2)} for row, budget in budgets]
    caption = (
        "Loss against tokens per parameter. Dots are runs, lines are the law at their compute, coloured by compute. To "
        "the right of the lowest point of a line, models are trained longer than is best for their compute."
    )
    axes = ("ratio", "M", True), ("loss", "loss", False)
    return _panels(study, law, "over-training", caption, rows, axes, fitted="fitted")


def gap(study: Study, law: LawFit) -> Figure | None:
    """Gap against the offset from the best size, at each budget."""
    rows = [row | {"value": 100 * row["relative"]} for row in law.points["gaps"] if row["relative"] is not None]
    rows = [row | {"label": units.scientific(row["budget"])} for row in rows if row["delta"] >= -OFFSET]
    caption = (
        "How much higher the perplexity of a model of another size is at the same compute, in percent of the best one. "
        "At -0.5 the model has half of the best size and is trained on more tokens. Offsets outside the trained sizes "
        "are not drawn."
    )
    axes = ("offset", "delta", False), ("percent", "value", False)
    return _panels(study, law, "gap-off-the-optimum", caption, rows, axes, fitted="value")


def state(study: Study, law: LawFit) -> Figure | None:
    """Perplexity against the size of the state, with the line of each class."""
    canvas, points, lines = Canvas(study), law.points["points"], law.points["lines"]
    x = style.axis(canvas.alt, "numbers", style.padded([row["M"] for row in points], True))
    y = style.axis(canvas.alt, "perplexity", style.padded([row["perplexity"] for row in points + lines], True))
    at, value, hue = canvas.alt.X("M:Q", **x), canvas.alt.Y("perplexity:Q", **y), canvas.colour()
    drawn = canvas.chart(lines).mark_line(strokeWidth=1.7, clip=True)
    dots = canvas.chart(points).mark_point(size=62, filled=True, opacity=1, clip=True)
    tooltip = canvas.tooltip(("architecture", "budget", "M", "perplexity"))
    layers = [
        drawn.encode(at, value, hue, strokeOpacity=canvas.fade(0.8)),
        dots.encode(at, value, hue, canvas.shape(), opacity=canvas.fade(), tooltip=tooltip),
    ]
    c = law.estimate("c")
    ends = "" if c.interval is None else f" (95 %: {c.interval[0]:.3f} to {c.interval[1]:.3f})"
    caption = (
        f"Optimal perplexity of each budget against the numbers that the best model carries between tokens. The lines "
        f"share the slope c = {c.value:.3f}{ends}; the distance between them is the offset of the class."
    )
    return canvas.figure("state-optimal", law.title, caption, canvas.layer(*layers).properties(**SIZE))


def share(study: Study, law: LawFit) -> Figure | None:
    """Optimal perplexity against the share of attention, at each budget."""
    rows = [row | {"label": units.scientific(row["budget"])} for row in law.points["shares"] if row["kind"] == "rho*"]
    canvas = Canvas(study)
    alt = canvas.alt
    x = style.axis(alt, "share", [-0.03, 1.03], logarithmic=False)
    y = style.axis(alt, "perplexity", style.padded([row["perplexity"] for row in rows], True))
    at, value = alt.X("share:Q", **x), alt.Y("perplexity:Q", **y)
    hue = drawing.by_label(alt, "label", (row["label"] for row in rows))
    tooltip = canvas.tooltip(("label", "share", "perplexity"))
    layers = [
        canvas.chart(rows).mark_line(strokeWidth=1.5, clip=True).encode(at, value, hue),
        canvas.chart(rows).mark_circle(size=50, opacity=1, clip=True).encode(at, value, hue, tooltip=tooltip),
    ]
    best = next(
        (
            estimate
            for estimate in law.estimates
            if estimate.name == "rho*" and estimate.of == "all budgets" and estimate.value
        ),
        None,
    )
    caption = "Optimal perplexity of each budget against the share of attention among the mixers."
    if best is not None:
        layers.append(_rule(canvas, "x", best.number, x))
        ends = "" if best.interval is None else f" (95 %: {best.interval[0]:.2f} to {best.interval[1]:.2f})"
        caption += f" The line marks the best share over all budgets, {best.number:.2f}{ends}."
    return canvas.figure("share-of-attention", law.title, caption, canvas.layer(*layers).properties(**SIZE))


def batch(study: Study, law: LawFit) -> Figure | None:
    """The best size against the batch size, at each budget."""
    canvas, rows = Canvas(study), [row | {"value": row["N"]} for row in law.points["optima"]]
    values = [row[key] for row in rows for key in ("value", "low", "high") if row[key] is not None]
    x = style.axis(canvas.alt, "batch", style.padded([row["batch_tokens"] for row in rows], True))
    y = style.axis(canvas.alt, "params", style.padded(values, True), "optimal parameters N")
    layers = _with_spans(canvas, rows, "batch_tokens", x, y, detail="budget:N")
    caption = (
        "The best size of a budget against the tokens of one step, with 95 % intervals. A line joins the batch sizes "
        "of one budget: where it falls, larger batches move the optimum to smaller models."
    )
    return canvas.figure("batch-size", law.title, caption, canvas.layer(*layers).properties(**SIZE))


def data_constrained(study: Study, law: LawFit) -> Figure | None:
    """Loss against passes over the data, with the law."""
    rows = [row | {"label": units.count(row["N"])} for row in law.points["runs"]]
    caption = (
        "Loss against passes over the training text, coloured by the number of parameters. Dots are runs, lines join "
        "what the law gives for the runs of one text; a line that flattens shows that repeating is used up."
    )
    axes = ("passes", "passes", True), ("loss", "loss", False)
    return _panels(study, law, "repeated-data", caption, rows, axes, fitted="fitted", detail="unique_tokens:N")


MAKERS: dict[str, Callable[[Study, LawFit], Figure | None]] = {
    "allocation": allocation,
    "joint": joint,
    "efficiency": efficiency,
    "over-training": over_training,
    "gap": gap,
    "state": state,
    "share": share,
    "topology": topology,
    "batch": batch,
    "data-constrained": data_constrained,
}


def _forest(study: Study, law: LawFit, name: str, title: str, caption: str) -> Figure | None:
    """Values with their intervals, one row each, beside a line at zero."""
    rows = [
        {
            "of": estimate.of,
            "value": estimate.value,
            "low": estimate.interval[0],
            "high": estimate.interval[1],
            "result": estimate.note,
        }
        for estimate in law.estimates
        if estimate.name == name and estimate.value is not None and estimate.interval is not None
    ]
    if not rows:
        return None
    canvas = Canvas(study)
    alt = canvas.alt
    reach = style.padded([row[key] for row in rows for key in ("low", "high")] + [0.0], False)
    x = style.axis(alt, "number", reach, title, logarithmic=False)
    y = alt.Y("of:N", sort=[row["of"] for row in rows], title=None, axis=alt.Axis(labelLimit=320))
    spans = canvas.chart(rows).mark_rule(strokeWidth=1.6, style=style.INK)
    dots = canvas.chart(rows).mark_point(size=60, filled=True, opacity=1, style=style.INK)
    tooltip = canvas.tooltip(("of", "value", "low", "high", "result"))
    layers = [
        _rule(canvas, "x", 0.0, x),
        spans.encode(alt.X("low:Q", **x), alt.X2("high:Q"), y),
        dots.encode(alt.X("value:Q", **x), y, tooltip=tooltip),
    ]
    drawn = canvas.layer(*layers).properties(width=520, height=max(60, 24 * len(rows)))
    return canvas.figure(f"{law.law}-differences", law.title, caption, drawn)


def _panels(
    study: Study, law: LawFit, name: str, caption: str, rows: list[dict], axes, fitted: str, detail: str | None = None
) -> Figure | None:
    """A panel per architecture: dots and lines over x, coloured by `label`.

    Args:
        rows: with `architecture` and `label`.
        axes: (kind, field, logarithmic) of x and of y.
        fitted: the field of the lines. detail: what separates lines of one colour.
    """
    if not rows:
        return None
    (kind_x, field_x, log_x), (kind_y, field_y, log_y) = axes
    canvas = Canvas(study)
    alt = canvas.alt
    hue = drawing.by_label(alt, "label", (row["label"] for row in rows))
    extra = {} if detail is None else {"detail": detail}
    values = [row[key] for row in rows for key in {field_y, fitted}]
    domain_x = style.padded([row[field_x] for row in rows], log_x)
    domain_y = style.padded(values, log_y)
    names = [name for name in study.architectures if any(row["architecture"] == name for row in rows)]
    panels, columns = [], columns_for(len(names))
    for architecture in names:
        points = [row for row in rows if row["architecture"] == architecture]
        x = alt.X(f"{field_x}:Q", **style.axis(alt, kind_x, domain_x, most=6, logarithmic=log_x))
        axis = style.axis(alt, kind_y, domain_y, None if len(panels) % columns else "", logarithmic=log_y)
        lines = canvas.chart(points).mark_line(strokeWidth=1.5, clip=True)
        dots = canvas.chart(points).mark_circle(size=38, opacity=1, clip=True)
        tooltip = canvas.tooltip(
            ("architecture", "label", *([] if "run" not in points[0] else ["run"]), field_x, field_y)
        )
        layers = [
            lines.encode(x, alt.Y(f"{fitted}:Q", **axis), hue, strokeOpacity=canvas.fade(0.8), **extra),
            dots.encode(x, alt.Y(f"{field_y}:Q", **axis), hue, fillOpacity=canvas.fade(), tooltip=tooltip),
        ]
        panels.append(canvas.panel(canvas.layer(*layers), architecture, columns))
    return canvas.figure(name, law.title, caption, canvas.grid(panels, columns))


def _with_spans(canvas: Canvas, rows: list[dict], field: str, x: dict, y: dict, detail: str | None = None) -> list:
    """Points of architectures with their intervals, joined by lines."""
    alt = canvas.alt
    at, hue = alt.X(f"{field}:Q", **x), canvas.colour()
    known = [row for row in rows if row["low"] is not None]
    extra = {} if detail is None else {"detail": detail}
    lines = canvas.chart(rows).mark_line(strokeWidth=1.4, clip=True)
    spans = canvas.chart(known).mark_rule(strokeWidth=1.2, clip=True)
    dots = canvas.chart(rows).mark_point(size=62, filled=True, opacity=1, clip=True)
    tooltip = canvas.tooltip(("architecture", field, "value", "low", "high"))
    return [
        lines.encode(at, alt.Y("value:Q", **y), hue, strokeOpacity=canvas.fade(0.6), **extra),
        spans.encode(at, alt.Y("low:Q", **y), alt.Y2("high:Q"), hue, strokeOpacity=canvas.fade(0.6)),
        dots.encode(at, alt.Y("value:Q", **y), hue, canvas.shape(), opacity=canvas.fade(), tooltip=tooltip),
    ]


def _rule(canvas: Canvas, side: str, value: float, axis: dict):
    """A quiet line across the figure at a value of x or y."""
    place = (canvas.alt.X if side == "x" else canvas.alt.Y)("at:Q", **axis)
    return canvas.chart([{"at": value}]).mark_rule(strokeDash=[4, 3], style=style.QUIET).encode(place)


Section = tuple[LawFit, Figure | None]


def read(
    study: Study, bootstrap: int, exclude: Sequence[str] = (), best_of: bool = False
) -> tuple[list[Section], dict[str, list[str]]]:
    """Returns the laws that the study's table supports, each with its figure, and the others with the reasons.

    Args:
        exclude, best_of: see `linnet.laws.fit.load_table`.
    """
    if study.fit is None:
        return [], {}
    try:
        table, _ = load_table(study.folder / "table.csv", exclude=exclude, best_of=best_of, point=POINT)
        options = Options(bootstrap=bootstrap, reference=study.architectures[0])
        laws, unsupported = fit_laws(complete_table(table, study.folder), ["all"], options)
    except ConfigError as error:
        study.problems.append(f"No further laws could be fitted: {'; '.join(error.problems)}")
        return [], {}
    return [(law, draw(study, law)) for law in laws], unsupported


def parts(study: Study, sections: list[Section], unsupported: dict[str, list[str]], command: str) -> list[str]:
    """Returns the HTML of the section."""
    if not sections and not unsupported:
        return []
    fit_command = shell.typed("linnet", "fit", study.folder, law="all")
    caption = (
        "Laws beyond L(C), N<sub>opt</sub>(C) and D<sub>opt</sub>(C), with 95 % bootstrap intervals; C in exact FLOPs, "
        "N without embeddings. "
        f"<code>{escape(fit_command)}</code> prints them in full, and docs/laws.md has their equations."
    )
    html = shell.captioned("Further laws", caption)
    for law, figure in sections:
        html.append(shell.section(figure, command) if figure else f"<h2>{escape(law.title)}</h2>")
        html.append(_numbers(law))
    if unsupported:
        rows = "".join(
            f"<li>{escape(name)}: {units.prose(*dict.fromkeys(reasons))}</li>" for name, reasons in unsupported.items()
        )
        title = f"{units.plural(len(unsupported), 'law')} that this table does not support"
        html.append(f"<details><summary>{title}</summary><ul>{rows}</ul></details>")
    return html


def _numbers(law: LawFit) -> str:
    """The numbers, tests and notes of a law, folded."""
    rows = []
    for estimate in law.estimates:
        value = "refused" if estimate.value is None else _number(estimate.value)
        ends = "" if estimate.interval is None else " to ".join(map(_number, estimate.interval))
        p = "" if estimate.p is None else escape(units.p_value(estimate.p))
        words = units.prose(estimate.refused or estimate.note)
        about = (units.prose(text) for text in (estimate.name, estimate.of))
        rows.append((*about, value, ends, p, words))
    lines = [f"{test.name}: {units.p_equals(test.p)}; {test.conclusion}" for test in law.tests]
    for test in law.predictions:
        points = units.plural(test.tested, "held-out point")
        error = test.refused or f"mean error {units.percent(test.mean_error or 0.0)} on {points}"
        lines.append(f"Held out, {test.name}: {error}")
    lines += [law.source, f"Intervals: {law.scheme}", *law.notes]
    if sum(estimate.p is not None for estimate in law.estimates) > 1:
        lines.append("p-values of several pairs are adjusted together by Holm's method")
    listed = "".join(f"<li>{units.prose(line)}</li>" for line in lines)
    equation = f"<p><code>{escape(law.equation)}</code></p>"
    table = shell.table(f"law-{law.law}", ("*Number", "Of", "#Value", "#95 %", "#p", "?Result"), rows)
    body = f"{equation}{table}<ul>{listed}</ul>"
    return f"<details><summary>{escape(law.title)}: numbers, tests and notes</summary>{body}</details>"


def _number(value: float) -> str:
    return units.significant(value, 4) if not value or 1e-4 <= abs(value) < 1e6 else units.scientific(value, 4)
