"""Samples as text: every token named by its part, targets under their inputs."""

import numpy as np
import pytest

from linnet.data.synthetic import IGNORE, TASKS, NoisyRecall, generate
from linnet.data.synthetic.base import aligned, token_names


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_one_name_an_id(task):
    names = token_names(task())
    assert len(set(names)) == len(names) == task().num_tokens


def test_lines_read_back_to_the_sample():
    task = NoisyRecall()
    names = token_names(task)
    inputs, targets = generate(task, "test", 3)
    for row, answers in zip(inputs, targets, strict=True):
        lines = aligned(task, row, answers, width=60)
        assert all(len(line) <= 60 for pair in lines for line in pair) and len(lines) > 5
        above, below = (" ".join(part).split() for part in zip(*lines, strict=True))
        assert [names.index(name) for name in above] == row.tolist()
        assert [IGNORE if name == "." else names.index(name) for name in below] == answers.tolist()
        for top, bottom in lines:
            starts = [index for index in range(len(top)) if top[index] != " " and (index == 0 or top[index - 1] == " ")]
            assert all(bottom[index] != " " for index in starts)


def test_names():
    task = NoisyRecall()
    line = aligned(task, np.array([3, 9, 20]), np.array([9, IGNORE, IGNORE]))
    assert line == [("k3 v1 n4", "v1 .  .")]
