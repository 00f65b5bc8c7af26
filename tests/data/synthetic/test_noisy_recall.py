"""Noisy recall: the share of noise, where it stands, and that recall is unharmed by it."""

import numpy as np
import pytest

from linnet.data.synthetic import IGNORE, NoisyRecall, generate


def test_pairs_stay_together_and_targets_are_known():
    task = NoisyRecall(seq_len=64, frac_noise=0.5)
    noise = task.kinds[2]
    for split in ("train", "test"):
        inputs, targets = generate(task, split, 200)
        for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
            known, place = {}, 0
            while place < len(row):
                if row[place] >= noise.start:
                    assert answers[place] == IGNORE
                    place += 1
                    continue
                key, value = row[place : place + 2]
                assert key < 8 <= value < noise.start
                assert answers[place : place + 2] == [known.get(key, IGNORE), IGNORE]
                assert known.setdefault(key, value) == value
                place += 2
            assert answers[-2] != IGNORE and len(set(known.values())) == len(known)


@pytest.mark.parametrize(("frac_noise", "exact"), [(0.2, 26), (0.4, 52), (0.6, 76), (0.8, 102), (0.0, 0)])
def test_share_of_noise_is_exact(frac_noise, exact, expected_targets):
    task = NoisyRecall(frac_noise=frac_noise)
    inputs, targets = generate(task, "test", 1200)
    assert ((inputs >= 16).sum(axis=1) == exact).all() and abs(exact - frac_noise * 128) <= 1
    asked = (targets != IGNORE).sum(axis=1).mean()
    assert asked == pytest.approx(expected_targets((128 - exact) // 2, 8), rel=0.01)


def test_noise_is_anywhere_and_of_any_kind():
    inputs, _ = generate(NoisyRecall(), "train", 2000)
    by_place = (inputs >= 16).mean(axis=0)
    assert (by_place[:-2] > 0.1).all() and (by_place[-2:] == 0).all()
    assert len({tuple(row >= 16) for row in inputs}) == 2000  # single tokens: keys stand at odd places too
    assert abs(np.bincount(inputs[inputs >= 16] - 16) / (2000 * 26 / 16) - 1).max() < 0.06


@pytest.mark.parametrize(
    ("values", "measured"),
    [
        ({}, 43.6),
        ({"frac_noise": 0.4}, 31.3),
        ({"frac_noise": 0.6}, 19.0),
        ({"frac_noise": 0.8}, 7.8),
        ({"vocab_size": 48}, 36.1),
        ({"vocab_size": 80}, 26.1),
        ({"vocab_size": 144}, 16.5),
    ],
)
def test_mad_lab(values, measured):
    task = NoisyRecall(spec="mad-lab", **values)
    keys, key_values, noise = task.kinds
    half = (task.vocab_size - 16) // 2
    assert [kind.size for kind in task.kinds] == [half, half, 16] and task.num_tokens == task.vocab_size
    inputs, targets = generate(task, "test", 3000)
    assert inputs.shape == (3000, 127)
    assert (targets != IGNORE).sum(axis=1).mean() == pytest.approx(measured, rel=0.01)
    noisy = inputs >= noise.start
    assert (noisy[:, :-1:2] == noisy[:, 1::2]).all()  # only in aligned pairs, so the last key stands alone
    n, f = 64, task.frac_noise
    assert noisy.sum(axis=1).mean() == pytest.approx(2 * f * (n - 1) ** 2 / n, rel=0.01)
    assert (inputs[:, ::2][~noisy[:, ::2]] < keys.stop).all()


def test_mad_lab_trains_on_every_next_token():
    inputs, targets = generate(NoisyRecall(spec="mad-lab"), "train", 100)
    assert (targets[:, :-1] == inputs[:, 1:]).all() and (targets >= 16).any()


def test_paper_vocabularies():
    for vocab_size in (16, 32, 64, 128):
        kinds = NoisyRecall(vocab_size=vocab_size).kinds
        assert [kind.size for kind in kinds] == [vocab_size // 2, vocab_size // 2, 16]
