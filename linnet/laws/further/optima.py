"""The optimum of each architecture and budget, with resamples: what most laws of this package start from.

The parabola is that of `linnet.laws.fit.isoflop`, rewritten in u = ln N. A resample adds residuals, drawn from all
parabolas of the architecture, to the fitted losses and fits every parabola again. Residuals are scaled up for the three
numbers that each parabola takes, and by Student's t for the few residuals, so that intervals of small designs cover.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from linnet.laws.fit import IsoflopGroup, assign_budgets, fit_groups
from linnet.laws.fit.power import further_errors, law_through
from linnet.laws.further.base import Options, generators

MANY = 1e9  # degrees of freedom of draws whose noise is not scaled draw by draw


@dataclass
class Optimum:
    """The best size of an architecture at a budget, loss = value + c2 (ln N - log_N)^2 around it.

    Attributes:
        C: compute of the optimum in the table's convention. budget: planned FLOPs, or C if they are not known.
        log_N, value, c2: ln N_opt, the loss there, and the curvature of the parabola.
        rows: the runs of the budget, in order of N.
        used: [rows] whether the run lies on the parabola.
        draws: {"log_N", "value", "c2"} -> [resamples]; NaN where a resample has no minimum. Empty without a bootstrap.
        leave_one_out: predicted and observed loss of each used run that is neither smallest nor largest.
    """

    architecture: str
    budget: float
    C: float
    log_N: float
    value: float
    c2: float
    rows: pd.DataFrame
    used: np.ndarray
    draws: dict[str, np.ndarray]
    leave_one_out: tuple[np.ndarray, np.ndarray]

    def log_tokens(self, log_N):
        """Returns ln D of models of ln N at this budget: the cost per parameter and token is interpolated in ln N."""
        x, each = self._per_size(np.log(self.rows["spent"]) - np.log(self.rows["N"]) - np.log(self.rows["D"]))
        return np.log(self.rows["spent"]).mean() - log_N - np.interp(log_N, x, each)

    def nearest(self, name: str, log_N=None) -> np.ndarray:
        """Returns a column's value at the trained size nearest to ln N (default: the optimum) in log N."""
        x, values = self._per_size(self.rows[name])
        at = np.asarray(self.log_N if log_N is None else log_N, dtype=float)
        return values[np.abs(np.nan_to_num(at)[..., None] - x).argmin(axis=-1)]

    def trained(self, log_N: float) -> bool:
        """Whether ln N lies between the smallest and the largest trained size."""
        x = np.log(self.rows["N"].to_numpy())
        return bool(x.min() - 1e-9 <= log_N <= x.max() + 1e-9)

    def _per_size(self, values) -> tuple[np.ndarray, np.ndarray]:
        x, rows = np.unique(np.log(self.rows["N"].to_numpy()), return_inverse=True)
        return x, np.bincount(rows, np.asarray(values, dtype=float)) / np.bincount(rows)


def find_optima(
    table: pd.DataFrame, options: Options, value: Callable[[pd.Series], pd.Series] | None = None
) -> tuple[dict[str, list[Optimum]], list[str]]:
    """Returns the accepted optima of each architecture in order of budget, and the reasons of the others.

    Args:
        table: one row per run, with `spent` (see `linnet.laws.fit.apply_convention`). Laws of the same table and
            options share the result.
        options: `bootstrap`, `seed`, `budgets` and `tolerance` are used.
        value: what the parabolas are fitted to, as a function of the loss; None is the loss itself.
    """
    known = options.shared.get((id(table), value))
    if known is None:
        known = options.shared[id(table), value] = (
            table,
            _find(table, options, value),
        )  # keeps the table, and so its id
    optima, refused = known[1]
    return dict(optima), list(refused)


def _find(table: pd.DataFrame, options: Options, value) -> tuple[dict[str, list[Optimum]], list[str]]:
    optima, refused = {}, []
    names = list(dict.fromkeys(table["architecture"]))
    random = generators(options, names)
    for name in names:
        part = table[table["architecture"] == name].reset_index(drop=True)
        part = part if value is None else part.assign(loss=value(part["loss"]))
        part["run"] = [str(row) for row in range(len(part))]  # runs of several budgets may have one name
        groups, nominal = assign_budgets(part, options.budgets, options.tolerance)
        fitted = fit_groups(part, groups, nominal)
        refused += [f"{name} at {group.at:.3g} FLOPs: {reason}" for group in fitted for reason in group.refused]
        optima[name] = _with_draws(name, part, [group for group in fitted if group.inside], options, random[name])
    return optima, refused


def _with_draws(name: str, part: pd.DataFrame, groups: list[IsoflopGroup], options: Options, random) -> list[Optimum]:
    fitted = [(group, *_parabola(group, part)) for group in groups]
    residuals = [rest[used] * np.sqrt(used.sum() / max(used.sum() - 3, 1)) for *_, rest, used in fitted]
    pool = np.concatenate(residuals) if residuals else np.zeros(0)
    degrees = sum(max(int(used.sum()) - 3, 0) for *_, used in fitted)
    if degrees and len(pool):
        pool = (pool - pool.mean()) * stats.t.ppf(0.975, degrees) / stats.norm.ppf(0.975)
    optima = []
    for group, rows, x, coefficients, rest, used in fitted:
        X = np.stack([np.ones(used.sum()), x[used], x[used] ** 2], axis=1)
        inverse = np.linalg.pinv(X)
        draws = {}
        if options.bootstrap and degrees:
            moved = coefficients + random.choice(pool, (options.bootstrap, used.sum())) @ inverse.T
            draws = _vertex(moved, group)
        log_N, best, c2 = (float(_vertex(coefficients[None], group)[key][0]) for key in ("log_N", "value", "c2"))
        leverage = np.einsum("ij,ji->i", X, inverse)
        inner = (x[used] > x.min()) & (x[used] < x.max()) & (leverage < 1 - 1e-9)
        observed = rows["loss"].to_numpy()[used][inner]
        left_out = observed - (rest[used] / np.maximum(1 - leverage, 1e-9))[inner]
        counted = np.log(rows["C"].to_numpy() / rows["spent"].to_numpy())
        order = np.argsort(rows["N"].to_numpy(), kind="stable")
        shift = np.interp(log_N, np.log(rows["N"].to_numpy())[order], counted[order])
        C = float(np.exp(np.log(rows["spent"]).mean() + shift))
        optima.append(Optimum(name, group.at, C, log_N, best, c2, rows, used, draws, (left_out, observed)))
    return optima


def _parabola(group: IsoflopGroup, part: pd.DataFrame):
    """Returns the runs of a budget, ln N around its mean, the parabola in it, residuals, and which runs are used."""
    by_run = part.set_index("run")
    rows = by_run.loc[group.run].reset_index(drop=True)
    x = np.log(rows["N"].to_numpy(float))
    x = x - x.mean()
    middle = np.log(rows["N"]).mean() / np.log(10)
    assert group.parabola is not None  # an optimum inside the sizes has one
    p0, p1, p2 = group.parabola
    ten = np.log(10)
    coefficients = np.array([p0 + p1 * middle + p2 * middle**2, (p1 + 2 * p2 * middle) / ten, p2 / ten**2])
    rest = rows["loss"].to_numpy(float) - np.polynomial.polynomial.polyval(x, coefficients)
    return rows, x, coefficients, rest, np.array(group.used, dtype=bool)


def _vertex(coefficients: np.ndarray, group: IsoflopGroup) -> dict[str, np.ndarray]:
    """Returns the minima of parabolas [R, 3] in ln N around its mean; NaN where there is none within e^10."""
    c0, c1, c2 = coefficients.T
    with np.errstate(invalid="ignore", divide="ignore"):
        best = -c1 / (2 * c2)
        curved = (c2 > 1e-12) & (np.abs(best) < 10)
        middle = np.log(group.N).mean()
        values = {"log_N": best + middle, "value": c0 - c1**2 / (4 * c2), "c2": c2}
    return {key: np.where(curved, column, np.nan) for key, column in values.items()}


def stack(optima: list[Optimum], key: str, resamples: int) -> np.ndarray:
    """Returns the draws of several optima, [resamples, optima]; of no rows if any has none."""
    if not optima or any(key not in optimum.draws for optimum in optima):
        return np.empty((0, len(optima)))
    return np.stack([optimum.draws[key] for optimum in optima], axis=1)[:resamples]


def with_scatter(x: np.ndarray, y: np.ndarray, draws: np.ndarray, seed: int) -> np.ndarray:
    """Returns draws [R, n] of the points y over x [n] with the scatter of the points about a line, beside the noise of
    the runs that the draws have and where this noise does not explain it (random effects, see `law_through`)."""
    if len(x) < 3 or not len(draws):
        return draws
    law = law_through("N_opt", np.exp(x), np.exp(y))
    return draws + further_errors(law, x, y, np.exp(draws), MANY, seed)


def slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the least-squares slopes of y [..., n] over x [n]; NaN if a value is."""
    centred = x - x.mean()
    return y @ centred / (centred @ centred)
