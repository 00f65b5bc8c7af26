"""`linnet data lra`: what it writes and shows, its errors, and what a kill costs."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.encoders.lra import LraDataConfig, prepare_lra


def run(*arguments: str):
    return CliRunner().invoke(app, ["data", "lra", *map(str, arguments)])


def test_a_task_is_made_shown_and_found_again(tmp_path):
    out = tmp_path / "listops"
    given = ("listops", "--out", out, "--size", "reduced", "--samples", "96")
    result = run(*given, "--preview", "2")
    assert result.exit_code == 0, result.output
    assert "96" in result.output and result.output.count("label ") >= 2 and "[M" in result.output
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    stage = json.loads(run(*given, "--json").output)
    assert stage["rows"] == {"train": 96, "validation": 10, "test": 10}
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    corpus = prepare_lra(LraDataConfig(task="listops", size="reduced", source=str(out)), tmp_path)
    assert len(corpus.train) == 96
    (out / "test-00000.safetensors").unlink()
    with pytest.raises(ConfigError, match="is missing; run (linnet data lra listops .*--anew)") as error:
        prepare_lra(LraDataConfig(task="listops", size="reduced", source=str(out)), tmp_path)
    command = re.search("run linnet data lra (.*)", error.value.problems[0]).group(1)
    assert run(*shlex.split(command)).exit_code == 0 and json.loads(run(*given, "--json").output) == stage
    assert run(*given, "--seed", "1").exit_code == 2
    assert run(*given, "--seed", "1", "--anew").exit_code == 0


def test_images_are_shown_on_one_sheet(tmp_path):
    image = pytest.importorskip("PIL.Image")
    result = run("pathfinder", "--out", tmp_path, "--size", "reduced", "--samples", "20,10,10", "--preview", "10")
    assert result.exit_code == 0, result.output
    sheet = image.open(tmp_path / "preview.png")
    assert sheet.size == (8 * 257 - 1, 2 * 257 - 1)
    assert "10 images" in result.output and "images of 1 x 16 x 16" in result.output


def test_all_problems_are_reported_at_once(tmp_path):
    result = run("listop", "--out", tmp_path / "x", "--samples", "0", "--size", "small")
    assert result.exit_code == 2 and "3 problems" in result.stderr
    assert all(name in result.stderr for name in ("--samples", "TASK", "--size"))
    assert not (tmp_path / "x").exists()
    assert "FOLDER" in run("text", "--out", tmp_path / "x").stderr
    assert "--samples" in run("text", tmp_path, "--samples", "5", "--out", tmp_path / "x").stderr


@pytest.mark.thorough
def test_a_killed_command_resumes_with_the_same_bytes(tmp_path):
    given = ("listops", "--size", "full", "--samples", "6000,1000,1000", "--out")
    assert run(*given, tmp_path / "whole").exit_code == 0
    command = [sys.executable, "-m", "linnet", "data", "lra", *given, str(tmp_path / "killed"), "--workers", "2"]
    process = subprocess.Popen(command, start_new_session=True)
    while not list((tmp_path / "killed").glob("train-*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*.safetensors")}
    assert kept and not (tmp_path / "killed" / "stage.json").exists()
    assert run(*given, tmp_path / "killed").exit_code == 0
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "killed" / path.name).read_bytes()
    assert {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in kept} == kept


def test_a_stopped_command_says_that_it_resumes(tmp_path):
    command = [sys.executable, "-m", "linnet", "data", "lra", "listops", "--out", str(tmp_path / "stopped")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list((tmp_path / "stopped").glob("train-*.safetensors")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
    assert process.returncode == 130 and "run the same command again to resume" in said
