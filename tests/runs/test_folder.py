"""The run folder: named by what it holds, one writer at a time, done when the result is there."""

import math
import os
import signal

import pytest

from linnet.config import ConfigError, digest
from linnet.runs import LockedError, RunFolder
from linnet.runs.overview import describe

CONFIG = {"name": "", "architecture": "tnl", "steps": 10, "rate": 3e-4, "model": {"d_model": 64, "tpe": None}}


def test_the_name_is_the_hash_of_the_configuration(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG)
    assert run.path.name == f"tnl-{digest(CONFIG)}"
    assert run.config == CONFIG
    assert RunFolder.create(tmp_path, CONFIG).path == run.path
    assert RunFolder.create(tmp_path, {**CONFIG, "steps": 11}).path != run.path
    assert RunFolder.name({**CONFIG, "name": "My run / 2"}).startswith("My-run-2-")
    assert RunFolder.name({"steps": 1}) == digest({"steps": 1})


def test_an_edited_configuration_is_refused(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG)
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("steps: 10", "steps: 20"))
    with pytest.raises(ConfigError, match="config.yaml"):
        RunFolder.create(tmp_path, CONFIG)


def test_what_killed_writers_left_is_removed(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG)
    (run.path / ".result.json.77.tmp").write_text('{"half": ')
    (run.checkpoint_folder / ".step-00000020.77.tmp").mkdir(parents=True)
    assert not run.done and run.checkpoints() == []
    run.clean()
    assert sorted(os.listdir(run.path)) == ["checkpoints", "config.yaml"] and not os.listdir(run.checkpoint_folder)


def test_open_needs_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"config.yaml"):
        RunFolder.open(tmp_path)
    with pytest.raises(ConfigError, match=r"none"):
        RunFolder.open(tmp_path / "none")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="linnet convert .*exported"):
        RunFolder.open(tmp_path / "exported")
    made = RunFolder.create(tmp_path / "study" / "runs", CONFIG).path
    for holder in (made.parent, made.parent.parent):
        with pytest.raises(ConfigError, match=f"{made}"):
            RunFolder.open(holder)
    assert RunFolder.open(RunFolder.create(tmp_path, CONFIG).path).config == CONFIG


def test_the_result_makes_it_done(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match=run.path.name):
        run.result()
    run.write_error("it broke")
    assert run.error() == "it broke" and not run.done
    run.write_result({"status": "diverged", "loss": math.nan, "flops": 1e12})
    assert run.done and run.error() is None
    assert run.result() == {"status": "diverged", "loss": None, "flops": 1e12}
    assert sorted(os.listdir(run.path)) == ["config.yaml", "result.json"]
    for text in ("{}", "[]", "[" * 100_000, '{"status": 3}'):
        (run.path / "result.json").write_text(text)
        with pytest.raises(ConfigError, match="result.json: is damaged"):
            run.result()
    (run.path / "result.json").write_text('{"status": "do')
    with pytest.raises(ConfigError, match="result.json: "):
        run.result()


def test_one_process_at_a_time(tmp_path, in_child):
    run = RunFolder.create(tmp_path, CONFIG)

    def lock() -> str:
        try:
            with RunFolder(run.path).lock():
                return "got it"
        except LockedError as error:
            return str(error)

    with run.lock():
        assert str(os.getpid()) in in_child(lock)
        with pytest.raises(LockedError), run.lock():
            pass
    assert in_child(lock) == "got it"


def test_a_lock_that_leads_elsewhere_overwrites_nothing(tmp_path):
    run, other = RunFolder.create(tmp_path, CONFIG), tmp_path / "other"
    other.write_text("mine")
    for make in (lambda path: path.symlink_to(other), lambda path: path.symlink_to(tmp_path / "new"), os.mkfifo):
        (run.path / ".lock").unlink(missing_ok=True)
        make(run.path / ".lock")
        with pytest.raises(ConfigError, match=r"\.lock: is not a file"), run.lock():
            pass
    assert other.read_text() == "mine" and not (tmp_path / "new").exists()


def test_a_killed_process_gives_the_lock_back(tmp_path, in_child):
    run = RunFolder.create(tmp_path, CONFIG)

    def die():
        run.lock().__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == ""
    with run.lock():
        pass


@pytest.mark.parametrize(
    "values", [{"steps": "8"}, {"steps": 1.5}, {"tokens": {}}, {"seconds": []}, {"loss": "low"}, {"flops": True}]
)
def test_a_result_of_wrong_kinds_is_damaged(tmp_path, values):
    run = RunFolder.create(tmp_path, {"architecture": "tnl"})
    run.write_result({"status": "done", "steps": 8, "loss": None} | values)
    with pytest.raises(ConfigError, match=rf"result.json: is damaged \({next(iter(values))} is not a number"):
        run.result()
    assert describe(run)["status"] == "damaged"


def test_rows_of_wrong_kinds_end_the_record_as_damage_does(tmp_path):
    run = RunFolder.create(tmp_path, {"architecture": "tnl"})
    good = '{"step": 1, "validation_loss": 2.0}\n'
    (run.path / "metrics.jsonl").write_text(good + '{"step": 2, "validation_loss": []}\n{"step": "x", "loss": 1}\n')
    assert run.metrics() == [{"step": 1, "validation_loss": 2.0}] and run.best_step() == 1
    assert describe(run)["step"] == 1
