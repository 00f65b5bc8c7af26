"""`linnet runs`: what it lists, which rows it shows, and what it must never remove."""

import csv
import io
import json
import os
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.runs import RunFolder, overview


def call(*arguments: str, code: int = 0, **options) -> str:
    result = CliRunner().invoke(app, ["runs", *map(str, arguments)], **options)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def make(path: str, result: dict | None = None, rows: int = 3, **config) -> RunFolder:
    run = RunFolder(path)
    values = {"architecture": "tnl", "steps": 10, "optimizer": {"learning_rate": 1e-3}, "model": {}} | config
    run.write_config(values, "0123456789ab")
    with run.record() as record:
        for step in range(1, rows + 1):
            record.write({"step": step, "tokens": 32 * step, "loss": 5.0 - step, "seconds": 1.0})
    if result is not None:
        run.write_result(
            {
                "status": "done",
                "architecture": "tnl",
                "run": {"device": "cpu"},
                "steps": 10,
                "loss": 2.0,
                "params_non_embedding": 12_300,
            }
            | result
        )
    return run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two folders where runs are: a folder of runs, and a study."""
    monkeypatch.chdir(tmp_path)
    make("runs/a", {"loss": 2.5}, seed=1)
    make("runs/b", {"loss": 1.5, "status": "diverged", "train_loss": None}, seed=2)
    make("runs/c")
    make("studies/demo/runs/d", {"loss": 2.25, "architecture": "hgrn2"})
    make("runs/e").write_error("out of memory")
    (make("runs/f").path / "result.json").write_text("{}")
    (make("runs/model").path / "model.safetensors").write_text("")
    return tmp_path


def test_lists_every_run_with_its_state(place):
    rows = {row["run"]: row for row in json.loads(call("--json"))}
    states = {"a": "done", "b": "diverged", "c": "unfinished", "d": "done", "e": "failed", "f": "damaged"}
    assert {name: row["status"] for name, row in rows.items()} == states
    assert (rows["c"]["step"], rows["c"]["steps"], rows["c"]["train_loss"], rows["c"]["loss"]) == (3, 10, 2.0, None)
    assert rows["d"]["path"] == "studies/demo/runs/d" and rows["a"]["bytes"] > 100
    shown = call(env={"COLUMNS": "120"})
    assert all(word in shown for word in ("12.3k", "3/10", "2.2500", "diverged"))
    assert [row["run"] for row in json.loads(call("list", "runs/a", "studies", "--json", "--sort", "run"))] == [
        "a",
        "d",
    ]


def test_runs_of_two_tokenizers_are_listed_with_bits_per_byte(place):
    make("runs/bytes", {"loss": 1.386, "bits_per_byte": 2.0})
    make("runs/more", {"loss": 1.393, "bits_per_byte": 2.01})
    assert "bits/byte" not in call(env={"COLUMNS": "200"})
    make("runs/words", {"loss": 4.0, "bits_per_byte": 2.125})
    shown = call(env={"COLUMNS": "200"})
    assert "bits/byte" in shown and "2.1250" in shown
    assert "bits/byte" not in call("list", "--columns", "run,loss", env={"COLUMNS": "200"})


def test_sorts_filters_and_chooses_columns(place):
    text = call("--where", "status=d*", "--where", "loss<2.6", "--sort", "loss", "--columns", "run,loss,seed", "--csv")
    assert list(csv.reader(io.StringIO(text)))[1:] == [["b", "1.5", "2"], ["d", "2.25", ""], ["a", "2.5", "1"]]
    keys = ("--where", "optimizer.learning_rate>=1e-3", "--where", "architecture!=tnl", "--json")
    assert [row["run"] for row in json.loads(call(*keys))] == ["d"]
    last = json.loads(call("--sort", "loss", "--reverse", "--limit", "5", "--json", "--columns", "run"))
    assert [row["run"] for row in last][:2] == ["d", "b"]  # runs without a loss come last
    said = call("--where", "loss<low", "--where", "status", "--sort", "los", code=2)
    assert "3 problems" in said and "'low' is not a number" in said and "did you mean 'loss'" in said
    assert "no run meets" in CliRunner().invoke(app, ["runs", "--where", "status=gone"]).stderr
    assert "no such folder" in call("nowhere", code=2)


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_whole_in_narrow_terminals(tmp_path, monkeypatch, columns, terminal):
    monkeypatch.chdir(tmp_path)
    name = "lightnet-no-tpe-with-a-long-label-0123456789ab"
    make(f"runs/{name}", {"loss": 2.5, "tokens": 123_456_789, "seconds": 4000.0, "params_non_embedding": 12_345_678})
    monkeypatch.setenv("COLUMNS", str(columns))
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    text = re.sub("\x1b\\[[0-9;]*m", "", call())
    assert name in text and "done" in text and "2.5000" in text
    assert ("123M" in text) == (not terminal or columns == 200)
    assert ("no room for changed" in text) == (terminal and columns < 200)


def test_tail_shows_the_last_rows_and_follows_until_the_run_ends(place):
    run = make("runs/long", rows=5000)
    assert [json.loads(line)["step"] for line in call("tail", run.path, "-n", "3", "--json").splitlines()] == [
        4998,
        4999,
        5000,
    ]
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"event": "loss_spike", "step": 5001}\n{"step": 5002, "lo')
    assert "loss_spike" in call("tail", run.path, "-n", "1")
    if (pid := os.fork()) == 0:
        time.sleep(0.1)
        with run.record() as record:
            record.write({"step": 5003})
        time.sleep(0.5)
        run.write_result({"status": "done"})
        os._exit(0)
    assert '{"step": 5003}' in call("tail", run.path, "--follow", "--json", "-n", "1").splitlines()
    os.waitpid(pid, 0)


def test_remove_asks_and_follows_no_link(place):
    outside = place / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    (run := Path("runs/a")).joinpath("checkpoints").symlink_to(outside)
    run.joinpath("notes.txt").write_text("mine")
    for name in ("plugins", "errors", "pictures", "report", "samples"):  # of an own mixer, several devices, images
        run.joinpath(name).mkdir()
    RunFolder(run).write_progress(1.0)
    said = call("remove", "runs/a", "runs/c/", code=1, input="n\n")
    assert "and notes.txt, which Linnet did not write" in said and "nothing was removed" in said and run.exists()
    assert call("remove", "runs/a", "runs/c", input="y\n").split()[-2:] == ["runs/a", "runs/c"]
    assert not run.exists() and not Path("runs/c").exists() and (outside / "kept").exists() and Path("runs/b").exists()
    call("remove", "runs/b", "--yes")
    assert not Path("runs/b").exists()


@pytest.mark.parametrize("removed", range(4))
def test_a_removal_that_is_stopped_at_any_file_goes_on(place, monkeypatch, removed):
    unlink, done = os.unlink, []

    def stop(path):
        if len(done) == removed:
            raise KeyboardInterrupt
        done.append(unlink(path))

    with RunFolder("runs/a").lock():
        pass
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", stop)
        call("remove", "runs/a", "--yes", code=130)
    assert len(done) == removed and Path("runs/a").exists()
    call("remove", "runs/a", "--yes")
    assert not Path("runs/a").exists()


def test_a_removal_that_is_stopped_says_which_runs_to_name_again(place, monkeypatch):
    remove = overview.remove

    def stop_at_the_second(path):
        if path == Path("runs/b"):
            raise KeyboardInterrupt
        remove(path)

    monkeypatch.setattr(overview, "remove", stop_at_the_second)
    said = call("remove", "runs/a", "runs/b", "runs/c", "--yes", code=130)
    assert "runs/a\n" in said and "runs that were printed are removed; name the others again" in said
    assert not Path("runs/a").exists() and Path("runs/b").exists() and Path("runs/c").exists()


def test_remove_refuses_what_is_no_run_or_in_use(place, monkeypatch):
    Path("link").symlink_to("runs/a")
    Path("other").mkdir()
    Path("other/config.yaml").write_text("mine: 1\n")
    make("runs/e/inner")
    cases = {
        "link": "is a link",
        "other": "is not a run folder",
        "runs": "is not a run folder",
        "runs/e": "contains other",
    }
    said = call("remove", *cases, "runs/a", "--yes", code=2)
    assert all(f"{path}: {reason}" in said for path, reason in cases.items()) and Path("runs/a/config.yaml").exists()
    with RunFolder("runs/c").lock(), RunFolder("studies/demo").lock():
        assert [row["status"] for row in json.loads(call("runs/c", "--json"))] == ["running"]
        said = call("remove", "runs/c", "studies/demo/runs/d", "--yes", code=2)
        assert f"runs/c: is in use (process {os.getpid()})" in said and "studies/demo: is in use" in said
    monkeypatch.chdir("runs/a")
    assert "is the folder that you are in" in call("remove", ".", "--yes", code=2)


def test_a_word_that_is_neither_a_command_nor_a_path_is_refused_with_the_nearest_command(place):
    for word, meant in (("rm", "remove"), ("ls", "list"), ("tial", "tail")):
        assert f"{word}: no such command or path; did you mean" in (said := call(word, "X", code=2))
        assert said.rstrip().endswith(f"runs {meant}?"), said
    said = call("remove", "X", "other", code=2)
    assert "2 problems" in said and "removed nothing" in said
    study = CliRunner().invoke(app, ["study", "tuen", "my.yaml"])
    assert study.exit_code == 2 and "study tune?" in study.stderr
    Path("rm").mkdir()
    assert "no such command" not in call("rm")


def test_a_lock_of_a_killed_process_is_not_in_use(place):
    (Path("runs/a") / ".lock").write_text("99999999")
    assert RunFolder("runs/a").owner() is None and RunFolder("runs/c").owner() is None


def test_a_current_folder_that_was_removed_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = CliRunner().invoke(app, ["train", "--model", "tnl-10m"])
    assert result.exit_code == 2 and "the current folder was removed" in result.stderr
