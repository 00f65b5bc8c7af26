"""Fits every architecture of a table by every requested method, and compares the architectures."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from linnet.config import ConfigError, count_of, nearest, refuse
from linnet.laws.fit import law as resampling
from linnet.laws.fit.envelope import WARMUP, fit_envelope, fit_frontier
from linnet.laws.fit.isoflop import fit_isoflop
from linnet.laws.fit.law import Law
from linnet.laws.fit.lse import Objective
from linnet.laws.fit.parametric import HUBER, fit_parametric
from linnet.laws.fit.results import (
    ArchitectureFit,
    Convention,
    Crossing,
    EnvelopeFit,
    MethodFit,
    StudyFit,
    law_of_form,
)
from linnet.laws.fit.selection import BUDGETS, Targets, choose, choose_allocation, targets_of
from linnet.laws.fit.table import COUNTED, FLOPS, apply_convention, assign_budgets, counted_flops, curves_of
from linnet.laws.orders import Order, orders

METHODS = ("isoflop", "envelope", "power", "parametric")
"""All methods, in the order of the output. Equal held-out errors are decided by this order."""

MOST = 1000
"""Largest number of resampled pairs of laws that are crossed."""
SURE = 0.95
"""Share of the resampled pairs of laws that must meet, with the same one lower above, for an interval of a crossing."""


def fit_study(
    table: pd.DataFrame,
    curves: pd.DataFrame | None = None,
    *,
    method: str = "all",
    bootstrap: int = 1000,
    seed: int = 0,
    count: str = "non-embedding",
    flops: str = "exact",
    hold_out: float | None = None,
    budgets: list[float] | None = None,
    tolerance: float = 0.06,
    window: str = "auto",
    envelope: str = "minimum",
    keep_ends: bool = False,
    smooth: int | None = None,
    starts: str = "coarse",
    objective: Objective = HUBER,
    conventions: bool = True,
    progress: Callable[[str], None] | None = None,
) -> StudyFit:
    """Fits the scaling laws of each architecture of a table.

    Args:
        table: from `load_table` or `linnet.study.collect.load_study`.
        curves: training curves with the same columns. If None, the table itself if it contains curves.
        method: "power", "isoflop", "envelope", "parametric" or "all".
        bootstrap: number of resamples for the 95 % intervals; 0 for none.
        seed: seed of the resampling.
        count: how N is counted, "non-embedding" or "total".
        flops: how C is counted, "exact" as in the table, "paper", "causal", "6nd" or "004"; see `apply_convention`.
        hold_out: fraction (below 1) of the points, those of largest C, that the held-out test predicts; or the largest
            C in FLOPs that its fit uses. Default: 0.2.
        budgets, tolerance: see `assign_budgets`.
        window: see `fit_isoflop`.
        envelope: mode of `fit_envelope`.
        keep_ends: takes the envelope of all records, as published hulls are: the ends count, no warm-up is dropped if
            there is no learning rate, and nothing is smoothed unless `smooth` is given.
        smooth: window of `fit_envelope`; None means a twentieth of the shortest curve.
        starts, objective: see `fit_parametric`.
        conventions: whether the headline method is also fitted under each other way of counting N and C.
        progress: called with one line of text before each fit.

    Raises:
        ConfigError: `method` is unknown, or the table does not have the requested counts.
    """
    if method != "all" and method not in METHODS:
        raise ConfigError([f"method {method!r}: unknown; {nearest(method, [*METHODS, 'all'])}"], "fit")
    chosen = METHODS if method == "all" else (method,)
    names, attrs = list(dict.fromkeys(table["architecture"])), table.attrs
    table, _ = resampling.in_order(table, np.zeros(len(table), dtype=int))
    curves = curves_of(table) if curves is None else curves
    unmatched = _unmatched(table, budgets or [], tolerance)
    settings = {"bootstrap": bootstrap, "seed": seed, "hold_out": hold_out}
    options = {"budgets": budgets, "tolerance": tolerance, "window": window, "starts": starts}
    options |= {"objective": objective, "envelope": envelope, "keep_ends": keep_ends, "smooth": smooth}
    fits = {}
    for name in names:
        part, records = _counted(table, curves, name, count, flops)
        methods = {}
        for chosen_method in chosen:
            if progress:
                progress(f"{name}: {chosen_method}")
            methods[chosen_method] = _fit(chosen_method, part, records, flops, settings, options)
        fits[name] = ArchitectureFit(name, len(part), methods, headline=chosen[0])
    targets = {}
    for name in fits:
        part, _ = _counted(table, curves, name, count, flops)
        targets[name] = _targets(part, fits[name], flops, hold_out, options)
    # Sums over architectures have one order, whatever the order of the rows.
    ordered = {name: fits[name] for name in sorted(fits)}
    headline, form, candidates = choose(ordered, targets)
    allocation = choose_allocation(ordered, headline)
    for name, fit in fits.items():
        fit.allocation = allocation
        fit.headline, fit.form, fit.budgets = headline, form, targets[name].budgets
        fit.conventions = _conventions(table, curves, fit, (count, flops), options) if conventions else []
    study = StudyFit(fits, headline, form, allocation, candidates, count, flops)
    study.columns = dict(attrs.get("columns", {}))
    study.dropped = sorted(attrs.get("excluded", []), key=lambda row: (row["architecture"], row["run"], row["reason"]))
    study.notes = unmatched
    names, ranking = sorted(fits), orders(fits)  # by name: an order by the loss would be a ranking
    study.crossings = [
        crossing(fits[first], fits[second], ranking) for i, first in enumerate(names) for second in names[i + 1 :]
    ]
    return study


def parse_points(requests: Sequence[str]) -> list[tuple[float, float]]:
    """Parses `N=1e9,D=2e10` (one string per point) to N and D.

    Raises:
        ConfigError: lists every request that is not two positive numbers.
    """
    points, problems = [], []
    for request in requests:
        try:
            parts = dict(part.split("=") for part in request.replace(" ", "").split(","))
            point = (float(parts.pop("N")), float(parts.pop("D")))
            if parts or not all(0 < value < np.inf for value in point):
                raise ValueError
        except (KeyError, ValueError):
            problems.append(f"--predict {request!r}: not two positive numbers; write N=1e9,D=2e10")
            continue
        points.append(point)
    refuse(problems, "command line")
    return points


def predictions(study: StudyFit, points: Sequence[tuple[float, float]]) -> list[dict]:
    """Returns the loss of each architecture's surface at points (N, D), with 95 % intervals.

    Returns:
        {"architecture", "N", "D", "loss", "interval", "inside", "refused"} per architecture and point. `inside` is
        whether N and D lie in the ranges of the table. Without a surface, loss is None and `refused` has the reasons.
    """
    rows = []
    for name, fit in study.items():
        surface = fit.parametric
        for N, D in points:
            row = {"architecture": name, "N": N, "D": D, "loss": None, "interval": None, "inside": False}
            if surface is None or not surface.surface:
                row["refused"] = surface.refused if surface is not None else ["give --method parametric or all"]
            else:
                trained = zip((N, D), ("N", "D"), strict=True)
                values = {axis: [point[axis] for point in surface.points] for axis in "ND"}
                row["inside"] = all(min(values[axis]) <= at <= max(values[axis]) for at, axis in trained)
                row |= {"loss": float(surface.predict(N, D)), "interval": surface.interval_at(N, D), "refused": []}
            rows.append(row)
    return rows


def _unmatched(table: pd.DataFrame, budgets: list[float], tolerance: float) -> list[str]:
    """Returns a note per given budget that an architecture has no row at. Raises ConfigError if none has one."""
    log_C = np.log10(table["C"].to_numpy(float))
    notes, problems = [], []
    for budget in budgets:
        near = np.abs(log_C - np.log10(budget)) < tolerance
        if not near.any():
            closest = table["C"].iloc[int(np.abs(log_C - np.log10(budget)).argmin())]
            problems.append(f"budgets: {budget:g} matches no row; the nearest C in the table is {closest:.3g} FLOPs")
        without = sorted(set(table["architecture"]) - set(table["architecture"][near]))
        if near.any() and without:
            notes.append(f"budget {budget:g}: no row of {', '.join(without)}")
    refuse(problems, "fit")
    return notes


def _counted(table, curves, name: str, count: str, flops: str):
    part = apply_convention(table[table["architecture"] == name], count, flops).reset_index(drop=True)
    if curves is None:
        return part, None
    records = curves[curves["architecture"] == name]
    if flops in COUNTED and len(records) and COUNTED[flops] not in records:  # records of a run share one ratio
        mine = table[table["architecture"] == name]
        ratio = dict(zip(mine["run"], counted_flops(mine, flops) / mine["C"], strict=True))
        records = records.assign(**{COUNTED[flops]: records["C"] * records["run"].map(ratio)})
    return part, apply_convention(records, count, flops) if len(records) else None


def _fit(method: str, part: pd.DataFrame, curves, flops: str, settings: dict, options: dict) -> MethodFit:
    if method == "parametric":
        return fit_parametric(part, **settings, starts=options["starts"], objective=options["objective"])
    if method == "envelope":
        return _fit_envelope(curves, settings, options)
    groups, nominal = assign_budgets(part, options["budgets"], options["tolerance"])
    if method == "power":
        return fit_frontier(part, groups, **settings)
    return fit_isoflop(part, groups, nominal, **settings, cost=flops, window=options["window"])


def _fit_envelope(curves, settings: dict, options: dict) -> EnvelopeFit:
    if curves is None:
        fit = EnvelopeFit("envelope")
        fit.refuse("no training curves: give a study folder, or a table with several rows per run")
        return fit
    smooth, ends = options["smooth"], options["keep_ends"]
    if smooth is None:
        smooth = 1 if ends else int(curves.groupby("run").size().min()) // 20 // 2 * 2 + 1
    warmup = 0.0 if ends else WARMUP
    return fit_envelope(curves, mode=options["envelope"], keep_ends=ends, warmup=warmup, smooth=smooth, **settings)


def _targets(part: pd.DataFrame, fit: ArchitectureFit, flops: str, hold_out: float | None, options: dict) -> Targets:
    groups, nominal = assign_budgets(part, options["budgets"], options["tolerance"])
    isoflop = fit.isoflop or fit_isoflop(part, groups, nominal, cost=flops)
    return targets_of(part, groups, isoflop, hold_out)


def _conventions(table, curves, done: ArchitectureFit, current: tuple[str, str], options: dict) -> list[Convention]:
    """Returns the exponents under each way of counting that the table allows. `current` is the way that `done` uses."""
    conventions, name, method = [], done.architecture, done.headline
    sizes = done.allocation or method
    settings = {"bootstrap": 0, "seed": 0, "hold_out": None}
    has_total = table["N_total"][table["architecture"] == name].notna().all()
    for count in ("non-embedding", "total")[: 1 + has_total]:
        for flops in FLOPS:
            if flops in COUNTED and not (counted_flops(table[table["architecture"] == name], flops) > 0).all():
                continue
            part, records = _counted(table, curves, name, count, flops)
            if flops not in ("exact", current[1]) and np.allclose(part["spent"], part["C"], rtol=1e-6):
                continue  # the same as exact FLOPs in this table
            fits = {key: done.methods[key] for key in (method, sizes)}
            if (count, flops) != current:
                fits = {key: _fit(key, part, records, flops, settings, {**options, "starts": "coarse"}) for key in fits}
            best, loss = fits[sizes], law_of_form(fits[method], done.form)
            law = Convention(count, flops, method, loss.exponent, best.N_opt.exponent, best.D_opt.exponent)
            law.refused = list(best.N_opt.refused)
            conventions.append(law)
    return conventions


def crossing(first: ArchitectureFit, second: ArchitectureFit, ranking: Mapping[str, Order] | None = None) -> Crossing:
    """Returns the compute at which the loss laws of two architectures meet, with an interval from bootstrap draws.

    Pure laws cross at C = (beta_1 / beta_2)^(1 / (alpha_2 - alpha_1)). Laws with a constant are solved numerically
    within a thousand times the range of the data.

    There is no interval if fewer than four budgets leave the form of the laws untested, or if the laws of the other
    form cross outside the interval: the form then moves the crossing by more than the noise does. A crossing outside
    the data of both has a C only with an interval, and `inside` is False.

    Args:
        ranking: the orders of the study; default: those of the two. They decide which law is called the lower one.
    """
    left, right = first.L, second.L
    ranking = orders({fit.architecture: fit for fit in (first, second)}) if ranking is None else ranking
    result = Crossing(first.architecture, second.architecture)
    result.form = "pure" if left.constant is None and right.constant is None else "constant"
    for fit, law in ((first, left), (second, right)):
        if law.refused:
            result.refused.append(f"{fit.architecture} has no L(C): {'; '.join(law.refused)}")
    if result.refused:
        return result
    low, high = min(left.c_min, right.c_min), max(left.c_max, right.c_max)
    reach = (low / 1e3, high * 1e3)
    (C,) = _meet(_numbers(left), _numbers(right), reach).tolist()
    ends = max(left.c_min, right.c_min), min(left.c_max, right.c_max)
    others = [fit.other_L or fit.L for fit in (first, second)]
    if others[0] is not left or others[1] is not right:
        result.other_form = "constant" if result.form == "pure" else "pure"
        (other_C,) = _meet(*map(_numbers, others), reach).tolist()
        result.other_C = None if math.isnan(other_C) else other_C
        result.other_inside = bool(ends[0] <= other_C <= ends[1])
    names = (first.architecture, second.architecture)
    if math.isnan(C):
        lower = ranking["L"].lower(*names)
        ending = f"; {lower} is lower" if lower else ", and their losses cannot be told apart"
        result.refused.append(f"the laws do not meet between {reach[0]:.2g} and {reach[1]:.2g} FLOPs{ending}")
        return result
    result.C = C
    if ranking["gain"].lower(*names):
        result.lower_below, result.lower_above = names if left.predict(C / 2) < right.predict(C / 2) else names[::-1]
    result.inside = bool(ends[0] <= C <= ends[1])
    if left.intervals and right.intervals:
        _add_interval(result, first, second, reach)
    if not result.inside and result.interval is None:
        data = f"the data of both, {ends[0]:.2g} to {ends[1]:.2g} FLOPs" if ends[0] <= ends[1] else "the data of both"
        unknown = "" if result.refused else ", and they have no intervals"
        result.refused.insert(0, f"the laws meet outside {data}{unknown}")
        result.C = result.lower_below = result.lower_above = None
    return result


def _add_interval(result: Crossing, first: ArchitectureFit, second: ArchitectureFit, reach) -> None:
    for fit in (first, second):
        if fit.L.constant is None and fit.L.points < BUDGETS:
            number = count_of(fit.L.points, "budget")
            reason = f"{fit.architecture} has {number}, and {BUDGETS} are needed to test the form of its law"
            result.refused.append(f"no interval: {reason}")
            return
    first_draws, second_draws = first.L.draws, second.L.draws
    rows = min(len(first_draws), len(second_draws), MOST)
    # Both laws may use the same seed. Shifting one by half of the draws makes the pairs independent.
    other = np.roll(second_draws[:rows], rows // 2, axis=0)
    met = _meet(first_draws[:rows], other, reach)
    crossings = met[~np.isnan(met)]
    if len(crossings) < SURE * rows:
        result.refused.append(f"no interval: {rows - len(crossings)} of {rows} resampled pairs of laws do not meet")
        return
    falls = (_slope(first_draws[:rows], met) < _slope(other, met))[~np.isnan(met)]
    if max(np.mean(falls), 1 - np.mean(falls)) < SURE:
        share = 1 - max(np.mean(falls), 1 - np.mean(falls))
        result.refused.append(f"no interval: in {share:.0%} of the resamples the other law is lower above the crossing")
        return
    low, high = resampling.interval(crossings)
    if result.other_form and not (result.other_C is not None and low <= result.other_C <= high):
        meeting = "do not cross" if result.other_C is None else "cross outside the data"
        meeting = f"cross at {result.other_C:.3g} FLOPs" if result.other_inside else meeting
        what = "with a constant" if result.other_form == "constant" else "without a constant"
        result.refused.append(f"no interval: the laws {what} {meeting}, so the form decides more than the noise")
        return
    result.interval = (low, high)


def _slope(numbers: np.ndarray, C: np.ndarray) -> np.ndarray:
    log_coefficient, exponent, _ = numbers.T
    return exponent * np.exp(log_coefficient + exponent * np.log(C))


def _numbers(law: Law) -> tuple[float, float, float]:
    return np.log(law.coefficient), law.exponent, law.constant or 0.0


def _meet(first, second, reach: tuple[float, float]) -> np.ndarray:
    """Returns the C [R] at which pairs of laws, [R, 3] or one of [3], meet within `reach`; NaN where they do not."""
    b1, a1, e1, b2, a2, e2 = numbers = np.vstack([np.atleast_2d(first).T, np.atleast_2d(second).T])
    low, high = np.log(reach)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_C = (b1 - b2) / (a2 - a1)
        met = np.where((np.abs(a1 - a2) >= 1e-12) & (low <= log_C) & (log_C <= high), np.exp(log_C), np.nan)
    curved = np.flatnonzero((e1 != 0) | (e2 != 0))
    grid, bent = np.linspace(low, high, 60), numbers[:, curved, None]
    signs = np.sign(_gap(grid, *bent))
    turns = signs[:, 1:] * signs[:, :-1] < 0
    met[curved] = np.nan
    meets = turns.any(axis=1)
    curved, bent, signs = curved[meets], bent[:, meets], signs[meets]
    # Two laws with constants can meet twice. The crossing nearest the data is returned.
    turn = np.where(turns[meets], np.abs(np.arange(len(grid) - 1) - len(grid) / 2), np.inf).argmin(axis=1)[:, None]
    left, right, sign = grid[turn], grid[turn + 1], np.take_along_axis(signs, turn, axis=1)
    for _ in range(30):  # halves a step of the grid to less than 1e-9 of a crossing
        middle = (left + right) / 2
        before = np.sign(_gap(middle, *bent)) == sign
        left, right = np.where(before, middle, left), np.where(before, right, middle)
    met[curved] = np.exp(left[:, 0])
    return met


def _gap(log_C, b1, a1, e1, b2, a2, e2):
    return e1 + np.exp(b1 + a1 * log_C) - e2 - np.exp(b2 + a2 * log_C)
