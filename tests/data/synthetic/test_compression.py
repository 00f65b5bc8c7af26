"""Compression: targets at their own positions, the compression token last."""

import numpy as np
import pytest

from linnet.data.synthetic import IGNORE, Compression, generate


@pytest.mark.parametrize("vocab_size", [16, 32, 64, 128])
@pytest.mark.parametrize("spec", ["paper", "mad-lab"])
def test_targets_are_the_inputs(spec, vocab_size):
    task = Compression(spec=spec, vocab_size=vocab_size)
    token = vocab_size - (spec == "mad-lab")
    assert task.num_tokens == token + 1 and task.kinds[1].start == token and task.autoencoder
    inputs, targets = generate(task, "test", 400)
    assert (inputs[:, -1] == token).all() and set(np.unique(inputs[:, :-1])) == set(range(token))
    assert (targets[:, :-1] == inputs[:, :-1]).all()
    assert (targets[:, -1] == (token if spec == "mad-lab" else IGNORE)).all()
