"""A study end to end: trains every planned run once and writes the results to the table."""

import io
import math
import re
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from linnet.config import ConfigError, parse
from linnet.runs import RunFolder
from linnet.study import StudyConfig, plan, run_study, timing
from linnet.study.runner import in_halves
from linnet.study.timing import estimate, wall_seconds
from linnet.train.device import use_threads

BROKEN = """
import torch
from linnet.layers.base import register_mixer
from linnet.layers.mixers.softmax.attention import Attention, AttentionConfig

@register_mixer("{name}", AttentionConfig)
class Broken(Attention):
    def forward(self, x, state=None, cu_seqlens=None):
        y, state = super().forward(x, state, cu_seqlens)
        if x.device.type != "meta":
            {action}
        return y, state
"""


def stamps(folder):
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}


def test_a_study_trains_its_plan_once(tiny, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    config = parse(StudyConfig, tiny)
    result = run_study(config, tmp_path, console=console)
    planned = {run.run: run for run in plan(config).runs}
    assert {row["run"] for row in result.rows} == set(planned)
    for row in result.rows:
        run = planned[row["run"]]
        assert row["status"] == "done"
        assert row["flops"] == run.flops
        assert row["tokens"] == run.tokens
        assert 0 < row["loss"] < math.log(256)
        curve = [line for line in RunFolder(result.folder / row["path"]).metrics() if "loss" in line]
        assert curve[-1]["flops"] == run.flops
        assert len(curve) >= min(run.steps, config.curve_points)
    lines = console.file.getvalue().splitlines()
    assert sum("bits/byte" in line for line in lines) == 4
    assert lines[-1].strip().startswith("4/4")

    before = stamps(result.folder)
    wider = parse(StudyConfig, tiny | {"budgets": [4e8, 6e8]})
    (torn := result.folder / ".table.csv.77.tmp").write_text("of a killed process")
    again = run_study(wider, tmp_path)
    assert len(again.rows) == 8 and not torn.exists()
    assert {name: stamp for name, stamp in stamps(result.folder).items() if name in before} == before
    assert len(run_study(config, tmp_path).rows) == 4, "the table must have the runs of the current plan only"


def test_failed_and_diverged_runs_are_recorded_and_the_study_goes_on(tiny, tmp_path):
    for name, action in (("raises", "raise RuntimeError('a bad kernel')"), ("explodes", "y = y * torch.nan")):
        (tmp_path / f"{name}.py").write_text(BROKEN.format(name=name, action=action))
    plugins = [f"{tmp_path}/raises.py:Broken", f"{tmp_path}/explodes.py:Broken"]
    changes = {"architectures": ["raises", "explodes", "llama"], "sizes": [[16, 1]], "plugins": plugins}
    console = Console(file=io.StringIO(), width=200)
    result = run_study(parse(StudyConfig, tiny | changes), tmp_path / "out", console=console)
    rows = {row["architecture"]: row for row in result.rows}
    assert {name: row["status"] for name, row in rows.items()} == {
        "raises": "failed",
        "explodes": "diverged",
        "llama": "done",
    }
    assert "a bad kernel" in (result.folder / rows["raises"]["path"] / "error.txt").read_text()
    assert {row["architecture"] for row in result.broken} == {"raises", "explodes"}
    printed = console.file.getvalue()
    assert re.search("3 attempts.*RuntimeError: a bad kernel", printed)
    assert "diverged" in printed


@pytest.mark.parametrize("damage", ['{"runs"', "[]", "{}"])
def test_a_damaged_plan_is_told_and_can_be_made_again(tiny, tmp_path, damage):
    config = parse(StudyConfig, tiny | {"architectures": ["tnl"], "sizes": [[16, 1]]})
    run_study(config, tmp_path)
    (path := tmp_path / "tiny" / "plan.json").write_text(damage)
    with pytest.raises(ConfigError, match="plan.json: "):
        run_study(config, tmp_path)
    path.unlink()
    assert len(run_study(config, tmp_path).rows) == 1


def test_what_only_the_tokenizer_tells_is_told_before_any_run(tiny, tmp_path):
    learned = tiny | {"data": tiny["data"] | {"tokenizer": "bpe:300"}, "seq_len": 25_000}
    asked = {"evaluations": [{"kind": "needle", "lengths": [20]}]}
    with pytest.raises(ConfigError) as caught:
        run_study(parse(StudyConfig, learned | {"train": asked, "budgets": [1e12]}), tmp_path)
    length, needles = caught.value.problems
    assert length.startswith("seq_len: 25000 ")
    assert needles.startswith("train.evaluations.0 (needle): lengths: 20 ")
    assert not list((tmp_path / "tiny" / "runs").iterdir())
    with pytest.raises(ConfigError, match="seq_len: .* 30"):  # before a tokenizer is learned
        (tmp_path / "short.txt").write_text("thirty letters of text, no more")
        run_study(parse(StudyConfig, learned | {"data": {"source": [str(tmp_path / "short.txt")]}}), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_another_text_under_the_same_name_is_refused(tiny, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a few words of one kind\n" * 500)
    config = parse(StudyConfig, tiny | {"architectures": ["tnl"], "sizes": [[16, 1]], "data": {"source": [str(file)]}})
    run_study(config, tmp_path)
    file.write_text("and some of another\n" * 500)
    with pytest.raises(ConfigError, match="data"):
        run_study(config, tmp_path)


def test_two_studies_in_one_folder_are_refused(tiny, tmp_path):
    (tmp_path / "tiny").mkdir()
    with RunFolder(tmp_path / "tiny").lock():
        with pytest.raises(ConfigError, match="tiny"):
            run_study(parse(StudyConfig, tiny), tmp_path)


def test_every_run_has_an_estimate(tiny):
    ladder = plan(parse(StudyConfig, tiny))
    seconds = estimate(ladder)
    assert set(seconds) == {run.run for run in ladder.runs}
    assert all(0 < value < 600 for value in seconds.values())


def test_a_long_step_on_a_cpu_is_timed_once(tiny, monkeypatch):
    steps = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *given: (steps.append(0), step(*given)))
    monkeypatch.setattr("linnet.study.timing.choose", lambda device: torch.device("cpu"))
    ladder = plan(parse(StudyConfig, tiny | {"architectures": ["gla"], "sizes": [[16, 1]], "budgets": [1e8]}))
    assert estimate(ladder) and len(steps) == 3
    monkeypatch.setattr("linnet.study.timing.LONG", 0.0)
    assert estimate(ladder) and len(steps) == 4


def test_a_given_throughput_makes_the_estimate(tiny):
    ladder = plan(parse(StudyConfig, tiny | {"executor": {"throughput": 1e8}}))
    assert estimate(ladder) == pytest.approx({run.run: run.flops / 1e8 for run in ladder.runs})


def test_wall_time_of_jobs_on_workers():
    assert wall_seconds([5, 3, 3, 1], 1) == 12
    assert wall_seconds([5, 3, 3, 1], 2) == 6
    assert wall_seconds([5, 3], 8) == 5


def test_seeds_are_trained_together_and_give_the_table_of_runs_alone(tiny, tmp_path):
    tiny |= {"architectures": ["gla"], "sizes": [[16, 1]], "seeds": [0, 1, 2], "budgets": [1e8]}
    alone = run_study(parse(StudyConfig, tiny), tmp_path / "alone").rows
    together = run_study(
        parse(StudyConfig, tiny | {"executor": {"kind": "local", "workers": 1, "threads": 1, "bundle": 2}}),
        tmp_path / "together",
    )
    folder = together.folder / "runs"
    assert sorted(RunFolder(path).result().get("bundle", 1) for path in folder.iterdir()) == [1, 2, 2]
    for one, other in zip(alone, together.rows, strict=True):
        assert one.keys() == other.keys() and (one["run"], one["status"]) == (other["run"], other["status"])
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    before = stamps(together.folder)
    run_study(parse(StudyConfig, tiny | {"executor": {"kind": "inline", "bundle": 2}}), tmp_path / "together")
    assert stamps(together.folder) == before


def test_runs_that_memory_does_not_hold_are_halved_and_those_that_are_left_go_on():
    tried = []

    def train_bundle(runs):
        tried.append("".join(runs))
        if len(runs) > 2:
            raise MemoryError
        return ["d"] if runs == ["c", "d"] else None  # the bundle ends early for c

    assert in_halves(list("abcd"), train_bundle) == "done"
    assert tried == ["abcd", "ab", "cd", "d"]
    with pytest.raises(MemoryError):
        in_halves(["a"], lambda runs: train_bundle(list("abc")))
    with pytest.raises(ValueError):
        in_halves(["a", "b"], lambda runs: int("no memory"))


@pytest.mark.parametrize(("threads", "found"), [(1, 9.0), (2, 0.5)])
def test_a_long_step_of_several_threads_is_timed_twice(threads, found, monkeypatch):
    """Another process that takes a core makes one step of threads that wait for each other many times as long."""
    clock = iter([0.0, 9.0, 10.0, 10.5])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with use_threads(threads):
        assert timing.fastest(lambda: None, torch.device("cpu")) == found
