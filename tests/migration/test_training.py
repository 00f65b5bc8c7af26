"""Settings of a training in their places of 0.1.0: read for one release, with one warning each."""

import warnings

import pytest

from linnet.cli.study import _settings as study_settings
from linnet.cli.train import _settings as train_settings
from linnet.config import ConfigError, override, parse, parse_yaml
from linnet.deprecation import LinnetDeprecationWarning
from linnet.parallel import ParallelConfig
from linnet.study import StudyConfig
from linnet.study.ladder import plan
from linnet.train import TrainConfig
from linnet.train.config import MOVED, RunConfig

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


def same_warnings(caught: list, prefix: str = "") -> None:
    """One warning for each old key, which names the old place and the new."""
    told = [str(one.message) for one in caught]
    assert len(told) == len(OLD)
    for old, new in MOVED.items():
        assert sum(f"`{prefix}{old}`" in text and f"`{prefix}run.{new}`" in text for text in told) == 1


def test_every_old_place_is_tried_here():
    new = {"checkpoint_minutes", "async_save", "graph", "keep_best"}  # since 0.2.0
    assert OLD.keys() == MOVED.keys() and set(MOVED.values()) | new == RunConfig.model_fields.keys()


def test_top_level_keys_in_yaml():
    text = parse_yaml(f"model: {MODEL}\n" + "".join(f"{key}: {value}\n" for key, value in OLD.items()))
    with pytest.warns(LinnetDeprecationWarning) as caught:
        config = parse(TrainConfig, text)
    same_warnings(caught)
    assert config.run == RunConfig(**{MOVED[key]: value for key, value in OLD.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(TrainConfig, config.model_dump(mode="json")) == config


def test_top_level_keys_in_set():
    values = override({"model": MODEL, "run": {"compile": True}}, ["log_every=7", "device=cpu"])
    with pytest.warns(LinnetDeprecationWarning) as caught:
        run = parse(TrainConfig, values).run
    assert len(caught) == 2 and (run.log_every, run.device, run.compile) == (7, "cpu", True)


@pytest.mark.parametrize(
    ("written", "given"), [("run: {log_every: 2}", "log_every=7"), ("log_every: 2", "run.log_every=7")]
)
def test_set_wins_over_the_file_whichever_place_each_names(tmp_path, written, given):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {MODEL}\n{written}")
    with pytest.warns(LinnetDeprecationWarning, match=r"run\.log_every"):
        config = train_settings(file, None, None, None, None, [given, "run.compile=true"], tmp_path)
    assert (config.run.log_every, config.run.compile) == (7, True)


def test_set_of_an_old_place_wins_over_a_study(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(
        "name: one\narchitectures: [tnl]\nsizes: [[32, 2], [64, 3]]\nbudgets: [1e9]\n"
        "train: {run: {log_every: 2, device: cpu}}"
    )
    config = study_settings(file, None, None, None, None, ["train.log_every=7"], tmp_path)
    assert config.train == {"run": {"device": "cpu"}, "log_every": 7}


def test_python_keywords_and_attributes():
    with pytest.warns(LinnetDeprecationWarning, match=r"`device`.*`run\.device`") as caught:
        config = TrainConfig(model=MODEL, device="cpu")
    assert caught[0].filename == __file__ and config.run.device == "cpu"
    with pytest.warns(LinnetDeprecationWarning, match=r"TrainConfig\.run\.loggers") as caught:
        assert config.sinks == []
    assert caught[0].filename == __file__
    with pytest.warns(LinnetDeprecationWarning):
        config = TrainConfig(model=MODEL, run=RunConfig(log_every=3), device="cpu")
    assert (config.run.log_every, config.run.device) == (3, "cpu")


def test_both_places_are_an_error_that_names_both():
    with pytest.raises(ConfigError) as caught:
        parse(TrainConfig, {"model": MODEL, "log_every": 3, "run": {"log_every": 4}, "seq_len": 0})
    problems = caught.value.problems
    assert len(problems) == 2  # with the others, at once
    assert any(line.startswith("log_every:") and "`run.log_every`" in line for line in problems)


def test_a_study(tmp_path):
    (tmp_path / "text.txt").write_text("some words to read. " * 200)
    settings = {
        "name": "old",
        "architectures": ["tnl"],
        "tokens": [2000, 4000],
        "sizes": [[16, 1]],
        "seq_len": 16,
        "batch_size": 4,
        "data": {"source": [str(tmp_path / "text.txt")]},
    }
    old = {**OLD, "sinks": []}
    with pytest.warns(LinnetDeprecationWarning) as caught:
        ladder = plan(parse(StudyConfig, {**settings, "train": old}))
    same_warnings(caught, "train.")
    assert len(ladder.runs) == 2
    for run in ladder.runs:
        assert run.train.run == RunConfig(**{MOVED[key]: value for key, value in old.items()})


def test_parallel_of_0_1_0_was_empty():
    for given in ({}, None):
        assert parse(TrainConfig, {"model": MODEL, "parallel": given}).parallel == ParallelConfig()
