"""Sinks are views of the record, imported only when asked for."""

import subprocess
import sys
import types

import pytest

from linnet.config import ConfigError
from linnet.train import train


def test_tensorboard_shows_the_rows(settings, cache, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(settings(loggers=["tensorboard"]), tmp_path, cache)
    events = event_accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(row["step"], pytest.approx(row["loss"])) for row in run.metrics() if "loss" in row]
    assert [event.step for event in events.Scalars("validation_loss")] == [12]


def test_tensorboard_shows_evaluations_by_name(settings, cache, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    probe = {
        "kind": "recall",
        "name": "probe",
        "tasks": ["mqar"],
        "lengths": [32],
        "pairs": [4],
        "every": 6,
        "samples": 2,
    }
    run = train(settings(loggers=["tensorboard"], evaluations=[probe]), tmp_path, cache)
    events = event_accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    found = [(row["step"], row["metrics"]["mqar"]) for row in run.metrics() if "evaluation" in row]
    assert [(event.step, pytest.approx(event.value)) for event in events.Scalars("probe/mqar")] == found
    assert [step for step, _ in found] == [6, 12]
    assert len(events.Scalars("seconds")) == sum("loss" in row for row in run.metrics()), "of training alone"


def test_wandb_gets_the_rows_under_the_name_of_the_run(settings, cache, tmp_path, monkeypatch):
    calls = []

    class Fake:
        def log(self, values, step):
            calls.append(("log", step, values))

        def finish(self):
            calls.append(("finish",))

    def init(**options):
        calls.append(("init", options))
        return Fake()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = settings(loggers=["wandb"])
    run = train(config, tmp_path, cache)
    options = calls[0][1]
    assert options["id"] == run.path.name and options["resume"] == "allow"
    assert options["config"] == run.config
    rows = [row for row in run.metrics()]
    numbers = [{k: v for k, v in row.items() if k != "step" and v is not None} for row in rows]
    assert calls[1:-1] == [("log", row["step"], values) for row, values in zip(rows, numbers, strict=True)]
    assert calls[-1] == ("finish",)


def test_a_missing_package_is_named_before_any_work(settings, cache, tmp_path, monkeypatch):
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        train(settings(loggers=["wandb", "tensorboard"]), tmp_path, cache)
    for line, name in zip(caught.value.problems, ("wandb", "tensorboard"), strict=True):
        assert line.startswith(f"run.loggers: {name!r} needs a package that is not installed")
        assert line.endswith(f"pip install {name}, or drop it")
    assert not list(tmp_path.iterdir())


def test_nothing_optional_is_imported():
    code = "import sys, linnet.train; print({'wandb', 'tensorboard', 'rich', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
