"""The figures of a study, each a pure function of its records (`linnet.report.records.Study`): those of the fits.

Every chart has a parameter `focus`, the name of one architecture or "": the page sets it in all figures at once, and
what belongs to other architectures fades. Charts carry no theme (`linnet.report.style.theme` is merged in later) and
no data that the study folder does not hold. Marks that stand for a run carry the field `run`, its name.
"""

import math

from linnet.report import drawing, style, units
from linnet.report import run as run_figures
from linnet.report.drawing import RUN_FIELDS, Canvas, Figure, columns_for, run_row
from linnet.report.records import Study, loss_points, optimum_points

EXTRAPOLATION = 3.0  # laws are drawn, dashed, up to this multiple of the largest compute they were fitted to
CROSS = "M-1,-1L1,1M-1,1L1,-1"  # an x of two strokes: it has no inside that a dot beneath could seem to fill
OPTIMUM_FIELDS = ("architecture", "at C", "optimum", "located", "lowest run")


_TOLD_APART = (
    "Two architectures are told apart by the interval of their difference, for all pairs together, and not by whether "
    "their bands overlap: overlapping bands may be told apart, and separate ones may not."
)


def draw(study: Study) -> list[Figure]:
    """All figures that the records allow, in the order of the page."""
    makers = (laws, run_figures.training_curves, isoflop_curves, optima, run_figures.state_size, run_figures.cost)
    return [figure for figure in (make(study) for make in makers) if figure is not None]


def laws(study: Study) -> Figure | None:
    """L(C) of all architectures in one picture (the master row of paper 000, Figure 1)."""
    canvas = Canvas(study)
    bands, lines, points = [], [], []
    for name, fit in study.fits.items():
        bands += [{"architecture": name, **row} for row in drawing.band(fit.L, EXTRAPOLATION)]
        lines += [{"architecture": name, **row} for row in drawing.line(fit.L, EXTRAPOLATION)]
        points += [_optimum(name, p, p["loss"], units.loss(p["loss"]) + " nats per token") for p in loss_points(fit)]
    if not points + lines:
        return None
    x = style.axis(canvas.alt, "flops", style.padded([row["C"] for row in points + lines], True))
    on_training = {fit.headline for fit in study.fits.values()} == {"envelope"}
    title = "training loss (nats per token)" if on_training else ""
    y = style.axis(canvas.alt, "loss", style.padded([row["value"] for row in points + lines], True), title, most=9)
    layers = canvas.law_layers(bands, lines, points, x, y, OPTIMUM_FIELDS)
    drawn = canvas.layer(*layers).properties(width=860, height=430)
    refused = [name for name, fit in study.fits.items() if fit.L.refused]
    banded = "; its band is the 95 % bootstrap interval" if bands else " (no law has an interval; the table says why)"
    caption = (
        f"The lowest {'training' if on_training else 'held-out'} loss that each architecture reaches with a compute "
        f"budget. A straight line on these axes is a power law{banded}, and the dashed part lies beyond the data (up "
        f"to {EXTRAPOLATION:g} times). Hollow points are budgets "
        "whose optimum is not between the sizes that were trained: the lowest loss seen, not an optimum."
    )
    caption += f" {_TOLD_APART}" * (len({row["architecture"] for row in bands}) > 1)
    if refused:
        caption += f" No law is drawn for {units.listed(refused)}; the table says why."
    return canvas.figure("loss-against-compute", "Loss against compute", caption, drawn)


def isoflop_curves(study: Study) -> Figure | None:
    """Loss over size at fixed compute, with the parabola of each budget (Hoffmann et al. 2022, Approach 2)."""
    fits = {name: fit.isoflop for name, fit in study.fits.items() if fit.isoflop is not None and fit.isoflop.groups}
    if not fits:
        return None
    canvas = Canvas(study)
    alt = canvas.alt
    groups = [group for fit in fits.values() for group in fit.groups]
    budgets = sorted({group.at for group in groups})
    hue = drawing.by_label(alt, "budget", map(units.scientific, budgets), "budget C (FLOPs)")
    domain_x = style.padded([n for group in groups for n in group.N], True)
    domain_y = style.padded([value for group in groups for value in group.loss], False)
    rows_of = {row["run"]: row for _, row in study.table.iterrows()}
    panels, columns = [], columns_for(len(fits))
    for name, fit in fits.items():
        runs, parabolas, best = [], [], []
        for group in fit.groups:
            common = {"architecture": name, "budget": units.scientific(group.at)}
            for run, n, value in zip(group.run, group.N, group.loss, strict=True):
                known = run_row(rows_of[run]) if run in rows_of else {"run": run}
                runs.append({**known, **common, "size": n, "value": value})
            parabolas += [{**common, **row} for row in _parabola(group)]
            best += [{**common, **row} for row in _isoflop_optimum(group)]
        x = alt.X("size:Q", **style.axis(alt, "params", domain_x, most=6))
        title = None if len(panels) % columns else ""
        y = alt.Y("value:Q", **style.axis(alt, "loss", domain_y, title, logarithmic=False))
        curves = canvas.chart(parabolas).mark_line(strokeWidth=1.5, clip=True)
        dots = canvas.chart(runs).mark_circle(size=38, opacity=1, clip=True)
        tooltip = canvas.tooltip((*RUN_FIELDS, "budget"))
        layers = [
            curves.encode(x, y, hue, detail="budget:N", strokeOpacity=canvas.fade(0.8)),
            dots.encode(x, y, hue, fillOpacity=canvas.fade(), tooltip=tooltip),
        ]
        for inside in (True, False):
            fields = ("architecture", "budget", "optimum N", "optimum loss")
            fields += () if inside else ("refused because", "run")
            drawn = canvas.chart([row for row in best if row["inside"] == inside])
            look = {"shape": "diamond", "size": 110} if inside else {"shape": CROSS, "size": 90}
            drawn = drawn.mark_point(**look, strokeWidth=2, filled=inside, style=style.INK, opacity=1)
            layers.append(drawn.encode(x, y, opacity=canvas.fade(), tooltip=canvas.tooltip(fields)))
        panels.append(canvas.panel(canvas.layer(*layers), name, columns))
    caption = (
        "Each curve is one compute budget spent on models of different sizes: small ones see many tokens, large ones "
        "few. Dots are runs, lines are parabolas in log N, and a diamond is the optimum of its budget. A cross marks "
        "the lowest loss seen where the optimum was refused, at the edge of the sizes for instance; the page has the "
        "reasons under the laws."
    )
    drawn = canvas.grid(panels, columns)
    return canvas.figure("isoflop-curves", "Loss against size at fixed compute", caption, drawn)


def optima(study: Study) -> Figure | None:
    """N_opt and D_opt against C (paper 000, Figure 1, centre and right columns)."""
    canvas = Canvas(study)
    alt = canvas.alt
    panels, marked, ruled = [], False, False
    for quantity, kind, what in (("N_opt", "params", "optimal parameters N"), ("D_opt", "tokens", "optimal tokens D")):
        bands, lines, points = [], [], []
        for name, fit in study.fits.items():
            law = getattr(fit, quantity)
            bands += [{"architecture": name, **row} for row in drawing.band(law, EXTRAPOLATION)]
            lines += [{"architecture": name, **row} for row in drawing.line(law, EXTRAPOLATION)]
            known = [(point, point[quantity[0]]) for point in optimum_points(fit)]
            points += [_optimum(name, point, value, units.count(value)) for point, value in known if value]
        if not points + lines:
            continue
        spans = _spans(study) if quantity == "N_opt" else []
        marked, ruled = marked or bool(bands or spans), ruled or bool(lines)
        reach = [row["value"] for row in points + lines] + [row[end] for row in spans for end in ("low", "high")]
        x = style.axis(alt, "flops", style.padded([row["C"] for row in points + lines], True), most=5)
        y = style.axis(alt, kind, style.padded(reach, True), what)
        layers = canvas.law_layers(bands, lines, points, x, y, OPTIMUM_FIELDS)
        rules = canvas.chart(spans).mark_rule(strokeWidth=1.2, clip=True)
        at, low, high = alt.X("C:Q", **x), alt.Y("low:Q", **y), alt.Y2("high:Q")
        layers.insert(3, rules.encode(at, low, high, canvas.colour(), strokeOpacity=canvas.fade(0.6)))
        panels.append(canvas.layer(*layers).properties(width=405, height=340))
    if not panels:
        return None
    caption = (
        "How a compute-optimal run divides its compute: model size (first panel) and training tokens (second panel) "
        "of the lowest loss, against the budget. "
    )
    caption += (
        f"Bands and bars are 95 % bootstrap intervals. {_TOLD_APART} " * marked + "Dashes lie beyond the data. " * ruled
    )
    caption += "Hollow points are lowest losses at the edge of the sizes and do not count. "
    caption += (
        "The laws follow from the surface L(N, D) fitted to all runs, the points from a parabola in each budget."
        if study.fit.allocation == "parametric"
        else "A law is drawn only where at least three budgets have their optimum between the sizes."
    )
    drawn = canvas.joined("hconcat", panels, 36)
    return canvas.figure("optimal-size-and-tokens", "Optimal size and tokens against compute", caption, drawn)


def _optimum(name: str, point: dict, value: float, words: str) -> dict:
    """A point of a law: the optimum of one budget as the fit sees it."""
    return {
        "architecture": name,
        "C": point["C"],
        "value": value,
        "inside": bool(point["inside"]),
        "at C": units.flops(point["C"]),
        "optimum": words,
        "run": point["run"],
        "lowest run": point["run"] or units.MISSING,
        "located": "yes" if point["inside"] else "no: it is not between the sizes that were trained",
    }


def _parabola(group) -> list[dict]:
    """The fitted curve of a budget over the sizes that were trained."""
    if group.parabola is None:
        return []
    low, high = math.log10(min(group.N)), math.log10(max(group.N))
    places = [low + (high - low) * index / 40 for index in range(41)]
    p0, p1, p2 = group.parabola
    return [{"size": 10**place, "value": p0 + p1 * place + p2 * place**2} for place in places]


def _isoflop_optimum(group) -> list[dict]:
    """The diamond of a budget, its optimum; or its cross, the lowest run where the optimum was refused."""
    size, value = (group.N_opt, group.L_opt) if group.inside else (group.N_lowest, group.L_lowest)
    if size is None or value is None:
        return []
    ends = [units.count(end) for end in group.N_interval or ()]
    words = units.count(size) + (f" (95 %: {' to '.join(ends)})" if ends else "")
    return [
        {
            "size": size,
            "value": value,
            "inside": group.inside,
            "optimum N": words if group.inside else "refused",
            "optimum loss": units.loss(value) + ("" if group.inside else " (lowest seen)"),
            "refused because": units.powers("; ".join(group.refused)),
            "run": group.run_lowest,
        }
    ]


def _spans(study: Study) -> list[dict]:
    """The intervals of N_opt of each budget, where the points are parabolas."""
    return [
        {"architecture": name, "C": group.C, "low": group.N_interval[0], "high": group.N_interval[1]}
        for name, fit in study.fits.items()
        if fit.isoflop is not None and fit.sizes.method in ("isoflop", "parametric")
        for group in fit.isoflop.groups
        if group.inside and group.N_interval
    ]
