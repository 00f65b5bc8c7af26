"""A power law of compute, with its intervals, its held-out test and, if it is refused, the reasons.

Every result of a fit has `to_json()`, which returns only dictionaries, lists, numbers and strings (NaN and infinities
become None). If the data do not support a law, it is refused: its `refused` lists the reasons and its numbers are None.
Compute C is in FLOPs, N in parameters, D in tokens, and losses are as in the table (nats per token in a study).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

PF_DAY = 8.64e19
"""FLOPs in one PFLOP-day. With C in this unit, the coefficients of paper 000, Table 3 give plausible losses."""

Interval = tuple[float, float]
"""A 95 % percentile bootstrap interval (low, high)."""

NAMES = {"L": ("beta", "alpha", "E"), "N_opt": ("k_N", "a", "constant"), "D_opt": ("k_D", "b", "constant")}
"""Names of coefficient, exponent and constant of each law: L = E + beta C^alpha, N_opt = k_N C^a, D_opt = k_D C^b."""


class Result:
    """Base class of results that can be serialised."""

    def to_json(self) -> dict:
        """Returns every public field and the properties listed in `computed`, as plain values."""
        return plain(self)


def plain(value):
    """Converts results, arrays and NumPy numbers to values for `json.dumps`. NaN and infinities become None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [f.name for f in dataclasses.fields(value) if f.repr]
        return {name: plain(getattr(value, name)) for name in [*shown, *getattr(value, "computed", ())]}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass
class HeldOut(Result):
    """Held-out test: how well a law fitted at C <= `c_max` predicts the losses at larger C.

    Attributes:
        c_max: largest C in FLOPs that the fit uses.
        trained, tested: numbers of rows or points at C <= `c_max` and above.
        mean_error, max_error: mean and maximum of |predicted / observed - 1|, as fractions.
        rms_log_error: root mean square of log(predicted / observed).
        points: one entry per tested row: {"C", "loss", "predicted", "relative_error"}.
        refused: reasons why there is no test; the numbers are then None.
    """

    c_max: float | None = None
    trained: int = 0
    tested: int = 0
    mean_error: float | None = None
    max_error: float | None = None
    rms_log_error: float | None = None
    points: list[dict] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class Law(Result):
    """One power law of compute: quantity = constant + coefficient * C^exponent, C in FLOPs.

    Attributes:
        quantity: "L", "N_opt" or "D_opt".
        coefficient, exponent: numbers of the law; None if it is refused.
        constant: the irreducible loss; None in a pure power law.
        c_min, c_max: range of C of the fitted points.
        points: number of fitted points.
        rms_log_error: root mean square of log(predicted / observed) on these points.
        intervals: parameter name (see `parameters`) -> 95 % interval; empty without a bootstrap.
        held_out: the held-out test (only for losses).
        names: names of coefficient, exponent and constant in `parameters` and `intervals`; None means those of `NAMES`.
        refused: reasons why there is no law.
        notes: remarks for the reader of the law.
        draws: [resamples, 3] bootstrap draws of (log coefficient, exponent, constant or 0); not serialised.
        rival: another law of the same quantity; beyond the data, intervals have both. Not serialised.
        by_chance: few points chose between this law and its rival, so intervals have both everywhere. Not serialised.
        support: how well the data support the rival, 0 to 1: an end of an interval moves this share of the way to the
            rival's. Not serialised.
        noise: variance of the log of a point, and its degrees of freedom, if they are known. Not serialised.
        seen: log C and log value of the fitted points. Not serialised.
        rows: of a law of a surface, the rows it is fitted to (`parametric.Rows`). Not serialised.
        shift: factor by which another curve through the runs moves every value of the law; intervals have both.
    """

    quantity: str
    coefficient: float | None = None
    exponent: float | None = None
    constant: float | None = None
    c_min: float | None = None
    c_max: float | None = None
    points: int = 0
    rms_log_error: float | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)
    held_out: HeldOut | None = None
    names: tuple[str, str, str] | None = None
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    draws: np.ndarray | None = field(default=None, repr=False, compare=False)
    rival: "Law | None" = field(default=None, repr=False, compare=False)
    support: float = field(default=1.0, repr=False, compare=False)
    by_chance: bool = field(default=False, repr=False, compare=False)
    noise: tuple[float, float] | None = field(default=None, repr=False, compare=False)
    seen: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False, compare=False)
    rows: Any = field(default=None, repr=False, compare=False)
    shift: float = 1.0

    computed = ("parameters", "coefficient_pf_days", "formula", "band")

    @property
    def parameters(self) -> dict[str, float]:
        """The numbers by name: beta, alpha (and E) of L; k_N, a of N_opt; k_D, b of D_opt. Empty if refused."""
        if self.refused:
            return {}
        values = zip(self.names or NAMES[self.quantity], (self.coefficient, self.exponent, self.constant), strict=True)
        return {name: value for name, value in values if value is not None}

    @property
    def exponent_interval(self) -> Interval | None:
        """The 95 % interval of the exponent, or None without a bootstrap."""
        return self.intervals.get((self.names or NAMES[self.quantity])[1])

    @property
    def coefficient_pf_days(self) -> float | None:
        """The coefficient for C in PF-days (paper 000, Table 3), which is the power term of the law at 1 PF-day."""
        return None if self.refused else self.coefficient * PF_DAY**self.exponent

    @property
    def formula(self) -> str:
        """The law as text with C in FLOPs, or "refused"."""
        return self.text()

    @property
    def band(self) -> list[dict]:
        """{"C", "value", "low", "high"} at 41 C from `c_min` to 10 `c_max`; low and high may be None."""
        grid = [] if self.refused else np.geomspace(self.c_min, 10 * self.c_max, 41).tolist()
        rows = ((C, float(self.predict(C)), *(self.interval_at(C) or (None, None))) for C in grid)
        return [dict(zip(("C", "value", "low", "high"), row, strict=True)) for row in rows]

    def text(self, unit: str = "flops") -> str:
        """Returns the law as text, such as `L = 3.71 C^-0.0798`, with C in "flops" or "pf-days"; or "refused"."""
        if self.refused:
            return "refused"
        coefficient = self.coefficient if unit == "flops" else self.coefficient_pf_days
        constant = "" if self.constant is None else f"{self.constant:.4g} + "
        return f"{self.quantity} = {constant}{coefficient:.4g} C^{self.exponent:.4f}"

    def predict(self, compute) -> np.ndarray:
        """Returns the law's value at `compute` (FLOPs, any shape). Raises ValueError if the law was refused."""
        if self.refused:
            raise ValueError(f"{self.quantity}(C) was refused: {'; '.join(self.refused)}")
        compute = np.asarray(compute, dtype=float)
        return np.exp(np.log(self.coefficient) + self.exponent * np.log(compute)) + (self.constant or 0.0)

    def interval_at(self, compute: float) -> Interval | None:
        """Returns the 95 % interval of the law's value at `compute` FLOPs, or None without bootstrap draws."""
        if self.refused or self.draws is None or not len(self.draws):
            return None
        low, high = around(float(self.predict(compute)), self._values(compute))
        low, high = low * min(1.0, self.shift), high * max(1.0, self.shift)
        rival = self.rival_at(compute)
        if rival is None:
            return low, high
        ends = rival.interval_at(compute)
        if ends is None:  # a law without draws moves the interval by its distance
            ratio = float(rival.predict(compute) / self.predict(compute))
            ends = low * ratio, high * ratio
        return low + self.support * min(0.0, ends[0] - low), high + self.support * max(0.0, ends[1] - high)

    def rival_at(self, compute: float) -> "Law | None":
        """Returns the rival that an interval at `compute` FLOPs has too, or None."""
        if self.rival is None or self.rival.refused or not (self.by_chance or compute > self.c_max * (1 + 1e-9)):
            return None
        return self.rival

    def _values(self, compute: float) -> np.ndarray:
        """Returns the values [resamples] of the draws. Beyond the data, more compute raises no loss."""
        compute = np.array([compute, min(compute, self.c_max)])
        with np.errstate(over="ignore"):  # a resample may have an exponent without bound
            values = np.exp(self.draws[:, :1] + self.draws[:, 1:2] * np.log(compute)) + self.draws[:, 2:]
        return values.min(axis=1) if self.quantity == "L" else values[:, 0]


def around(estimate: float, values: np.ndarray) -> Interval:
    """Returns the 95 % percentile interval of the values, which has the estimate inside."""
    low, high = np.percentile(values, [2.5, 97.5])
    return min(float(low), estimate), max(float(high), estimate)


FRACTION = 0.2
"""Fraction of the points, those of largest C, that is held out by default."""


def threshold(C: np.ndarray, hold_out: float | None) -> float | None:
    """Returns the largest C in FLOPs that the fit of a held-out test uses, or None if no point is left to fit.

    Args:
        C: [n] FLOPs of the points.
        hold_out: None holds out `FRACTION` of the points, and a number below 1 holds out that fraction. A number of 1
            or more is the result itself, in FLOPs. Points of equal C stay together, and at least one is held out.
    """
    if hold_out is not None and hold_out >= 1:
        return float(hold_out)
    C = np.sort(C)
    held = max(1, round((FRACTION if hold_out is None else hold_out) * len(C)))
    below = C[C < C[len(C) - held] * (1 - 1e-9)] if len(C) > held else C[:0]
    return float(below[-1]) if len(below) else None


def held_out_of(C: np.ndarray, loss: np.ndarray, hold_out: float | None, fit: Callable[..., Law]) -> HeldOut:
    """Fits L(C) to the points up to `threshold(C, hold_out)` and compares its prediction with the points above."""
    c_max = threshold(C, hold_out)
    seen = C <= c_max if c_max is not None else np.zeros(len(C), dtype=bool)
    result = HeldOut(c_max, int(seen.sum()), int((~seen).sum()))
    if c_max is None or not result.tested:
        result.refused.append("no points have a larger C than the fitted ones")
        return result
    law = fit(C[seen], loss[seen]) if result.trained else Law("L", refused=["no points below it"])
    if law.refused:
        result.refused.extend(f"up to {c_max:.2g} FLOPs: {reason}" for reason in law.refused)
        return result
    return compare(result, C[~seen], loss[~seen], law.predict(C[~seen]))


def compare(result: HeldOut, C: np.ndarray, loss: np.ndarray, predicted: np.ndarray) -> HeldOut:
    """Fills in the errors of a held-out test from observed and predicted losses, and returns it."""
    error = predicted / loss - 1
    result.mean_error, result.max_error = float(np.abs(error).mean()), float(np.abs(error).max())
    result.rms_log_error = float(np.sqrt(np.mean(np.log(predicted / loss) ** 2)))
    rows = zip(C, loss, predicted, error, strict=True)
    names = ("C", "loss", "predicted", "relative_error")
    result.points = [dict(zip(names, map(float, row), strict=True)) for row in rows]
    return result


# Bootstrap resampling: estimates the uncertainty of a fit, with the trained runs as a sample of all possible runs.
#
# A resample is a row of counts: how many times each row of the table was drawn. So weighted fits solve all resamples in
# one batch. Checkpoints of one run are not independent, so rows of one cluster are drawn together.
#
# Few runs do not survive this: a resample of five sizes has three or four of them, and its law is another one. Designs
# of few runs are resampled by residuals instead (`draw_errors`): every run stays, and its loss gets another error.

MOST = 20_000
"""Largest number of draws that are made in place of fewer resamples."""
RUNS = 3
"""Smallest number of runs that a bootstrap of whole runs draws from."""
ENOUGH = 0.5
"""Share of the resamples that must give a law. With fewer, these resamples would be a biased sample."""


def draw_counts(resamples: int, rows: int, seed: int = 0, clusters: Sequence | None = None) -> np.ndarray:
    """Draws resamples with replacement and returns how often each row is in each.

    Args:
        resamples: number of resamples.
        rows: number of rows of the table.
        seed: seed of the generator.
        clusters: [rows] labels; rows of one label are drawn together (default: each row is its own cluster).

    Returns:
        Counts [resamples, rows], integers as floats.
    """
    generator = np.random.default_rng(seed)
    _, cluster = np.unique(np.arange(rows) if clusters is None else np.asarray(clusters), return_inverse=True)
    counts = np.zeros((resamples, cluster.max(initial=-1) + 1))
    for column in generator.integers(0, max(counts.shape[1], 1), counts.shape).T:
        counts[np.arange(resamples), column] += 1
    return counts[:, cluster]


def draw_errors(
    residuals: np.ndarray, freedom: int, resamples: int, shape: tuple[int, ...], seed: int = 0
) -> np.ndarray:
    """Draws errors for a residual bootstrap whose intervals are as wide as Student's t for few runs.

    Residuals are drawn with replacement. All errors of a resample are then multiplied by the root of freedom / q with q
    from the chi-squared distribution of `freedom`: the standard deviation of the errors is itself an estimate, and the
    fewer residuals it comes from, the more it may be wrong. For a linear estimate with normal errors, percentiles of
    the draws are then the t interval, and with many residuals they are those of the plain residual bootstrap.

    Args:
        residuals: [n] residuals divided by the root of one minus their leverage.
        freedom: number of residuals minus the number of fitted parameters; their mean square is scaled to the residual
            sum of squares over `freedom` by the caller.
        resamples: number of resamples.
        shape: shape of the errors of one resample.
        seed: seed of the generator.

    Returns:
        Errors [resamples, *shape].
    """
    drawn = np.random.default_rng([seed, 1]).choice(residuals, (resamples, *shape))
    return drawn * scales(freedom, resamples, seed).reshape(-1, *(1 for _ in shape))


def scales(freedom: float, resamples: int, seed: int) -> np.ndarray:
    """Returns the factors [resamples] by which a standard deviation of `freedom` degrees of freedom may be wrong."""
    return np.sqrt(freedom / np.random.default_rng(seed).chisquare(freedom, resamples))


def enough(resamples: int, freedom: float) -> int:
    """Returns the number of draws whose percentiles move little with the seed.

    A draw of errors is cheap, and the fewer degrees of freedom, the heavier the tails of Student's t.
    """
    return max(resamples, min(resamples * (4 + round(48 / max(freedom, 1))), MOST))


def standardised(residuals: np.ndarray, leverage: np.ndarray, freedom: int) -> np.ndarray:
    """Returns residuals [n] for `draw_errors`: of equal variance, centred, with the mean square of the errors."""
    equal = residuals / np.sqrt(np.maximum(1 - leverage, 1e-9))
    equal = equal - equal.mean()
    square = float(np.mean(equal**2))
    return equal * np.sqrt(float(residuals @ residuals) / freedom / square) if square > 0 else equal


def in_order(table: pd.DataFrame, groups: np.ndarray) -> tuple[pd.DataFrame, np.ndarray]:
    """Returns the rows, and their group labels, in an order that depends on their values alone.

    Draws are made in the order of the rows, so without it the order of a file would move intervals.
    """
    names = [name for name in ("C", "N", "D", "loss", "run") if name in table]
    order = table[names].reset_index(drop=True).sort_values(names, kind="stable").index.to_numpy()
    return table.iloc[order].reset_index(drop=True), np.asarray(groups)[order]


def runs_of(table: pd.DataFrame) -> np.ndarray:
    """Returns the number of the run of each row, by its name and size: a training has one size."""
    return table.groupby(["run", "N"]).ngroup().to_numpy()


def is_clustered(clusters: Sequence | None) -> bool:
    """Returns whether any label occurs twice."""
    return clusters is not None and len(set(clusters)) < len(clusters)


def few_runs(clusters: Sequence) -> str:
    """Returns why these runs cannot be resampled, or "" if they can."""
    runs = len(set(clusters))
    return "" if runs >= RUNS else f"{runs} of {RUNS} runs; fewer do not show how runs differ"


def interval(draws: np.ndarray) -> Interval:
    """Returns the 95 % percentile interval of a column of draws, without the NaN draws."""
    tail = 50 * (1 - 0.95)  # not quite 2.5, and the last digit of every interval follows from it
    low, high = np.nanpercentile(draws, [tail, 100 - tail])
    return float(low), float(high)


def usable(draws: np.ndarray) -> tuple[np.ndarray, str]:
    """Returns the resamples (rows) without NaN and "". If too few are left, returns no rows and the reason."""
    kept = draws[np.isfinite(draws).all(axis=1)]
    if len(kept) < ENOUGH * len(draws) or len(kept) < 20:
        reason = f"only {len(kept)} of {len(draws)} resamples gave a law; more runs are needed for an interval"
        return draws[:0], reason
    return kept, ""
