"""What is wrong in a layout is marked where it stands."""

import warnings

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError, parse
from linnet.layers.base import CHANNELS, MIXERS, _plain, find_mixer
from linnet.models import ModelConfig, family
from linnet.models.layout import LayoutError, parse_layout
from linnet.models.registry import unknown_recipe

ALIASES = {"H": "hyena+swiglu", "A": "attentoin+swiglu"}


@pytest.mark.parametrize(
    ("layout", "marked"),
    [
        ("tnl+swigl x2", "    ^^^^^"),
        ("tnk+sglu", "^^^"),
        ("(tnl+sglu gla) x2 (tnl+sglu", "                  ^"),
        ("tnl+sglu) x2", "        ^"),
        ("tnl x0", "    ^^"),
        ("tnl+sglu () x2", "         ^^"),
        ("tnl+ x2", "    ^"),
        ("tnl 2Q", "     ^"),
        ("tnln+sglu (gla hgrm2) x4", "^^^^           ^^^^^"),
        ("tnl\n hyenaa", "     ^^^^^^"),
    ],
)
def test_the_wrong_place_is_marked(layout, marked):
    with pytest.raises(LayoutError) as caught:
        parse_layout(layout)
    _, shown, carets = str(caught.value).rsplit("\n", 2)
    assert shown == "      " + layout.replace("\n", " ") and carets == "      " + marked
    assert len(caught.value.marks) == marked.count(" ^") + marked.startswith("^")


@pytest.mark.parametrize(
    "layout", ["tnl x1000000", "99999999999H", "(tnl x3000) x3000", "3000H 3000H", "4096A", "(tnl x3000) (tnl x3000)"]
)
def test_more_blocks_than_anybody_means_are_refused_at_once(layout):
    with pytest.raises(LayoutError, match="4,096"):
        parse_layout(layout, {"H": "tnl", "A": "(tnl) x4096"})
    assert len(parse_layout("2000H 2096H", {"H": "tnl"})) == 4096


def test_in_an_alias_the_text_of_the_alias_is_marked():
    with pytest.raises(LayoutError, match="alias 'A': .*'attentoin' .*'attention'"):
        parse_layout("2H:4A", ALIASES)
    with pytest.raises(LayoutError) as caught:
        parse_layout("2H:4A", ALIASES)
    assert str(caught.value).splitlines()[1:] == ["      attentoin+swiglu", "      ^^^^^^^^^"]


def test_a_long_layout_is_shown_around_the_place():
    with pytest.raises(LayoutError) as caught:
        parse_layout("tnl+sglu " * 30 + "tnl+sgl " + "tnl+sglu " * 30)
    _, shown, carets = str(caught.value).splitlines()
    place = carets.index("^")
    assert shown[place : place + 4] == "sgl " and carets.count("^") == 3 and len(shown) < 120
    assert shown.lstrip().startswith("...") and shown.endswith("...")


def test_a_name_near_none_may_be_of_an_own_mixer():
    with pytest.raises(LayoutError, match=r"'leaky' .*gla, .*--mixer .*`plugins`"):
        parse_layout("leaky+sglu")
    with pytest.raises(ConfigError, match=r"'leaky' .*--mixer .*`plugins`"):
        family("leaky")
    with pytest.raises(LayoutError) as caught:
        parse_layout("tnl+zzz")
    assert "--mixer" not in str(caught.value)  # of channel mixers


def test_commands_and_configurations_show_it():
    result = CliRunner().invoke(app, ["mad", "run", "tnl+swiglu x2", "gla+swigl x2"])
    assert result.exit_code == 2 and "\n      gla+swigl x2\n          ^^^^^\n" in result.stderr
    with pytest.raises(ConfigError, match=r"'hyena'.*\n      \(hyenaa gla\) x2\n       \^{6}"):
        parse(ModelConfig, {"d_model": 64, "layout": "(hyenaa gla) x2"})


@pytest.mark.parametrize(
    "layout, problem",
    [
        ("(" * 3000, "parentheses"),
        ("(" * 3000 + "tnl" + ")" * 3000, "parentheses"),
        ("0tnl", "0 times"),
        ("tnl x0", "at least 1"),
        ("9" * 5000 + "tnl", "4,096"),
        ("tnl x" + "9" * 5000, "4,096"),
        ("nothing " * 4000, "unknown"),
    ],
)
def test_absurd_layouts_are_refused_with_a_short_message(layout, problem):
    with pytest.raises(LayoutError, match=problem) as error:
        parse_layout(layout)
    assert len(str(error.value)) < 16_000


def test_long_chains_of_aliases_are_refused():
    chain = {f"A{i}": f"A{i + 1}" for i in range(900)}
    with pytest.raises(LayoutError, match="32 aliases"):
        parse_layout("A0", chain | {"A900": "tnl"})
    with pytest.raises(ValueError, match="refers to itself"):
        parse_layout("A0", chain | {"A900": "A0"})


@pytest.mark.parametrize("layout", ["x3x3(", "(L", "L x", "L2"])
def test_aliases_of_plain_values_are_read_or_the_layout_is_refused(layout):
    aliases = {"L": {"layer": "tnl+sglu", "options": {"tnl": {"num_heads": 2}}}}
    assert [spec.alias for spec in parse_layout("L x2", aliases)] == ["L", "L"]
    with pytest.raises(LayoutError):
        parse_layout(layout, aliases)
    with pytest.raises(ConfigError, match="layout: "):
        ModelConfig(d_model=32, layout=layout, aliases=aliases)
    with pytest.raises(ConfigError, match="layr: unknown key"):
        parse_layout("L", {"L": {"layr": "tnl+sglu"}})


@pytest.mark.parametrize("layout", ["tnl+sglu x٣", "tnl+sglu x𝟛", "tnl+sglu *٣", "٣L", "3٣L", "tnl+sglu x3٣", "x２"])
def test_digits_of_other_scripts_are_no_counts(layout):
    with pytest.raises(LayoutError):
        parse_layout(layout, {"L": "tnl+sglu"})
    with pytest.raises(ConfigError, match="digits of another script"):
        ModelConfig(d_model=32, layout="tnl+sglu x٣")


def test_joined_blocks_repeat_and_are_cut_as_one():
    def mixers(layout, layers, aliases=None):
        values = {"d_model": 32, "vocab_size": 64, "layout": layout, "num_layers": layers, "aliases": aliases or {}}
        return "".join((spec.mixer or spec.channel)[0] for spec in ModelConfig.model_validate(values).blocks)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shares
        assert [mixers("mamba&mamba attention+swiglu", n) for n in (1, 2, 3, 5)] == ["mm", "mma", "mmamm", "mmammamm"]
        pair = {"P": "mamba&mamba", "A": "attention+swiglu"}
        assert mixers("P:2A", 4, pair) == "mmaamm" and mixers("(2P A) x2", 5, pair) == "mmmma" * 1 + "mmmm"
        assert mixers("P&A", 2, pair) == "mmamma" and mixers("P&A gla", 3, pair) == "mmagmma"
        aliases = {"P": {"layer": "mamba&mamba", "options": {"mamba": {"state": 8}}}}
        assert mixers("P attention+swiglu", 3, aliases) == "mmamm"
        plain = {"P": "mamba mamba"}  # not joined
        assert mixers("P attention+swiglu", 4, plain) == "mmam"
    values = {"d_model": 32, "vocab_size": 64, "layout": "P attention+swiglu", "num_layers": 3, "aliases": aliases}
    one = ModelConfig.model_validate(values)
    assert [one.layer_options("mamba", spec).state for spec in one.blocks if spec.mixer == "mamba"] == [8] * 4
    assert ModelConfig.model_validate(one.model_dump()).blocks == one.blocks
    for wrong, words in (("mamba&", "layer is missing"), ("mamba&mamb", "'mamba'"), ("&", "missing")):
        with pytest.raises(ValueError, match=words):
            parse_layout(wrong)
    with pytest.raises(ValueError, match="refers to itself"):
        parse_layout("P", {"P": "mamba&P"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gated_delta_net", "gdn"),
        ("Gated-DeltaNet", "gdn"),
        ("DeltaNet", "delta_net"),
        ("deltaproduct", "gated_delta_product"),
        ("RetNet", "retnet"),
        ("mamba-2", "mamba2"),
        ("rwkv", "rwkv7"),
        ("lfm2", "short_conv"),
        ("lightning_attention", "tnl"),
        ("linear_attention", "elu1"),
        ("griffin", "rglru"),
    ],
)
def test_a_name_of_the_field_finds_the_mixer(name, meant):
    with pytest.raises(LayoutError, match=f"did you mean '{meant}'"):
        parse_layout(f"{name}+swiglu x2")
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        find_mixer(name)


def test_no_two_layers_have_the_same_name():
    for registry in (MIXERS, CHANNELS):
        names = [_plain(name) for name, cls in registry.items() for name in (name, *cls.also)]
        assert len(names) == len(set(names))


def test_a_recipe_under_a_name_of_the_field_is_found():
    for name, meant in (("gated_deltanet-1b", "gdn-1b"), ("mamba-2-130m", "mamba2-130m"), ("rwkv-10m", "rwkv7-10m")):
        assert f"did you mean {meant!r}?" in unknown_recipe(name)
    assert "short_conv" not in unknown_recipe("lfm2-9b")  # recipes of that name exist


def test_an_unknown_mixer_may_be_of_a_file_of_your_own():
    with pytest.raises(LayoutError, match=r"'zzzzzz' is unknown.*--mixer.*`plugins`.*linnet\.layers\.load_plugin"):
        parse_layout("zzzzzz+swiglu x2")
