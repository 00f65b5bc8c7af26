"""The four numbers that paper 000 makes of a needle-in-a-haystack grid (appendix B.1), by depth and length.

The paper does not say its weights' ratios, its threshold, or how the penalty and the weights go together, so all are
parameters here, and `sensitivity` shows what they change. The defaults: weights that grow by 1 % a step of depth and of
length, a threshold of one half, and the penalty of a length multiplied into its column's weighted mean.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

RATIOS = (1.0, 1.01, 1.05, 1.2)  # that `sensitivity` tries
THRESHOLDS = (0.25, 0.5, 1.0)
RIVALS = 9  # wrong answers beside the right one where answers are chosen


@dataclass(frozen=True)
class NeedleScores:
    """Accuracies of a grid, each from 0 to 1.

    Attributes:
        at_length: mean over depths at each length.
        up_to_length: mean over all depths and all lengths up to each.
        weighted: mean over the grid, deeper and longer cells counting more.
        score: the weighted mean with each length's column multiplied by its penalty.
        penalties: of each length (`penalty`).
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
    """The scores of a grid.

    Args:
        accuracy: [depths, lengths], each from 0 to 1; depths from the beginning of the text on, lengths ascending.
        depth_ratio, length_ratio: of the weight of a step to that of the one before it.
        threshold: a cell of at least this accuracy counts as found where penalties are concerned.

    Raises:
        ValueError: no grid, an accuracy outside 0..1 or not a number, or a ratio that is not positive.
    """
    grid = np.asarray(accuracy, dtype=np.float64)
    if grid.ndim != 2 or not grid.size:
        raise ValueError(f"accuracy: has shape {list(grid.shape)}; give [depths, lengths], at least one of each")
    if not ((grid >= 0) & (grid <= 1)).all():
        raise ValueError("accuracy: a cell is outside 0..1; give the share of right answers")
    if not (0 < depth_ratio < np.inf and 0 < length_ratio < np.inf):
        raise ValueError(f"depth_ratio {depth_ratio}, length_ratio {length_ratio}: give positive numbers")
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
    """Of one length: 1 if every depth is found, 0 if none is, else 2^((1 - n) / 2) for n runs of found and not found.

    A model that finds needles here and there pays more than one that finds them down to some depth.
    """
    found = np.asarray(found, dtype=bool)
    if found.all() or not found.any():
        return float(found.all())
    runs = 1 + int((found[1:] != found[:-1]).sum())
    return 2.0 ** ((1 - runs) / 2)


def reach(accuracy: ArrayLike, lengths: Sequence[int], threshold: float = 0.5) -> int | None:
    """Where recall ends: the longest length up to which at least this share is found at every length; None for none.

    Args:
        accuracy: [depths, lengths].
        lengths: tokens of each column, ascending.
    """
    enough = np.asarray(accuracy, dtype=np.float64).mean(0) >= threshold
    columns = len(enough) if enough.all() else int(enough.argmin())
    return int(lengths[columns - 1]) if columns else None


def sensitivity(accuracy: ArrayLike) -> list[dict]:
    """`weighted` and `score` for each of `RATIOS` (of depth and length alike) and of `THRESHOLDS`."""
    rows = []
    for ratio in RATIOS:
        for threshold in THRESHOLDS:
            found = needle_scores(accuracy, depth_ratio=ratio, length_ratio=ratio, threshold=threshold)
            rows.append({"ratio": ratio, "threshold": threshold, "weighted": found.weighted, "score": found.score})
    return rows


def _powers(ratio: float, count: int) -> np.ndarray:
    """1, ratio, ratio^2, ..., over the largest, so that none overflows."""
    powers = np.arange(count) * np.log(ratio)
    return np.exp(powers - powers.max())
