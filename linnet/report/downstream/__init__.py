"""What the evaluations of runs come to: metrics against compute, and from the loss to each of them.

Two places hold evaluations: rows of metrics.jsonl, which training wrote (linnet.train.evaluation), and RUN/evaluations,
where `linnet evaluate` keeps its own (linnet.evaluate.results). Both have the step at which they were made; the
held-out loss of that step makes a point of them.
"""

import contextlib
import itertools
import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path, PurePath
from statistics import NormalDist
from typing import Any

from linnet.config import ConfigError, digest, first_names
from linnet.evaluate.compare import common, guessing
from linnet.evaluate.results import Evaluation, read_evaluations
from linnet.laws.fit import Law
from linnet.laws.fit.downstream import BEYOND, Downstream, HeldOutTest, Transfer, fit_downstream
from linnet.laws.orders import Order, order_of_means
from linnet.report import drawing, shell, style, units
from linnet.report.drawing import Canvas, Figure, run_row
from linnet.report.records import OneRun, Study, check_table, finite
from linnet.runs import RunFolder
from linnet.runs.record import plain

SHOWN = 3  # metrics that have a sentence
_PER_TOKEN = ("blocks", "chat")  # kinds whose first metric is per token
COLUMNS = ("run", "architecture", "N", "D", "C", "loss", "value", "questions", "last", "folder")


@dataclass
class Series:
    """One metric of one evaluation, over all runs that have it.

    Attributes:
        evaluation, metric: names. chance: of a share of right answers, what guessing gives; None where less is better.
        points: DataFrame with `COLUMNS`: N without embeddings, D in tokens, C in FLOPs, loss held out in nats a token
            (NaN where none was measured at that step), whether the point is the last of a run that is done.
        fits: architecture -> compute to loss to metric.
    """

    evaluation: str
    metric: str
    chance: float | None
    points: Any
    fits: dict[str, Downstream] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.evaluation}: {self.metric.replace('_', ' ')}" if self.metric else self.evaluation

    @property
    def unit(self) -> str:
        """Of the metric, for axes."""
        return "share of right answers" if self.chance is not None else _UNITS.get(self.metric, "less is better")

    def shown(self, value: float) -> str:
        """The metric with as many digits as it deserves."""
        return units.percent(value, 3) if self.chance is not None else units.significant(value, 4)


_UNITS = {"bits_per_byte": "bits per byte", "loss": "nats per token", "perplexity": "perplexity per token"}


def read_series(study: Study, bootstrap: int = 1000) -> list[Series]:
    """The evaluations of a study's runs and the fits to them, in the order in which runs name them.

    What cannot be read, and which runs lack what others have, is added to `study.problems`.
    """
    import pandas as pd

    rows: dict[tuple[str, str], list[dict]] = {}
    chances: dict[tuple[str, str], float | None] = {}
    problems: list[str] = []
    runs = []
    for _, run in study.table[study.table["status"].isin(("done", "unfinished"))].iterrows():
        folder = study.run_folder(run)
        if folder is not None and folder.is_dir():
            runs.append((run, RunFolder(folder), read_evaluations(folder, problems)))
    planned = _settings_of_training([folder for _, folder, _ in runs])
    named = _names([evaluations for *_, evaluations in runs])
    for (run, folder, _), names in zip(runs, named, strict=True):
        records = folder.metrics()
        metrics = _of_training(records, study.units, planned[folder.path])
        metrics += _of_files(names, study.units)
        losses = {row["step"]: row["validation_loss"] for row in records if "validation_loss" in row}
        final = run["tokens"] if run["status"] == "done" else math.inf
        for key, chance, point in metrics:
            chances[key] = chances.get(key) if chance is None else chance
            same = {"run": run["run"], "architecture": run["architecture"], "N": run["params_non_embedding"]}
            last = point["D"] >= final
            row = {**same, **point, "loss": losses.get(point.pop("step")), "last": last, "folder": run["path"]}
            rows.setdefault(key, []).append(row)
    if problems:
        study.problems.append(f"Some evaluations are left out: {'; '.join(problems)}")
    series = []
    for (evaluation, metric), points in rows.items():
        table = pd.DataFrame(points).reindex(columns=list(COLUMNS))
        for name in ("N", "D", "C", "loss", "value", "questions"):
            table[name] = pd.to_numeric(table[name], errors="coerce")
        finite = table[["N", "D", "C", "value"]].map(math.isfinite).all(axis=1)
        broken, table = table[~finite], table[finite].drop_duplicates(["run", "D"], keep="last")
        score = Series(evaluation, metric, chances[evaluation, metric], table.reset_index(drop=True))
        study.problems += _missing(score, study, set(broken["run"]))
        if len(table):
            evaluated = set(table["architecture"])
            score.fits = {
                name: _fit(score, study, name, bootstrap) for name in study.architectures if name in evaluated
            }
            series.append(score)
    return series


def _missing(series: Series, study: Study, broken: set[str]) -> list[str]:
    """Says which runs lack the metric at their end, have a value that is not finite, or no loss to set beside it.

    Not which runs were never evaluated, if that is most of them: `linnet evaluate` is given single runs.
    """
    done, points = list(study.table.loc[study.table["status"] == "done", "run"]), series.points
    ends = set(points.loc[points["last"], "run"])
    lacking = [run for run in done if run not in ends and run not in broken]
    problems = []
    if lacking and 2 * len(lacking) < len(done):
        problems.append(f"{len(lacking)} of {len(done)} finished runs have no value at their end: {_named(lacking)}")
    if broken:
        problems.append(f"values that are not finite are left out, of {_named(sorted(broken))}")
    for name, rows in points.groupby("architecture", sort=False):
        if len({study.data.get(run) for run in rows["run"]}) > 1:
            fix = "give a folder of runs with the same `data`"
            problems.append(f"not fitted for {name}, whose runs have other texts or tokenizers; {fix}")
    if lost := sorted(set(points.loc[points["loss"].isna(), "run"])):
        fix = "set run.evaluate_every so that it divides their `every`"
        problems.append(f"values without a held-out loss at their step are not fitted, of {_named(lost)}; {fix}")
    return [f"{series.title}: {what}" for what in problems]


def _named(runs: list[str], most: int = 5) -> str:
    """A, B and C; of many the first ones and how many more."""
    return units.listed(runs if len(runs) <= most + 1 else [*runs[:most], f"{len(runs) - most} more"])


def _fit(series: Series, study: Study, architecture: str, bootstrap: int) -> Downstream:
    points = series.points[series.points["architecture"] == architecture]
    if len({study.data.get(run) for run in points["run"]}) > 1:
        points = points.assign(loss=math.nan)  # losses of other texts or tokens
    return fit_downstream(points, series.chance, law=_law(study, architecture), bootstrap=bootstrap)


def _law(study: Study, architecture: str) -> Law | None:
    """The study's L(C), if it goes through the lowest losses of each budget.

    That of the envelope is of training losses, and that of a surface lies below what any size that was trained reached.
    """
    fit = study.fits.get(architecture)
    if fit is None or fit.headline not in ("isoflop", "power"):
        return None
    return fit.L


def _settings_of_training(folders: list[RunFolder]) -> dict[Path, dict[str, str]]:
    """Returns, for each run, name -> digest and files of an evaluation in training whose settings runs differ in."""
    settings: dict[Path, dict[str, str]] = {}
    for folder in folders:
        settings[folder.path] = {}
        with contextlib.suppress(ConfigError):
            entries = folder.config.get("evaluations") or []
            for entry in (entry for entry in entries if isinstance(entry, dict)):
                about = {key: value for key, value in entry.items() if key != "every"}
                label = digest(about)[:4] + _files(entry.get("paths"))
                settings[folder.path][str(entry.get("name") or entry.get("kind"))] = label
    seen: dict[str, set[str]] = {}
    for mine in settings.values():
        for name, label in mine.items():
            seen.setdefault(name, set()).add(label)
    return {
        path: {name: label for name, label in mine.items() if len(seen[name]) > 1} for path, mine in settings.items()
    }


def _files(names: Any) -> str:
    """Returns the names of files without their folders, in parentheses, at most two of them; "" if there are none."""
    names = [names] if isinstance(names, str) else names if isinstance(names, list) else []
    return f" ({first_names([PurePath(str(name)).name for name in names], 2)})" if names else ""


def _of_training(records: list[dict], unit: str, settings: dict[str, str]) -> list[tuple]:
    """Returns ((evaluation, metric), chance, point) for the metrics under `shown` of each row.

    Args:
        unit: the key of the data that were read: tokens or images.
        settings: name of an evaluation -> what tells its settings from those of other runs under this name.
    """
    metrics = []
    for row in records:
        for metric in row.get("shown", ()):
            point = {"step": row["step"], "D": row.get(unit, math.nan), "C": row["flops"]}
            point |= {"value": row["metrics"][metric], "questions": row.get("questions")}
            name = row["evaluation"]
            name = f"{name}-{settings[name]}" if name in settings else name
            metrics.append(((name, metric), row["chance"].get(metric), point))
    return metrics


def _names(runs: list[list[Evaluation]]) -> list[list[tuple[str, Evaluation]]]:
    """Returns the evaluations of each run with their names, which are equal where settings and content are.

    If the runs were evaluated with several settings, or on several contents, each name has a digest and the files: two
    files of one name, or a file that changed, are told apart, and a reader sees which text a name stands for. Settings
    that are a model's own way of reading count only where one run has several of them. A record of 0.1 has no digest
    of its content and is taken for that of its settings, if there is only one.
    """
    contents: dict[str, set[str]] = {}
    for evaluation in itertools.chain(*runs):
        contents.setdefault(_asked(evaluation), set()).update({evaluation.scored} - {None})

    def way(evaluation: Evaluation, settings: dict[str, Any]) -> tuple:
        known = contents[_asked(evaluation)]
        content = min(known) if evaluation.scored is None and len(known) == 1 else evaluation.scored
        # Losses per token compare between models of one tokenizer only.
        tokens = evaluation.model.get("tokenizer") if evaluation.kind in _PER_TOKEN else None
        return evaluation.kind, digest(plain(settings)), content, tokens

    several = set()
    for run in runs:
        forms: dict[tuple, set[str]] = {}
        for evaluation in run:
            forms.setdefault(way(evaluation, common(evaluation.asked)), set()).add(digest(plain(evaluation.asked)))
        several |= {key for key, digests in forms.items() if len(digests) > 1}
    ways, kinds = [], {}
    for run in runs:
        ways.append([])
        for evaluation in run:
            key = way(evaluation, common(evaluation.asked))
            key = way(evaluation, evaluation.asked) if key in several else key
            kinds.setdefault(evaluation.kind, set()).add(key)
            ways[-1].append(key)

    files: dict[tuple, str] = {}  # of the first evaluation: a record of 0.1 may name them otherwise
    for key, entry in zip(itertools.chain(*ways), itertools.chain(*runs), strict=True):
        names = (entry.asked.get(option) for option in ("text", "sentences", "data"))
        files.setdefault(key, _files(next(filter(None, names), None)))

    def name(key: tuple, entry: Evaluation) -> str:
        return entry.kind if len(kinds[entry.kind]) == 1 else f"{entry.kind}-{digest(list(key))[:4]}{files[key]}"

    return [
        [(name(key, entry), entry) for key, entry in zip(keys, run, strict=True)]
        for keys, run in zip(ways, runs, strict=True)
    ]


def _asked(evaluation: Evaluation) -> str:
    return digest([evaluation.kind, plain(common(evaluation.asked))])


def _of_files(evaluations: list[tuple[str, Evaluation]], unit: str) -> list[tuple]:
    """Returns the same for evaluation files: the first metric of each task, or only the averages of a suite."""
    metrics = []
    for name, evaluation in evaluations:
        if evaluation.model.get(unit) is None or evaluation.model.get("flops") is None:
            continue
        chances, model, seen = guessing(evaluation), evaluation.model, set()
        averages = [result for result in evaluation.results if result.task == evaluation.kind]
        for result in averages or evaluation.results:
            place = (result.task, result.metric)
            if result.task in seen or (result.better == "higher" and place not in chances):
                continue
            seen.add(result.task)
            label = name if result.task == evaluation.kind else f"{name} {result.task}"
            point = {"step": model["step"], "D": model[unit], "C": model["flops"], "value": result.value}
            point["questions"] = None if averages else result.n
            metrics.append(((f"{label} (linnet evaluate)", result.metric), chances.get(place), point))
    return metrics


def lines(series: list[Series]) -> list[str]:
    """Returns the fits as text, one line each; metrics without a fit share one line per reason."""
    texts, without = [], {}
    for score in series:
        for name, fit in score.fits.items():
            parts = [] if fit.law.refused else [fit.law.text()]
            parts += (
                []
                if fit.transfer.refused
                else [f"{score.metric or score.evaluation} = {fit.transfer.formula}{_spans(fit)}"]
            )
            if not parts:
                without.setdefault("; ".join(fit.refused), []).append(f"{score.title}, {name}")
                continue
            parts += fit.refused
            if fit.rms_error is not None:
                error = f"error {score.shown(fit.rms_error)} on the runs"
                parts.append(f"{error}, {_tested(score, fit.test)} beyond them")
            texts.append(f"{score.title}, {name}: {'; '.join(parts)}")
    return texts + [f"no fit ({reason}) of {' | '.join(names)}" for reason, names in without.items()]


def _spans(fit: Downstream) -> str:
    spans = [f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in fit.transfer.intervals.items()]
    return f" (95 %: {', '.join(spans)})" if spans else ""


def _tested(series: Series, test: HeldOutTest | None) -> str:
    if test is None or test.refused:
        return "not tested"
    return units.percent(test.mean_error, 2) + (" of the value" if series.chance is None else "")


def finding(series: list[Series]) -> list[str]:
    """The best of each metric in a sentence, as HTML: whether it beats guessing, and who is level with it."""
    sentences = []
    for score in series[:SHOWN]:
        last = score.points[score.points["last"]]
        if last.empty:
            continue
        guessing = "" if score.chance is None else score.shown(score.chance)
        # The best of many runs that guess lies far above guessing: two standard errors for one run of one metric.
        reach = NormalDist().inv_cdf(1 - NormalDist().cdf(-2) / (len(last) * min(len(series), SHOWN)))
        order = last.sort_values("value", ascending=score.chance is None, kind="stable")
        best, *others = (run for _, run in order.drop_duplicates("architecture").iterrows())
        if all(any("no signal" in reason for reason in fit.transfer.refused) for fit in score.fits.values()):
            sentences.append(f"{escape(score.title)}: no architecture does better than guessing, {guessing}.")
        elif score.chance is not None and best["value"] - score.chance <= reach * _error(
            score.chance, best["questions"]
        ):
            text = f"no run is {reach:.1f} standard errors above guessing, {guessing}"
            sentences.append(f"{escape(score.title)}: {text}; the highest seen is {score.shown(best['value'])}.")
        else:
            equal = _order(score, [best, *others]).level(best["architecture"])
            level = [run for run in others if run["architecture"] in equal]
            names = [f"<b>{escape(run['architecture'])}</b> with {score.shown(run['value'])}" for run in (best, *level)]
            guess = f", where guessing gives {guessing}" if score.chance else ""
            best_of = f"the best{' seen' if level else ''} is " if len(last) > 1 else ""  # one run is best of nothing
            text = f"{best_of}{names[0]}{guess}, after {units.flops(best['C'])}"
            if level and len(level) == len(others):
                text = f"{units.listed(sorted(names))} cannot be told apart{guess}"  # by the value would be a ranking
            elif level:
                text += f"; {units.listed(sorted(names[1:]))} cannot be told apart from it"
            sentences.append(f"{escape(score.title)}: {text}.")
    return sentences


def _order(series: Series, runs: list) -> Order:
    """Returns which runs, one of each architecture, are told apart.

    The error of a value is that of the architecture's fit, whose residuals of n runs are smaller than their errors by
    the root of (n - 2) / n and leave Student's t, and that of a share of so many questions. Without a fit, nothing
    tells how far another run of the architecture would be: the questions are only those of one run.
    """
    errors = {}
    for run in runs:
        fit = series.fits.get(run["architecture"])
        if fit is None or not fit.rms_error or fit.law.points <= 2:
            continue
        freedom = fit.law.points - 2
        noise = fit.rms_error * math.sqrt(fit.law.points / freedom)
        if series.chance is not None and math.isfinite(run["questions"]):
            smoothed = (run["value"] * run["questions"] + 1) / (run["questions"] + 2)  # so that all right has an error
            noise = math.hypot(noise, _error(smoothed, run["questions"]))
        errors[run["architecture"]] = noise, freedom
    return order_of_means({run["architecture"]: run["value"] for run in runs}, errors, SHOWN)


def _error(share: float, questions: float) -> float:
    """Returns the standard error of a share of right answers; 0 if the number of questions is unknown."""
    return math.sqrt(max(share * (1 - share), 0.0) / questions) if math.isfinite(questions) else 0.0


def table(study: Study, series: list[Series]) -> str:
    """Returns an HTML table of both steps of every metric and architecture, with errors or the reason for refusal."""
    laws = ("L(C), nats per token", "Metric of the loss L")
    columns = ("*Metric", "Architecture", "#Points, runs", *laws, "#Error of both", "#Held-out error")
    rows = []
    for score in series:
        for index, (name, fit) in enumerate(score.fits.items()):
            first = escape(score.title) if index == 0 else ""
            about = (first, shell.swatch(study.architectures, name), f"{fit.transfer.points}, {fit.transfer.runs}")
            law, transfer = _law_cell(fit.law), _transfer_cell(score, fit.transfer)
            error = units.MISSING if fit.rms_error is None else score.shown(fit.rms_error)
            rows.append((*about, law, transfer, error, _held_out(score, fit)))
    return shell.table("downstream", columns, rows)


def _step(step: Law | Transfer, text: str, fine: list[str]) -> str:
    lines = [("fine", line) for line in fine] + [("why", note) for note in step.notes]
    return f'<div class="law">{text}</div>' + "".join(
        f'<div class="{kind}">{escape(line)}</div>' for kind, line in lines
    )


def _law_cell(law: Law) -> str:
    if law.refused:
        return shell.refused(law.refused)
    constant = f"{units.significant(law.constant)} + " if law.constant is not None else ""
    text = f"{constant}{units.significant(law.coefficient)} C<sup>{units.significant(law.exponent)}</sup>"
    at, end = law.interval_at(law.c_max), units.scientific(law.c_max, 2)
    return _step(law, text, [f"L {units.significant(at[0])} to {units.significant(at[1])} at {end}"] if at else [])


def _transfer_cell(series: Series, step: Transfer) -> str:
    if step.refused:
        return shell.refused(step.refused)
    spans = [f"{n} {units.significant(a)} to {units.significant(b)}" for n, (a, b) in step.intervals.items()]
    return _step(step, _formula(step), [*spans, f"error {series.shown(step.rms_error)}"])


def _formula(step: Transfer) -> str:
    first, second = units.significant(step.first), units.significant(step.second)
    if step.chance is None:
        return f"{first} L<sup>{second}</sup>"
    floor = f"{units.significant(step.chance, 2)} + " if step.chance else ""
    return f"{floor}{units.significant(1 - step.chance, 2)} / (1 + e<sup>{second} (L − {first})</sup>)"


def _held_out(series: Series, fit: Downstream) -> str:
    if fit.test is None:
        return units.MISSING
    alone = f'<div class="fine">with the loss known<br>{_tested(series, fit.step_test)}</div>'
    if fit.test.refused:
        return f'<div class="why">{escape("; ".join(fit.test.refused))}</div>{alone}'
    where = f"{units.plural(fit.test.tested, 'point')}<br>above {units.scientific(fit.test.c_max, 2)} FLOPs"
    return f'<div class="law">{_tested(series, fit.test)}</div><div class="fine">{where}</div>{alone}'


# The figures of evaluations: each metric against compute, tokens and size, and the two steps from compute to it.

MOST = 8  # metrics that are drawn; the table has all
WIDTH, HEIGHT = 262, 215  # of a panel, three in a row
FIELDS = ("run", "architecture", "N", "D", "C", "loss", "metric", "folder")


def draw(study: Study, series: list[Series]) -> list[Figure]:
    """The figures that the points allow."""
    if not series:
        return []
    figures = [against(study, series[:MOST])]
    fitted = [score for score in series if any(not fit.transfer.refused for fit in score.fits.values())]
    return figures + ([two_steps(study, fitted[:MOST])] if fitted else [])


def against(study: Study, series: list[Series]) -> Figure:
    """Each metric against training compute, tokens and size."""
    canvas = Canvas(study)
    rows = []
    for number, score in enumerate(series):
        panels = []
        points = _points(study, score)
        reach = [row["value"] for row in points] + ([score.chance] if score.chance is not None else [])
        for column, kind in (("C_", "flops"), ("D_", "tokens"), ("N_", "params")):
            x = canvas.alt.X(f"{column}:Q", **style.axis(canvas.alt, kind, _domain(points, column), most=5))
            y = canvas.alt.Y("value:Q", **_metric(canvas, score, reach, named=not panels))
            legend = number == 0 and not panels
            layers = [_chance(canvas, score, y)]
            if column == "C_":
                path = canvas.chart(points).mark_line(strokeWidth=1, clip=True)
                hue = canvas.colour(legend, **_LEGEND)
                layers.append(path.encode(x, y, hue, detail="run:N", strokeOpacity=canvas.fade(0.3)))
            for last in (False, True):
                if column == "C_" or last:
                    layers.append(_dots(canvas, points, last, x, y, legend))
            panels.append(canvas.layer(*layers).properties(width=WIDTH, height=HEIGHT))
        rows.append(_row(canvas, panels, score))
    caption = (
        "What each run came to on data that it was not trained on: large marks stand for the last checkpoint of a run, "
        "small ones, joined by a line, for those on the way there. Where answers are counted, the dashed line is "
        "guessing. A metric of one model depends on its size and on its tokens as well as on compute, so marks of one "
        "colour need not lie on one curve."
    )
    drawn = _stacked(canvas, rows)
    return canvas.figure("evaluations", "Evaluations against compute, tokens and size", caption, drawn)


def over_steps(run: OneRun) -> Figure | None:
    """Each metric of the evaluations that the training of a run made, over its steps; None if it made none."""
    chances: dict[tuple[str, str], float | None] = {}
    points: dict[tuple[str, str], list[dict]] = {}
    for row in run.evaluations:
        for metric in row["shown"]:
            if finite(value := row["metrics"][metric]):
                key = row["evaluation"], metric
                chances[key] = row["chance"].get(metric)
                points.setdefault(key, []).append({"step": row["step"], "value": value})
    if not points:
        return None
    canvas = Canvas(run)
    alt, panels = canvas.alt, []
    last = max(row["step"] for row in (*run.curve, *run.validations, *run.evaluations))
    x = alt.X("step:Q", title="step", scale=alt.Scale(domain=[0, last], nice=False)).axis(format=",.0f", tickCount=5)
    for key, rows in points.items():
        score = Series(*key, chances[key], None)
        reach = [row["value"] for row in rows] + ([score.chance] if score.chance is not None else [])
        y = alt.Y("value:Q", **_metric(canvas, score, reach, named=False))
        told = [row | {"metric": f"{score.shown(row['value'])} at step {row['step']:,}"} for row in rows]
        base = canvas.chart(told)
        line = base.mark_line(style=style.INK, strokeWidth=1.8).encode(x, y)
        dots = base.mark_point(style=style.INK, size=34, filled=True, opacity=1)
        dots = dots.encode(x, y, tooltip=canvas.tooltip(("metric",)))
        panel = canvas.layer(_chance(canvas, score, y), line, dots)
        panels.append(panel.properties(width=WIDTH, height=HEIGHT, title=score.title))
    caption = (
        "The evaluations that the training made, with the averaged weights if the run keeps an average. "
        "Shares are of right answers, and the dashed line is guessing; of other metrics less is better. The name of a "
        "distance contains its network, and only distances of equal networks and numbers of samples are comparable."
    )
    drawn = canvas.grid(panels, drawing.columns_for(len(panels)))
    return canvas.figure("evaluations", "Evaluations during training", caption, drawn)


def two_steps(study: Study, series: list[Series]) -> Figure:
    """Compute to loss, loss to metric, and both together, for each metric that could be fitted."""
    canvas = Canvas(study)
    alt = canvas.alt
    rows = []
    for number, score in enumerate(series):
        points = [row for row in _points(study, score) if row["loss_"] is not None]
        last = [row for row in points if row["last"]]
        laws, curves, both = _laws(score), _curves(score), _both(score)
        compute = _domain([*last, *laws, *both], "C_")
        loss = style.padded([row["loss_"] for row in [*points, *curves]], False)
        reach = [row["value"] for row in [*points, *curves, *both]]
        reach += [] if score.chance is None else [score.chance]

        x = alt.X("C_:Q", **style.axis(alt, "flops", compute, most=5))
        seen = [row["loss_"] for row in [*last, *laws] if row["loss_"]]
        y = style.axis(alt, "loss", style.padded(seen, False), most=6, logarithmic=False)
        legend = number == 0
        dots = _dots(canvas, last, True, x, alt.Y("loss_:Q", **y), legend)
        first = canvas.layer(*_curve(canvas, laws, x, y, "loss_", legend), dots)

        x = alt.X("loss_:Q", **style.axis(alt, "loss", loss, most=6, logarithmic=False))
        y = _metric(canvas, score, reach)
        at = alt.Y("value:Q", **y)
        dots = [_dots(canvas, points, which, x, at, False) for which in (False, True)]
        second = canvas.layer(_chance(canvas, score, at), *_curve(canvas, curves, x, y, "value"), *dots)

        x = alt.X("C_:Q", **style.axis(alt, "flops", compute, most=5))
        dots = _dots(canvas, last, True, x, at, False)
        third = canvas.layer(_chance(canvas, score, at), *_curve(canvas, both, x, y, "value"), dots)
        panels = [panel.properties(width=WIDTH, height=HEIGHT) for panel in (first, second, third)]
        rows.append(_row(canvas, panels, score))
    caption = (
        "A metric of a task has no law of compute, but the loss has one, and the metric follows the loss. Left: the "
        "held-out loss of the last checkpoints and its law. Centre: the metric against the loss at the same step, all "
        "checkpoints; shares of right answers follow a logistic curve from guessing to 1, other metrics a power of "
        "the loss. Right: both together, dashed beyond the runs. Bands are 95 % bootstrap intervals over runs."
    )
    drawn = _stacked(canvas, rows)
    return canvas.figure("compute-to-metric", "From compute to each metric in two steps", caption, drawn)


# Each panel has its own legend, of which all but the first are none.
_LEGEND = {"orient": "top", "columns": 4, "symbolOpacity": 1}
_OWN_LEGENDS = {"scale": {"color": "independent", "shape": "independent"}}


def _row(canvas: Canvas, panels: list, series: Series) -> dict[str, Any]:
    return canvas.joined("hconcat", panels, 26) | {"title": {"text": series.title}, "resolve": _OWN_LEGENDS}


def _stacked(canvas: Canvas, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return canvas.joined("vconcat", rows, 22) | {"resolve": _OWN_LEGENDS}


def _points(study: Study, series: Series) -> list[dict]:
    """Returns one row per point: the numbers to draw, and the text of its tooltip."""
    known = {row["run"]: run_row(row) for _, row in study.table.iterrows()}
    rows = []
    for _, point in series.points.iterrows():
        loss = point["loss"] if math.isfinite(point["loss"]) else None
        row = {**known[point["run"]], "D": f"{units.count(point['D'])} tokens", "C": units.flops(point["C"])}
        row |= {
            "loss": f"{units.loss(loss)} nats per token",
            "metric": f"{series.title} {series.shown(point['value'])}",
        }
        row |= {"N_": point["N"], "D_": point["D"], "C_": point["C"], "loss_": loss, "value": point["value"]}
        rows.append(row | {"last": bool(point["last"])})
    return rows


def _laws(series: Series) -> list[dict]:
    """L(C) of each architecture, as far as both steps together are drawn."""
    return [
        {"architecture": name, "C_": row.pop("C"), "loss_": row.pop("value"), **row}
        for name, fit in series.fits.items()
        for row in drawing.line(fit.law, BEYOND)
    ]


def _curves(series: Series) -> list[dict]:
    fitted = {name: fit.transfer for name, fit in series.fits.items() if not fit.transfer.refused}
    return [
        {"architecture": name, "loss_": row["loss"], "value": row["value"], "low": row["low"], "high": row["high"],
         "beyond": False}
        for name, step in fitted.items()
        for row in step.band
    ]  # fmt: skip


def _both(series: Series) -> list[dict]:
    return [
        {"architecture": name, **{k: row[k] for k in ("value", "low", "high", "beyond")}, "C_": row["C"]}
        for name, fit in series.fits.items()
        for row in fit.curve
    ]


def _curve(canvas: Canvas, rows: list[dict], x, y: dict, of: str, legend: bool = False) -> list:
    """A band, the curve, and its dashed part beyond the data; `y` is of `style.axis`, `of` the field on it."""
    banded = [row for row in rows if row["low"] is not None]
    return canvas.curves(banded, rows, x, y, canvas.colour(legend, **_LEGEND), of, shade=0.12)


def _dots(canvas: Canvas, points: list[dict], last: bool, x, y, legend: bool):
    rows = [row for row in points if row["last"] == last]
    size, strength = (48, 1.0) if last else (14, 0.55)
    dots = canvas.chart(rows).mark_point(size=size, filled=True, opacity=1, clip=True)
    look = {"fillOpacity": canvas.fade(strength), "tooltip": canvas.tooltip(FIELDS)}
    return dots.encode(x, y, canvas.colour(legend, **_LEGEND), canvas.shape(legend, **_LEGEND), **look)


def _metric(canvas: Canvas, series: Series, reach: list[float], named: bool = True) -> dict:
    domain = style.padded([value for value in reach if value is not None], False)
    if series.chance is not None:
        domain = [max(domain[0], -0.02), min(domain[1], 1.02)]
    settings = style.axis(canvas.alt, "loss", domain, series.unit if named else None, most=6, logarithmic=False)
    settings["axis"]["minExtent"] = 32  # so that rows begin in one place, however long their numbers are
    return settings


def _chance(canvas: Canvas, series: Series, y):
    rows = [] if series.chance is None else [{"value": series.chance}]
    return canvas.chart(rows).mark_rule(style=style.QUIET, strokeDash=[3, 3], strokeWidth=1).encode(y)


def _domain(rows: list[dict], column: str) -> list[float]:
    return style.padded([row[column] for row in rows], True, least=1.5)


def write_points(source: Path, points, series: list[Series], out: Path) -> Path:
    """Writes the page and its figures.

    Args:
        source: the table that was read, for the title and the command.
        points: from `linnet.laws.fit.table.load_points`.
        series: one per task, with fits.
        out: the page.

    Returns:
        The path of the page.
    """
    shell.check_page(out)
    runs = points[points["last"]].drop_duplicates(["architecture", "run"])
    rows = runs.rename(columns={"N": "params_non_embedding", "D": "tokens", "C": "flops"}).assign(
        status="done", path=None
    )
    study = Study(source.parent, {}, check_table(rows), None, planned=False)
    command = shell.typed("linnet", "fit", source, downstream=True, out=out)
    figures = draw(study, series)
    parts = [
        f'<ul class="findings">{"".join(f"<li>{line}</li>" for line in finding(series))}</ul>',
        shell.key(study.architectures),
        *(shell.section(figure, command) for figure in figures),
        "<h2>From compute to metrics</h2>",
        table(study, series),
        *(f'<p class="fine">{escape(line)}</p>' for line in lines(series)),
    ]
    shell.write_page(out, shell.document(f"Metrics: {source.name}", parts), figures)
    return out
