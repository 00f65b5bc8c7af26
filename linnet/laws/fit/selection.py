"""Chooses the headline: the method and the form of L(C) that best predict the largest budgets from the smaller ones.

All candidates predict the same losses, so that their errors can be compared. For each architecture:

* The target of a budget is the minimum of its parabola. It follows from the runs of that budget alone. Budgets without
  an accepted minimum are not targets. If fewer than three budgets have one, the targets are the lowest observed losses
  of all budgets.
* The largest fifth of the targets (at least one; `hold_out`) is held out. Every candidate is fitted to what lies at
  the compute of the smaller budgets, and predicts the held-out targets.
* A candidate beats those of `isoflop` only by more than the noise of the minima and of their prediction.
* N_opt and D_opt have a method of their own: the headline, unless that is `power` or gives fewer.
* The error of a candidate is the mean of |predicted / target - 1| over the targets of all architectures.

A candidate is a method with one of two forms of L(C): a pure power law, or a power law plus a constant. The form with a
constant needs four budgets. Where the smaller budgets show no constant, it predicts with the pure law.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from linnet.config import count_of
from linnet.laws.fit.law import HeldOut, Law, compare, threshold
from linnet.laws.fit.parametric import loss_law
from linnet.laws.fit.power import law_through
from linnet.laws.fit.results import (
    ArchitectureFit,
    Candidate,
    EnvelopeFit,
    IsoflopFit,
    IsoflopGroup,
    MethodFit,
    ParametricFit,
)

FORMS = ("pure", "constant")
"""L = beta C^alpha, and L = E + beta C^alpha."""
BUDGETS = 4
"""Number of budgets that the form with a constant needs: three to fit it, and one to test it."""


EXACT = 1e-6
"""Errors up to this count as zero."""
SURE = 2.0
"""Standard deviations by which a candidate must be better than the parabolas."""
PREDICTION = 1.6
"""Standard deviation of the error of a line through four evenly spaced points at the next one, over that of a point."""


@dataclass
class Targets:
    """The losses of one architecture that every candidate predicts.

    Attributes:
        C, loss: [n] compute in FLOPs and loss of each held-out budget, in order of C.
        c_max: largest C of the smaller budgets.
        budgets: number of budgets, those held out included.
        rows: rows of the table at the smaller budgets.
        refused: the reason if nothing can be held out.
        noise: [n] standard deviation of each loss as a share of it; 0 if it is not known.
    """

    C: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loss: np.ndarray = field(default_factory=lambda: np.zeros(0))
    c_max: float | None = None
    budgets: int = 0
    rows: pd.DataFrame | None = None
    refused: str = ""
    noise: np.ndarray = field(default_factory=lambda: np.zeros(0))


def targets_of(table: pd.DataFrame, groups: np.ndarray, isoflop: IsoflopFit, hold_out: float | None) -> Targets:
    """Returns the targets of one architecture.

    Args:
        table: columns N, C, loss.
        groups: [rows] budget label of each row, -1 for none. Rows without a budget are budgets of their own, unless
            most rows belong to budgets with several sizes.
        isoflop: the parabolas of these groups.
        hold_out: see `linnet.laws.fit.law.threshold`; a fraction counts targets.
    """
    C, loss = (table[name].to_numpy(float) for name in ("C", "loss"))
    enough = sum(point["inside"] for point in isoflop.points) >= 3
    points = [(point["C"], point["loss"], point["inside"] and enough) for point in isoflop.points]
    sizes = table.groupby(groups)["N"].transform("nunique").to_numpy()
    if ((groups >= 0) & (sizes > 1)).mean() < 0.5:
        points += [(C[row], loss[row], False) for row in np.flatnonzero(groups < 0)]
    points.sort()
    if len(points) < 3:
        number = count_of(len(points), "budget")
        return Targets(budgets=len(points), refused=f"{number}; a test needs two to fit and one to predict")
    pool = [point for point in points if point[2]] or points
    at = np.array([point[0] for point in pool])
    largest = threshold(at, hold_out)
    held = at > largest if largest is not None else np.zeros(len(at), dtype=bool)
    if largest is None or not held.any():
        return Targets(budgets=len(points), refused="no budget is larger than those to fit")
    below = [point[0] for point in points if point[0] < at[held].min() and point[0] <= largest * (1 + 1e-9)]
    if len(below) < 2:
        number = count_of(len(below), "budget")
        return Targets(budgets=len(points), refused=f"{number} up to {largest:.2g} FLOPs; a law needs two")
    # Rows of one budget scatter around its C, so the rows are cut between the budgets.
    cut = np.sqrt(max(below) * at[held].min())
    values = np.array([point[1] for point in pool])
    noise = {group.C: _noise_of(group) for group in isoflop.groups if group.inside and enough}
    deviations = np.array([noise.get(c, 0.0) for c in at[held]])
    return Targets(at[held], values[held], max(below), len(points), table[C <= cut], noise=deviations)


def _noise_of(group: IsoflopGroup) -> float:
    """Returns the standard deviation of the minimum of a parabola, as a share of it.

    The value at the middle of n evenly spaced points has 9 / (4 n) of the variance of one of them.
    """
    return 1.5 * (group.residual_sd or 0.0) / (group.L_opt or 1.0) / np.sqrt(sum(group.used))


def test(fit: MethodFit, form: str, targets: Targets) -> HeldOut:
    """Returns the held-out test of one method and form on the targets of one architecture."""
    result = HeldOut(targets.c_max, 0, len(targets.C))
    if targets.refused:
        result.refused.append(targets.refused)
        return result
    law, result.trained = _law_below(fit, form, targets)
    if law.refused:
        result.refused.extend(f"up to {targets.c_max:.2g} FLOPs: {reason}" for reason in law.refused)
        return result
    return compare(result, targets.C, targets.loss, law.predict(targets.C))


def _law_below(fit: MethodFit, form: str, targets: Targets) -> tuple[Law, int]:
    """Returns L(C) fitted to what lies at the smaller budgets, and the number of points or rows."""
    assert targets.rows is not None and targets.c_max is not None
    if isinstance(fit, ParametricFit):
        return loss_law(targets.rows, fit.surface, fit.minimised), len(targets.rows)
    c_max = targets.c_max * (1 + 1e-9)
    points = [p for p in fit.points if p["fitted"] and p["C"] <= c_max]
    C, loss = (np.array([p[name] for p in points]) for name in ("C", "loss"))
    law = law_through("L", C, loss, irreducible=True, fewest=3) if form == "constant" else None
    if law is None or law.refused:
        law = law_through("L", C, loss)
    return law, len(points)


def forms_of(fit: MethodFit) -> tuple[str, ...]:
    """Returns the forms of L(C) that a method gives for one architecture."""
    if fit.L.refused:
        return ()
    if fit.L.constant is not None:
        return ("constant",)
    return FORMS if not fit.L_irreducible.refused else ("pure",)


def choose(fits: Mapping[str, ArchitectureFit], targets: Mapping[str, Targets]) -> tuple[str, str, list[Candidate]]:
    """Returns the headline method and form of all architectures, and the candidates with their errors.

    Laws of different methods in one table are not comparable, so all architectures have one headline. Candidates are
    the methods that give L(C) for every architecture and N_opt for at least half of them. If there are none, they are
    the methods that give L(C), then N_opt, for the most architectures. `isoflop` is a candidate only if some
    architecture has N_opt from its parabolas: without them, its L(C) is that of `power`. `envelope` is one only if the
    learning rate of its runs does not decay: it takes points in the middle of training for ends of training.
    """
    methods = list(next(iter(fits.values())).methods)
    for fit in fits.values():
        fit.tests = {
            name: {form: test(method, form, targets[fit.architecture]) for form in forms_of(method)}
            for name, method in fit.methods.items()
        }
    counts = {name: _given(fits, name) for name in methods}
    able = [name for name in methods if _can_be_headline(fits, name, counts[name][1])] or methods
    complete = [name for name in able if counts[name][0] == len(fits) and counts[name][1] >= len(fits) / 2]
    if not complete:
        most = max(counts[name] for name in able)
        complete = [name for name in able if counts[name] == most]
    candidates = [
        Candidate(name, form)
        for name in complete
        for form in FORMS
        if any(form in fit.tests[name] for fit in fits.values())
    ]
    if not candidates:
        return complete[0], "pure", []
    _score(candidates, fits)
    # On data without noise, several candidates are exact to rounding. The order of the methods then decides.
    errors = [0.0 if c.error is None or c.error < EXACT else c.error for c in candidates]
    best = candidates[int(np.argmin(errors))]
    # Both the minima and what predicts them have noise. A win below it says nothing, and the parabolas are preferred.
    noise = np.concatenate([targets[name].noise for name in best.architectures] or [np.zeros(0)])
    below = SURE * PREDICTION * float(np.sqrt((noise**2).mean() / len(noise))) if len(noise) else 0.0
    equal = [i for i, c in enumerate(candidates) if c.method == "isoflop" and errors[i] < min(errors) + below]
    if equal and best.error is not None:
        best = candidates[min(equal, key=errors.__getitem__)]
    best.chosen = True
    return best.method, best.form, candidates


def choose_allocation(fits: Mapping[str, ArchitectureFit], headline: str) -> str:
    """Returns the method of N_opt and D_opt: the headline, or the method that gives N_opt for more architectures.

    The lowest of a few sizes scatters far more than the minimum of a parabola, so `power` is the last choice.
    """
    methods = [headline, *(name for name in next(iter(fits.values())).methods if name != headline)]
    able = [name for name in methods if _can_be_headline(fits, name, 1)] or methods
    return max(able, key=lambda name: ((count := _given(fits, name)[1]) > 0 and name != "power", count))


def _can_be_headline(fits: Mapping[str, ArchitectureFit], method: str, allocations: int) -> bool:
    if any(isinstance(envelope := fit.methods[method], EnvelopeFit) and envelope.decays for fit in fits.values()):
        return False
    return method != "isoflop" or allocations > 0


def _given(fits: Mapping[str, ArchitectureFit], method: str) -> tuple[int, int]:
    method_fits = [fit.methods[method] for fit in fits.values()]
    return sum(not f.L.refused for f in method_fits), sum(not f.N_opt.refused for f in method_fits)


def _score(candidates: list[Candidate], fits: Mapping[str, ArchitectureFit]) -> None:
    """Fills in the error of each candidate, over the architectures that every candidate was tested on."""
    common = [
        name for name, fit in fits.items() if all(not _test_of(fit, c.method, c.form).refused for c in candidates)
    ]
    for candidate in candidates:
        tests = [_test_of(fits[name], candidate.method, candidate.form) for name in common]
        errors = [abs(point["relative_error"]) for test in tests for point in test.points]
        candidate.architectures, candidate.tested = common, len(errors)
        candidate.error = float(np.mean(errors)) if errors else None


def _test_of(fit: ArchitectureFit, method: str, form: str) -> HeldOut:
    """Returns the test of a candidate; where an architecture has no law of this form, that of its other form."""
    tests = fit.tests[method]
    return tests.get(form) or next(iter(tests.values()), HeldOut(refused=["no L(C)"]))


def better_form(C, loss) -> str:
    """Returns the form that predicts the points of largest C best from the others: "pure" or "constant".

    For one law without a study around it. With fewer than `BUDGETS` points the form cannot be tested and is "pure".
    """
    order = np.argsort(C)
    C, loss = np.asarray(C, dtype=float)[order], np.asarray(loss, dtype=float)[order]
    c_max = threshold(C, None) if len(np.unique(C)) >= BUDGETS else None
    if c_max is None or law_through("L", C, loss, irreducible=True).refused:
        return "pure"
    seen = C <= c_max
    pure = law_through("L", C[seen], loss[seen])
    constant = law_through("L", C[seen], loss[seen], irreducible=True, fewest=3)
    if pure.refused or constant.refused:
        return "pure"
    errors = [float(np.abs(law.predict(C[~seen]) / loss[~seen] - 1).mean()) for law in (pure, constant)]
    return "constant" if errors[1] < errors[0] else "pure"
