"""`linnet bench generate` as a person uses it."""

import csv
import importlib.util
import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from linnet.cli import app
from linnet.cli.bench import _draw
from linnet.install import install_command

SMALL = ("--device", "cpu", "--prompt", "8", "--new", "3", "--repeats", "1")


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "generate", *map(str, arguments)])


def test_writes_a_table_and_a_picture(tmp_path):
    pytest.importorskip("vl_convert")
    shape = ("--batch", 1, "--batch", 2, "--context", 16, "--context-new", 3)
    done = run("mad-mamba", "mad-attention-swiglu", *SMALL, *shape, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    with open(tmp_path / "generate.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["batch"], row["prompt"]) for row in rows] == [
        (model, batch, prompt)
        for model in ("mad-mamba", "mad-attention-swiglu")
        for batch, prompt in (("1", "8"), ("2", "8"), ("1", "16"))
    ]
    assert all(float(row["token_ms"]) > 0 for row in rows)
    assert (tmp_path / "generate.png").stat().st_size > 10_000
    assert "milliseconds" in (tmp_path / "generate.svg").read_text()
    assert "mad-mamba" in done.stdout
    before = (tmp_path / "generate.svg").read_bytes()
    (tmp_path / "generate.svg").unlink()
    again = CliRunner().invoke(app, ["bench", "draw", str(tmp_path)])
    assert again.exit_code == 0 and (tmp_path / "generate.svg").read_bytes() == before
    (tmp_path / "generate.csv").write_text("a,b\n1,2\n")
    for folder, message in ((tmp_path, "generate.csv"), (tmp_path / "none", "none")):
        failed = CliRunner().invoke(app, ["bench", "draw", str(folder)])
        assert failed.exit_code == 2 and message in failed.output


def test_rows_as_json():
    done = run("mad-mamba", *SMALL, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["system"] for row in rows] == ["linnet"]
    assert all(row["torch"] and "transformers" in row for row in rows)


def test_peers_alone_have_the_size_that_is_asked_for(tmp_path):
    pytest.importorskip("transformers")
    peers = ("--only-peers", "--peer", "transformers", "--peer-size", "10m", "--json", "--out", tmp_path)
    done = run("mad-mamba", *SMALL, *peers)
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)
    assert (row["model"], row["system"]) == ("llama-10m", "transformers") and row["token_ms"] > 0
    with open(tmp_path / "generate.csv", newline="") as file:
        assert [kept["model"] for kept in csv.DictReader(file)] == ["llama-10m"]


def test_what_was_measured_is_there_when_it_is_stopped(tmp_path, monkeypatch):
    from linnet.inference.benchmark import Linnet

    warm = Linnet.warm

    def stop(self, tokens, new):
        if len(tokens) == 2:
            raise KeyboardInterrupt
        warm(self, tokens, new)

    monkeypatch.setattr(Linnet, "warm", stop)
    run("mad-mamba", *SMALL, "--batch", 1, "--batch", 2, "--out", tmp_path)
    with open(tmp_path / "generate.csv", newline="") as file:
        assert [row["batch"] for row in csv.DictReader(file)] == ["1"]


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="fla is installed")
def test_peers_that_are_not_installed_are_named():
    done = run("tnl-10m", *SMALL, "--peer", "fla")
    assert done.exit_code == 2 and re.search("--peer .*fla", done.output)
    assert "--only-peers: " in run("tnl-10m", *SMALL, "--only-peers").output


def test_what_is_wrong_is_said_at_once():
    done = run("tnl-10mm", *SMALL[2:], "--batch", 0, "--device", "tpu", "--peer", "vllm", "--dtype", "int4")
    assert done.exit_code == 2 and "Traceback" not in done.output
    for message in (
        "--batch '0': give a number above 0, or max",
        "recipe 'tnl-10mm' is unknown; did you mean 'tnl-10m'?",
        "--peer 'vllm' is unknown",
        "--device: 'tpu'",
        "--dtype: 'int4' is unknown",
    ):
        assert message in done.output


def test_without_a_picture_the_extra_is_named_whole(tmp_path, monkeypatch):
    """A console that reads markup would print .[study] without its brackets."""
    monkeypatch.setattr("linnet.config.not_installed", list)
    console = Console(file=io.StringIO(), width=300)
    _draw([], tmp_path / "a [b]", console)
    shown = console.file.getvalue()
    assert "a [b]: generate.csv" in shown and install_command("study") + ", or draw it elsewhere" in shown


def test_a_folder_that_cannot_be_made_is_told_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("nothing-known", *SMALL, "--out", tmp_path / "file" / "out")
    assert done.exit_code == 2 and "'nothing-known'" in done.output
    assert re.search(r"--out .*: its folder cannot be made, '.*/file' is a file; name another", done.output)


def test_one_case_alone_has_no_picture(tmp_path):
    pytest.importorskip("vl_convert")
    done = run("mad-mamba", *SMALL, "--out", tmp_path)
    assert done.exit_code == 0 and "picture" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["generate.csv"]
    again = CliRunner().invoke(app, ["bench", "draw", str(tmp_path)])
    assert again.exit_code == 2 and "--batch" in again.output and "--context" in again.output
    (table := tmp_path / "generate.csv").write_text(table.read_text().rstrip())
    cut = CliRunner().invoke(app, ["bench", "draw", str(tmp_path)])
    assert cut.exit_code == 2 and "no line end" in cut.output
