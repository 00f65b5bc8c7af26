"""A training under Ray Train on this machine: the result of one process, a killed worker, problems before any work."""

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.runs import RunFolder
from linnet.train import TrainConfig, resolve, train
from linnet.train.processes.cluster import train_on_ray, work, workers_of

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


def config(**settings) -> TrainConfig:
    model = {"recipe": "tnl-10m", "d_model": 16, "layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 2}}}
    run = {"device": "cpu", "log_every": 1, "checkpoint_every": 4}
    values = {"name": "tiny", "model": model, "seq_len": 32, "batch_size": 4, "steps": 40, "evaluate_tokens": 512}
    return TrainConfig(**values | {"run": run, "plugins": []} | settings)


def losses(folder: RunFolder) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in folder.metrics() if "loss" in row}


@pytest.fixture
def cluster(monkeypatch):
    """Ray on this machine with two CPUs, in this process as a user's `ray start` would have it."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a process more, for machines of clouds
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield ray
    finally:
        ray.shutdown()


def test_a_killed_worker_does_not_change_the_result(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = train(config(), "alone", "cache")
    killed, rows, before = [], [], signal.getsignal(signal.SIGINT)

    def kill_one(row: dict) -> None:
        rows.append(row)
        if row.get("step", 0) >= 6 and not killed:
            for path in Path("/proc").glob("[0-9]*"):
                try:
                    environment = (path / "environ").read_bytes()
                    name = (path / "cmdline").read_bytes()
                except OSError:
                    continue
                if b"RayTrainWorker" in name and environment:
                    killed.append(int(path.name))
                    os.kill(killed[0], signal.SIGKILL)
                    return

    folder = train_on_ray(config(), "runs", "cache", "auto", (2, 2), restarts=2, progress=kill_one)
    assert killed and folder.result()["status"] == "done"
    assert signal.getsignal(signal.SIGINT) is before
    assert losses(folder).keys() == losses(alone).keys()
    assert all(loss == pytest.approx(losses(alone)[step], rel=2e-6) for step, loss in losses(folder).items())
    assert any(row.get("step") == 40 for row in rows)
    # The same command finds it done, and with one process too: the run's name does not depend on where it ran.
    assert train_on_ray(config(), "runs", "cache", "auto", (2, 2)).path == folder.path
    assert train(config(), "runs", "cache").path.absolute() == folder.path


def test_a_worker_refuses_a_plugin_that_is_another_file_there(tmp_path):
    plugin = tmp_path / "mine.py"
    text = (ROOT / "examples" / "my_mixer.py").read_text()
    plugin.write_text(text.replace('"my_mixer"', '"mixer_of_this_test"'))  # the other name may be taken
    model = {"recipe": "tnl-10m", "d_model": 16, "layout": "mixer_of_this_test+sglu x1", "options": {}}
    sent = resolve(config(plugins=[f"{plugin}:MyMixer"], model=model)).model_dump(mode="json")
    plugin.write_text(plugin.read_text() + "\n")  # another version, as a machine without the last edit has it
    settings = {"config": sent, "root": str(tmp_path / "runs"), "cache": str(tmp_path), "folder": os.getcwd()}
    work({**settings, "refused": str(tmp_path / "refused.json")})
    found = json.loads((tmp_path / "refused.json").read_text())
    assert "mine.py" in found["problems"][0] and "changed" in found["problems"][0]
    work({**settings, "folder": str(tmp_path / "missing"), "refused": str(tmp_path / "other.json")})
    assert "storage that all machines share" in json.loads((tmp_path / "other.json").read_text())["problems"][0]
    assert not (tmp_path / "runs").exists()


def test_workers():
    assert workers_of("8") == (8, 8) and workers_of("4:8") == (4, 8)
    for wrong in ("0", "8:4", "four", "4:", ":4", "-1:2"):
        with pytest.raises(ConfigError, match="--workers"):
            workers_of(wrong)


def test_counts_that_do_not_fit_are_named_before_ray_starts(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"--workers: the group may have 3 workers.*give one number"):
        train_on_ray(config(parallel={"sp": 2}), tmp_path, tmp_path, "local", (2, 4))


def test_command(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(config().model_dump(mode="json", exclude_defaults=True)))
    alone = CliRunner().invoke(app, ["train", str(file), "--workers", "2"])
    assert alone.exit_code and "--workers" in alone.stderr
    both = CliRunner().invoke(app, ["train", str(file), "--ray", "auto", "--devices", "2"])
    assert both.exit_code and "--devices" in both.stderr
    monkeypatch.setattr(pytest.importorskip("ray"), "is_initialized", lambda: False)  # other tests may have started it
    absent = CliRunner().invoke(app, ["train", str(file), "--ray", "127.0.0.1:9", "--out", str(tmp_path / "runs")])
    assert absent.exit_code and "no Ray cluster" in absent.stderr
