"""`linnet train --devices`: processes that are killed, stopped and continued, from outside."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import yaml
from children import COMMAND, Child
from folder_traps import set_traps
from typer.testing import CliRunner

from linnet.cli import app
from linnet.runs import RunFolder, checkpoint
from linnet.train.processes.launch import temporary_folder

pytestmark = pytest.mark.system

runner = CliRunner()
ROOT = Path(__file__).parents[2]
CONFIG = {
    "model": {"d_model": 32, "layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 4}}},
    "seq_len": 32,
    "batch_size": 4,
    "steps": 240,
    "evaluate_tokens": 512,
    "run": {"device": "cpu", "log_every": 10, "checkpoint_every": 10},
}


@pytest.fixture
def config(tmp_path, monkeypatch) -> Iterator[Path]:
    """A file of a training. The current folder has traps, and no process imports them."""
    (tmp_path / "current").mkdir()
    forkserver.ensure_running()  # of the test's own processes, before the current folder has traps
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    trace = set_traps(tmp_path / "current")
    text = Path(checkpoint.__file__).read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text * 3, encoding="utf-8")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"data": {"source": [str(tmp_path / "text.txt")]}}), encoding="utf-8")
    yield path
    assert trace.read_text() == ""


class Launched:
    """`linnet train --devices` in a process, with its folder of runs."""

    def __init__(self, config: Path, devices: int):
        self.root, self._own = config.parent, config.parent / f"own-{time.monotonic_ns()}"
        self._own.mkdir()
        command = ["train", config, "--devices", devices, "--out", self.root / "runs", "--cache", self.root / "cache"]
        self.process = Child(COMMAND, *command, TMPDIR=str(self._own))

    def rows(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.root.glob("runs/*/metrics.jsonl"))

    def until(self, rows: int, seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while self.rows() < rows and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert self.rows() >= rows, self.process.output()

    def worker(self, rank: int) -> int:
        [path] = self._own.glob(f"linnet-launch-*/pid-{rank}")
        return int(path.read_text())


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_killed_rank_is_started_again_a_stop_saves_and_another_number_goes_on(config):
    launched = Launched(config, 2)
    launched.until(3)
    first = [launched.worker(rank) for rank in (0, 1)]
    os.kill(first[1], signal.SIGKILL)
    while not all(gone(pid) for pid in first):
        time.sleep(0.02)
    launched.until(launched.rows() + 3)
    second = [launched.worker(rank) for rank in (0, 1)]
    assert set(first).isdisjoint(second)
    os.kill(second[1], signal.SIGTERM)  # one rank alone: all save the same step and end
    code, text = launched.process.wait(60), launched.process.output()
    assert code == 128 + signal.SIGTERM, text
    assert all(gone(pid) for pid in second) and "Traceback" not in text
    folder = RunFolder(next((config.parent / "runs").glob("tnl-*")))
    saved = checkpoint.step_of(folder.checkpoints()[-1])
    steps = [row["step"] for row in folder.metrics() if "loss" in row]
    assert steps == list(range(10, steps[-1] + 1, 10)) and 0 <= saved - steps[-1] < 10

    again = ["train", str(config), "--out", str(config.parent / "runs"), "--cache", str(config.parent / "cache")]
    result = runner.invoke(app, again)  # the same command, on one device
    assert result.exit_code == 0 and f"continuing from step {saved:,}" in result.output
    assert folder.result()["status"] == "done" and folder.error() is None and not (folder.path / "errors").exists()


def test_a_stop_before_any_process_can_report_it_is_reported(config):
    launched = Launched(config, 2)
    while not list(launched._own.glob("linnet-launch-*/lock")) and launched.process.poll() is None:
        time.sleep(0.01)
    launched.process.send_signal(signal.SIGINT)
    code, text = launched.process.wait(60), launched.process.output()
    assert code == 130 and text.count("stopped;") == 1 and "Traceback" not in text, text


def test_the_next_start_removes_the_folder_of_a_launcher_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import time\nfrom linnet.train.processes.launch import temporary_folder\n"
    program += "with temporary_folder('linnet-launch-') as folder:\n    (folder / 'pid-0').touch()\n    time.sleep(240)"
    killed = Child(program, TMPDIR=str(tmp_path))
    while not (left := list(tmp_path.glob("linnet-launch-*/pid-0"))):
        time.sleep(0.01)
    with temporary_folder("linnet-launch-") as working:
        assert left[0].exists()  # its launcher works
        killed.kill()
        assert left[0].exists()
        with temporary_folder("linnet-run-"):
            assert left[0].exists()  # of another name
        with temporary_folder("linnet-launch-") as another:
            assert sorted(tmp_path.glob("linnet-launch-*")) == sorted([working, another])
    assert not list(tmp_path.glob("linnet-[lr]*"))


def test_what_cannot_start_says_so_at_once(config):
    began = time.monotonic()
    given = ["train", str(config), "--devices", "3", "--set", "parallel.tp=2", "--set", "batch_size=1"]
    result = runner.invoke(app, given)
    assert result.exit_code == 2 and time.monotonic() - began < 10
    assert "parallel:" in result.output and "does not divide the 3 devices" in result.output
    result = runner.invoke(app, ["train", str(config), "--devices", "2", "--device", "cuda"])
    assert result.exit_code == 2 and "cuda" in result.output
    assert not (config.parent / "runs").exists()


def test_devices_under_torchrun_are_refused(config, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = runner.invoke(app, ["train", str(config), "--devices", "2"])
    assert result.exit_code == 2 and "torchrun started 4 processes" in result.output
