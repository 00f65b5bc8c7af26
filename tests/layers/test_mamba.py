"""Mamba and its convolution: equations by hand, initialisation that a model keeps, costs."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from linnet.config import parse
from linnet.layers import MIXERS, LayerContext
from linnet.layers.short_conv import ShortConv
from linnet.models import CausalLM, ModelConfig, build_model, count_parameters, family, flops_exact, state_bytes

Mamba = MIXERS["mamba"]
MAD = {"expand": 2, "state": 4, "dt_rank": 8}


def build(d_model=128, **options):
    torch.manual_seed(0)
    return Mamba(parse(Mamba.Config, options), LayerContext(d_model=d_model))


def conv(width=4, channels=5):
    torch.manual_seed(0)
    return ShortConv(channels, width).double()


def test_the_convolution_is_that_of_pytorch():
    layer, x = conv(), torch.randn(2, 9, 5, dtype=torch.float64)
    expected = F.conv1d(F.pad(x, (0, 0, 3, 0)).mT, layer.weight[:, None], groups=5).mT
    y, none = layer(x)
    assert none is None
    torch.testing.assert_close(y, expected)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 12), max_size=5), width=st.integers(2, 5), given_state=st.booleans())
def test_documents_of_any_length_are_convolved_alone(cuts, width, given_state):
    layer, x, edges = conv(width), torch.randn(1, 12, 5, dtype=torch.float64), [0, *sorted(cuts), 12]
    state = torch.randn(len(edges) - 1, width - 1, 5, dtype=torch.float64) if given_state else None
    y, after = layer(x, state, torch.tensor(edges, dtype=torch.int32))
    for i, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        alone, left = layer(x[:, start:end], None if state is None else state[i : i + 1])
        torch.testing.assert_close(y[:, start:end], alone)
        if state is not None:
            torch.testing.assert_close(after[i : i + 1], left)
    assert (after is None) == (state is None)


def test_the_layer_is_its_equations():
    mixer = build(12, state=3, dt_rank=2).double()
    u = torch.randn(2, 10, 12, dtype=torch.float64)
    x, z = mixer.in_proj(u), mixer.gate_proj(u)
    padded = F.pad(x, (0, 0, 3, 0))
    x = F.silu(sum(padded[:, j : j + 10] * mixer.conv.weight[:, j] for j in range(4)))
    dt, B, C = mixer.select_proj(x).split([2, 3, 3], -1)
    delta = F.softplus(dt @ mixer.dt_weight.T + mixer.dt_bias)
    state, outputs = torch.zeros(2, 24, 3, dtype=torch.float64), []
    for t in range(10):
        decay = torch.exp(-delta[:, t, :, None] * mixer.A_log.exp())
        state = decay * state + (delta[:, t] * x[:, t])[..., None] * B[:, t, None]
        outputs.append((state * C[:, t, None]).sum(-1) + mixer.skip * x[:, t])
    expected = mixer.out_proj(torch.stack(outputs, 1) * F.silu(z))
    torch.testing.assert_close(mixer(u)[0], expected)


def test_a_model_keeps_the_initialisation_of_the_recurrence():
    config = ModelConfig(d_model=128, layout="mamba x2", options={"mamba": MAD}, vocab_size=16)
    mixer = build_model(config, seed=3).backbone.blocks[1].mixer
    torch.testing.assert_close(mixer.A_log, torch.arange(1.0, 5.0).log().expand(256, 4))
    assert (mixer.skip == 1).all()
    bound = 8**-0.5
    assert mixer.dt_weight.abs().max() <= bound and abs(mixer.dt_weight.std() / (bound / 3**0.5) - 1) < 0.1
    steps = F.softplus(mixer.dt_bias).log()
    assert math.log(1e-3) - 1e-3 <= steps.min() and steps.max() <= math.log(1e-1) + 1e-3
    assert abs(steps.mean() - math.log(1e-2)) < 0.3  # log-uniform
    assert abs(mixer.in_proj.weight.std() / 0.02 - 1) < 0.05
    assert abs(mixer.out_proj.weight.std() / (0.02 / 2) - 1) < 0.05  # sqrt(2 x 2 layers)


def test_the_size_of_mad():
    """107,264 parameters in the published build, less the 256 biases of its convolution; 1,024 states a layer."""
    mixer = build(**MAD)
    assert sum(p.numel() for p in mixer.parameters()) == 107_264 - 256
    spec = mixer.state_spec(1, 1000)
    assert math.prod(spec["ssm"].shape) == 1024 and spec["conv"].shape == (1, 3, 256)
    config = ModelConfig(d_model=128, layout="mamba x4", options={"mamba": MAD}, vocab_size=16)
    assert state_bytes(config, 10) == state_bytes(config, 10_000) == 4 * 4 * (1024 + 768)


def test_flops_paper_is_the_formula_of_paper_004():
    mixer, (length, d, e, s, r) = build(**MAD), (100, 128, 2, 4, 8)
    terms = 4 * d * d * e + 6 * d * e + 2 * d * e * (r + 2 * s) + 2 * d * e * r + 2 * d * e * s + 2 * d * d * e
    assert mixer.flops_paper(length) == length * terms


@pytest.mark.parametrize("training", [True, False])
def test_exact_flops_are_what_is_counted_and_the_convolution(training):
    config = family("mamba")(64, 3, vocab_size=128)
    with torch.device("meta"):
        model, tokens = CausalLM(config), torch.zeros(1, 200, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(training):
        total, _ = model.loss(tokens, tokens)
        if training:
            total.backward()
    convolutions = 3 * 2 * 200 * 4 * 128 * (3 if training else 1)
    assert flops_exact(config, 200, training=training) == counter.get_total_flops() + convolutions


def test_two_blocks_have_the_parameters_of_a_transformer_block():
    mamba, llama = (count_parameters(family(name)(256, depth))[1] for name, depth in (("mamba", 2), ("llama", 1)))
    assert abs(mamba / llama - 1) < 0.15


def test_many_models_at_once_are_one_at_a_time():
    """The forward of a bundle: parameters stacked, one call, gradients of each model its own."""
    models = [build(8, state=2, dt_rank=2).double() for _ in range(3)]
    for model in models:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    stacked, _ = torch.func.stack_module_state(models)
    stacked = {name: x.detach().requires_grad_() for name, x in stacked.items()}
    u = torch.randn(3, 2, 11, 8, dtype=torch.float64)
    y = torch.vmap(lambda weights, u: torch.func.functional_call(models[0], weights, (u,))[0])(stacked, u)
    y.sin().sum().backward()
    for i, model in enumerate(models):
        alone, _ = model(u[i])
        torch.testing.assert_close(y[i], alone)
        alone.sin().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(stacked[name].grad[i], parameter.grad)


def test_long_sequences_stay_finite_in_bfloat16():
    mixer = build(32).bfloat16()
    x = (10 * torch.randn(1, 600, 32)).bfloat16().requires_grad_()
    y, _ = mixer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (x, *mixer.parameters()))
