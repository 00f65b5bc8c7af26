"""The `parallel` block: degrees, and every check before work starts."""

import pytest

from linnet.config import parse
from linnet.models import ModelConfig
from linnet.parallel import ParallelConfig

ATTENTION = {"d_model": 32, "layout": "attention+glu x2", "options": {"attention": {"num_heads": 4}}}
WINDOW = {"d_model": 32, "layout": "attention+glu x2", "options": {"attention": {"num_heads": 2, "window": 20}}}


def problems(world, model=ATTENTION, seq_len=64, batch_size=8, **values):
    config = parse(ParallelConfig, values)
    return config.problems(world, parse(ModelConfig, model), seq_len, batch_size, 1)


@pytest.mark.parametrize(
    "world, values, expected",
    [
        (1, {}, (1, 1, 1, 1)),
        (6, {}, (1, 6, 1, 1)),
        (8, {"tp": 2, "sp": 2}, (1, 2, 2, 2)),
        (8, {"dp_replicate": 2, "dp_shard": 4}, (2, 4, 1, 1)),
    ],
)
def test_degrees(world, values, expected):
    found = ParallelConfig(**values).degrees(world)
    assert (found.dp_replicate, found.dp_shard, found.sp, found.tp) == expected
    assert found.world == world and found.dp == expected[0] * expected[1]


@pytest.mark.parametrize(
    "world, values, key, fix",
    [
        (6, {"tp": 4}, "tp 4", "multiple of 4"),
        (8, {"tp": 8}, "num_heads: 4", "parallel.tp: 8"),
        (4, {"dp_shard": 2}, "dp_shard 2", "--devices 2"),
        (1, {"sp": 2}, "sp 2", "--devices"),
        (16, {}, "batch_size: 8", "batch_size >= 16"),
        (4, {"accumulation": 4}, "batch_size: 8", "parallel.accumulation"),
        (5, {"sp": 5, "dp_shard": 1}, "parallel.sp: 5", "seq_len 60"),
        (8, {"sp": 8, "dp_shard": 1}, "parallel.sp: 8", "divisor"),
    ],
)
def test_a_problem_names_the_key_and_the_fix(world, values, key, fix):
    [line] = problems(world, **values)
    assert key in line and fix in line


def test_problems_come_together():
    lines = problems(6, WINDOW, batch_size=2, sp=4, tp=1)
    assert len(lines) == 2 and "divide" in lines[0] and "window: 20" in lines[1]


def test_one_device_needs_nothing():
    assert problems(1, batch_size=1) == []
