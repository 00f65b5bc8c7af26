"""Layout patterns of a study: repeating, cutting, options per block."""

import pytest

from linnet.config import ConfigError, parse
from linnet.study import StudyConfig
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
        cut = model(layout="tnl x5 gla", options={"gla": {"expand_k": 0.5}, "tnl": {"gate": "full"}})
    assert cut.num_layers == 5 and cut.options.keys() == {"tnl"} and cut.options["tnl"]["gate"] == "full"


def test_aliases_without_a_layout_are_refused():
    with pytest.raises(ConfigError, match="'one' has aliases"):
        parse(StudyConfig, {"name": "s", "architectures": [{"name": "one", "aliases": {"A": "tnl"}}], "budgets": [1e9]})
