"""Batches that grow: sizes by position, and the same order of samples as with a constant batch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linnet.data.loader import Batches
from linnet.data.shards import ShardWriter, TokenShards
from linnet.data.sizes import BatchSizes, batch_sizes, steps_of
from linnet.encoders.masking import MaskedBatches, MaskingConfig

GROWING = BatchSizes(12, 3, 4)  # 4, 4, 8, 12, 12, ... rows


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 50), st.integers(0, 90))
def test_samples_before_a_position_are_the_sum_of_all_batches(parts, rows, growing, position):
    sizes = BatchSizes(parts * rows, parts, growing)
    assert sizes.first(position) == sum(sizes.rows(p) for p in range(position))


def test_growth_is_linear_in_whole_parts_and_ends_with_a_whole_batch():
    assert [GROWING.rows(position) for position in range(6)] == [4, 4, 8, 12, 12, 12]
    published = BatchSizes.over(8192, 32, 0.6, 6000)
    assert published.growing == 3600 and published.rows(0) == 256
    assert published.rows(3599) == published.rows(3600) == 8192 and published.rows(3487) == 7936
    assert published.first(6000) == 4256 * 8192
    assert BatchSizes.over(8, 2, 10.0, 6000).growing == 10
    huge = BatchSizes(10**6, 1000, 10**12)  # without visiting the positions
    assert huge.first(10**12) == 1000 * (10**12 * 1001 // 2)
    assert batch_sizes(16) == BatchSizes(16) and BatchSizes(16).first(7) == 112
    assert [BatchSizes(5).share(3, rank, 2) for rank in range(2)] == [(0, 2), (2, 5)]
    for position, rank in ((-1, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match=f"position {position} .*rank {rank} .*world 2"):
            BatchSizes(5).share(position, rank, 2)
    with pytest.raises(ValueError, match="do not divide"):
        BatchSizes(10, 3, 4)


@given(st.integers(1, 3000), st.integers(1, 8), st.integers(1, 8), st.sampled_from([None, 0.01, 0.6, 1.0, 7.0, 500.0]))
def test_steps_reach_a_number_of_rows_and_one_less_does_not(rows, size, parts, ramp):
    def read(steps: int) -> int:
        return BatchSizes.over(size * parts, parts, ramp, steps).first(steps)

    steps = steps_of(rows, size * parts, parts, ramp)
    assert read(steps) >= rows and (steps == 1 or read(steps - 1) < rows)


@pytest.fixture(scope="module")
def counting(tmp_path_factory) -> TokenShards:
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, "train", np.dtype("<u2"), 0, None)
    writer.add(np.arange(1, 1000), 999)
    return TokenShards(folder, "train", writer.finish(), 0)


@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_those_of_a_constant_batch_cut_at_other_places(counting, masked):
    def batches(size):
        if masked:
            return MaskedBatches(counting, 9, size, 3, MaskingConfig(), 1001)
        return Batches(counting, 9, size, 3)

    def rows(source, count: int, world: int = 1) -> torch.Tensor:
        return torch.cat([torch.stack(source.batch(p, r, world)) for p in range(count) for r in range(world)], 1)

    growing = rows(batches(GROWING), 30)
    assert torch.equal(growing, rows(batches(4), GROWING.first(30) // 4))  # beyond an epoch too
    assert torch.equal(growing, rows(batches(GROWING), 30, world=3))
    alone = batches(GROWING)  # any position first
    assert torch.equal(torch.stack(alone.batch(7)), growing[:, GROWING.first(7) : GROWING.first(8)])
    assert torch.equal(torch.stack(alone.batch(2)), growing[:, 8:16])
