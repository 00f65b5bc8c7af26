"""Maximal update parametrisation: initial weights, multipliers and rates by width; standard is unchanged."""

import math

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.layers.base import MIXERS
from linnet.models import ModelConfig, build_model, family
from linnet.models.causal_lm import draw_parts
from linnet.models.parametrisation import at_width, rate_factors, roles
from linnet.train.optimizer import Optimizer, OptimizerConfig

TOKENS = torch.arange(32).reshape(2, 16)
STANDARD = {"parametrisation": "standard", "base_width": 256}


def config(name="llama", d_model=32, **changes):
    values = family(name)(d_model, 2, num_heads=2).model_dump() | {"parametrisation": "mup", "base_width": 16}
    return ModelConfig.model_validate(values | changes)


def test_standard_is_unchanged_and_writes_no_key():
    assert not {"parametrisation", "base_width"} & set(config(**STANDARD).model_dump())
    assert rate_factors(build_model(config(**STANDARD)), "adamw") == {}
    with pytest.raises(ConfigError, match="base_width: 16 has no effect with parametrisation: standard"):
        parse(ModelConfig, config().model_dump() | {"parametrisation": "standard"})


def test_weights_are_those_of_standard_but_for_the_scale_of_hidden_matrices():
    mup, standard = build_model(config("tnl")), build_model(config("tnl", **STANDARD))
    of = roles(mup)
    theirs = dict(standard.named_parameters())
    for name, own in mup.named_parameters():
        torch.testing.assert_close(own, theirs[name] * (0.5**0.5 if of[name] == "hidden" else 1.0))
    assert of["embedding.weight"] == of["backbone.blocks.0.mixer.output.gate_up.weight"] == "vector"
    assert of["backbone.blocks.0.mixer.output.gate_down.weight"] == "hidden"
    parts = {f"{part}.{name}": p for part, one in draw_parts(config("tnl"), 0) for name, p in one.named_parameters()}
    assert set(parts) == set(theirs) and all(torch.equal(parts[name], p) for name, p in mup.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_multiplied_by_the_ratio_of_widths(tied):
    net = build_model(config(tie_embeddings=tied))
    x, _ = net.backbone(net.embed(TOKENS))
    weight = net.embedding.weight if tied else net.head.weight
    expected = x @ weight.T * (16 / 32)
    torch.testing.assert_close(net.logits(x), expected)
    torch.testing.assert_close(net(TOKENS)[0], expected)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), TOKENS.flatten(), reduction="sum")
    torch.testing.assert_close(net.loss(TOKENS, TOKENS)[0], loss)
    state = net.init_state(2, 16)
    for step in range(3):
        logits, state = net.step(TOKENS[:, step], state)
        torch.testing.assert_close(logits, expected[:, step], atol=1e-5, rtol=1e-4)


def test_attention_divides_by_the_width_of_a_head():
    mup, standard = build_model(config()), build_model(config(**STANDARD))
    q, k, v = mup.backbone.blocks[0].mixer._project(torch.ones(1, 3, 32), torch.arange(3)[None])
    others = standard.backbone.blocks[0].mixer
    others.load_state_dict(mup.backbone.blocks[0].mixer.state_dict())
    theirs = others._project(torch.ones(1, 3, 32), torch.arange(3)[None])
    torch.testing.assert_close(q, theirs[0] / 4)  # a head of 16: another 1 / 4 beside the 1 / 4 of the kernels
    torch.testing.assert_close((k, v), theirs[1:])


@pytest.mark.parametrize(("name", "factor"), [("adamw", 0.5), ("muon", 0.5**0.5)])
def test_hidden_matrices_move_by_their_factor_of_the_rate(name, factor):
    moved = {}
    for ratio in (1.0, 0.5):
        net = build_model(config("tnl", base_width=int(32 * ratio)))
        of, before = roles(net), {key: p.detach().clone() for key, p in net.named_parameters()}
        draw = torch.Generator().manual_seed(0)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=draw)
        Optimizer(net, OptimizerConfig(name=name, learning_rate=0.01, weight_decay=0.0)).step(1.0)
        moved[ratio] = {key: p.detach() - before[key] for key, p in net.named_parameters()}
    for key, change in moved[1.0].items():
        expected = change * (factor if of[key] == "hidden" else 1.0)
        torch.testing.assert_close(moved[0.5][key], expected, atol=2e-7, rtol=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(("decay", "left"), [("coupled", 1 - 0.1 * 0.002), ("independent", 1 - 0.5 * 0.002)])
def test_independent_decay_does_not_depend_on_the_rate_or_the_width(name, decay, left):
    net = build_model(config("tnl", base_width=32))
    weight = net.backbone.blocks[0].mixer.q_proj.weight
    before = weight.detach().clone()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    settings = OptimizerConfig(name=name, learning_rate=0.2, weight_decay=0.002, decay=decay)
    Optimizer(net, settings).step(0.5)
    torch.testing.assert_close(weight.detach(), before * left)
    if decay == "independent":
        narrow = build_model(config("tnl", base_width=8))
        own = narrow.backbone.blocks[0].mixer.q_proj.weight
        before = own.detach().clone()
        for p in narrow.parameters():
            p.grad = torch.zeros_like(p)
        Optimizer(narrow, settings).step(0.5)
        torch.testing.assert_close(own.detach(), before * left)


def test_a_large_independent_decay_is_refused():
    with pytest.raises(ConfigError, match=r"decay: independent removes weight_decay: 0.1 .*; use a weight_decay of"):
        parse(OptimizerConfig, {"decay": "independent"})


def test_every_parameter_of_every_mixer_has_a_role():
    """Decays, filters, bounds, norms and angles are vectors; matrices whose inputs grow with the width are hidden."""
    for name, mixer in MIXERS.items():
        if not mixer.__module__.startswith("linnet."):  # a plugin of another test
            continue
        layout = f"{name} tnl+glu" if mixer.before_layers else f"{name}+glu"
        net = build_model(ModelConfig(d_model=32, layout=layout, options=_heads(mixer, name)))
        of = roles(net)
        assert set(of) == {key for key, _ in net.named_parameters()}
        shapes = {key: p.shape for key, p in net.named_parameters()}
        assert all(len(shapes[key]) == 2 for key, role in of.items() if role == "hidden")
        vectors = ("A_log", "gamma", "theta", "log_rate", "residue", "conv.weight", "norm.weight", "bias", "skip")
        assert {role for key, role in of.items() if key.endswith(vectors)} <= {"vector"}
    assert of  # the registry is not empty


LOW_RANK = {"decay_down": "hidden", "decay_up": "vector", "output.gate_down": "hidden", "output.gate_up": "vector"}
LINEAR_MIXERS = {  # matrices of each, whose inputs grow with the width (hidden) or not (vector)
    "gla": ("q_proj", "k_proj", "v_proj", "gate_proj", "out_proj", "decay_down", "decay_up"),
    "hgrn": ("in_proj", "f_proj", "gate_proj", "out_proj"),
    "hgrn2": ("q_proj", "f_proj", "i_proj", "out_proj"),
    "lightnet": ("q_proj", "k_proj", "v_proj", "output.out_proj", "output.gate_down", "output.gate_up"),
    "tnl": ("q_proj", "k_proj", "v_proj", "output.out_proj", "output.gate_down", "output.gate_up"),
    "cosformer2": ("q_proj", "k_proj", "v_proj", "output.out_proj", "output.gate_down", "output.gate_up"),
}


@pytest.mark.parametrize("name", LINEAR_MIXERS)
def test_standard_deviations_and_rates_of_linear_mixers(name):
    """Hidden: std s sqrt(d0 / d), over sqrt(2 L) at the end of a branch, and rate x d0 / d; vectors: s, x 1."""
    options, blocks, base, width = _heads(MIXERS[name], name), 2, 32, 128
    values = {"layout": f"{name}+glu x{blocks}", "options": options, "parametrisation": "mup", "base_width": base}
    model = ModelConfig(d_model=base, init_std=0.02, **values)
    at_base, wide = build_model(model).double(), build_model(at_width(model, width)).double()
    assert rate_factors(at_base, "adamw") == {}
    for optimizer, factor in (("adamw", base / width), ("muon", math.sqrt(base / width))):
        factors = rate_factors(wide, optimizer)
        prefix = "backbone.blocks.1.mixer."
        hidden = {part for part in LINEAR_MIXERS[name] if LOW_RANK.get(part, "hidden") == "hidden"}
        assert {key: one for key, one in factors.items() if key.startswith(prefix)} == {
            f"{prefix}{part}.weight": factor for part in hidden
        }
    own = dict(wide.named_parameters())
    for key, at_start in at_base.named_parameters():
        if at_start.ndim == 1 or "gamma" in key or "theta" in key:  # as the layer makes it, at any width
            assert own[key].std(correction=0).item() == pytest.approx(at_start.std(correction=0).item(), rel=0.3)
            continue
        std = 0.02 / (math.sqrt(2 * blocks) if key.endswith(("out_proj.weight", "down_proj.weight")) else 1.0)
        assert at_start.square().mean().sqrt().item() == pytest.approx(std, rel=0.15)
        std *= math.sqrt(base / width) if key in rate_factors(wide, "adamw") else 1.0
        assert own[key].square().mean().sqrt().item() == pytest.approx(std, rel=0.08)


@pytest.mark.parametrize("name", ["gla", "hgrn2", "lightnet", "tnl"])
def test_the_norm_of_the_output_hides_the_scale_of_scores(name):
    """So linear attention needs no 1 / d_head in its scores: queries of any size give the same output."""
    free = {"hgrn2": {"output_activation": "none"}, "tnl": {"qk_activation": "none"}, "lightnet": {"norm": "srmsnorm"}}
    options = {name: {"num_heads": 2, "norm_eps": 1e-30} | free.get(name, {})}
    mixer = build_model(ModelConfig(d_model=32, layout=name, options=options)).double().backbone.blocks[0].mixer
    if name == "lightnet":  # silu is linear far from zero
        mixer.q_proj.bias = torch.nn.Parameter(torch.full((32,), 100.0, dtype=torch.float64))
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before, _ = mixer(x)
    with torch.no_grad():
        for parameter in mixer.q_proj.parameters():
            parameter.mul_(7.0)
    torch.testing.assert_close(mixer(x)[0], before, rtol=1e-9, atol=1e-12)


SMALL_INPUTS = [("hgrn", {"expand": 2, "expansion": "krp"}, "in_proj"), ("lightnet", {"num_heads": 2}, "decay_up")]
RANKS = {"num_heads": 2, "kv_rank": 16, "q_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 8}
SMALL_INPUTS += [("mla", RANKS, "kv_up"), ("mla", RANKS, "q_proj")]


@pytest.mark.parametrize(("name", "options", "layer"), SMALL_INPUTS)
def test_a_matrix_whose_inputs_do_not_grow_keeps_its_start_and_its_rate(name, options, layer):
    options |= {"decay": "independent"} if name == "lightnet" else {}
    values = {"layout": f"{name}+glu", "options": {name: options}, "parametrisation": "mup", "base_width": 32}
    small = ModelConfig(d_model=32, **values)
    stds = []
    for sized in (small, at_width(small, 512)):
        net = build_model(sized)
        assert not any(f".mixer.{layer}." in key for key in rate_factors(net, "adamw"))
        stds.append(getattr(net.backbone.blocks[0].mixer, layer).weight.std().item())
    assert stds[1] == pytest.approx(stds[0], rel=0.3)


def _heads(mixer, name):
    return {name: {"num_heads": 2}} if "num_heads" in mixer.Config.model_fields else {}


def test_a_model_at_another_width_keeps_its_heads():
    wide = at_width(config("llama", options={"attention": {"num_heads": 2}, "swiglu": {"inner": 88}}), 128)
    assert (wide.d_model, wide.options["attention"]["num_heads"], wide.options["swiglu"]["inner"]) == (128, 8, 352)
    assert at_width(config("mamba"), 64).options["mamba"]["dt_rank"] == 0
    with pytest.raises(
        ConfigError, match="options.attention.num_heads: 2 at d_model 32 is not a whole number at width 24"
    ):
        at_width(config("llama", options={"attention": {"num_heads": 2}}), 24)
