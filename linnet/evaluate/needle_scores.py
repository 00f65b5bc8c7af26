"""The four metrics of paper 000 for a needle-in-a-haystack grid of depths and lengths (appendix B.1).

The paper does not state the ratios of its weights, its threshold, or how penalties and weights combine. Ratios and
threshold are parameters here, and `sensitivity` shows their effect. By default the weights grow by 1 % per step of
depth and per step of length, the threshold is one half, and the penalty of a length multiplies its column.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

RATIOS = (1.0, 1.01, 1.05, 1.2)  # values that `sensitivity` tries
THRESHOLDS = (0.25, 0.5, 1.0)
RIVALS = 9  # wrong answers per question with `scoring: choice`


@dataclass(frozen=True)
class NeedleScores:
    """Accuracies of a grid, each from 0 to 1.

    Attributes:
        at_length: mean over depths at each length.
        up_to_length: for each length, the mean over all depths and all lengths up to it.
        weighted: weighted mean over the grid; deeper and longer cells count more.
        score: the NIAH score: the weighted mean with each length's column multiplied by its penalty.
        penalties: the penalty of each length (`penalty`).
    """

    at_length: tuple[float, ...]
    up_to_length: tuple[float, ...]
    weighted: float
    score: float
    penalties: tuple[float, ...]

    def to_dict(self) -> dict:
        return asdict(self)


def needle_scores(
    accuracy: ArrayLike, *, depth_ratio: float = 1.01, length_ratio: float = 1.01, threshold: float = 0.5
) -> NeedleScores:
    """Returns the scores of a grid.

    Args:
        accuracy: [depths, lengths], each from 0 to 1; depths start at the beginning of the text, lengths ascend.
        depth_ratio, length_ratio: weight of a depth (length) relative to the one before it.
        threshold: for penalties, a cell of at least this accuracy counts as found.

    Raises:
        ValueError: the array is not a grid, an accuracy is NaN or outside 0..1, or a ratio is not positive.
    """
    grid = np.asarray(accuracy, dtype=np.float64)
    if grid.ndim != 2 or not grid.size:
        raise ValueError(f"accuracy: has shape {list(grid.shape)}; give [depths, lengths], at least one of each")
    if not ((grid >= 0) & (grid <= 1)).all():
        raise ValueError("accuracy: a cell is outside 0..1; give shares of right answers")
    if not (0 < depth_ratio < np.inf and 0 < length_ratio < np.inf):
        raise ValueError(f"depth_ratio {depth_ratio}, length_ratio {length_ratio}: not positive; give positive numbers")
    depths, lengths = grid.shape
    weights = np.outer(_powers(depth_ratio, depths), _powers(length_ratio, lengths))
    weights /= weights.sum()
    penalties = np.array([penalty(column >= threshold) for column in grid.T])
    at_length = grid.mean(0)
    return NeedleScores(
        at_length=tuple(at_length.tolist()),
        up_to_length=tuple((at_length.cumsum() / np.arange(1, lengths + 1)).tolist()),
        weighted=(weights * grid).sum().item(),
        score=(weights * grid * penalties).sum().item(),
        penalties=tuple(penalties.tolist()),
    )


def penalty(found: ArrayLike) -> float:
    """Returns the penalty of one length: 1 if every depth is found, 0 if none is found, else 2^((1 - n) / 2).

    n is the number of runs of consecutive found or not found depths. A model that finds needles at scattered depths
    gets a lower score than one that finds all of them down to some depth.
    """
    found = np.asarray(found, dtype=bool)
    if found.all() or not found.any():
        return float(found.all())
    runs = 1 + int((found[1:] != found[:-1]).sum())
    return 2.0 ** ((1 - runs) / 2)


def reach(accuracy: ArrayLike, lengths: Sequence[int], threshold: float = 0.5) -> int | None:
    """Returns where recall ends: the longest length up to which every length reaches the threshold; None if none does.

    Args:
        accuracy: [depths, lengths].
        lengths: tokens of each column, ascending.
        threshold: least mean over depths.
    """
    enough = np.asarray(accuracy, dtype=np.float64).mean(0) >= threshold
    columns = len(enough) if enough.all() else int(enough.argmin())
    return int(lengths[columns - 1]) if columns else None


def sensitivity(accuracy: ArrayLike) -> list[dict]:
    """Returns `weighted` and `score` for each of `RATIOS` (for depth and length) and each of `THRESHOLDS`."""
    rows = []
    for ratio in RATIOS:
        for threshold in THRESHOLDS:
            scores = needle_scores(accuracy, depth_ratio=ratio, length_ratio=ratio, threshold=threshold)
            rows.append({"ratio": ratio, "threshold": threshold, "weighted": scores.weighted, "score": scores.score})
    return rows


def _powers(ratio: float, count: int) -> np.ndarray:
    """Returns 1, ratio, ratio^2, ..., divided by the largest of them, so that none overflows."""
    powers = np.arange(count) * np.log(ratio)
    return np.exp(powers - powers.max())
