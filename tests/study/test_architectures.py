"""Layout patterns of a study: repeating, cutting, options per block."""

import pytest

from linnet.config import ConfigError, parse
from linnet.study import StudyConfig, plan
from linnet.study.architectures import Architecture, Base, Size, make_model

LOCAL = {"layer": "attention+swiglu", "options": {"attention": {"window": 8}}}
SIZE = Size(d_model=16, num_layers=5, num_heads=2)


def model(**values):
    return make_model(parse(Architecture, {"name": "one"} | values), SIZE, Base.text(32))


def windows(config) -> list[int]:
    return [config.layer_options("attention", spec).window for spec in config.blocks]


def test_a_pattern_is_cut_at_the_layers_of_the_size():
    config = model(layout="L L G", aliases={"L": LOCAL, "G": "attention+swiglu"})
    assert windows(config) == [8, 8, 0, 8, 8] and config.options["attention"]["num_heads"] == 2
    assert windows(model(layout=["attention+swiglu", LOCAL])) == [0, 8, 0, 8, 0]
    assert model(layout="tpe tnl+sglu").num_layers == 5


def test_a_pattern_that_divides_the_layers_is_written_as_in_0_1_0():
    assert make_model(
        Architecture(name="one", layout="tnl gla"), Size(d_model=16, num_layers=4), Base.text(32)
    ).layout == ("(tnl gla) x2")


def test_a_longer_pattern_is_cut_with_a_warning():
    with pytest.warns(UserWarning, match="6 blocks.*num_layers: 5"):
        cut = model(layout="gla tnl x5", options={"gla": {"expand_k": 0.5}, "tnl": {"gate": "full"}})
    assert cut.num_layers == 5 and cut.options["tnl"]["gate"] == "full" and cut.options["gla"]["expand_k"] == 0.5


@pytest.mark.filterwarnings("ignore:layout")
def test_a_pattern_that_would_lose_a_kind_of_layer_is_refused():
    with pytest.raises(ValueError, match="'tnl x5 gla' has no gla left when cut at 5 blocks"):
        model(layout="tnl x5 gla")


def test_mixers_side_by_side_have_the_heads_of_the_size():
    """Like the same mixers in blocks of their own; heads that are given stay."""

    def heads(options) -> dict[str, int]:
        return {name: settings.get("num_heads") for name, settings in options["mixers"].items()}

    mixers = {"gdn": {"expand_v": 1.0}, "attention": {"num_heads": 4}, "short_conv": {}}
    config = model(layout="parallel+swiglu", options={"parallel": {"mixers": mixers}})
    assert heads(config.options["parallel"]) == {"gdn": 2, "attention": 4, "short_conv": None}
    assert config.options["parallel"]["mixers"]["gdn"]["expand_v"] == 1.0
    assert heads(model(layout="parallel+swiglu").options["parallel"]) == {"attention": 2, "mamba": None}
    alias = {"layer": "parallel+swiglu", "options": {"parallel": {"mixers": mixers}}}
    config = model(layout="P", aliases={"P": alias})
    assert heads({"mixers": config.layer_options("parallel", config.blocks[0]).mixers}) == {
        "gdn": 2,
        "attention": 4,
        "short_conv": None,
    }


def test_aliases_without_a_layout_are_refused():
    with pytest.raises(ConfigError, match="'one' has aliases"):
        parse(StudyConfig, {"name": "s", "architectures": [{"name": "one", "aliases": {"A": "tnl"}}], "budgets": [1e9]})


def test_a_layout_with_a_family_keeps_the_rest_of_the_family():
    swish = model(family="tnl1", layout="tnl+swiglu", options={"tnl": {"gate": "none"}})
    base = model(family="tnl1")
    assert (swish.norm, swish.embedding_scale) == (base.norm, base.embedding_scale) == ("srmsnorm", 4.0)
    assert swish.layout == "(tnl+swiglu) x5" and swish.options.keys() == {"tnl", "swiglu"}
    assert swish.options["tnl"] == base.options["tnl"] | {"gate": "none"}
    assert model(layout="tnl+swiglu").norm == "rmsnorm"  # without a family, as before
    for layout in ("lightnet+swiglu", ["lightnet+swiglu"]):
        with pytest.warns(UserWarning, match=r"'lightnet\+swiglu' replaces .*family 'lightnet', with tpe before it"):
            bare = model(family="lightnet", layout=layout)
    assert "tpe" not in bare.options and "tpe" in model(family="lightnet").options
    hybrid = model(family="hgrn2", layout="hgrn2+swiglu attention+swiglu")
    assert hybrid.options["attention"]["num_heads"] == 2 and hybrid.norm == model(family="hgrn2").norm


def test_keys_of_the_model_are_those_of_the_architecture():
    config = model(family="tnl1", model={"norm": "layernorm", "positions": "learned", "num_positions": 32})
    assert (config.norm, config.num_positions, config.embedding_scale) == ("layernorm", 32, 4.0)
    assert config.options == model(family="tnl1").options
    assert model(layout="tnl+sglu", model={"norm": "srmsnorm"}).norm == "srmsnorm"


@pytest.mark.parametrize(
    "keys, told",
    [
        ({"d_model": 32}, r"model\.d_model: cannot be set here; set `sizes`"),
        ({"init_std": 0.1, "vocab_size": 7}, r"model\.init_std.*; model\.vocab_size: "),
        ({"nrom": "layernorm"}, r"model\.nrom: .*norm"),
        ({"positions": "learned"}, r"model\.num_positions: "),
    ],
)
def test_keys_that_a_study_cannot_take_are_refused_by_name(keys, told):
    values = {"name": "s", "architectures": [{"name": "one", "family": "tnl", "model": keys}], "budgets": [1e9]}
    with pytest.raises(ConfigError, match=told):
        plan(parse(StudyConfig, values | {"sizes": [[16, 2]]}), check_data=False)


def test_what_a_layout_alone_loses_is_said_in_the_plan():
    values = {"name": "s", "tokens": [1e5], "sizes": [[16, 2]], "seq_len": 32}

    def notes(**architecture):
        found = plan(parse(StudyConfig, values | {"architectures": [{"name": "one"} | architecture]}), check_data=False)
        return [line for line in found.notes() if "without a family" in line]

    assert "norm: rmsnorm (family tnl: srmsnorm)" in notes(layout="tnl+swiglu")[0]
    assert notes(layout="tnl+swiglu", family="tnl") == notes(family="tnl") == notes(layout="attention+swiglu") == []
    assert notes(layout="tnl+swiglu", model={"norm": "layernorm"}) == []


TABLE = {"name": "ape", "family": "tnl", "model": {"positions": "learned", "num_positions": 64}}


def test_rows_beyond_a_table_of_positions_are_refused_by_the_name_of_the_architecture():
    """A study would otherwise end in the first step of that architecture, perhaps after hours of the others."""
    values = {"name": "s", "architectures": ["tnl", TABLE], "tokens": [1e5], "sizes": [[16, 2], [32, 2]], "seq_len": 65}
    long = "architectures.ape 16x2, 32x2: seq_len: 65 is above model.num_positions: 64; "
    with pytest.raises(ConfigError) as error:
        plan(parse(StudyConfig, values), check_data=False)
    assert [line.startswith(long) for line in error.value.problems] == [True]
    with pytest.raises(ConfigError) as error:  # beside a wrong key too
        parse(StudyConfig, values | {"seed": 1})
    assert len(error.value.problems) == 2 and error.value.problems[1].startswith(long)
    with pytest.raises(ConfigError) as error:  # a wrong length is reported as such, and not as that of the default
        parse(StudyConfig, values | {"seq_len": "long"})
    assert len(error.value.problems) == 1
    own = values | {"architectures": ["tnl", TABLE | {"seq_len": 64}]}
    assert plan(parse(StudyConfig, own), check_data=False).runs
    with pytest.raises(ConfigError, match="ape .*seq_len: 128 "):
        plan(
            parse(StudyConfig, values | {"seq_len": 64, "architectures": [TABLE | {"seq_len": 128}]}), check_data=False
        )


def test_a_depth_that_does_not_hold_the_shares_of_a_pattern_is_noted():
    values = {"name": "s", "tokens": [1e5], "seq_len": 32}

    def notes(layout, *depths):
        sizes = {"sizes": [[16, depth] for depth in depths], "architectures": [{"name": "one", "layout": layout}]}
        found = plan(parse(StudyConfig, values | sizes), check_data=False)
        return [line for line in found.notes() if "the pattern has" in line]

    striped = "attention+swiglu hyena+swiglu x3"
    (line,) = notes(striped, 4, 6, 10)
    assert "attention in 1 of 4 blocks, but its sizes in 2 of 6, in 3 of 10; use a multiple of 4" in line
    assert "2 of 8 blocks, but its sizes in 3 of 10" in notes(f"({striped}) x2", 10)[0]
    assert notes(striped, 4, 8) == notes("tnl+swiglu x3", 4) == notes("attention+swiglu hyena+swiglu", 19) == []


@pytest.mark.parametrize(
    "values, told",
    [
        ({"learning_rate": "tabel"}, "learning_rate: 'tabel' is not a rule; give a number"),
        ({"sizes": ["c2-99m"]}, "size 'c2-99m' is not one of paper 004; did you mean 'c2-"),
    ],
)
def test_wrong_rules_and_sizes_get_a_fix(values, told):
    with pytest.raises(ConfigError) as error:
        parse(StudyConfig, {"name": "x", "architectures": ["tnl"], "budgets": [1e12], "sizes": [[32, 2]]} | values)
    assert told in str(error.value)
