"""Denoisers against a float64 transcription of DiT's equations, and what both conditionings promise."""

import math

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.models import DenoiserConfig, build
from linnet.models.denoiser import time_features
from linnet.models.recipes import get_recipe

SMALL = {"image_size": 8, "channels": 1, "classes": 3}


def config(recipe: str = "dit-8px", **changes) -> DenoiserConfig:
    return parse(DenoiserConfig, {"recipe": recipe, "num_layers": 2, **SMALL, **changes})


def model(recipe: str = "dit-8px", seed: int = 0, drawn: bool = True, **changes):
    """A float64 denoiser, whose zero layers are drawn too with `drawn`."""
    made = build("denoiser", config(recipe, **changes), seed).double().eval()
    if drawn:
        generator = torch.Generator().manual_seed(1)
        for parameter in made.parameters():
            if not parameter.any():
                parameter.data.normal_(0, 0.2, generator=generator)
    return made


def inputs(batch: int = 3, side: int = 8, channels: int = 1):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, channels, side, side, generator=generator, dtype=torch.float64)
    return x, torch.tensor([0, 500, 999])[:batch], torch.tensor([0, 3, 2])[:batch]


def test_time_features_are_cosines_and_sines():
    t = torch.tensor([0, 1, 999])
    found = time_features(t, torch.float64)
    for row, step in zip(found, t.tolist(), strict=True):
        angles = [step * 10000 ** (-i / 128) for i in range(128)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert torch.allclose(row, torch.tensor(expected, dtype=torch.float64), atol=1e-10)


@pytest.mark.parametrize("recipe", ["dit-8px", "lightnet-dit-8px"])
def test_a_new_denoiser_predicts_no_noise(recipe):
    made = model(recipe, drawn=False)
    assert not made(*inputs()).any()
    if recipe == "dit-8px":  # its blocks are identities
        x = torch.randn(2, 16, 64, dtype=torch.float64)
        block = made.backbone.blocks[0]
        assert torch.equal(block(x, condition=torch.ones(2, 64, dtype=torch.float64))[0], x)


@pytest.mark.parametrize("recipe", ["dit-8px", "lightnet-dit-8px"])
@pytest.mark.parametrize("layout", [None, "hgrn2+swiglu", "mamba"])
def test_time_and_class_reach_every_pixel(recipe, layout):
    made = model(recipe, **({} if layout is None else {"layout": layout}))
    x, t, classes = inputs()
    out = made(x, t, classes)
    assert out.shape == (3, 2, 8, 8) and out.isfinite().all()
    for changed in ((x, t + 1 - 2 * (t > 998).long(), classes), (x, t, (classes + 1) % 4)):
        assert ((made(*changed) - out).abs() > 1e-9).all()
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_each_image_is_computed_alone():
    made = model("lightnet-dit-8px")
    x, t, classes = inputs()
    alone = torch.cat([made(x[i : i + 1], t[i : i + 1], classes[i : i + 1]) for i in range(3)])
    assert torch.allclose(made(x, t, classes), alone, atol=1e-12)


def test_other_sizes_work_without_a_learned_table():
    x, t, classes = inputs(side=12)
    for recipe in ("dit-8px", "lightnet-dit-8px"):
        assert model(recipe)(x, t, classes).shape == (3, 2, 12, 12)
    with pytest.raises(ValueError, match="position: learned"):
        model(position="learned")(x, t, classes)
    with pytest.raises(ValueError, match="patch"):
        model()(inputs(side=9)[0], t, classes)
    with pytest.raises(ValueError, match="channels"):
        model()(inputs(channels=3)[0], t, classes)


def test_weights_start_as_in_dit():
    made = build("denoiser", config(), 0)
    up = made.backbone.blocks[0].channel.up_proj.weight
    assert up.abs().max() <= math.sqrt(6 / (64 + 256)) and up.std() > 0.05  # uniform, as Xavier
    assert 0.015 < made.time.hidden.weight.std() < 0.025 > made.classes.weight.std() > 0.015
    assert not made.head.weight.any() and not made.modulation.weight.any()


def test_bad_configurations_name_the_key():
    with pytest.raises(ConfigError, match=r"image_size: 9 .*patch") as error:
        config(image_size=9, positions="sinusoidal")
    assert "positions: sinusoidal" in str(error.value)
    with pytest.raises(ConfigError, match="class_drop"):
        config(class_drop=1.0)
    with pytest.raises(ConfigError, match="sin_cos"):
        parse(
            DenoiserConfig,
            {
                "d_model": 6,
                "layout": "attention+mlp",
                "position": "sin_cos",
                "options": {"attention": {"num_heads": 1}},
            },
        )


def test_learn_sigma_false_has_one_output_per_channel():
    assert model(learn_sigma=False)(*inputs()).shape == (3, 1, 8, 8)


def test_recipes_are_denoisers():
    assert get_recipe("dit-xl").conditioning == "adaln_zero" and get_recipe("lightnet-dit-xl").conditioning == "tokens"
