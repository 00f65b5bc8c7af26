"""RG-LRU against the equations of its paper, token by token in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError, parse
from linnet.layers import MIXERS, LayerContext
from linnet.models import ModelConfig, count_parameters, family

D, HEADS, CHANNELS, T = 24, 2, 20, 9


def build(d_model=D, **options):
    torch.manual_seed(0)
    return MIXERS["rglru"](parse(MIXERS["rglru"].Config, options), LayerContext(d_model=d_model))


def test_the_layer_is_its_equations():
    mixer = build(num_heads=HEADS, channels=CHANNELS).double()
    torch.nn.init.normal_(mixer.gate_bias)
    torch.nn.init.normal_(mixer.conv.bias)
    u, width = torch.randn(2, T, D, dtype=torch.float64), CHANNELS // HEADS
    x = F.pad(mixer.in_proj(u), (0, 0, 3, 0))
    x = sum(x[:, j : j + T] * mixer.conv.weight[:, j] for j in range(4)) + mixer.conv.bias
    recurrence, inputs = (
        torch.block_diag(*mixer.gates[:, :, part * width : (part + 1) * width].unbind()) for part in (0, 1)
    )
    b_r, b_i = (mixer.gate_bias[:, part * width : (part + 1) * width].flatten() for part in (0, 1))
    a, h, states = torch.sigmoid(mixer.decay_logit), torch.zeros(2, CHANNELS, dtype=torch.float64), []
    for t in range(T):
        r, i = torch.sigmoid(x[:, t] @ recurrence + b_r), torch.sigmoid(x[:, t] @ inputs + b_i)
        a_t = a ** (8 * r)
        h = a_t * h + (1 - a_t**2).sqrt() * (i * x[:, t])
        states.append(h)
    expected = mixer.out_proj(F.gelu(mixer.gate_proj(u)) * torch.stack(states, 1))
    torch.testing.assert_close(mixer(u)[0], expected, rtol=1e-10, atol=1e-10)


def test_decays_start_between_the_bounds_of_the_paper():
    mixer = build(512, num_heads=1)
    decays = torch.sigmoid(mixer.decay_logit.detach().double()) ** 8
    assert decays.min() > 0.9 - 1e-6 and decays.max() < 0.999 + 1e-6
    assert decays.mean().item() == pytest.approx(0.9495, abs=0.01) and decays.std() > 0.02


def test_a_closed_recurrence_gate_gives_finite_gradients():
    mixer = build(num_heads=HEADS)
    with torch.no_grad():
        mixer.gate_bias.fill_(-1e4)  # r = 0: the decay is 1 and the root of 1 - a^2 is at its end
    x = torch.randn(1, T, D, requires_grad=True)
    mixer(x)[0].sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in mixer.parameters())


def test_the_default_has_four_squares_of_the_width_beside_its_gates():
    mixer = build(768, num_heads=4)
    assert mixer.channels == 1024
    gates, vectors = 2 * 1024 * 256, (2 + 4 + 1 + 1) * 1024  # biases of gates, convolution and its bias, Lambda
    assert sum(p.numel() for p in mixer.parameters()) == 4 * 768**2 + gates + vectors
    assert build(256, num_heads=4).channels == 4 * 8 * math.ceil(256 / 3 / 8)
    total, _ = count_parameters(family("rglru")(768, 2, 4))
    assert total == 2 * (4 * 768**2 + gates + vectors + 9 * 768**2) + (256 + 5) * 768


def test_blocks_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ConfigError, match="channels: 22 .*num_heads 4; use 20"):
        options = {"rglru": {"channels": 22, "num_heads": 4}}
        parse(ModelConfig, {"d_model": 24, "layout": "rglru", "options": options})
