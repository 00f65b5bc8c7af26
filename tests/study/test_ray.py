"""Jobs and `linnet mad run` on a Ray cluster that is started on this machine."""

import json
import os
from pathlib import Path

import pytest
from executor_jobs import jobs_of, tries, work
from typer.testing import CliRunner

from linnet.cli import app
from linnet.study.executors import ExecutorConfig, make_executor

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def executor():
    """An executor that has started Ray on this machine with two workers."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        try:
            yield make_executor(ExecutorConfig(kind="ray", workers=2, threads=1, retries=1))
        finally:
            ray.shutdown()


def test_every_job_has_its_outcome(executor, tmp_path):
    jobs = jobs_of(tmp_path, "fine", "die once", "die", "misconfigured", "raise once")
    outcomes = {outcome.job.run: outcome for outcome in executor.run(jobs, work) if outcome}
    assert [outcomes[job.run].status for job in jobs] == ["done", "done", "failed", "failed", "done"]
    assert [tries(job) for job in jobs] == [1, 2, 2, 1, 2]


def test_runs_on_a_cluster_that_is_there_and_goes_on_where_it_was(executor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mixer = os.path.relpath(ROOT / "examples" / "my_mixer.py", tmp_path) + ":MyMixer"
    small = ["--tasks", "memorization", "--settings", "baseline", "--state", "0", "--set", "d_model=32"]
    small += ["--set", "options={swiglu: {inner: 16}}", "--device", "cpu", "--out", "mad", "--json"]
    cluster = ["--executor", "ray", "--address", "auto", "--workers", "2"]

    def call(*arguments):
        result = CliRunner().invoke(app, ["mad", "run", *arguments, *small])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    first = call("attention+swiglu", "--executor", "inline")
    stamps = {path: path.stat().st_mtime_ns for path in Path("mad").glob("runs/*/result.json")}
    both = call("attention+swiglu", "--mixer", mixer, *cluster)
    assert len(stamps) == 2 and {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert both["failed"] == {} and len(list(Path("mad").glob("runs/*/result.json"))) == 4
    scores = {row["architecture"]: row["score"] for row in both["scores"] if row["task"] == "all"}
    assert set(scores) == {"attention+swiglu", "my_mixer+swiglu x2"}
    assert scores["attention+swiglu"] == next(row["score"] for row in first["scores"] if row["task"] == "all")
