"""Computes scores from runs: the mean over tasks of the mean over settings of the best run, with its spread over seeds.

results = read_results(folder)
scores = score(results)                 -> Scores, a mapping from architecture to Score
scores["mad-gla-swiglu"].score          0.71; .spread over seeds, .tasks["fuzzy_recall"], .comparable, .reasons
write_scores(folder, scores)            scores.csv
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from linnet.config import grouped, refuse, unknown
from linnet.laws.orders import Order, order_of_means
from linnet.mad.results import Design, Result
from linnet.mad.settings import BUDGETS, MAD_TASKS, plan
from linnet.runs.files import csv_text, write_atomic

METRICS = ("accuracy", "macro_batch")
LOSS = "loss"  # a third metric: nats per target, of which less is better
SOLVED = 0.9995  # shown as 100.0 %
TABLE = "scores.csv"
ALL_TASKS = "all"  # in the column `task`: the score of the architecture
COLUMNS = (
    "architecture task score spread seeds settings parameters state_size budget comparable metric selection".split()
)


@dataclass(frozen=True)
class SettingScore:
    """One architecture at one setting: the best run of each seed that the architecture's score is of.

    Attributes:
        score: mean over seeds. best: the selected run of each seed. runs: number of runs of these seeds.
    """

    name: str
    varied: str
    score: float
    best: dict[int, Result]
    runs: int


@dataclass(frozen=True)
class TaskScore:
    """One architecture on one task: the mean over its settings.

    Attributes:
        spread: standard deviation over seeds, None if fewer than two seeds have all settings.
        parameters: number in the model at the first setting, which is the baseline if that was run.
    """

    task: str
    score: float
    spread: float | None
    settings: dict[str, SettingScore]
    parameters: int | None


@dataclass(frozen=True)
class Score:
    """One architecture.

    Attributes:
        score: mean over `tasks`. spread: standard deviation of the scores of the seeds, None below two seeds.
        seeds: seeds with every setting that the architecture has; all numbers are of these. If none has every
            setting, it is empty, and the numbers are means over the seeds that each setting has.
        parameters: number at the first task's baseline. state_size: fixed state, None if not recorded.
        comparable: whether the score can be compared with others; if not, `reasons` lists why.
        design: the layers of the architecture; None if they are unknown.
    """

    architecture: str
    score: float
    spread: float | None
    seeds: tuple[int, ...]
    tasks: dict[str, TaskScore]
    parameters: int | None
    state_size: int | None
    budget: str
    comparable: bool
    reasons: tuple[str, ...]
    design: Design | None = None

    @property
    def settings(self) -> dict[str, SettingScore]:
        """All settings, by name."""
        return {name: setting for task in self.tasks.values() for name, setting in task.settings.items()}


@dataclass(frozen=True)
class Scores(Mapping):
    """Mapping from architecture to `Score`, by name: an order by the scores would rank those that are not told apart.

    Attributes:
        metric: "accuracy", "macro_batch" or "loss". legacy: whether runs were selected on the test split.
        unscored: architecture -> why it has no score.
    """

    metric: str
    legacy: bool
    by_name: dict[str, Score]
    unscored: dict[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """What the scores are, for budgets whose scores are comparable among themselves only."""
        budgets = dict.fromkeys(score.budget for score in self.values())
        return [BUDGETS[name].label for name in budgets if name in BUDGETS and BUDGETS[name].label]

    @property
    def solved(self) -> list[str]:
        """The tasks at which every architecture reaches 100.0 %, so that they do not tell architectures apart."""
        return [
            task
            for task in self.tasks
            if self.metric != LOSS
            and len(self) > 1
            and all(task in score.tasks and score.tasks[task].score >= SOLVED for score in self.values())
        ]

    @property
    def whole(self) -> dict[str, Score]:
        """The scores over every setting that any architecture has. Other scores are means over fewer settings."""
        every = {setting for score in self.values() for setting in score.settings}
        return {name: score for name, score in self.items() if len(score.settings) == len(every)}

    def order(self, task: str | None = None) -> Order:
        """Returns which architectures the seeds tell apart, by their score or by one task.

        All tasks and the score share the 5 %. An architecture with fewer than two seeds is not told apart from any.
        """
        parts = {
            name: score if task is None else score.tasks[task]
            for name, score in self.items()
            if task in (None, *score.tasks)
        }
        seeds = {
            name: len(_whole_seeds(part.settings.values())) for name, part in parts.items() if part.spread is not None
        }
        errors = {name: (parts[name].spread / math.sqrt(n), n - 1) for name, n in seeds.items()}
        return order_of_means({name: part.score for name, part in parts.items()}, errors, len(self.tasks) + 1)

    def __getitem__(self, name: str) -> Score:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def tasks(self) -> list[str]:
        """The tasks that any architecture has: first in the order of the benchmark, then others."""
        tasks = dict.fromkeys(task for score in self.by_name.values() for task in score.tasks)
        return [task for task in MAD_TASKS if task in tasks] + [task for task in tasks if task not in MAD_TASKS]

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns the rows of scores.csv: one per task, and one with task "all"."""
        rows = []
        for score in self.by_name.values():
            common = {"architecture": score.architecture, "seeds": len(score.seeds), "state_size": score.state_size}
            common |= {"budget": score.budget, "comparable": score.comparable, "metric": self.metric}
            common["selection"] = "test" if self.legacy else "validation"
            parts = [
                (ALL_TASKS, score, score.settings),
                *((name, task, task.settings) for name, task in score.tasks.items()),
            ]
            for name, part, settings in parts:
                row = {"task": name, "score": part.score, "spread": part.spread, "settings": len(settings)}
                rows.append({**common, **row, "parameters": part.parameters})
        return rows


def score(results: Iterable[Result], *, metric: str = "accuracy", legacy: bool = False) -> Scores:
    """Scores every architecture.

    At each setting and seed the run with the highest accuracy on the validation split counts, with its `metric` on the
    test split. Diverged runs are left out; a setting where all runs diverged makes the score incomparable.

    Args:
        metric: "accuracy" (of tokens), "macro_batch" or "loss" (nats per target, of which the least is the best).
        legacy: whether to select by `metric` on the test split itself, as the published implementation did.

    Raises:
        ConfigError: an unknown metric, or runs without the required numbers.
    """
    refuse(unknown("metric", [metric], (*METRICS, LOSS)), "MAD")
    chosen_by = metric if legacy else "validation_accuracy"
    by_architecture = grouped((result.architecture, result) for result in results)
    problems = [
        f"{result.architecture}, {result.setting}: the run has no {name}; " + _WITHOUT[name]
        for runs in by_architecture.values()
        for result in runs
        for name in dict.fromkeys((metric, chosen_by))
        if result.ended and math.isnan(getattr(result, name))
    ]
    refuse(problems, "MAD", most=4)
    scores, unscored = {}, {}
    for name, runs in by_architecture.items():
        tasks = _tasks(runs, metric, chosen_by)
        if tasks:
            scores[name] = _score(name, runs, tasks, metric)
        else:
            unscored[name] = f"none of its {len(runs)} runs trained to the end"
    return Scores(metric, legacy, dict(sorted(scores.items())), unscored)


def _rank(metric: str, value: float) -> float:
    """Returns a number that is less for a better value."""
    return value if metric == LOSS else -value


def number_of(budget: str) -> dict[str, Any]:
    """Returns `metric` and `legacy`, the arguments of `score`, by which a budget scores its runs."""
    rule = BUDGETS.get(budget)
    return {"metric": METRICS[0], "legacy": False} if rule is None else {"metric": rule.metric, "legacy": rule.legacy}


def number_of_results(results: Iterable[Result]) -> dict[str, Any]:
    """Returns `number_of` the budget that all runs have; the default if they have several."""
    budgets = {result.budget for result in results}
    return number_of(budgets.pop() if len(budgets) == 1 else "")


def all_numbers(results: Sequence[Result]) -> dict[tuple[str, bool], Scores]:
    """Returns the scores by both metrics and both selections: (metric, legacy) -> scores."""
    return {
        (metric, legacy): score(results, metric=metric, legacy=legacy) for metric in METRICS for legacy in (False, True)
    }


_WITHOUT = {
    "accuracy": "linnet mad run writes it",
    "macro_batch": "use metric accuracy",
    LOSS: "use metric accuracy",
    "validation_accuracy": "select as the published implementation did (legacy)",
}


def write_scores(folder: str | Path, scores: Scores) -> Path:
    """Writes scores.csv into a folder, atomically, and returns its path."""
    path = Path(folder) / TABLE
    write_atomic(path, csv_text(COLUMNS, scores.to_rows()))
    return path


def _tasks(runs: list[Result], metric: str, chosen_by: str) -> dict[str, TaskScore]:
    settings = grouped((run.setting, run) for run in runs)
    ended = [{run.seed for run in part if run.ended} for part in settings.values()]
    seeds = set.intersection(*filter(None, ended)) if any(ended) else set()  # with every setting
    if seeds:
        settings = {name: [run for run in part if run.seed in seeds] for name, part in settings.items()}
    tasks: dict[str, dict[str, SettingScore]] = {}
    for name, part in sorted(settings.items(), key=lambda item: bool(item[1] and item[1][0].varied)):  # baselines first
        best: dict[int, Result] = {}
        for run in part:
            known = best.get(run.seed)
            if run.ended and (
                known is None or _rank(chosen_by, getattr(run, chosen_by)) < _rank(chosen_by, getattr(known, chosen_by))
            ):
                best[run.seed] = run
        if best:
            mean = fmean(getattr(run, metric) for run in best.values())
            tasks.setdefault(part[0].task, {})[name] = SettingScore(name, part[0].varied, mean, best, len(part))
    order = [task for task in MAD_TASKS if task in tasks] + [task for task in tasks if task not in MAD_TASKS]
    return {task: _task(task, tasks[task], metric) for task in order}


def _task(task: str, settings: dict[str, SettingScore], metric: str) -> TaskScore:
    seeds = _whole_seeds(settings.values())
    means = [fmean(getattr(setting.best[seed], metric) for setting in settings.values()) for seed in seeds]
    first = next(iter(next(iter(settings.values())).best.values()))
    mean = fmean(setting.score for setting in settings.values())
    return TaskScore(task, mean, stdev(means) if len(means) > 1 else None, settings, first.parameters)


def _score(name: str, runs: list[Result], tasks: dict[str, TaskScore], metric: str) -> Score:
    settings = [setting for task in tasks.values() for setting in task.settings.values()]
    seeds = _whole_seeds(settings)
    of_seeds = [
        fmean(fmean(getattr(s.best[seed], metric) for s in task.settings.values()) for task in tasks.values())
        for seed in seeds
    ]
    budgets = list(dict.fromkeys(run.budget for run in runs if run.budget))
    reasons = _reasons(runs, settings, budgets)
    states = [run.state_size for run in runs if run.state_size is not None]
    return Score(
        architecture=name,
        score=fmean(task.score for task in tasks.values()),
        spread=stdev(of_seeds) if len(of_seeds) > 1 else None,
        seeds=seeds,
        tasks=tasks,
        parameters=next(iter(tasks.values())).parameters,
        state_size=max(states, default=None),
        budget="+".join(budgets),
        comparable=not reasons,
        reasons=tuple(reasons),
        design=runs[0].design,
    )


def _whole_seeds(settings: Iterable[SettingScore]) -> tuple[int, ...]:
    """Returns the seeds that all settings have."""
    seeds = [set(setting.best) for setting in settings]
    return tuple(sorted(set.intersection(*seeds)))


def _reasons(runs: list[Result], settings: list[SettingScore], budgets: list[str]) -> list[str]:
    """Returns why a score cannot be compared with others; [] if it can."""
    specs = {run.spec for run in runs if run.spec} or {"paper"}
    if len(budgets) != 1 or budgets[0] not in BUDGETS:
        shown = f"its runs are of several budgets ({', '.join(budgets)})" if len(budgets) > 1 else "of no known budget"
        return [shown]
    if len(specs) > 1:
        return ["its runs are of both specifications, paper and mad-lab"]
    budget = BUDGETS[budgets[0]]
    expected = _expected(budget.name, specs.pop())
    have = {setting.name: setting for setting in settings}
    missing = [name for name in expected if name not in have]
    few = [name for name in expected if name in have and _points(runs, name) < len(budget.grid)]
    reasons = [] if budget.comparable else [budget.caution]
    if not _whole_seeds(settings):
        reasons.append("no seed has every setting, so the means are over different seeds")
    if any(run.decay == "matrices" for run in runs):
        reasons.append("norms, biases, embeddings and state parameters are excluded from weight decay in its runs")
    if missing and budget.comparable:
        reasons.append(
            f"{len(missing)} of {len(expected)} settings have no run that trained to the end: {_some(missing)}"
        )
    if few:
        reasons.append(
            f"{len(few)} of {len(expected)} settings lack some of their {len(budget.grid)} runs: {_some(few)}"
        )
    return reasons


def _points(runs: list[Result], setting: str) -> int:
    """Returns the number of grid points that every seed of a setting has tried."""
    tried: dict[int, set] = {}
    for run in runs:
        if run.setting == setting:
            tried.setdefault(run.seed, set()).add((run.learning_rate, run.weight_decay))
    return min((len(points) for points in tried.values()), default=0)


@lru_cache
def _expected(budget: str, spec: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run.setting.name for run in plan(budget, spec=spec)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Scores of MAD that others published, in per cent: Figure 3 of arXiv:2406.06484, with the results of paper 004's
# authors for these architectures. They are those of the published implementation: other tasks, training, layers and
# numbers than the paper describes.
_PUBLISHED_TASKS = (*sorted(MAD_TASKS), ALL_TASKS)
PUBLISHED: dict[str, dict[str, float]] = {
    name: dict(zip(_PUBLISHED_TASKS, values, strict=True))
    for name, values in {
        "mad-attention-swiglu": (51.6, 29.8, 94.1, 85.2, 86.8, 99.6, 74.5),
        "mad-hyena-swiglu": (45.2, 7.9, 81.7, 89.5, 78.8, 93.1, 66.0),
        "mad-mh-hyena-swiglu": (44.8, 14.4, 99.0, 89.4, 98.6, 93.0, 73.2),
        "mad-mamba": (52.7, 6.7, 90.4, 89.5, 90.1, 86.3, 69.3),
        "mad-gla-swiglu": (38.8, 6.9, 80.8, 63.3, 81.6, 88.6, 60.0),
    }.items()
}
PUBLISHED_BUDGET = "published"
_WHY_NOT = {
    "core": "it has 6 of 66 settings, the easiest",
    "full": "its tasks, training and layers are the paper's, not those of the published implementation",
    "screen": "it has 26 of 66 settings at 4 of 6 points, and scores are comparable with other screen scores only",
}


def refusal(budget: str) -> str | None:
    """Returns why scores of a budget cannot stand beside published ones; None if they can."""
    if budget == PUBLISHED_BUDGET:
        return None
    why = _WHY_NOT.get(budget, "its runs are too few or too short")
    return (
        f"scores of the budget {budget} are not shown beside published scores: {why}; run --budget {PUBLISHED_BUDGET}"
    )


# Do MAD scores discriminate, and do they repeat? The spread of each task, and how seeds and folders agree.
#
# Everything follows from scores; nothing is trained.

FLAT = 1e-12  # scores and losses that differ by less are equal
GAP = 0.10  # a task discriminates if its best and worst architecture differ by as much


@dataclass(frozen=True)
class Spread:
    """The architectures with the highest and the lowest score of a task, and whether the seeds tell them apart."""

    task: str
    best: str
    worst: str
    gap: float
    apart: bool

    @property
    def discriminates(self) -> bool:
        return self.apart and self.gap >= GAP


@dataclass(frozen=True)
class SeedAgreement:
    """The architectures in the order of their scores, by each of two seeds.

    Attributes:
        scores: seed -> architecture -> score.
        swaps: pairs of architectures that the seeds order differently.
        spearman: rank correlation of the two orders, None below three architectures or where all scores are equal.
    """

    seeds: tuple[int, int]
    orders: tuple[tuple[str, ...], tuple[str, ...]]
    scores: dict[int, dict[str, float]]
    swaps: int
    spearman: float | None


@dataclass(frozen=True)
class FolderAgreement:
    """Rank correlation of the scores of two folders, over all tasks ("all") and by task.

    Attributes:
        architectures: those with a score in both. spearman: task -> correlation, None below three architectures or
            where all scores are equal.
    """

    architectures: tuple[str, ...]
    spearman: dict[str, float | None]


def spreads(scores: Scores) -> list[Spread]:
    """Returns the spread of each task over the architectures that have every setting. Below two there is none."""
    task_spreads = []
    for task in scores.tasks:
        known = {name: score.tasks[task].score for name, score in scores.whole.items() if task in score.tasks}
        if len(known) > 1:
            best, worst = max(known, key=lambda name: known[name]), min(known, key=lambda name: known[name])
            apart = scores.order(task).lower(best, worst) is not None
            task_spreads.append(Spread(task, best, worst, known[best] - known[worst], apart))
    return task_spreads


def seed_agreement(results: Sequence[Result]) -> list[SeedAgreement]:
    """Returns the agreement of each pair of seeds on the architectures that have every setting with both seeds."""
    number = number_of_results(results)
    by_seed = {}
    for seed in sorted({result.seed for result in results}):
        scores = score([result for result in results if result.seed == seed], **number)
        by_seed[seed] = {name: score.score for name, score in scores.whole.items()}
    agreements = []
    for first, second in combinations(by_seed, 2):
        names = [name for name in by_seed[first] if name in by_seed[second]]
        if len(names) < 2:
            continue
        left, right = (({name: by_seed[seed][name] for name in names}) for seed in (first, second))
        agreements.append(
            SeedAgreement(
                (first, second),
                (_order(left), _order(right)),
                {first: left, second: right},
                sum((left[a] - left[b]) * (right[a] - right[b]) < 0 for a, b in combinations(names, 2)),
                rank_correlation(left, right),
            )
        )
    return agreements


def folder_agreement(scores: Scores, other: Scores) -> FolderAgreement:
    """Returns the rank correlation of two sets of scores, such as those of `screen` and `full`."""
    names = tuple(name for name in scores.whole if name in other.whole)
    correlations = {"all": rank_correlation(*({name: side[name].score for name in names} for side in (scores, other)))}
    for task in scores.tasks:
        if all(task in side[name].tasks for side in (scores, other) for name in names):
            correlations[task] = rank_correlation(
                *({name: side[name].tasks[task].score for name in names} for side in (scores, other))
            )
    return FolderAgreement(names, correlations)


def rank_correlation(one: Mapping[str, float], two: Mapping[str, float]) -> float | None:
    """Returns Spearman's rank correlation over equal keys, ties with mean ranks; None if it is not defined."""
    if len(one) < 3:
        return None
    value = float(spearman(*(np.array([values[name] for name in one]) for values in (one, two))))
    return None if math.isnan(value) else value


def pearson(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Returns the linear correlation along the last axis; NaN if either input is constant."""
    flat = (np.ptp(one, axis=-1) < FLAT) | (np.ptp(two, axis=-1) < FLAT)
    one, two = one - one.mean(axis=-1, keepdims=True), two - two.mean(axis=-1, keepdims=True)
    size = np.sqrt((one**2).sum(axis=-1) * (two**2).sum(axis=-1))
    return np.where(flat, np.nan, np.clip((one * two).sum(axis=-1) / np.where(flat, 1.0, size), -1, 1))


def spearman(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Returns the rank correlation along the last axis; equal values get their mean rank."""
    return pearson(_ranks(one), _ranks(two))


def _ranks(values: np.ndarray) -> np.ndarray:
    above = values[..., :, None] - values[..., None, :]
    return (above > FLAT).sum(axis=-1) + ((np.abs(above) <= FLAT).sum(axis=-1) - 1) / 2


def _order(scores: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(sorted(scores, key=lambda name: (-scores[name], name)))
