"""A full disk or a killed worker loses no finished run. Real disks, real signals."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children import Child
from mad_folders import write_mad
from typer.testing import CliRunner

from linnet.cli import app
from linnet.mad import settings

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="small disks and /proc are Linux's"),
]

ROOT = Path(__file__).parents[2]
RUNS = 6
LONG = 300  # seconds, after which something hangs: machines may be slow and busy
# The command, with runs that take a moment.
PROGRAM = """
import dataclasses
from linnet.mad import settings
settings.BUDGETS["smoke"] = dataclasses.replace(settings.BUDGETS["smoke"], epochs=2, held_out=64)
from linnet.cli import main
main()
"""


def arguments(out, executor="local"):
    options = {
        "--tasks": "memorization",
        "--settings": "baseline",
        "--state": "0",
        "--seed": "0,1,2",
        "--device": "cpu",
    }
    options |= {"--executor": executor, "--workers": "1", "--out": str(out)}
    model = ["attention+swiglu", "--set", "d_model=32", "--set", "options={swiglu: {inner: 16}}", "--no-report"]
    return ["mad", "run", *model, *(part for pair in options.items() for part in pair)]


def start(out):
    return Child(PROGRAM, *arguments(out), PYTHONPATH=str(ROOT))


@pytest.fixture(autouse=True)
def one_core():
    """Of those there are, so that no worker has threads that wait for each other."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores) if os.getpid() % 2 else max(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def run(monkeypatch):
    """The same command in this process, which saves an interpreter: its exit code and what it said."""
    short = dataclasses.replace(settings.BUDGETS["smoke"], epochs=2, held_out=64)
    monkeypatch.setitem(settings.BUDGETS, "smoke", short)

    def run(out, executor="inline"):
        result = CliRunner().invoke(app, arguments(out, executor))
        return result.exit_code, result.output

    return run


def results(out):
    return {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}


@pytest.fixture
def disk(tmp_path):
    """Gives a folder that is a disk of its own, of some size, and a way to make it larger."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size, *flags):
        options = ",".join((*flags, f"size={size}"))
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted: {done.stderr.decode().strip()}")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True)


def test_a_full_disk_loses_no_run_that_has_ended(disk, run):
    out = disk("40k") / "mad"
    code, said = run(out, "local")
    before = results(out)
    assert code == 2 and "the disk is full; free some space" in said and "Traceback" not in said
    assert 0 < len(before) < RUNS
    disk("8m", "remount")
    code, said = run(out)
    after = results(out)
    assert code == 0, said
    assert len(after) == RUNS and {path: after[path] for path in before} == before
    assert f"{len(before)} of {RUNS} runs are done" in said


def test_a_page_that_does_not_fit_on_the_disk_is_said_and_not_begun(disk):
    pytest.importorskip("vl_convert")
    folder = write_mad(disk("400k") / "mad", ["mad-mamba"])
    result = CliRunner().invoke(app, ["mad", "report", str(folder)])
    assert result.exit_code == 2
    assert re.search(rf"{re.escape(str(folder))}/report/\S+: the disk is full; free some space", result.stderr)
    assert not list(folder.glob("report/*index.html*"))
    disk("8m", "remount")
    assert CliRunner().invoke(app, ["mad", "report", str(folder)]).exit_code == 0
    assert (folder / "report" / "index.html").read_text().rstrip().endswith("</html>")


def test_a_killed_worker_and_a_killed_command_lose_no_run_that_has_ended(tmp_path, run):
    out = tmp_path / "mad"
    process = start(out)
    wait_for(out, 1, process)
    before = results(out)
    os.kill(worker_of(process.pid), signal.SIGKILL)  # its run is tried again, by another worker
    wait_for(out, len(before) + 2, process)
    process.kill()  # and now the command itself, which no one can catch
    between = results(out)
    assert {path: between[path] for path in before} == before

    code, said = run(out)
    after = results(out)
    assert code == 0, said
    assert len(after) == RUNS and {path: after[path] for path in between} == between
    assert not list(out.rglob("error.txt")) and (out / "mad.csv").read_text().count("\n") == RUNS + 1


def wait_for(out, number, process):
    deadline = time.monotonic() + LONG
    while len(results(out)) < number:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def worker_of(parent):
    """The process that trains: the child of the command that was started to serve jobs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
            text = (path.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == parent and "spawn_main" in text:
            found.append(int(path.parent.name))
    assert len(found) == 1
    return found[0]
