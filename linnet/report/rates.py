"""The tuned learning rates of a study: the parabolas of its sweeps and the laws through their optima, for its page."""

import math
from html import escape

from linnet.report import shell, style, units
from linnet.report.drawing import Canvas, Figure, by_label, columns_for
from linnet.report.records import Study
from linnet.study.collect import TABLE
from linnet.study.rates import TUNE, Vertex, fit_rates, read_vertices

Vertices = dict[str, dict[int, Vertex]]


def read(study: Study) -> Vertices:
    """Returns the best rates of the study's architectures by width; {} if it was not tuned."""
    folder = study.folder / TUNE
    if not (folder / TABLE).is_file():
        return {}
    vertices = read_vertices(folder)
    return {name: vertices[name] for name in study.architectures if name in vertices}


def draw(study: Study, vertices: Vertices) -> Figure | None:
    """Loss over the learning rate at each width, with the parabola and its optimum."""
    located = {name: {w: v for w, v in sweeps.items() if v.rows} for name, sweeps in vertices.items()}
    located = {name: sweeps for name, sweeps in located.items() if sweeps}
    if not located:
        return None
    canvas, panels, columns = Canvas(study), [], columns_for(len(located))
    alt = canvas.alt
    widths = sorted({width for sweeps in located.values() for width in sweeps})
    hue = by_label(alt, "width", map(str, widths), "width")
    every = [row for sweeps in located.values() for vertex in sweeps.values() for row in vertex.rows]
    domain_x = style.padded([2.0 ** row[0] for row in every], True)
    domain_y = style.padded([row[2] for row in every], False)
    for name, sweeps in located.items():
        runs, curves, best = [], [], []
        for width, vertex in sorted(sweeps.items()):
            common = {"architecture": name, "width": str(width)}
            runs += [{**common, "rate": 2.0**x, "loss": loss, "seed": str(seed)} for x, seed, loss in vertex.rows]
            low, high = min(row[0] for row in vertex.rows), max(row[0] for row in vertex.rows)
            for step in range(41):
                at = low + (high - low) * step / 40
                powers = sum(c * (at - vertex.centre) ** power for power, c in enumerate(vertex.coefficients))
                curves.append({**common, "rate": 2.0**at, "loss": powers})
            best.append({**common, "rate": vertex.rate, "loss": vertex.loss, "best rate": f"{vertex.rate:.3g}"})
        x = alt.X("rate:Q", **style.axis(alt, "number", domain_x, "learning rate", most=6))
        y = alt.Y("loss:Q", **style.axis(alt, "loss", domain_y, logarithmic=False))
        layers = [
            canvas.chart(curves).mark_line(strokeWidth=1.5, clip=True).encode(x, y, hue),
            canvas.chart(runs).mark_circle(size=38).encode(x, y, hue, tooltip=canvas.tooltip(("width", "seed"))),
            canvas.chart(best)
            .mark_point(shape="diamond", size=110, filled=True, style=style.INK, opacity=1)
            .encode(x, y, tooltip=canvas.tooltip(("width", "best rate"))),
        ]
        panels.append(canvas.panel(canvas.layer(*layers), name, columns))
    caption = (
        "Each curve is one width: a parabola in log2 of the rate through the five rates around the lowest loss. "
        "Dots are runs, a diamond is the best rate. Sweeps whose optimum was refused are in the table only."
    )
    drawn = canvas.grid(panels, columns)
    return canvas.figure("learning-rates", "Loss against the learning rate", caption, drawn)


def table(study: Study, vertices: Vertices) -> str:
    """The best rate of each architecture and width with its interval, and the law of each architecture."""
    rows = []
    for name, sweeps in vertices.items():
        law = fit_rates(sweeps)
        for index, (width, vertex) in enumerate(sorted(sweeps.items())):
            first = shell.swatch(study.architectures, name) if index == 0 else ""
            tuned = None if law is None else law.widths.get(width)
            rate = escape(vertex.refused) if vertex.rate is None else f"{vertex.rate:.3g}"
            ends = "" if tuned is None else f"{tuned.low:.3g} to {tuned.high:.3g}"
            words = ""
            if law is not None and index == 0:
                words = f"{law.a:.3g} d<sup>{law.b:.2f}</sup> ({law.b_low:.2f} to {law.b_high:.2f})"
            loss = units.loss(vertex.loss) if math.isfinite(vertex.loss) else units.MISSING
            rows.append((first, width, rate, ends, loss, words))
    columns = ("*Architecture", "#Width d", "#Best rate", "#95 %", "#Loss", "#Law (95 % of the exponent)")
    return shell.table("learning-rate-table", columns, rows)


def parts(study: Study, vertices: Vertices, figure: Figure | None, command: str) -> list[str]:
    """Returns the section of the page; [] for a study that was not tuned."""
    if not vertices:
        return []
    caption = f"Best learning rates of <code>linnet study tune</code>, from {escape(str(study.folder / TUNE))}."
    drawn = [] if figure is None else [shell.section(figure, command)]
    return shell.captioned("Learning rates", caption, table(study, vertices), *drawn)
