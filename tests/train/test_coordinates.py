"""The coordinate check: muP passes where standard fails."""

import math
import re

import pytest
import torch
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.train import read_training
from linnet.train.coordinates import Check, Coordinate, check_coordinates, learned_size

MODEL = {"d_model": 16, "layout": "hgrn2+swiglu", "options": {"hgrn2": {"num_heads": 1}}}


def training(**changes):
    values = {
        "seq_len": 32,
        "batch_size": 8,
        "steps": 20,
        "optimizer": {"learning_rate": 1e-3},
        "run": {"device": "cpu"},
    }
    return read_training(values | changes)


def test_mup_keeps_activations_and_standard_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("linnet.train.coordinates.STEPS", (1, 3))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    data = {"source": str(text), "tokenizer": {"kind": "byte"}}
    config = training(model=MODEL | {"parametrisation": "mup", "base_width": 16}, data=data)
    own, control = check_coordinates(config, tmp_path / "cache", widths=(32, 128), seeds=2)
    assert (own.parametrisation, control.parametrisation) == ("mup", "standard")
    assert own.worst.ratio < control.worst.ratio / 3 and not control.passed
    names = {one.module for one in own.coordinates}
    assert {"embedding", "blocks.0.mixer.q_proj", "blocks.0.channel", "blocks.0", "logits"} <= names
    assert {one.step for one in own.coordinates} == {1, 3}
    lines = []
    again = check_coordinates(config, tmp_path / "cache", widths=(32, 128), seeds=2, tell=lines.append)
    assert again == [own, control]
    assert len(lines) == 8 and lines[0] == "1 of 8: mup, width 32, seed 0"
    assert re.fullmatch(r"4 of 8: mup, width 128, seed 1, about [\d.]+ s left", lines[3])


def test_a_check_fails_by_its_worst_module_and_by_numbers_that_are_not_finite():
    wrong = Coordinate("blocks.0", 2, (1.0, 1.6))
    check = Check("mup", (64, 128), (Coordinate("logits", 1, (1.0, 9.0)), Coordinate("norm", 1, (1.0, 1.4)), wrong))
    assert check.worst is wrong and not check.passed and check.failed() == ["blocks.0"]
    assert Coordinate("a", 1, (1.0, float("nan"))).ratio == Coordinate("a", 1, (0.0, 1.0)).ratio == float("inf")
    assert Coordinate("a", 1, (0.0, 0.0)).ratio == 1.0  # behind a projection that starts at zero


@pytest.mark.parametrize(
    ("ratios", "code", "words"),
    [
        ({"standard": 9.0}, 0, "standard fails, as it should: norm at step 1 grows with the width; to keep"),
        ({"standard": 1.0}, 1, "standard passes and should fail"),
        ({"mup": 1.0, "standard": 9.0}, 0, "mup passes, and standard fails"),
        ({"mup": 9.0, "standard": 9.0}, 1, "mup does not pass: norm"),
        ({"mup": 1.0, "standard": 1.0}, 1, "standard passes and should fail"),
    ],
)
def test_standard_should_fail_and_mup_should_pass(ratios, code, words, monkeypatch):
    checks = [Check(name, (64, 128), (Coordinate("norm", 1, (1.0, one)),)) for name, one in ratios.items()]
    monkeypatch.setattr("linnet.train.coordinates.check_coordinates", lambda *given, **options: checks)
    monkeypatch.setattr("linnet.train.coordinates.STEPS", (1,))
    result = CliRunner().invoke(app, ["train", "--model", "tnl-10m", "--data", "stdlib", "--coordinate-check"])
    assert result.exit_code == code and words in result.output


def test_the_learned_change_leaves_out_what_differs_between_first_weights():
    draw = torch.Generator().manual_seed(0)
    learned = 0.05 * torch.randn(400, 100, generator=draw, dtype=torch.float64)
    changes = [learned + 0.3 * torch.randn(400, 100, generator=draw, dtype=torch.float64) for _ in range(4)]
    size = learned.square().mean().sqrt().item()
    assert learned_size(changes) == pytest.approx(size, rel=0.1)
    assert learned_size([learned, learned]) == pytest.approx(size, rel=1e-12)
    pairs = [(changes[i] * changes[j]).mean().item() for i in range(4) for j in range(i)]
    assert learned_size(changes) == pytest.approx(math.sqrt(sum(pairs) / 6), rel=1e-12)
    assert learned_size([learned, -learned]) == 0.0


def test_one_seed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="seeds: 1 cannot tell"):
        check_coordinates(training(model=MODEL), tmp_path, seeds=1)


def test_a_linear_mixer_passes_though_its_random_logits_fall(tmp_path, monkeypatch):
    monkeypatch.setattr("linnet.train.coordinates.STEPS", (1, 2))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    options = {"gla": {"num_heads": 2}}
    model = {"d_model": 32, "layout": "gla+swiglu", "options": options, "parametrisation": "mup", "base_width": 32}
    config = training(model=model, data={"source": str(text), "tokenizer": {"kind": "byte"}})
    own, control = check_coordinates(config, tmp_path / "cache", widths=(32, 256), seeds=3)
    assert own.passed and not control.passed and control.worst.grows


def test_other_kinds_of_models_are_refused(tmp_path):
    config = read_training({"objective": "masked", "model": {"d_model": 16, "layout": "attention+mlp"}})
    with pytest.raises(ConfigError, match="--coordinate-check: needs a causal language model, not objective: masked"):
        check_coordinates(config, tmp_path)
