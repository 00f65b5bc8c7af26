"""Metrics of a classifier: accuracy with intervals, likelihood, calibration, confusions and the worst mistakes.

Everything is computed from logits and labels; nothing here knows images.
"""

import math
from dataclasses import dataclass

import numpy as np

BINS = 15  # bins of confidence, as in Guo et al. 2017, "On calibration of modern neural networks"
Z95 = 1.959963984540054  # quantile 0.975 of the normal distribution


@dataclass(frozen=True)
class Scores:
    """Scores of N items; all arrays have N elements.

    Attributes:
        labels: int64.
        predicted: class of the highest logit, int64; the first of several.
        ranks: number of classes whose logit is above that of the label, int64; 0 is a right answer. Of classes with
            the label's logit, those before it count as above, so that `ranks == 0` agrees with `predicted`.
        nll: negative log-likelihood of the label in nats, float64.
        confidence: probability of the predicted class, float64.
    """

    labels: np.ndarray
    predicted: np.ndarray
    ranks: np.ndarray
    nll: np.ndarray
    confidence: np.ndarray

    def top(self, k: int) -> np.ndarray:
        """Returns whether the label is among the k likeliest classes, bool [N]."""
        return self.ranks < k


@dataclass(frozen=True)
class Bin:
    """A bin of confidence: (low, high], how many items it has, and their mean confidence and accuracy (NaN if none)."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def score_logits(logits: np.ndarray, labels: np.ndarray) -> Scores:
    """Scores logits.

    Args:
        logits: [N, classes], of any float type; computed in float64.
        labels: int64 [N], from 0 to classes - 1.

    Raises:
        ValueError: logits that are not finite, or a label outside the classes.
    """
    logits = np.asarray(logits, dtype=np.float64)
    labels = np.asarray(labels, dtype=np.int64)
    if bad := int((~np.isfinite(logits)).any(axis=1).sum()):
        raise ValueError(f"logits: {bad} of {len(logits)} rows are NaN or infinite; use other weights, or float32")
    if len(labels) and not (0 <= labels.min() and labels.max() < logits.shape[1]):
        raise ValueError(f"labels: {labels.min()} to {labels.max()}, but there are {logits.shape[1]} classes")
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    label_logits = np.take_along_axis(shifted, labels[:, None], axis=1)
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    ranks = ((shifted > label_logits) | ((shifted == label_logits) & earlier)).sum(axis=1)
    return Scores(labels, logits.argmax(axis=1), ranks, log_sum - label_logits[:, 0], np.exp(-log_sum))


def join(parts: list[Scores]) -> Scores:
    """Returns the scores of all parts as one."""
    names = ("labels", "predicted", "ranks", "nll", "confidence")
    return Scores(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def calibration(scores: Scores) -> tuple[float, list[Bin]]:
    """Returns the expected calibration error and its bins of equal width.

    The error is the mean of |accuracy - confidence| over bins, weighted by their items (Guo et al. 2017, equation 3).
    It is 0 for a model whose confidence of p is right in a share p of the cases.
    """
    edges = np.linspace(0, 1, BINS + 1)
    places = np.clip(np.searchsorted(edges, scores.confidence, side="left") - 1, 0, BINS - 1)  # (low, high]
    right = scores.ranks == 0
    bins, error = [], 0.0
    for i in range(BINS):
        inside = places == i
        count = int(inside.sum())
        confidence = float(scores.confidence[inside].mean()) if count else math.nan
        accuracy = float(right[inside].mean()) if count else math.nan
        error += count / len(places) * abs(accuracy - confidence) if count else 0.0
        bins.append(Bin(float(edges[i]), float(edges[i + 1]), count, confidence, accuracy))
    return error, bins


def wilson(right: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Returns Wilson's interval of a share of `right` in `n` (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927).

    Args:
        z: quantile of the normal distribution; the default gives 95 %.

    Raises:
        ValueError: there are no items, or more right answers than items.
    """
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"right: {right} of n: {n}; give n of at least 1 and right from 0 to n")
    share, extra = right / n, z * z / n
    middle = (share + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(share * (1 - share) / n + extra / (4 * n))
    return max(0.0, middle - half) if right else 0.0, min(1.0, middle + half) if right < n else 1.0


def exact_interval(right: int, n: int, level: float = 0.05) -> tuple[float, float]:
    """Returns the interval of a share of `right` in `n` that holds it in 95 % at any share (Clopper and Pearson 1934).

    Wilson's holds it in 95 % on average over shares, but near 0 and 1 in as few as 84 %.
    """
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"right: {right} of n: {n}; give n of at least 1 and right from 0 to n")
    if right == 0:
        return 0.0, 1 - (level / 2) ** (1 / n)
    if 2 * right > n:
        low, high = exact_interval(n - right, n, level)
        return 1 - high, 1 - low
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])  # of factorials
    ways = logs[n] - logs[: right + 1] - logs[n : n - right - 1 : -1]
    counts = np.arange(right + 1)

    def at_most(most: int, share: float) -> float:
        """Returns the probability of at most so many right answers."""
        terms = ways[: most + 1] + counts[: most + 1] * math.log(share) + (n - counts[: most + 1]) * math.log1p(-share)
        return float(np.exp(terms).sum())

    def solve(most: int, wanted: float) -> float:
        below, above = 0.0, 1.0
        for _ in range(60):
            middle = (below + above) / 2
            below, above = (middle, above) if at_most(most, middle) > wanted else (below, middle)
        return (below + above) / 2

    return solve(right - 1, 1 - level / 2), solve(right, level / 2)


def paired_interval(wins: int, losses: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Returns the interval of the difference of two shares of right answers to the same n items.

    The adjusted Wald interval of D. G. Bonett and R. M. Price, J. Educ. Behav. Stat. 37, 2012: one item more of each
    kind, so that two models that agree on all items still have an interval.

    Args:
        wins, losses: items that the first alone, or the second alone, has right.
        z: see `wilson`.
    """
    first, second = (wins + 1) / (n + 2), (losses + 1) / (n + 2)
    half = z * math.sqrt((first + second - (first - second) ** 2) / (n + 2))
    return max(-1.0, first - second - half), min(1.0, first - second + half)


def confusions(scores: Scores) -> list[tuple[int, int, int]]:
    """Returns (label, predicted, count) for all pairs that occur, in the order of the labels."""
    pairs, counts = np.unique(np.stack([scores.labels, scores.predicted]), axis=1, return_counts=True)
    return [(int(label), int(guess), int(count)) for label, guess, count in zip(*pairs, counts, strict=True)]


def worst(scores: Scores, most: int) -> np.ndarray:
    """Returns the places of at most `most` wrong answers, the least likely labels first; ties in their order."""
    wrong = np.flatnonzero(scores.ranks > 0)
    return wrong[np.argsort(-scores.nll[wrong], kind="stable")[:most]]
