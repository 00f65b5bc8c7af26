"""The pages that one run alone has, those of the kinds of models for which a room has one; and their figures."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean

from linnet.companions import Offer
from linnet.config import ConfigError
from linnet.report import style, units
from linnet.report.drawing import RUN_FIELDS, Canvas, Figure, columns_for, run_row
from linnet.report.records import Study
from linnet.runs import RunFolder
from linnet.study.collect import TABLE

Writer = Callable[[Path, Path | None], Path]

WRITERS: Mapping[str, Writer] = Offer("pages")  # by the kind of the model


def writer_of(path: Path) -> Writer | None:
    """Returns the function (folder, page or None) -> page for a folder whose kind of model has a page, else None.

    Raises:
        ConfigError: the folder is that of a run, and its configuration cannot be read.
    """
    if not (path / "config.yaml").is_file():
        return None
    from linnet.runs.model import read_kind

    try:
        return WRITERS.get(read_kind(RunFolder.open(path)).name)
    except ConfigError:
        if (path / TABLE).is_file():  # a study; reading it as one names the problem
            return None
        raise


# The figures that need no fit: training curves, loss against state size, and what each run cost.

CURVE_REACH = 30.0  # training curves are drawn from 1/30 of the smallest run's compute on


def training_curves(study: Study) -> Figure | None:
    """Loss against compute during training, with the lower envelope (paper 000, Figure 1, left column)."""
    if study.curves.empty:
        return None
    canvas = Canvas(study)
    alt = canvas.alt
    spent = study.usable["flops"].min() if len(study.usable) else study.curves["flops"].max()
    drawn = study.curves[study.curves["flops"] >= spent / CURVE_REACH]
    names = [name for name in study.architectures if (drawn["architecture"] == name).any()]  # runs may diverge at once
    if not names:
        return None
    domain_x, domain_y = style.padded(drawn["flops"], True, 0.02), style.padded(drawn["loss"], True, 0.02)
    shown = ("run", "architecture", "N", "D", "total C", "final loss", "state", "time", "folder")
    widths = alt.Scale(type="log", domain=style.padded(study.table["params_non_embedding"], True), range=[0.5, 2.2])
    panels, columns, between, whole = [], columns_for(len(names)), [], []
    for name in names:
        curves = drawn[drawn["architecture"] == name]
        title = None if len(panels) % columns else "loss (nats per token)"
        x = alt.X("C:Q", **style.axis(alt, "flops", domain_x, most=5))
        y = alt.Y("loss:Q", **style.axis(alt, "loss", domain_y, title))
        points = zip(curves["run"], curves["flops"], curves["loss"], strict=True)
        runs = [
            run_row(row) | {"total C": units.flops(row["flops"]), "size": row["params_non_embedding"]}
            for _, row in study.table[study.table["architecture"] == name].iterrows()
        ]
        runs = [row | {"final loss": row["loss"]} for row in runs]
        lines = canvas.chart([{"run": run, "C": flops, "loss": value} for run, flops, value in points])
        lines = lines.transform_lookup("run", alt.LookupData(canvas.data(runs), "run", [*shown[1:], "size"]))
        lines = lines.mark_line().encode(
            x,
            y,
            canvas.colour(legend=False),
            detail="run:N",
            strokeWidth=alt.StrokeWidth("size:Q", scale=widths, legend=None),
            strokeOpacity=canvas.fade(0.6),
            tooltip=canvas.tooltip(shown),
        )
        points, inside = _envelope(study, name)
        if points:
            (between if inside else whole).append(name)
        seen = [row for row in points if row["C"] >= domain_x[0] and row["loss"] <= domain_y[1]]
        envelope = canvas.chart(seen).mark_line(style=style.INK, strokeWidth=2, clip=True)
        layers = [lines, envelope.encode(x, y, strokeOpacity=canvas.fade())]
        panels.append(canvas.panel(canvas.layer(*layers), name, columns))
    caption = (
        "The training loss of every run while it spends its compute, one panel per architecture. Curves are means over "
        "bins of equal width in log C, thicker for larger models; hover over one for the run's size, tokens and "
        "folder. Small models lead first and flatten, larger ones take over."
    )
    if between or whole:
        caption += " The line on top is the smoothed lower envelope: the lowest loss with that compute"
        caption += ", as far as both a smaller and a larger model were worse" * bool(between)
        if whole:
            caption += (
                f". For {units.listed(whole)} it is drawn whole, since no size between others has the lowest loss: "
                "smaller or larger models may have a lower one"
            )
        caption += "."
    drawn = canvas.grid(panels, columns)
    return canvas.figure("training-curves", "Training curves and their envelope", caption, drawn)


def state_size(study: Study) -> Figure | None:
    """Loss against the bytes that a sequence carries from token to token (the view of paper 004, section 5)."""
    table = study.usable[study.usable["state_bytes"] > 0]
    if table.empty:
        return None
    canvas = Canvas(study)
    alt = canvas.alt
    largest = max(study.budgets, default=None)
    top, rest = [], []
    for _, row in table.iterrows():
        run = run_row(row) | {"bytes": row["state_bytes"], "value": row["loss"], "budget": units.flops(row["budget"])}
        (top if largest is None or row["budget"] == largest else rest).append(run)
    x = alt.X("bytes:Q", **style.axis(alt, "bytes", style.padded(table["state_bytes"], True), most=12))
    y = alt.Y("value:Q", **style.axis(alt, "loss", style.padded(table["loss"], True), most=9))
    hue, shape, tooltip = canvas.colour(), canvas.shape(), canvas.tooltip((*RUN_FIELDS, "budget"))
    faint = canvas.chart(rest).mark_point(size=26, filled=True, opacity=1)
    faint = faint.encode(x, y, hue, shape, fillOpacity=canvas.fade(0.3), tooltip=tooltip)
    joined = defaultdict(list)  # a line through each run would go up and down between seeds
    for run in top:
        joined[run["architecture"], run["bytes"]].append(run["value"])
    means = [{"architecture": name, "bytes": size, "value": mean(losses)} for (name, size), losses in joined.items()]
    line = canvas.chart(means).mark_line(strokeWidth=1.5).encode(x, y, hue, strokeOpacity=canvas.fade(0.7))
    dots = canvas.chart(top).mark_point(size=62, filled=True, opacity=1)
    dots = dots.encode(x, y, hue, shape, fillOpacity=canvas.fade(), tooltip=tooltip)
    drawn = canvas.layer(*((dots,) if largest is None else (faint, line, dots))).properties(width=860, height=380)
    caption = (
        "What a sequence carries from token to token while text is generated, at the context length of training, "
        "against the loss. A recurrent state has a fixed size; a key-value cache grows with the context. "
        "Lower left is better."
    )
    if largest is not None:
        caption += (
            f" Lines join the mean losses by state at the largest budget, {units.flops(largest)}; faint points are "
            "other runs."
        )
    return canvas.figure("loss-against-state", "Loss against state size", caption, drawn)


def cost(study: Study) -> Figure | None:
    """What every run cost: seconds against FLOPs, and the total of each architecture."""
    table = study.table[(study.table["seconds"] > 0) & (study.table["flops"] > 0)]
    if table.empty:
        return None
    canvas = Canvas(study)
    left, right = _cost_of_runs(canvas, table), _cost_of_architectures(canvas, table)
    caption = (
        "The time that every run took on the machine where it ran, against the compute it spent. Points on one dotted "
        "line ran at the same speed; lower is faster. Small models rarely keep a machine busy, so their speed says "
        "little about that of large ones."
    )
    drawn = canvas.joined("hconcat", [left, right], 30)
    return canvas.figure("cost-of-runs", "What each run cost", caption, drawn)


def _envelope(study: Study, name: str) -> tuple[list[dict], bool]:
    """Returns the points of the envelope to draw, and whether these are only points of sizes between others."""
    envelope = study.fits[name].envelope if name in study.fits else None
    points = sorted(envelope.points, key=lambda point: point["C"]) if envelope is not None else []
    between = [point for point in points if point["inside"]]
    chosen = between if len(between) > 1 else points
    drawn = [{"architecture": name, "C": point["C"], "loss": point["loss"]} for point in chosen]
    return drawn, chosen is between


def _cost_of_runs(canvas: Canvas, table):
    alt = canvas.alt
    rows = []
    for _, row in table.iterrows():
        speed = units.scientific(row["flops"] / row["seconds"]) + " FLOP/s"
        rows.append(run_row(row) | {"x": row["flops"], "seconds": row["seconds"], "speed": speed})
    domain_x, domain_y = style.padded(table["flops"], True), style.padded(table["seconds"], True, 0.08)
    x = alt.X("x:Q", **style.axis(alt, "flops", domain_x, most=6))
    y = alt.Y("seconds:Q", **style.axis(alt, "seconds", domain_y, "time of training"))
    dots = canvas.chart(rows).mark_point(size=50, filled=True, opacity=1)
    tooltip = canvas.tooltip((*RUN_FIELDS, "speed"))
    dots = dots.encode(x, y, canvas.colour(), canvas.shape(), fillOpacity=canvas.fade(0.85), tooltip=tooltip)
    guides = _speed_guides(domain_x, domain_y)
    lines = canvas.chart(guides).mark_line(style=style.QUIET, strokeWidth=0.8, strokeDash=[2, 3], clip=True)
    ends = [row for row in guides if row["x"] == domain_x[1]]  # those that leave on the right are named there
    names = canvas.chart(ends).mark_text(style=style.QUIET, align="left", dx=5, fontSize=10)
    names = names.encode(x, y, text="speed:N")
    layers = (lines.encode(x, y, detail="speed:N"), names, dots)
    return canvas.layer(*layers).properties(width=460, height=340, title="each run")


def _cost_of_architectures(canvas: Canvas, table):
    alt = canvas.alt
    totals = table.groupby("architecture")["seconds"].sum()
    totals = totals[[name for name in canvas.study.architectures if name in totals]]
    bars = [{"architecture": name, "total": value, "time": units.duration(value)} for name, value in totals.items()]
    axis = alt.Axis(domain=False, ticks=False, labelFontSize=12)
    room = alt.Scale(domain=[0, 1.5 * float(totals.max())], nice=False)  # for the numbers behind the bars
    base = canvas.chart(bars).encode(
        alt.Y("architecture:N", sort=list(totals.index), title=None, axis=axis),
        alt.X("total:Q", axis=None, scale=room),
    )
    bar = base.mark_bar(height=18).encode(
        canvas.colour(),
        fillOpacity=canvas.fade(),
        tooltip=canvas.tooltip(("architecture", "time")),
    )
    text = base.mark_text(align="left", dx=6).encode(text="time:N")
    height = max(40, 32 * len(bars))
    return alt.layer(bar, text).properties(width=230, height=height, title="all runs of an architecture")


def _speed_guides(domain_x: list[float], domain_y: list[float]) -> list[dict]:
    """Both ends of lines of constant FLOP/s (1, 2, 5 times powers of ten) across a panel, left end first."""
    (left, right), (bottom, top) = domain_x, domain_y
    rows = []
    for speed in style.decimal_ticks(left / top, right / bottom, 9):
        start, end = max(left, speed * bottom), min(right, speed * top)
        if math.log(end / start) > 0.25 * math.log(right / left):
            label = units.scientific(speed) + " FLOP/s"
            rows += [{"x": flops, "seconds": flops / speed, "speed": label} for flops in (start, end)]
    return rows
