"""Pairs of one key and one value with repeated keys, for in-context recall and noisy in-context recall."""

from typing import NamedTuple

import numpy as np

from linnet.data.synthetic.draws import Draws


class Pairs(NamedTuple):
    """Keys in [0, keys) and values in [0, values), int64 [rows, n].

    `answerable`, bool [rows, n], is True if the key also occurs earlier in the row. It is True for the last pair.
    """

    keys: np.ndarray
    values: np.ndarray
    answerable: np.ndarray


def draw_pairs(draws: Draws, used: np.ndarray, keys: int, values: int, injective: bool) -> Pairs:
    """Draws uniform keys and a map from keys to values per row. The last key is drawn among the row's distinct keys.

    Args:
        used: bool [rows, n], the places that hold a pair. The last place of each row must be True, and at least one
            place before it.
        keys, values: numbers of different keys and values.
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
    """Returns the first place of each id in a row, or n if it does not occur: int64 [rows, n] -> [rows, count]."""
    rows, n = ids.shape
    found = np.full(rows * count, n)
    # With equal indices the last assignment wins, so assigning in reverse order leaves the first place.
    index = (ids + np.arange(rows)[:, None] * count)[:, ::-1].ravel()
    found[index] = np.tile(np.arange(n)[::-1], rows)
    return found.reshape(rows, count)
