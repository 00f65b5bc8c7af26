"""The report of MQAR (paper 002, section 4.1): accuracy by length, pairs and width of each architecture."""

from html import escape

from linnet.mad.mqar import HARDER, SOLVED, Comparison, Place, compare, settings_of
from linnet.mad.page.figures import Records, points
from linnet.mad.scores import SettingScore
from linnet.report import shell, style, units
from linnet.report.drawing import Canvas, Figure


def recall(records: Records) -> Figure:
    """Draws accuracy against length and pairs, one panel per width (paper 002, Figure 4 has the width on the axis)."""
    canvas = Canvas(records)
    alt = canvas.alt
    rows = [
        _row(name, place, setting)
        for name in records.architectures
        for place, setting in settings_of(records.scores, name).items()
    ]
    order = [_shape(length, pairs) for length, pairs in HARDER]
    panels = []
    for width in sorted({row["width"] for row in rows}):
        x = alt.X("place:N", sort=order, title="length and pairs", scale=alt.Scale(domain=order))
        x = x.axis(labelAngle=0)
        title = "accuracy" if not panels else None
        y = alt.Y("score:Q", title=title, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=5))
        base = canvas.chart([row for row in rows if row["width"] == width])
        colour, shape = _by_name(canvas, alt.Color, style.colours), _by_name(canvas, alt.Shape, style.shapes)
        lines = base.mark_line(strokeWidth=1.8).encode(x, y, colour, strokeOpacity=canvas.fade(0.8))
        tooltip = canvas.tooltip(("architecture", "setting", "accuracy", "spread", "learning rate", "epoch", "sizes"))
        dots = base.mark_point(size=64, filled=True, opacity=1)
        dots = dots.encode(x, y, colour, shape, fillOpacity=canvas.fade(), tooltip=tooltip)
        panels.append(canvas.layer(lines, dots).properties(width=410, height=300, title=f"width {width}"))
    caption = (
        "Share of the questions answered right on the test split, from few pairs in a short sequence to many in a long "
        f"one; of the learning rates the best on the validation split. Training ends above {SOLVED:.0%}."
    )
    return canvas.figure("mqar", "Multi-query recall", caption, alt.hconcat(*panels, spacing=28))


def lines(records: Records) -> list[str]:
    """The headlines as HTML: the bar of paper 002, and what each architecture recalls."""
    found = []
    if {"hgrn2", "hgrn"} <= set(records.architectures):
        found.append(bar(compare(records.scores)))
    for name in records.architectures:
        settings = settings_of(records.scores, name)
        solved = [place for place, setting in settings.items() if setting.score >= SOLVED]
        text = (
            f"<b>{escape(name)}</b> recalls at least {SOLVED:.0%} in <b>{len(solved)} of {len(settings)}</b> settings"
        )
        if len(solved) < len(settings):
            worst = min(settings, key=lambda place: settings[place].score)
            text += f", and least at {worst}: {points(settings[worst].score)}{units.SPACE}%"
        found.append(f"{text}.")
    return found


def bar(found: Comparison) -> str:
    """The comparison in words, as HTML."""
    return f"{escape(found.claim)} (paper 002, 4.1): <b>{found.verdict}</b>{escape(found.told)}."


def tables(records: Records) -> list[str]:
    """All accuracies, a row for each architecture and width."""
    shapes = (f"#{length}, {pairs} pairs" for length, pairs in HARDER)
    columns = ("Architecture", "#Width", *shapes, "#Mean", "#Parameters", "#State", "#Seeds")
    rows = []
    for name in records.architectures:
        settings = settings_of(records.scores, name)
        for width in sorted({place.width for place in settings}):
            own = {place: setting for place, setting in settings.items() if place.width == width}
            cells = [_cell(own.get(Place(width, *shape))) for shape in HARDER]
            best = [run for setting in own.values() for run in setting.best.values()]
            whole = len(own) == len(HARDER)  # a mean over fewer settings cannot be compared with the others
            mean = sum(setting.score for setting in own.values()) / len(own) if whole else None
            numbers = [shell.number(mean, points), shell.number(best[0].parameters, units.count)]
            numbers += [shell.number(best[0].state_size, lambda value: f"{value:,}" if value else "none")]
            numbers += [shell.number(min(len(setting.best) for setting in own.values()), str)]
            rows.append((shell.swatch(records.architectures, name), width, *cells, *numbers))
    caption = (
        "Accuracy in per cent. Hover over one for its learning rate and the epoch at which training ended. The state "
        "is what a sequence carries from token to token whatever its length."
    )
    table = shell.table("recall", columns, rows, "sortable")
    return ["<h2>All accuracies</h2>", f'<p class="caption">{caption}</p>', table]


def _row(name: str, place: Place, setting: SettingScore) -> dict:
    best = list(setting.best.values())
    first = best[0]
    ends = [run.accuracy for run in best]
    sizes = [f"{units.count(first.parameters)} parameters"] if first.parameters is not None else []
    sizes += [f"state {first.state_size:,}"] if first.state_size is not None else []
    return {
        "run": name,
        "architecture": name,
        "width": place.width,
        "place": _shape(place.length, place.pairs),
        "setting": str(place),
        "score": setting.score,
        "accuracy": points(setting.score) + " %",
        "spread": f"{points(min(ends))} to {points(max(ends))} over {len(ends)} seeds" if len(ends) > 1 else "one seed",
        "learning rate": _told(setting, "learning_rate"),
        "epoch": _told(setting, "epoch"),
        "sizes": ", ".join(sizes) or units.MISSING,
    }


def _told(setting: SettingScore, what: str) -> str:
    values = [getattr(run, what) for run in setting.best.values()]
    return ", ".join(dict.fromkeys(f"{value:g}" for value in values if value is not None)) or units.MISSING


def _shape(length: int, pairs: int) -> str:
    return f"{length}, {pairs}"


def _cell(setting: SettingScore | None) -> shell.Cell:
    if setting is None:
        return shell.sorted_by(None, units.MISSING)
    title = f"{setting.score:.6g}; learning rate {_told(setting, 'learning_rate')}, epoch {_told(setting, 'epoch')}"
    return shell.Cell(points(setting.score), f' data-v="{setting.score:.10g}" title="{title}"')


def _by_name(canvas: Canvas, channel, values):
    known = values(canvas.study.architectures)
    legend = None
    if len(known) > 1:
        legend = canvas.alt.Legend(title=None, orient="bottom", columns=4, symbolOpacity=1, labelLimit=280)
    scale = canvas.alt.Scale(domain=list(known), range=list(known.values()))
    return channel("architecture:N", scale=scale, legend=legend)
