"""Mamba, Mamba-2, Mamba-3 and the convolution: equations by hand, initialisation that a model keeps, costs."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from linnet.config import ConfigError, parse
from linnet.layers import MIXERS, LayerContext
from linnet.layers.short_conv import ShortConv
from linnet.models import (
    CausalLM,
    ModelConfig,
    build_model,
    count_parameters,
    family,
    flops_exact,
    get_recipe,
    state_bytes,
)
from linnet.train.optimizer import split

Mamba = MIXERS["mamba"]
MAD = {"expand": 2, "state": 4, "dt_rank": 8}


def build(d_model=128, name="mamba", **options):
    torch.manual_seed(0)
    return MIXERS[name](parse(MIXERS[name].Config, options), LayerContext(d_model=d_model))


def conv(width=4, channels=5):
    torch.manual_seed(0)
    return ShortConv(channels, width).double()


def test_the_convolution_is_that_of_pytorch():
    layer, x = conv(), torch.randn(2, 9, 5, dtype=torch.float64)
    expected = F.conv1d(F.pad(x, (0, 0, 3, 0)).mT, layer.weight[:, None], groups=5).mT
    y, none = layer(x)
    assert none is None
    torch.testing.assert_close(y, expected)


@settings(max_examples=30)
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


@pytest.mark.parametrize("name, channels", [("mamba", 128), ("mamba2", 128 + 2 * 128)])
@pytest.mark.parametrize("training", [True, False])
def test_exact_flops_are_what_is_counted_and_the_convolution(name, channels, training):
    config = family(name)(64, 3, vocab_size=128)
    with torch.device("meta"):
        model, tokens = CausalLM(config), torch.zeros(1, 200, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(training):
        total, _ = model.loss(tokens, tokens)
        if training:
            total.backward()
    convolutions = 3 * 2 * 200 * 4 * channels * (3 if training else 1)
    assert flops_exact(config, 200, training=training) == counter.get_total_flops() + convolutions


@pytest.mark.parametrize("name, width", [("mamba", 256), ("mamba2", 512)])  # of which B and C have 128 channels each
def test_two_blocks_have_the_parameters_of_a_transformer_block(name, width):
    mamba, llama = (count_parameters(family(name)(width, depth))[1] for name, depth in ((name, 2), ("llama", 1)))
    assert abs(mamba / llama - 1) < 0.15


MANY = [{"dt_rank": 2}, {"name": "mamba2", "head_dim": 4, "num_groups": 2}, {"name": "mamba3", "rope_fraction": 1.0}]


@pytest.mark.parametrize("options", MANY)
def test_many_models_at_once_are_one_at_a_time(options):
    """The forward of a bundle: parameters stacked, one call, gradients of each model its own."""
    models = [build(8, state=2, **options).double() for _ in range(3)]
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


@pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba3"])
def test_long_sequences_stay_finite_in_bfloat16(name):
    mixer = build(32, name).bfloat16()
    x = (10 * torch.randn(1, 600, 32)).bfloat16().requires_grad_()
    y, _ = mixer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (x, *mixer.parameters()))


MAMBA2 = {
    "one group": {},
    "groups": {"num_groups": 3, "head_dim": 4},
    "norm first": {"norm_before_gate": True},
    "norm first, groups": {"norm_before_gate": True, "num_groups": 3, "head_dim": 4},
    "no norm": {"norm": False, "conv_bias": False},
    "limits": {"dt_limit": [0.01, 0.05]},
}


@pytest.mark.parametrize("options", MAMBA2.values(), ids=MAMBA2)
def test_mamba2_is_its_equations(options):
    mixer = build(12, "mamba2", state=3, **options).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    u, H, P, G = torch.randn(2, 10, 12, dtype=torch.float64), mixer.num_heads, mixer.head_dim, mixer.num_groups
    assert H * P == 24 and G == options.get("num_groups", 1)

    def convolved(proj, layer):
        y = F.conv1d(F.pad(proj(u), (0, 0, 3, 0)).mT, layer.weight[:, None], layer.bias, groups=layer.channels).mT
        return F.silu(y)

    x = convolved(mixer.in_proj, mixer.x_conv).unflatten(-1, (H, P))
    B, C = (
        convolved(proj, layer).unflatten(-1, (G, 3)).repeat_interleave(H // G, 2)
        for proj, layer in ((mixer.B_proj, mixer.B_conv), (mixer.C_proj, mixer.C_conv))
    )
    dt = F.softplus(mixer.dt_proj(u) + mixer.dt_bias).clamp(*options.get("dt_limit", (0, math.inf)))
    state, outputs = torch.zeros(2, H, 3, P, dtype=torch.float64), []
    for t in range(10):
        decay = torch.exp(-dt[:, t] * mixer.A_log.exp())[..., None, None]
        state = decay * state + dt[:, t, :, None, None] * B[:, t, :, :, None] * x[:, t, :, None]
        outputs.append(torch.einsum("bhn,bhnp->bhp", C[:, t], state) + mixer.skip[:, None] * x[:, t])
    y, z = torch.stack(outputs, 1).flatten(-2), F.silu(mixer.gate_proj(u))

    def normed(y):
        if mixer.norm is None:
            return y
        groups = y.unflatten(-1, (G, -1))
        return (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * mixer.norm.weight

    expected = mixer.out_proj(normed(y) * z if options.get("norm_before_gate") else normed(y * z))
    torch.testing.assert_close(mixer(u)[0], expected)


RELEASED = {
    "130m": 128_989_632, "370m": 368_346_624, "780m": 780_161_280, "1.3b": 1_343_757_312, "2.7b": 2_702_599_680
}  # fmt: skip


@pytest.mark.parametrize("size", RELEASED)
def test_mamba2_has_the_parameters_of_the_released_models(size):
    config = get_recipe(f"mamba2-{size}")
    assert config.vocab_size == 50_288 and count_parameters(config)[0] == RELEASED[size]


@pytest.mark.parametrize("options", [{}, {"num_groups": 3, "head_dim": 4, "rope_fraction": 1.0}])
def test_mamba3_is_its_equations(options):
    mixer = build(12, "mamba3", state=6, **options).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    u, H, P, A = torch.randn(2, 10, 12, dtype=torch.float64), mixer.num_heads, mixer.head_dim, mixer.config.angles
    assert H * P == 24 and A == (3 if options else 1)
    dt, share = F.softplus(mixer.dt_proj(u) + mixer.dt_bias), mixer.share_proj(u).sigmoid()
    rate = mixer.A_proj(u)
    decay = torch.exp(-torch.where(rate >= 0, 1 + rate, 1 / (1 - rate)).clamp(min=1e-4) * dt)
    theta = (math.pi * torch.tanh(mixer.angle_proj(u))[:, :, None] * dt[..., None]).cumsum(1)  # [B, T, H, A]

    def turned(proj, norm, bias):
        y = proj(u).unflatten(-1, (-1, 6))
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        y = y.repeat_interleave(H // y.shape[2], 2) + bias
        spun = torch.view_as_complex(y[..., : 2 * A].unflatten(-1, (A, 2)).contiguous()) * torch.exp(1j * theta)
        return torch.cat([torch.view_as_real(spun).flatten(-2), y[..., 2 * A :]], -1)

    k, q = turned(mixer.B_proj, mixer.B_norm, mixer.B_bias), turned(mixer.C_proj, mixer.C_norm, mixer.C_bias)
    v = mixer.in_proj(u).unflatten(-1, (H, P))
    state, before, outputs = torch.zeros(2, H, 6, P, dtype=torch.float64), 0.0, []
    for t in range(10):
        product = k[:, t, :, :, None] * v[:, t, :, None]
        late, own = (((1 - share) * dt)[:, t, :, None, None], (share * dt)[:, t, :, None, None])
        state = decay[:, t, :, None, None] * (state + late * before) + own * product
        before = product
        outputs.append(torch.einsum("bhn,bhnp->bhp", q[:, t], state) + mixer.skip[:, None] * v[:, t])
    expected = mixer.out_proj(torch.stack(outputs, 1).flatten(-2) * F.silu(mixer.gate_proj(u)))
    torch.testing.assert_close(mixer(u)[0], expected)


def test_mamba3_has_the_parameters_of_the_published_layer():
    assert sum(p.numel() for p in build(2048, "mamba3").parameters()) == 26_165_632


@pytest.mark.parametrize("offsets", [[0, 4, 4, 9, 12], [0, 0, 12], [0, 12, 12]])
def test_documents_of_mamba3_go_on_from_states_and_leave_them(offsets):
    """Empty documents leave their states, angles and last tokens as they are."""
    mixer, N = build(12, "mamba3", state=4, rope_fraction=1.0).double(), len(offsets) - 1
    x = torch.randn(1, 12, 12, dtype=torch.float64)
    state = {name: torch.randn(spec.shape, dtype=torch.float64).abs() for name, spec in mixer.state_spec(N, 12).items()}
    y, after = mixer(x, {name: z.clone() for name, z in state.items()}, torch.tensor(offsets, dtype=torch.int32))
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        alone = {name: z[n : n + 1].clone() for name, z in state.items()}
        for t in range(start, end):
            out, alone = mixer.step(x[:, t], alone)
            torch.testing.assert_close(y[:, t], out)
        for name, z in alone.items():
            torch.testing.assert_close(after[name][n : n + 1], z)


def test_mamba2_carries_one_state_a_head_and_the_inputs_of_its_convolutions():
    config = ModelConfig(d_model=2048, layout="mamba2", vocab_size=16)
    assert state_bytes(config, 10) == state_bytes(config, 10_000) == 4 * (64 * 64 * 128 + 3 * (4096 + 2 * 128))


def test_a_model_keeps_the_initialisation_of_mamba2():
    config = ModelConfig(d_model=512, layout="mamba2 x2", options={"mamba2": {"head_dim": 8}}, vocab_size=16)
    mixer = build_model(config, seed=3).backbone.blocks[1].mixer
    rates, steps = mixer.A_log.exp(), F.softplus(mixer.dt_bias).log()
    assert 0.999 < rates.min() < 2 and 15 < rates.max() <= 16.001 and (mixer.skip == 1).all()
    assert math.log(1e-3) - 1e-3 <= steps.min() and steps.max() <= math.log(1e-1) + 1e-3
    assert abs(steps.mean() - math.log(1e-2)) < 0.4
    assert abs(mixer.in_proj.weight.std() / 0.02 - 1) < 0.05


@pytest.mark.parametrize("layout, branches", [("mamba2 x4", 4), ("mamba2 x2 attention+swiglu x3", 8)])
def test_the_end_of_mamba2_is_scaled_by_the_branches_of_the_stack(layout, branches):
    model = build_model(ModelConfig(d_model=256, layout=layout, vocab_size=16))
    weight = model.backbone.blocks[0].mixer.out_proj.weight
    assert weight.std().item() == pytest.approx(0.02 / branches**0.5, rel=0.02)


def test_rates_steps_and_skip_of_mamba2_have_no_weight_decay():
    model = build_model(ModelConfig(d_model=16, layout="mamba2", vocab_size=16))
    names = {parameter: name.rpartition(".")[2] for name, parameter in model.named_parameters()}
    hidden, decayed, rest = split(model, [])
    assert not {names[p] for p in (*hidden, *decayed)} & {"A_log", "dt_bias", "skip"}
    assert {names[p] for p in rest} >= {"A_log", "dt_bias", "skip"}


def test_mamba3_refuses_states_without_a_pair():
    with pytest.raises(ConfigError, match="state: 1 has no pair to turn"):
        parse(ModelConfig, {"d_model": 16, "layout": "mamba3", "options": {"mamba3": {"state": 1}}, "vocab_size": 16})


BAD = {
    "head_dim: 5 does not divide the 32 channels .* use 0 or 1": {"head_dim": 5},
    "num_groups: 3 does not divide the 8 heads; use 1": {"head_dim": 4, "num_groups": 3},
    r"dt_limit: \[0.1, 0.01\] is not a range": {"dt_limit": [0.1, 0.01]},
    "dt_limit.* finite": {"dt_limit": [0.0, math.inf]},
    "norm_before_gate: true needs the norm": {"norm": False, "norm_before_gate": True},
}


@pytest.mark.parametrize("message", BAD)
def test_options_of_mamba2_that_do_not_fit_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        parse(ModelConfig, {"d_model": 16, "layout": "mamba2", "options": {"mamba2": BAD[message]}, "vocab_size": 16})
