"""Denoisers against a float64 transcription of DiT's equations, and what both conditionings promise."""

import math

import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError, parse
from linnet.layers.block import modulate
from linnet.models import build
from linnet.models.recipes import get_recipe
from linnet.vision.config import DenoiserConfig
from linnet.vision.models import time_features

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


def test_small_scales_in_bfloat16_are_not_rounded_away():
    x, scale = torch.ones(1, 2, 3), torch.full((1, 3), 0.003, dtype=torch.bfloat16)
    assert torch.allclose(modulate(x, torch.zeros_like(scale), scale), torch.tensor(1.003), atol=1e-5)


def test_time_features_are_cosines_and_sines():
    t = torch.tensor([0, 1, 999])
    found = time_features(t, torch.float64)
    for row, step in zip(found, t.tolist(), strict=True):
        angles = [step * 10000 ** (-i / 128) for i in range(128)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert torch.allclose(row, torch.tensor(expected, dtype=torch.float64), atol=1e-10)


def test_dit_equals_a_transcription():
    """All of DiT: patches, positions, time, class, blocks with adaLN-zero, head; patches are cut row by row."""
    made = model()
    weights = {name: value for name, value in made.state_dict().items()}
    x, t, classes = inputs()
    width, heads, layers = 64, 2, 2

    def linear(name, y):
        return y @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(y):
        return (y - y.mean(-1, keepdim=True)) / torch.sqrt(y.var(-1, unbiased=False, keepdim=True) + 1e-6)

    cut = [x[:, :, i : i + 2, j : j + 2].flatten(1) for i in range(0, 8, 2) for j in range(0, 8, 2)]
    table = torch.zeros(16, width, dtype=torch.float64)
    for row in range(4):
        for column in range(4):
            for i in range(width // 4):
                rate = 10000 ** (-i / (width // 4))
                values = (math.sin(column * rate), math.cos(column * rate), math.sin(row * rate), math.cos(row * rate))
                for part, value in enumerate(values):
                    table[4 * row + column, part * width // 4 + i] = value
    y = linear("patches.proj", torch.stack(cut, 1)) + table.float().double()
    hidden = linear("time.hidden", time_features(t, torch.float64))
    condition = linear("time.output", F.silu(hidden)) + weights["classes.weight"][classes]
    for index in range(layers):
        block = f"backbone.blocks.{index}"
        b1, s1, g1, b2, s2, g2 = linear(f"{block}.modulation", F.silu(condition))[:, None].chunk(6, -1)
        z = norm(y) * (1 + s1) + b1
        q, k, v = (linear(f"{block}.mixer.{p}_proj", z).unflatten(-1, (heads, -1)).transpose(1, 2) for p in "qkv")
        scores = (q @ k.transpose(-1, -2) / math.sqrt(width / heads)).softmax(-1)
        y = y + g1 * linear(f"{block}.mixer.out_proj", (scores @ v).transpose(1, 2).flatten(2))
        z = norm(y) * (1 + s2) + b2
        y = y + g2 * linear(f"{block}.channel.down_proj", F.gelu(linear(f"{block}.channel.up_proj", z)))
    shift, scale = linear("modulation", F.silu(condition))[:, None].chunk(2, -1)
    patches = linear("head", norm(y) * (1 + scale) + shift)
    expected = torch.zeros(3, 2, 8, 8, dtype=torch.float64)
    for place in range(16):
        i, j = 2 * (place // 4), 2 * (place % 4)
        expected[:, :, i : i + 2, j : j + 2] = patches[:, place].view(3, 2, 2, 2)
    assert torch.allclose(made(x, t, classes), expected, rtol=0, atol=1e-9)


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
