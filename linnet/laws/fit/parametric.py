"""The Chinchilla surface L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, Approach 3).

The objective is the sum over rows of the Huber loss (delta 1e-3) of log prediction minus log loss. The log prediction
is a log-sum-exp. Besiroglu et al. (2024) showed that the published parameters came from an optimiser that stopped
early: with the *mean* instead of the sum, SciPy's default tolerances stop at alpha 0.378, while the minimum is at
0.347. Here, damped Gauss-Newton steps minimise the sum from every start of a grid, and L-BFGS-B with exact gradients
and a scaled objective refines the best results.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.spatial import Delaunay
from scipy.special import ndtri, stdtrit

from linnet.config import count_of
from linnet.laws.fit import law as resampling
from linnet.laws.fit.law import HeldOut, Law, compare, threshold
from linnet.laws.fit.lse import Objective, Term, huber, log_sum, residuals, solve
from linnet.laws.fit.power import add_draws, finish
from linnet.laws.fit.results import Bootstrap, ParametricFit
from linnet.laws.orders import NEAR, budgets_of

DELTA = 1e-3
HUBER = Objective(DELTA)
ROWS = 8
"""Smallest number of rows to which the five parameters are fitted."""
SCALE = 1e3
"""Factor of the objective, which is about 1e-3: an optimiser's default tolerances treat values so small as zero."""
GRIDS = {
    "coarse": ((0, 10, 20), (0, 10, 20), (-1, 0, 1), (0, 0.5, 1, 1.5, 2), (0, 0.5, 1, 1.5, 2)),
    "full": ((0, 5, 10, 15, 20, 25),) * 2 + ((-1, -0.5, 0, 0.5, 1),) + ((0, 0.5, 1, 1.5, 2),) * 2,
}
"""Starts (log A, log B, log E, alpha, beta): 675, and the 4,500 of Hoffmann et al."""
FEW = 100
"""With fewer rows than this, each resample gives every row a random weight instead of a count. A resample of 25 rows
lacks nine of them, and its surface is another one: intervals of a were 1.4 times as wide as the estimates scatter."""
FEWEST = 12
"""With fewer rows than this, each resample keeps all rows and gives them errors of Student's t. Few residuals of five
numbers are far smaller than the errors, and random weights make surfaces through other rows of them."""
MANY = 500
"""With more rows than this, a resample is solved from the optimum only: its own optimum is then always near."""
SAMPLE = 125
"""Number of rows, of more than `MANY`, from which the starts of a grid find their optima before all rows count."""


def fit_parametric(
    table: pd.DataFrame,
    *,
    starts: str = "coarse",
    bootstrap: int = 0,
    seed: int = 0,
    hold_out: float | None = None,
    objective: Objective = HUBER,
) -> ParametricFit:
    """Fits the surface to all rows of a table, and derives the laws of compute from it.

    With C = k N D (k = 6 in Hoffmann et al.; here the geometric mean of C / (N D) over the table):
    N_opt = G (C/k)^a, D_opt = (C/k)^b / G, L = E + (A G^-alpha + B G^beta) (C/k)^-(alpha beta / (alpha + beta)), with
    a = beta / (alpha + beta), b = alpha / (alpha + beta), G = (alpha A / (beta B))^(1 / (alpha + beta)).
    If these N_opt and D_opt lie outside the trained models at every C, the laws are refused, and the surface is kept.

    Args:
        table: columns run, N, D, C, loss. Rows of one run (checkpoints) are resampled together.
        starts: "coarse" (675) or "full" (4,500).
        bootstrap: number of resamples of rows or whole runs, or with fewer than `FEW` rows, of exponential weights of
            the rows (the Bayesian bootstrap of Rubin 1981), or with fewer than `FEWEST`, of errors. Each is solved from
            the optimum and three other starts, or with many rows from the optimum only.
        seed: seed of the resampling.
        hold_out: see `linnet.laws.fit.law.threshold`.
        objective: what is minimised, of log or raw losses.

    Raises:
        ValueError: unknown `starts`.
    """
    if starts not in GRIDS:
        raise ValueError(f"starts: {starts!r} is unknown; use one of {', '.join(GRIDS)}")
    table, _ = resampling.in_order(table, np.zeros(len(table), dtype=int))
    fit = ParametricFit("parametric", rows=len(table), minimised=objective)
    N, D, C, loss = (table[name].to_numpy(float) for name in ("N", "D", "C", "loss"))
    if reason := _unfit(N, D):
        return _refused(fit, reason)
    ratio = C / (N * D)
    fit.flops_per_nd = float(np.exp(np.log(ratio).mean()))
    fit.flops_per_nd_spread = float(ratio.max() / ratio.min())
    if fit.flops_per_nd_spread > 1.1:
        fit.notes.append(
            f"C / (N D) ranges from {ratio.min():.3g} to {ratio.max():.3g} in this table; "
            f"N_opt and D_opt assume C = {fit.flops_per_nd:.3g} N D"
        )
    theta, fit.objective, (fit.starts_at_optimum, fit.starts) = _best(N, D, loss, starts, objective=objective)
    if reason := _degenerate(theta, N, D):
        return _refused(fit, reason)
    fit.surface = surface_of(theta)
    fit.points = [
        {"C": c, "loss": y, "N": n, "D": d, "run": str(r), "inside": True, "fitted": True}
        for c, y, n, d, r in zip(C, loss, N, D, table["run"], strict=True)
    ]
    for name, estimate in closed_form(theta[None], fit.flops_per_nd).items():
        setattr(fit, name, _law(name, estimate[0], C))
    fit.L.rows = Rows(C, N, D, loss, theta)
    fit.L.rms_log_error = float(np.sqrt(np.mean(fit.L.rows.distances(theta) ** 2)))
    fit.L_irreducible = fit.L
    if reason := _extrapolated(fit, N, D):
        _refused(fit, reason, "L", "N_opt", "D_opt")
    if bootstrap:
        _add_intervals(fit, table, theta, bootstrap, seed)
    fit.held_out = _held_out(table, hold_out, theta, objective)
    if not fit.L.refused:
        fit.L.held_out = fit.held_out
    finish(fit)
    return fit


def surface_of(theta: np.ndarray) -> dict[str, float]:
    """Converts (log A, log B, log E, alpha, beta) to a mapping with E, A, B, alpha and beta."""
    values = (np.exp(theta[2]), np.exp(theta[0]), np.exp(theta[1]), theta[3], theta[4])
    return dict(zip(("E", "A", "B", "alpha", "beta"), map(float, values), strict=True))


def predict(theta: np.ndarray, N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Returns the loss of the surface at N and D, arrays of one shape [n]."""
    return np.exp(log_sum(_terms(N, D), theta[None])[0][0])


def loss_law(rows: pd.DataFrame, near: dict[str, float], objective: Objective = HUBER) -> Law:
    """Returns L(C) of the surface fitted to some rows of a table, from the surface `near` of the whole table."""
    N, D, C, loss = (rows[name].to_numpy(float) for name in ("N", "D", "C", "loss"))
    if reason := _unfit(N, D):
        return Law("L", refused=[reason])
    start = np.array([*(np.log(near[name]) for name in "ABE"), near["alpha"], near["beta"]])
    theta, _, _ = _best(N, D, loss, "coarse", start, objective)
    k = float(np.exp(np.log(C / (N * D)).mean()))
    return _law("L", closed_form(theta[None], k)["L"][0], C)


def _terms(N: np.ndarray, D: np.ndarray) -> list[Term]:
    return [Term(0, 3, -np.log(N)), Term(1, 4, -np.log(D)), Term(2)]


def _objective(
    theta: np.ndarray, terms: list[Term], y: np.ndarray, objective: Objective = HUBER
) -> tuple[float, np.ndarray]:
    """Returns the scaled objective and its exact gradient."""
    (residual,), share = residuals(terms, theta[None], y, objective.raw)
    slope = residual if objective.delta is None else np.clip(residual, -objective.delta, objective.delta)
    parts = share[:, 0] * slope
    gradient = np.array([*parts.sum(axis=1), parts[0] @ terms[0].x, parts[1] @ terms[1].x])
    return SCALE * float(huber(residual, objective.delta).sum()), SCALE * gradient


def _best(
    N, D, loss, starts: str, near: np.ndarray | None = None, objective: Objective = HUBER
) -> tuple[np.ndarray, float, tuple[int, int]]:
    """Returns the optimum, its objective, and (number of starts that reached it, number of starts).

    `near` replaces the grid by an estimate and starts near it, for fits to a part of the same data.
    """
    grid = np.array(list(itertools.product(*GRIDS[starts])), dtype=float) if near is None else _around(near)
    terms, y = _terms(N, D), np.log(loss)
    many = len(y) > MANY
    thetas, sums = _from_sample(N, D, y, grid, objective) if many else solve(terms, grid, y, None, *objective)
    finished = []
    for theta in thetas[np.argsort(sums, kind="stable")[:3]]:
        options = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 2000, "maxfun": 5000}
        optimum = minimize(_objective, theta, (terms, y, objective), method="L-BFGS-B", jac=True, options=options)
        finished.append((optimum.fun / SCALE, optimum.x))
    lowest, theta = min(finished, key=lambda pair: pair[0])
    reached = int((sums <= lowest * (1 + 1e-6) + 1e-18).sum())
    return theta, float(lowest), (reached, len(grid))


def _from_sample(N, D, y, grid: np.ndarray, objective: Objective) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `solve` returns for many rows: every start finds an optimum of `SAMPLE` rows, then one of all rows.

    Most starts share a few optima, so all rows are needed from a few points only. The sample is evenly spaced in N D.
    """
    order = np.argsort(N * D, kind="stable")
    rows = order[np.linspace(0, len(y) - 1, SAMPLE).round().astype(int)]
    near, objectives = solve(_terms(N[rows], D[rows]), grid, y[rows], None, *objective)
    _, first, same = np.unique(np.round(np.log(objectives + 1e-300), 6), return_index=True, return_inverse=True)
    thetas, objectives = solve(_terms(N, D), near[first], y, None, *objective)
    return thetas[same], objectives[same]


def _around(theta: np.ndarray) -> np.ndarray:
    """Returns four starts: the estimate, and three others along the directions in which the objective changes least.

    A higher alpha with a higher A, so that the term keeps its size in the middle of the data, hardly changes the
    prediction. The same is true for beta and B.
    """
    moves = np.array([[0, 0, 0, 0, 0], [2, 2, 0, 0.1, 0.1], [-2, 2, 0, -0.1, 0.1], [2, -2, 0, 0.1, -0.1]])
    return theta + moves


def _unfit(N: np.ndarray, D: np.ndarray) -> str:
    if len(N) < ROWS:
        return f"{count_of(len(N), 'row')}; a fit of five parameters needs at least {ROWS}"
    x, y = np.log(N), np.log(D)
    if min(x.std(), y.std()) < 1e-9 or len(np.unique(x)) < 3 or len(np.unique(y)) < 3:
        return "N and D must each take at least three values"
    if abs(np.corrcoef(x, y)[0, 1]) > 0.9995:
        return (
            "N and D are correlated in all rows (one budget, or one ratio D / N), so their effects cannot be separated"
        )
    return ""


def _degenerate(theta: np.ndarray, N: np.ndarray, D: np.ndarray) -> str:
    for name, exponent, values, what in (("alpha", theta[3], N, "N"), ("beta", theta[4], D, "D")):
        if exponent * np.ptp(np.log(values)) < 0.01:
            return f"the best fit has {name} = {exponent:.2g}: in these rows the loss does not fall with {what}"
    shares = log_sum(_terms(N, D), theta[None])[1][:, 0].max(axis=1)
    gone = [name for name, share in zip(("A / N^alpha", "B / D^beta", "E"), shares, strict=True) if share < 1e-3]
    if gone:
        return f"{' and '.join(gone)} vanishes in the best fit, so these rows do not determine the whole surface"
    return ""


def _extrapolated(fit: ParametricFit, N: np.ndarray, D: np.ndarray) -> str:
    """Returns the reason to refuse the laws if their N_opt and D_opt are nowhere among the trained models, else "".

    The test is whether any (log N_opt, log D_opt) lies in the convex hull of the trained (log N, log D).
    """
    C = np.geomspace(fit.N_opt.c_min, fit.N_opt.c_max, 41)
    best = np.log([fit.N_opt.predict(C), fit.D_opt.predict(C)]).T
    trained = np.log([N, D]).T
    # Both axes are scaled to unit variance, because Qhull treats a long thin hull as flat.
    centre, scale = trained.mean(axis=0), trained.std(axis=0)
    if (Delaunay((trained - centre) / scale).find_simplex((best - centre) / scale) >= 0).any():
        return ""
    more_tokens = np.diff(best).mean() > np.diff(trained).mean()
    wanted = "smaller models on more tokens" if more_tokens else "larger models on fewer tokens"
    return f"at every C of these rows, the best N and D of the surface lie outside the trained ones; train {wanted}"


def closed_form(theta: np.ndarray, k: float) -> dict[str, np.ndarray]:
    """Returns (log coefficient, exponent, constant) of L, N_opt and D_opt for each row of theta [R, 5]."""
    log_A, log_B, log_E, alpha, beta = theta.T
    both = alpha + beta
    a, b = beta / both, alpha / both
    log_G = (np.log(alpha / beta) + log_A - log_B) / both
    slope = alpha * beta / both
    power = np.logaddexp(log_A - alpha * log_G, log_B + beta * log_G)
    zero = np.zeros_like(a)
    return {
        "L": np.stack([power + slope * np.log(k), -slope, np.exp(log_E)], axis=1),
        "N_opt": np.stack([log_G - a * np.log(k), a, zero], axis=1),
        "D_opt": np.stack([-log_G - b * np.log(k), b, zero], axis=1),
    }


def _law(quantity: str, estimate: np.ndarray, C: np.ndarray) -> Law:
    law = Law(quantity, float(np.exp(estimate[0])), float(estimate[1]), points=len(C))
    if quantity == "L":
        # The names alpha and beta belong to the surface.
        law.constant, law.names = float(estimate[2]), ("k_L", "gamma", "E")
    law.c_min, law.c_max = float(C.min()), float(C.max())
    return law


def _add_intervals(fit: ParametricFit, table: pd.DataFrame, theta: np.ndarray, resamples: int, seed: int) -> None:
    runs = resampling.runs_of(table)
    clusters = runs if resampling.is_clustered(runs) else None
    weighted = clusters is None and len(table) < FEW
    few = weighted and len(table) < FEWEST
    scheme = "weights of rows" if weighted else "pairs, clustered by run" if clusters is not None else "pairs"
    fit.bootstrap = Bootstrap("residuals of the surface" if few else scheme, resamples, 0, seed)
    if clusters is not None and (reason := resampling.few_runs(runs)):
        fit.bootstrap.refuse(reason)
        return
    N, D, y = table["N"].to_numpy(float), table["D"].to_numpy(float), np.log(table["loss"].to_numpy(float))
    count = len(set(runs))
    freedom = max(count - 5, 1)
    if few:
        fitted, counts = np.log(predict(theta, N, D)), np.ones((resamples, len(table)))
        scale = np.sqrt(((y - fitted) ** 2).sum() / freedom) * resampling.scales(freedom, resamples, seed)
        y = fitted + scale[:, None] * np.random.default_rng([seed, 1]).normal(size=counts.shape)
    elif weighted:
        counts = np.random.default_rng(seed).exponential(size=(resamples, len(table)))
    else:
        counts = resampling.draw_counts(resamples, len(table), seed, clusters)
    # Residuals of n runs are smaller than their errors by the root of (n - 5) / n, and the noise is unsure.
    widened = 1.0 if few else np.sqrt(count / freedom) * float(stdtrit(freedom, 0.975) / ndtri(0.975))
    if clusters is None:
        errors, drawn, fit.budget_deviation = _shared_errors(theta, table, resamples, seed)
        if fit.budget_deviation:
            y = y + drawn / widened - (0.0 if few else errors)
    each = _around(theta)[: 1 if len(table) > MANY else None]
    starts = np.tile(each, (resamples, 1))
    terms, weights = _terms(N, D), np.repeat(counts, len(each), axis=0)
    y = np.repeat(y, len(each), axis=0) if y.ndim > 1 else y
    thetas, objectives = solve(terms, starts, y, weights, *fit.minimised, tolerance=1e-9)
    best = objectives.reshape(resamples, len(each)).argmin(axis=1)
    thetas = thetas.reshape(resamples, len(each), 5)[np.arange(resamples), best]
    thetas = theta + (thetas - theta) * widened
    # A resample in which a term vanished or changed its direction has no optimum: it gives NaN, not a draw.
    thetas[(thetas[:, 3:] <= 1e-3).any(axis=1) | (np.abs(thetas[:, :3]) > 200).any(axis=1)] = np.nan
    kept, reason = resampling.usable(thetas)
    fit.bootstrap.usable, fit.bootstrap.note = len(kept), reason and f"no interval: {reason}"
    if reason:
        return
    fit.draws = kept
    laws = closed_form(kept, fit.flops_per_nd)
    for name in () if fit.L.refused else laws:
        add_draws(getattr(fit, name), laws[name])
    log_A, log_B, log_E, alpha, beta = kept.T
    columns = {"E": np.exp(log_E), "A": np.exp(log_A), "B": np.exp(log_B), "alpha": alpha, "beta": beta}
    fit.surface_intervals = {name: resampling.interval(values) for name, values in columns.items()}
    if not fit.N_opt.refused:
        columns["a"] = laws["N_opt"][:, 1]
    fit.deviations = {name: float(values.std(ddof=1)) for name, values in columns.items()}
    pairs = {"log A, alpha": (log_A, alpha), "log B, beta": (log_B, beta)}
    # Without noise every resample gives the same numbers, and their correlation is not defined.
    moving = {name: pair for name, pair in pairs.items() if min(part.std() for part in pair) > 0}
    fit.correlations = {name: float(np.corrcoef(*pair)[0, 1]) for name, pair in moving.items()}


def _shared_errors(
    theta: np.ndarray, table: pd.DataFrame, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns errors of log loss that all rows of a budget share: estimated ones, drawn ones, and their deviation.

    A poor learning rate of a budget moves all of its rows, and the surface goes along with them. So the distances from
    the surface that the means of budgets add, beyond what the surface absorbs, are compared with the scatter inside
    budgets, by the moments of Henderson's third method. The excess counts as in `power.further_errors`: times the share
    of it that is excess, so that it grows from 0 without a threshold.

    Returns:
        the part [n] of the rows' distances from the surface that is such an error, draws [R, n], and their standard
        deviation; zeros if none shows.
    """
    N, D, C = (table[name].to_numpy(float) for name in ("N", "D", "C"))
    budget = budgets_of(np.log(C))
    if any(np.ptp(np.log(C[budget == number])) > NEAR for number in range(budget.max() + 1)):
        return np.zeros(1), np.zeros(1), 0.0  # the computes form no budgets, as in points of a figure
    shares = log_sum(_terms(N, D), theta[None])[1][:, 0]
    slopes = np.stack([*shares, -shares[0] * np.log(N), -shares[1] * np.log(D)], axis=1)
    basis = np.linalg.qr(slopes / np.abs(slopes).max(axis=0))[0]
    members = np.equal.outer(budget, np.arange(budget.max() + 1)).astype(float)
    left = members - basis @ (basis.T @ members)
    between, sizes, _ = np.linalg.svd(left, full_matrices=False)
    between, sizes = between[:, sizes > 1e-9 * np.sqrt(len(N))], sizes[sizes > 1e-9 * np.sqrt(len(N))]
    shown = sizes > 0.1 * np.sqrt(len(N) / members.shape[1])  # the surface absorbs nearly all of the other ones
    rest = np.log(table["loss"].to_numpy(float)) - np.log(predict(theta, N, D))
    rest = rest - basis @ (basis.T @ rest)
    freedom, inside = int(shown.sum()), len(N) - basis.shape[1] - between.shape[1]
    if freedom < 1 or inside < 1:
        return np.zeros(1), np.zeros(1), 0.0
    squares = (between.T @ rest) ** 2
    noise, distance = float(rest @ rest - squares.sum()) / inside, float(squares[shown].sum()) / freedom
    if distance <= max(noise, 1e-18):
        return np.zeros(1), np.zeros(1), 0.0
    excess = 1 - noise / distance
    deviation = float(np.sqrt((distance - noise) * excess * freedom / (sizes[shown] ** 2).sum()))
    spread = deviation * resampling.scales(freedom / excess**2, resamples, seed + 2)
    drawn = spread[:, None] * np.random.default_rng([seed, 3]).normal(size=(resamples, members.shape[1]))
    errors = excess * between[:, shown] @ (between[:, shown].T @ rest)
    return errors, np.clip(drawn, -1, 1)[:, budget], deviation


@dataclass(frozen=True)
class Rows:
    """The rows of a surface, for `linnet.laws.orders`: arrays [n], and the surface [5]."""

    C: np.ndarray
    N: np.ndarray
    D: np.ndarray
    loss: np.ndarray
    theta: np.ndarray

    def distances(self, theta: np.ndarray) -> np.ndarray:
        """Returns log loss minus that of a surface [n]."""
        return np.log(self.loss / predict(theta, self.N, self.D))


def _held_out(table: pd.DataFrame, hold_out: float | None, theta: np.ndarray, objective: Objective) -> HeldOut:
    """Fits the surface to the rows up to `threshold(C, hold_out)` and predicts the losses of the rows above."""
    N, D, C, loss = (table[name].to_numpy(float) for name in ("N", "D", "C", "loss"))
    c_max = threshold(C, hold_out)
    seen = C <= c_max if c_max is not None else np.zeros(len(C), dtype=bool)
    result = HeldOut(c_max, int(seen.sum()), int((~seen).sum()))
    if not result.tested or c_max is None:
        result.refused.append("no rows have a larger C than the fitted ones")
    elif reason := _unfit(N[seen], D[seen]):
        result.refused.append(f"up to {c_max:.2g} FLOPs: {reason}")
    else:
        part, _, _ = _best(N[seen], D[seen], loss[seen], "coarse", theta, objective)
        compare(result, C[~seen], loss[~seen], predict(part, N[~seen], D[~seen]))
    return result


def _refused(fit: ParametricFit, reason: str, *names: str) -> ParametricFit:
    fit.refuse(reason, *names)
    fit.L_irreducible = fit.L
    return fit
