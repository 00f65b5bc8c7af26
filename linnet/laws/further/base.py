"""What every law returns, its options, and the statistics that several laws share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from linnet.laws.fit.law import Interval, Result, count_of
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
    p_bootstrap: float | None = None
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
        for one in self.estimates:
            if one.name == name and one.of == of:
                return one
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


def two_sided(draws: np.ndarray, null: float = 0.0) -> float | None:
    """Returns the two-sided p-value of `null` from draws of an estimate; None if they show no noise (see `interval`).

    Below ten draws beyond `null`, the normal distribution with the mean and deviation of the draws continues them.
    """
    kept = draws[np.isfinite(draws)]
    if len(kept) < 20 or len(kept) < ENOUGH * len(draws) or not np.ptp(kept):
        return None
    beyond = int(min((kept <= null).sum(), (kept >= null).sum()))
    if beyond >= 10:
        return float(min(1.0, 2 * (beyond + 1) / (len(kept) + 1)))
    return float(2 * stats.norm.sf(abs(kept.mean() - null) / kept.std()))


def holm(estimates: Sequence[Estimate], differ: str = "", alike: str = "") -> None:
    """Adjusts the p-values of a family of estimates by Holm's method, in place, and notes which of two words holds."""
    tested = sorted(((one.p, index) for index, one in enumerate(estimates) if one.p is not None))
    highest = 0.0
    for rank, (p, index) in enumerate(tested):
        highest = max(highest, min(1.0, p * (len(tested) - rank)))
        estimates[index].p = highest
        estimates[index].note = differ if highest < 0.05 else alike


def differences(symbol: str, values: Mapping[str, tuple[float, np.ndarray]]) -> list[Estimate]:
    """Returns the difference of a number between every pair of architectures, from the values and draws of each."""
    family = []
    for (first, (one, drawn)), (second, (other, others)) in combinations(values.items(), 2):
        ends, p = interval(drawn - others), two_sided(drawn - others)
        family.append(Estimate(f"{symbol} difference", one - other, ends, f"{first} - {second}", p, 0.0))
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
    words = (
        "no pattern in the residuals"
        if p >= MISFIT
        else f"the law misses its points in a pattern, by up to {worst:.2%}"
    )
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
