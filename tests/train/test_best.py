"""`run.keep_best`: the checkpoint of the lowest validation loss stays, and can be scored in place of the last one."""

import json
import math
import shutil

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.runs import checkpoint
from linnet.runs.model import load_checkpoint
from linnet.train import train
from linnet.train.extension import extend
from linnet.train.identity import contents_of, digest_of

EVERY = {"checkpoint_every": 3, "evaluate_every": 3, "keep_checkpoints": 1, "seq_len": 32, "evaluate_tokens": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text to learn by heart and another to score, so that the validation loss is lowest early."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "train.txt").write_text("abcdefgh" * 500)
    (folder / "held.txt").write_text("the quick brown fox jumps over a lazy dog. " * 24)
    return {"source": [str(folder / "train.txt")], "validation": [str(folder / "held.txt")]}


@pytest.fixture(scope="module")
def overfitted(settings, data):
    return lambda **changes: settings(data=data, steps=12, optimizer={"learning_rate": 3e-2}, **EVERY, **changes)


def steps(run):
    return [checkpoint.step_of(path) for path in run.checkpoints()]


@pytest.mark.parametrize("background", [False, True])
def test_the_best_checkpoint_stays_and_is_scored(overfitted, data, cache, tmp_path, background):
    run = train(overfitted(keep_best=True, async_save=background), tmp_path, cache)
    losses = {row["step"]: row["validation_loss"] for row in run.metrics() if "validation_loss" in row}
    best = min(losses, key=losses.__getitem__)
    assert list(losses) == [3, 6, 9, 12] and best < 9, "the run must overfit, or it tests nothing"
    assert steps(run) == [best, 12] and run.best_step() == best
    assert (load_checkpoint(run.path).step, load_checkpoint(run.path, best=True).step) == (12, best)
    for option, step in ((["--best"], best), ([], 12)):
        asked = ["evaluate", "blocks", str(run.path), data["validation"][0], "--device", "cpu", "--json", *option]
        result = CliRunner().invoke(app, asked)
        assert result.exit_code == 0, result.output
        scores = json.loads(result.stdout)["blocks"]
        found = {one["metric"]: one["value"] for one in scores["results"] if one["task"] == "blocks"}
        assert scores["model"]["step"] == step and "damaged" not in result.output
        # The training scores whole rows, and the blocks all of the text.
        assert math.log(found["perplexity"]) == pytest.approx(losses[step], rel=0.05)


def test_a_stopped_run_keeps_what_a_whole_one_keeps(overfitted, cache, tmp_path):
    run = train(overfitted(keep_best=True), tmp_path, cache)
    kept = steps(run)
    for path in (run.path / "result.json", run.checkpoints()[-1]):  # as killed after the best checkpoint
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert steps(train(overfitted(keep_best=True), tmp_path, cache)) == kept


def test_an_extended_run_remembers_the_best_of_before(settings, data, cache, tmp_path):
    rate, schedule = {"learning_rate": 3e-2}, {"name": "constant", "warmup": 1}
    short = settings(data=data, steps=6, optimizer=rate, schedule=schedule, keep_best=True, **EVERY)
    run = extend(train(short, tmp_path, cache).path, cache, steps=12)
    losses = {row["step"]: row["validation_loss"] for row in run.metrics() if "validation_loss" in row}
    assert list(losses) == [3, 6, 9, 12] and min(losses, key=losses.__getitem__) == 6, "it must overfit after that"
    assert steps(run) == [6, 12]
    whole = settings(data=data, steps=12, optimizer=rate, schedule=schedule, keep_best=True, **EVERY)
    assert steps(train(whole, tmp_path / "whole", cache)) == [6, 12]


def test_it_changes_no_training_and_no_name(overfitted, cache, tmp_path):
    plain, config = train(overfitted(), tmp_path / "plain", cache), overfitted(keep_best=True)
    assert digest_of(config, contents_of(config)) == digest_of(overfitted(), contents_of(overfitted()))
    assert "keep_best" not in (plain.path / "config.yaml").read_text() and steps(plain) == [12]
    again = train(config, tmp_path / "best", cache)
    assert again.path.name == plain.path.name and again.result()["loss"] == plain.result()["loss"]
    with pytest.raises(ConfigError, match="step ., whose checkpoint was not kept; train it with run.keep_best"):
        load_checkpoint(plain.path, best=True)
    (plain.path / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no validation"):
        load_checkpoint(plain.path, best=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"evaluate_every": 0},
            "run.keep_best: true needs .*evaluate_every: 0 is not a multiple of checkpoint_every: 3",
        ),
        ({"evaluate_every": 4}, "run.keep_best: .*evaluate_every: 4"),
        ({"checkpoint_every": 0}, "run.keep_best: .*checkpoint_every: 0"),
        ({"guard": {"policy": "rollback"}}, "guard: policy rollback .*set run.keep_best=false"),
    ],
)
def test_it_needs_a_checkpoint_at_every_validation(settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**{**EVERY, "keep_best": True, **changes})
