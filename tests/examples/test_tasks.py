"""The tasks of examples/tasks, asked from the command line as docs/evaluation.md says."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="needs the extra eval")

from linnet.cli import app
from linnet.data import ByteTokenizer
from linnet.evaluate.results import read_evaluations
from linnet.models import build_model, family
from linnet.runs.model import save_model

TASKS = Path(__file__).parents[2] / "examples" / "tasks"


def test_the_example_runs_and_is_kept(tmp_path):
    config = family("hgrn2")(32, 2, vocab_size=256)
    save_model(tmp_path / "model", config, build_model(config).state_dict(), ByteTokenizer())
    arguments = ["evaluate", "tasks", tmp_path / "model", "capitals", "opposites", "--include", TASKS]
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    assert "it/s" not in result.stderr  # no bars but our own, and none beside JSON
    found = {(one["task"], one["metric"]): one for one in json.loads(result.stdout)["tasks"]["results"]}
    assert {key: one["n"] for key, one in found.items()} == {
        ("capitals", "acc"): 8,
        ("capitals", "acc_norm"): 8,
        ("opposites", "exact_match"): 4,
    }
    [kept] = read_evaluations(tmp_path / "model")
    assert kept.detail["tasks"]["opposites"]["shots"] == 3
    assert kept.results[0].value == sum(item.score for item in kept.results[0].items) / 8
