"""Every recipe, shrunk (same layout and options, 2 layers, width 64): forward, backward, decode, state dict, compile.

Sizes of one family shrink to one model, which is tested once.
"""

import functools
import re
import weakref

import pytest
import torch
from recipe_cases import LADDERS, cases, distinct, joined

from linnet.models import FAMILIES, RECIPES, ModelConfig, build_model, count_parameters, family, get_recipe
from linnet.models.causal_lm import draw_parts
from linnet.models.recipes.registry import default_heads

SMALL = {"num_kv_heads": 2, "head_dim": 16, "num_v_heads": 8}  # of options that are set


@functools.cache
def shrunk(name: str) -> ModelConfig:
    """The recipe's own layout and options at a size for a test, with at most two repeats of the layers."""
    config = get_recipe(name)
    options = {
        layer: {
            key: {"num_heads": 4, "inner": 96, **(SMALL if value else {})}.get(key, value)
            for key, value in values.items()
        }
        for layer, values in config.options.items()
    }
    return config.model_copy(
        update={
            "d_model": 64,
            "vocab_size": 67,
            "options": options,
            "layout": re.sub(r"\bx(\d+)", lambda count: f"x{min(int(count[1]), 2)}", config.layout),
        }
    )


SHRUNK = distinct(shrunk)
JOINED = joined({name: shrunk(name) for name in SHRUNK.values()})


@pytest.mark.parametrize("name", cases(shrunk))
def test_decode_equals_forward_and_learning_reaches_every_weight(name):
    config = shrunk(name)
    model = build_model(config, seed=1).double()
    for module in model.modules():
        if getattr(module, "starts_zero", False):  # all that is before it would learn nothing in the first step
            torch.nn.init.normal_(module.weight, 0.0, 0.1)
    tokens = torch.randint(0, 67, (2, 13), generator=torch.Generator().manual_seed(0))
    logits, none = model(tokens)
    assert none is None and logits.shape == (2, 13, 67)
    states, steps = model.init_state(2, 13, dtype=torch.float64), []
    with torch.no_grad():
        for t in range(13):
            out, states = model.step(tokens[:, t], states)
            steps.append(out)
    torch.testing.assert_close(torch.stack(steps, 1), logits)
    total, count = model.loss(tokens[:, :-1], tokens[:, 1:])
    (total / count).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", JOINED)
def test_state_dict_round_trip(name):
    config = JOINED[name]
    model, other = build_model(config, seed=1), build_model(config, seed=2)
    tokens = torch.randint(0, 67, (2, 13))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(tokens)[0], model(tokens)[0])


MIXED = "tpe tnl+sglu hyena+moe mamba"
PARTS = JOINED | {
    "mixed": ModelConfig(d_model=32, layout=MIXED, vocab_size=20, positions="sinusoidal", norm="layernorm", dropout=0.1)
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_have_the_bits_of_the_whole_model(name):
    model = build_model(PARTS[name], seed=3)
    left, alive = {**dict(model.named_parameters()), **dict(model.named_buffers())}, weakref.WeakSet()
    for prefix, part in draw_parts(PARTS[name], seed=3, threads=2):
        assert not alive, "two parts at the same time"
        if prefix != "backbone.shared":  # small tables, which live as long as their layers
            alive.add(part)
        torch.rand(3)  # draws of the caller do not count
        tensors = {**dict(part.named_parameters(prefix=prefix)), **dict(part.named_buffers(prefix=prefix))}
        assert [key for key in tensors if not torch.equal(tensors[key], left.pop(key))] == []
        del part, tensors
    assert not left


@pytest.mark.parametrize("name", JOINED)
def test_every_layer_compiles_in_one_graph(name):
    model = build_model(JOINED[name], seed=1)
    tokens = torch.randint(0, 67, (2, 13))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # the ops' tests trace through autograd too
    torch.testing.assert_close(compiled(tokens)[0], model(tokens)[0], rtol=1e-4, atol=1e-5)


def test_every_recipe_is_among_the_tested():
    assert all(shrunk(name).model_dump_json() in SHRUNK for name in RECIPES if not name.startswith(LADDERS))


@pytest.mark.parametrize("name", FAMILIES)
def test_families_build_at_any_size(name):
    for width, depth in ((16, 1), (48, 2), (96, 4)):
        config = family(name)(width, depth)
        assert (config.d_model, config.num_layers, config.vocab_size) == (width, depth, 256)
        total, non_embedding = count_parameters(config)
        assert total - non_embedding == 256 * width


def test_default_heads_divide_the_width():
    for width in (16, 24, 48, 64, 100, 256, 768, 4096):
        assert width % default_heads(width) == 0
    assert [default_heads(d) for d in (512, 768, 4096)] == [4, 6, 32]


def test_tnl1_is_the_model_of_paper_001():
    config = get_recipe("tnl1-385m")
    assert config.embedding_scale == 32.0
    total, _ = count_parameters(config)
    assert round(total / 1e6) == 385  # paper 001, Table 4, with embeddings counted once


WT103 = {  # millions of parameters: paper 001, Table 1; paper 002, Tables 1 and 5; paper 003, Table 3
    "transformer": 44.65,
    "elu1": 44.65,
    "cosformer": 44.65,
    "hgrn": 46.25,
    "hgrn-real": 46.24,
    "hgrn-real2": 47.82,
    "tnl": 45.45,
    "tn1": 44.64,
    "tn2": 44.64,
    "hgrn2": 44.66,
    "lightnet": 45.07,
    "lru": 46.24,
    "rwkv4": 46.23,
    "s4d": 45.73,
    "tnn": 48.68,
}


@pytest.mark.parametrize("name", WT103)
def test_models_of_wikitext_103_have_the_printed_parameters(name):
    """To the printed digit, except LightNet (45.08) and RWKV-4 (46.22)."""
    config = get_recipe(f"{name}-wt103")
    total, _ = count_parameters(config)
    assert abs(total / 1e6 - WT103[name]) < {"lightnet": 0.01, "rwkv4": 0.012}.get(name, 0.005)
    assert (config.init, config.embedding_scale * config.embedding_std) == ("xavier", pytest.approx(1.0))


def test_the_embedding_of_a_scaled_model_starts_with_variance_one():
    config = get_recipe("hgrn2-wt103").model_copy(update={"vocab_size": 600, "layout": "hgrn2+sglu"})
    model = build_model(config, seed=0)
    assert model.embed(torch.arange(600)).std().item() == pytest.approx(1.0, rel=0.01)
    up = model.backbone.blocks[0].channel.up_proj.weight  # uniform with the bound of Glorot and Bengio
    assert up.abs().max().item() == pytest.approx((6 / (512 + 1365)) ** 0.5, rel=0.01)
