"""The split: by content, near the fraction, stable when documents are added, and between characters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet.data.corpus import cut_text, given_split, split_documents


def many(count: int, seed: int = 0):
    random = np.random.default_rng(seed)
    return random.integers(1, 2000, count), random.integers(0, 2**63, count).astype(np.uint64)


@pytest.mark.parametrize("fraction", [0.02, 0.3])
def test_the_held_out_share_is_near_the_fraction(fraction):
    sizes, hashes = many(5000)
    split = split_documents(sizes, hashes, fraction, None, seed=0)
    assert split.by == "documents" and set(np.unique(split.cut / split.keep)) == {0.0, 1.0}
    assert (split.keep - split.cut).sum() / sizes.sum() == pytest.approx(fraction, rel=0.25)
    other = split_documents(sizes, hashes, fraction, None, seed=1)
    assert 0 < np.mean((other.cut == 0) & (split.cut == 0)) < 1.5 * fraction**2 + 0.002


def test_a_document_stays_on_its_side_when_others_are_added_or_moved():
    sizes, hashes = many(2000)
    before = split_documents(sizes, hashes, 0.05, None, seed=0).cut == 0
    order = np.random.default_rng(1).permutation(2000)
    more_sizes, more_hashes = many(3000, seed=2)
    sizes, hashes = np.concatenate([more_sizes, sizes[order]]), np.concatenate([more_hashes, hashes[order]])
    after = split_documents(sizes, hashes, 0.05, None, seed=0).cut == 0
    assert np.array_equal(after[3000:], before[order])


def test_few_documents_hold_out_the_nearest_whole_ones_or_their_ends():
    equal = split_documents(np.full(30, 100), many(30)[1], 0.02, None, seed=0)
    assert equal.by == "documents" and (equal.cut == 0).sum() == 1
    for sizes in ([1000], [1000, 900], [10_000, 1, 1, 1]):
        split = split_documents(np.array(sizes), many(len(sizes))[1], 0.1, None, seed=0)
        assert split.by == "tails"
        assert split.cut.tolist() == [int(size * 0.9) for size in sizes]


@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=50),
    fraction=st.floats(0.001, 0.999),
    limit=st.none() | st.integers(1, 10**7),
    seed=st.integers(0, 5),
)
def test_cuts_are_always_in_order(sizes, fraction, limit, seed):
    sizes = np.array(sizes)
    split = split_documents(sizes, many(len(sizes), seed)[1], fraction, limit, seed)
    assert (split.cut >= 0).all() and (split.cut <= split.keep).all() and (split.keep <= sizes).all()
    assert split.keep.sum() == min(sizes.sum(), limit or sizes.sum())


def test_the_limit_cuts_one_document_and_drops_others():
    sizes, hashes = many(1000)
    split = split_documents(sizes, hashes, 0.02, 100_000, seed=0)
    assert split.keep.sum() == 100_000
    assert ((split.keep > 0) & (split.keep < sizes)).sum() <= 1
    assert np.flatnonzero(split.keep).max() > 900  # not the first ones


def test_copies_of_given_held_out_documents_do_not_train():
    sizes, hashes = np.array([5, 5, 7, 5]), np.array([1, 2, 3, 2], dtype=np.uint64)
    split = given_split(sizes, hashes, np.array([False, False, False, True]), None, seed=0)
    assert (split.keep.tolist(), split.cut.tolist(), split.copies) == ([5, 0, 7, 5], [5, 0, 7, 0], 1)


@given(st.text("aé日😀\n", min_size=1, max_size=40), st.integers(0, 200), st.integers(0, 200))
def test_text_is_cut_between_characters_and_nothing_is_lost(text, keep, cut):
    text = text.encode()
    keep = min(keep, len(text))
    train, held = cut_text(text, keep, min(cut, keep))
    assert text.startswith(train + held)
    assert keep - 3 <= len(train + held) <= keep
    (train.decode(), held.decode())


def test_text_is_cut_at_a_line_where_there_is_one():
    text = b"first line\nsecond line\nthird line, which is long"
    assert cut_text(text, len(text), 15) == (b"first line\nsecond line\n", b"third line, which is long")
    assert cut_text(text, len(text), 30) == (text[:30], text[30:])
