"""What every law returns, its options, and the statistics that several laws share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from linnet.config import count_of
from linnet.laws import orders
from linnet.laws.fit.law import Interval, Result
from linnet.laws.fit.lse import Objective

MISFIT = 0.01
"""Largest p-value at which a law is said not to fit its points."""
ENOUGH = 0.5
"""Share of the resamples that must give a number. With fewer, the resamples that did are a biased sample."""


@dataclass(frozen=True)
class Options:
    """How the laws are fitted.

    Attributes:
        bootstrap, seed: number of resamples (0 for no intervals), and the seed of the resampling.
        hold_out: see `linnet.laws.fit.law.threshold`.
        budgets, tolerance: see `linnet.laws.fit.assign_budgets`.
        of: what the parabolas of `allocation` are fitted to, "loss" or "perplexity".
        context: tokens of context at which `state` and `share` count caches; None is the context of training.
        reference: the architecture that `topology`, `state` and `efficiency` compare with; None is the first by name.
        flops, count: how C and N were counted, for the reader.
        objective: what `over-training` minimises; the default is squares of log residuals.
        shared: results that several laws need, kept for the next law (see `linnet.laws.further.optima.find_optima`).
    """

    bootstrap: int = 1000
    seed: int = 0
    hold_out: float | None = None
    budgets: list[float] | None = None
    tolerance: float = 0.06
    of: str = "loss"
    context: int | None = None
    reference: str | None = None
    flops: str = "exact"
    count: str = "non-embedding"
    objective: Objective = Objective()
    shared: dict = field(default_factory=dict, repr=False, compare=False)


@dataclass
class Estimate(Result):
    """One number of a law.

    Attributes:
        name: the symbol, such as "c".
        value: the number, or None if it is refused; `refused` then says why.
        interval: 95 % interval; None without a bootstrap.
        of: what it belongs to: an architecture, a pair, a budget; "" for the whole table.
        p: two-sided p-value of "the number is `null`", adjusted by Holm's method over its family; None if not tested.
        null: the value that `p` tests.
        note: a remark.
    """

    name: str
    value: float | None = None
    interval: Interval | None = None
    of: str = ""
    p: float | None = None
    null: float | None = None
    note: str = ""
    refused: str = ""

    @property
    def number(self) -> float:
        """The value. Raises ValueError if it is refused."""
        if self.value is None:
            raise ValueError(f"{self.name} of {self.of} was refused: {self.refused}")
        return self.value


@dataclass
class Test(Result):
    """A hypothesis test. `conclusion` says its result in words."""

    name: str
    statistic: float
    p: float
    conclusion: str
    degrees: tuple[int, ...] = ()


@dataclass
class Prediction(Result):
    """A held-out test: a part of the table is fitted, and the rest predicted.

    Attributes:
        name: what is predicted from what.
        trained, tested: number of points fitted and predicted.
        mean_error, max_error: mean and maximum of |predicted / observed - 1|; None if there is no test.
        refused: why there is no test.
    """

    name: str
    trained: int = 0
    tested: int = 0
    mean_error: float | None = None
    max_error: float | None = None
    refused: str = ""


@dataclass
class LawFit(Result):
    """One law of a table.

    Attributes:
        law: its name on the command line.
        title, equation, source: what it is, as text. `source` says which part is our own definition.
        estimates: the numbers, in the order in which they are shown.
        tests, predictions: hypothesis tests and held-out tests.
        points: named lists of rows, for figures and further work.
        scheme: what the intervals come from.
        flops, count: how C and N were counted.
        refused: reasons why there is no law; `estimates` is then empty.
        notes: remarks on the data and on what was left out.
    """

    law: str
    title: str
    equation: str
    source: str
    estimates: list[Estimate] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    points: dict[str, list[dict]] = field(default_factory=dict)
    scheme: str = ""
    flops: str = "exact"
    count: str = "non-embedding"
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def estimate(self, name: str, of: str = "") -> Estimate:
        """Returns the estimate of a name. Raises KeyError if there is none."""
        for estimate in self.estimates:
            if estimate.name == name and estimate.of == of:
                return estimate
        raise KeyError((name, of))


def generators(options: Options, names: Sequence[str]) -> dict[str, np.random.Generator]:
    """Returns an independent generator for each name, so that a resample of one does not depend on the others."""
    return {name: np.random.default_rng([options.seed, index]) for index, name in enumerate(names)}


def interval(draws: np.ndarray) -> Interval | None:
    """Returns the 95 % percentile interval of draws.

    None if fewer than `ENOUGH` of them are numbers, or if all are equal: then they show no noise.
    """
    kept = draws[np.isfinite(draws)]
    if len(kept) < 20 or len(kept) < ENOUGH * len(draws) or not np.ptp(kept):
        return None
    low, high = np.percentile(kept, [2.5, 97.5])
    return float(low), float(high)


def two_sided(draws: np.ndarray) -> float | None:
    """Returns the two-sided p-value of 0 from draws of an estimate; None if they show no noise (see `interval`).

    Below ten draws beyond 0, the normal distribution with the mean and deviation of the draws continues them.
    """
    kept = draws[np.isfinite(draws)]
    if len(kept) < 20 or len(kept) < ENOUGH * len(draws) or not np.ptp(kept):
        return None
    beyond = int(min((kept <= 0).sum(), (kept >= 0).sum()))
    if beyond >= 10:
        return float(min(1.0, 2 * (beyond + 1) / (len(kept) + 1)))
    return float(2 * stats.norm.sf(abs(kept.mean()) / kept.std()))


def holm(estimates: Sequence[Estimate], differ: str = "", alike: str = "") -> None:
    """Adjusts the p-values of a family of estimates by Holm's method, in place, and notes which of two words holds."""
    tested = [(estimate, estimate.p) for estimate in estimates if estimate.p is not None]
    for (estimate, _), adjusted in zip(tested, orders.holm([p for _, p in tested]), strict=True):
        estimate.p = adjusted
        estimate.note = differ if adjusted < 0.05 else alike


def differences(symbol: str, values: Mapping[str, tuple[float, np.ndarray]]) -> list[Estimate]:
    """Returns the difference of a number between every pair of architectures, from the values and draws of each."""
    family = []
    for (first, (number, drawn)), (second, (other, others)) in combinations(values.items(), 2):
        ends, p = interval(drawn - others), two_sided(drawn - others)
        family.append(Estimate(f"{symbol} difference", number - other, ends, f"{first} - {second}", p, 0.0))
    holm(family, "differ", "cannot be told apart")
    return family


def check_fit(law: LawFit, of: str, rest: np.ndarray, slopes: np.ndarray, *axes: np.ndarray) -> None:
    """Adds to a law the F test of lack of fit: do squares and products of the axes explain its residuals?

    Args:
        rest: [n] observed minus fitted values.
        slopes: [n, P] derivatives of the fitted values: what another choice of the law's numbers could explain.
        axes: [n] variables that the law is drawn over, in logarithms.
    """
    scaled = [(x - x.mean()) / np.ptp(x) for x in axes if np.ptp(x) > 1e-9]
    extra = [x * y for i, x in enumerate(scaled) for y in scaled[i:]]
    sums, ranks = [], []
    for columns in (slopes, np.column_stack([slopes, *extra])):
        basis, size, _ = np.linalg.svd(columns / np.maximum(np.abs(columns).max(axis=0), 1e-300), full_matrices=False)
        basis = basis[:, size > 1e-7 * size.max()]
        sums.append(((rest - basis @ (basis.T @ rest)) ** 2).sum())
        ranks.append(basis.shape[1])
    degrees, label = (ranks[1] - ranks[0], len(rest) - ranks[1]), f"{of}: lack of fit"
    if degrees[0] < 1 or degrees[1] < 2:
        law.notes.append(f"{label} is not tested: {count_of(len(rest), 'point')} for {count_of(ranks[0], 'number')}")
        return
    statistic = float((sums[0] - sums[1]) / degrees[0] / (sums[1] / degrees[1] + 1e-16))
    p, worst = float(stats.f.sf(statistic, *degrees)), float(np.expm1(np.abs(rest).max()))
    missed = f"the law misses its points in a pattern, by up to {worst:.2%}"
    words = f"no pattern in the residuals (p >= {MISFIT:g})" if p >= MISFIT else missed
    law.tests.append(Test(label, statistic, p, words, degrees=degrees))


def theil_sen(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the median of the slopes between all pairs of points: x [n], y [..., n] -> [...]."""
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] != x[first]
    first, second = first[apart], second[apart]
    return np.median((y[..., second] - y[..., first]) / (x[second] - x[first]), axis=-1)


def with_state(table: pd.DataFrame, context: int | None) -> pd.DataFrame:
    """Returns the table with a column `state`: numbers carried between tokens, with caches at `context` tokens.

    Without `context`, caches are those of the context of training.
    """
    scale = 1.0 if context is None else context / table["seq_len"]
    return table.assign(state=table["state_fixed"] + table["state_dynamic"] * scale)


def lacking(table: pd.DataFrame, *names: str) -> list[str]:
    """Returns a reason for each column that no row has."""
    fix = "studies of this release write it; in another table, add the column"
    return [f"no column {name}: {fix}" for name in names if not (name in table and table[name].notna().any())]


def errors(name: str, trained: int, predicted, observed) -> Prediction:
    """Returns the held-out test of predictions against observations."""
    error = np.abs(np.asarray(predicted) / np.asarray(observed) - 1)
    return Prediction(name, trained, len(error), float(error.mean()), float(error.max()))


# Least squares of log losses by damped Gauss-Newton steps, for many problems at once, and wild resamples of runs.

Model = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""theta [S, P] -> log loss [S, n] and its derivatives [S, n, P]."""

CHUNK = 4_000_000
"""Numbers of one matrix of derivatives. Larger batches are solved in parts."""


def solve(
    model: Model, start: np.ndarray, y: np.ndarray, iterations: int = 100, tolerance: float = 1e-10
) -> tuple[np.ndarray, np.ndarray]:
    """Minimises sum_i (model_i(theta) - y_i)^2 from every row of `start`.

    Args:
        model: see `Model`.
        start: [S, P].
        y: [n] or [S, n].

    Returns:
        theta [S, P] and the sums of squares [S].
    """
    y = np.broadcast_to(y, (len(start), y.shape[-1]))
    part = max(1, CHUNK // (y.shape[1] * start.shape[1]))
    fits = [_solve(model, start[i : i + part], y[i : i + part], iterations, tolerance) for i in range(0, len(y), part)]
    return np.concatenate([theta for theta, _ in fits]), np.concatenate([value for _, value in fits])


def _solve(model: Model, start, y, iterations: int, tolerance: float):
    theta = np.array(start, dtype=float)
    damping, active = np.full(len(theta), 1e-3), np.arange(len(theta))
    final, value_of = theta.copy(), np.full(len(theta), np.inf)
    value, jacobian = np.full(len(theta), np.inf), None
    predicted, jacobian = model(theta)
    rest = predicted - y
    value = (rest**2).sum(axis=1)
    quiet = np.zeros(len(theta), dtype=int)
    for _ in range(iterations):
        transposed = jacobian.transpose(0, 2, 1)
        curvature, gradient = transposed @ jacobian, (transposed @ rest[..., None])[..., 0]
        scale = np.einsum("spp->sp", curvature)
        floor = 1e-12 * scale.max(axis=1, keepdims=True) + 1e-300
        damped = curvature + np.eye(theta.shape[1]) * (damping[:, None] * scale + floor)[:, None, :]
        step = np.clip(np.linalg.solve(damped, gradient[..., None])[..., 0], -3, 3)
        moved, slopes = model(theta - step)
        after = moved - y
        new = (after**2).sum(axis=1)
        better = new <= value
        quiet = np.where(better & (value - new <= tolerance * value), quiet + 1, 0)
        theta = np.where(better[:, None], theta - step, theta)
        rest = np.where(better[:, None], after, rest)
        jacobian = np.where(better[:, None, None], slopes, jacobian)
        value = np.where(better, new, value)
        damping = np.where(better, np.maximum(damping / 5, 1e-12), damping * 4)
        done = (quiet >= 2) | (damping > 1e10) | (value <= 1e-28)
        if done.any():
            final[active[done]], value_of[active[done]] = theta[done], value[done]
            on = ~done
            active, theta, y, rest, jacobian = active[on], theta[on], y[on], rest[on], jacobian[on]
            value, damping, quiet = value[on], damping[on], quiet[on]
            if not len(active):
                break
    final[active], value_of[active] = theta, value
    return final, value_of


def wild(predicted: np.ndarray, y: np.ndarray, slopes: np.ndarray, resamples: int, random) -> np.ndarray:
    """Returns resamples [R, n] of log losses: fitted values plus residuals with random signs.

    The wild bootstrap (Wu 1986) keeps the design and the scale of each run's residual, so it works for few runs and for
    noise that changes with size. A residual is divided by sqrt(1 - leverage), because the fit draws near to runs that
    decide it, and scaled up by Student's t, because the noise is known from few residuals.

    Args:
        predicted, y: [n] fitted and observed log losses.
        slopes: [n, P] derivatives of the fitted ones.
    """
    freedom = max(len(y) - slopes.shape[1], 1)
    leverage = (np.linalg.qr(slopes / np.maximum(np.abs(slopes).max(axis=0), 1e-300))[0] ** 2).sum(axis=1)
    scale = stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975)
    rest = (y - predicted) / np.sqrt(np.maximum(1 - leverage, 1 / len(y)))
    return predicted + scale * rest * random.choice((-1.0, 1.0), (resamples, len(y)))
