"""Batches: exactly once an epoch, a pure function of (seed, step), the same on any number of ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.config import ConfigError
from linnet.data import Batches, pack_documents, validation_batches
from linnet.data.shards import ShardWriter, TokenShards


@pytest.fixture(scope="module")
def shards_of(tmp_path_factory):
    def make(documents: list[list[int]]) -> TokenShards:
        folder = tmp_path_factory.mktemp("shards")
        writer = ShardWriter(folder, "train", np.dtype("<u2"), 0, None)
        for document in documents:
            writer.add(np.array(document), len(document))
        return TokenShards(folder, "train", writer.finish(), 0)

    return make


@pytest.fixture(scope="module")
def counting(shards_of) -> TokenShards:
    return shards_of([list(range(1, 1000))])


def test_an_epoch_reads_every_window_once_and_targets_follow_tokens(counting):
    batches = Batches(counting, seq_len=9, batch_size=5, seed=3)
    assert batches.windows == 111
    tokens, targets = (torch.cat(parts) for parts in zip(*(batches.batch(step) for step in range(23)), strict=True))
    assert tokens.dtype == targets.dtype == torch.int64 and tokens.shape == targets.shape == (115, 9)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert sorted(tokens[:111, 0].tolist()) == list(range(1, 1000, 9))
    assert sorted(targets[:111].flatten().tolist()) == [0, *range(2, 1000)]
    assert tokens[:111, 0].tolist() != sorted(tokens[:111, 0].tolist())
    assert batches.epoch(23) == 115 / 111


@given(step=st.integers(0, 10**7), world=st.integers(1, 12), batch_size=st.integers(1, 9), seed=st.integers(0, 3))
def test_ranks_share_the_global_batch(counting, step, world, batch_size, seed):
    whole = Batches(counting, 7, batch_size, seed).batch(step)
    ranks = [Batches(counting, 7, batch_size, seed).batch(step, rank, world) for rank in range(world)]
    sizes = [tokens.shape[0] for tokens, _ in ranks]
    assert max(sizes) - min(sizes) <= 1
    for number in (0, 1):
        assert torch.equal(torch.cat([rank[number] for rank in ranks]), whole[number])


@pytest.mark.parametrize("packing", ["cross", "reset"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_ranks_read_the_same_bytes_across_the_end_of_an_epoch(shards_of, packing, world):
    shards = shards_of([list(range(1, 1 + length)) for length in (200, 31, 400, 7, 363)])
    batches = Batches(shards, 9, 7, seed=5, packing=packing)  # an epoch ends inside step 15
    assert batches.epoch(15) < 1 < batches.epoch(16)
    for step in (0, 14, 15, 16, 31):
        ranks = [batches.batch(step, rank, world) for rank in range(world)]
        whole = batches.batch(step)
        for number in (0, 1):
            assert torch.equal(torch.cat([rank[number] for rank in ranks]), whole[number])
        if packing == "reset":  # rows have as many places for starts as the fullest row beside them needs
            starts = [row[row < 9].tolist() for rank in ranks for row in rank[2]]
            assert starts == [row[row < 9].tolist() for row in whole[2]]


def test_a_batch_does_not_depend_on_what_was_asked_before(counting):
    going = Batches(counting, 16, 3, seed=1)
    once = [going.batch(step)[0] for step in range(3000)]
    for step in (2999, 0, 1364, 1365, 1366, 17):
        assert torch.equal(Batches(counting, 16, 3, seed=1).batch(step)[0], once[step])
        assert torch.equal(going.batch(step)[0], once[step])
    assert not torch.equal(Batches(counting, 16, 3, seed=2).batch(0)[0], once[0])


def test_more_rows_than_windows(shards_of):
    tokens, _ = Batches(shards_of([[1, 2, 3, 4]]), 2, 7, seed=0).batch(5)
    assert tokens.shape == (7, 2) and {tuple(row) for row in tokens.tolist()} == {(1, 2), (3, 4)}


def test_a_sequence_longer_than_the_corpus_names_both(counting):
    assert Batches(counting, 999, 1, 0).windows == 1
    with pytest.raises(ConfigError, match="seq_len: 1000 .* 1000 .* 999"):
        Batches(counting, 1000, 1, 0)


@pytest.mark.parametrize(("seq_len", "batch_size"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(counting, seq_len, batch_size):
    with pytest.raises(ValueError, match="seq_len.*batch_size"):
        Batches(counting, seq_len, batch_size, 0)
    with pytest.raises(ValueError, match="seq_len.*batch_size"):
        validation_batches(counting, seq_len, batch_size)


@pytest.mark.parametrize(("step", "rank", "world"), [(-1, 0, 1), (0, 2, 2), (0, -1, 1)])
def test_places_outside_are_refused(counting, step, rank, world):
    with pytest.raises(ValueError, match="rank"):
        Batches(counting, 8, 2, 0).batch(step, rank, world)


@given(length=st.integers(1, 60), seq_len=st.integers(1, 70), batch_size=st.integers(1, 9))
@settings(max_examples=50)
def test_validation_scores_every_token_but_the_first_once(shards_of, length, seq_len, batch_size):
    batches = validation_batches(shards_of([list(range(1, length + 1))]), seq_len, batch_size)
    scored = []
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == batches[0][0].shape and tokens.dtype == torch.int64
        counted = targets != -100
        scored += targets[counted].tolist()
        follows = torch.where(tokens == length, 0, tokens + 1)
        assert torch.equal(targets[counted], follows[counted])
    assert scored == [*range(2, length + 1), 0]
    assert batches.tokens == length


@given(limit=st.integers(1, 1500))
def test_validation_with_a_limit_is_spread_over_the_split(counting, limit):
    batches = validation_batches(counting, 10, 4, max_tokens=limit)
    targets = torch.cat([targets.flatten() for _, targets in batches])
    scored = targets[targets != -100].tolist()
    assert len(scored) == len(set(scored)) == batches.tokens
    assert limit - 10 < len(scored) <= max(limit, 10) or len(scored) == 999
    if limit >= 200:
        assert abs(np.mean(scored) - 500) < 60
    again = validation_batches(counting, 10, 4, max_tokens=limit)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, again, strict=True))
    assert torch.equal(batches[-1][0], batches[len(batches) - 1][0])


def test_packing_starts_documents_at_rows_and_after_each_end(shards_of):
    batches = Batches(shards_of([[5, 6], [7], [8, 9, 10], [11]]), 4, 1, 0)
    flat, offsets = pack_documents(torch.tensor([[5, 6, 0, 7], [0, 8, 9, 0], [0, 0, 3, 4]]), 0)
    assert flat.tolist() == [[5, 6, 0, 7, 0, 8, 9, 0, 0, 0, 3, 4]]
    assert offsets.dtype == torch.int32 and offsets.tolist() == [0, 3, 4, 5, 8, 9, 10, 12]
    tokens = batches.batch(0)[0]
    assert [part.tolist() for part in batches.documents(tokens)] == [
        part.tolist() for part in pack_documents(tokens, 0)
    ]
