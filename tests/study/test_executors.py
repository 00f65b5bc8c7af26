"""Executors: every job has one outcome even if its process dies, and no process outlives the study."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import executor_threads
import pytest
from executor_jobs import LONG, jobs_of, tries, work
from typer.testing import CliRunner

from linnet.cli import app
from linnet.study.executors import ExecutorConfig, Inline, LocalPool, is_out_of_memory, make_executor

DOINGS = ("fine", "die", "diverge", "die once", "raise", "misconfigured", "fine", "memory", "raise once")


def test_local_pool_gives_every_job_its_outcome(tmp_path):
    jobs = jobs_of(tmp_path, *DOINGS)
    outcomes = {outcome.job.run: outcome for outcome in LocalPool(2, retries=1).run(jobs, work) if outcome}
    assert [outcomes[job.run].status for job in jobs] == [
        "done", "failed", "diverged", "done", "failed", "failed", "done", "failed", "done",
    ]  # fmt: skip
    assert [tries(job) for job in jobs] == [1, 2, 1, 2, 2, 1, 1, 1, 2]
    assert [outcomes[job.run].attempts for job in jobs] == [1, 2, 1, 2, 2, 1, 1, 1, 2]
    assert "SIGKILL" in outcomes["1-die"].error
    assert "RuntimeError: a bad step" in outcomes["4-raise"].error
    assert "steps: must be positive" in outcomes["5-misconfigured"].error
    assert outcomes["7-memory"].error.startswith("out of memory")


def test_a_worker_trains_many_runs(tmp_path):
    jobs = jobs_of(tmp_path, *["fine"] * 5)
    assert sum(outcome is not None for outcome in LocalPool(1).run(jobs, work)) == 5
    assert len({Path(job.payload["log"]).read_text() for job in jobs}) == 1


def test_a_worker_has_the_threads_that_it_is_given(tmp_path):
    outcomes = LocalPool(1, threads=3).run(jobs_of(tmp_path, "fine"), executor_threads.count)
    assert [outcome.status for outcome in outcomes if outcome] == ["3 threads"]


@pytest.mark.parametrize(
    ("variable", "threads", "expected"),
    [
        (None, None, ["6 threads", "1 threads"]),  # a share of the cores, and for a small model fewer
        ("4", None, ["4 threads", "4 threads"]),
        ("9", None, ["6 threads", "6 threads"]),
        ("4", 8, ["8 threads", "8 threads"]),
        (None, 8, ["8 threads", "8 threads"]),
    ],
)
def test_threads_of_a_local_worker(monkeypatch, tmp_path, variable, threads, expected):
    monkeypatch.setattr("linnet.study.executors.cpu_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    counts = []
    for work_ in (executor_threads.count, executor_threads.in_training):
        pool = make_executor(ExecutorConfig(kind="local", workers=1, threads=threads))
        counts += [outcome.status for outcome in pool.run(jobs_of(tmp_path, "fine"), work_) if outcome]
    assert counts == expected


def test_inline_retries_and_goes_on(tmp_path):
    jobs = jobs_of(tmp_path, "raise", "fine", "misconfigured", "raise once")
    outcomes = list(Inline(retries=2).run(jobs, work))
    assert [outcome.status for outcome in outcomes] == ["failed", "done", "failed", "done"]
    assert [tries(job) for job in jobs] == [3, 1, 1, 2]


def test_stopping_interrupts_the_running_job(tmp_path):
    (job,) = jobs_of(tmp_path, "sleep")
    log = Path(job.payload["log"])
    with contextlib.closing(LocalPool(1, retries=0).run([job], work)) as outcomes:
        while not (log.exists() and log.read_text()):
            assert next(outcomes) is None  # fails if the job is never interrupted and ends normally
    assert log.read_text() == "interrupted"


def test_workers_end_when_the_study_is_killed(tmp_path):
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from executor_jobs import *; from linnet.study.executors import LocalPool\n"
        "if __name__ == '__main__':\n"
        "    list(LocalPool(1).run(jobs_of(Path(sys.argv[1]), 'sleep'), work))\n"
    )
    (tmp_path / "script.py").write_text(script)
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    parent = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(tmp_path), *paths])
    log = tmp_path / "0.log"
    try:
        while not (log.exists() and log.read_text().endswith("\n")):
            assert parent.poll() is None
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    worker, ended = int(log.read_text()), time.monotonic()
    while _alive(worker):
        assert time.monotonic() - ended < LONG / 2, "the worker still runs its job"
        time.sleep(0.05)


def test_an_address_without_a_ray_cluster_is_said(tmp_path):
    pytest.importorskip("ray")
    arguments = ["tnl+swiglu x2", "--tasks", "memorization", "--executor", "ray", "--address", "127.0.0.1:1"]
    result = CliRunner().invoke(app, ["mad", "run", *arguments, "--out", str(tmp_path / "mad")])
    assert result.exit_code == 2 and "127.0.0.1:1" in result.stderr and "Traceback" not in result.stderr


def test_out_of_memory_is_recognised():
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
