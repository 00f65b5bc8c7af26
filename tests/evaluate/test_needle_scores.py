"""The scores of needle grids against grids computed by hand."""

import numpy as np
import pytest

from linnet.evaluate.needle_scores import needle_scores, penalty, reach, sensitivity


def test_all_fail_and_all_pass():
    fail, full = needle_scores(np.zeros((5, 4))), needle_scores(np.ones((5, 4)))
    assert fail.at_length == (0.0,) * 4 and fail.weighted == fail.score == 0.0 and fail.penalties == (0.0,) * 4
    assert full.up_to_length == (1.0,) * 4 and full.penalties == (1.0,) * 4
    assert full.weighted == pytest.approx(1.0) and full.score == pytest.approx(1.0)


def test_stripes_pay_for_every_run():
    grid = np.tile([[1.0], [0.0]], (3, 2))  # six depths, found and not in turn: six runs
    found = needle_scores(grid, depth_ratio=1.0, length_ratio=1.0)
    assert found.penalties == (2.0**-2.5,) * 2
    assert found.weighted == pytest.approx(0.5) and found.score == pytest.approx(0.5 * 2.0**-2.5)


def test_one_column():
    grid = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]], dtype=float)
    found = needle_scores(grid, depth_ratio=3.0, length_ratio=2.0)
    assert found.at_length == (1.0, 0.0, 0.0)
    assert found.up_to_length == pytest.approx((1.0, 1 / 2, 1 / 3))
    assert found.weighted == pytest.approx(1 / (1 + 2 + 4)) == pytest.approx(found.score)


def test_weights_by_hand():
    found = needle_scores([[0.0, 1.0], [1.0, 0.5]], depth_ratio=2.0, length_ratio=3.0)
    # Weights 1, 3 / 2, 6 over 12. The first column has two runs, the second is found throughout.
    assert found.weighted == pytest.approx((3 * 1 + 2 * 1 + 6 * 0.5) / 12)
    assert found.penalties == (2.0**-0.5, 1.0)
    assert found.score == pytest.approx((2 * 1 * 2.0**-0.5 + 3 * 1 + 6 * 0.5) / 12)


@pytest.mark.parametrize(
    "found, expected",
    [([0], 0), ([1], 1), ([1, 0], 2**-0.5), ([0, 0, 1, 1], 2**-0.5), ([1, 0, 1], 0.5), ([0, 1, 0, 1], 2**-1.5)],
)
def test_the_penalty_of_a_column(found, expected):
    assert penalty(np.array(found, dtype=bool)) == pytest.approx(expected)


def test_the_threshold_decides_what_is_found():
    grid = [[0.4], [1.0]]
    assert needle_scores(grid, threshold=0.4).penalties == (1.0,)
    assert needle_scores(grid, threshold=0.5).penalties == (2.0**-0.5,)


def test_long_grids_do_not_overflow():
    assert needle_scores(np.ones((3000, 3000)), depth_ratio=2.0, length_ratio=2.0).weighted == pytest.approx(1.0)


def test_sensitivity_shows_what_the_constants_change():
    grid = np.zeros((4, 4))
    grid[:, :2] = 1.0
    grid[0, :2] = 0.4
    rows = {(row["ratio"], row["threshold"]): row for row in sensitivity(grid)}
    assert rows[1.0, 0.5]["weighted"] == pytest.approx(grid.mean())
    assert rows[1.2, 0.5]["weighted"] < grid.mean()
    assert rows[1.0, 0.25]["score"] > rows[1.0, 0.5]["score"] == rows[1.0, 1.0]["score"]


def test_where_recall_ends():
    grid = [[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]]
    assert reach(grid, [100, 200, 300, 400]) == 200
    assert reach(grid, [100, 200, 300, 400], threshold=0.6) == 100
    assert reach(np.ones((2, 3)), [1, 2, 3], threshold=1.0) == 3
    assert reach(np.zeros((2, 3)), [1, 2, 3]) is None


@pytest.mark.parametrize("grid", [[], [0.5], [[1.5]], [[-0.1]], [[float("nan")]]])
def test_what_is_no_grid(grid):
    with pytest.raises(ValueError, match="accuracy: "):
        needle_scores(grid)


def test_ratios_are_positive():
    with pytest.raises(ValueError, match="depth_ratio.* 0.*length_ratio.* 1.01"):
        needle_scores([[1.0]], depth_ratio=0)
