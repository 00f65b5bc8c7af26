"""Commit, versions and devices of results: found, kept, and shown in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linnet import provenance

ROOT = Path(__file__).parents[1]


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path) -> Path:
    """A package that is committed to a repository."""
    package = tmp_path / "clone" / "linnet"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(package.parent, "init", "-q")
    git(package.parent, "add", "-A")
    git(package.parent, "commit", "-qm", "first")
    return package


def test_the_commit_of_a_clone(package):
    head = git(package, "rev-parse", "HEAD")
    assert provenance.commit(package) == head and len(head) == 40
    provenance.commit.cache_clear()
    (package / "new.py").write_text("")  # untracked: it is not part of the package
    assert provenance.commit(package) == head
    provenance.commit.cache_clear()
    (package / "__init__.py").write_text("changed = 1\n")
    assert provenance.commit(package) == f"{head}-dirty"


def test_the_index_of_a_clone_is_not_written(package):
    """A process that is killed while it writes the index leaves a lock, with which git refuses the next commit."""
    index = package.parent / ".git" / "index"
    (package / "__init__.py").write_text((package / "__init__.py").read_text())  # a new date alone
    os.utime(package / "__init__.py", (1, 1))
    before = index.read_bytes()
    assert provenance.commit(package) is not None
    assert index.read_bytes() == before


def test_an_installed_package_has_no_commit(package, tmp_path):
    installed = package.parent / "venv" / "linnet"  # inside a repository that does not track it
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert provenance.commit(installed) is None
    assert provenance.commit(tmp_path / "nowhere") is None


def test_a_stamp_says_when_and_with_what():
    stamp = provenance.stamp(torch.device("cpu"))
    environment = stamp["environment"]
    assert stamp["date"].endswith("+00:00") and environment["torch"] == torch.__version__
    assert environment["python"] == sys.version.split()[0] and environment["device"] == environment["cpu"] != ""
    assert environment["threads"] == torch.get_num_threads() and environment["linnet"]


def test_results_in_one_line():
    one = {
        "date": "2026-01-02T03:04:05+00:00",
        "environment": {"linnet": "0.2.0", "commit": "a" * 40, "device": "H200"},
    }
    two = {"date": "2026-01-04T00:00:00+00:00", "environment": {"linnet": "0.2.0", "commit": "b" * 40 + "-dirty"}}
    old = {"environment": {"linnet": "0.1.0", "torch": "2.11.0", "device": "x86_64"}}
    line = provenance.shown([one, two, old, {}])
    assert line == (
        f"2026-01-02 to 2026-01-04, linnet 0.2.0 or 0.1.0, commit {'a' * 12} or {'b' * 12}-dirty, "
        "device H200 or x86_64, torch 2.11.0"
    )
    assert provenance.shown([{}]) == "" and provenance.shown([one]).startswith("2026-01-02, linnet")


def test_rows_of_benchmarks_carry_the_commit_and_old_rows_stay(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import timing

    path = tmp_path / "table.csv"
    path.write_text("op,ms\na,1\nb,2\n")
    monkeypatch.setattr(provenance, "commit", lambda: None)
    monkeypatch.setenv("LINNET_COMMIT", "c0ffee")
    timing.update(path, [{"op": "b", "ms": 3, "commit": timing.commit()}], ["op"])
    assert timing.read(path) == [{"op": "a", "ms": "1", "commit": ""}, {"op": "b", "ms": "3", "commit": "c0ffee"}]
    monkeypatch.delenv("LINNET_COMMIT")
    with pytest.raises(SystemExit, match="LINNET_COMMIT"):
        timing.commit()
