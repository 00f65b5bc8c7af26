"""Correlates MAD scores with compute-optimal loss: do they predict how an architecture scales (004, Figure 5.1)?

found = correlate(read(folder, study_folder), compute=1e12)
found.overall["all"].spearman           -0.83; at -1 a higher score always means a lower loss
found.tasks["fuzzy_recall"]             the correlation of one task
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from linnet.config import ConfigError, gather, nearest, refuse
from linnet.mad.results import read_results
from linnet.mad.scores import Scores, pearson, score, spearman

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 3  # smallest number of architectures for a correlation
FEWEST_FOR_INTERVAL = 4
ENOUGH = 0.5  # share of the resamples that must have a correlation
ALL, WITHIN, BETWEEN = "all", "within families", "between families"


@dataclass(frozen=True)
class Correlation:
    """The correlation of scores and losses in one group of architectures.

    Attributes:
        architectures: their number. pearson: linear correlation. spearman: rank correlation. Both None if refused.
        pearson_interval, spearman_interval: 95 % bootstrap, None with too few architectures.
        refused: the reason, if there is no correlation.
    """

    group: str
    architectures: int
    pearson: float | None = None
    spearman: float | None = None
    pearson_interval: tuple[float, float] | None = None
    spearman_interval: tuple[float, float] | None = None
    refused: str = ""


@dataclass(frozen=True)
class Point:
    """One architecture: its score and its compute-optimal loss (nats per token, with 95 % from the fit).

    Attributes:
        spread: one standard deviation of the score over seeds. beyond: whether the loss is extrapolated.
    """

    architecture: str
    study_name: str
    family: str
    score: float
    tasks: dict[str, float]
    loss: float
    loss_interval: tuple[float, float] | None
    beyond: bool
    spread: float | None = None


@dataclass(frozen=True)
class Correlations:
    """All correlations of scores with losses.

    Attributes:
        compute: FLOPs at which the laws give the losses. method: method of the fit.
        overall: group -> correlation of the score: "all", "within families", "between families" and each family.
        tasks: task -> correlation of that task alone, over all architectures.
        notes: remarks for the reader.
        metric, legacy: options of the scores. resamples, seed: options of the intervals.
    """

    compute: float
    method: str
    points: list[Point]
    overall: dict[str, Correlation]
    tasks: dict[str, Correlation]
    notes: list[str] = field(default_factory=list)
    metric: str = "accuracy"
    legacy: bool = False
    resamples: int = 1000
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sources:
    """The inputs of `correlate`, from a MAD folder and a study: scores, runs and their training curves."""

    folder: str
    study: str
    scores: Scores
    table: "pd.DataFrame"
    curves: "pd.DataFrame | None"


def read(folder: str | Path, study: str | Path, *, metric: str = "accuracy", legacy: bool = False) -> Sources:
    """Reads scores and a study; does not fit the laws.

    Args:
        folder: folder of `linnet mad run`. study: folder of `linnet study`, or one with a table.csv.
        metric, legacy: as in `score`.

    Raises:
        ConfigError: lists all problems of both folders.
    """
    from linnet.study.collect import load_study

    problems: list[str] = []
    results, scores, table, curves = [], None, None, None
    with gather(problems):
        results = read_results(folder)
    with gather(problems):
        scores = score(results, metric=metric, legacy=legacy)
    with gather(problems):
        table, curves, _ = load_study(study)
    refuse(problems, "correlate")
    return Sources(str(folder), str(study), scores, table, curves)


def correlate(
    sources: Sources,
    names: Mapping[str, str] | None = None,
    *,
    compute: float | None = None,
    resamples: int = 1000,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Correlations:
    """Correlates the scores with the compute-optimal losses of the study.

    Args:
        compute: FLOPs; by default the largest to which the laws of all common architectures were fitted.
        names: architecture of the scores -> its name in the study, if the two differ.
        resamples: number of bootstrap resamples of architectures and of the runs behind the laws; 0: no intervals.

    Raises:
        ConfigError: fewer than three architectures have a score and a law; lists those on only one side.
    """
    from linnet.laws.fit import fit_study

    scores, table = sources.scores, sources.table
    studied = list(dict.fromkeys(table["architecture"]))
    matched = match(list(scores.whole), studied, names or {}, sources.folder, sources.study)
    kept = table[table["architecture"].isin(matched.values())]
    fits = fit_study(kept, sources.curves, bootstrap=resamples, seed=seed, conventions=False, progress=progress)
    laws = {name: fits[other].L for name, other in matched.items()}
    return correlate_laws(scores, laws, matched, compute=compute, method=fits.headline, resamples=resamples, seed=seed)


def match(scored: Sequence[str], studied: Sequence[str], names: Mapping[str, str], folder: str, study: str) -> dict:
    """Returns scored architecture -> its name in the study, for the architectures in both.

    Raises:
        ConfigError: an unknown name in `names`, one of the study for several scores, or fewer than three in common.
    """
    problems = [f"names: {n!r} has no score in {folder}; {nearest(n, scored)}" for n in names if n not in scored]
    problems += [
        f"names: {n!r} is not in the study {study}; {nearest(n, studied)}" for n in names.values() if n not in studied
    ]
    refuse(problems, "correlate")
    matched = {name: names.get(name, name) for name in scored if names.get(name, name) in studied}
    for other in dict.fromkeys(matched.values()):  # one law would count as that of several architectures
        if len(same := [name for name in matched if matched[name] == other]) > 1:
            problems.append(f"names: {' and '.join(same)} are all {other!r} of the study {study}; pair it with one")
    refuse(problems, "correlate")
    if len(matched) < FEWEST:
        raise ConfigError(_too_few(matched, scored, studied, folder, study), "correlate")
    return matched


def _too_few(matched: dict, scored: Sequence[str], studied: Sequence[str], folder: str, study: str) -> list[str]:
    have = f" ({', '.join(matched)})" if matched else ""
    problems = [f"{len(matched)} architectures have both a score and a law{have}; {FEWEST} are needed"]
    for only, where, other in (
        ([name for name in scored if name not in matched], folder, f"the study {study}"),
        ([name for name in studied if name not in matched.values()], study, f"the scores of {folder}"),
    ):
        if only:
            problems.append(f"in {where} but not in {other}: {', '.join(only)}")
    return [*problems, "if the two call one architecture by different names, give both: --pair SCORED=STUDIED"]


def correlate_laws(
    scores: Scores,
    laws: Mapping[str, Any],
    matched: Mapping[str, str],
    *,
    compute: float | None = None,
    method: str = "",
    resamples: int = 1000,
    seed: int = 0,
) -> Correlations:
    """Correlates scores with laws of loss (`linnet.laws.fit.Law`), which have the names of the scores."""
    usable = {name: law for name, law in laws.items() if not law.refused}
    lost = {name: law for name, law in laws.items() if law.refused}
    if len(usable) < FEWEST:
        problems = [f"{len(usable)} of {len(laws)} common architectures have a law of loss; {FEWEST} are needed"]
        problems += [f"{matched[name]}: refused, {'; '.join(law.refused)}" for name, law in lost.items()]
        raise ConfigError(problems, "correlate")
    compute = min(law.c_max for law in usable.values()) if compute is None else compute
    if not (math.isfinite(compute) and compute > 0):
        raise ConfigError([f"compute {compute!r}: give FLOPs above zero, such as 1e12"], "correlate")
    points = [_point(scores, name, matched[name], law, compute) for name, law in usable.items()]
    draws = _loss_draws(list(usable.values()), compute, resamples, seed)
    losses = np.array([point.loss for point in points])
    families = [point.family for point in points]
    overall = _groups(np.array([point.score for point in points]), losses, draws, families, resamples, seed)
    tasks = {}
    for task in scores.tasks:
        members = [index for index, point in enumerate(points) if task in point.tasks]
        values = np.array([points[index].tasks[task] for index in members])
        tasks[task] = _correlation(task, values, losses[members], draws[:, members], resamples, seed)
    notes = [f"{matched[name]} takes no part, its law was refused: {'; '.join(lost[name].refused)}" for name in lost]
    beyond = [point.architecture for point in points if point.beyond]
    if beyond:
        notes.append(f"{compute:.3g} FLOPs lie outside the data of {', '.join(beyond)}: their losses are extrapolated")
    short = [name for name in scores if name not in scores.whole]
    if short:
        notes.append(f"{', '.join(short)}: no part is taken, for settings that others have are not there")
    unknown = [point.architecture for point in points if scores[point.architecture].design is None]
    if unknown:
        notes.append(f"{', '.join(unknown)}: a family of its own each, for its layers are not recorded")
    odd = [point.architecture for point in points if not scores[point.architecture].comparable]
    if odd:
        reasons = dict.fromkeys(reason for name in odd for reason in scores[name].reasons)
        notes.append(f"not comparable, so read with care: {', '.join(odd)} ({'; '.join(reasons)})")
    exact = [matched[name] for name, law in usable.items() if law.draws is None or not len(law.draws)]
    if exact and resamples:
        notes.append(
            f"the intervals of correlations are too narrow: the law of {', '.join(exact)} has no interval, so its loss "
            "counts as exact; train the sizes that `linnet fit` names"
        )
    how = {"metric": scores.metric, "legacy": scores.legacy, "resamples": resamples, "seed": seed}
    return Correlations(float(compute), method, points, overall, tasks, notes, **how)


def _point(scores: Scores, name: str, other: str, law, compute: float) -> Point:
    score = scores[name]
    tasks = {task: part.score for task, part in score.tasks.items()}
    beyond = not law.c_min <= compute <= law.c_max * (1 + 1e-9)
    loss = float(law.predict(compute))
    family = name if score.design is None else score.design.family
    return Point(name, other, family, score.score, tasks, loss, law.interval_at(compute), beyond, score.spread)


def _loss_draws(laws: list, compute: float, resamples: int, seed: int) -> np.ndarray:
    """Returns losses [resamples, architectures] from the laws' bootstraps; constant for a law without one."""
    generator = np.random.default_rng(seed + 1)
    columns = []
    for law in laws:
        if law.draws is None or not len(law.draws):
            columns.append(np.full(resamples, float(law.predict(compute))))
            continue
        drawn = law.draws[generator.integers(0, len(law.draws), resamples)]
        columns.append(np.exp(drawn[:, 0] + drawn[:, 1] * np.log(compute)) + drawn[:, 2])
    return np.stack(columns, axis=1)


def _groups(scores, losses, draws, families: list[str], resamples: int, seed: int) -> dict[str, Correlation]:
    names = list(dict.fromkeys(families))
    members = {name: [i for i, family in enumerate(families) if family == name] for name in names}
    groups = {ALL: _correlation(ALL, scores, losses, draws, resamples, seed)}
    several = [family for family in members.values() if len(family) > 1]
    inside = [index for family in several for index in family]
    if len(inside) < FEWEST:
        groups[WITHIN] = Correlation(WITHIN, len(inside), refused="no family has enough architectures")
    else:
        # Subtract the mean of each family: do scores rank the members of a family?
        label = np.concatenate([np.full(len(family), number) for number, family in enumerate(several)])
        groups[WITHIN] = _correlation(
            WITHIN, scores[inside], losses[inside], draws[:, inside], resamples, seed, strata=label
        )
    means = [np.array([values[family].mean() for family in members.values()]) for values in (scores, losses)]
    mean_draws = np.stack([draws[:, family].mean(axis=1) for family in members.values()], axis=1)
    groups[BETWEEN] = _correlation(BETWEEN, *means, mean_draws, resamples, seed, noun="families")
    for name, family in members.items():
        if len(family) >= FEWEST:
            groups[name] = _correlation(name, scores[family], losses[family], draws[:, family], resamples, seed)
    return groups


def _correlation(
    group: str,
    scores: np.ndarray,
    losses: np.ndarray,
    draws: np.ndarray,
    resamples: int,
    seed: int,
    strata: np.ndarray | None = None,
    noun: str = "architectures",
) -> Correlation:
    """Correlates one group. `strata` [n]: labels whose means are subtracted, and within which resamples are drawn."""
    number = len(scores)
    if number < FEWEST:
        return Correlation(group, number, refused=f"{number} {noun}; {FEWEST} are needed")
    labels = np.zeros(number, dtype=int) if strata is None else strata

    def both(x: np.ndarray, y: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if strata is not None:
            x, y = _centred(x, labels), _centred(y, labels)
        return pearson(x, y), spearman(x, y)

    linear, rank = (float(value) for value in both(scores, losses, labels))
    if math.isnan(linear):
        return Correlation(group, number, refused=f"all {noun} have the same score or the same loss")
    intervals: list[tuple[float, float] | None] = [None, None]
    if resamples and number >= FEWEST_FOR_INTERVAL:
        generator = np.random.default_rng(seed)
        drawn = np.empty((resamples, number), dtype=int)
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            drawn[:, members] = members[generator.integers(0, len(members), (resamples, len(members)))]
        # Two points always lie on a line: a resample needs as many different ones as a correlation does.
        distinct = 1 + (np.diff(np.sort(drawn, axis=1), axis=1) > 0).sum(axis=1) >= FEWEST
        values = both(scores[drawn], np.take_along_axis(draws, drawn, axis=1), labels)
        for place, column in enumerate(values):
            kept = column[distinct & np.isfinite(column)]
            if len(kept) >= ENOUGH * resamples:
                low, high = np.percentile(kept, [2.5, 97.5])
                intervals[place] = (float(low), float(high))
    return Correlation(group, number, linear, rank, *intervals)


def _centred(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns values minus the mean of their label, along the last axis."""
    result = values.astype(float)
    for label in np.unique(labels):
        mask = labels == label
        result[..., mask] -= result[..., mask].mean(axis=-1, keepdims=True)
    return result
