"""The report of MAD scores: `write_mad_report(folder)` writes one offline page from the runs' records alone."""

from functools import partial
from html import escape
from pathlib import Path

from linnet.config import FIGURES, ConfigError, check_study, gather, grouped, refuse
from linnet.mad.checks import NOT_ENOUGH, Check, checks
from linnet.mad.mqar import HARDER, SOLVED, Comparison, Place, compare, is_mqar, settings_of
from linnet.mad.page.figures import LEGEND, Records, by_name, draw, points, task_name
from linnet.mad.results import DONE, Result, dead, read_results
from linnet.mad.scores import (
    LOSS,
    METRICS,
    PUBLISHED,
    Score,
    SettingScore,
    all_numbers,
    number_of_results,
    refusal,
    score,
    seed_agreement,
    spreads,
    write_scores,
)
from linnet.mad.settings import BUDGETS, MAD_TASKS, plan
from linnet.report import shell, units
from linnet.report.drawing import Canvas, Figure
from linnet.study.collect import RUNS

# The report of MQAR (paper 002, section 4.1): accuracy by length, pairs and width of each architecture.


def draw_recall(records: Records) -> Figure:
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
        colour, shape = (by_name(canvas, channel, LEGEND | {"columns": 4}) for channel in ("Color", "Shape"))
        lines = base.mark_line(strokeWidth=1.8).encode(x, y, colour, strokeOpacity=canvas.fade(0.8))
        tooltip = canvas.tooltip(("architecture", "setting", "accuracy", "spread", "learning rate", "epoch", "sizes"))
        dots = base.mark_point(size=64, filled=True, opacity=1)
        dots = dots.encode(x, y, colour, shape, fillOpacity=canvas.fade(), tooltip=tooltip)
        panels.append(canvas.layer(lines, dots).properties(width=410, height=300, title=f"width {width}"))
    caption = (
        "Share of the questions answered right on the test split, from few pairs in a short sequence to many in a long "
        f"one; of the learning rates the best on the validation split. Training ends above {SOLVED:.0%}."
    )
    return canvas.figure("mqar", "Multi-query recall", caption, canvas.joined("hconcat", panels, 28))


def recall_lines(records: Records) -> list[str]:
    """The headlines as HTML: the bar of paper 002, and what each architecture recalls."""
    lines = []
    if {"hgrn2", "hgrn"} <= set(records.architectures):
        lines.append(bar(compare(records.scores)))
    for name in records.architectures:
        settings = settings_of(records.scores, name)
        solved = [place for place, setting in settings.items() if setting.score >= SOLVED]
        text = (
            f"<b>{escape(name)}</b> recalls at least {SOLVED:.0%} in <b>{len(solved)} of {len(settings)}</b> settings"
        )
        if len(solved) < len(settings):
            worst = min(settings, key=lambda place: settings[place].score)
            text += f"; the lowest accuracy seen is {points(settings[worst].score)}{units.SPACE}%, at {worst}"
        lines.append(f"{text}.")
    return lines


def bar(found: Comparison) -> str:
    """The comparison in words, as HTML."""
    return f"{escape(found.claim)} (paper 002, 4.1): <b>{found.verdict}</b>{escape(found.told)}."


def recall_tables(records: Records) -> list[str]:
    """All accuracies, a row for each architecture and width."""
    shapes = (f"#{length}, {pairs} pairs" for length, pairs in HARDER)
    columns = ("Architecture", "#Width", *shapes, "#Mean", "#Parameters", "#State", "#Seeds")
    rows = []
    for name in records.architectures:
        settings = settings_of(records.scores, name)
        for width in sorted({place.width for place in settings}):
            width_settings = {place: setting for place, setting in settings.items() if place.width == width}
            cells = [_recall_cell(width_settings.get(Place(width, *shape))) for shape in HARDER]
            best = [run for setting in width_settings.values() for run in setting.best.values()]
            whole = len(width_settings) == len(HARDER)  # a mean over fewer settings cannot be compared with the others
            mean = sum(setting.score for setting in width_settings.values()) / len(width_settings) if whole else None
            numbers = [shell.number(mean, points), shell.number(best[0].parameters, units.count)]
            numbers += [shell.number(best[0].state_size, lambda value: f"{value:,}" if value else "none")]
            numbers += [shell.number(min(len(setting.best) for setting in width_settings.values()), str)]
            rows.append((shell.swatch(records.architectures, name), width, *cells, *numbers))
    caption = (
        "Accuracy in per cent. Hover over one for its learning rate and the epoch at which training ended. The state "
        "is what a sequence carries from token to token whatever its length."
    )
    table = shell.table("recall", columns, rows, "sortable")
    return shell.captioned("All accuracies", caption, table)


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


def _recall_cell(setting: SettingScore | None) -> shell.Cell:
    if setting is None:
        return shell.sorted_by(None, units.MISSING)
    title = f"{setting.score:.6g}; learning rate {_told(setting, 'learning_rate')}, epoch {_told(setting, 'epoch')}"
    return shell.Cell(points(setting.score), f' data-v="{setting.score:.10g}" title="{title}"')


# The shares of experts in routed layers, a part of the report of MAD scores.

_APART = 'style="padding-left:14px"'
STRONGEST = 3.0  # times an even share at which a cell has its full colour


def routed_runs(records: Records) -> list[tuple[str, Result]]:
    """(architecture, run) of the runs that count and have routed layers: of each setting that of the first seed."""
    runs = []
    for name, mad_score in records.scores.items():
        for setting in mad_score.settings.values():
            run = setting.best[min(setting.best)]
            if run.expert_shares:
                runs.append((name, run))
    return runs


def expert_line(records: Records) -> str:
    """The headline as HTML, "" without experts."""
    runs = routed_runs(records)
    layers = [shares for _, run in runs for shares in run.expert_shares.values()]
    if not layers:
        return ""
    names = [
        f"{escape(name)}, {escape(run.setting)}, layer {escape(layer)}: {_counted(dead(shares))}"
        for name, run in runs
        for layer, shares in run.expert_shares.items()
        if dead(shares)
    ]
    where = f"{units.plural(len(layers), 'layer')} with experts of the runs that count"
    if not names:
        return f"Every expert gets tokens, in the {where}."
    shown = "; ".join(names[:4]) + (f"; and {len(names) - 4} more" if len(names) > 4 else "")
    return f"In <b>{len(names)}</b> of the {where}, one or more experts get next to no token ({shown})."


def expert_table(records: Records) -> list[str]:
    """Returns a row per layer at the baselines (or the first setting that is there); [] without experts."""
    rows, most = [], 0
    seen: set[tuple[str, str]] = set()
    for name, run in routed_runs(records):
        if (name, run.task) in seen:
            continue
        seen.add((name, run.task))
        for layer, shares in run.expert_shares.items():
            most = max(most, len(shares))
            gone = _counted(dead(shares))
            about = (shell.swatch(records.architectures, name), task_name(run.task), escape(layer))
            rows.append((about, shares, shell.Cell(gone or "none", f" {_APART}", "bad" if gone else "")))
    if not rows:
        return []
    experts = (f"#{number}" for number in range(1, most + 1))
    columns = ("Architecture", "Task", "Layer", *experts, shell.Cell("Without tokens", f" {_APART}"))
    none = shell.Cell("", kind="")
    cells = [
        (*about, *(_share_cell(share, len(shares)) for share in shares), *[none] * (most - len(shares)), end)
        for about, shares, end in rows
    ]
    caption = (
        "Where the tokens of the test split go, in per cent of their choices (12.5 is even among eight): of the run "
        "that counts at the baseline of each task. A layer is its block and its part. An expert "
        "that gets less than a hundredth of an even share is named as without tokens."
    )
    return shell.captioned("Load of the experts", caption, shell.table("experts", columns, cells))


def _counted(experts: list[int]) -> str:
    """Returns the number of an expert, counted from 1."""
    return units.listed([str(expert + 1) for expert in experts])


def _share_cell(share: float, experts: int) -> shell.Cell:
    strength = min(1.0, share * experts / STRONGEST)
    colour = f"rgba(0, 114, 178, {0.55 * strength:.2f})"
    return shell.Cell(points(share), f' style="background:{colour};padding-left:10px" title="{share:.6g}"')


def write_mad_report(
    folder: str | Path, out: str | Path | None = None, *, metric: str | None = None, legacy: bool | None = None
) -> Path:
    """Writes the report of a MAD folder; nothing is trained.

    Args:
        folder: of `linnet mad run`: mad.csv, or run folders with a result.json.
        out: the page; default `report/index.html` in the folder. Figures and scores.csv go beside it.
        metric, legacy: as in `linnet.mad.scores.score`; None is that of the budget.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the folder holds no runs or unusable ones, the metric is unknown, `out` is not a page, or the extra
            `study` is not installed; all problems at once.
    """
    problems: list[str] = []
    results, scores = [], None
    with gather(problems):
        check_study(FIGURES, "report")
    with gather(problems):
        results = read_results(folder)
    number = number_of_results(results)
    metric, legacy = number["metric"] if metric is None else metric, number["legacy"] if legacy is None else legacy
    with gather(problems):
        if metric == LOSS:  # its curves are of accuracies
            fix = f"use one of {', '.join(METRICS)}; every page has a heatmap of losses"
            raise ConfigError([f"metric: {metric!r} is not a score of a page; {fix}"], "report")
        scores = score(results, metric=metric, legacy=legacy)
    if out is not None or Path(folder).is_dir():  # reading reports a folder that does not exist
        with gather(problems):
            shell.check_page(shell.page_name(folder, out))
    refuse(problems, "report")
    records = Records(Path(folder), results, scores, checks(scores))
    page = shell.page_path(folder, out)
    figures = []
    if records.architectures:
        figures = [draw_recall(records)] if is_mqar(scores) else draw(records)
    write_scores(page.parent, scores)
    usual = {"metric": metric, "legacy": legacy} == number
    options = {"out": out, "metric": None if usual or metric == METRICS[0] else metric}
    options["legacy"] = None if usual else legacy or None
    html = _page(records, figures, shell.typed("linnet", "mad", "report", folder, **options))
    shell.write_page(page, html, figures)
    return page


def _page(records: Records, figures: list, command: str) -> str:
    name = records.folder.resolve().name
    parts = [
        f'<p class="lead">{_summary(records)}</p>',
        *(f'<p class="notice">{escape(line)}.</p>' for line in notices(records)),
        *shell.findings(findings(records)),
    ]
    if records.architectures:
        parts += [shell.key(records.architectures), *(shell.section(figure, command) for figure in figures)]
        tables = (recall_tables,) if is_mqar(records.scores) else (_scores, _numbers, _pairs)
        parts += [line for table in tables for line in table(records)]
        parts += expert_table(records)
    meaning = "the mean over tasks of the mean over settings of the best run at each setting"
    facts = {
        "Score": "" if is_mqar(records.scores) else meaning,
        "Selection": f"best run by the {'test split itself (legacy)' if records.scores.legacy else 'validation split'}",
        "Trained with": shell.made_by(records.folder / RUNS),
    }
    parts += shell.how_made(command, "the result rows alone", facts)
    return shell.document(f"{'MQAR' if is_mqar(records.scores) else 'MAD scores'}: {name}", parts)


def _summary(records: Records) -> str:
    results = records.results
    settings = len({result.setting for result in results})
    names = len({result.architecture for result in results})
    seeds = len({result.seed for result in results})
    text = f"{units.plural(len(results), 'run')} of {units.plural(names, 'architecture')} at "
    text += f"{units.plural(settings, 'setting')} of {units.plural(len({r.task for r in results}), 'task')}"
    text += f", {units.plural(seeds, 'seed')}."
    budgets = {result.budget for result in results}
    budget = budgets.pop() if len(budgets) == 1 else ""
    if budget in BUDGETS:
        spec = "mad-lab" if any(result.spec == "mad-lab" for result in results) else "paper"
        whole = len(plan(budget, spec=spec)) * names * seeds
        text += f" That is all of the budget {budget}." if len(results) == whole else ""
        if len(results) < whole:
            text += f" The whole budget {budget} of these architectures is {whole:,} runs."
    return escape(text)


def notices(records: Records) -> list[str]:
    """Returns notes that a reader needs before the scores."""
    groups = grouped(
        (mad_score.reasons, mad_score.architecture) for mad_score in records.scores.values() if not mad_score.comparable
    )
    everyone = len(records.scores)
    lines = [label[0].upper() + label[1:] for label in records.scores.labels]
    for reasons, names in groups.items():
        who = "Not comparable with other scores" if len(names) == everyone else f"Not comparable: {', '.join(names)}"
        lines.append(f"{who} ({'; '.join(reasons)})")
    missing = [task_name(task) for task in MAD_TASKS if task not in records.scores.tasks]
    if missing and records.architectures and not is_mqar(records.scores):
        lines.append(f"The scores leave out {units.listed(missing)}")
    lines += [f"{name} has no score: {reason}" for name, reason in records.scores.unscored.items()]
    if records.scores.legacy:
        lines.append("Runs were selected on the test split, as in the published implementation, which flatters scores")
    return lines


def findings(records: Records) -> list[str]:
    """The headlines as HTML: the highest score, who leads each task, the paper's findings, what diverged."""
    if is_mqar(records.scores):
        return [line for line in (*recall_lines(records), _lost(records)) if line]
    lines = [_highest(records), _leaders(records), _solved(records), *map(_finding, records.checks)]
    lines += [*_agreement(records), expert_line(records), _curves(records), _lost(records)]
    return [line for line in lines if line]


def _solved(records: Records) -> str:
    if not records.scores.solved:
        return ""
    names = units.listed([task_name(task) for task in records.scores.solved])
    return f"All architectures reach 100{units.SPACE}% at {names}: the score differs by the other tasks alone."


def _agreement(records: Records) -> list[str]:
    """Whether two seeds order the architectures alike, and how many tasks tell them apart."""
    task_spreads = spreads(records.scores)
    lines = []
    if task_spreads and len(records.scores) > 1:
        good = sum(spread.discriminates for spread in task_spreads)
        gaps = units.listed([f"{task_name(spread.task)} {points(spread.gap)}" for spread in task_spreads])
        summary = f"{good} of {len(task_spreads)} tasks tell the highest and the lowest apart by 10 points or more"
        if len({result.seed for result in records.results}) == 1:
            summary = "One seed does not say whether the highest and the lowest of a task differ by more than chance"
        lines.append(f"{summary} (differences of points: {gaps}).")
    for pair in seed_agreement(records.results):
        rank = "" if pair.spearman is None else f" (rank correlation {pair.spearman:.2f})"
        lines.append(
            f"Seeds {pair.seeds[0]} and {pair.seeds[1]} order {pair.swaps} pairs of {len(pair.orders[0])} "
            f"architectures differently{rank}."
        )
    return lines


def _numbers(records: Records) -> list[str]:
    """The scores by both metrics and both selections, where published scores use others than the paper."""
    if not any(result.spec == "mad-lab" for result in records.results):
        return []
    every = all_numbers(records.results)
    budgets = {result.budget for result in records.results}
    refused = refusal(budgets.pop() if len(budgets) == 1 else "")
    columns = ["Architecture", *(f"#{metric}, {'test' if legacy else 'validation'}" for metric, legacy in every)]
    columns += [] if refused else ["#Published"]
    rows = []
    for name in records.architectures:
        cells = [_number(scores[name].score if name in scores.whole else None, points) for scores in every.values()]
        if not refused:
            cells.append(_number(PUBLISHED[name]["all"] / 100 if name in PUBLISHED else None, points))
        rows.append((shell.swatch(records.architectures, name), *cells))
    caption = "Accuracy in per cent: tokens or the mean over classes and batches, runs selected on either split. "
    caption += f"{escape(refused[0].upper() + refused[1:])}." if refused else "Published: arXiv:2406.06484, Figure 3."
    return shell.captioned("Both numbers, both selections", caption, shell.table("numbers", columns, rows))


def _strong(name: str) -> str:
    return f"<b>{escape(name)}</b>"


def _share(score: Score) -> str:
    return points(score.score) + (f" ± {points(score.spread)}" if score.spread is not None else "") + f"{units.SPACE}%"


def _highest(records: Records) -> str:
    order = list(records.scores.values())
    if not order:
        return "No run trained to its end, so there is nothing to compare."
    first = order[0]
    if len(order) == 1:
        return f"{_strong(first.architecture)} scores <b>{_share(first)}</b>."
    if any(score.settings.keys() != first.settings.keys() for score in order):
        return "The architectures do not have the same settings, so their scores cannot be ranked."
    text = units.ranked(records.scores.order(), "score", lambda name: _share(records.scores[name]))
    known = any(score.spread is not None for score in order)
    return text + ("" if known else " One seed gives no interval of a difference.")


def _leaders(records: Records) -> str:
    if len(records.scores) < 2:
        return ""
    leaders: dict[str, list[str]] = {}
    even = []  # tasks without a leader
    for task in records.scores.tasks:
        known = {name: score.tasks[task].score for name, score in records.scores.items() if task in score.tasks}
        settings = {frozenset(score.tasks[task].settings) for score in records.scores.values() if task in score.tasks}
        if len(known) < 2 or len(settings) > 1:
            continue  # nothing to compare, or means over different settings
        best = max(known, key=known.get)
        if level := records.scores.order(task).level(best):
            even.append(
                f"{task_name(task)} ({len(level) + 1} of {len(known)}, up to {points(known[best])}{units.SPACE}%)"
            )
        else:
            leaders.setdefault(best, []).append(f"{task_name(task)} ({points(known[best])}{units.SPACE}%)")
    parts = [f"{_strong(name)} at {units.listed(tasks)}" for name, tasks in leaders.items()]
    text = f"The highest on each task: {'; '.join(parts)}." if parts else ""
    if even:
        text += f" The highest cannot be told apart from others at {units.listed(even)}."
    return text.strip()


def _finding(check: Check) -> str:
    claim = f"{escape(check.claim)}"
    paper = f"paper 004: {points(check.paper_gain)} points"
    if check.verdict == NOT_ENOUGH:
        return f"{claim}: <b>{NOT_ENOUGH}</b>. It {escape(check.needed)} ({paper})."
    text = f"{claim}: <b>{check.verdict}</b>. "
    if len(check.pairs) == 1:
        pair = check.pairs[0]
        text += f"{escape(pair.first)} minus {escape(pair.second)} is {_signed(pair.gain)} points; {paper}."
    else:
        text += f"The mean gain of {len(check.pairs)} pairs is {points(check.gain)} points"
        if check.interval:
            text += f" (95{units.SPACE}%: {points(check.interval[0])} to {points(check.interval[1])})"
        better = sum(pair.gain > 0 for pair in check.pairs)
        text += f", above zero in {better} of {len(check.pairs)}; {paper}."
    return text + "".join(f" {escape(note[0].upper() + note[1:])}." for note in check.notes)


def _curves(records: Records) -> str:
    varied = any(setting.varied for score in records.scores.values() for setting in score.settings.values())
    if varied or not records.architectures:
        return ""
    return "Only baselines were run, so there are no difficulty curves; <code>--budget full</code> has the settings."


def _lost(records: Records) -> str:
    counts: dict[str, int] = {}
    for result in records.results:
        if not result.ended:
            status = result.status if result.status != DONE else "without a finite accuracy"
            counts[status] = counts.get(status, 0) + 1
    if not counts:
        return ""
    shown = units.listed([f"{number} {escape(status)}" for status, number in counts.items()])
    return f"{sum(counts.values())} of {units.plural(len(records.results), 'run')} took no part ({shown})."


def _scores(records: Records) -> list[str]:
    every = list(records.scores.values())
    columns = {
        "Score": lambda score: _number(score.score if score.architecture in records.scores.whole else None, points)
    }
    if any(score.spread is not None for score in every):
        columns["Spread"] = lambda score: _number(score.spread, points)
    columns |= {_title(task): _of_task(task) for task in records.scores.tasks}
    columns["Parameters"] = lambda score: _number(score.parameters, units.count)
    columns["State"] = lambda score: _number(score.state_size, lambda value: f"{value:,}" if value else "none")
    if len({len(score.settings) for score in every}) > 1:  # else it is at the top of the page
        columns["Settings"] = lambda score: _number(len(score.settings), str)
    if len({score.seeds for score in every}) > 1:
        columns["Seeds"] = lambda score: _number(len(score.seeds), str)
    if len({score.budget for score in every}) > 1:
        columns["Budget"] = lambda score: shell.Cell(escape(score.budget or units.MISSING), kind="")
    titles = ("Architecture", *(f"#{title}" for title in columns), "Comparable")
    rows = []
    for name in records.architectures:
        score = records.scores[name]
        cells = [cell(score) for cell in columns.values()]
        comparable = "yes" if score.comparable else shell.Cell("no", kind="bad")
        rows.append((shell.swatch(records.architectures, name), *cells, comparable))
    spread = ", spread as one standard deviation over seeds" if "Spread" in columns else ""
    caption = (
        f"Accuracy in per cent{spread}. Parameters are those of the model at the "
        "baseline of the first task (larger vocabularies need more); the state is what a sequence carries from token "
        "to token whatever its length, a complex mode counting as one. Clicking a column sorts, and "
        '<a href="scores.csv">scores.csv</a> has all digits.'
    )
    ids = [f"run-{escape(name)}" for name in records.architectures]
    table = shell.table("runs", titles, rows, "sortable", ids)
    return shell.captioned("All scores", caption, table)


def _of_task(task: str):
    return lambda score: _number(score.tasks[task].score if task in score.tasks else None, points)


def _title(task: str) -> str:
    """Returns the title of a column; two words take two lines."""
    return task_name(task).capitalize().replace(" ", "<br>")


_number = partial(shell.number, titled=True)
_DIFFERENCES = {"striped": "Attention", "heads": "Heads", "moe": "Experts"}


def _pairs(records: Records) -> list[str]:
    tasks = records.scores.tasks
    rows = []
    for check in records.checks:
        for index, pair in enumerate(check.pairs):
            first = _DIFFERENCES[check.name] if index == 0 else ""
            swatches = [shell.swatch(records.architectures, name) for name in (pair.first, pair.second)]
            gains = [pair.gain, *(pair.tasks.get(task) for task in tasks)]
            numbers = [_number(gain, _signed) for gain in gains]
            rows.append((first, *swatches, *numbers, _number(pair.settings, str)))
    if not rows:
        return []
    columns = ("Differ in", "With", "Without", "#Gain", *(f"#{_title(task)}" for task in tasks), "#Settings")
    caption = (
        "Pairs of architectures that differ in one thing, on the settings that both have: the gain in points of "
        "accuracy, as the mean over tasks and of each task."
    )
    return shell.captioned("The pairs behind the findings", caption, shell.table("pairs", columns, rows))


def _signed(gain: float) -> str:
    shown = points(gain)
    return shown if shown == "0.0" or shown[0] == "−" else f"+{shown}"
