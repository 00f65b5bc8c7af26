"""Draws: keyed, uniform, and the same bytes for good."""

import numpy as np

from linnet.data.synthetic.base import SORTED, Draws, first_places


def test_key_alone_decides():
    assert (Draws(1, "a", 2).uniform(50) == Draws(1, "a", 2).uniform(50)).all()
    streams = [Draws(*key).uniform(50) for key in ((1, "a", 2), (1, "a", 3), (2, "a", 2), (1, "b", 2), (1, "a2"))]
    assert len({stream.tobytes() for stream in streams}) == len(streams)


def test_bytes_do_not_change():
    """Pinned numbers: the stream must outlive versions of NumPy, or committed scores could not be made again."""
    assert Draws(0, "pinned").integers(1000, 6).tolist() == [271, 529, 80, 806, 78, 749]


def test_integers_are_uniform():
    counts = np.bincount(Draws(0, "integers").integers(7, 70_000), minlength=7)
    assert len(counts) == 7 and abs(counts / 10_000 - 1).max() < 0.04
    high = np.array([[1], [5]])
    assert (Draws(0, "high").integers(high, 2, 1000).max(axis=1) == [0, 4]).all()


def test_permutations_and_subsets():
    assert (np.sort(Draws(0, "p").permutations(100, 9), axis=1) == np.arange(9)).all()
    for count in (0, 1, 5, 9):
        chosen = Draws(0, "s").subsets(4000, 9, count)
        assert (chosen.sum(axis=1) == count).all()
        assert abs(chosen.mean(axis=0) - count / 9).max() < 0.03


def test_distinct():
    for count, population in ((40, 50), (30, SORTED + 1), (300, 5 * SORTED)):
        drawn = Draws(0, "d").distinct(200, count, population)
        assert all(len(set(row)) == count for row in drawn.tolist())
        assert drawn.min() >= 0 and drawn.max() < population
        assert abs(drawn.mean() / ((population - 1) / 2) - 1) < 0.03
    more = Draws(0, "d").distinct(100, 12, 8)
    assert (np.sort(more[:, :8], axis=1) == np.arange(8)).all()
    assert set(more[:, 8:].ravel().tolist()) == set(range(8))


def test_first_places():
    values = Draws(0, "f").integers(6, 50, 12)
    expected = [[row.index(value) for value in row] for row in values.tolist()]
    assert first_places(values).tolist() == expected
