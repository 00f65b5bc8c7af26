"""How every figure looks: colours per architecture, axes with readable ticks, and the light and dark themes.

Colours are those of Okabe and Ito (2008), which people with any of the common colour deficiencies can tell apart,
followed by some of Tol's; each architecture also has a shape of its own. Figures carry no theme: the page adds the
light or the dark one when it draws them, and the PNG and SVG files get the light one.
"""

import math
from collections.abc import Callable, Sequence

from linnet.report import units

PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#882255",
    "#999933",
    "#44AA99",
    "#AA7744",
    "#7F7F7F",
)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
FONT = "'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"
PICTURE_FONT = "'DejaVu Sans', Verdana, Arial, sans-serif"  # has all raised digits, where no browser looks for them
# Styles of marks whose colour depends on the theme: that of text, or one that stays in the background.
INK, QUIET = "ink", "quiet"


def colours(architectures: Sequence[str]) -> dict[str, str]:
    """The colour of each architecture, by its place in the study."""
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(architectures)}


def shapes(architectures: Sequence[str]) -> dict[str, str]:
    return {name: SHAPES[index % len(SHAPES)] for index, name in enumerate(architectures)}


def theme(dark: bool = False, font: str = FONT) -> dict:
    """The vega-lite configuration that is merged into a figure when it is drawn."""
    ink, soft, faint, page = (
        ("#e8e6e3", "#a9a7a3", "#3a3a3d", "#1b1b1e") if dark else ("#1d1d1f", "#5c5c61", "#e7e5e1", "#ffffff")
    )
    return {
        "background": page,
        "font": font,
        "view": {"stroke": None},
        "axis": {
            "labelColor": soft,
            "titleColor": ink,
            "gridColor": faint,
            "domainColor": soft,
            "tickColor": soft,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 8,
            "labelFlush": False,
        },
        "legend": {
            "labelColor": ink,
            "titleColor": soft,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "symbolStrokeWidth": 2,
        },
        "title": {"color": ink, "fontSize": 13, "fontWeight": 600, "anchor": "start", "offset": 8},
        "text": {"color": ink, "fontSize": 11},
        "style": {INK: {"color": ink}, QUIET: {"color": soft}},
    }


def padded(values: Sequence[float], logarithmic: bool, share: float = 0.05, least: float = 1.05) -> list[float]:
    """The range of an axis: that of the values and a margin on both sides. One value alone gets some room too.

    Args:
        values: the values to draw.
        logarithmic: whether the axis is logarithmic.
        share: margin on each side, as a share of the range.
        least: for a logarithmic axis, least ratio of its ends, so that values that are nearly equal look equal, and
            ticks need no five digits.
    """
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not logarithmic)]
    if not finite:
        return [1.0, 10.0] if logarithmic else [0.0, 1.0]
    low, high = min(finite), max(finite)
    if logarithmic:
        margin = share * math.log(high / low) if high > low else math.log(1.5)
        margin = max(margin, (math.log(least) - math.log(high / low)) / 2)
        return [low * math.exp(-margin), high * math.exp(margin)]
    margin = share * (high - low) if high > low else 0.1 * abs(high) or 0.5
    return [low - margin, high + margin]


def decimal_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round positions on a logarithmic axis: 1 to 9, 1, 2, 5 or powers of ten; even steps where those are too few."""
    for mantissas in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        ticks = [
            float(f"{mantissa}e{exponent}")
            for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for mantissa in mantissas
        ]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) < 3:
            return even_ticks(low, high, most)
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def binary_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Powers of two, for bytes."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / most))
    return [2.0**exponent for exponent in range(first, last + 1, step)] or [low]


def duration_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round times in seconds: 1, 2, 5, 10, 20, 30 s, the same in minutes and hours, and decades of days."""
    steps = (1, 2, 5, 10, 20, 30)
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, *steps, *(60 * step for step in steps)]
    ticks += [3600 * step for step in (1, 2, 5, 10)]
    ticks += [86400 * step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)]
    ticks = [float(tick) for tick in ticks if low <= tick <= high]
    return ticks[:: math.ceil(len(ticks) / most)] if len(ticks) > 1 else decimal_ticks(low, high, most)


def even_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(unit * factor for factor in (1, 2, 5, 10) if (high - low) / (unit * factor) <= most)
    first = math.ceil(low / step)
    return [float(f"{index * step:.12g}") for index in range(first, math.floor(high / step) + 1)]


AXES: dict[str, tuple[str, Callable[[float, int], str], int, Callable]] = {
    # what: title, how a tick reads, with how many digits at least, where ticks stand
    "flops": ("training compute C (exact FLOPs)", units.scientific, 2, decimal_ticks),
    "loss": ("held-out loss (nats per token)", lambda value, digits: f"{value:.{digits}g}", 6, decimal_ticks),
    "params": ("non-embedding parameters N", units.count, 3, decimal_ticks),
    "tokens": ("training tokens D", units.count, 3, decimal_ticks),
    "bytes": ("state bytes per sequence", units.size, 3, binary_ticks),
    "number": ("", units.significant, 1, decimal_ticks),
    "factor": ("compute at equal loss, relative", units.significant, 1, decimal_ticks),
    "ratio": ("tokens per parameter M", units.significant, 1, decimal_ticks),
    "offset": ("offset from the best size", units.significant, 1, decimal_ticks),
    "percent": ("perplexity over the lowest (%)", units.significant, 1, decimal_ticks),
    "perplexity": ("optimal perplexity P*", units.significant, 2, decimal_ticks),
    "numbers": ("numbers in the state M", units.count, 2, decimal_ticks),
    "share": ("share of attention", units.significant, 1, decimal_ticks),
    "batch": ("tokens per step", units.count, 2, decimal_ticks),
    "passes": ("passes over the data", units.significant, 1, decimal_ticks),
    "seconds": ("seconds of training", lambda value, digits: units.duration(value), 3, duration_ticks),
}


def axis(
    alt, kind: str, domain: Sequence[float], title: str | None = "", most: int = 7, logarithmic: bool = True
) -> dict:
    """Scale and axis of a quantity named in `AXES`, as keyword arguments of `alt.X` or `alt.Y`.

    Args:
        alt: the altair module (imported late by the callers).
        domain: [low, high], already padded.
        title: "" is the title of the kind, None is none.
        most: at most this many ticks.
    """
    known_title, label, fewest, place = AXES[kind]
    ticks = (place if logarithmic else even_ticks)(domain[0], domain[1], most)
    tries = [[label(tick, digits) for tick in ticks] for digits in range(fewest, 13)]
    named = next((labels for labels in tries if len(set(labels)) == len(ticks)), tries[0])  # times have no digits
    names = "[" + ",".join(f"'{name}'" for name in named) + "]"
    places = "[" + ",".join(repr(tick) for tick in ticks) + "]"
    return {
        "title": known_title if title == "" else title,
        "scale": alt.Scale(domain=list(domain), nice=False, **({"type": "log"} if logarithmic else {"zero": False})),
        "axis": alt.Axis(values=ticks, labelExpr=f"{names}[indexof({places}, datum.value)]"),
    }
