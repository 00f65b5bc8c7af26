"""Fits power laws of compute, with or without an irreducible term, by least squares of logarithms.

Paper 000, section 4, writes every law as L(X) = beta X^alpha. Its N_opt = k C^a and D_opt = k C^b (Table 3) have the
same form. Henighan et al. and Hoffmann et al. add a constant: L = E + beta C^alpha.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from linnet.config import count_of
from linnet.laws.fit import law as resampling
from linnet.laws.fit.law import NAMES, Law, around, held_out_of
from linnet.laws.fit.lse import Term, solve
from linnet.laws.fit.results import MethodFit

FAR = 2.0
"""A note says that points lie this many times as far from their law as their noise explains."""
MIXED = 2.0
"""Largest ratio of the D / N of single runs that a law of C alone is fitted to."""
ENOUGH = 20
"""Number of resamples from which the noise of the points is taken."""


def fit_power(
    C, values, *, quantity: str = "L", irreducible: bool = False, bootstrap: int = 0, seed: int = 0, clusters=None
) -> Law:
    """Fits values = coefficient C^exponent, or with `irreducible` values = E + coefficient C^exponent.

    Args:
        C: [n] FLOPs.
        values: [n] losses, parameters or tokens, positive.
        quantity: "L", "N_opt" or "D_opt"; determines the names of the parameters.
        irreducible: adds the constant E.
        bootstrap: number of resamples of the residuals for intervals, or of the clusters; 0 for none.
        seed: seed of the resampling.
        clusters: [n] labels; points of one label are drawn together.

    Returns:
        The law. If the points do not support it, its `refused` lists the reasons.

    Raises:
        ValueError: lengths differ, or a value is not positive and finite.
    """
    C, values = np.asarray(C, dtype=float), np.asarray(values, dtype=float)
    if C.shape != values.shape or C.ndim != 1:
        raise ValueError(f"C has shape {C.shape} and values {values.shape}; both must be vectors of the same length")
    if not (np.isfinite(C) & (C > 0) & np.isfinite(values) & (values > 0)).all():
        raise ValueError("C or values contain NaN, infinite, zero or negative numbers; all must be positive and finite")
    order = np.lexsort((values, C))
    C, values = C[order], values[order]
    if bootstrap and len(C) > 2 and resampling.is_clustered(clusters):
        clusters = np.asarray(clusters)[order]
        if reason := resampling.few_runs(clusters):
            law = law_through(quantity, C, values, irreducible=irreducible)
            law.notes.append(f"no interval: {reason}")
            return law
        weights = resampling.draw_counts(bootstrap, len(C), seed, clusters)
        return law_through(quantity, C, values, irreducible=irreducible, weights=weights)
    return law_through(quantity, C, values, irreducible=irreducible, residuals=bootstrap, seed=seed)


def law_through(
    quantity: str,
    C,
    values,
    *,
    irreducible: bool = False,
    weights=None,
    draws_C=None,
    draws=None,
    residuals: int = 0,
    smallest_error: float = 0.0,
    freedom: float | None = None,
    seed: int = 0,
    fewest: int = 4,
) -> Law:
    """Returns the law fitted to points, with intervals from resamples.

    Resamples are given as `weights`, as `draws_C` and `draws`, or are drawn from the residuals of the law.

    Args:
        quantity: "L", "N_opt" or "D_opt".
        C, values: [n] points.
        irreducible: adds the constant E.
        weights: [R, n] counts of a bootstrap of the points.
        draws_C, draws: [R, m] points of each resample; NaN for missing points.
        freedom: degrees of freedom of the noise in `draws`, which `bootstrap.scales` of this seed has scaled. If given,
            m = n, and what the points lie farther from the law than this noise explains is the variance of a further
            error of each point (random effects).
        residuals: number of resamples of the residuals of the law.
        smallest_error: standard deviation of log values that these residuals have at least.
        seed: seed of the residuals and of the further errors.
        fewest: number of different C that a law with a constant needs. Three determine it without a check, which is
            enough to predict other points in a held-out test.
    """
    law = Law(quantity, points=len(C))
    C, values = np.asarray(C, dtype=float), np.asarray(values, dtype=float)
    different = len(np.unique(np.round(np.log(C), 9))) if len(C) else 0
    if different < (fewest if irreducible else 2):
        needed = "a law with a constant has three numbers and needs at least four" if irreducible else "a law needs two"
        law.refused.append(f"{count_of(different, 'different budget')}; {needed}")
        return law
    x, y = np.log(C), np.log(values)
    estimate = (_irreducible if irreducible else log_log)(x[None], y[None], np.ones((1, len(x))))[0]
    if irreducible and not np.isfinite(estimate).all():
        law.refused.append("the points show no irreducible loss: the fit is not better than the pure power law")
        return law
    _fill(law, estimate, C, values)
    law.seen = x, y
    if different == 2:
        law.notes.append("two budgets: a line always fits two points, so the fit cannot be checked")
    if weights is not None:
        draws_C, draws, counts = np.broadcast_to(C, weights.shape), np.broadcast_to(values, weights.shape), weights
    elif draws is not None:
        counts = (np.isfinite(draws) & np.isfinite(draws_C)).astype(float)
        if freedom is not None:
            draws = draws * np.exp(further_errors(law, x, y, draws, freedom, seed))
    if draws is None and residuals:
        drawn = _from_residuals(law, x, y, residuals, smallest_error, seed)
        if drawn is not None:
            drawn = np.exp(np.clip(drawn, -700, 700))
            draws_C, draws, counts = np.broadcast_to(C, drawn.shape), drawn, np.ones_like(drawn)
    if draws is not None and len(draws) and different > 2:
        xs, ys = (np.log(np.where(counts > 0, a, 1.0)) for a in (draws_C, draws))
        estimates = (_irreducible if irreducible else log_log)(xs, ys, counts, estimate)
        add_draws(law, estimates)
    return law


def _basis(law: Law, x: np.ndarray) -> np.ndarray:
    """Returns the derivatives of the log of the law by its parameters, as orthonormal columns [n, 2 or 3]."""
    columns = [np.ones_like(x), x]
    if law.constant is not None:
        columns.append(np.exp(-np.log(law.coefficient) - law.exponent * x))
    return np.linalg.qr(np.stack(columns, axis=1))[0]


def _from_residuals(
    law: Law, x: np.ndarray, y: np.ndarray, resamples: int, smallest: float, seed: int
) -> np.ndarray | None:
    """Returns log values [R, n] with resampled residuals of the law, or None if no degree of freedom is left."""
    basis = _basis(law, x)
    freedom = len(x) - basis.shape[1]
    if freedom < 1:
        return None
    fitted = np.log(law.predict(np.exp(x)))
    law.noise = (float(((y - fitted) ** 2).sum()) / freedom, freedom)
    pool = resampling.standardised(y - fitted, (basis**2).sum(axis=1), freedom)
    if pool.std() < smallest:
        pool = smallest * np.array([-1.0, 1.0])
    return fitted + resampling.draw_errors(pool, freedom, resampling.enough(resamples, freedom), x.shape, seed)


def further_errors(
    law: Law, x: np.ndarray, y: np.ndarray, draws: np.ndarray, freedom: float, seed: int
) -> np.ndarray | float:
    """Returns errors of log values [R, n] by which the points scatter about the law beyond the noise in the draws.

    The variance is that of DerSimonian and Laird (1986), what the mean square of the distances exceeds that of the
    draws by, times the share of it that is excess: with few points, most small excesses are chance. It grows from 0
    without a threshold, so no small change of a table switches the interval.
    """
    whole = np.isfinite(draws).all(axis=1) & (draws > 0).all(axis=1)
    basis = _basis(law, x)
    left = len(x) - basis.shape[1]
    if whole.sum() < ENOUGH or left < 1:
        return 0.0
    errors, scale = np.log(draws[whole]) - y, resampling.scales(freedom, len(draws), seed)
    noise = float((((errors - errors @ basis @ basis.T) / scale[whole, None]) ** 2).sum(axis=1).mean()) / left
    distance = float(((y - np.log(law.predict(np.exp(x)))) ** 2).sum()) / left
    law.noise = (noise, freedom)
    if distance <= max(noise, 1e-18):
        return 0.0
    if distance > FAR**2 * noise:
        law.notes.append(
            f"the points lie {np.sqrt(distance / noise):.1f} times as far from the law as the noise of the losses "
            "explains, and the interval has both"
        )
    # A small excess is mostly chance, and has many degrees of freedom; a large one has those of the distance.
    excess = 1 - noise / distance
    deviations = np.sqrt((distance - noise) * excess) * resampling.scales(left / excess**2, len(draws), seed + 2)
    return np.clip(deviations[:, None] * np.random.default_rng([seed, 3]).normal(size=draws.shape), -50, 50)


def log_log(x: np.ndarray, y: np.ndarray, weights: np.ndarray, _start=None) -> np.ndarray:
    """Solves weighted least squares of y = intercept + slope x for a batch: [R, n] -> [R, 3] (intercept, slope, 0).

    Rows with fewer than two different x give NaN.
    """
    total = weights.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_x, mean_y = (weights * x).sum(axis=1) / total, (weights * y).sum(axis=1) / total
        dx = x - mean_x[:, None]
        spread = (weights * dx**2).sum(axis=1)
        slope = (weights * dx * (y - mean_y[:, None])).sum(axis=1) / spread
        estimates = np.stack([mean_y - slope * mean_x, slope, np.zeros_like(slope)], axis=1)
    estimates[~(spread > 1e-12 * np.maximum(total, 1))] = np.nan
    return estimates


def _irreducible(x: np.ndarray, y: np.ndarray, weights: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """Solves weighted least squares of y = log(E + exp(intercept + slope x)): [R, n] -> [R, 3] (intercept, slope, E).

    Rows in which the constant or the power term vanishes give NaN. `start` is an estimate from which to start.
    """
    shift = (weights * x).sum() / weights.sum()
    floor = np.where(weights > 0, y, np.inf).min(axis=1)
    if start is None:
        starts = []
        for share in (0.3, 0.6, 0.8, 0.9, 0.97):
            constant = floor + np.log(share)
            power = log_log(x - shift, np.log(np.maximum(np.exp(y) - np.exp(constant)[:, None], 1e-12)), weights)
            starts.append(np.stack([power[:, 0], power[:, 1], constant], axis=1))
        starts = np.concatenate(starts)
    else:
        starts = np.repeat([[start[0] + start[1] * shift, start[1], np.log(start[2])]], len(x), axis=0)
    copies = len(starts) // len(x)
    tiled = [np.tile(part, (copies, 1)) for part in (x - shift, y, weights)]
    # Draws start at the optimum of the data and need fewer digits than an estimate.
    effort = {"tolerance": 1e-14} if start is None else {"tolerance": 1e-8, "iterations": 60}
    theta, objective = solve([Term(0, 1, tiled[0]), Term(2)], starts, tiled[1], tiled[2], **effort)
    objective = objective.reshape(copies, len(x))
    theta = theta.reshape(copies, len(x), 3)[objective.argmin(axis=0), np.arange(len(x))]
    estimates = np.stack([theta[:, 0] - theta[:, 1] * shift, theta[:, 1], np.exp(theta[:, 2])], axis=1)
    distinct = (weights > 0).sum(axis=1)
    vanished = (theta[:, 2] < floor - 5) | (theta[:, 1] >= -1e-4) | (theta[:, 0] < floor - 12) | (distinct < 3)
    estimates[vanished | ~np.isfinite(objective.min(axis=0))] = np.nan
    return estimates


def _fill(law: Law, estimate: np.ndarray, C: np.ndarray, values: np.ndarray) -> None:
    law.coefficient, law.exponent = float(np.exp(estimate[0])), float(estimate[1])
    law.constant = float(estimate[2]) if estimate[2] else None
    law.c_min, law.c_max = float(C.min()), float(C.max())
    law.rms_log_error = float(np.sqrt(np.mean(np.log(law.predict(C) / values) ** 2)))


def add_draws(law: Law, draws: np.ndarray) -> None:
    """Adds draws [R, 3] (log coefficient, exponent, constant) to a law, with intervals or a note without them."""
    law.draws, reason = resampling.usable(draws)
    if reason:
        law.notes.append(f"no interval: {reason}")
        return
    coefficient = np.exp(np.clip(law.draws[:, 0], -700, 700))  # keeps extreme resamples finite, for JSON
    columns = (coefficient, law.draws[:, 1], law.draws[:, 2])
    names = law.names or NAMES[law.quantity]
    numbers = law.parameters
    law.intervals = {n: around(numbers[n], c) for n, c in zip(names, columns, strict=True) if n in numbers}
    if any(low == high for low, high in law.intervals.values()):
        law.draws, law.intervals = law.draws[:0], {}
        law.notes.append("no interval: every resample gives the same law, so these points show no noise")


def add_reflected(law: Law, centre: tuple, resamples: tuple) -> None:
    """Adds draws from resamples that are biased as the estimate is, reflected at the estimate.

    A resample's estimate differs from that of the points without noise as the estimate differs from the truth, so the
    truth lies on the other side (the basic bootstrap).

    Args:
        law: the law of the data; nothing is added if it is refused.
        centre: C and values [1, m] of the points from which the resamples were made.
        resamples: C and values [R, m]; NaN for missing points.
    """
    if law.refused or law.points <= 2:
        return
    solver = log_log if law.constant is None else _irreducible
    start = np.array([np.log(law.coefficient), law.exponent, law.constant or 0.0])
    estimates = []
    for C, values in (centre, resamples):
        counts = (np.isfinite(C) & np.isfinite(values)).astype(float)
        x, y = (np.log(np.where(counts > 0, a, 1.0)) for a in (C, values))
        estimates.append(solver(x, y, counts, start))
    add_draws(law, start + estimates[0] - estimates[1])


def count_usable(fit: MethodFit) -> None:
    """Records in `fit.bootstrap` how many resamples gave L(C) and, without intervals, the reason."""
    if fit.L.draws is None and fit.bootstrap.resamples and not fit.bootstrap.note:
        fit.bootstrap.refuse(f"{count_of(fit.L.points, 'point')} of L(C) leave nothing to show the noise")
    elif fit.L.draws is not None:
        fit.bootstrap.usable = len(fit.L.draws)
        fit.bootstrap.note = next((note for note in fit.L.notes if note.startswith("no interval")), "")


def finish(fit: MethodFit) -> None:
    """Adds the results that every method derives from its laws: a + b, cost ratio and extrapolation."""
    if not (fit.N_opt.refused or fit.D_opt.refused):
        fit.a_plus_b = fit.N_opt.exponent + fit.D_opt.exponent
        ends = (fit.N_opt.c_min, fit.N_opt.c_max)
        ratio = [float(6 * fit.N_opt.predict(C) * fit.D_opt.predict(C) / C) for C in ends]
        fit.cost_ratio = [{"C": C, "ratio": r} for C, r in zip(ends, ratio, strict=True)]
    if fit.L.c_max is not None:
        if fit.L is not fit.L_irreducible and not fit.L_irreducible.refused:
            fit.L.rival, fit.L_irreducible.rival = replace(fit.L_irreducible), replace(fit.L)
            fit.L_irreducible.support = _support(fit.L, fit.L_irreducible)
        far = 10 * fit.L.c_max
        constant = None if fit.L_irreducible.refused else float(fit.L_irreducible.predict(far))
        fit.extrapolation = {"C": far, "pure": float(fit.L.predict(far)), "irreducible": constant}


def _support(pure: Law, constant: Law) -> float:
    """Returns how well the points support a pure law beside one with a constant, 0 to 1.

    It is Student's likelihood of the squares that the pure law adds, beyond the 2 that its missing parameter is worth
    (Akaike 1974).
    """
    if constant.noise is None:
        return 1.0
    variance, freedom = constant.noise
    added = pure.points * (pure.rms_log_error**2 - constant.rms_log_error**2) / max(variance, 1e-18)
    return float((1 + max(0.0, added - 2) / freedom) ** (-(freedom + 1) / 2))


def refuse_mixed(fit: MethodFit) -> None:
    """Refuses L(C) through single runs whose D / N differ by more than `MIXED`: no one law has their losses."""
    ratio = [p["D"] / p["N"] for p in fit.points]
    if len({p["N"] for p in fit.points}) < 2 or max(ratio) <= MIXED * min(ratio):
        return  # runs of one size have a law of D, which is one of C
    reason = (
        f"most budgets have one size, and D / N goes from {min(ratio):.3g} to {max(ratio):.3g}, so the loss depends on "
        "more than C; predict it at N and D from the surface (--predict N=..,D=..), or from --law over-training"
    )
    fit.refuse(reason, "L", "L_irreducible", points=len(ratio))


def add_held_out(fit: MethodFit, hold_out: float | None) -> None:
    """Adds the held-out tests of both loss laws; see `linnet.laws.fit.law.threshold`."""
    C = np.array([p["C"] for p in fit.points if p["fitted"]])
    loss = np.array([p["loss"] for p in fit.points if p["fitted"]])
    for law, irreducible in ((fit.L, False), (fit.L_irreducible, True)):
        if not law.refused:
            law.held_out = held_out_of(C, loss, hold_out, partial(law_through, "L", irreducible=irreducible))
