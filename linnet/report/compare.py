"""The page of `linnet compare`: models side by side, with intervals, paired tests, and needles."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from linnet import provenance
from linnet.config import FIGURES, check_study
from linnet.evaluate.compare import LEVEL, RESAMPLES, Comparison, Difference, Shared
from linnet.evaluate.compare_words import REAL, between, needle_name, notes, shown, title
from linnet.report import needle, shell, style, units
from linnet.report.drawing import Canvas, Figure
from linnet.report.needle import Constants, Haystack
from linnet.runs.files import write_atomic


@dataclass(frozen=True)
class Side:
    """The data of a page of comparisons; `architectures` are the models' names, under the name that `Canvas` reads."""

    architectures: list[str]
    groups: Sequence[Shared]
    comparisons: Sequence[Comparison]
    constants: Constants

    def of(self, group: Shared) -> list[Comparison]:
        return [one for one in self.comparisons if group.owns(one)]


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
    for _, figures, _, _ in drawn:
        for figure in figures:
            shell.write_pictures(path.parent, figure)
    write_atomic(path, _page(side, drawn, command, problems))
    return path


def _page(side: Side, drawn: list[tuple], command: str, problems: Sequence[str]) -> str:
    findings = [line for _, _, lines, _ in drawn for line in lines]
    parts = [
        f'<p class="lead">{_summary(side)}</p>',
        *(f'<p class="notice">{escape(line)}.</p>' for line in _lacking(side)),
        *(f'<p class="notice">Left out: {escape(problem)}.</p>' for problem in problems),
        "<h2>What was found</h2>",
        f'<ul class="findings">{"".join(f"<li>{line}</li>" for line in findings)}</ul>',
        shell.key(side.architectures),
        *_models(side),
    ]
    for _, figures, _, after in drawn:
        parts += [*(shell.section(figure, command) for figure in figures), *after]
    facts = {
        "Redraw": f"<code>{escape(command)}</code>, from the evaluations of the run folders alone",
        "Intervals": f"{LEVEL:.0%}, percentiles of {RESAMPLES:,} bootstrap resamples over items (documents, questions, "
        "needle cells), the same ones for every model",
        "Tests": "paired permutation test of one metric a task (what its suite counts, else the first); p-values "
        f"of all tests on this page adjusted together by Holm's method; a difference is called one below {REAL:g}",
        **_made(side),
        "Drawn with": escape(shell.drawn_with()),
    }
    parts += ["<h2>How this was made</h2>", shell.facts(facts)]
    return shell.document("Models compared", parts)


def _made(side: Side) -> dict[str, str]:
    """When and with what the models were trained and evaluated."""
    about = [entry.evaluation.model for group in side.groups for entry in group.entries]
    return {
        "Trained with": escape(provenance.shown(one.get("trained") or {} for one in about)),
        "Evaluated with": escape(provenance.shown(one.get("evaluated") or {} for one in about)),
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
    tests = sum(len(one.differences) for one in side.comparisons)
    text = f"{models}, {units.plural(len(side.groups), 'evaluation')}, {units.plural(tests, 'paired test')}."
    return escape(text)


def _lacking(side: Side) -> list[str]:
    return [
        f"{units.listed(list(group.lacking))} {'has' if len(group.lacking) == 1 else 'have'} no {title(group)}"
        for group in side.groups
        if group.lacking
    ]


def _group(side: Side, group: Shared, number: int) -> tuple[list[Figure], list[str], list[str]]:
    """Figures, headlines and tables of one evaluation."""
    own = side.of(group)
    figures, lines, after = [], [_line(one) for one in own if one.differences], _tables(side, group, own, number)
    if group.kind == "needle":
        name = needle_name(group.asked)
        grids = [needle.Grid.of(entry.name, entry.evaluation, side.constants) for entry in group.entries]
        haystack = Haystack(f"needle-{name}-{number}" if number else f"needle-{name}", grids, side.architectures)
        figures += needle.figures(haystack)
        lines = needle.lines(haystack) + lines
        after = needle.tables(haystack) + after
    else:
        figures += _intervals(side, group, own, number)
        if group.kind == "text":
            figures += _contexts(side, group, number)
    return figures, [line for line in lines if line], after


def _line(one: Comparison) -> str:
    """Returns a sentence on the best model, whether it beats guessing, and which differences may be chance."""
    task, metric = escape(one.task), escape(one.metric.replace("_", " "))
    guessing = "" if not one.chance else f"; guessing has {shown(one.chance)}"
    if all(one.guesses(number) for number in one.numbers):
        return f"{task}: no model is shown to do better than guessing, which has {metric} {shown(one.chance)}."
    numbers = {number.name: f"{shown(number.value)}{between(number.interval)}" for number in one.numbers}
    text = units.ranked(one.order, metric, numbers.__getitem__, one.better == "higher")
    return f"{task}: {text[:-1]}{guessing}."


def _p(value: float) -> str:
    return f"{value:.2g}"


def _tables(side: Side, group: Shared, own: list[Comparison], number: int) -> list[str]:
    """Values of all metrics, and the pairs that were tested."""
    names = [entry.name for entry in group.entries]
    columns = ("Task", "Metric", "#Items", *(f"#{shell.swatch(side.architectures, name)}" for name in names))
    rows = []
    for one in own:
        cells = []
        for name in names:
            found = next((value for value in one.numbers if value.name == name), None)
            if found is None:
                cells.append(shell.sorted_by(None, units.MISSING))
                continue
            value = f"<b>{shown(found.value)}</b>" if name == one.best and len(names) > 1 else shown(found.value)
            fine = "" if found.interval is None else f'<div class="fine">{between(found.interval).strip(" ()")}</div>'
            cells.append(shell.sorted_by(f"{found.value:.10g}", value + fine))
        better = f'<div class="fine">{one.better} is better</div>'
        count = f"{one.n:,}" if one.n else units.MISSING
        better += "" if one.chance is None else f'<div class="fine">guessing has {shown(one.chance)}</div>'
        count += f'<div class="fine">{one.left_out:,} not in common</div>' if one.left_out else ""
        rows.append((escape(one.task), escape(one.metric.replace("_", " ")) + better, count, *cells))
    parts = [f"<h2>All numbers: {escape(title(group))}</h2>"]
    parts += [f'<p class="caption">{escape(note)}</p>' for note in notes(group, own)]
    parts.append(shell.table(f"numbers-{number}", columns, rows, "sortable"))
    differences = [(one, difference) for one in own for difference in one.differences]
    if differences:
        parts.append(_pairs(side, differences, number))
    return parts


def _pairs(side: Side, differences: list[tuple[Comparison, Difference]], number: int) -> str:
    columns = ("Task", "Metric", "Model", "minus", "#Difference", "#95 % interval", "#p", "#p, adjusted")
    rows = []
    for one, found in differences:
        cells: list = [shell.number(found.value, shown), between(found.interval).strip(" ()")]
        for p in (found.p, found.adjusted):
            text = f"<b>{_p(p)}</b>" if p == found.adjusted and found.adjusted < REAL else _p(p)
            cells.append(shell.sorted_by(f"{p:.10g}", text))
        models = [shell.swatch(side.architectures, name) for name in (found.first, found.second)]
        rows.append((escape(one.task), escape(one.metric.replace("_", " ")), *models, *cells))
    return shell.table(f"pairs-{number}", columns, rows, "sortable")


def _intervals(side: Side, group: Shared, own: list[Comparison], number: int) -> list[Figure]:
    """Each task's metric that is tested, else its first, by model, with its interval."""
    firsts: dict[str, Comparison] = {}
    for one in own:
        if one.n and (one.task not in firsts or one.differences):
            firsts[one.task] = one
    if not firsts:
        return []
    canvas = Canvas(side)
    alt = canvas.alt
    rows, guesses = [], []
    for one in firsts.values():
        task = f"{one.task}: {one.metric.replace('_', ' ')}"
        guesses += [] if one.chance is None else [{"task": task, "value": one.chance}]
        for found in one.numbers:
            low, high = found.interval or (found.value, found.value)
            row = {"architecture": found.name, "task": task, "value": found.value, "low": low, "high": high}
            rows.append(row | {"number": f"{shown(found.value)}{between(found.interval)}"})
    domain = [row[end] for row in rows for end in ("low", "high")] + [row["value"] for row in guesses]
    domain = style.padded(domain, False)
    metrics = {one.metric.replace("_", " ") for one in firsts.values()}
    what = metrics.pop() if len(metrics) == 1 else "value of the metric"
    better = {one.better for one in firsts.values()}
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
        {"architecture": entry.name, "context": one["start"], "loss": one["loss"], "place":
         f"{one['start']:,} to {one['end'] - 1:,} tokens before", "number": f"{one['loss']:.4f} nats per token"}
        for entry in group.entries
        for one in entry.evaluation.detail.get("contexts", [])
    ]  # fmt: skip
    if not rows:
        return []
    places = [row["context"] for row in rows]
    x = alt.X("context:Q", title="tokens of context (at least)", scale=alt.Scale(type="log", base=2))
    x = x.axis(values=sorted(set(places)), format=",", grid=False)
    y = alt.Y("loss:Q", title="loss (nats per token)", scale=alt.Scale(zero=False))
    base, tooltip = canvas.chart(rows), canvas.tooltip(("architecture", "place", "number"))
    line = base.mark_line(strokeWidth=1.8).encode(x, y, canvas.colour(), strokeOpacity=canvas.fade(0.9))
    dots = base.mark_point(size=58, filled=True, opacity=1)
    dots = dots.encode(x, y, canvas.colour(), canvas.shape(), fillOpacity=canvas.fade(), tooltip=tooltip)
    chart = canvas.layer(line, dots).properties(width=860, height=280)
    caption = (
        "Mean loss of tokens by how many tokens of their document stand before them: where it falls, context helps."
    )
    return [canvas.figure(f"contexts-{number}", f"Loss by context: {title(group)}", caption, chart)]
