"""What the evaluations of runs come to: metrics against compute, and from the loss to each of them.

Two places hold evaluations: rows of metrics.jsonl, which training wrote (linnet.train.evaluation), and RUN/evaluations,
where `linnet evaluate` keeps its own (linnet.evaluate.results). Both have the step at which they were made; the
held-out loss of that step makes a point of them.
"""

import math
from dataclasses import dataclass, field
from html import escape
from typing import Any

from linnet.config import digest
from linnet.evaluate.compare import guessing
from linnet.evaluate.results import Evaluation, read_evaluations
from linnet.laws.fit import Law
from linnet.laws.fit.downstream import Downstream, HeldOutTest, Transfer, fit_downstream
from linnet.laws.orders import Order, order_of_means
from linnet.report import shell, units
from linnet.report.records import Study
from linnet.runs import RunFolder

SHOWN = 3  # metrics that have a sentence
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
    for _, run in study.table[study.table["status"].isin(("done", "unfinished"))].iterrows():
        folder = study.run_folder(run)
        if folder is None or not folder.is_dir():
            continue
        records = RunFolder(folder).metrics()
        found = _of_training(records, study.units)
        found += _of_files(read_evaluations(folder, problems), study.units)
        losses = {row["step"]: row["validation_loss"] for row in records if "validation_loss" in row}
        final = run["tokens"] if run["status"] == "done" else math.inf
        for key, chance, point in found:
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
        one = Series(evaluation, metric, chances[evaluation, metric], table.reset_index(drop=True))
        study.problems += _missing(one, study, set(broken["run"]))
        if len(table):
            one.fits = {name: _fit(one, study, name, bootstrap) for name in study.architectures if _has(one, name)}
            series.append(one)
    return series


def _missing(series: Series, study: Study, broken: set[str]) -> list[str]:
    """Says which runs lack the metric at their end, have a value that is not finite, or no loss to set beside it.

    Not which runs were never evaluated, if that is most of them: `linnet evaluate` is given single runs.
    """
    done, points = list(study.table.loc[study.table["status"] == "done", "run"]), series.points
    ends = set(points.loc[points["last"], "run"])
    lacking = [run for run in done if run not in ends and run not in broken]
    found = []
    if lacking and 2 * len(lacking) < len(done):
        found.append(f"{len(lacking)} of {len(done)} finished runs have no value at their end: {_named(lacking)}")
    if broken:
        found.append(f"values that are not finite are left out, of {_named(sorted(broken))}")
    if lost := sorted(set(points.loc[points["loss"].isna(), "run"])):
        fix = "set run.evaluate_every so that it divides their `every`"
        found.append(f"values without a held-out loss at their step are not fitted, of {_named(lost)}; {fix}")
    return [f"{series.title}: {what}" for what in found]


def _named(runs: list[str], most: int = 5) -> str:
    """A, B and C; of many the first ones and how many more."""
    return units.listed(runs if len(runs) <= most + 1 else [*runs[:most], f"{len(runs) - most} more"])


def _has(series: Series, architecture: str) -> bool:
    return bool((series.points["architecture"] == architecture).any())


def _fit(series: Series, study: Study, architecture: str, bootstrap: int) -> Downstream:
    own = series.points[series.points["architecture"] == architecture]
    return fit_downstream(own, series.chance, law=_law(study, architecture), bootstrap=bootstrap)


def _law(study: Study, architecture: str) -> Law | None:
    """The study's L(C), if it goes through the lowest losses of each budget.

    That of the envelope is of training losses, and that of a surface lies below what any size that was trained reached.
    """
    fit = study.fits.get(architecture)
    if fit is None or fit.headline not in ("isoflop", "power"):
        return None
    return fit.L


def _of_training(records: list[dict], unit: str) -> list[tuple]:
    """Returns ((evaluation, metric), chance, point) for the metrics under `shown` of each row.

    Args:
        unit: the key of the data that were read: tokens or images.
    """
    found = []
    for row in records:
        for metric in row.get("shown", ()):
            point = {
                "step": row["step"],
                "D": row.get(unit, math.nan),
                "C": row["flops"],
                "value": row["metrics"][metric],
            }
            point["questions"] = row.get("questions")
            found.append(((row["evaluation"], metric), row["chance"].get(metric), point))
    return found


def _of_files(evaluations: list[Evaluation], unit: str) -> list[tuple]:
    """Returns the same for evaluation files: the first metric of each task, or only the averages of a suite.

    If an evaluation was made with several settings, each name contains the digest of its settings.
    """
    ways: dict[str, dict[str, None]] = {}
    for one in evaluations:
        ways.setdefault(one.kind, {})[digest(one.asked)] = None
    found = []
    for one in evaluations:
        if one.model.get(unit) is None or one.model.get("flops") is None:
            continue
        name = one.kind if len(ways[one.kind]) == 1 else f"{one.kind}-{digest(one.asked)[:4]}"
        chances, model, seen = guessing(one), one.model, set()
        averages = [result for result in one.results if result.task == one.kind]
        for result in averages or one.results:
            place = (result.task, result.metric)
            if result.task in seen or (result.better == "higher" and place not in chances):
                continue
            seen.add(result.task)
            label = name if result.task == one.kind else f"{name} {result.task}"
            point = {"step": model["step"], "D": model[unit], "C": model["flops"], "value": result.value}
            point["questions"] = None if averages else result.n
            found.append(((f"{label} (linnet evaluate)", result.metric), chances.get(place), point))
    return found


def lines(series: list[Series]) -> list[str]:
    """Returns the fits as text, one line each; metrics without a fit share one line per reason."""
    found, without = [], {}
    for one in series:
        for name, fit in one.fits.items():
            parts = [] if fit.law.refused else [fit.law.text()]
            parts += (
                []
                if fit.transfer.refused
                else [f"{one.metric or one.evaluation} = {fit.transfer.formula}{_spans(fit)}"]
            )
            if not parts:
                without.setdefault("; ".join(fit.refused), []).append(f"{one.title}, {name}")
                continue
            parts += fit.refused
            if fit.rms_error is not None:
                error = f"error {one.shown(fit.rms_error)} on the runs"
                parts.append(f"{error}, {_tested(one, fit.test)} beyond them")
            found.append(f"{one.title}, {name}: {'; '.join(parts)}")
    return found + [f"no fit ({reason}) of {' | '.join(names)}" for reason, names in without.items()]


def _spans(fit: Downstream) -> str:
    spans = [f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in fit.transfer.intervals.items()]
    return f" (95 %: {', '.join(spans)})" if spans else ""


def _tested(series: Series, test: HeldOutTest | None) -> str:
    if test is None or test.refused:
        return "not tested"
    return units.percent(test.mean_error, 2) + (" of the value" if series.chance is None else "")


def finding(series: list[Series]) -> list[str]:
    """The best of each metric in a sentence, as HTML: whether it beats guessing, and who is level with it."""
    found = []
    for one in series[:SHOWN]:
        last = one.points[one.points["last"]]
        if last.empty:
            continue
        guessing = "" if one.chance is None else one.shown(one.chance)
        order = last.sort_values("value", ascending=one.chance is None, kind="stable")
        best, *others = (run for _, run in order.drop_duplicates("architecture").iterrows())
        if all(any("no signal" in reason for reason in fit.transfer.refused) for fit in one.fits.values()):
            found.append(f"{escape(one.title)}: no architecture does better than guessing, {guessing}.")
        elif one.chance is not None and best["value"] - one.chance <= 2 * _error(one.chance, best["questions"]):
            text = (
                f"no run is two standard errors above guessing, {guessing}; the highest is {one.shown(best['value'])}"
            )
            found.append(f"{escape(one.title)}: {text}, of {escape(best['architecture'])}.")
        else:
            equal = _order(one, [best, *others]).level(best["architecture"])
            level = [run for run in others if run["architecture"] in equal]
            names = [f"<b>{escape(run['architecture'])}</b> with {one.shown(run['value'])}" for run in (best, *level)]
            guess = f", where guessing gives {guessing}" if one.chance else ""
            text = f"the best{' seen' if level else ''} is {names[0]}{guess}, after {units.flops(best['C'])}"
            if level and len(level) == len(others):
                text = f"{units.listed(names)} cannot be told apart{guess}"
            elif level:
                text += f"; {units.listed(names[1:])} cannot be told apart from it"
            found.append(f"{escape(one.title)}: {text}.")
    return found


def _order(series: Series, runs: list) -> Order:
    """Returns which runs, one of each architecture, are told apart.

    The error of a value is that of a share of so many questions, and that of the architecture's fit. Without either,
    nothing tells how far chance moves it.
    """
    errors = {}
    for run in runs:
        fit = series.fits.get(run["architecture"])
        noise = fit.rms_error or 0.0 if fit is not None else 0.0
        if series.chance is not None and math.isfinite(run["questions"]):
            smoothed = (run["value"] * run["questions"] + 1) / (run["questions"] + 2)  # so that all right has an error
            noise = math.hypot(noise, _error(smoothed, run["questions"]))
        if noise:
            errors[run["architecture"]] = noise, math.inf
    return order_of_means({run["architecture"]: run["value"] for run in runs}, errors, SHOWN)


def _error(share: float, questions: float) -> float:
    """Returns the standard error of a share of right answers; 0 if the number of questions is unknown."""
    return math.sqrt(max(share * (1 - share), 0.0) / questions) if math.isfinite(questions) else 0.0


def table(study: Study, series: list[Series]) -> str:
    """Returns an HTML table of both steps of every metric and architecture, with errors or the reason for refusal."""
    laws = ("L(C), nats per token", "Metric of the loss L")
    columns = ("*Metric", "Architecture", "#Points, runs", *laws, "#Error of both", "#Held-out error")
    rows = []
    for one in series:
        for index, (name, fit) in enumerate(one.fits.items()):
            first = escape(one.title) if index == 0 else ""
            about = (first, shell.swatch(study.architectures, name), f"{fit.transfer.points}, {fit.transfer.runs}")
            law = _step(fit.law, _law_text(fit.law), _law_spans(fit.law))
            transfer = _step(fit.transfer, _formula(fit), _transfer_spans(one, fit))
            error = units.MISSING if fit.rms_error is None else one.shown(fit.rms_error)
            rows.append((*about, law, transfer, error, _held_out(one, fit)))
    return shell.table("downstream", columns, rows)


def _step(step: Law | Transfer, text: str, fine: list[str]) -> str:
    if step.refused:
        return f'<span class="refused">refused</span><div class="why">{escape("; ".join(step.refused))}</div>'
    lines = [("fine", line) for line in fine] + [("why", note) for note in step.notes]
    return f'<div class="law">{text}</div>' + "".join(
        f'<div class="{kind}">{escape(line)}</div>' for kind, line in lines
    )


def _law_text(law: Law) -> str:
    if law.refused:
        return ""
    constant = f"{units.significant(law.constant)} + " if law.constant is not None else ""
    return f"{constant}{units.significant(law.coefficient)} C<sup>{units.significant(law.exponent)}</sup>"


def _law_spans(law: Law) -> list[str]:
    at = None if law.refused else law.interval_at(law.c_max)
    if at is None:
        return []
    return [f"L {units.significant(at[0])} to {units.significant(at[1])} at {units.scientific(law.c_max, 2)}"]


def _formula(fit: Downstream) -> str:
    step = fit.transfer
    if step.refused:
        return ""
    first, second = units.significant(step.first), units.significant(step.second)
    if step.chance is None:
        return f"{first} L<sup>{second}</sup>"
    floor = f"{units.significant(step.chance, 2)} + " if step.chance else ""
    return f"{floor}{units.significant(1 - step.chance, 2)} / (1 + e<sup>{second} (L − {first})</sup>)"


def _transfer_spans(series: Series, fit: Downstream) -> list[str]:
    step = fit.transfer
    if step.refused:
        return []
    spans = [f"{n} {units.significant(a)} to {units.significant(b)}" for n, (a, b) in step.intervals.items()]
    return [*spans, f"error {series.shown(step.rms_error)}"]


def _held_out(series: Series, fit: Downstream) -> str:
    if fit.test is None:
        return units.MISSING
    alone = f'<div class="fine">with the loss known<br>{_tested(series, fit.step_test)}</div>'
    if fit.test.refused:
        return f'<div class="why">{escape("; ".join(fit.test.refused))}</div>{alone}'
    where = f"{units.plural(fit.test.tested, 'point')}<br>above {units.scientific(fit.test.c_max, 2)} FLOPs"
    return f'<div class="law">{_tested(series, fit.test)}</div><div class="fine">{where}</div>{alone}'
