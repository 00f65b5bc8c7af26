"""Which architectures may be ranked: the one rule for every sentence that puts one before another.

Two architectures are told apart only if the interval of their difference excludes 0. The intervals hold for all pairs
of a quantity together (the studentised maximum of the differences, as Tukey's). The quantities of a study share one
maximum, others of a family share the 5 % between them, so that equal architectures are ranked anywhere in at most one
family of twenty.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from statistics import NormalDist
from typing import Any

import numpy as np

LEVEL = 0.05
ENOUGH = 20  # draws of an estimate for an interval
FEWEST = 6  # items for an interval, or a test: the least p-value of all signs of fewer, 2 / 2 ** items, is above LEVEL
QUANTITIES = 5  # of a study that share the 5 %: the four of `orders`, together, and speed
ROUNDING = 1e-9  # largest range of equal values, as a share of the largest
NEAR = 0.14  # of log C: points of two laws that are at one budget


def holm(p: Sequence[float]) -> list[float]:
    """Returns the p-values adjusted by Holm's step-down method, in the given order."""
    order = sorted(range(len(p)), key=lambda place: p[place])
    adjusted, highest = [0.0] * len(p), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[place]))
        adjusted[place] = highest
    return adjusted


@dataclass(frozen=True)
class Order:
    """What may be said about the order of some estimates.

    Attributes:
        values: name -> estimate.
        at: FLOPs that the estimates belong to; None if they belong to none.
        tested: names that have draws; the others are never ranked.
        apart: (lower, higher) of each pair whose difference has an interval without 0.
    """

    values: dict[str, float]
    at: float | None = None
    tested: frozenset[str] = frozenset()
    apart: frozenset[tuple[str, str]] = field(default_factory=frozenset)

    def above(self, name: str) -> list[str]:
        """The names that are higher than `name`."""
        return [other for other in self.values if (name, other) in self.apart]

    def lower(self, first: str, second: str) -> str | None:
        """The lower of two names; None if they cannot be told apart."""
        return first if (first, second) in self.apart else second if (second, first) in self.apart else None

    def level(self, name: str) -> list[str]:
        """The other names that cannot be told apart from `name`."""
        return [other for other in self.values if other != name and self.lower(name, other) is None]


def order(
    values: Mapping[str, float], draws: Mapping[str, np.ndarray], quantities: int = 1, at: float | None = None
) -> Order:
    """Returns which of some independent estimates are told apart.

    Args:
        values: name -> estimate.
        draws: name -> [resamples] bootstrap draws of the estimate; too few or none leave the name untested.
        quantities: number of quantities that share the 5 %.
        at: FLOPs that the estimates belong to.
    """
    test = _test(values, draws, at)
    return _apart(test, _limit([test], LEVEL / quantities))


@dataclass(frozen=True)
class _Test:
    """The differences of a quantity: names [n], errors [n, resamples], and pairs [p] with their gaps and scales [p]."""

    values: dict[str, float]
    at: float | None
    names: list[str]
    errors: np.ndarray
    pairs: list[tuple[str, str]]
    gaps: np.ndarray
    scale: np.ndarray

    def differences(self) -> Iterator[np.ndarray]:
        """Yields the errors [pairs, resamples] of each name's pairs. Those of all names at once may not fit."""
        for place, column in enumerate(self.errors[:-1]):
            yield column - self.errors[place + 1 :]


def _test(values: Mapping[str, float], draws: Mapping[str, np.ndarray], at: float | None) -> _Test:
    finite = {name: draws[name][np.isfinite(draws[name])] for name in sorted(values) if name in draws}
    kept = {name: column for name, column in finite.items() if len(column) >= ENOUGH}
    pairs = list(combinations(kept, 2))
    count, generator = min(map(len, kept.values()), default=0), np.random.default_rng(0)
    # Fits share the seed of their resamples. Shuffled, the draws are as independent as the runs are. The shuffle is the
    # same for every quantity, so that a resample keeps its errors in all of them.
    errors = [generator.permutation(column)[:count] - values[name] for name, column in kept.items()]
    gaps = np.array([values[first] - values[second] for first, second in pairs])
    test = _Test(
        dict(values), at, list(kept), np.reshape(errors, (len(kept), count)), pairs, gaps, np.zeros(len(pairs))
    )
    ends = [np.percentile(spread, [2.5, 97.5], axis=1) for spread in test.differences()]
    return replace(test, scale=np.diff(np.concatenate(ends, axis=1), axis=0)[0] / 3.92) if ends else test


def _limit(tests: Sequence[_Test], level: float) -> float:
    """The scales that the largest error of all tests stays within, but for a share `level` of the resamples."""
    tests = [test for test in tests if test.pairs]
    count = min((test.errors.shape[1] for test in tests), default=0)
    if not count:
        return math.inf
    largest = np.zeros(count)
    for test in tests:
        start = 0
        for spread in test.differences():
            scale = test.scale[start : start + len(spread), None]
            start += len(spread)
            scaled = np.divide(np.abs(spread[:, :count]), scale, where=scale > 0, out=np.zeros((len(spread), count)))
            largest = np.maximum(largest, scaled.max(axis=0))  # an interval without a width tells nothing
    return float(np.quantile(largest, 1 - level))


def _apart(test: _Test, limit: float) -> Order:
    clear = zip(test.pairs, test.gaps, (test.scale > 0) & (np.abs(test.gaps) > limit * test.scale), strict=True)
    apart = frozenset(pair if gap < 0 else pair[::-1] for pair, gap, is_clear in clear if is_clear)
    return Order(test.values, test.at, frozenset(test.names), apart)


def order_of_means(
    values: Mapping[str, float], errors: Mapping[str, tuple[float, float]], quantities: int = 1
) -> Order:
    """Returns which of some independent means are told apart.

    Args:
        values: name -> mean.
        errors: name -> its standard error and degrees of freedom (Student's t); names without one are not tested.
        quantities: see `order`.
    """
    generator = np.random.default_rng(0)
    noise = {name: error * generator.standard_t(min(t, 1e6), 4000) for name, (error, t) in sorted(errors.items())}
    return order(values, {name: values[name] + column for name, column in noise.items()}, quantities)


def side(low: float, high: float) -> int:
    """Returns the side of 0 of the interval of a difference: 1 above, -1 below, 0 if it holds 0 or has no width."""
    return int(low > 0) - int(high < 0) if low < high else 0


def t_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Returns the interval (of 95 %) of the mean of values by Student's t; NaN, NaN for fewer than two.

    It has no width if the values differ by rounding alone, which tells nothing of their noise.
    """
    if len(values) < 2:
        return math.nan, math.nan
    from scipy.special import stdtrit  # without it, orders of means need NumPy alone

    mean, error = _mean(values)
    half = float(stdtrit(len(values) - 1, 1 - level / 2)) * error
    return mean - half, mean + half


def t_test(values: Sequence[float]) -> float | None:
    """Returns the p-value of a mean of 0 of values by Student's t; None for fewer than two, or if all are equal."""
    if len(values) < 2 or not (mean_error := _mean(values))[1]:
        return None
    from scipy.special import stdtr  # see t_interval

    return 2 * float(stdtr(len(values) - 1, -abs(mean_error[0]) / mean_error[1]))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of two values or more and its standard error, 0 if they differ by rounding alone."""
    n, mean = len(values), math.fsum(values) / len(values)
    if max(values) - min(values) <= ROUNDING * max(map(abs, values)):
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def percentile_interval(
    drawn: np.ndarray, n: int, weights: Sequence[float] | np.ndarray | None = None
) -> tuple[float, float] | None:
    """Returns the 95 % interval of a mean over n items from its bootstrap; None for fewer than `FEWEST` items.

    Plain percentiles are too narrow for few items: they hold the mean of 6 normal items in 86 %. These lie further out,
    at Phi(-sqrt(n / (n - 1)) t), t of Student with n - 1 degrees of freedom (T. Hesterberg, "What Teachers Should Know
    About the Bootstrap", 2015, section 3.2): 93 %, and the plain ones for many. The bootstrap of fewer than `FEWEST`
    items reaches no further than the items themselves, which is too narrow at any percentile. Resamples that are all
    equal show no noise, so they give None too.

    Args:
        drawn: float64 [resamples], the means of resamples.
        n: number of items that were resampled.
        weights: of the items in the mean. Unequal ones count as the number of equal ones whose mean is as noisy
            (Kish's effective number, at least 3), since a few heavy items make a mean of many as unsure as one of few.
    """
    if n < FEWEST or np.ptp(drawn) <= ROUNDING * np.abs(drawn).max():
        return None
    items = float(n)
    if weights is not None:
        each = np.asarray(weights, dtype=float) / np.max(weights)
        items = max(3.0, float(each.sum() ** 2 / (each**2).sum()))
    z, free = NormalDist().inv_cdf(1 - LEVEL / 2), items - 1
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)  # within 0.03 from 5 on
    tail = NormalDist().cdf(-t * math.sqrt(items / free))
    low, high = np.quantile(drawn, [tail, 1 - tail]).tolist()
    return low, high


def orders(fits: Mapping[str, Any]) -> dict[str, Order]:
    """Returns the orders of a study's laws by quantity.

    Args:
        fits: architecture -> `ArchitectureFit`.

    Returns:
        "L", loss at the largest compute that all laws reach; "gain", the share that twice this compute takes off; "a"
        and "b", exponents of N_opt and D_opt. They share one limit, of four fifths of the 5 %. An order by the
        gain, which lies beyond the data, also holds for the other form of each law (with or without a constant) if
        its points allow it. And no order hangs on one budget (see `_without_each` and `_by_budget`).
    """
    readers: dict[str, tuple[str, Callable]] = {
        "L": ("L", _loss),
        "gain": ("L", lambda draws, at: 1 - _loss(draws, 2 * at) / _loss(draws, at)),
        "a": ("N_opt", lambda draws, at: draws[:, 1]),
        "b": ("D_opt", lambda draws, at: draws[:, 1]),
    }
    tests: dict[str, list[_Test]] = {}
    laws_of: dict[str, dict[str, Any]] = {}
    for key, (attribute, read) in readers.items():
        laws = {name: getattr(fits[name], attribute) for name in fits}
        laws = {name: law for name, law in laws.items() if law.exponent is not None and not law.refused}
        laws_of[key] = laws
        at = min((law.c_max for law in laws.values() if law.c_max), default=1.0)
        forms = [laws, {name: _other_form(law) for name, law in laws.items()}] if key == "gain" else [laws]
        tests[key] = [_test_of(form, read, at) for form in forms]
    # One limit for all: the exponents, the loss and the gain of a resample err together.
    limit = _limit([forms[0] for forms in tests.values()], LEVEL * len(tests) / QUANTITIES)
    result = {}
    for key, tested in tests.items():
        every = [_apart(test, limit) for test in tested]
        apart = frozenset.intersection(*(form.apart for form in every))
        laws, sign = laws_of[key], 1 if key == "gain" else -1  # a smaller gain is a slope nearer to 0
        compute = every[0].at if key == "L" else None
        surfaces = {name: law.rows for name, law in laws.items() if getattr(law, "rows", None) is not None}
        signs = _by_budget(surfaces, compute)
        kept = [
            (low, high)
            for low, high in apart
            if _without_each(laws[low], laws[high], compute) in (sign, None) and signs.get((low, high), sign) == sign
        ]
        result[key] = replace(every[0], apart=frozenset(kept))
    return result


def _without_each(first: Any, second: Any, at: float | None) -> int | None:
    """Returns the sign of a difference of two laws that stays if any one budget is left out; 0 if there is none.

    An error that all runs of a budget share, such as a poor learning rate, moves the law through few budgets along with
    it, and the residuals of the law show little of it. So the points of both are divided by one of the laws, either of
    them: lines through their logs by log C, without each budget in turn, differ at `at`, or without it in slope, by
    1.96 standard errors of the noise of the points alone. None if a law has fewer than three budgets, or if the noise
    is not known.
    """
    if any(getattr(law, name, None) is None for law in (first, second) for name in ("seen", "noise")):
        return None
    signs = set()
    for base, left_out in product((first, second), np.concatenate([first.seen[0], second.seen[0]])):
        difference = variance = 0.0
        for law, factor in ((first, 1), (second, -1)):
            x, y = (part[np.abs(law.seen[0] - left_out) >= NEAR] for part in law.seen)
            if not len(x) or np.ptp(x) < NEAR:
                return None
            columns = np.stack([np.ones_like(x), x - math.log(at or 1.0)], axis=1)
            inverse, column = np.linalg.inv(columns.T @ columns), int(at is None)
            estimates = inverse @ columns.T @ (y - np.log(base.predict(np.exp(x))))
            difference += factor * estimates[column]
            variance += law.noise[0] * inverse[column, column]
        signs.add(int(np.sign(difference)) if abs(difference) > 1.96 * math.sqrt(variance) else 0)
    return signs.pop() if len(signs) == 1 else 0


def budgets_of(log_C: np.ndarray) -> np.ndarray:
    """Returns the number of the budget of each row, by gaps of more than `NEAR` in log C."""
    order = np.argsort(log_C, kind="stable")
    label = np.zeros(len(order), dtype=int)
    label[order[1:]] = np.cumsum(np.diff(log_C[order]) > NEAR)
    return label


def _by_budget(surfaces: Mapping[str, Any], at: float | None) -> dict[tuple[str, str], int]:
    """Returns the sign of the difference of two surfaces in which their budgets agree; 0 if there is none.

    Resamples of the rows of a surface do not have an error that all runs of a budget share, and the surface goes along
    with it. So the budgets are the items of a second test. The distances of the rows of both from one of the surfaces,
    either of them, have a mean in each budget. The differences of these means must differ from 0 by Student's t, in
    their mean or, by a line by log C, at the compute `at`; without `at`, in the slope of the line. Holm's method
    adjusts the p-values for all pairs. Pairs with fewer than three budgets in common are absent.
    """
    signs: dict[tuple[str, str], int] = {}
    p_values: list[float] = []
    for first, second in combinations(surfaces, 2):
        pair = surfaces[first], surfaces[second]
        log_C = np.log(np.concatenate([rows.C for rows in pair]))
        label = budgets_of(log_C)
        budgets = int(label.max()) + 1
        labels = np.split(label, [len(pair[0].C)])
        counts = [np.bincount(part, minlength=budgets) for part in labels]
        common = np.minimum(*counts) > 0
        if common.sum() < 3:
            continue
        places = (np.bincount(label, log_C) / np.bincount(label))[common]
        outcomes = []
        for base in pair:
            means = [
                np.bincount(part, rows.distances(base.theta), budgets)[common] / count[common]
                for part, rows, count in zip(labels, pair, counts, strict=True)
            ]
            outcomes.append(_sign_and_p(places, means[0] - means[1], at))
        signs[first, second] = outcomes[0][0] if outcomes[0][0] == outcomes[1][0] else 0
        p_values.append(max(p for _, p in outcomes))
    clear = {pair: sign if p < LEVEL else 0 for (pair, sign), p in zip(signs.items(), holm(p_values), strict=True)}
    return clear | {(second, first): -sign for (first, second), sign in clear.items()}


def _sign_and_p(x: np.ndarray, y: np.ndarray, at: float | None) -> tuple[int, float]:
    """Returns the sign of values y at the logs x, and its p-value, as `_by_budget` tests them.

    Values without an error about their mean or line show no noise, and have the p-value 1.
    """
    from scipy.special import stdtr  # see t_interval

    ones = np.ones_like(x)
    tests = [[ones, x - x.mean()]] if at is None else [[ones], [x - math.log(at), ones]]  # the last column is tested
    signs = []
    for test in tests:
        columns = np.stack(test, axis=1)
        inverse, free = np.linalg.inv(columns.T @ columns), len(x) - len(test)
        estimates = inverse @ columns.T @ y
        error = math.sqrt(float(np.sum((y - columns @ estimates) ** 2)) / free * inverse[-1, -1])
        p = 2 * float(stdtr(free, -abs(estimates[-1]) / error)) if error > ROUNDING else 1.0
        signs.append((min(1.0, len(tests) * p), int(np.sign(estimates[-1]))))
    p, sign = min(signs)
    return sign, p


def _test_of(laws: Mapping[str, Any], read: Callable, at: float) -> _Test:
    rows = {
        name: np.array([[np.log(law.coefficient or 1.0), law.exponent, law.constant or 0.0]])
        for name, law in laws.items()
    }
    values = {name: float(read(row, at)[0]) for name, row in rows.items()}
    with np.errstate(over="ignore", invalid="ignore"):  # wild resamples of few points; `_test` keeps the finite ones
        draws = {name: read(law.draws, at) for name, law in laws.items() if law.draws is not None and len(law.draws)}
    return _test(values, draws, at)


def _other_form(law):
    rival = law.rival
    return law if rival is None or rival.draws is None or law.support < LEVEL else rival


def _loss(draws: np.ndarray, at: float) -> np.ndarray:
    return np.exp(draws[:, 0] + draws[:, 1] * np.log(at)) + draws[:, 2]
