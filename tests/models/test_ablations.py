"""The variants of 001's Tables 4 to 9, 11 and 12 as options: their sizes as printed, and decoding past a table."""

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.models import ModelConfig, build_model, count_parameters

BASE = "tnl1-385m"


def tnl(**options) -> dict:
    return {"options": {"tnl": options}}


def rest(name: str = BASE, layout: str = "tnl+swiglu x24") -> dict:
    """The options of TNL v1 for a layout of its own, which drops a recipe's options."""
    options = parse(ModelConfig, {"recipe": name}).options["tnl"]
    return {"layout": layout, "options": {"tnl": options, "swiglu": {"inner": 2816}}}


# Table and row -> printed parameters in millions, and the changes of the recipe TNL v1, 24 layers of 1,024.
VARIANTS = {
    "T4 Mix": (385, {}),
    "T4 APE": (386, tnl(decay="none", lrpe="none") | {"positions": "learned", "num_positions": 1024}),
    "T4 Exp-Decay": (385, tnl(lrpe="none")),
    "T4 LRPE": (385, tnl(decay="none", lrpe="all_layers")),
    "T4 LRPE-d": (385, tnl(lrpe="all_layers")),
    "T5 without temperature": (385, tnl(layer_factor=False)),
    "T6 without gate": (379, {"options": {"tnl": {"gate": "none"}, "sglu": {"inner": 3072}}}),
    "T7 RMSNorm": (385, tnl(norm="rmsnorm") | {"norm": "rmsnorm"}),
    "T7 LayerNorm": (385, tnl(norm="layernorm") | {"norm": "layernorm"}),
    "T8 no activation": (385, tnl(qk_activation="none")),
    "T8 1+elu": (385, tnl(qk_activation="elu1")),
    "T9 Swish": (385, rest()),
    "T12 TransNormer-T1": (379, {"recipe": "tn1-379m"}),
    "T12 TransNormer-T2": (379, {"recipe": "tn2-379m"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_printed(name):
    printed, changes = VARIANTS[name]
    config = parse(ModelConfig, {"recipe": BASE} | changes)
    total, _ = count_parameters(config)
    assert total == pytest.approx(printed * 1e6, rel=0.0025)
    assert config.norm == changes.get("norm", "srmsnorm")
    assert (config.embedding_scale == 32.0) == ("recipe" not in changes)


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_equals_the_parallel_form_and_every_weight_learns(name):
    full = parse(ModelConfig, {"recipe": BASE} | VARIANTS[name][1])
    options = {
        layer: {
            key: {"num_heads": 2, "inner": 24, "block": 4 if value else 0}.get(key, value) for key, value in own.items()
        }
        for layer, own in full.options.items()
    }
    layout = full.layout.replace("x24", "x2").replace("x12", "x1")
    config = full.model_copy(update={"d_model": 16, "vocab_size": 32, "layout": layout, "options": options})
    model = build_model(config, seed=1).double()
    tokens = torch.randint(0, 32, (2, 13), generator=torch.Generator().manual_seed(0))
    logits, _ = model(tokens)
    first, states = model(tokens[:, :5], model.init_state(2, 13))
    steps = [first]
    with torch.no_grad():
        for t in range(5, 13):
            out, states = model.step(tokens[:, t], states)
            steps.append(out[:, None])
    torch.testing.assert_close(torch.cat(steps, 1), logits)
    total, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
    total.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_token_beyond_a_learned_table_is_refused_by_name():
    config = {"d_model": 16, "vocab_size": 32, "layout": "gla+swiglu", "positions": "learned", "num_positions": 6}
    model = build_model(parse(ModelConfig, config), seed=1)
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    _, states = model(tokens[:, :5], model.init_state(2, 20))
    _, states = model.step(tokens[:, 5], states)
    with pytest.raises(ValueError, match="num_positions: 6"):
        model.step(tokens[:, 6], states)
    with pytest.raises(ValueError, match="num_positions: 6"):
        model(tokens, model.init_state(2, 20))
    assert parse(ModelConfig, config | {"positions": "sinusoidal", "num_positions": None}).num_positions is None


def test_a_norm_of_the_embedding_is_a_norm_of_what_the_layers_read():
    shape = {"d_model": 16, "vocab_size": 32, "layout": "gla+swiglu", "norm": "layernorm"}
    plain, normed = (
        build_model(parse(ModelConfig, shape | {"embedding_norm": flag, "embedding_scale": scale}), seed=1).double()
        for flag, scale in ((False, 1.0), (True, 7.0))
    )
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    x = plain.embed(tokens)
    x = torch.nn.functional.layer_norm(7.0 * x, (16,))
    torch.testing.assert_close(normed(tokens)[0], plain.logits(plain.backbone(x)[0]))
    assert set(normed.state_dict()) - set(plain.state_dict()) == {
        "backbone.input_norm.weight",
        "backbone.input_norm.bias",
    }


@pytest.mark.parametrize(
    "options, key",
    [
        ({"block": 4, "window": 4}, "block"),
        ({"scores": "relu"}, "scores"),
        ({"lrpe": True}, "lrpe"),
        ({"lrpe_reflection": "householder"}, "lrpe_reflection"),
        ({"lrpe": True, "rope": False, "num_kv_heads": 1}, "lrpe"),
        ({"lrpe": True, "rope": False, "head_dim": 5}, "num_heads"),
    ],
)
def test_options_that_exclude_each_other_are_refused_by_name(options, key):
    config = {"d_model": 16, "layout": "attention", "options": {"attention": {"num_heads": 2, **options}}}
    with pytest.raises(ConfigError, match=rf"options\.attention\.{key}: "):
        parse(ModelConfig, config)
    with pytest.raises(ConfigError, match=r"options\.tnl\.lrpe_reflection: "):
        parse(
            ModelConfig,
            {"d_model": 16, "layout": "tnl", "options": {"tnl": {"num_heads": 2, "lrpe_reflection": "householder"}}},
        )


def test_attention_in_blocks_has_constant_state_and_sees_its_block_alone():
    config = parse(
        ModelConfig, {"d_model": 16, "layout": "attention", "options": {"attention": {"num_heads": 2, "block": 8}}}
    )
    model = build_model(config, seed=1).double()
    assert not model.backbone.state_grows
    tokens = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, :8] = (tokens[:, :8] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:, 8:], after[:, 8:])
    assert not torch.allclose(before[:, 7], after[:, 7])
