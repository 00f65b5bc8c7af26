"""The method "power": fits a law to the lowest loss at each compute (paper 000, section 4)."""

import numpy as np
import pandas as pd

from linnet.laws.fit import bootstrap as resampling
from linnet.laws.fit.law import count_of
from linnet.laws.fit.power import add_held_out, count_usable, finish, law_through, refuse_mixed
from linnet.laws.fit.results import Bootstrap, PowerFit


def fit_frontier(
    table: pd.DataFrame, groups: np.ndarray, *, bootstrap: int = 0, seed: int = 0, hold_out: float | None = None
) -> PowerFit:
    """Fits L(C) to the lowest loss of each group of equal compute, and N_opt and D_opt to the runs with these losses.

    If the run with the lowest loss is the smallest or the largest of its group, the optimum may be outside the sizes.
    Such a run counts for L, but not for N_opt and D_opt.

    Args:
        table: columns run, N, D, C, loss.
        groups: [rows] budget label of each row, -1 for none (see `assign_budgets`). If at least half of the rows belong
            to budgets with several sizes, the other rows are left out, because the lowest of one row means nothing.
            Otherwise each row of label -1 is its own group.
        bootstrap: number of resamples of the residuals of each law, or of whole runs if a run has several rows; 0 for
            none.
        seed: seed of the resampling.
        hold_out: see `linnet.laws.fit.law.threshold`.
    """
    fit = PowerFit("power")
    table, groups = resampling.in_order(table, groups)
    sizes = table.groupby(groups)["N"].transform("nunique").to_numpy()
    several = (groups >= 0) & (sizes > 1)
    if several.mean() >= 0.5 and not several.all():
        fit.notes.append(f"{count_of(int((~several).sum()), 'row')} left out: no other size at the same compute")
        table, groups = table[several], groups[several]
    labels = np.where(groups < 0, groups.max(initial=-1) + 1 + np.arange(len(groups)), groups)
    _, labels = np.unique(labels, return_inverse=True)
    C, N, D, loss = (table[name].to_numpy(float) for name in ("C", "N", "D", "loss"))
    best, alone = [], 0
    for label in range(labels.max(initial=-1) + 1):
        rows = np.flatnonzero(labels == label)
        row = rows[loss[rows].argmin()]
        alone += len(np.unique(N[rows])) < 3
        inside = bool(N[rows].min() < N[row] < N[rows].max())
        point = {"C": C[row], "loss": loss[row], "N": N[row], "D": D[row], "run": str(table["run"].iloc[row])}
        best.append({**point, "inside": inside, "fitted": True, "step": _step(N[rows], N[row])})
    best.sort(key=lambda point: point["C"])
    fit.points = [{name: value for name, value in point.items() if name != "step"} for point in best]
    grouped = int(np.sum(np.bincount(labels) > 1)) if len(labels) else 0
    if grouped:
        fit.notes.append(f"L(C) is fitted to the lowest loss of each of {count_of(len(best), 'budget')}")
    points = pd.DataFrame(best)
    draws = {name: {} for name in ("L", "N", "D")}
    runs = resampling.runs_of(table)
    if bootstrap and len(table) > 2 and resampling.is_clustered(runs):
        # Rows of one run are not independent, and they lie in several budgets: whole runs are resampled.
        fit.bootstrap = Bootstrap("pairs, clustered by run", bootstrap, bootstrap, seed)
        if reason := resampling.few_runs(runs):
            fit.bootstrap.refuse(reason)
        else:
            counts = resampling.draw_counts(bootstrap, len(table), seed, runs)
            found = _draws(counts, labels, C, N, D, loss)
            draws = {name: {"draws_C": found["C" if name == "L" else "C_in"], "draws": found[name]} for name in draws}
    elif bootstrap and len(table) > 2:
        draws = dict.fromkeys(draws, {"residuals": bootstrap, "seed": seed})
        fit.bootstrap = Bootstrap("residuals of the law", bootstrap, bootstrap, seed)
    for name, irreducible in (("L", False), ("L_irreducible", True)):
        setattr(fit, name, law_through("L", points["C"], points["loss"], irreducible=irreducible, **draws["L"]))
    if np.mean([len(np.unique(N[labels == label])) == 1 for label in range(len(best))]) > 0.5:
        refuse_mixed(fit)
    inner = points[points["inside"]]
    for name, column in (("N_opt", "N"), ("D_opt", "D")):
        if len(inner) < 3:
            found = count_of(len(inner), "budget")
            reason = f"{found} with the lowest loss at a size between smaller and larger ones; three are needed"
            if alone == len(best):
                reason = "no budget has three sizes, so none shows an optimum; train more sizes per budget"
            fit.refuse(reason, name, points=len(inner))
            continue
        # The optimum lies anywhere between the neighbours of the lowest size, however well these sizes follow a law.
        rounding = {"smallest_error": inner["step"].mean() / np.sqrt(12)} if "residuals" in draws[column] else {}
        setattr(fit, name, law_through(name, inner["C"], inner[column], **draws[column], **rounding))
    count_usable(fit)
    finish(fit)
    add_held_out(fit, hold_out)
    return fit


def _step(sizes: np.ndarray, lowest: float) -> float:
    """Returns half the distance between the neighbours of a size in log N; 0 if it is the smallest or the largest."""
    smaller, larger = sizes[sizes < lowest], sizes[sizes > lowest]
    return float(np.log(larger.min() / smaller.max()) / 2) if len(smaller) and len(larger) else 0.0


def _draws(counts, labels, C, N, D, loss) -> dict:
    """Returns the lowest point of each group in each resample, arrays [R, groups].

    C_in, N and D are NaN if the lowest point is the smallest or the largest size of its group.
    """
    names = ("C", "C_in", "L", "N", "D")
    shape = (len(counts), labels.max() + 1)
    draws = {name: np.full(shape, np.nan) for name in names}
    for label in range(shape[1]):
        rows = np.flatnonzero(labels == label)
        seen = counts[:, rows] > 0
        some = seen.any(axis=1)
        row = rows[np.where(seen, loss[rows], np.inf).argmin(axis=1)]
        smallest = np.where(seen, N[rows], np.inf).min(axis=1)
        largest = np.where(seen, N[rows], -np.inf).max(axis=1)
        inside = some & (smallest < N[row]) & (N[row] < largest)
        for name, values, where in (
            ("C", C, some),
            ("L", loss, some),
            ("C_in", C, inside),
            ("N", N, inside),
            ("D", D, inside),
        ):
            draws[name][where, label] = values[row][where]
    return draws
