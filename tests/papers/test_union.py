"""The table of an item holds the work of every call: of other steps, of other seeds, at the same time, after a kill."""

import io
import json
import multiprocessing
import os
import re
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from reproduce_items import make_items
from rich.console import Console
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.papers.library import read_library
from linnet.papers.prepare import prepare
from linnet.papers.run import COSTS, RESULT, run
from linnet.papers.table import Request
from linnet.papers.verbs import base, models, train
from linnet.runs import RunFolder
from linnet.runs.folder import LockedError
from linnet.study import runner

ITEM = """
title: a study, trainings and what follows them
state: complete
published:
  source: Table 3
  columns: {loss: nats, niah: score, parameters: millions, alpha: exponent}
  rows: {tnl: {}, attention: {}, llama: {}, tnl-10m: {}}
claims: [tnl < attention on loss]
reduced:
  minutes: 1
  seeds: [0, 1]
  differs: it is small
  steps:
    - verb: train
      config: &train
        {seq_len: 32, batch_size: 4, steps: 3, optimizer: {learning_rate: 3e-3}, evaluate_tokens: 1024,
         data: {source: TEXT, tokenizer: byte}}
      vary:
        tnl: {model: {layout: tnl+sglu, d_model: 16}}
        attention: {model: {layout: attention+swiglu, d_model: 16}}
    - verb: evaluate
      of: train
      config: {needle: {lengths: [256], depths: [0.0], samples: 1, digits: 1}}
      columns: {niah: needle-easy.niah_score}
STUDY    - verb: models
      config: {recipes: [tnl-10m]}
      columns: {parameters: params_total / 1e6}
"""
STUDY = """\
    - verb: study
      config: study/demo-quick.yaml
      set: {budgets: [1e9], sizes: [[8, 1, 2]], tokens_per_param: [1, 1000], data.source: TEXT, executor.workers: 1,
            train.evaluate_tokens: 2048, architectures: [{name: llama, family: llama}]}
"""


@pytest.fixture(scope="module", params=["", pytest.param(STUDY, marks=pytest.mark.thorough)], ids=["train", "study"])
def library(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    make_items(folder)
    item = ITEM.replace("STUDY", request.param).replace("TEXT", str(folder / "text.txt"))
    (folder / "items" / "900" / "table3.yaml").write_text(item)
    return read_library(folder / "items")


def call(library, out, seeds=(), only=()):
    (work,) = prepare(library, library.find("900", ["table3"]), Request(out=out, seeds=seeds, only=only))
    return run(work)


@pytest.fixture(scope="module")
def whole(library, tmp_path_factory):
    """(out, result) of one call for everything."""
    out = tmp_path_factory.mktemp("whole")
    return out, call(library, out)


def test_runs_of_a_study_that_fail_end_the_command_with_code_1(tmp_path, monkeypatch):
    make_items(tmp_path)
    item = ITEM.partition("    - verb: train")[0] + STUDY + "    - {verb: models, config: {recipes: [tnl-10m]}}\n"
    item = item.replace("TEXT", str(tmp_path / "text.txt")).replace("executor.workers: 1", "executor.kind: inline")
    (tmp_path / "items" / "900" / "table3.yaml").write_text(item.replace("seeds: [0, 1]", "seeds: [0]"))
    folders = ["--items", str(tmp_path / "items"), "--out", str(tmp_path / "out")]
    command = ["reproduce", "900", "table3", *folders]
    with monkeypatch.context() as patched:
        patched.setattr(runner, "_train_alone", lambda *arguments: 1 / 0)
        failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 1 and re.search("1 run failed; see .*error.txt", failed.output), failed.output
    (result,) = (tmp_path / "out").glob(f"*/*/{RESULT}")
    (path,) = json.loads(result.read_text())["failed"]
    assert "ZeroDivisionError" in (result.parent / path / "error.txt").read_text()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and json.loads(result.read_text())["failed"] == [], again.output


def test_calls_of_steps_and_seeds_add_up_to_the_table_of_one_call(library, whole, tmp_path):
    (first_step, row) = ("study", "llama") if "study" in whole[1]["steps"] else ("train", "tnl")
    first = call(library, tmp_path, (1,), (first_step,))
    assert first["seeds"] == [1] and first["rows"][row]["loss"]["values"].keys() == {"1"}
    assert first["skipped"]["evaluate"] == "left out by --only"
    call(library, tmp_path, (0,), (first_step, "models"))
    call(library, tmp_path, (1,), ("evaluate",))
    last = call(library, tmp_path, (0,), ("evaluate",))
    assert last == whole[1] and not last["skipped"] and not last["notes"]
    assert last["rows"]["tnl"]["niah"]["values"].keys() == {"0", "1"}
    place = "own-900-table3/reduced"
    assert (tmp_path / place / RESULT).read_bytes() == (whole[0] / place / RESULT).read_bytes()
    if first_step == "study":
        plans = [json.loads((out / place / "study" / "plan.json").read_text()) for out in (tmp_path, whole[0])]
        assert plans[0] == plans[1] and {one["seed"] for one in plans[0]["runs"]} == {0, 1}
    assert set(json.loads((tmp_path / place / COSTS).read_text())["seconds"]) == set(last["steps"])


def test_a_step_with_another_configuration_leaves_the_table(library, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    entry = library.items["900", "table3"]
    steps = list(entry.item.reduced.steps)
    steps[0] = steps[0].model_copy(update={"set": {"steps": 2}})
    form = entry.item.reduced.model_copy(update={"steps": steps})
    changed = replace(entry, item=entry.item.model_copy(update={"reduced": form}))
    (work,) = prepare(library, [changed], Request(out=tmp_path, seeds=(1,), only=("train",)))
    result = run(work)
    assert result["rows"]["tnl"]["loss"]["values"].keys() == {"1"}
    assert "measured" not in result["rows"]["tnl"]["niah"]  # the evaluations are of other models
    assert result["rows"]["llama"] == whole[1]["rows"]["llama"]


def test_a_seed_with_other_text_leaves_the_table(library, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "out")
    text = library.items["900", "table3"].path.parents[2] / "text.txt"
    before = text.read_text()
    try:
        text.write_text(before.replace("1", "2"))
        result = call(library, tmp_path / "out", (1,), ("train",))
        if "study" in whole[1]["steps"]:  # its folder has one text, so the rows stay
            with pytest.raises(ConfigError, match="the text has changed"):
                call(library, tmp_path / "out", (1,), ("study",))
            kept = json.loads((tmp_path / "out" / "own-900-table3" / "reduced" / RESULT).read_text())
            assert kept["rows"]["llama"] == whole[1]["rows"]["llama"]
    finally:
        text.write_text(before)
    assert result["rows"]["tnl"]["loss"]["values"].keys() == {"1"}
    assert call(library, tmp_path / "out", (0, 1), ("train",))["rows"]["tnl"] == whole[1]["rows"]["tnl"]


def work_of(library, out, seed, kept=None):
    """One call for a seed. With `kept` it says so when its first training is recorded, and does nothing more."""
    import torch

    torch.set_num_threads(1)
    if kept is not None:
        trained = train.train

        def train_once(*arguments):
            if recorded.pop():
                return trained(*arguments)
            kept.set()
            signal.pause()

        recorded = [False, True]
        train.train = train_once  # in this process alone
    call(library, out, (seed,))


def test_two_calls_at_the_same_time_and_a_kill_between(library, whole, tmp_path):
    context = multiprocessing.get_context("fork")
    make, kept = context.Process, context.Event()
    both = [make(target=work_of, args=(library, tmp_path, seed, event)) for seed, event in ((0, None), (1, kept))]
    for one in both:
        one.start()
    folder = tmp_path / "own-900-table3" / "reduced"
    assert kept.wait(120)
    os.kill(both[1].pid, signal.SIGKILL)
    for one in both:
        one.join(120)
    assert both[0].exitcode == 0 and both[1].exitcode == -signal.SIGKILL
    half = json.loads((folder / RESULT).read_text())
    assert "0" in half["rows"]["tnl"]["loss"]["values"]
    assert "1 planned run is not finished" in " ".join(half["notes"])
    both = [make(target=work_of, args=(library, tmp_path, seed)) for seed in (0, 1)]
    for one in both:
        one.start()
    for one in both:
        one.join(120)
    assert [one.exitcode for one in both] == [0, 0]
    assert (folder / RESULT).read_bytes() == (whole[0] / "own-900-table3" / "reduced" / RESULT).read_bytes()
    assert RunFolder(folder).owner() is None


@pytest.mark.parametrize("error", [RuntimeError("a kernel broke"), ConfigError(["steps: 0 is too few; use 1"], "x")])
def test_a_step_that_fails_stops_its_followers_alone(library, whole, tmp_path, monkeypatch, error):
    def broken(*_, **__):
        raise error

    with monkeypatch.context() as patched, pytest.raises(type(error)) as raised:
        patched.setattr(train, "train", broken)
        call(library, tmp_path)
    result = json.loads((tmp_path / "own-900-table3" / "reduced" / RESULT).read_text())
    assert result["rows"]["tnl-10m"] == whole[1]["rows"]["tnl-10m"] and "evaluate" in result["skipped"]
    assert any("train: 4 planned runs are not finished" in note for note in result["notes"])
    shown = "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "train, evaluate failed" in shown and str(tmp_path) in shown
    assert call(library, tmp_path) == whole[1]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ConfigError(["a file is damaged"], "x")])
def test_results_that_cannot_be_collected_leave_the_table_alone(library, whole, tmp_path, monkeypatch, error):
    """A fit of too few runs, or a damaged file: of a step of this call it is an error, else only a reason."""
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)

    def broken(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(models, "collect", broken)
        with pytest.raises(type(error)) as raised:
            call(library, tmp_path, only=("models",))
        result = call(library, tmp_path, only=("train",))
    assert result["skipped"]["models"].startswith("it failed: ")
    assert result["rows"]["tnl"] == whole[1]["rows"]["tnl"]
    shown = "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "models failed" in shown and str(tmp_path) in shown
    assert call(library, tmp_path) == whole[1]


def test_other_seeds_of_other_data_leave_the_table_with_a_word(tmp_path):
    step = SimpleNamespace(name="train")
    job = SimpleNamespace(folder=tmp_path, step=step, digest="d1", where="000 table1", notes=())
    console = Console(file=io.StringIO(), width=200)
    for seed, work in ((0, "old"), (1, "old"), (1, "new")):
        base.write_planned(job, seed, work, {}, console)
    assert [(one.seed, one.work) for one in base.read_planned(job)] == [(1, "new")]
    [line] = console.file.getvalue().splitlines()
    assert line.startswith("000 table1: seed 0 was made with other data")


@pytest.mark.parametrize("times", [1, 2])
def test_waiting_for_a_lock_is_said_once(tmp_path, monkeypatch, times):
    monkeypatch.setattr("linnet.runs.folder.POLL", 0)
    held = iter([LockedError(tmp_path, "12")] * times)

    def work() -> int:
        for error in held:
            raise error
        return 7

    console = Console(file=io.StringIO(), width=500)
    assert base.patiently(work, console) == 7
    assert console.file.getvalue().count("waiting: ") == 1
