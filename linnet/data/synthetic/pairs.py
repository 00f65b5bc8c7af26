"""Pairs of one key and one value, in which keys come back: what in-context recall and its noisy form are made of."""

from typing import NamedTuple

import numpy as np

from linnet.data.synthetic.draws import Draws


class Pairs(NamedTuple):
    """Keys in [0, keys) and values in [0, values), int64 [rows, n], and where the value can be known, bool [rows, n].

    A value can be known where its key stands earlier in the row. The last pair asks about a key that does.
    """

    keys: np.ndarray
    values: np.ndarray
    answerable: np.ndarray


def draw_pairs(draws: Draws, used: np.ndarray, keys: int, values: int, injective: bool) -> Pairs:
    """Draws keys uniformly, a map from keys to values for each row, and last a key among the distinct ones of the row.

    Args:
        used: bool [rows, n], the places that hold a pair; at least one True before the last of each row, which is too.
        injective: different keys of a row have different values; otherwise values are independent.
    """
    rows, n = used.shape
    drawn = draws.integers(keys, rows, n)
    first = earliest(np.where(used, drawn, keys)[:, :-1], keys + 1)
    score = np.where(first[:, :keys] < n - 1, draws.uniform(rows, keys), -1.0)
    drawn[:, -1] = score.argmax(axis=1)
    answerable = used & (np.take_along_axis(first, drawn, axis=1) < np.arange(n))
    of_key = draws.permutations(rows, values)[:, :keys] if injective else draws.integers(values, rows, keys)
    return Pairs(drawn, np.take_along_axis(of_key, drawn, axis=1), answerable)


def earliest(ids: np.ndarray, count: int) -> np.ndarray:
    """Where each id first stands in a row, int64 [rows, n] -> int64 [rows, count]; n where it does not."""
    rows, n = ids.shape
    found = np.full(rows * count, n)
    # Of equal indices the last assignment stays, so going backwards leaves the first place.
    index = (ids + np.arange(rows)[:, None] * count)[:, ::-1].ravel()
    found[index] = np.tile(np.arange(n)[::-1], rows)
    return found.reshape(rows, count)
