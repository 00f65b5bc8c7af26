"""Selective copying: order, arrangement and blanks of both forms."""

import numpy as np
import pytest

from linnet.data.synthetic import IGNORE, SelectiveCopying, generate


@pytest.mark.parametrize("count", [16, 96])
def test_kth_insert_asks_for_kth_datum(count):
    task = SelectiveCopying(tokens_to_copy=count)
    data, blank, insert = task.kinds
    inputs, targets = generate(task, "train", 300)
    assert inputs.shape == (300, 256)
    for row, answers in zip(inputs, targets, strict=True):
        is_data, is_insert = row < data.stop, row == insert.start
        assert is_data.sum() == is_insert.sum() == count and (row == blank.start).sum() == 256 - 2 * count
        assert np.flatnonzero(is_data).max() < np.flatnonzero(is_insert).min()
        assert (answers[is_insert] == row[is_data]).all() and (answers[~is_insert] == IGNORE).all()


def test_arrangements_are_uniform():
    """Every position is as likely to hold anything but a blank; the last and the first included."""
    inputs, _ = generate(SelectiveCopying(seq_len=64, tokens_to_copy=8), "train", 4000)
    assert abs((inputs != 16).mean(axis=0) - 16 / 64).max() < 0.03
    last_datum = 63 - (inputs[:, ::-1] < 16).argmax(axis=1)
    first_insert = (inputs == 17).argmax(axis=1)
    assert 0 < (first_insert == last_datum + 1).mean() < 0.5  # blanks may follow the last datum


@pytest.mark.parametrize(("seq_len", "count"), [(256, 16), (512, 16), (1024, 16), (256, 32), (256, 64), (256, 96)])
def test_mad_lab(seq_len, count):
    task = SelectiveCopying(spec="mad-lab", seq_len=seq_len, tokens_to_copy=count)
    assert [(kind.name, kind.start) for kind in task.kinds] == [("data", 0), ("blank", 14), ("copy", 15)]
    inputs, targets = generate(task, "test", 200)
    assert inputs.shape == (200, seq_len)
    assert (inputs[:, -count - 1] == 15).all() and (inputs == 15).sum() == 200
    assert (inputs[:, -count - 2] < 14).all() and (inputs[:, -count:] == 14).all()
    assert (targets[:, :-count] == IGNORE).all()
    assert (targets[:, -count:] == inputs[inputs < 14].reshape(200, count)).all()


def test_mad_lab_gaps_are_uniform():
    """Each of the blanks goes before a datum of its choice, so gaps have one mean, the first among them."""
    inputs, _ = generate(SelectiveCopying(spec="mad-lab", seq_len=64, tokens_to_copy=8), "train", 3000)
    places = np.nonzero(inputs < 14)[1].reshape(3000, 8)
    gaps = np.diff(places, axis=1, prepend=-1) - 1
    assert abs(gaps.mean(axis=0) / ((64 - 17) / 8) - 1).max() < 0.05


@pytest.mark.parametrize("vocab_size", [16, 32, 64, 128])
def test_vocabularies(vocab_size):
    assert SelectiveCopying(vocab_size=vocab_size).num_tokens == vocab_size + 2
    inputs, _ = generate(SelectiveCopying(vocab_size=vocab_size, spec="mad-lab"), "train", 200)
    assert set(np.unique(inputs)) == set(range(vocab_size))
