"""Groups of documents that are linked to each other, directly or through others."""

import numpy as np


def components(count: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the smallest member of each node's connected component, int64 [count].

    Each round hooks the larger of two linked roots to the smaller one and shortens all paths to length 1 (Shiloach and
    Vishkin, 1982), so that the number of rounds grows with the logarithm of the longest path.

    Args:
        first, second: int64 [links], the two nodes of each link.
    """
    roots = np.arange(count)
    while len(first):
        a, b = roots[first], roots[second]
        open_ = a != b
        first, second, a, b = first[open_], second[open_], a[open_], b[open_]
        np.minimum.at(roots, np.maximum(a, b), np.minimum(a, b))
        while (shorter := roots[roots]).tobytes() != roots.tobytes():
            roots = shorter
    return roots


def equal_runs(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds equal values.

    Args:
        keys: [count], or [count, 2] for values of two numbers.

    Returns:
        first, other: int64, for each value that comes again: where it came first, and where it comes again.
    """
    order = np.argsort(keys, kind="stable") if keys.ndim == 1 else np.lexsort((keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    again = ordered[1:] == ordered[:-1]
    if keys.ndim == 2:
        again = again.all(axis=1)
    del ordered
    starts = np.concatenate([[True], ~again])[: len(keys)]
    places = np.flatnonzero(~starts)
    heads = np.flatnonzero(starts)
    return order[heads[np.searchsorted(heads, places) - 1]], order[places]
