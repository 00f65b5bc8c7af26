"""Resampling: how uncertain a fit is, when the runs that were made are a sample of those that could have been.

A resample is a row of counts, how many times each row of the table was drawn, so weighted fits do a whole bootstrap in
one batch. Checkpoints of one run are not independent: rows that share a cluster are drawn together. Where a design has
groups (budgets), drawing inside each stratum keeps it.
"""

from collections.abc import Sequence

import numpy as np

from linnet.study.fit.law import Interval

ENOUGH = 0.5
"""Share of the resamples that must give a law; with fewer, the rest would be too good a sample to speak for all."""


def draw_counts(
    resamples: int, rows: int, seed: int = 0, clusters: Sequence | None = None, strata: Sequence | None = None
) -> np.ndarray:
    """How often each row is in each resample, drawn with replacement.

    Args:
        clusters: [rows] labels; rows of one label are drawn together (default: each row alone).
        strata: [rows] labels; as many clusters are drawn from each stratum as it has (default: one stratum). A cluster
            lies in the stratum of its first row.

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
    """Whether any label occurs twice."""
    return clusters is not None and len(set(clusters)) < len(clusters)


def interval(draws: np.ndarray, level: float = 0.95) -> Interval:
    """The percentile interval of a column of draws; NaN draws are left out."""
    tail = 50 * (1 - level)
    low, high = np.nanpercentile(draws, [tail, 100 - tail])
    return float(low), float(high)


def usable(draws: np.ndarray) -> tuple[np.ndarray, str]:
    """Drops the resamples (rows) with a NaN. Returns the rest, none where too few are left, and the reason or ""."""
    kept = draws[np.isfinite(draws).all(axis=1)]
    if len(kept) < ENOUGH * len(draws) or len(kept) < 20:
        reason = f"only {len(kept)} of {len(draws)} resamples gave a law: there are too few runs for an interval"
        return draws[:0], reason
    return kept, ""
