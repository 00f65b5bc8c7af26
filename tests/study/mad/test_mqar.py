"""MQAR as `linnet mad run --budget mqar` has it: models, runs and their shapes."""

import json

import pytest

from linnet.config import ConfigError
from linnet.models import ModelConfig
from linnet.models.costs import flops_exact
from linnet.study.executors import ExecutorConfig
from linnet.study.mad.architectures import mqar_architecture
from linnet.study.mad.bundle import build, run_flops
from linnet.study.mad.run import bundles, mad_runs, run_mad
from linnet.study.mad.settings import BUDGETS, Budget, GridPoint


def test_models_are_two_layers_of_a_mixer_with_one_head():
    for name in ("hgrn2", "hgrn", "attention", "gla", "mamba", "tnl"):
        config = mqar_architecture(name)
        assert config.layout == f"{name} x2" and config.d_model == 64 and config.norm == "layernorm"
        assert config.tie_embeddings and config.options[name].get("num_heads", 1) == 1
        assert all(block.channel is None for block in config.blocks)
    changed = mqar_architecture("hgrn2+swiglu", {"options": {"hgrn2": {"num_heads": 4}, "swiglu": {"inner": 32}}})
    assert changed.options["hgrn2"]["num_heads"] == 4 and changed.layout == "hgrn2+swiglu"
    for wrong, said in (("hgrn3", "did you mean 'hgrn'"), ("mad-mamba", "give a token mixer or a layout")):
        with pytest.raises(ConfigError, match=said):
            mqar_architecture(wrong)


def test_runs_have_the_width_of_their_setting_and_logits_for_the_questions_alone():
    runs = mad_runs({"hgrn2": mqar_architecture("hgrn2")}, "mqar")
    assert len(runs) == 32 and {run.config["model"]["d_model"] for run in runs} == {64, 128}
    for run in runs:
        config = run.config
        assert config["width"] == config["model"]["d_model"] and config["answers"] == config["options"]["num_pairs"]
        assert config["training"]["betas"] == [0.9, 0.999] and config["training"]["enough"] == 0.99
    assert [len(group) for group in bundles(runs, 24)] == [4] * 8, "the rates of a setting are one bundle"
    assert bundles(runs, 24)[0][0].config["setting"] == "mqar/seq_len=512,num_pairs=64,width=128"

    first = runs[0].config
    assert build(first).answers == 4
    model = ModelConfig.model_validate(first["model"])
    head = 6.0 * 64 * 8192
    expected = 64 * 100_000 * (flops_exact(model, 64) - 60 * head)
    assert run_flops(first) == pytest.approx(expected) and expected > 64 * 100_000 * 4 * head


@pytest.fixture
def tiny(monkeypatch):
    grid = (GridPoint(1e-3, 0.1), GridPoint(1e-2, 0.1))
    small = Budget("mqar", "", False, True, grid, epochs=2, batch_size=16, max_samples=32, held_out=8, mqar=True)
    monkeypatch.setitem(BUDGETS, "mqar", small)


def test_a_run_is_trained_bundled_and_resumed(tiny, tmp_path):
    models = {name: mqar_architecture(name) for name in ("hgrn2", "hgrn")}
    options = {"budget": "mqar", "settings": ["seq_len=64"], "device": "cpu", "bundle": 4}
    options["executor"] = ExecutorConfig(kind="inline", retries=0)
    result = run_mad({"hgrn2": models["hgrn2"]}, tmp_path, **options)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    assert not result.failed and len(stamps) == 4
    result = run_mad(models, tmp_path, **options)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/result.json")]
    assert len(found) == 8 and {path: path.stat().st_mtime_ns for path in stamps} == stamps
    for one in found:
        wide = one["setting"].endswith("width=128")
        assert one["bundle"] == 2 and one["epoch"] == 2 and one["budget"] == "mqar" and one["status"] == "done"
        width = 128 if wide else 64
        assert one["state_size"] == (2 * width if one["architecture"] == "hgrn" else 2 * width**2)
        assert one["parameters"] > 8192 * width
    assert set(result.scores) == set(models) and not result.scores["hgrn"].comparable
    assert "6 of 8 settings" in result.scores["hgrn"].reasons[0]
