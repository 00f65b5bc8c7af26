"""Jobs, `linnet mad run` and a stage of a corpus on a Ray cluster that is started on this machine."""

import contextlib
import json
import os
import random
from pathlib import Path

import pytest
from executor_jobs import jobs_of, tries, work
from folder_traps import set_traps
from typer.testing import CliRunner

from linnet.cli import app
from linnet.corpus import dedup, documents
from linnet.study.executors import ExecutorConfig, make_executor

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    """An executor that has started Ray on this machine with two workers."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        folder = tmp_path_factory.mktemp("traps")
        trace = set_traps(folder)
        try:
            with contextlib.chdir(folder):
                executor = make_executor(ExecutorConfig(kind="ray", workers=2, threads=1, retries=1))
            yield executor
            assert trace.read_text() == ""  # no worker imported anything from the folder where Ray was started
        finally:
            ray.shutdown()


def test_every_job_has_its_outcome(executor, tmp_path):
    jobs = jobs_of(tmp_path, "fine", "die once", "die", "misconfigured", "raise once")
    outcomes = {outcome.job.run: outcome for outcome in executor.run(jobs, work) if outcome}
    assert [outcomes[job.run].status for job in jobs] == ["done", "done", "failed", "failed", "done"]
    assert [tries(job) for job in jobs] == [1, 2, 2, 1, 2]


def test_what_ray_says_of_a_dead_worker_is_not_in_the_output(executor, capsys):
    import ray._private.worker

    ray._private.worker.print_to_stdstream({"lines": ["A worker died."], "pid": "raylet", "is_err": False}, False)
    printed = capsys.readouterr()
    assert printed.out == "" and "A worker died." in printed.err


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


def test_a_stage_of_a_corpus_writes_the_same_bytes_as_local_workers(executor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(documents, "SMALLEST", 10_000)  # several parts
    monkeypatch.setattr(dedup, "MANY", 0)  # every pass is worth its workers
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(999)}" for _ in range(60)) for _ in range(100)]
    texts += [text.replace("w1 ", "x ", 1) for text in texts[:30]]
    Path("corpus").mkdir()
    for number in range(5):
        rows = [json.dumps({"text": text}) + "\n" for text in texts[number::5]]
        Path(f"corpus/{number}.jsonl").write_text("".join(rows))
    Path("items.txt").write_text(texts[40])
    for engine, workers, out in (("local", "1", "one"), ("ray", "2", "two")):
        options = ["--engine", engine, "--workers", workers, "--out", out, "--verify", "--against", "items.txt"]
        result = CliRunner().invoke(app, ["corpus", "dedup", "corpus", *options])
        assert result.exit_code == 0, result.output
    stage = json.loads(Path("two/stage.json").read_text())
    assert len(stage["shards"]) > 2 and stage["results"]["near copies"] > 0
    names = {path.name for path in Path("one").iterdir()}
    assert names == {path.name for path in Path("two").iterdir()}
    for name in names - {"provenance.json"}:
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()
