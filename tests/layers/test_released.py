"""Options that released checkpoints need: epsilons of norms, a convolution with a bias, scaled RoPE."""

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.layers import LayerContext
from linnet.layers.mixers.softmax.attention import Attention, AttentionConfig
from linnet.layers.norm import SRMSNorm, build_norm
from linnet.layers.positions import Rope, RopeScalingConfig
from linnet.layers.short_conv import ShortConv
from linnet.models import ModelConfig, build_model, family


def test_the_epsilon_of_the_model_reaches_its_norms_and_no_mixers_own():
    values = {**family("tnl")(16, 2, num_heads=2).model_dump(), "norm_eps": 1e-3}
    values["options"] = {"tnl": {"num_heads": 2, "norm_eps": 1e-2, "gate_input": "residual"}}
    model = build_model(parse(ModelConfig, values))
    found = {name: module.eps for name, module in model.named_modules() if isinstance(module, SRMSNorm)}
    assert len(found) == 7  # two a block, one inside each mixer, the final one
    assert all(eps == (1e-2 if "output.norm" in name else 1e-3) for name, eps in found.items())
    with pytest.raises(ConfigError, match="norm_eps"):
        parse(ModelConfig, {**values, "norm_eps": 0.0})


@pytest.mark.parametrize("name", ["hgrn2", "gla", "lightnet"])
def test_mixers_have_an_epsilon_of_their_own(name):
    config = family(name)(16, 1, num_heads=2).model_dump()
    config["options"] = {name: {"num_heads": 2, "norm_eps": 0.25}}
    mixer = build_model(parse(ModelConfig, config)).backbone.blocks[0].mixer
    assert [m.eps for m in mixer.modules() if isinstance(m, SRMSNorm)] == [0.25]


def test_a_convolution_with_a_bias_is_the_one_without_plus_the_bias():
    torch.manual_seed(0)
    plain, biased = ShortConv(5, 4).double(), ShortConv(5, 4, bias=True).double()
    with torch.no_grad():
        biased.weight.copy_(plain.weight)
        biased.bias.normal_()
    x, state = torch.randn(2, 7, 5).double(), torch.randn(2, 3, 5).double()
    torch.testing.assert_close(biased(x, state)[0], plain(x, state)[0] + biased.bias)
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    torch.testing.assert_close(biased(x[:1], None, offsets)[0], plain(x[:1], None, offsets)[0] + biased.bias)
    whole = biased(x, state.clone())[0]
    steps = [biased.step(x[:, t], state) for t in range(7)]
    torch.testing.assert_close(torch.stack(steps, 1), whole)


def test_scaled_frequencies():
    plain = Rope(64, 500_000.0).theta
    linear = Rope(64, 500_000.0, RopeScalingConfig(kind="linear", factor=4.0)).theta
    torch.testing.assert_close(linear, plain / 4)
    scaled = Rope(64, 500_000.0, RopeScalingConfig(kind="llama3", factor=8.0)).theta
    turns = 8192 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low": 1.0, "high": 4.0, "length": 512},
    "yarn": {"factor": 4.0, "length": 512},
    "yarn-bounds": {"factor": 16.0, "length": 4096, "low": 2.0, "high": 16.0, "truncate": False},
    "yarn-factor": {"factor": 2.0, "length": 64, "attention_factor": 0.7},
    "yarn-short": {"factor": 0.5, "length": 8},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_scaled_frequencies_are_those_of_transformers(name, fraction):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    own, kind = SCALINGS[name], name.partition("-")[0]
    names = {"length": "original_max_position_embeddings"}
    names |= (
        {"low": "beta_slow", "high": "beta_fast"}
        if kind == "yarn"
        else {"low": "low_freq_factor", "high": "high_freq_factor"}
    )
    theirs = {names.get(key, key): value for key, value in own.items()}
    theirs |= {"rope_type": kind, "rope_theta": 5e5, "partial_rotary_factor": fraction}
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=2048, rope_parameters=theirs)
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](config)
    rope = Rope(64, 5e5, RopeScalingConfig(kind=kind, **own), fraction=fraction)
    torch.testing.assert_close(rope.theta[0], frequencies, rtol=2e-6, atol=0)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)
    x, places = torch.randn(1, 5, 2, 64, dtype=torch.float64), torch.arange(5)[None]
    y, width = rope.double()(x, places), int(64 * fraction)
    angles = places[..., None, None] * rope.theta
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    rotated = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    torch.testing.assert_close(y, torch.cat([amplitude * torch.cat(rotated, -1), x[..., width:]], -1))


HYBRID = {
    "qwen3.5": {
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "qk_norm_kind": "zero_centred_rmsnorm",
        "gate": "channel", "rope_fraction": 0.25,
    },
    "olmo": {"num_heads": 2, "qk_norm": True, "qk_norm_over": "width", "rope": False},
    "granite": {"num_heads": 2, "num_kv_heads": 1, "scale": 0.03, "rope": False, "gate": "head"},
}  # fmt: skip


@pytest.mark.parametrize("mup", [False, True])
@pytest.mark.parametrize("name", HYBRID)
def test_attention_of_hybrids_is_its_equations(name, mup):
    torch.manual_seed(1)
    config, d, length = AttentionConfig(**HYBRID[name]), 16, 9
    layer = Attention(config, LayerContext(d_model=d, norm_eps=1e-3, mup=mup)).double()
    for parameter in layer.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(1, length, d, dtype=torch.float64)
    heads, groups, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    q, k, v = (projection(x)[0] for projection in (layer.q_proj, layer.k_proj, layer.v_proj))

    def normed(y, norm, count):
        y = y if config.qk_norm_over == "width" else y.unflatten(-1, (count, width))
        gain = norm.weight + (config.qk_norm_kind == "zero_centred_rmsnorm")
        return y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gain

    if config.qk_norm:
        q, k = normed(q, layer.q_norm, heads), normed(k, layer.k_norm, groups)
    q, k, v = (y.reshape(length, -1, width) for y in (q, k, v))
    if config.rope:
        half = int(width * config.rope_fraction) // 2
        angle = torch.arange(length)[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
        for y in (q, k):
            first, second = y[..., :half].clone(), y[..., half : 2 * half].clone()
            y[..., :half] = first * angle.cos() - second * angle.sin()
            y[..., half : 2 * half] = second * angle.cos() + first * angle.sin()
    k, v = (y.repeat_interleave(heads // groups, 1) for y in (k, v))
    scale = config.scale or (1 / width if mup else width**-0.5)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    weights = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf).softmax(-1)
    o = torch.einsum("hij,jhd->ihd", weights, v)
    if config.gate != "none":
        o = o * layer.gate_proj(x)[0].sigmoid().view(length, heads, -1)
    torch.testing.assert_close(layer(x)[0][0], layer.out_proj(o.flatten(1)), rtol=1e-6, atol=1e-7)


WRONG = {
    "rope_fraction: 0.3 .*3 of the 12 channels.*0.166667": {"rope_fraction": 0.3},
    "rope_fraction: 0.5 .*rope: true": {"rope": False, "rope_fraction": 0.5},
    "qk_norm_kind: zero_centred_rmsnorm .*qk_norm: true": {"qk_norm_kind": "zero_centred_rmsnorm"},
    "qk_norm_over: width .*qk_norm: true": {"qk_norm_over": "width"},
    "attention_factor: 2.0 .*llama3": {"rope_scaling": {"kind": "llama3", "factor": 2.0, "attention_factor": 2.0}},
    "rope_base: 1.0 .*yarn.*10000": {"rope_base": 1.0, "rope_scaling": {"kind": "yarn", "factor": 2.0}},
    "high: 0.5 must be above low": {"rope_scaling": {"kind": "yarn", "factor": 2.0, "high": 0.5}},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_of_attention_are_named(message):
    options = {"attention": {"num_heads": 2, **WRONG[message]}}
    with pytest.raises(ConfigError, match=rf"options.attention.*{message}"):
        parse(ModelConfig, {"d_model": 24, "layout": "attention", "options": options})


def test_a_zero_centred_norm_is_one_plus_its_weight():
    norm, plain = build_norm("zero_centred_rmsnorm", 8, 1e-3).double(), build_norm("rmsnorm", 8, 1e-3).double()
    assert not norm.weight.any()
    with torch.no_grad():
        plain.weight.copy_(1 + norm.weight.normal_())
    x, residual = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x, residual), plain(x, residual))
    norm(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad)
    low = norm.bfloat16()
    low.weight.data.fill_(2**-10)  # 1 + 2^-10 is 1 in bfloat16, so many rows would be too small
    wide = torch.randn(1000, 8).bfloat16()
    scaled, bare = low(wide).double(), build_norm("srmsnorm", 8, 1e-3)(wide.double())
    assert ((scaled / bare).mean() - (1 + 2**-10)).abs() < 2e-4


def test_a_zero_centred_norm_is_a_vector_without_weight_decay():
    from linnet.models.parametrisation import roles
    from linnet.train.optimizer import split

    options = {"attention": {"qk_norm": True, "qk_norm_kind": "zero_centred_rmsnorm"}}
    values = {"d_model": 16, "layout": "attention+swiglu", "norm": "zero_centred_rmsnorm", "options": options}
    model = build_model(parse(ModelConfig, values | {"parametrisation": "mup"}))
    norms = {name: p for name, p in model.named_parameters() if "norm" in name}
    assert len(norms) == 5 and not any(p.any() for p in norms.values())
    assert {roles(model)[name] for name in norms} == {"vector"}
    assert {id(p) for p in norms.values()} <= {id(p) for p in split(model)[2]}
