"""The order of samples: exactly once an epoch, whatever the seed, and evenly mixed."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet.data.order import mix, shuffled, uniform

SEEDS = st.integers(0, 2**70)


@given(windows=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**9))
def test_each_epoch_visits_each_window_once(windows, seed, epoch):
    found = shuffled(np.arange(windows) + epoch * windows, windows, seed)
    assert np.array_equal(np.sort(found), np.arange(windows))


@given(windows=st.integers(1, 2**60), samples=st.lists(st.integers(0, 2**62), min_size=1, max_size=20), seed=SEEDS)
def test_each_sample_stands_alone(windows, samples, seed):
    together = shuffled(np.array(samples), windows, seed)
    assert together.tolist() == [shuffled(np.array([sample]), windows, seed)[0] for sample in samples]
    assert ((together >= 0) & (together < windows)).all()


def test_the_order_is_pinned():
    # A change here breaks every run that is to be resumed.
    assert shuffled(np.arange(12), 10, seed=0).tolist() == [8, 6, 5, 3, 2, 9, 1, 0, 4, 7, 3, 4]
    # MurmurHash3's published finaliser of 1.
    assert mix(np.array([0, 1], dtype=np.uint64)).tolist() == [0, 0xB456BCFC34C2CB2C]


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}])
def test_another_seed_or_epoch_gives_an_unrelated_order(other):
    windows = 4000
    first = shuffled(np.arange(windows), windows, 0)
    second = shuffled(np.arange(windows) + other.get("epoch", 0) * windows, windows, other.get("seed", 0))
    assert (first == second).sum() < 10  # one by chance
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.06
    assert abs(np.corrcoef(first, np.arange(windows))[0, 1]) < 0.06
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.06


@pytest.mark.parametrize("windows", [2, 3, 4])
def test_all_orders_of_few_windows_are_about_as_frequent(windows):
    epochs = 6000
    orders = shuffled(np.arange(epochs * windows), windows, 7).reshape(epochs, windows)
    counts = [np.all(orders == order, axis=1).sum() for order in itertools.permutations(range(windows))]
    expected = epochs / len(counts)
    assert sum(counts) == epochs
    assert max(abs(count - expected) for count in counts) < 6 * expected**0.5


def test_uniform_numbers_depend_on_content_seed_and_purpose():
    hashes = np.arange(20_000, dtype=np.uint64)
    numbers = uniform(hashes, 0, "held out")
    assert (numbers >= 0).all() and (numbers < 1).all()
    assert np.histogram(numbers, 10, (0, 1))[0] == pytest.approx([2000] * 10, abs=200)
    for other in (uniform(hashes, 1, "held out"), uniform(hashes, 0, "limit")):
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.03
