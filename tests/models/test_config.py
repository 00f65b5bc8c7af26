"""Layout strings, model configurations and what they refuse; weights that depend on the seed alone."""

import re

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.models import LayerSpec, ModelConfig, build_model, family, get_recipe, parse_layout


@pytest.mark.parametrize(
    "layout, aliases, expected",
    [
        ("tnl+sglu x3", {}, ["tnl+sglu"] * 3),
        ("tnl+sglu", {}, ["tnl+sglu"]),
        ("(tnl+sglu attention+swiglu) x2", {}, ["tnl+sglu", "attention+swiglu"] * 2),
        ("tnl+sglu x2 attention+swiglu", {}, ["tnl+sglu", "tnl+sglu", "attention+swiglu"]),
        ("((tnl+sglu) x2 gla) x2 hgrn2", {}, ["tnl+sglu", "tnl+sglu", "gla"] * 2 + ["hgrn2"]),
        (
            "2H:1A:H",
            {"H": "hgrn2+sglu", "A": "attention+swiglu"},
            ["hgrn2+sglu"] * 2 + ["attention+swiglu", "hgrn2+sglu"],
        ),
        ("P x2", {"P": "(tnl swiglu)"}, ["tnl", "swiglu"] * 2),
    ],
)
def test_layouts(layout, aliases, expected):
    def spec(text):
        mixer, _, channel = text.partition("+")
        return LayerSpec(None, mixer) if mixer == "swiglu" else LayerSpec(mixer, channel or None)

    assert parse_layout(layout, aliases) == [spec(text) for text in expected]


@pytest.mark.parametrize(
    "layout, message",
    [
        ("", "empty"),
        ("tnl+sglu x0", "x0"),
        ("x3", "block"),
        ("tnl+sglu x2 x3", "block"),
        ("(tnl+sglu", r"\(tnl\+sglu"),
        ("tnl+sglu)", r"'\)'"),
        ("()", r"\(\)"),
        ("tnl3+sglu", "'tnl'"),
        ("tnl+swigluu", "'swiglu'"),
        ("3Q", "'Q'"),
    ],
)
def test_layouts_that_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(layout)


def test_an_alias_of_itself_is_refused_and_not_followed_forever():
    with pytest.raises(ValueError, match=r"aliases\.A: .*A -> B -> A"):
        parse_layout("A", {"A": "B", "B": "A"})


def test_all_problems_of_a_model_at_once():
    values = {"d_modle": 64, "layout": "tnl+sglu x2", "vocab_size": "many", "norm": "batch"}
    with pytest.raises(ConfigError) as error:
        parse(ModelConfig, values)
    text = str(error.value)
    assert re.search("d_modle: .*64.*'d_model'", text)
    assert "vocab_size" in text and "'many'" in text and "norm" in text and "d_model: required" in text
    assert len(error.value.problems) == 4


@pytest.mark.parametrize("key", ["n_layers", "layers", "depth"])
def test_the_number_of_layers_is_in_the_layout(key):
    with pytest.raises(ConfigError, match=rf"{key}: .*1.*`layout`.*`num_layers`"):
        parse(ModelConfig, {"recipe": "tnl-10m", key: 1})


def test_all_problems_of_the_layers_at_once():
    values = {
        "d_model": 100,
        "layout": "tnl+sglu attention",
        "options": {"tnl": {"num_heads": 7}, "sglu": {"iner": 8}, "gla": {}, "attention": {"num_heads": 100}},
    }
    with pytest.raises(ConfigError) as error:
        parse(ModelConfig, values)
    text = str(error.value)
    assert re.search(r"options\.tnl\.num_heads: 7 .* 100.* 5 ", text)
    assert re.search(r"sglu\.iner: .*8.*'inner'", text)
    assert re.search(r"options\.attention\.num_heads: .* 1; .*num_heads", text)
    assert "options.gla" in text


def test_recipes_can_be_named_and_changed():
    plain = parse(ModelConfig, {"recipe": "tnl-10m"})
    assert plain == get_recipe("tnl-10m")
    changed = parse(ModelConfig, {"recipe": "tnl-10m", "vocab_size": 999, "options": {"tnl": {"num_heads": 8}}})
    assert (changed.vocab_size, changed.options["tnl"]["num_heads"]) == (999, 8)
    assert changed.options["tnl"]["slopes"] == "alibi"
    with pytest.raises(ConfigError, match="'tnl-10m'"):
        parse(ModelConfig, {"recipe": "tnl-10mm"})


def test_a_resolved_configuration_is_complete_and_reads_back():
    config = get_recipe("cosformer2-10m")
    assert config.options["cosformer2"]["gate"] == "low_rank" and config.options["sglu"] == {"inner": 0}
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    assert parse(ModelConfig, config.model_dump(mode="json")) == config


def test_weights_depend_on_the_seed_alone():
    config = family("cosformer2")(32, 2)
    torch.manual_seed(5)
    first = build_model(config, seed=3)
    torch.manual_seed(6)
    again, other = build_model(config, seed=3), build_model(config, seed=4)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if name.endswith("proj.weight") or "embedding" in name:
            assert not torch.equal(a, c), name


def test_initialisation_has_the_stated_scale():
    model = build_model(family("tnl")(128, 8), seed=0)
    block = model.backbone.blocks[0]
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mixer.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mixer.output.out_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.channel.down_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_untied_and_scaled_embeddings():
    config = family("llama")(32, 1).model_copy(update={"tie_embeddings": False, "embedding_scale": 3.0})
    model = build_model(config)
    assert model.head.weight.shape == (256, 32)
    tokens = torch.randint(0, 256, (1, 4))
    torch.testing.assert_close(model.embed(tokens), 3.0 * model.embedding(tokens))


def test_hybrids_share_and_carry_what_each_layer_needs():
    config = ModelConfig(
        d_model=32,
        layout="(hgrn2+sglu x2 attention+swiglu) x2 hgrn",
        options={"hgrn2": {"num_heads": 2}, "attention": {"num_heads": 2}},
    )
    model = build_model(config).double()
    assert model.backbone.shared["hgrn2"].gamma.shape == (4, 32)
    assert model.backbone.shared["hgrn"].gamma.shape == (1, 32)
    assert sum("gamma" in key for key in model.state_dict()) == 2
    tokens = torch.randint(0, 256, (2, 12))
    full, _ = model(tokens)
    states = model.init_state(2, 12, dtype=torch.float64)
    first, states = model(tokens[:, :7], states)
    second, states = model(tokens[:, 7:], states)
    torch.testing.assert_close(torch.cat([first, second], 1), full)


@pytest.mark.parametrize("other", ["attention+swiglu x2", "tnl+sglu x3", "tnl+sglu"])
def test_states_of_other_layers_are_refused(other):
    model, stranger = (build_model(ModelConfig(d_model=16, layout=it)) for it in ("tnl+sglu x2", other))
    states, tokens = stranger.init_state(1, 4), torch.zeros(1, 2, dtype=torch.int64)
    for call in (lambda: model(tokens, states), lambda: model.step(tokens[:, 0], states)):
        with pytest.raises(ValueError, match="states: .*init_state"):
            call()


@pytest.mark.parametrize("config", ["tnl-10m", {"d_model": 16}])
def test_what_is_no_configuration_builds_no_model(config):
    with pytest.raises(TypeError, match="config: .*get_recipe"):
        build_model(config)


def test_ignored_targets_do_not_count():
    model = build_model(family("tnl")(32, 1))
    tokens = torch.randint(0, 256, (2, 9))
    targets = tokens.roll(-1, 1)
    masked = targets.clone()
    masked[:, 4:] = -100
    total, count = model.loss(tokens, masked)
    expected, _ = model.loss(tokens[:, :4], targets[:, :4])
    assert count == 8
    torch.testing.assert_close(total, expected)
