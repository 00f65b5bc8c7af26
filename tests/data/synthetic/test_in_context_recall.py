"""In-context recall: what is asked can be known, and is asked as often as the formula says."""

import numpy as np
import pytest

from linnet.data.synthetic import IGNORE, InContextRecall, generate


@pytest.mark.parametrize("spec", ["paper", "mad-lab"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_targets_are_the_values_of_earlier_keys(spec, split):
    task = InContextRecall(spec=spec, seq_len=64)
    keys, values = task.kinds
    inputs, targets = generate(task, split, 200)
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        if spec == "mad-lab" and split == "train":
            assert answers[:-1] == row[1:]  # every next token
            continue
        known = {}
        for place in range(0, len(row), 2):
            key = row[place]
            assert keys.start <= key < keys.stop
            assert answers[place] == known.get(key, IGNORE)
            if place + 1 < len(row):
                assert known.setdefault(key, row[place + 1]) == row[place + 1]  # a key keeps its value
                assert answers[place + 1] == IGNORE
        assert all(values.start <= value < values.stop for value in known.values())
        assert answers[2 * (len(row) - 1) // 2 if len(row) % 2 else -2] != IGNORE  # the probe


@pytest.mark.parametrize("vocab_size", [16, 32, 64, 128])
def test_partition_and_length(vocab_size):
    half = vocab_size // 2
    for spec, length in (("paper", 128), ("mad-lab", 127)):
        task = InContextRecall(vocab_size=vocab_size, spec=spec)
        assert [(kind.name, kind.start, kind.size) for kind in task.kinds] == [
            ("keys", 0, half),
            ("values", half, half),
        ]
        assert task.num_tokens == vocab_size and task.input_length == length
        inputs, targets = generate(task, "test", 600)
        assert set(np.unique(inputs[:, ::2])) == set(range(half))
        assert set(np.unique(inputs[:, 1::2])) == set(range(half, vocab_size))
        assert np.unique(targets)[1] >= half


@pytest.mark.parametrize(
    ("values", "measured"),
    [
        ({}, 56.0),
        ({"vocab_size": 32}, 48.3),
        ({"vocab_size": 64}, 36.3),
        ({"vocab_size": 128}, 23.8),
        ({"seq_len": 256}, 120),
        ({"seq_len": 512}, 248),
        ({"seq_len": 1024}, 504),
    ],
)
def test_number_of_targets(values, measured, expected_targets):
    for spec in ("paper", "mad-lab"):
        task = InContextRecall(spec=spec, **values)
        targets = generate(task, "test", 600).targets
        mean = (targets != IGNORE).sum(axis=1).mean()
        assert mean == pytest.approx(expected_targets(task.seq_len // 2, task.vocab_size // 2), rel=0.01)
        assert mean == pytest.approx(measured, rel=0.01)


def test_value_map():
    """paper: one to one. mad-lab: values are independent, so most sequences have two keys with one value."""
    shared = {}
    for spec in ("paper", "mad-lab"):
        inputs, _ = generate(InContextRecall(spec=spec), "train", 500)
        maps = [dict(zip(row[::2], row[1::2], strict=False)) for row in inputs[:, :126].tolist()]
        shared[spec] = np.mean([len(set(found.values())) < len(found) for found in maps])
    assert shared["paper"] == 0
    assert shared["mad-lab"] == pytest.approx(1 - np.prod(1 - np.arange(8) / 8), abs=0.01)


def test_probe_is_uniform_over_distinct_keys():
    """Not in proportion to how often a key came: with two keys, the rarer one is asked for half the time."""
    inputs, _ = generate(InContextRecall(vocab_size=4, seq_len=32), "train", 2000)
    earlier, probe = inputs[:, :-2:2], inputs[:, -2]
    rare = (earlier == probe[:, None]).sum(axis=1) < earlier.shape[1] / 2
    assert rare.mean() == pytest.approx(0.5, abs=0.03)
