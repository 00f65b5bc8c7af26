"""Mixers on the gated delta rule: equations by hand, published parameter counts, initialisation, refusals."""

import math

import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError, parse
from linnet.layers import MIXERS, LayerContext
from linnet.models import ModelConfig, build_model, count_parameters
from linnet.train.optimizer import split


def build(name, d_model=16, **options):
    torch.manual_seed(0)
    cls = MIXERS[name]
    return cls(parse(cls.Config, options), LayerContext(d_model=d_model)).double()


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolved(conv, x):
    padded = F.pad(x, (0, 0, 3, 0))
    return F.silu(sum(padded[:, j : j + x.shape[1]] * conv.weight[:, j] for j in range(4)))


def recurrence(mixer, x, log_decay, beta, group):
    """The states and outputs of a mixer, token by token, before its norm: [B, T, HV, V]."""
    K, V = mixer.key_dim, mixer.value_dim
    q = unit(convolved(mixer.q_conv, mixer.q_proj(x)).unflatten(-1, (-1, K))).repeat_interleave(group, 2)
    k = unit(convolved(mixer.k_conv, mixer.k_proj(x)).unflatten(-1, (-1, K))).repeat_interleave(group, 2)
    v = convolved(mixer.v_conv, mixer.v_proj(x)).unflatten(-1, (-1, V))
    S, outputs = torch.zeros(*q[:, 0].shape, V, dtype=x.dtype), []
    for t in range(x.shape[1]):
        S = log_decay[:, t].exp()[..., None] * S
        correction = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t, :, :, None] * correction[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) / math.sqrt(K))
    return torch.stack(outputs, 1)


def rms(mixer, o):
    return o / (o.square().mean(-1, keepdim=True) + mixer.config.norm_eps).sqrt() * mixer.norm.weight


@pytest.mark.parametrize("negative", [False, True])
def test_gdn_is_its_equations(negative):
    mixer = build("gdn", num_heads=2, num_v_heads=4, allow_neg_eigval=negative)
    assert (mixer.key_dim, mixer.value_dim) == (6, 12)
    x = torch.randn(2, 10, 16, dtype=torch.float64)
    log_decay = -mixer.A_log.exp() * F.softplus(mixer.decay_proj(x) + mixer.dt_bias)
    beta = mixer.beta_proj(x).sigmoid() * (2 if negative else 1)
    o = rms(mixer, recurrence(mixer, x, log_decay[..., None], beta, 2))
    gate = F.silu(mixer.gate_proj(x)).unflatten(-1, (4, 12))
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj((o * gate).flatten(-2)))


def test_delta_net_is_its_equations():
    mixer = build("delta_net", num_heads=2)
    assert (mixer.key_dim, mixer.value_dim) == (8, 8)
    x = torch.randn(2, 10, 16, dtype=torch.float64)
    beta = mixer.beta_proj(x).sigmoid()
    o = rms(mixer, recurrence(mixer, x, torch.zeros_like(beta)[..., None], beta, 1))
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj(o.flatten(-2)))


@pytest.mark.parametrize("bound", [None, -5.0])
def test_kda_is_its_equations(bound):
    mixer = build("kda", num_heads=2, lower_bound=bound)
    x = torch.randn(2, 10, 16, dtype=torch.float64)
    f = (mixer.decay_up(mixer.decay_down(x)) + mixer.dt_bias).unflatten(-1, (2, 8))
    rates = mixer.A_log.exp()[:, None]
    log_decay = -rates * F.softplus(f) if bound is None else bound * torch.sigmoid(rates * f)
    assert (mixer.A_log == 0).all() == (bound is not None)
    o = rms(mixer, recurrence(mixer, x, log_decay, mixer.beta_proj(x).sigmoid(), 1))
    gate = mixer.gate_up(mixer.gate_down(x)).sigmoid().unflatten(-1, (2, 8))
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj((o * gate).flatten(-2)))


def test_gdn2_is_its_equations():
    mixer = build("gdn2", num_heads=2, num_v_heads=4, allow_neg_eigval=True)
    K, V, x = mixer.key_dim, mixer.value_dim, torch.randn(2, 10, 16, dtype=torch.float64)
    q = unit(convolved(mixer.q_conv, mixer.q_proj(x)).unflatten(-1, (2, K)))
    k = unit(convolved(mixer.k_conv, mixer.k_proj(x)).unflatten(-1, (2, K)))
    v = convolved(mixer.v_conv, mixer.v_proj(x)).unflatten(-1, (4, V))
    f = (mixer.decay_up(mixer.decay_down(x)) + mixer.dt_bias).unflatten(-1, (2, K))
    decay = (-mixer.A_log.exp()[:, None] * F.softplus(f)).exp()
    erase = 2 * mixer.beta_proj(x).sigmoid().unflatten(-1, (2, K))
    written = mixer.write_proj(x).sigmoid().unflatten(-1, (4, V)) * v
    S, outputs = torch.zeros(2, 4, K, V, dtype=torch.float64), torch.zeros(2, 10, 4, V, dtype=torch.float64)
    for t in range(10):
        for j in range(4):
            key, R = k[:, t, j // 2], decay[:, t, j // 2, :, None] * S[:, j]
            read = torch.einsum("bk,bkv->bv", erase[:, t, j // 2] * key, R)
            S[:, j] = R + key[:, :, None] * (written[:, t, j] - read)[:, None]
            outputs[:, t, j] = torch.einsum("bk,bkv->bv", q[:, t, j // 2], S[:, j]) / math.sqrt(K)
    gate = mixer.gate_up(mixer.gate_down(x)).sigmoid().unflatten(-1, (4, V))
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj((rms(mixer, outputs) * gate).flatten(-2)))


def test_gated_delta_product_is_its_equations():
    mixer = build("gated_delta_product", num_heads=2, num_v_heads=4, num_householder=3)
    K, V, x = mixer.key_dim, mixer.value_dim, torch.randn(2, 10, 16, dtype=torch.float64)
    q = unit(convolved(mixer.q_conv, mixer.q_proj(x)).unflatten(-1, (2, K)))
    k = unit(convolved(mixer.k_conv, mixer.k_proj(x)).unflatten(-1, (2, 3, K)))
    v = convolved(mixer.v_conv, mixer.v_proj(x)).unflatten(-1, (4, 3, V))
    decay = (-mixer.A_log.exp() * F.softplus(mixer.decay_proj(x) + mixer.dt_bias)).exp()
    beta = 2 * mixer.beta_proj(x).sigmoid().unflatten(-1, (4, 3))
    S, outputs = torch.zeros(2, 4, K, V, dtype=torch.float64), torch.zeros(2, 10, 4, V, dtype=torch.float64)
    for t in range(10):
        S = decay[:, t, :, None, None] * S
        for i in range(3):
            for j in range(4):
                key = k[:, t, j // 2, i]
                error = v[:, t, j, i] - torch.einsum("bk,bkv->bv", key, S[:, j])
                S[:, j] = S[:, j] + (beta[:, t, j, i, None] * key)[:, :, None] * error[:, None]
        outputs[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t].repeat_interleave(2, 1), S) / math.sqrt(K)
    gate = F.silu(mixer.gate_proj(x)).unflatten(-1, (4, V))
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj((rms(mixer, outputs) * gate).flatten(-2)))


def test_one_micro_step_is_gated_deltanet():
    options = {"num_heads": 2, "allow_neg_eigval": False}
    gdn, mixer = build("gdn", **options), build("gated_delta_product", num_householder=1, **options)
    mixer.load_state_dict(gdn.state_dict())
    x = torch.randn(2, 10, 16, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0], gdn(x)[0])
    assert mixer.flops_paper(64) == gdn.flops_paper(64)


def whole(name, options, layers, inner, d_model=2048):
    layout = f"{name}+swiglu x{layers}"
    options = {name: options, "swiglu": {"inner": inner}}
    return ModelConfig(
        d_model=d_model, layout=layout, options=options, vocab_size=32_000, norm="rmsnorm", tie_embeddings=False
    )


def test_gdn_has_the_parameters_of_the_published_model():
    options = {"num_heads": 6, "head_dim": 256}
    assert count_parameters(whole("gdn", options, 21, 5632))[0] == 1_387_348_732
    mixer = build("gdn", 2048, **options)
    assert sum(p.numel() for p in mixer.parameters()) == 25_215_500


def test_kda_has_the_parameters_of_the_published_model():
    assert count_parameters(whole("kda", {"num_heads": 16}, 24, 5632))[0] == 1_390_941_568
    assert sum(p.numel() for p in build("kda", 2048, num_heads=16).parameters()) == 17_887_376


def steps_of(bias):
    return F.softplus(bias).log()


@pytest.mark.parametrize("name, least", [("gdn", 0.009), ("kda", 0.999)])
def test_a_model_keeps_the_initialisation_of_the_decay(name, least):
    config = ModelConfig(d_model=512, layout=f"{name} x2", options={name: {"num_heads": 128}}, vocab_size=16)
    mixer = build_model(config, seed=3).backbone.blocks[1].mixer
    rates, steps = mixer.A_log.exp(), steps_of(mixer.dt_bias)
    assert least < rates.min() < 2 and 14 < rates.max() <= 16.001
    assert math.log(1e-3) - 1e-3 <= steps.min() and steps.max() <= math.log(1e-1) + 1e-3
    assert abs(steps.mean() - math.log(1e-2)) < 0.4
    assert mixer.q_conv.weight.abs().max() <= 0.5


@pytest.mark.parametrize("name", ["delta_net", "gdn", "kda", "gdn2", "gated_delta_product"])
def test_long_sequences_of_large_inputs_stay_finite_in_bfloat16(name):
    mixer = build(name, 32, num_heads=2).bfloat16()
    x = (10 * torch.randn(1, 600, 32)).bfloat16().requires_grad_()
    y, _ = mixer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (x, *mixer.parameters()))


BAD = {
    "num_v_heads: 3 .* use 2": {"num_heads": 2, "num_v_heads": 3},
    "expand_k: 0.7 gives keys of 5.6 .* multiple of 20,": {"num_heads": 2, "expand_k": 0.7},
    "expand_v: 1.1 gives values of 6.6": {"num_heads": 2, "expand_v": 1.1},
}


@pytest.mark.parametrize("message", BAD)
def test_widths_that_do_not_fit_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        parse(ModelConfig, {"d_model": 16, "layout": "gdn x1", "options": {"gdn": BAD[message]}, "vocab_size": 16})


def test_rates_and_steps_have_no_weight_decay():
    model = build_model(ModelConfig(d_model=16, layout="gdn kda", vocab_size=16))
    names = {parameter: name for name, parameter in model.named_parameters()}
    hidden, decayed, rest = split(model, [])
    assert not any(names[p].endswith(("A_log", "dt_bias")) for p in (*hidden, *decayed))
    assert {name.rpartition(".")[2] for name in map(names.get, rest)} >= {"A_log", "dt_bias"}
