"""Settings of a training in their places of 0.1.0: refused where they are written, read in folders."""

import pytest

from linnet.config import ConfigError, parse
from linnet.parallel import ParallelConfig
from linnet.study import StudyConfig
from linnet.study.ladder import plan
from linnet.train import TrainConfig, read_training
from linnet.train.config import MOVED, RunConfig, present

MODEL = {"d_model": 16, "layout": "tnl+sglu", "options": {"tnl": {"num_heads": 2}}}
OLD = {
    "device": "cpu",
    "compile": True,
    "recompute": "block",
    "sinks": ["tensorboard"],
    "log_every": 3,
    "checkpoint_every": 4,
    "keep_checkpoints": 5,
    "evaluate_every": 6,
    "peak_tflops": 0.5,
}
STUDY = {"name": "old", "architectures": ["tnl"], "tokens": [2000], "sizes": [[16, 1]]}


def test_every_old_place_is_tried_here():
    new = {"checkpoint_minutes", "async_save", "graph", "keep_best"}  # since 0.2.0
    assert OLD.keys() == MOVED.keys() and set(MOVED.values()) | new == RunConfig.model_fields.keys()


@pytest.mark.parametrize(
    "read, values, prefix",
    [
        (read_training, {"model": MODEL, **OLD}, ""),
        (lambda values: plan(parse(StudyConfig, values), check_data=False), {**STUDY, "train": OLD}, "train."),
    ],
)
def test_top_level_keys_are_unknown_and_the_error_says_where_they_go(read, values, prefix):
    with pytest.raises(ConfigError) as caught:
        read(values)
    assert [line.partition(":")[0] for line in caught.value.problems] == [prefix + key for key in OLD]
    for line, new in zip(caught.value.problems, MOVED.values(), strict=True):
        assert "unknown key" in line and f"`run.{new}`" in line


def test_keys_of_folders_move_below_what_is_set_under_run():
    values = present({"model": {**MODEL, "tpe": {"num_modes": 4}}, **OLD, "run": {"log_every": 9}})
    assert values["run"] == {MOVED[key]: value for key, value in OLD.items()} | {"log_every": 9}
    assert values.keys() == {"model", "run"} and values["model"]["layout"] == "tpe tnl+sglu"
    assert parse(TrainConfig, values).run.loggers == ["tensorboard"]
    assert present({"run": 3, "device": "cpu"}) == {"run": 3}  # which parsing reports


def test_an_empty_parallel_is_the_default():
    for given in ({}, None):
        assert parse(TrainConfig, {"model": MODEL, "parallel": given}).parallel == ParallelConfig()
