"""The protocol of MAD: bundles, what is on disk after a stop, and what memory and disks do to it."""

import contextlib
import csv
import dataclasses
import errno
import io
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from children import Child
from mad_folders import train_mad
from rich.console import Console

from linnet.config import ConfigError
from linnet.layers.base import load_plugin
from linnet.mad import bundle
from linnet.mad.architectures import architecture, state_size
from linnet.mad.run import bundles, estimate, mad_runs, prepare
from linnet.mad.settings import BUDGETS, Budget, GridPoint
from linnet.runs import RunFolder, checkpoint
from linnet.study.executors import ExecutorConfig
from linnet.train.together import Ensemble

SMALL = {"d_model": 16, "options": {"tnl": {"num_heads": 2}, "swiglu": {"inner": 16}}}
TASKS = ("memorization", "compression")


GRID = tuple(GridPoint(rate, decay) for rate in (1e-3, 1e-2) for decay in (0.0, 0.1))
TINY = Budget("smoke", "tiny", True, False, grid=GRID, epochs=2, batch_size=16, max_samples=40, held_out=32)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The smoke budget of two epochs of 40 samples, at four points."""
    monkeypatch.setitem(BUDGETS, "smoke", TINY)


@pytest.fixture
def models():
    return {"tnl+swiglu": architecture("tnl+swiglu", SMALL, state=0)}


def go(models, folder, **options):
    return train_mad(models, folder, **{"tasks": TASKS} | options)


def results(folder):
    """The results by run, without the moment at which they were written."""
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("runs/*/result.json")}
    return {name: {key: value for key, value in one.items() if key != "date"} for name, one in found.items()}


def test_every_run_is_trained_once_and_scored(models, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    result = go(models, tmp_path, bundle=8, console=console)
    found = results(tmp_path)
    assert len(found) == 8 and not result.failed
    for name, one in found.items():
        assert one["status"] == "done" and one["bundle"] == 4 and one["steps"] == 6
        assert 0 <= one["accuracy"] <= 1 and 0 <= one["macro_batch"] <= 1 and 0 < one["loss"] < 10
        assert one["state_size"] == state_size(models["tnl+swiglu"]) == 128
        assert one["budget"] == "smoke" and one["varied"] == "" and one["seed"] == 0
        run = RunFolder(tmp_path / "runs" / name)
        curve = run.metrics()
        assert [row["epoch"] for row in curve] == [1, 2] and curve[-1]["loss"] == pytest.approx(one["train_loss"])
        assert run.config["learning_rate"] == one["learning_rate"]
    for task in TASKS:
        own = [one for one in found.values() if one["task"] == task]
        highest = max(one["validation_accuracy"] for one in own)
        best = {one["accuracy"] for one in own if one["validation_accuracy"] == highest}
        assert result.scores["tnl+swiglu"].tasks[task].score in best
    assert not result.scores["tnl+swiglu"].comparable
    with open(tmp_path / "mad.csv", newline="") as file:
        assert {row["run"] for row in csv.DictReader(file)} == set(found)
    assert (tmp_path / "scores.csv").is_file() and "8/8" in console.file.getvalue()

    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    wider = models | {"tnl+swiglu x2": architecture("tnl+swiglu x2", SMALL, state=0)}
    assert set(go(wider, tmp_path, tasks=["memorization"]).scores) == set(wider)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert len(results(tmp_path)) == 12


def test_a_long_epoch_says_how_far_it_is(models, tmp_path, monkeypatch):
    flops_written, write = [], RunFolder.write_progress

    def spy(folder, flops):
        write(folder, flops)
        flops_written.append(folder.flops_so_far())

    monkeypatch.setattr(RunFolder, "write_progress", spy)
    monkeypatch.setattr(bundle, "INTERVAL", -1.0)
    settings = {"tasks": ["memorization"], "bundle": 1, "executor": ExecutorConfig(kind="inline")}
    go(models, tmp_path, **settings)
    [flops] = {run.flops for run in mad_runs(models, "smoke", tasks=["memorization"])}
    shares = [0, 0.2, 0.4, 0.5, 0.7, 0.9, 1]  # batches of 16, 16 and 8 of 40 samples, twice
    assert flops_written == pytest.approx([share * flops for share in shares] * 4)
    assert not list(tmp_path.rglob("progress"))


@pytest.mark.parametrize("training", ["paper", "mad-lab"])
def test_an_estimate_counts_the_samples_that_are_scored(models, tmp_path, monkeypatch, training):
    scored, score = [], Ensemble.score
    monkeypatch.setattr(Ensemble, "score", lambda self, x, *rest: scored.append(x.shape[-2]) or score(self, x, *rest))
    options = {"tasks": ["memorization"], "training": training}
    go(models, tmp_path / "run", bundle=4, **options)
    here = {"device": "cpu", "executor": ExecutorConfig(kind="inline")}
    work = prepare(models, tmp_path / "planned", budget="smoke", **here, **options)
    assert {run.scored for run in work.runs} == {sum(scored) / (2 * 40)}
    monkeypatch.setattr("linnet.mad.run.fit_line", lambda shapes, measure: (0.0, 1.0))
    assert estimate(work) == pytest.approx(sum(run.flops * (1 + run.scored / 3) for run in work.runs))


def test_a_bundle_gives_what_single_runs_give(models, tmp_path):
    go(models, tmp_path / "one", bundle=1)
    go(models, tmp_path / "all", bundle=8, seeds=[0, 1])
    single, together = results(tmp_path / "one"), results(tmp_path / "all")
    assert len(together) == 16 and {one["bundle"] for one in together.values()} == {8}
    for name, one in single.items():
        assert together[name]["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert together[name]["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)


def test_bundles_hold_one_shape_and_the_largest_come_first(models):
    runs = mad_runs(models, "full", tasks=["noisy_recall"])
    groups = bundles(runs, 24)
    assert sum(map(len, groups)) == len(runs) == 84 and all(len({run.shape for run in group}) == 1 for group in groups)
    work = [sum(run.flops for run in group) for group in groups]
    assert work == sorted(work, reverse=True) and groups[0][0].config["setting"] == "noisy_recall/seq_len=1024"
    noise = [group for group in groups if any("frac_noise" in run.config["setting"] for run in group)]
    assert [len(group) for group in noise] == [24], "settings that differ in their data share a bundle"


def test_memory_that_runs_out_halves_the_bundle(models, tmp_path, monkeypatch):
    sizes, step = [], Ensemble.step

    def limited(self, tokens, targets):
        sizes.append(self.size)
        if self.size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, tokens, targets)

    monkeypatch.setattr(Ensemble, "step", limited)
    assert not go(models, tmp_path, tasks=["memorization"], bundle=4).failed
    assert list(dict.fromkeys(sizes)) == [4, 2, 1] and len(results(tmp_path)) == 4

    def never(self, tokens, targets):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Ensemble, "step", never)
    result = go(models, tmp_path, tasks=["compression"], bundle=4)
    assert len(result.failed) == 4 and "use a larger device" in next(iter(result.failed.values()))
    name = next(iter(result.failed))
    assert "out of memory with one model" in (tmp_path / "runs" / name / "error.txt").read_text()
    assert len(results(tmp_path)) == 4


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_killed_bundle_goes_on_from_its_checkpoint_exactly(models, tmp_path, monkeypatch, epochs):
    """Killed within an epoch, after the checkpoint behind its first step, and once more in a later one."""
    monkeypatch.setitem(BUDGETS, "smoke", dataclasses.replace(BUDGETS["smoke"], epochs=4))
    go(models, tmp_path / "whole", tasks=["memorization"], bundle=4)
    monkeypatch.setattr(bundle, "SECONDS", 0.0)
    step, made = Ensemble.step, []

    def limited(self, tokens, targets):
        if len(made) == 3 * epochs + 1:  # three steps an epoch
            raise KeyboardInterrupt
        made.append(self.step_number)
        return step(self, tokens, targets)

    monkeypatch.setattr(Ensemble, "step", limited)
    with pytest.raises(KeyboardInterrupt):
        go(models, tmp_path / "killed", tasks=["memorization"], bundle=4)
    assert len(list(tmp_path.glob("killed/runs/*/checkpoints/step-*"))) == 1
    del made[:]
    with pytest.raises(KeyboardInterrupt) if epochs == 1 else contextlib.nullcontext():
        go(models, tmp_path / "killed", tasks=["memorization"], bundle=4)
    assert made[0] == 3 * epochs + 1
    monkeypatch.setattr(Ensemble, "step", step)
    go(models, tmp_path / "killed", tasks=["memorization"], bundle=4)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    assert not list(tmp_path.glob("killed/runs/*/checkpoints"))
    for path in (tmp_path / "whole" / "runs").iterdir():
        assert (tmp_path / "killed" / "runs" / path.name / "metrics.jsonl").read_text() == (
            path / "metrics.jsonl"
        ).read_text()


def test_some_runs_of_a_bundle_go_on_from_its_checkpoint(models, tmp_path, monkeypatch):
    """Four runs stop after three epochs and a step; two of them, bundled anew, go on from there."""
    monkeypatch.setitem(BUDGETS, "smoke", dataclasses.replace(BUDGETS["smoke"], epochs=4))
    monkeypatch.setattr(bundle, "SECONDS", 0.0)
    step, made, limit = Ensemble.step, [], []

    def killed(self, tokens, targets):
        if len(made) == limit[0]:
            raise KeyboardInterrupt
        made.append(self.step_number)
        return step(self, tokens, targets)

    monkeypatch.setattr(Ensemble, "step", killed)
    for size, most, begin in ((4, 10, 0), (2, 1, 10), (2, 0, 11)):  # three steps an epoch
        made[:], limit[:] = [], [most]
        with pytest.raises(KeyboardInterrupt):
            go(models, tmp_path, tasks=["memorization"], bundle=size)
        assert made[:1] == [begin] * bool(most)
    monkeypatch.setattr(Ensemble, "step", step)
    go(models, tmp_path, tasks=["memorization"], bundle=2)
    assert len(results(tmp_path)) == 4 and not list(tmp_path.glob("runs/*/checkpoints"))


@pytest.mark.parametrize("at", [1, 2, 3], ids=["first step", "within an epoch", "last step of an epoch"])
def test_a_bundle_that_is_asked_to_stop_saves_after_its_step_and_loses_nothing(models, tmp_path, monkeypatch, at):
    go(models, tmp_path / "whole", tasks=["memorization"], bundle=4)
    step, made = Ensemble.step, []

    def asked(self, tokens, targets):
        made.append(self.step_number)
        if len(made) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, tokens, targets)

    monkeypatch.setattr(Ensemble, "step", asked)
    with pytest.raises(KeyboardInterrupt):
        go(models, tmp_path / "stopped", tasks=["memorization"], bundle=4)
    assert made == list(range(at))
    go(models, tmp_path / "stopped", tasks=["memorization"], bundle=4)
    assert made == [0, 1, 2, 3, 4, 5] and results(tmp_path / "stopped") == results(tmp_path / "whole")
    for path in (tmp_path / "whole" / "runs").iterdir():
        assert (tmp_path / "stopped" / "runs" / path.name / "metrics.jsonl").read_text() == (
            path / "metrics.jsonl"
        ).read_text()


KILLED_AMONG_RESULTS = """
import os, signal, sys
from tests.mad import test_run
from linnet.runs import RunFolder
from linnet.mad.architectures import architecture
from linnet.mad.settings import BUDGETS

write, written = RunFolder.write_result, []

def killed(self, result):
    if len(written) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(self)
    write(self, result)

RunFolder.write_result = killed
BUDGETS["smoke"] = test_run.TINY
models = {"tnl+swiglu": architecture("tnl+swiglu", test_run.SMALL, state=0)}
test_run.go(models, sys.argv[1], tasks=["memorization"], bundle=4)
"""


def test_a_bundle_that_is_killed_among_its_results_trains_nothing_again(models, tmp_path, monkeypatch):
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{KILLED_AMONG_RESULTS}"
    whole = Child(program, tmp_path / "whole", 99)  # also a new process: sums may be rounded otherwise in an old one
    assert whole.wait() == 0, whole.output()
    killed = Child(program, tmp_path / "killed", 2)
    assert killed.wait() == -signal.SIGKILL and len(results(tmp_path / "killed")) == 2, killed.output()

    def never(self, tokens, targets):
        raise AssertionError("trained again")

    monkeypatch.setattr(Ensemble, "step", never)
    assert not go(models, tmp_path / "killed", tasks=["memorization"], bundle=1).failed
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    assert not list(tmp_path.glob("*/runs/*/bundle.json")) and not list(tmp_path.glob("*/runs/*/checkpoints"))


def test_a_bundle_that_fails_among_its_results_is_not_trained_again_when_it_is_retried(models, tmp_path, monkeypatch):
    write, step, made = RunFolder.write_result, Ensemble.step, []

    def once(self, result):
        if len(results(tmp_path)) == 1:
            monkeypatch.setattr(RunFolder, "write_result", write)
            raise OSError(errno.EIO, "Input/output error")
        write(self, result)

    monkeypatch.setattr(RunFolder, "write_result", once)
    monkeypatch.setattr(Ensemble, "step", lambda self, *batch: made.append(self.size) or step(self, *batch))
    retried = ExecutorConfig(kind="inline", retries=1)
    assert not go(models, tmp_path, tasks=["memorization"], bundle=4, executor=retried).failed
    assert made == [4] * 6 and len(results(tmp_path)) == 4


def test_damaged_results_of_a_bundle_are_named(models, tmp_path):
    go(models, tmp_path, tasks=["memorization"])
    path = next(tmp_path.glob("runs/*/result.json"))
    path.rename(path.with_name("bundle.json")).write_text("{")
    with pytest.raises(ConfigError, match="bundle.json: "):
        go(models, tmp_path, tasks=["memorization"])


def test_a_stop_and_a_full_disk_keep_what_has_ended(models, tmp_path, monkeypatch):
    write = RunFolder.write_result

    def fails_at(number, error):
        def limited(self, result):
            if len(results(tmp_path)) == number:
                raise error
            write(self, result)

        monkeypatch.setattr(RunFolder, "write_result", limited)

    fails_at(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        go(models, tmp_path)
    assert len(results(tmp_path)) == 3
    with open(tmp_path / "mad.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 3

    fails_at(5, OSError(errno.ENOSPC, "No space left on device"))
    failed = go(models, tmp_path, bundle=4).failed
    assert len(results(tmp_path)) == 5 and len(failed) == 3
    assert "disk" in next(iter(failed.values()))
    with pytest.raises(ConfigError, match="disk"):
        go(models, tmp_path, bundle=4)  # to write the rest

    monkeypatch.setattr(RunFolder, "write_result", write)
    assert not go(models, tmp_path).failed and len(results(tmp_path)) == 8
    assert not list(tmp_path.rglob("error.txt"))


def test_a_run_that_diverges_is_recorded(models, tmp_path, monkeypatch):
    grid = (GridPoint(1e-3, 0.0), GridPoint(1e30, 0.0))
    monkeypatch.setitem(
        BUDGETS, "smoke", Budget("smoke", "", True, False, grid, epochs=2, batch_size=16, max_samples=40, held_out=32)
    )
    result = go(models, tmp_path, tasks=["memorization"], bundle=2)
    by_rate = {one["learning_rate"]: one for one in results(tmp_path).values()}
    assert by_rate[1e30]["status"] == "diverged" and by_rate[1e30]["accuracy"] is None
    assert 0 < by_rate[1e30]["diverged_at"] < 6
    assert by_rate[1e-3]["status"] == "done" and math.isfinite(by_rate[1e-3]["loss"])
    assert result.scores["tnl+swiglu"].tasks["memorization"].score == by_rate[1e-3]["accuracy"]


def test_a_table_of_positions_shorter_than_a_setting_is_refused_before_any_run(tmp_path):
    table = SMALL | {"positions": "learned", "num_positions": 32}
    mine = {name: architecture(name, table, state=0) for name in ("tnl+swiglu", "tnl+swiglu x2")}
    assert mad_runs(mine, "smoke", tasks=["memorization"])  # of 32 tokens
    with pytest.raises(ConfigError) as error:
        go(mine, tmp_path / "out", tasks=["memorization", "fuzzy_recall"])
    long = "at fuzzy_recall/baseline: seq_len: 128 is above model.num_positions: 32; use positions: none, or "
    assert error.value.problems == [f"{name} {long}num_positions: 128" for name in mine]
    assert not (tmp_path / "out").exists()


def test_a_folder_is_of_one_budget_and_one_process(models, tmp_path):
    go(models, tmp_path, tasks=["memorization"])
    with pytest.raises(ConfigError, match="smoke.* core"):
        go(models, tmp_path, budget="core", tasks=["memorization"])
    with RunFolder(tmp_path).lock(), pytest.raises(ConfigError, match="linnet mad run"):
        go(models, tmp_path, tasks=["memorization"])


def test_states_are_normalised_or_refused_with_a_way_out():
    assert state_size(architecture("gla+swiglu x2")) == 4096
    assert state_size(architecture("gla+swiglu x2", {"options": {"gla": {"num_heads": 4}}}, state=0)) == 8192
    with pytest.raises(ConfigError, match="gla: .*4,096 .*2,048.*num_heads=8.*2,048"):
        architecture("gla+swiglu x2", {"options": {"gla": {"num_heads": 4}}})
    with pytest.raises(ConfigError, match="'swiglu'"):
        architecture("gla+swigl x2")


def test_a_halved_bundle_that_is_killed_keeps_its_curves(models, tmp_path, monkeypatch):
    """When it goes on, the whole bundle runs out of memory once more, and leaves alone what the halves have."""
    monkeypatch.setitem(BUDGETS, "smoke", dataclasses.replace(BUDGETS["smoke"], epochs=4))
    go(models, tmp_path / "halves", tasks=["memorization"], bundle=2)
    monkeypatch.setattr(bundle, "SECONDS", 0.0)
    step, made = Ensemble.step, []

    def small(self, tokens, targets):
        if self.size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(self.step_number)
        if len(made) == 8:  # in the third epoch of the first half
            raise KeyboardInterrupt
        return step(self, tokens, targets)

    monkeypatch.setattr(Ensemble, "step", small)
    with pytest.raises(KeyboardInterrupt):
        go(models, tmp_path / "killed", tasks=["memorization"], bundle=4)
    go(models, tmp_path / "killed", tasks=["memorization"], bundle=4)
    assert made[8] == 7 and results(tmp_path / "killed") == results(tmp_path / "halves")
    for path in (tmp_path / "halves" / "runs").iterdir():
        assert RunFolder(tmp_path / "killed" / "runs" / path.name).metrics() == RunFolder(path).metrics()


def test_runs_that_a_folder_from_elsewhere_has_are_not_trained_again(models, tmp_path, monkeypatch):
    go(models, tmp_path / "first")
    known, table = tmp_path / "known", (tmp_path / "first" / "mad.csv").read_text()
    known.mkdir()
    shutil.copy(tmp_path / "first" / "plan.json", known)
    (known / "mad.csv").write_text("".join(table.splitlines(keepends=True)[:-1]))
    step, members = Ensemble.step, set()
    monkeypatch.setattr(Ensemble, "step", lambda self, *batch: members.add(self.size) or step(self, *batch))
    go(models, tmp_path / "second", bundle=4, known=known)
    assert members == {1} and (tmp_path / "second" / "mad.csv").read_text() == table
    assert {one.get("known") for one in results(tmp_path / "second").values()} == {str(known), None}
    # Runs of another seed, or of another model of the name, are other runs.
    assert not go(models, tmp_path / "third", seeds=[1], tasks=["memorization"], known=known).failed
    other = {"tnl+swiglu": architecture("tnl+swiglu", SMALL | {"norm": "layernorm"}, state=0)}
    assert not go(other, tmp_path / "fourth", tasks=["memorization"], known=known).failed
    assert not any("known" in one for name in ("third", "fourth") for one in results(tmp_path / name).values())
    # A budget that contains these runs counts them as its own.
    monkeypatch.setitem(BUDGETS, "core", dataclasses.replace(TINY, name="core", comparable=True))
    mine = go(models, tmp_path / "fifth", budget="core", known=tmp_path / "first")
    assert {one["budget"] for one in results(tmp_path / "fifth").values()} == {"core"} and mine.scores.whole


def test_what_is_no_folder_of_results_is_refused_before_any_run(models, tmp_path):
    known = tmp_path / "known"
    go(models, known, tasks=["memorization"])
    table, plan = (known / "mad.csv").read_text(), json.loads((known / "plan.json").read_text())

    def refused(*words, budget="smoke"):
        with pytest.raises(ConfigError) as error:
            go(models, tmp_path / "out", known=known, budget=budget)
        assert all(word in str(error.value) for word in words) and not (tmp_path / "out").exists()

    (known / "mad.csv").write_text(table.replace(",0.001,", ",fast,", 1).replace(",0.01,", ",9", 1))
    refused("mad.csv, line 2", "delete the line")
    (known / "mad.csv").write_text(table[:-1])
    refused("mad.csv: cannot be read", "no line end")
    (known / "mad.csv").write_text("architecture\n")
    refused("has no column", "accuracy")
    (known / "mad.csv").write_text("")
    refused("has no column", "accuracy")
    (known / "plan.json").write_text(json.dumps(plan | {"precision": "bfloat16"}))
    refused("precision bfloat16, not float32", "'sreen'", budget="sreen")
    (known / "mad.csv").unlink()
    refused("has no mad.csv")


def test_a_name_stands_for_one_model_in_a_folder(models, tmp_path):
    """Runs of two models under one name would be scored as if they were of one."""
    other = {"tnl+swiglu": architecture("tnl+swiglu", SMALL | {"norm": "layernorm"}, state=0)}
    (tmp_path / "plan.json").write_text("{}")  # of a folder from before models were written down
    go(models, tmp_path, tasks=["memorization"])
    before = results(tmp_path)
    with pytest.raises(ConfigError, match=r"tnl\+swiglu .*norm .*'rmsnorm' .*'layernorm'.*--out"):
        go(other, tmp_path, tasks=["memorization"])
    assert results(tmp_path) == before
    go(models, tmp_path, tasks=["compression"])
    assert len(results(tmp_path)) == 8


def test_a_mixer_file_that_changed_is_another_model(models, tmp_path):
    file = tmp_path / "edited.py"
    file.write_text(
        Path(__file__).parents[2].joinpath("examples/my_mixer.py").read_text().replace('"my_mixer"', '"edited"')
    )
    options = {"tasks": ["memorization"], "plugins": [f"{file}:MyMixer"]}
    load_plugin(options["plugins"][0])
    small = {"d_model": 16, "options": {"edited": {"num_heads": 2}}}
    mine = models | {"edited": architecture("edited", small, state=0)}
    go(mine, tmp_path / "mad", **options)
    with open(file, "a") as source:
        source.write("# other\n")
    with pytest.raises(ConfigError, match=r"edited .*mixer file\.edited") as problem:
        go(mine, tmp_path / "mad", **options)
    assert len(problem.value.problems) == 1, "the other architecture is what it was"
    for path in tmp_path.glob("mad/runs/edited*/result.json"):
        path.unlink()
    go(mine, tmp_path / "mad", **options)  # nothing of the old file is left


def test_a_part_of_a_bundle_resumes_and_knows_that_the_files_are_those_of_the_whole(tmp_path):
    folders = [RunFolder(tmp_path / name) for name in ("a", "b", "c")]
    watch = {"open": torch.tensor([0, 1]), "counted": torch.zeros(0, 8, dtype=torch.float64)}
    tensors = {"ensemble": {"weight": torch.tensor([10.0, 20.0])}, "watch": watch}
    checkpoint.save(folders[0].checkpoint_folder, 1, tensors, {"runs": ["a", "b"], "epoch": 3})
    whole, part, other = (bundle.find_checkpoint(runs) for runs in (folders[:2], folders[:1], folders[::2]))
    assert (whole.epoch, whole.foreign, whole.ensemble["weight"].tolist()) == (3, False, [10.0, 20.0])
    assert (part.epoch, part.foreign, part.ensemble["weight"].tolist()) == (3, True, [10.0])
    assert (other.epoch, other.foreign, other.ensemble) == (0, True, None)
