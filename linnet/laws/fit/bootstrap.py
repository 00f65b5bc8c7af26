"""Bootstrap resampling: estimates the uncertainty of a fit, with the trained runs as a sample of all possible runs.

A resample is a row of counts: how many times each row of the table was drawn. So weighted fits solve all resamples in
one batch. Checkpoints of one run are not independent, so rows of one cluster are drawn together.

Few runs do not survive this: a resample of five sizes has three or four of them, and its law is another one. Designs of
few runs are resampled by residuals instead (`draw_errors`): every run stays, and its loss gets another error.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from linnet.laws.fit.law import Interval

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
