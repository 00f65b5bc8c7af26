"""Models of release 0.1.0: their folders and weights."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from linnet.config import ConfigError, parse
from linnet.hf.model import LinnetConfig
from linnet.models import ModelConfig, build_model, get_recipe, upgrade
from linnet.runs import load_model
from linnet.train.optimizer import Optimizer, OptimizerConfig

FOLDERS = Path(__file__).parents[1] / "fixtures" / "models-0.1.0"  # written by 0.1.0: width 16, two layers, seed 1


def old_form(config: ModelConfig) -> dict:
    """The configuration as 0.1.0 wrote it."""
    values = config.model_dump(mode="json")
    for key in ("positions", "num_positions", "dropout", "bias"):
        del values[key]
    tpe = values["options"].pop("tpe")
    return values | {"layout": config.layout.removeprefix("tpe "), "tpe": tpe}


def losses(config: ModelConfig, steps: int) -> list[float]:
    model, found = build_model(config, seed=3), []
    optimizer, generator = Optimizer(model, OptimizerConfig()), torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(0, 64, (2, 33), generator=generator)
        total, count = model.loss(tokens[:, :-1], tokens[:, 1:])
        (total / count).backward()
        optimizer.clip(optimizer.gradient_norm())
        optimizer.step(1.0)
        found.append((total / count).item())
    return found


@pytest.mark.parametrize("name", ["lightnet-10m", "cosformer2-10m"])
def test_the_key_tpe_gives_the_model_that_the_mixer_gives(name):
    new = get_recipe(name)
    assert parse(ModelConfig, upgrade(old_form(new))) == new
    with pytest.raises(ConfigError, match=r"tpe: unknown key .* start of `layout`.*`options\.tpe`"):
        parse(ModelConfig, old_form(new))
    shrunk = {"d_model": 32, "num_layers": 2, "options": new.options | {name.partition("-")[0]: {"num_heads": 2}}}
    old = old_form(new) | shrunk | {"options": {name.partition("-")[0]: {"num_heads": 2}}}
    old = parse(ModelConfig, upgrade(old))
    new = parse(ModelConfig, new.model_dump() | shrunk)
    assert losses(old, 20) == losses(new, 20)


@pytest.mark.parametrize("name", ["lightnet", "cosformer2"])
@pytest.mark.filterwarnings("error")
def test_a_folder_of_0_1_0_is_read_without_a_warning(name):
    saved = load_file(FOLDERS / name / "model.safetensors")
    assert {"backbone.tpe.log_rate", "backbone.tpe.weight"} < set(saved)
    model, _ = load_model(FOLDERS / name)
    assert model.config.layout == f"tpe {name}+{'swiglu' if name == 'lightnet' else 'sglu'} x2"
    assert model.config.options["tpe"]["num_modes"] == 8
    weights = model.state_dict()
    assert list(weights) == list(build_model(model.config).state_dict())
    assert set(saved) == set(weights) and all(torch.equal(saved[key], weights[key]) for key in saved)
    for key, drawn in build_model(model.config, seed=1).state_dict().items():  # close: CPUs draw normals differently
        torch.testing.assert_close(drawn, saved[key], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["lightnet", "cosformer2"])
@pytest.mark.filterwarnings("error")
def test_an_exported_config_of_0_1_0_is_read(name):
    exported = LinnetConfig.from_pretrained(FOLDERS / name)
    config = yaml.safe_load((FOLDERS / name / "config.yaml").read_text())
    assert exported.linnet() == parse(ModelConfig, upgrade(config["model"])) and exported.num_hidden_layers == 2
