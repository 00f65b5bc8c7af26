"""`linnet mad run` on a Ray cluster, of one machine here."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linnet.cli import app

ROOT = Path(__file__).parents[3]


def test_runs_on_a_cluster_that_is_there_and_goes_on_where_it_was(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.chdir(tmp_path)
    mixer = os.path.relpath(ROOT / "examples" / "my_mixer.py", tmp_path) + ":MyMixer"
    small = ["--tasks", "memorization", "--settings", "baseline", "--state", "0", "--set", "d_model=32"]
    small += ["--set", "options={swiglu: {inner: 16}}", "--device", "cpu", "--out", "mad", "--json"]
    cluster = ["--executor", "ray", "--address", "auto", "--workers", "2"]

    def call(*arguments):
        result = CliRunner().invoke(app, ["mad", "run", *arguments, *small])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    try:
        head = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        monkeypatch.setenv("RAY_ADDRESS", head.address_info["gcs_address"])
        first = call("attention+swiglu", "--executor", "inline")
        stamps = {path: path.stat().st_mtime_ns for path in Path("mad").glob("runs/*/result.json")}
        both = call("attention+swiglu", "--mixer", mixer, *cluster)
    finally:
        ray.shutdown()
    assert len(stamps) == 2 and {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert both["failed"] == {} and len(list(Path("mad").glob("runs/*/result.json"))) == 4
    scores = {row["architecture"]: row["score"] for row in both["scores"] if row["task"] == "all"}
    assert set(scores) == {"attention+swiglu", "my_mixer+swiglu x2"}
    assert scores["attention+swiglu"] == next(row["score"] for row in first["scores"] if row["task"] == "all")


def test_an_address_without_a_cluster_is_said(tmp_path):
    pytest.importorskip("ray")
    arguments = ["tnl+swiglu x2", "--tasks", "memorization", "--executor", "ray", "--address", "127.0.0.1:1"]
    result = CliRunner().invoke(app, ["mad", "run", *arguments, "--out", str(tmp_path / "mad")])
    assert result.exit_code == 2 and "127.0.0.1:1" in result.stderr and "Traceback" not in result.stderr
