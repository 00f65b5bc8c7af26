"""Runs of a study that take several devices each."""

import pytest

from linnet.config import ConfigError, parse
from linnet.runs import RunFolder
from linnet.study import StudyConfig, run_study
from linnet.study.executors import ExecutorConfig, LocalPool, make_executor, worker_slots

pytestmark = pytest.mark.system


def test_runs_on_two_processes_each_end_with_the_losses_of_one(tiny, tmp_path):
    small = tiny | {"architectures": ["tnl"], "sizes": [[16, 1]], "budgets": [1e8]}
    small["train"] = {"evaluate_tokens": 1024, "run": {"device": "cpu"}}
    alone = run_study(parse(StudyConfig, small), tmp_path / "alone")
    many = small | {"executor": {"kind": "local", "workers": 1, "threads": 1}}
    many["train"] = small["train"] | {"parallel": {"dp_shard": 2}}
    both = run_study(parse(StudyConfig, many), tmp_path / "both")
    (one,), (two,) = alone.rows, both.rows
    assert two["status"] == "done" and two["run"] == one["run"], "parallel is not part of a run's name"
    assert two["loss"] == pytest.approx(one["loss"], rel=2e-6)
    settings = RunFolder(both.folder / two["path"]).config
    assert settings["parallel"]["dp_shard"] == 2


def test_more_devices_than_there_are_are_refused_before_anything_starts(tiny, tmp_path):
    for kind in ("inline", "local"):
        train = tiny["train"] | {"parallel": {"dp_shard": 4, "sp": 256}, "run": {"device": "cpu"}}
        many = tiny | {"train": train, "executor": {"kind": kind}}
        with pytest.raises(ConfigError, match="train.parallel: asks for 1024 devices per run, this machine has"):
            run_study(parse(StudyConfig, many), tmp_path)
    assert not list(tmp_path.iterdir())


def test_workers_of_the_pool_get_disjoint_groups_of_gpus(monkeypatch):
    monkeypatch.setattr("linnet.study.executors._visible_gpus", lambda: ["0", "1", "2", "3", "4"])
    pool = make_executor(ExecutorConfig(kind="local"), devices=2)
    assert isinstance(pool, LocalPool) and pool.workers == worker_slots(ExecutorConfig(), 2) == 2
    assert pool.devices == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="6 devices per run, this machine has 5 GPUs"):
        make_executor(ExecutorConfig(kind="inline"), devices=6)
