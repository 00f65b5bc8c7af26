"""The figures of the page of a corpus. Their width is that of the page, so that they fit a telephone."""

import math
from collections.abc import Callable

import numpy as np

from linnet.corpus.page.records import CorpusRecords, plain
from linnet.report import style, units
from linnet.report.drawing import Canvas, Figure

WIDTH = 760  # pixels, in pictures
BAR = 26  # pixels per bar
MOST = 16  # most bars of a figure
BINS = 60  # most bins of the histogram of scores


def draw(found: CorpusRecords) -> list[Figure]:
    """All figures that the records allow, in the order of the page."""
    makers: tuple[Callable, ...] = (stages, drops, token_lengths, scores)
    return [figure for figure in (make(found) for make in makers) if figure is not None]


def on_page(figure: Figure) -> Figure:
    """Returns a figure that takes the width of the page."""
    fit = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return Figure(figure.name, figure.title, figure.caption, figure.spec | fit)


def stages(found: CorpusRecords) -> Figure | None:
    """Bytes that each stage leaves, by source."""
    rows, order = [], []
    for step in found.steps:
        # A stage that reads sources, not a stage, starts a chain.
        ends = ("read",) if not step.values.get("history") else ()
        for end in (*ends, "written"):
            name = f"read by {step.name}" if end == "read" else f"after {step.name}"
            order.append(name)
            for label in step.labels:
                documents, size = step.of(f"documents {end}", label), step.of(f"bytes {end}", label)
                words = f"{units.plural(documents, 'document')}, {units.size(size)}"
                rows.append({"stage": name, "architecture": plain(label), "bytes": size, "holds": words})
    if not any(row["bytes"] for row in rows):
        return None
    canvas = Canvas(found)
    alt = canvas.alt
    y = alt.Y("stage:N", sort=order, title=None).axis(labelLimit=200)
    x = alt.X("bytes:Q", title=None).axis(labelExpr="format(datum.value, '~s') + 'B'", tickCount=6)
    bars = canvas.chart(rows).mark_bar(height=BAR - 8)
    hue = canvas.colour(legend=False)
    tooltip = canvas.tooltip(("architecture", "stage", "holds"))
    drawn = bars.encode(x, y, hue, opacity=canvas.fade(), tooltip=tooltip).properties(
        width=WIDTH, height=BAR * len(order)
    )
    caption = "Bytes of text that each stage left, by source. Point at a bar for documents and bytes."
    return canvas.figure("stages", "What each stage left", caption, drawn)


def drops(found: CorpusRecords) -> Figure | None:
    """Documents that were left out, by stage and reason."""
    rows = []
    for step in found.steps:
        read = step.of("documents read")
        for reason, number in step.drops().items():
            share = units.percent(number / read) if read else ""
            words = f"{units.plural(number, 'document')}, {share} of those that {step.name} read"
            rows.append({"reason": plain(f"{step.name}: {reason}"), "documents": number, "left out": words})
    rows = sorted(rows, key=lambda row: (-row["documents"], row["reason"]))[:MOST]
    if not rows:
        return None
    caption = "Documents that were left out, by stage and reason."
    return _bars(found, "drops", "Why documents were left out", caption, rows, "reason", "documents", ",", "left out")


def token_lengths(found: CorpusRecords) -> Figure | None:
    """Characters per token by script."""
    rows = []
    for name, share in list(found.token_scripts.items())[:MOST]:
        ratio = share.characters / share.tokens
        words = f"{ratio:.2f} characters and {share.bytes / share.tokens:.2f} bytes per token"
        rows.append({"script": name, "ratio": ratio, "length": words, "tokens": f"{share.tokens:,}"})
    if not rows:
        return None
    caption = (
        "Characters per token by script, the script with most bytes first. A token has the script of its last "
        "character. Below 1, characters are spelled as bytes."
    )
    title = "Characters per token"
    return _bars(found, "characters-per-token", title, caption, rows, "script", "ratio", ".2f", "length", ordered=True)


def scores(found: CorpusRecords) -> Figure | None:
    """The distribution of scores of each source, with the thresholds of a filter."""
    if not found.scores:
        return None
    values = np.concatenate(list(found.scores.values()))
    low, high = float(values.min()), float(np.quantile(values, 0.999))
    high = high if high > low else low + 1e-3
    bins = int(min(BINS, max(10, math.sqrt(len(values)))))
    edges = np.linspace(low, high, bins + 1)
    rows: list[dict] = []
    for label, own in found.scores.items():
        counts, _ = np.histogram(np.minimum(own, high), edges)
        for place, number in enumerate([*counts.tolist(), int(counts[-1])]):  # the last bin has an end too
            ends = edges[min(place, bins - 1)], edges[min(place, bins - 1) + 1]
            words = f"{number:,} of {len(own):,} documents at {ends[0]:.2f} to {ends[1]:.2f}"
            rows.append(
                {"architecture": plain(label), "score": edges[place], "share": number / len(own), "documents": words}
            )
    canvas = Canvas(found)
    alt = canvas.alt
    x = alt.X("score:Q", title=f"nats per {found.per}", scale=alt.Scale(domain=[low, high], nice=False)).axis(
        tickCount=7
    )
    y = alt.Y("share:Q", title="share of the documents of a source").axis(format=".0%", tickCount=5)
    lines = canvas.chart(rows).mark_line(interpolate="step-after", strokeWidth=1.6, clip=True)
    layers = [
        lines.encode(
            x, y, canvas.colour(legend=False), strokeOpacity=canvas.fade(), tooltip=canvas.tooltip(("documents",))
        )
    ]
    cuts = _cuts(found, low, high)
    rules = canvas.chart(cuts).mark_rule(strokeDash=[5, 4], strokeWidth=1.4)
    layers.append(
        rules.encode(
            x, canvas.colour(legend=False), strokeOpacity=canvas.fade(), tooltip=canvas.tooltip(("threshold",))
        )
    )
    drawn = canvas.layer(*layers).properties(width=WIDTH, height=260)
    caption = (
        "How well the evaluation model predicts the documents of each source: low scores are text that is easy to "
        "predict, often repetition, high ones text that is unlike the rest. The highest 0.1 % are in the last bin."
    )
    if cuts:
        caption += " Dashed lines are the thresholds of the filter."
    return canvas.figure("scores", "Scores", caption, drawn)


def _cuts(found: CorpusRecords, low: float, high: float) -> list[dict]:
    rows = []
    for step in found.steps:
        results = step.values.get("results") or {}
        if step.values["stage"] != "filter" or step.per != found.per:
            continue
        for label, group in results.items():
            labels = found.architectures if label == "all" else [plain(label)]
            for name, end in (("low", "below"), ("high", "above")):
                if isinstance(place := group.get(name), int | float) and low <= place <= high:
                    words = plain(f"{step.name}: {group.get(end, 0):,} documents of {label} {end} {place:.3f}")
                    rows += [{"architecture": one, "score": place, "threshold": words} for one in labels]
    return rows


def _bars(
    found: CorpusRecords,
    name: str,
    title: str,
    caption: str,
    rows: list[dict],
    label: str,
    value: str,
    form: str,
    words: str,
    ordered: bool = False,
) -> Figure:
    """Horizontal bars with their values; `ordered` keeps the order of the rows where it is not that of the values."""
    canvas = Canvas(found)
    alt = canvas.alt
    most = max(row[value] for row in rows)
    y = alt.Y(f"{label}:N", sort=[row[label] for row in rows], title=None).axis(labelLimit=210)
    x = alt.X(f"{value}:Q", title=None, scale=alt.Scale(domain=[0, 1.12 * most], nice=False))
    x = x.axis(labels=False, ticks=False, grid=False, domain=False)
    base = canvas.chart(rows)
    bars = base.mark_bar(height=BAR - 8, color=style.PALETTE[0]).encode(x, y, tooltip=canvas.tooltip((label, words)))
    text = base.mark_text(align="left", dx=4, style=style.INK).encode(x, y, text=alt.Text(f"{value}:Q", format=form))
    drawn = canvas.layer(bars, text).properties(width=WIDTH, height=BAR * len(rows))
    return canvas.figure(name, title, caption, drawn)
