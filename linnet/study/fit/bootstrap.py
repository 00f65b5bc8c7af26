"""Bootstrap resampling: estimates the uncertainty of a fit, with the trained runs as a sample of all possible runs.

A resample is a row of counts: how many times each row of the table was drawn. So weighted fits solve all resamples in
one batch. Checkpoints of one run are not independent, so rows of one cluster are drawn together. If a design has groups
(budgets), drawing within each stratum keeps the number of runs per group.
"""

from collections.abc import Sequence

import numpy as np

from linnet.study.fit.law import Interval

ENOUGH = 0.5
"""Share of the resamples that must give a law. With fewer, these resamples would be a biased sample."""


def draw_counts(
    resamples: int, rows: int, seed: int = 0, clusters: Sequence | None = None, strata: Sequence | None = None
) -> np.ndarray:
    """Draws resamples with replacement and returns how often each row is in each.

    Args:
        resamples: number of resamples.
        rows: number of rows of the table.
        seed: seed of the generator.
        clusters: [rows] labels; rows of one label are drawn together (default: each row is its own cluster).
        strata: [rows] labels; each resample draws as many clusters from a stratum as the stratum has (default: one
            stratum). A cluster belongs to the stratum of its first row.

    Returns:
        Counts [resamples, rows], integers as floats.
    """
    generator = np.random.default_rng(seed)
    _, cluster = np.unique(np.arange(rows) if clusters is None else np.asarray(clusters), return_inverse=True)
    _, first = np.unique(cluster, return_index=True)
    _, stratum = np.unique(np.zeros(rows) if strata is None else np.asarray(strata), return_inverse=True)
    counts = np.zeros((resamples, len(first)))
    for label in np.unique(stratum[first]):
        members = np.flatnonzero(stratum[first] == label)
        drawn = generator.integers(0, len(members), (resamples, len(members)))
        for column in drawn.T:
            counts[np.arange(resamples), members[column]] += 1
    return counts[:, cluster]


def is_clustered(clusters: Sequence | None) -> bool:
    """Returns whether any label occurs twice."""
    return clusters is not None and len(set(clusters)) < len(clusters)


def interval(draws: np.ndarray, level: float = 0.95) -> Interval:
    """Returns the percentile interval of a column of draws, without the NaN draws."""
    tail = 50 * (1 - level)
    low, high = np.nanpercentile(draws, [tail, 100 - tail])
    return float(low), float(high)


def usable(draws: np.ndarray) -> tuple[np.ndarray, str]:
    """Returns the resamples (rows) without NaN and "". If too few are left, returns no rows and the reason."""
    kept = draws[np.isfinite(draws).all(axis=1)]
    if len(kept) < ENOUGH * len(draws) or len(kept) < 20:
        reason = f"only {len(kept)} of {len(draws)} resamples gave a law; more runs are needed for an interval"
        return draws[:0], reason
    return kept, ""
