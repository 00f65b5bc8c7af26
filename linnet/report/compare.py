"""The page of `linnet compare`: models side by side, with intervals, paired tests, and needles."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from linnet import provenance
from linnet.config import FIGURES, check_study
from linnet.evaluate.compare import (
    REAL,
    RESAMPLES,
    SCOPE,
    Comparison,
    Difference,
    Shared,
    between,
    needle_name,
    notes,
    shown,
    title,
)
from linnet.evaluate.needle_scores import RATIOS, THRESHOLDS, NeedleScores, needle_scores, reach, sensitivity
from linnet.evaluate.results import Evaluation
from linnet.report import shell, style, units
from linnet.report.drawing import Canvas, Figure, columns_for

# Needles in haystacks on a page: the grids as heatmaps, the four metrics, and what their constants change.


@dataclass(frozen=True)
class Constants:
    """Constants of the needle metrics that paper 000 does not state (`linnet.evaluate.needle_scores`)."""

    depth_ratio: float = 1.01
    length_ratio: float = 1.01
    threshold: float = 0.5


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
        scores = needle_scores(accuracy, **vars(constants))
        ends = reach(accuracy, lengths, constants.threshold)
        return cls(name, accuracy, lengths, detail["config"]["depths"], constants, scores, ends)


@dataclass(frozen=True)
class Haystack:
    """Grids of one kind of needle, one per model; `architectures` are the names of all models."""

    task: str
    grids: list[Grid]
    architectures: list[str]


def needle_lines(haystack: Haystack) -> list[str]:
    """Returns sentences on where the recall of each model ends and on the order of models, as HTML."""
    sentences = []
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
        sentences.append(f"{escape(haystack.task)}: {text}.")
    return sentences + _order(haystack)


def needle_tables(haystack: Haystack) -> list[str]:
    """The four metrics by model, and what other constants would give."""
    constants = haystack.grids[0].constants
    columns = ("Model", "#Accuracy", "#Weighted", "#NIAH score", "#Recall ends at", "#Longest length", "#All found at")
    rows = []
    for grid in haystack.grids:
        complete = [length for length, share in zip(grid.lengths, grid.scores.at_length, strict=True) if share == 1]
        values = (grid.accuracy.mean(), grid.scores.weighted, grid.scores.score)
        cells = [shell.number(value, "{:.4f}".format) for value in values]
        cells.append(shell.sorted_by(grid.reach or 0, units.MISSING if grid.reach is None else f"{grid.reach:,}"))
        count = f"{len(complete)} of {units.plural(len(grid.lengths), 'length')}"
        rows.append((shell.swatch(haystack.architectures, grid.name), *cells, f"{grid.lengths[-1]:,}", count))
    caption = (
        "Accuracy is the mean over the grid. Weighted counts deeper and longer cells more: by "
        f"{constants.depth_ratio:g} a step of depth and {constants.length_ratio:g} a step of length. The NIAH score "
        "multiplies each length by a penalty for finding here and there (a cell counts as found from "
        f"{constants.threshold:.0%}): 1 if every depth is found, 0 if none, else 2^((1−n)/2) for n runs of found "
        "and not found (paper 000, appendix B.1). Recall ends at the longest length up to which the mean over depths "
        f"stays at {constants.threshold:.0%} or more."
    )
    table = shell.table(f"scores-{haystack.task}", columns, rows, "sortable")
    return shell.captioned(f"Scores: {escape(haystack.task)}", caption, table, *_sensitivity(haystack))


def _sensitivity(haystack: Haystack) -> list[str]:
    columns = ("Model", "Metric", *(f"#ratio {ratio:g}" for ratio in RATIOS))
    rows = []
    for grid in haystack.grids:
        scores = {(row["ratio"], row["threshold"]): row for row in sensitivity(grid.accuracy)}
        kinds = [("weighted", "weighted", THRESHOLDS[0])]
        kinds += [(f"NIAH score, found from {threshold:.0%}", "score", threshold) for threshold in THRESHOLDS]
        for label, metric, threshold in kinds:
            name = shell.swatch(haystack.architectures, grid.name) if metric == "weighted" else ""
            rows.append((name, label, *(f"{scores[ratio, threshold][metric]:.4f}" for ratio in RATIOS)))
    caption = "The paper does not state its constants. With other ones, of depth and length alike, the same grids give:"
    return [
        f'<p class="caption" style="margin-top: 26px">{caption}</p>',
        shell.table(f"constants-{haystack.task}", columns, rows),
    ]


def _order(haystack: Haystack) -> list[str]:
    """Whether the constants decide the order of the models."""
    if len(haystack.grids) < 2:
        return []
    scores = [sensitivity(grid.accuracy) for grid in haystack.grids]
    rows = zip(*scores, strict=True)
    orders = {tuple(sorted(range(len(row)), key=lambda i: (-row[i]["score"], i))) for row in rows}
    choices = f"{len(scores[0])} choices of the constants"
    if len(orders) > 1:
        text = f"the NIAH scores have {len(orders)} orders under {choices}"
    else:
        text = f"the NIAH scores have one order under all {choices}"
    return [f"{escape(haystack.task)}: {text}; the tests of the accuracy say which models differ."]


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
    for what, label in (("at", "found at a length"), ("up", "found up to a length")):
        rows = []
        for grid in haystack.grids:
            values = grid.scores.at_length if what == "at" else grid.scores.up_to_length
            for length, value in zip(grid.lengths, values, strict=True):
                rows.append(
                    {"architecture": grid.name, "length": length, "value": value, "place": f"{length:,} tokens",
                     "accuracy": f"{value:.1%} {label}"}
                )  # fmt: skip
        wide = alt.Scale(domain=style.padded([row["length"] for row in rows], False))
        x = alt.X("length:Q", title="length of the prompt (tokens)", scale=wide)
        x = x.axis(format=",.0f", tickCount=6, grid=False)
        y = alt.Y("value:Q", title=label, scale=alt.Scale(domain=[0, 1])).axis(format=".0%", tickCount=5)
        base, tooltip = canvas.chart(rows), canvas.tooltip(("architecture", "place", "accuracy"))
        level = canvas.chart([{"value": haystack.grids[0].constants.threshold}])
        level = level.mark_rule(strokeDash=[3, 3], style=style.QUIET).encode(alt.Y("value:Q"))
        panels.append(canvas.layer(level, *_curve(canvas, base, x, y, tooltip)).properties(width=420, height=260))
    caption = "Mean over depths at each length, and over all up to it. Recall ends where a model falls below the line."
    name = f"{haystack.task}-lengths"
    drawn = canvas.joined("hconcat", panels, 28)
    return canvas.figure(name, f"Recall by length: {haystack.task}", caption, drawn)


def _curve(canvas: Canvas, base, x, y, tooltip: list) -> list:
    """The points of each model, joined by a line."""
    line = base.mark_line(strokeWidth=1.8).encode(x, y, canvas.colour(), strokeOpacity=canvas.fade(0.9))
    dots = base.mark_point(size=58, filled=True, opacity=1)
    return [line, dots.encode(x, y, canvas.colour(), canvas.shape(), fillOpacity=canvas.fade(), tooltip=tooltip)]


@dataclass(frozen=True)
class Side:
    """The data of a page of comparisons; `architectures` are the models' names, under the name that `Canvas` reads."""

    architectures: list[str]
    groups: Sequence[Shared]
    comparisons: Sequence[Comparison]
    constants: Constants

    def of(self, group: Shared) -> list[Comparison]:
        return [comparison for comparison in self.comparisons if group.owns(comparison)]


def write_comparison(
    groups: Sequence[Shared],
    comparisons: Sequence[Comparison],
    page: str | Path,
    *,
    command: str = "linnet compare",
    constants: Constants | None = None,
    problems: Sequence[str] = (),
) -> Path:
    """Writes the page, and a PNG and an SVG of each figure beside it.

    Args:
        groups: output of `linnet.evaluate.compare.shared`.
        comparisons: output of `linnet.evaluate.compare.compare`.
        page: path of an .html file; its folder is created.
        command: command that makes the page again, shown on it.
        constants: constants of the needle metrics; None uses the defaults.
        problems: problems of files that could not be read, shown on the page.

    Raises:
        ConfigError: the page cannot be written, or the extra `study` is not installed.
    """
    check_study(FIGURES, "compare")
    path = shell.page_path(Path(page).parent, page)
    names = list(dict.fromkeys(entry.name for group in groups for entry in group.entries))
    side = Side(names, groups, comparisons, constants or Constants())
    drawn = [(group, *_group(side, group, number)) for number, group in enumerate(groups)]
    figures = [figure for _, of_group, _, _ in drawn for figure in of_group]
    shell.write_page(path, _page(side, drawn, command, problems), figures)
    return path


def _page(side: Side, drawn: list[tuple], command: str, problems: Sequence[str]) -> str:
    parts = [
        f'<p class="lead">{_summary(side)}</p>',
        *(f'<p class="notice">{escape(line)}.</p>' for line in _lacking(side)),
        *(f'<p class="notice">Left out: {escape(problem)}.</p>' for problem in problems),
        *shell.findings(line for _, _, lines, _ in drawn for line in lines),
        *(
            [f'<p class="caption">{SCOPE}</p>']
            if any(comparison.differences for comparison in side.comparisons)
            else []
        ),
        shell.key(side.architectures),
        *_models(side),
    ]
    for _, figures, _, after in drawn:
        parts += [*(shell.section(figure, command) for figure in figures), *after]
    facts = {
        "Intervals": f"95%, percentiles of {RESAMPLES:,} bootstrap resamples over items (documents, questions, "
        "needle cells), the same ones for every model; of right and wrong answers those of Clopper and Pearson, and of "
        "their differences those of Bonett and Price",
        "Tests": "paired permutation test of one metric a task (what its suite counts, else the first); p-values "
        f"of all tests on this page adjusted together by Holm's method; a difference is called one below {REAL:g}",
        **_made(side),
    }
    parts += shell.how_made(command, "the evaluations of the run folders alone", facts)
    return shell.document("Models compared", parts)


def _made(side: Side) -> dict[str, str]:
    """When and with what the models were trained and evaluated."""
    about = [entry.evaluation.model for group in side.groups for entry in group.entries]
    return {
        "Trained with": escape(provenance.shown(model.get("trained") or {} for model in about)),
        "Evaluated with": escape(provenance.shown(model.get("evaluated") or {} for model in about)),
    }


def _models(side: Side) -> list[str]:
    """A table of the models: size, and what each was trained on when it was scored."""
    columns = ("Model", "#Parameters", "#without embeddings", "#Training tokens", "#Training FLOPs", "#Step")
    rows, seen = [], set()
    for entry in (entry for group in side.groups for entry in group.entries):
        about = entry.evaluation.model
        names = ("params_total", "params_non_embedding", "tokens", "flops", "step")
        numbers = tuple(about.get(name) for name in names)
        if (entry.name, numbers) in seen:
            continue
        seen.add((entry.name, numbers))
        forms = (units.count, units.count, units.count, units.scientific, lambda step: f"{step:,}")
        cells = [
            shell.sorted_by(number, units.MISSING if number is None else form(number))
            for number, form in zip(numbers, forms, strict=True)
        ]
        rows.append((shell.swatch(side.architectures, entry.name), *cells))
    return ["<h2>The models</h2>", shell.table("models", columns, rows, "sortable")]


def _summary(side: Side) -> str:
    models = units.plural(len(side.architectures), "model")
    tests = sum(len(comparison.differences) for comparison in side.comparisons)
    return f"{models}, {units.plural(len(side.groups), 'evaluation')}, {units.plural(tests, 'paired test')}."


def _lacking(side: Side) -> list[str]:
    return [
        f"{units.listed(list(group.lacking))} {'has' if len(group.lacking) == 1 else 'have'} no {title(group)}"
        for group in side.groups
        if group.lacking
    ]


def _group(side: Side, group: Shared, number: int) -> tuple[list[Figure], list[str], list[str]]:
    """Figures, headlines and tables of one evaluation."""
    comparisons = side.of(group)
    lines = [_line(comparison) for comparison in comparisons if comparison.differences]
    after = _tables(side, group, comparisons, number)
    if group.kind == "needle":
        name = needle_name(group.asked)
        grids = [Grid.of(entry.name, entry.evaluation, side.constants) for entry in group.entries]
        haystack = Haystack(f"needle-{name}-{number}" if number else f"needle-{name}", grids, side.architectures)
        return (
            [_heatmaps(haystack), _by_length(haystack)],
            needle_lines(haystack) + lines,
            needle_tables(haystack) + after,
        )
    figures = _intervals(side, group, comparisons, number)
    if group.kind == "text":
        figures += _contexts(side, group, number)
    return figures, lines, after


def _line(comparison: Comparison) -> str:
    """Returns a sentence on the best model, whether it beats guessing, and which differences may be chance."""
    task, metric = escape(comparison.task), escape(comparison.metric.replace("_", " "))
    guessing = "" if not comparison.chance else f"; guessing has {shown(comparison.chance)}"
    if all(comparison.guesses(number) for number in comparison.numbers):
        return f"{task}: no model is shown to do better than guessing, which has {metric} {shown(comparison.chance)}."
    numbers = {number.name: f"{shown(number.value)}{between(number.interval)}" for number in comparison.numbers}
    text = units.ranked(comparison.order, metric, numbers.__getitem__, comparison.better == "higher")
    return f"{task}: {text[:-1]}{guessing}."


def _tables(side: Side, group: Shared, comparisons: list[Comparison], number: int) -> list[str]:
    """Values of all metrics, and the pairs that were tested."""
    names = [entry.name for entry in group.entries]
    columns = ("Task", "Metric", "#Items", *(f"#{shell.swatch(side.architectures, name)}" for name in names))
    rows = []
    for comparison in comparisons:
        cells = []
        for name in names:
            result = next((value for value in comparison.numbers if value.name == name), None)
            if result is None:
                cells.append(shell.sorted_by(None, units.MISSING))
                continue
            value = f"<b>{shown(result.value)}</b>" if name == comparison.best else shown(result.value)
            fine = "" if result.interval is None else f'<div class="fine">{between(result.interval).strip(" ()")}</div>'
            cells.append(shell.sorted_by(f"{result.value:.10g}", value + fine))
        better = f'<div class="fine">{comparison.better} is better</div>'
        count = f"{comparison.n:,}" if comparison.n else units.MISSING
        better += (
            "" if comparison.chance is None else f'<div class="fine">guessing has {shown(comparison.chance)}</div>'
        )
        count += f'<div class="fine">{comparison.left_out:,} not in common</div>' if comparison.left_out else ""
        rows.append((escape(comparison.task), escape(comparison.metric.replace("_", " ")) + better, count, *cells))
    parts = [f"<h2>All numbers: {escape(title(group))}</h2>"]
    parts += [f'<p class="caption">{escape(note)}</p>' for note in notes(group, comparisons)]
    parts.append(shell.table(f"numbers-{number}", columns, rows, "sortable"))
    differences = [(comparison, difference) for comparison in comparisons for difference in comparison.differences]
    if differences:
        parts.append(_pairs(side, differences, number))
    return parts


def _pairs(side: Side, differences: list[tuple[Comparison, Difference]], number: int) -> str:
    columns = ("Task", "Metric", "Model", "minus", "#Difference", "#95 % interval", "#p", "#p, adjusted")
    rows = []
    for comparison, difference in differences:
        cells: list = [shell.number(difference.value, shown), between(difference.interval).strip(" ()")]
        for p in (difference.p, difference.adjusted):
            text = f"<b>{p:.2g}</b>" if p == difference.adjusted and difference.adjusted < REAL else f"{p:.2g}"
            cells.append(shell.sorted_by(f"{p:.10g}", text))
        models = [shell.swatch(side.architectures, name) for name in (difference.first, difference.second)]
        rows.append((escape(comparison.task), escape(comparison.metric.replace("_", " ")), *models, *cells))
    return shell.table(f"pairs-{number}", columns, rows, "sortable")


def _intervals(side: Side, group: Shared, comparisons: list[Comparison], number: int) -> list[Figure]:
    """Each task's metric that is tested, else its first, by model, with its interval."""
    firsts: dict[str, Comparison] = {}
    for comparison in comparisons:
        if comparison.n and (comparison.task not in firsts or comparison.differences):
            firsts[comparison.task] = comparison
    if not firsts:
        return []
    canvas = Canvas(side)
    alt = canvas.alt
    rows, guesses = [], []
    for comparison in firsts.values():
        task = f"{comparison.task}: {comparison.metric.replace('_', ' ')}"
        guesses += [] if comparison.chance is None else [{"task": task, "value": comparison.chance}]
        for result in comparison.numbers:
            low, high = result.interval or (result.value, result.value)
            row = {"architecture": result.name, "task": task, "value": result.value, "low": low, "high": high}
            rows.append(row | {"number": f"{shown(result.value)}{between(result.interval)}"})
    domain = [row[end] for row in rows for end in ("low", "high")] + [row["value"] for row in guesses]
    domain = style.padded(domain, False)
    metrics = {comparison.metric.replace("_", " ") for comparison in firsts.values()}
    what = metrics.pop() if len(metrics) == 1 else "value of the metric"
    better = {comparison.better for comparison in firsts.values()}
    what += f" ({next(iter(better))} is better)" if len(better) == 1 else ""
    x = alt.X("value:Q", title=what, scale=alt.Scale(domain=domain, nice=False, zero=False))
    x = x.axis(tickCount=8)
    y = alt.Y("task:N", title="task and metric", sort=None).axis(labelLimit=300)
    offset = alt.YOffset("architecture:N", sort=side.architectures)
    base, tooltip = canvas.chart(rows), canvas.tooltip(("architecture", "task", "number"))
    bar = base.mark_rule(strokeWidth=2.5).encode(
        alt.X("low:Q", title=what, scale=alt.Scale(domain=domain, nice=False, zero=False)), alt.X2("high:Q"), y, offset,
        canvas.colour(), strokeOpacity=canvas.fade(0.75),
    )  # fmt: skip
    dot = base.mark_point(size=80, filled=True, opacity=1)
    dot = dot.encode(x, y, offset, canvas.colour(), canvas.shape(), fillOpacity=canvas.fade(), tooltip=tooltip)
    step = max(26, 14 * len(group.entries))
    guessing = canvas.chart(guesses).mark_tick(thickness=2, size=step, style=style.QUIET, orient="vertical")
    chart = canvas.layer(guessing.encode(x, y), bar, dot).properties(width=700, height=step * len(firsts) + 10)
    caption = "Each task's metric that is tested, else its first, with its 95 % interval over items"
    caption += f"; {next(iter(better))} is better." if len(better) == 1 else "."
    caption += " Grey lines are guessing." if guesses else ""
    return [canvas.figure(f"intervals-{number}", f"Side by side: {title(group)}", caption, chart)]


def _contexts(side: Side, group: Shared, number: int) -> list[Figure]:
    """Loss by the number of tokens before, where the models share a tokenizer."""
    if len({entry.evaluation.model.get("tokenizer") for entry in group.entries}) > 1:
        return []
    canvas = Canvas(side)
    alt = canvas.alt
    rows = [
        {"architecture": entry.name, "context": span["start"], "loss": span["loss"], "place":
         f"{span['start']:,} to {span['end'] - 1:,} tokens before", "number": f"{span['loss']:.4f} nats per token"}
        for entry in group.entries
        for span in entry.evaluation.detail.get("contexts", [])
    ]  # fmt: skip
    if not rows:
        return []
    places = [row["context"] for row in rows]
    x = alt.X("context:Q", title="tokens of context (at least)", scale=alt.Scale(type="log", base=2))
    x = x.axis(values=sorted(set(places)), format=",", grid=False)
    y = alt.Y("loss:Q", title="loss (nats per token)", scale=alt.Scale(zero=False))
    base, tooltip = canvas.chart(rows), canvas.tooltip(("architecture", "place", "number"))
    chart = canvas.layer(*_curve(canvas, base, x, y, tooltip)).properties(width=860, height=280)
    caption = (
        "Mean loss of tokens by how many tokens of their document stand before them: where it falls, context helps."
    )
    return [canvas.figure(f"contexts-{number}", f"Loss by context: {title(group)}", caption, chart)]
