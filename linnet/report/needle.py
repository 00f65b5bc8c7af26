"""Needles in haystacks on a page: the grids as heatmaps, the four metrics, and what their constants change."""

from dataclasses import dataclass
from html import escape

import numpy as np

from linnet.evaluate.needle_scores import RATIOS, THRESHOLDS, NeedleScores, needle_scores, reach, sensitivity
from linnet.evaluate.results import Evaluation
from linnet.report import shell, style, units
from linnet.report.drawing import Canvas, Figure, columns_for


@dataclass(frozen=True)
class Constants:
    """Constants of the needle metrics that paper 000 does not state (`linnet.evaluate.needle_scores`)."""

    depth_ratio: float = 1.01
    length_ratio: float = 1.01
    threshold: float = 0.5

    def scores(self, accuracy) -> NeedleScores:
        return needle_scores(
            accuracy, depth_ratio=self.depth_ratio, length_ratio=self.length_ratio, threshold=self.threshold
        )


@dataclass(frozen=True)
class Grid:
    """One model's accuracies [depths, lengths], with the prompts' lengths in tokens and the needles' depths."""

    name: str
    accuracy: np.ndarray
    lengths: list[int]
    depths: list[float]
    constants: Constants
    scores: NeedleScores
    reach: int | None

    @classmethod
    def of(cls, name: str, evaluation: Evaluation, constants: Constants) -> "Grid":
        detail = evaluation.detail
        accuracy, lengths = np.asarray(detail["accuracy"], dtype=np.float64), detail["config"]["lengths"]
        scores = constants.scores(accuracy)
        ends = reach(accuracy, lengths, constants.threshold)
        return cls(name, accuracy, lengths, detail["config"]["depths"], constants, scores, ends)


@dataclass(frozen=True)
class Haystack:
    """Grids of one kind of needle, one per model; `architectures` are the names of all models."""

    task: str
    grids: list[Grid]
    architectures: list[str]


def figures(haystack: Haystack) -> list[Figure]:
    """The heatmaps, and accuracy by length."""
    return [_heatmaps(haystack), _by_length(haystack)]


def lines(haystack: Haystack) -> list[str]:
    """Returns sentences on where the recall of each model ends and on the order of models, as HTML."""
    found = []
    for grid in haystack.grids:
        share = f"{grid.constants.threshold:.0%}"
        name = f"<b>{escape(grid.name)}</b>"
        if grid.reach is None:
            text = f"{name} finds less than {share} of the needles at the shortest length, {grid.lengths[0]:,} tokens"
        elif grid.reach == grid.lengths[-1]:
            least = min(grid.scores.at_length)
            text = f"{name} finds at least {least:.0%} of the needles at every length up to the longest, "
            text += f"<b>{grid.reach:,} tokens</b>"
        else:
            after = grid.lengths[grid.lengths.index(grid.reach) + 1]
            text = f"Recall of {name} ends at <b>{grid.reach:,} tokens</b>: at {after:,} it finds "
            text += f"{grid.scores.at_length[grid.lengths.index(after)]:.0%} of the needles, less than {share}"
        found.append(f"{escape(haystack.task)}: {text}.")
    return found + _order(haystack)


def tables(haystack: Haystack) -> list[str]:
    """The four metrics by model, and what other constants would give."""
    constants = haystack.grids[0].constants
    columns = ("Model", "#Accuracy", "#Weighted", "#NIAH score", "#Recall ends at", "#Longest length", "#All found at")
    rows = []
    for grid in haystack.grids:
        complete = [length for length, share in zip(grid.lengths, grid.scores.at_length, strict=True) if share == 1]
        values = (grid.accuracy.mean(), grid.scores.weighted, grid.scores.score)
        cells = [shell.number(value, "{:.4f}".format) for value in values]
        cells.append(shell.sorted_by(grid.reach or 0, units.MISSING if grid.reach is None else f"{grid.reach:,}"))
        found = f"{len(complete)} of {units.plural(len(grid.lengths), 'length')}"
        rows.append((shell.swatch(haystack.architectures, grid.name), *cells, f"{grid.lengths[-1]:,}", found))
    caption = (
        "Accuracy is the mean over the grid. Weighted counts deeper and longer cells more: by "
        f"{constants.depth_ratio:g} a step of depth and {constants.length_ratio:g} a step of length. The NIAH score "
        "multiplies each length by a penalty for finding here and there (a cell counts as found from "
        f"{constants.threshold:.0%}): 1 if every depth is found, 0 if none, else 2^((1−n)/2) for n runs of found "
        "and not found (paper 000, appendix B.1). Recall ends at the longest length up to which the mean over depths "
        f"stays at {constants.threshold:.0%} or more."
    )
    parts = [f"<h2>Scores: {escape(haystack.task)}</h2>", f'<p class="caption">{caption}</p>']
    return [*parts, shell.table(f"scores-{haystack.task}", columns, rows, "sortable"), *_sensitivity(haystack)]


def _sensitivity(haystack: Haystack) -> list[str]:
    columns = ("Model", "Metric", *(f"#ratio {ratio:g}" for ratio in RATIOS))
    rows = []
    for grid in haystack.grids:
        found = {(row["ratio"], row["threshold"]): row for row in sensitivity(grid.accuracy)}
        kinds = [("weighted", "weighted", THRESHOLDS[0])]
        kinds += [(f"NIAH score, found from {threshold:.0%}", "score", threshold) for threshold in THRESHOLDS]
        for title, metric, threshold in kinds:
            name = shell.swatch(haystack.architectures, grid.name) if metric == "weighted" else ""
            rows.append((name, title, *(f"{found[ratio, threshold][metric]:.4f}" for ratio in RATIOS)))
    caption = "The paper does not state its constants. With other ones, of depth and length alike, the same grids give:"
    return [
        f'<p class="caption" style="margin-top: 26px">{caption}</p>',
        shell.table(f"constants-{haystack.task}", columns, rows),
    ]


def _order(haystack: Haystack) -> list[str]:
    """Whether the constants decide the order of the models."""
    if len(haystack.grids) < 2:
        return []
    found = [sensitivity(grid.accuracy) for grid in haystack.grids]
    orders = set()
    for row in zip(*found, strict=True):
        orders.add(tuple(sorted(range(len(row)), key=lambda i: (-row[i]["score"], i))))
    if len(orders) > 1:
        text = f"its constants decide the order by NIAH score ({len(orders)} orders in {len(found[0])} choices)"
    else:
        text = f"the order by NIAH score is the same under all {len(found[0])} choices of its constants"
    return [f"{escape(haystack.task)}: {text}."]


def _heatmaps(haystack: Haystack) -> Figure:
    canvas = Canvas(haystack)
    alt = canvas.alt
    columns, panels = columns_for(len(haystack.grids)), []
    scale = alt.Scale(scheme="viridis", domain=[0, 1])
    legend = alt.Legend(title="found", format=".0%", orient="bottom", values=[0, 0.25, 0.5, 0.75, 1])
    legend.direction, legend.gradientLength = "horizontal", 240
    for grid in haystack.grids:
        rows = [
            {
                "architecture": grid.name,
                "length": length,
                "depth": depth,
                "found": grid.accuracy[i, j].item(),
                "place": f"{length:,} tokens, depth {depth:.0%}",
                "accuracy": f"{grid.accuracy[i, j]:.0%} of this cell's needles found",
                "of this length": f"{grid.scores.at_length[j]:.0%} found, penalty {grid.scores.penalties[j]:.3g}",
            }
            for j, length in enumerate(grid.lengths)
            for i, depth in enumerate(grid.depths)
        ]
        few = max(1, len(grid.lengths) * columns // 12)
        x = alt.X("length:O", title="length of the prompt (tokens)")
        x = x.axis(labelAngle=0, values=grid.lengths[:: few + (few > 1)], labelExpr="format(datum.value, ',')")
        y = alt.Y("depth:O", title="depth of the needle")
        y = y.axis(values=grid.depths[:: max(1, round(len(grid.depths) / 6))], format=".0%")
        base = canvas.chart(rows)
        tooltip = canvas.tooltip(("architecture", "place", "accuracy", "of this length"))
        cells = base.mark_rect().encode(x, y, alt.Color("found:Q", scale=scale, legend=legend), tooltip=tooltip)
        layers = [cells]
        if grid.reach is not None and grid.reach != grid.lengths[-1]:
            ends = canvas.chart([{"length": grid.reach}])  # white around black, to be seen on every cell
            for colour, dash, width in (("white", [1, 0], 4), ("black", [5, 3], 2)):
                rule = ends.mark_rule(color=colour, strokeDash=dash, strokeWidth=width)
                layers.append(rule.encode(alt.X("length:O", bandPosition=1)))
        panels.append(canvas.panel(canvas.layer(*layers), grid.name, columns))
    caption = (
        "Share of needles found, by the length of the prompt and how deep in it the needle lies (0 %: at its "
        "beginning, 100 %: just before the question). The dashed line is where recall ends."
    )
    return canvas.figure(f"{haystack.task}-grids", f"Needles: {haystack.task}", caption, canvas.grid(panels, columns))


def _by_length(haystack: Haystack) -> Figure:
    canvas = Canvas(haystack)
    alt = canvas.alt
    panels = []
    for what, title in (("at", "found at a length"), ("up", "found up to a length")):
        rows = []
        for grid in haystack.grids:
            values = grid.scores.at_length if what == "at" else grid.scores.up_to_length
            for length, value in zip(grid.lengths, values, strict=True):
                rows.append(
                    {"architecture": grid.name, "length": length, "value": value, "place": f"{length:,} tokens",
                     "accuracy": f"{value:.1%} {title}"}
                )  # fmt: skip
        wide = alt.Scale(domain=style.padded([row["length"] for row in rows], False))
        x = alt.X("length:Q", title="length of the prompt (tokens)", scale=wide)
        x = x.axis(format=",.0f", tickCount=6, grid=False)
        y = alt.Y("value:Q", title=title, scale=alt.Scale(domain=[0, 1])).axis(format=".0%", tickCount=5)
        base, tooltip = canvas.chart(rows), canvas.tooltip(("architecture", "place", "accuracy"))
        line = base.mark_line(strokeWidth=1.8).encode(x, y, canvas.colour(), strokeOpacity=canvas.fade(0.9))
        dots = base.mark_point(size=58, filled=True, opacity=1)
        dots = dots.encode(x, y, canvas.colour(), canvas.shape(), fillOpacity=canvas.fade(), tooltip=tooltip)
        level = canvas.chart([{"value": haystack.grids[0].constants.threshold}])
        level = level.mark_rule(strokeDash=[3, 3], style=style.QUIET).encode(alt.Y("value:Q"))
        panels.append(canvas.layer(level, line, dots).properties(width=420, height=260))
    caption = "Mean over depths at each length, and over all up to it. Recall ends where a model falls below the line."
    name = f"{haystack.task}-lengths"
    return canvas.figure(name, f"Recall by length: {haystack.task}", caption, alt.hconcat(*panels, spacing=28))
