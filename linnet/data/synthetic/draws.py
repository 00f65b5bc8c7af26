"""Random numbers that depend only on a key, and not on other calls, the worker, or NumPy's version.

NumPy guarantees the raw bits of its bit generators, but may change how its distributions use them (NEP 19). So this
module takes only the bits of Philox from NumPy (J. K. Salmon and others, "Parallel random numbers: as easy as 1, 2, 3",
2011), and implements the few distributions that the tasks need.
"""

import hashlib
import math

import numpy as np

SORTED = 1024  # populations up to this size are permuted; from larger ones, duplicates are drawn again


class Draws:
    """A stream of random numbers, identified by a seed and a place.

    Args:
        seed: any integer.
        place: strings and integers that name the purpose of the stream; another place gives an unrelated stream.
    """

    def __init__(self, seed: int, *place: str | int):
        self.seed = seed
        key = hashlib.sha256("/".join(map(str, (seed, *place))).encode()).digest()
        self._bits = np.random.Philox(key=int.from_bytes(key[:16], "little"))

    def uniform(self, *shape: int) -> np.ndarray:
        """Returns float64 numbers in [0, 1) of the given shape."""
        bits = self._bits.random_raw(math.prod(shape))
        return ((bits >> np.uint64(11)) * 2.0**-53).reshape(shape)

    def integers(self, high: int | np.ndarray, *shape: int) -> np.ndarray:
        """Returns int64 numbers in [0, high) of the given shape; `high` may be an array that broadcasts to it."""
        return (self.uniform(*shape) * high).astype(np.int64)

    def permutations(self, rows: int, size: int) -> np.ndarray:
        """Returns int64 [rows, size]: an independent random permutation of 0 to size - 1 in each row."""
        return np.argsort(self.uniform(rows, size), axis=1)

    def subsets(self, rows: int, size: int, count: int) -> np.ndarray:
        """Returns bool [rows, size] with `count` True values in each row; all such rows are equally likely."""
        chosen = np.zeros((rows, size), dtype=bool)
        if count:
            smallest = np.argpartition(self.uniform(rows, size), count - 1, axis=1)[:, :count]
            np.put_along_axis(chosen, smallest, True, axis=1)
        return chosen

    def distinct(self, rows: int, count: int, population: int) -> np.ndarray:
        """Returns int64 [rows, count] in [0, population), all different within a row.

        If `count` exceeds `population`, the first `population` of a row are different and the others independent.
        """
        if population <= max(SORTED, 2 * count):
            chosen = self.permutations(rows, population)[:, :count]
            return np.concatenate([chosen, self.integers(population, rows, count - chosen.shape[1])], axis=1)
        chosen = self.integers(population, rows, count)
        while (again := first_places(chosen) != np.arange(count)).any():
            chosen[again] = self.integers(population, np.count_nonzero(again))
        return chosen


def first_places(values: np.ndarray) -> np.ndarray:
    """Returns for each element the first place of its value in its row; int64 [rows, n] -> int64 [rows, n]."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    starts = np.zeros(values.shape, dtype=np.int64)
    starts[:, 1:] = np.where(ordered[:, 1:] != ordered[:, :-1], np.arange(1, values.shape[1]), 0)
    first = np.empty_like(starts)
    np.put_along_axis(first, order, np.take_along_axis(order, np.maximum.accumulate(starts, axis=1), axis=1), axis=1)
    return first
