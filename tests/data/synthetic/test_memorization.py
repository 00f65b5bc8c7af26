"""Memorization: one map for all, which the inputs never tell."""

import numpy as np
import pytest

from linnet.data.synthetic import IGNORE, Memorization, generate


@pytest.mark.parametrize(
    ("spec", "vocab_size", "facts"),
    [("paper", 256, 128), ("paper", 8192, 4096), ("mad-lab", 256, 127), ("mad-lab", 8192, 4095), ("mad-lab", 512, 255)],
)
def test_facts(spec, vocab_size, facts):
    task = Memorization(spec=spec, vocab_size=vocab_size)
    keys, values, insert = task.kinds
    assert (keys.size, task.num_tokens) == (facts, vocab_size + (spec == "paper"))
    known = {}
    for split in ("train", "test"):
        inputs, targets = generate(task, split, 256, seed=3)
        assert (inputs[:, ::2] < keys.stop).all() and (inputs[:, 1::2] == insert.start).all()
        assert (targets[:, ::2] == IGNORE).all()
        for key, value in zip(inputs[:, ::2].ravel().tolist(), targets[:, 1::2].ravel().tolist(), strict=True):
            assert known.setdefault(key, value) == value
    assert len(set(known.values())) == len(known) and min(known.values()) >= values.start
    facts_of_seed = task.facts(3)
    assert all(facts_of_seed[key] == value for key, value in known.items())
    assert len(known) > 0.8 * facts


def test_a_seed_has_its_own_facts():
    task = Memorization()
    assert (task.facts(0) != task.facts(1)).mean() > 0.9
    assert set(task.facts(0).tolist()) == set(range(128, 256))


def test_presentations_a_fact():
    """The paper: 32 times each on average at 256 ids, once at 8,192."""
    inputs, _ = generate(Memorization(), "train", 256)
    assert np.bincount(inputs[:, ::2].ravel()).mean() == 32
