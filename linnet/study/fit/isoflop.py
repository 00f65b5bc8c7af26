"""IsoFLOP parabolas: find the best size at each budget, then fit laws to the optima (Hoffmann et al. 2022, Approach 2).

At equal compute, the loss near its optimum is a parabola in log N. N_opt and D_opt are fitted separately, and a + b is
reported: it must be 1 only if the cost is proportional to N D.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from linnet.study.fit import bootstrap as resampling
from linnet.study.fit.law import Law
from linnet.study.fit.power import add_held_out, count_of, count_usable, finish, law_through
from linnet.study.fit.results import Bootstrap, IsoflopFit, IsoflopGroup

SIZES = 4
"""Number of different sizes that a budget needs. A parabola always fits three sizes, which leaves nothing to check."""
EDGE = 0.05
"""Share of the range of log N, at each end, in which an optimum counts as at the edge."""
PAIRS = 8
"""Number of sizes from which a group is resampled by drawing its rows; smaller groups are resampled by residuals."""


def fit_isoflop(
    table: pd.DataFrame,
    groups: np.ndarray,
    budgets: Sequence[float] | None = None,
    *,
    bootstrap: int = 0,
    seed: int = 0,
    hold_out: float | None = None,
    cost: str = "exact",
) -> IsoflopFit:
    """Fits a parabola of the loss in log10 N to each budget, and the three laws to the optima inside the data.

    L(C) is fitted to the minima of the parabolas. If fewer than three budgets have a minimum inside their sizes, N_opt
    and D_opt are refused, and L(C) is fitted to the lowest observed loss of each budget.

    Args:
        table: columns run, N, D, C, loss, and `spent` if the runs of a budget share a compute other than C (see
            `apply_convention`).
        groups: [rows] budget label of each row, -1 for rows without a budget (see `assign_budgets`).
        budgets: nominal FLOPs of each label, if known.
        bootstrap: number of resamples, stratified by budget. Rows are resampled if every budget that counts has `PAIRS`
            sizes; otherwise, the residuals of the parabolas are resampled.
        seed: seed of the resampling.
        hold_out: see `linnet.study.fit.heldout.threshold`.
        cost: "exact" places an optimum at the compute of its budget, "6nd" at 6 N D of the optimum.
    """
    fit = IsoflopFit("isoflop", ungrouped=int((groups < 0).sum()))
    parts = {g: table[groups == g].sort_values("N", kind="stable") for g in sorted(set(groups) - {-1})}
    order = sorted(parts, key=lambda g: parts[g]["C"].mean())
    fit.groups = [_group(parts[g], None if budgets is None else float(budgets[g])) for g in order]
    parts = [parts[g] for g in order]
    if fit.ungrouped:
        fit.notes.append(f"{count_of(fit.ungrouped, 'row')} left out: not at any budget")
    inside = np.array([group.inside for group in fit.groups], dtype=bool)
    enough = inside.sum() >= 3
    fit.points = [_point(group, enough, cost) for group in fit.groups]
    draws = _resample(fit, parts, inside, bootstrap, seed) if bootstrap and len(fit.groups) else None
    if not enough:
        _refuse_optimum(fit, inside)
        fit.notes.append("L(C) is fitted to the lowest observed loss of each budget, because the optima are not known")
    fitted = [p for p in fit.points if p["fitted"]]
    C = np.array([p["C"] for p in fitted])
    draws_C = draws_N = draws_D = draws_L = None
    if draws is not None:
        keep = inside if enough else np.ones(len(inside), dtype=bool)
        draws_N = np.exp(draws["log_N"][:, keep])
        optima = [np.exp(_log_tokens(fit.groups[g], np.log(draws_N[:, i]))) for i, g in enumerate(np.flatnonzero(keep))]
        draws_D = np.stack(optima, axis=1)
        draws_L = draws["L" if enough else "lowest"][:, keep]
        draws_C = 6 * draws_N * draws_D if cost == "6nd" and enough else np.broadcast_to(C, draws_L.shape)
    loss = [p["loss"] for p in fitted]
    fit.L = law_through("L", C, loss, draws_C=draws_C, draws=draws_L)
    fit.L_irreducible = law_through("L", C, loss, irreducible=True, draws_C=draws_C, draws=draws_L)
    if enough:
        fit.N_opt = law_through("N_opt", C, [p["N"] for p in fitted], draws_C=draws_C, draws=draws_N)
        fit.D_opt = law_through("D_opt", C, [p["D"] for p in fitted], draws_C=draws_C, draws=draws_D)
    count_usable(fit)
    finish(fit)
    add_held_out(fit, hold_out)
    return fit


def _group(part: pd.DataFrame, budget: float | None) -> IsoflopGroup:
    """Returns one budget with its parabola and its optimum, which is refused if the data do not support it."""
    # The runs of a budget have equal spent compute, even if C is counted in another way.
    spent = part["spent" if "spent" in part else "C"].astype(float)
    C = float(np.exp(np.log(spent).mean()))
    columns = {name: part[name].astype(float).tolist() for name in ("N", "D", "loss")}
    columns |= {"run": part["run"].astype(str).tolist(), "flops": spent.tolist()}
    group = IsoflopGroup(C, **columns, budget=budget)
    lowest = int(np.argmin(group.loss))
    group.N_lowest, group.L_lowest, group.run_lowest = group.N[lowest], group.loss[lowest], group.run[lowest]
    x, y = np.log10(group.N), np.array(group.loss)
    sizes = len(np.unique(x))
    if sizes < len(x):
        group.notes.append(f"{count_of(sizes, 'size')} in {count_of(len(x), 'run')}: some sizes are repeated")
    if sizes < SIZES:
        group.refused.append(f"{count_of(sizes, 'size')}; a parabola that can be checked needs {SIZES}")
        if sizes < 3:
            return group
    centre = x.mean()
    c0, c1, c2 = parabolas((x - centre)[None], y[None], np.ones((1, len(x))))[0]
    group.parabola = (float(c0 - c1 * centre + c2 * centre**2), float(c1 - 2 * c2 * centre), float(c2))
    if not c2 > 1e-12 * max(1.0, abs(c0)):
        group.refused = group.refused or ["the losses do not curve upwards, so no minimum lies between the sizes"]
        return group
    best = centre - c1 / (2 * c2)
    # Far outside the sizes, the vertex of a nearly straight line has no meaning and may overflow.
    if abs(best - centre) < 10:
        group.N_opt, group.L_opt = float(10**best), float(c0 - c1**2 / (4 * c2))
        group.D_opt = float(np.exp(_log_tokens(group, np.log(group.N_opt))))
    margin = EDGE * (x.max() - x.min())
    if group.refused:
        return group
    if best < x.min() + margin or best > x.max() - margin:
        side, end, more = ("smallest", x.min(), "smaller") if best < centre else ("largest", x.max(), "larger")
        where = "outside" if best < x.min() or best > x.max() else "at the edge of"
        found = f" (N = {group.N_opt:.3g})" if group.N_opt else ""
        group.refused.append(
            f"the optimum{found} lies {where} the sizes trained ({side}: {10**end:.3g}); train {more} models here"
        )
    elif lowest in (0, len(x) - 1):
        group.notes.append(f"the lowest observed loss is at the {'smallest' if lowest == 0 else 'largest'} size")
    group.inside = not group.refused
    return group


def parabolas(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Solves weighted least squares of y = c0 + c1 x + c2 x^2 for a batch: [R, n] -> [R, 3].

    Rows with fewer than three different x give NaN.
    """
    powers = np.stack([np.ones_like(x), x, x**2], axis=-1)
    powers, weights = np.broadcast_to(powers, (*y.shape, 3)), np.broadcast_to(weights, y.shape)
    # QR and not normal equations, so that the parabolas of data without noise are exact to the last digits.
    root = np.sqrt(weights)[..., None]
    q, r = np.linalg.qr(powers * root)
    diagonal = np.abs(np.einsum("rii->ri", r))
    poor = diagonal.min(axis=1) < 1e-9 * np.maximum(diagonal.max(axis=1), 1e-300)
    r = np.where(poor[:, None, None], np.eye(3), r)
    found = np.linalg.solve(r, np.matmul(q.transpose(0, 2, 1), y[..., None] * root))[..., 0]
    found[poor] = np.nan
    return found


def _log_tokens(group: IsoflopGroup, log_N: np.ndarray) -> np.ndarray:
    """Returns log D of a model with log N parameters at the budget of the group.

    The cost per parameter and token, C / (N D), is 6 if the cost is 6ND. With attention, head and embeddings it changes
    with N. So it is interpolated between the runs of the group, and constant beyond the smallest and largest size.
    """
    x, rows = np.unique(np.log(group.N), return_inverse=True)
    each = np.log(np.array(group.flops)) - np.log(group.N) - np.log(group.D)
    cost = np.bincount(rows, each) / np.bincount(rows)
    return np.log(group.C) - log_N - np.interp(log_N, x, cost)


def _point(group: IsoflopGroup, enough: bool, cost: str) -> dict:
    if group.inside and enough:
        C = 6 * group.N_opt * group.D_opt if cost == "6nd" else group.C
        found = {"C": C, "loss": group.L_opt, "N": group.N_opt, "D": group.D_opt}
    else:
        row = int(np.argmin(group.loss))
        C = 6 * group.N[row] * group.D[row] if cost == "6nd" else group.C
        found = {"C": C, "loss": group.L_lowest, "N": group.N_lowest, "D": group.D[row]}
    return {**found, "run": group.run_lowest, "inside": group.inside, "fitted": group.inside or not enough}


def _refuse_optimum(fit: IsoflopFit, inside: np.ndarray) -> None:
    reason = (
        f"{count_of(int(inside.sum()), 'budget')} of {len(inside)} with an optimum inside the sizes; three are needed"
    )
    fit.N_opt = Law("N_opt", points=int(inside.sum()), refused=[reason])
    fit.D_opt = Law("D_opt", points=int(inside.sum()), refused=[reason])


def _resample(fit: IsoflopFit, parts: list[pd.DataFrame], inside: np.ndarray, resamples: int, seed: int) -> dict:
    """Returns log N and loss of the optimum, and the lowest loss, of each group in each resample: arrays [R, G]."""
    counting = [group for group in fit.groups if group.inside] or fit.groups
    by_rows = min(len(set(group.N)) for group in counting) >= PAIRS
    repeated = resampling.is_clustered(pd.concat(parts)["run"])
    scheme = ("pairs" + ", clustered by run" * repeated) if by_rows else "residuals"
    fit.bootstrap = Bootstrap(f"{scheme}, stratified by budget", resamples, resamples, seed)
    generator = np.random.default_rng(seed)
    residuals = _residuals(fit.groups)
    draws = {name: np.full((resamples, len(parts)), np.nan) for name in ("log_N", "L", "lowest")}
    for g, (group, part) in enumerate(zip(fit.groups, parts, strict=True)):
        x, y = np.log10(group.N), np.broadcast_to(group.loss, (resamples, len(group.N)))
        weights = np.ones_like(y)
        if by_rows:
            weights = resampling.draw_counts(resamples, len(x), seed + g, part["run"] if repeated else None)
        elif group.parabola is not None and len(residuals):
            smooth = np.polynomial.polynomial.polyval(x, group.parabola)
            y = smooth + generator.choice(residuals, y.shape)
        draws["lowest"][:, g] = np.where(weights > 0, y, np.inf).min(axis=1)
        if len(np.unique(x)) < 3:
            continue
        c0, c1, c2 = parabolas((x - x.mean())[None], y, weights).T
        with np.errstate(invalid="ignore", divide="ignore"):
            best = -c1 / (2 * c2)
            curved = (c2 > 1e-12) & (np.abs(best) < 10)
            draws["log_N"][:, g] = np.where(curved, (best + x.mean()) * np.log(10), np.nan)
            draws["L"][:, g] = np.where(curved, c0 - c1**2 / (4 * c2), np.nan)
        if curved.mean() < 0.975:
            group.notes.append(f"no minimum in {1 - curved.mean():.0%} of the resamples: the curvature is uncertain")
        if group.inside and curved.mean() >= resampling.ENOUGH:
            group.N_interval = tuple(float(np.exp(end)) for end in resampling.interval(draws["log_N"][:, g]))
    return draws


def _residuals(groups: list[IsoflopGroup]) -> np.ndarray:
    """Returns the residuals of all parabolas, scaled up by sqrt(n / (n - 3)) for their three fitted numbers."""
    found = []
    for group in groups:
        if group.parabola is not None and len(group.N) > 3:
            left = np.array(group.loss) - np.polynomial.polynomial.polyval(np.log10(group.N), group.parabola)
            found.append(left * np.sqrt(len(left) / (len(left) - 3)))
    return np.concatenate(found) if found else np.zeros(0)
