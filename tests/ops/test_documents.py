"""Packed documents as padded rows of few batches, and in the order of time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.ops.documents import batches, in_waves

SIZES = st.lists(st.integers(0, 70), min_size=1, max_size=20)


def offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)


@settings(max_examples=50)
@given(sizes=SIZES, width=st.sampled_from([8, 2**10, 2**14]))
def test_batches_hold_every_token_once(sizes, width):
    length = sum(sizes)
    x, out, states = torch.arange(1.0, length + 1)[None, :, None], torch.zeros(1, length, 1), torch.zeros(len(sizes))
    padding = 0
    for rows in batches(offsets(sizes), 1, length, width, most=500):
        taken, buffer = rows.take(x), rows.buffer(out)
        real = taken > 0
        assert real.sum(1).flatten().tolist() == torch.tensor(sizes)[rows.states].tolist()
        assert len(taken) == 1 or taken.shape[:2].numel() <= 500
        padding += int((~real).sum())
        own = states[rows.states]
        own += 1
        rows.put_state(states, own)
        buffer.copy_(taken)
        rows.put(out, buffer)
    assert torch.equal(out, x) and states.tolist() == [1.0] * len(sizes)
    if width == 2**14:
        assert padding <= max(1, length) / 7


def test_rows_of_similar_length_share_a_batch_and_others_do_not():
    cu_seqlens = offsets([60, 64, 2000, 62, 58, 1990])
    found = batches(cu_seqlens, 1, int(cu_seqlens[-1]), 32, most=2**13)
    assert [rows.states.tolist() for rows in found] == [[2, 5], [1, 3, 0, 4]]


@settings(max_examples=50)
@given(sizes=SIZES.filter(any))
def test_waves_hold_all_documents_at_each_time(sizes):
    length = sum(sizes)
    waves = in_waves(offsets(sizes), length)
    time = torch.cat([torch.arange(size) for size in sizes])[None]
    assert waves.take(time).tolist() == [t for t, size in enumerate(waves.sizes) for _ in range(size)]
    assert torch.equal(waves.put(waves.take(time)), time)
    assert waves.sizes == [sum(size > t for size in sizes) for t in range(max(sizes))]
    ends = offsets(sizes)[1:] - 1
    assert torch.equal(waves.order[waves.last], ends[waves.states].long())


def test_wrong_boundaries_are_refused():
    with pytest.raises(ValueError, match="cu_seqlens"):
        in_waves(torch.tensor([0, 5, 3], dtype=torch.int32), 3)
