"""MQAR: every key asked for once, at zoology's distances."""

import numpy as np
import pytest

from linnet.data.synthetic import IGNORE, Mqar, generate


@pytest.mark.parametrize(("seq_len", "pairs"), [(64, 4), (128, 8), (256, 16), (512, 64)])
def test_queries(seq_len, pairs):
    inputs, targets = generate(Mqar(seq_len=seq_len, num_pairs=pairs), "train", 200)
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        keys, values = row[: 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert 1 <= min(keys) and max(keys) < 4096 <= min(values)
        known = dict(zip(keys, values, strict=True))
        asked = [place for place, answer in enumerate(answers) if answer != IGNORE]
        assert sorted(row[place] for place in asked) == sorted(keys)
        assert all(place >= 2 * pairs and place % 2 == 0 for place in asked)
        assert all(answers[place] == known[row[place]] for place in asked)
        assert sum(token != 0 for token in row) == 3 * pairs


def test_distances():
    """Offsets from the end of the pairs: mean 14.3 at (64, 4), quartiles 0, 34, 90, 194, 382 at (512, 64)."""
    _, targets = generate(Mqar(), "train", 4000)
    assert (np.nonzero(targets != IGNORE)[1] - 8).mean() == pytest.approx(14.3, rel=0.02)
    _, targets = generate(Mqar(seq_len=512, num_pairs=64), "train", 500)
    offsets = np.nonzero(targets != IGNORE)[1] - 128
    assert np.quantile(offsets, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx([0, 34, 90, 194, 382], abs=2)


def test_uniform_distance_and_random_filler():
    inputs, targets = generate(Mqar(power_a=1.0, random_filler=True, vocab_size=256), "train", 4000)
    assert (np.nonzero(targets != IGNORE)[1] - 8).mean() == pytest.approx(27, rel=0.02)
    filler = inputs[:, 9::2]  # nothing is asked at odd places
    assert abs(np.bincount(filler.ravel(), minlength=256) / (filler.size / 256) - 1).max() < 0.25
