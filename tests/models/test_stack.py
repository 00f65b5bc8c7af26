"""Options per block, patterns that are repeated and cut, mixers before the layers, and checks that build nothing."""

import warnings

import pytest
import torch
from torch import nn

from linnet.config import Config, ConfigError, parse
from linnet.layers.base import MIXERS, LayerContext, Mixer, register_mixer
from linnet.layers.dropout import position
from linnet.mad.architectures import block_states, state_size
from linnet.models import (
    LayerSpec,
    ModelConfig,
    build_model,
    check,
    count_parameters,
    flops_causal,
    flops_exact,
    flops_paper,
    get_recipe,
    parse_layout,
    state_bytes,
)
from linnet.models.costs import attention_share
from linnet.models.layout import parse_stack
from linnet.models.parametrisation import at_width
from linnet.vision.config import DenoiserConfig

LOCAL = {"layer": "attention+swiglu", "options": {"attention": {"window": 4}}}
SHAPE = {"d_model": 16, "vocab_size": 32, "options": {"attention": {"num_heads": 2}}}
MIXED = SHAPE | {"layout": "(L L G) x2", "aliases": {"L": LOCAL, "G": "attention+swiglu"}}


def model(**changes) -> ModelConfig:
    return parse(ModelConfig, SHAPE | changes)


def problems(**values) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(ModelConfig, SHAPE | {"options": {}} | values)
    return caught.value.problems


def windows(config: ModelConfig) -> list[int]:
    return [config.layer_options("attention", spec).window for spec in config.blocks]


def test_an_alias_sets_options_of_its_blocks_alone():
    config = parse(ModelConfig, MIXED)
    assert windows(config) == [4, 4, 0] * 2
    assert config.options["attention"]["window"] == 0 and config.layer_options("attention").num_heads == 2
    blocks = build_model(config).backbone.blocks
    assert [block.mixer.config.window for block in blocks] == [4, 4, 0] * 2
    assert {block.mixer.num_heads for block in blocks} == {2}
    assert config.shown_option("window") == 4 and config.shown_option("num_heads") == 2
    again = parse(ModelConfig, config.model_dump(mode="json"))
    assert again == config and ModelConfig.model_validate_json(config.model_dump_json()) == config


def test_costs_see_the_options_of_each_block():
    mixed, local, full = (
        parse(ModelConfig, MIXED),
        model(layout="attention+swiglu x4", options={"attention": {"num_heads": 2, "window": 4}}),
        model(layout="attention+swiglu x2"),
    )
    for cost in (lambda c: state_bytes(c, 100), lambda c: flops_paper(c, 100)):
        assert cost(mixed) == cost(local) + cost(full)
    wide = model(
        layout="W swiglu", aliases={"W": {"layer": "swiglu", "options": {"swiglu": {"inner": 24}}}}, options={}
    )
    assert count_parameters(wide)[1] == 3 * 16 * (24 + 48) + 3 * 16  # and three gains
    assert flops_exact(wide, 5) == 6 * 5 * 16 * (3 * (24 + 48) + 32)
    assert [block.size for block in block_states(mixed)] == [0] * 6
    one, two = ({"layer": "moe", "options": {"moe": {"num_active": n, "inner": 8}}} for n in (1, 2))
    experts = [flops_exact(model(layout=layout, options={}), 64) for layout in ([one, two], [one, one], [two, two])]
    assert experts[0] == (experts[1] + experts[2]) / 2 and experts[1] < experts[2]


def test_an_outer_alias_wins_over_an_inner_one():
    aliases = {"L": LOCAL, "W": {"layer": "L x2", "options": {"attention": {"window": 9}}}}
    assert windows(model(layout="L W", aliases=aliases)) == [4, 9, 9]


def test_a_layout_may_be_a_list_of_blocks():
    listed = model(layout=["attention+swiglu", LOCAL, LOCAL, {"layer": "attention+swiglu"}])
    assert windows(listed) == [0, 4, 4, 0]
    assert listed == model(layout="attention+swiglu B1 x2 attention+swiglu", aliases={"B1": LOCAL})
    assert model(layout=["gla x2", "attention"]).num_layers == 3
    named = model(layout=["L", LOCAL], aliases={"L": LOCAL})
    assert named.layout == "L x2" and list(named.aliases) == ["L"]


@pytest.mark.parametrize(
    "layout, number, expected",
    [
        ("gla hgrn", 6, "gla hgrn gla hgrn gla hgrn"),
        ("gla gla hgrn", 5, "gla gla hgrn gla gla"),
        ("gla gla hgrn", 3, "gla gla hgrn"),
        ("gla+swiglu x6", 2, "gla+swiglu gla+swiglu"),
        ("tpe gla hgrn", 3, "gla hgrn gla"),
    ],
)
@pytest.mark.filterwarnings("ignore:layout. the pattern")
def test_a_pattern_is_repeated_and_cut(layout, number, expected):
    config = model(layout=layout, num_layers=number, options={})
    assert config.blocks == parse_layout(expected) and config.num_layers == number
    assert [spec.mixer for spec in config.stack.before] == (["tpe"] if layout.startswith("tpe") else [])
    assert parse(ModelConfig, config.model_dump()) == config


@pytest.mark.filterwarnings("ignore:layout. the pattern")
def test_a_cut_keeps_the_options_of_the_blocks_that_stay():
    config = parse(ModelConfig, MIXED | {"layout": "L L G", "num_layers": 5})
    assert windows(config) == [4, 4, 0, 4, 4] and config.layout == "(L L G) x1 L x2"
    inside = {"P": {"layer": "attention gla", "options": {"attention": {"window": 3}, "gla": {"num_heads": 2}}}}
    cut = model(layout="P", num_layers=3, aliases=inside)
    assert windows(model(layout="P", num_layers=1, aliases=inside)) == [3]
    assert [cut.layer_options(s.mixer, s).num_heads for s in cut.blocks] == [2, 2, 2]
    assert cut.layer_options("attention", cut.blocks[2]).window == 3


def test_a_longer_pattern_is_cut_with_a_warning():
    striped = "attention+swiglu hyena+swiglu x3"
    with pytest.warns(
        UserWarning, match=r"attention in 1 of 4 blocks, but in 2 of 6 at num_layers: 6; .*multiple of 4"
    ):
        model(layout=striped, num_layers=6, options={})
    with pytest.warns(UserWarning, match=r"attention in 2 of 8 blocks, but in 3 of 10 at num_layers: 10"):
        model(layout=f"({striped}) x2", num_layers=10, options={})
    with pytest.warns(UserWarning, match=r"has attention in 1 of 3 blocks, but in 1 of 5"):
        parse(ModelConfig, MIXED | {"layout": "L L G", "num_layers": 5})
    with pytest.warns(UserWarning, match=r"3 blocks.*num_layers: 2"):
        cut = model(layout="gla gla hgrn", num_layers=2, options={"hgrn": {"complex": True}})
    assert cut.num_layers == 2 and cut.options.keys() == {"gla"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(layout="gla x3", num_layers=2, options={})
        assert parse(ModelConfig, {"recipe": "tnl-10m", "num_layers": 3}).num_layers == 3


@pytest.mark.parametrize(
    "values, keys",
    [
        ({"layout": "A", "aliases": {"A": "tnl A"}}, ["aliases.A", "refers to itself", "'tnl A'"]),
        ({"layout": "A", "aliases": {"A": "2B", "B": "C", "C": "A x2"}}, ["aliases.A", "A -> B -> C -> A"]),
        ({"layout": "tnl", "aliases": {"A": {"layer": "A"}}}, ["aliases.A", "refers to itself"]),
        ({"layout": "tnl", "aliases": {"tnl": "gla"}}, ["aliases.tnl", "another name"]),
        ({"layout": "tnl", "aliases": {"moe": "gla"}}, ["aliases.moe", "another name"]),
        ({"layout": "tnl", "aliases": {"x2": "gla"}}, ["aliases.x2", "'x2'"]),
        ({"layout": "tnl", "aliases": {"2A": "gla"}}, ["aliases.2A", "'2A'"]),
        (
            {"layout": "A", "aliases": {"A": {"layer": "gla", "options": {"tnl": {}}}}},
            ["aliases.A.options.tnl", "'gla'"],
        ),
        ({"layout": "gla", "options": {"tnl": {}}}, ["options.tnl", "'gla'"]),
        (
            {"layout": "A", "aliases": {"A": {"layer": "gla", "options": {"gla": {"num_heads": 3}}}}},
            ["aliases.A.options.gla.num_heads", "3", "16", "2 does"],
        ),
        (
            {"layout": "A", "aliases": {"A": {"layer": "gla", "options": {"gla": {"heads": 3}}}}},
            ["aliases.A.options.gla.heads", "num_heads"],
        ),
        ({"layout": "A", "aliases": {"A": {"layer": "gla", "option": {}}}}, ["aliases.A.", "'options'"]),
        ({"layout": "gla", "num_layers": 0}, ["num_layers", "0"]),
        ({"layout": ["gla", {"layers": "gla"}]}, ["layout.1", "layers"]),
        ({"layout": "tpe", "options": {}}, ["layout", "no layers"]),
        ({"layout": "tnl tpe"}, ["layout", "'tpe'", "before all layers"]),
        ({"layout": "tpe+swiglu"}, ["layout", "'tpe'", "before all layers"]),
        ({"layout": "(tpe tnl) x2"}, ["layout", "'tpe'", "before all layers"]),
        ({"layout": "tpe tpe tnl"}, ["layout", "twice"]),
        ({"layout": "gla", "positions": "learned"}, ["num_positions", "512"]),
        ({"layout": "gla", "num_positions": 8}, ["num_positions", "8", "learned"]),
        (
            {"layout": "gla", "d_model": 15, "positions": "sinusoidal", "options": {"gla": {"num_heads": 5}}},
            ["d_model"],
        ),
        ({"layout": "gla", "dropout": 1.0}, ["dropout", "1"]),
        ({"layout": "gla", "bias": "some"}, ["bias", "'some'"]),
    ],
)
def test_bad_input_names_key_value_and_fix(values, keys):
    (problem,) = problems(**values)
    assert all(key in problem for key in keys), problem


def test_nothing_is_built_to_check(monkeypatch):
    layers = "tnl+sglu gla+mlp hgrn+glu hgrn2+moe hyena mh_hyena hyena_experts attention lightnet cosformer2 mamba"

    def refuse(*args, **kwargs):
        raise AssertionError("a module was built")

    monkeypatch.setattr(nn.Module, "__init__", refuse)
    config = parse(ModelConfig, {"d_model": 128, "layout": f"tpe {layers}"})
    assert check(config) == []
    wide = config.model_copy(update={"d_model": 99})
    assert {line.split(".")[1] for line in check(wide)} >= {"tnl", "gla", "hgrn2", "mh_hyena", "attention", "lightnet"}


def test_the_constructor_of_a_layer_gives_what_its_check_says():
    config = parse(ModelConfig, {"d_model": 128, "layout": "tnl gla hgrn2 mh_hyena attention lightnet cosformer2"})
    for line in check(config.model_copy(update={"d_model": 99})):
        key = line.removeprefix("options.")
        name = key.partition(".")[0]
        layer = next(b for b in config.blocks if b.mixer == name)
        with pytest.raises(ValueError) as caught:
            build_model(ModelConfig.model_construct(**{**dict(config), "d_model": 99, "layout": layer.mixer}))
        assert str(caught.value) == key


def test_a_layer_without_a_check_says_it_when_it_is_built(monkeypatch):
    monkeypatch.setitem(MIXERS, "stubborn_test_layer", Mixer)  # the registry is as before once the test is over
    del MIXERS["stubborn_test_layer"]

    @register_mixer("stubborn_test_layer", Config)
    class Stubborn(Mixer):
        def __init__(self, config, context: LayerContext):
            super().__init__()
            raise ValueError("stubborn_test_layer.width: never")

    config = model(layout="stubborn_test_layer", options={})
    assert check(config) == []
    with pytest.raises(ValueError, match="never"):
        build_model(config)


def test_a_mixer_before_the_layers_changes_nothing_of_them():
    plain = parse(
        ModelConfig, {"d_model": 32, "layout": "cosformer2+sglu x3", "options": {"cosformer2": {"num_heads": 2}}}
    )
    with_tpe = parse(ModelConfig, plain.model_dump() | {"layout": "tpe cosformer2+sglu x3"})
    assert with_tpe.num_layers == 3 and with_tpe.blocks == plain.blocks
    one, other = build_model(plain, seed=2), build_model(with_tpe, seed=2)
    weights, others = one.state_dict(), other.state_dict()
    assert set(others) - set(weights) == {"backbone.tpe.log_rate", "backbone.tpe.weight"}
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert [(block.mixer.log_decay if hasattr(block.mixer, "log_decay") else None) for block in other.backbone.blocks]
    assert flops_paper(plain, 64) == flops_paper(with_tpe, 64)
    assert count_parameters(with_tpe)[1] - count_parameters(plain)[1] == 128 * 32
    assert [b.share for b in block_states(with_tpe)] == [b.share for b in block_states(plain)]
    assert state_size(with_tpe) - state_size(plain) == 64 * 32
    tokens = torch.randint(0, 256, (2, 9))
    x = other.embed(tokens)
    filtered, _ = other.backbone.tpe(x)
    torch.testing.assert_close(other(tokens)[0], other.logits(one.backbone(filtered)[0]))


def test_a_mixer_before_the_layers_may_have_an_alias_and_options():
    config = model(layout="T gla x2", aliases={"T": {"layer": "tpe", "options": {"tpe": {"num_modes": 3}}}}, options={})
    assert build_model(config).backbone.tpe.weight.shape == (16, 3)
    stack = parse_stack("tpe (gla hgrn) x2")
    assert (stack.head, stack.body) == ("tpe ", "(gla hgrn) x2") and stack.before == [LayerSpec("tpe", None)]


@pytest.mark.parametrize(
    "wrap", [lambda layout: layout, lambda layout: [layout], str.split], ids=["text", "one", "list"]
)
def test_a_new_layout_of_a_recipe_replaces_what_stands_before_it_and_says_so(wrap):
    recipe = get_recipe("lightnet-10m")
    with pytest.warns(UserWarning, match="'lightnet\\+swiglu x2' replaces .*recipe 'lightnet-10m', with tpe before it"):
        changed = parse(ModelConfig, {"recipe": "lightnet-10m", "layout": wrap("lightnet+swiglu x2")})
    assert changed.layout == "lightnet+swiglu x2" and set(changed.options) == {"lightnet", "swiglu"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layout in ("tpe lightnet+swiglu x2", "tpe tnl+swiglu x2"):
            kept = parse(ModelConfig, {"recipe": "lightnet-10m", "layout": wrap(layout)})
            assert kept.layout == layout and kept.options["tpe"] == recipe.options["tpe"]
        assert parse(ModelConfig, {"recipe": "lightnet-10m", "layout": wrap("tpe lightnet+swiglu x6")}) == recipe
        own = [{"layer": "tpe", "options": {"tpe": {"num_modes": 3}}}, "lightnet+swiglu"]
        assert parse(ModelConfig, {"recipe": "lightnet-10m", "layout": own}).stack.names[0] == "tpe"
        without = parse(ModelConfig, {"recipe": "lightnet-10m", "tpe": None})
        assert without.layout == "lightnet+swiglu x6" and "tpe" not in without.options


AFTER = {
    "d_model": 16,
    "vocab_size": 32,
    "layout": "gdn+swiglu attention+swiglu mamba swiglu attention",
    "options": {"attention": {"num_heads": 2}, "gdn": {"num_heads": 2, "head_dim": 4}},
    "norm_after": ["attention", "swiglu"],
    "residual_scale": 0.22,
    "embedding_scale": 12.0,
    "logit_scale": 0.125,
}


@pytest.mark.parametrize("norm", ["rmsnorm", "zero_centred_rmsnorm", "layernorm"])
@pytest.mark.parametrize(
    "changes", [{}, {"norm_after": []}, {"residual_scale": 1.0}, {"norm_after": [], "residual_norm": 1.7}]
)
def test_norms_before_and_after_layers_and_factors_are_their_equations(changes, norm):
    lm = build_model(parse(ModelConfig, AFTER | changes | {"norm": norm, "init_std": 0.2})).double()
    for parameter in lm.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tokens = torch.randint(32, (2, 11), generator=torch.Generator().manual_seed(2))
    x, scale = 12.0 * lm.embedding(tokens), (AFTER | changes)["residual_scale"]
    for block, spec in zip(lm.backbone.blocks, lm.config.blocks, strict=True):
        sublayers = [(block.mixer_norm, lambda y, block=block: block.mixer(y)[0])] if block.mixer is not None else []
        sublayers += [(block.channel_norm, block.channel)] if block.channel is not None else []
        for normed, layer in sublayers:
            after = spec.names[0] in lm.config.norm_after
            rest = x if lm.config.residual_norm is None else 1.7 * normed(x)
            x = rest + scale * (normed(layer(x)) if after else layer(normed(x)))
    expected = 0.125 * lm.backbone.norm(x) @ lm.embedding.weight.T
    logits, _ = lm(tokens)
    torch.testing.assert_close(logits, expected)
    states, steps = lm.init_state(2, 11), []
    with torch.no_grad():
        for t in range(11):
            one, states = lm.step(tokens[:, t], states)
            steps.append(one)
    torch.testing.assert_close(torch.stack(steps, 1), logits)
    packed, _ = lm(tokens.view(1, 22), cu_seqlens=torch.tensor([0, 11, 22], dtype=torch.int32))
    torch.testing.assert_close(packed.view_as(logits), logits)
    total, count = lm.loss(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(
        total, nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    )
    (total / count).backward()
    assert all(p.grad.any() for p in lm.parameters())


def test_keys_at_their_defaults_are_not_written():
    new = {"norm_after", "residual_scale", "logit_scale"}
    assert not (new | {"residual_norm"}) & model(layout="attention").model_dump().keys()
    assert new < parse(ModelConfig, AFTER).model_dump().keys()
    assert parse(ModelConfig, parse(ModelConfig, AFTER).model_dump(mode="json")) == parse(ModelConfig, AFTER)
    (problem,) = problems(layout="attention+swiglu x2", norm_after=["swiglu"], **{"options": SHAPE["options"]})
    assert problem.startswith("norm_after:") and "'swiglu'" in problem and "attention" in problem
    cut = {"layout": "mamba attention", "num_layers": 1, "norm_after": ["attention"], "options": {}}
    with pytest.warns(UserWarning, match="num_layers: 1"):
        assert model(**cut).norm_after == []
    both = {"norm_after": ["attention"], "residual_norm": 1.0, "options": SHAPE["options"]}
    (problem,) = problems(layout="attention+swiglu x2", **both)
    assert problem.startswith("residual_norm:") and "norm_after" in problem
    for key, value in (("norm_after", ["attention"]), ("residual_scale", 0.5), ("residual_norm", 1.0)):
        values = {"d_model": 16, "layout": "attention+mlp", "conditioning": "adaln_zero", "options": SHAPE["options"]}
        with pytest.raises(ConfigError, match=f"conditioning: adaln_zero .*{key}"):
            parse(DenoiserConfig, values | {key: value})


BESIDE = {"mixers": {"attention": {"num_heads": 2}, "gdn": {"num_heads": 2, "head_dim": 4}}}


def test_mixers_in_parallel_are_summed_with_their_factors():
    scales = {"input_scales": {"attention": 0.5}, "output_scales": {"gdn": 3.0, "attention": 0.25}}
    one = build_model(model(layout="parallel", options={"parallel": BESIDE | scales})).double().backbone.blocks[0]
    mixers, x = one.mixer.mixers, torch.randn(2, 9, 16, dtype=torch.float64)
    normed = one.mixer_norm(x)
    expected = x + 0.25 * mixers["attention"](0.5 * normed)[0] + 3.0 * mixers["gdn"](normed)[0]
    torch.testing.assert_close(one(x)[0], expected)


def test_costs_of_mixers_in_parallel_are_the_sums():
    both = model(layout="parallel+swiglu x2", options={"parallel": BESIDE})
    alone = [model(layout=f"{name} x2", options={name: given}) for name, given in BESIDE["mixers"].items()]
    rest = model(layout="swiglu x2", options={})
    gains = 2 * 16 + 16  # norms of the mixers of `alone` but one, and their last norms
    assert count_parameters(both)[1] == sum(count_parameters(c)[1] for c in (*alone, rest)) - gains - 16
    assert state_bytes(both, 50) == sum(state_bytes(c, 50) for c in alone)
    head = 6 * 64 * 16 * 32
    assert flops_exact(both, 64) - head == sum(flops_exact(c, 64) - head for c in (*alone, rest))
    assert flops_paper(both, 64) == sum(flops_paper(c, 64) for c in (*alone, rest))
    masked = [flops_exact(c, 64) - flops_causal(c, 64) for c in (both, *alone)]
    assert masked[0] == sum(masked[1:]) > 0 and attention_share(both) == 0.5
    wide = at_width(both, 32).options["parallel"]["mixers"]
    assert wide["attention"]["num_heads"] == wide["gdn"]["num_heads"] == 4 and wide["gdn"]["head_dim"] == 4


@pytest.mark.parametrize(
    "options, key",
    [
        ({"mixers": {"attention": {}}}, "mixers: attention alone"),
        ({"mixers": {"attention": {}, "gnd": {}}}, "mixers: 'gnd' .*gdn"),
        ({"mixers": {"attention": {}, "tpe": {}}}, "mixers: 'tpe'"),
        ({"mixers": {"attention": {"num_heads": 5}, "mamba": {}}}, "mixers.attention.num_heads: 5 .*16"),
        ({"mixers": {"attention": {"heads": 4}, "mamba": {}}}, "mixers.attention.heads"),
        ({"mixers": {"attention": {"head_dim": 1 << 30}, "mamba": {}}}, "mixers.attention.head_dim: 1073741824"),
        ({"output_scales": {"hgrn": 2.0}}, "output_scales: 'hgrn'"),
        ({"input_scales": {"mamba": -1.0}}, "input_scales.mamba"),
    ],
)
def test_wrong_mixers_in_parallel_are_named(options, key):
    with pytest.raises(ConfigError, match=f"options.parallel.{key}"):
        model(layout="parallel", options={"parallel": options})


@pytest.mark.parametrize("mixer", ["attention", "mla", "tnn"])
def test_a_cache_that_is_full_is_an_error_and_loses_no_token(mixer):
    options = {} if mixer == "tnn" else {mixer: {"num_heads": 2}}
    lm = build_model(ModelConfig(d_model=32, layout=f"{mixer}+swiglu", options=options), seed=0).eval()
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, states = lm(tokens[:, :7], lm.init_state(2, 8))
        lm.step(tokens[:, 7], states)
        for call in (
            lambda: lm.step(tokens[:, 8], states),
            lambda: lm(tokens[:, 8:], states),
            lambda: lm(tokens, lm.init_state(2, 8)),
        ):
            with pytest.raises(ValueError, match=r"context_length: .* 8 tokens, but 9 have come"):
                call()


def test_a_window_that_is_full_goes_on():
    options = {"attention": {"num_heads": 2, "window": 4}}
    lm = build_model(ModelConfig(d_model=32, layout="attention+swiglu", options=options), seed=0).eval()
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, states = lm(tokens[:, :7], lm.init_state(2, 5))
        steps = [lm.step(tokens[:, t], states)[0] for t in (7, 8)]
        torch.testing.assert_close(torch.cat([first, torch.stack(steps, 1)], 1), lm(tokens)[0], atol=1e-5, rtol=1e-4)


DEFERRED = {
    "mixer alone": {"layout": "mamba2 x3", "options": {"mamba2": {"state": 4, "head_dim": 8}}},
    "channel alone": {"layout": "attention swiglu attention"},
    "channel mixer with a state": {"layout": "hgrn2+rwkv attention+rwkv"},
    "norm of the stream": {"layout": "attention+swiglu x2", "norm": "layernorm", "residual_norm": 1.5},
    "norm after": {"layout": "attention+swiglu x2", "norm_after": ["attention"]},
    "dropout": {"layout": "attention+swiglu x3", "dropout": 0.2},
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", DEFERRED)
def test_blocks_may_leave_their_last_sum_to_the_next_norm(name, kept):
    """With the same features and gradients, of all tokens and of some; without gradients every block sums."""
    whole = build_model(model(**DEFERRED[name])).double()
    stack = whole.backbone
    x, parameters = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True), list(stack.parameters())
    keep = (torch.tensor([0, 1, 1]), torch.tensor([3, 0, 6])) if kept else None

    def everything():
        with position(whole, step=3, row_length=7):
            y, _ = stack(x, keep=keep)
        return [y, *torch.autograd.grad(y.sin().sum(), [x, *parameters], allow_unused=True)]

    expected = everything()
    stack.defer_sums()
    streams = []
    for block in stack.blocks:
        block.register_forward_hook(lambda block, inputs, outputs: streams.append(outputs[0]))
    for a, e in zip(everything(), expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)
    assert all(isinstance(stream, tuple) for stream in streams)
    streams.clear()
    with torch.no_grad():
        stack(x)
    assert all(isinstance(stream, torch.Tensor) for stream in streams)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("name, bias", [("mixer alone", "none"), ("norm of the stream", "all")])
def test_blocks_that_may_not_return_views_add_them(name, bias, views):
    """As under FSDP2, which gives a block views of its inputs and warns of a module that returns one."""
    whole = build_model(model(**DEFERRED[name], bias=bias))
    stack, outputs = whole.backbone, []
    stack.defer_sums(views)
    for block in stack.blocks:
        block.register_forward_hook(lambda block, inputs, output: outputs.append(output[0]))
    stack(torch.randn(2, 7, 16, requires_grad=True).view(2, 7, 16))
    deferred = [isinstance(output, tuple) for output in outputs]
    assert deferred == ([True] * len(deferred) if views else [bias == "none" and i > 0 for i in range(len(deferred))])
    terms = [x for output in outputs for x in (output if isinstance(output, tuple) else (output,))]
    assert any(x._is_view() for x in terms) == views
