"""`linnet mad run --budget mqar`: what it prints, and what it refuses."""

import json
import re

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.mad.settings import BUDGETS, Budget, GridPoint


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    grid = (GridPoint(1e-3, 0.1),)
    small = Budget("mqar", "", False, True, grid, epochs=1, batch_size=16, max_samples=16, held_out=8, mqar=True)
    monkeypatch.setitem(BUDGETS, "mqar", small)


def call(*arguments):
    return CliRunner().invoke(app, ["mad", "run", *map(str, arguments)], env={"COLUMNS": "100"})


def test_table_bar_and_page(tmp_path):
    options = ["--budget", "mqar", "--settings", "64x4", "--executor", "inline", "--device", "cpu", "--out", tmp_path]
    first = call("hgrn2", "hgrn", *options)
    assert first.exit_code == 0, first.output
    assert "hgrn2: hgrn2 x2, width 64, state 8,192; width 128, state 32,768" in first.stdout
    assert "4 runs in 4 bundles" in first.stdout
    assert "MQAR: length, pairs" in first.stdout and "512,64" in first.stdout
    claim = "hgrn2 never below hgrn, and above it wherever that stays under 95%"
    known = "not enough runs: it holds in 0 of the 2 settings that both have, and both are needed"
    assert f"{claim}: {known}" in first.stdout
    assert re.search(r"may be chance at 64 with 4 pairs .*64 \(0\.00 and 0\.00 %\)", first.stdout)
    assert "6 of 8 settings" in first.stdout
    assert (tmp_path / "report" / "mqar.png").is_file()

    second = call("hgrn2", "hgrn", "hgrn2+swiglu", *options, "--json")
    assert second.exit_code == 0, second.output
    found = json.loads(second.stdout)
    assert found["bar"].startswith(claim) and {row["architecture"] for row in found["scores"]} == {
        "hgrn2",
        "hgrn",
        "hgrn2+swiglu",
    }
    assert "4 of 6 runs" in second.stderr


def test_what_is_no_mixer_is_refused(tmp_path):
    result = call("mad-mamba", "hgrn4", "--budget", "mqar", "--out", tmp_path / "mad")
    assert result.exit_code == 2 and not (tmp_path / "mad").exists()
    assert "mad-mamba: " in result.stderr and "'hgrn'" in result.stderr
    assert "--state" in call("hgrn2", "--budget", "mqar", "--state", "0", "--out", tmp_path / "mad").stderr
    assert not (tmp_path / "mad").exists()
    assert "MQAR" in call("hgrn2", "--budget", "mqar", "--spec", "mad-lab").stderr
