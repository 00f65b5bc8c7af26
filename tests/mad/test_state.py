"""Fixed state from the layers, the paper's 4,096, and what is said where it cannot be reached."""

import re

import pytest

from linnet.config import ConfigError
from linnet.mad.architectures import block_states, check_state, normalise, state_size, target_size
from linnet.models import ModelConfig, state_bytes
from linnet.models.recipes.mad import ARCHITECTURES, mad_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_architectures_of_the_paper_are_normalised(name):
    config = mad_model(name)
    expected = 0 if name.startswith("mad-attention") else 2048 if "attention" in name else 4096
    assert state_size(config) == target_size(config) == expected
    check_state(config)
    assert normalise(config) is config


def test_caches_are_left_out_and_blocks_share_by_their_layers():
    config = mad_model("gla+swiglu attention+swiglu")
    gla, attention = block_states(config)
    assert gla == (0, "gla", 2048, False, 2048.0, {})
    assert (attention.size, attention.grows, attention.share) == (0, True, 0.0)
    windowed = ModelConfig(**{**config.model_dump(), "options": {"gla": {"num_heads": 8}, "attention": {"window": 4}}})
    assert state_size(windowed) == 2048
    assert [block.share for block in block_states(mad_model("mamba x2 attention+moe"))] == [1024.0, 1024.0, 0.0]


def test_a_complex_number_counts_once_and_has_eight_bytes():
    options = {"hgrn": {"complex": True}}
    config = ModelConfig(d_model=128, layout="hgrn x2", options=options)
    assert state_size(config) == 256
    assert state_bytes(config, 1000) == 256 * 8


def test_a_mixer_before_the_layers_counts_too():
    config = ModelConfig(d_model=16, layout="tpe gla", options={"gla": {"num_heads": 2}, "tpe": {"num_modes": 4}})
    assert state_size(config) == 2 * 8 * 8 + 16 * 4
    with pytest.raises(ConfigError, match="tpe.* 64"):
        check_state(config, total=128)


@pytest.mark.parametrize(
    "layout, changed",
    [
        ("hgrn2+sglu x2", ("hgrn2", "num_heads", 8)),
        ("tnl+sglu attention+sglu", ("tnl", "num_heads", 8)),
        ("cosformer2+sglu x2", ("cosformer2", "num_heads", 16)),
        ("gla x4", ("gla", "expand_k", 0.5)),
        ("gla+swiglu x4", ("gla", "expand_k", 0.5)),
        ("mamba+swiglu x2", ("mamba", "state", 8)),
    ],
)
def test_other_layouts_are_normalised_by_one_option(layout, changed):
    config = normalise(mad_model(layout))
    mixer, key, value = changed
    assert config.options[mixer][key] == value
    assert state_size(config) == (4096 if "attention" not in layout else 2048)


LATER = ("delta_net", "gdn", "kda", "gdn2", "gated_delta_product", "retnet", "rwkv7")


@pytest.mark.parametrize("layout", [*(f"{name}+swiglu x2" for name in LATER), "mamba2 x4", "mamba3 x4"])
def test_later_mixers_have_a_shape_of_4096_from_the_start(layout):
    config = mad_model(layout)
    assert state_size(config) == target_size(config) == 4096
    assert normalise(config) is config


def test_the_state_goes_before_the_expansion_and_the_heads_last():
    config = mad_model("mamba x2")  # 2,048 a layer are asked for
    assert normalise(config).options["mamba"] == {**config.options["mamba"], "state": 8}


def test_what_cannot_be_normalised_says_what_can_be_changed():
    with pytest.raises(ConfigError, match="d_model") as error:
        normalise(mad_model("hgrn+swiglu x2"))
    assert re.search("hgrn: .*128 .*2,048", str(error.value))
    with pytest.raises(ConfigError, match=r"lightnet: .* num_heads=16 .*2,176"):
        normalise(mad_model("lightnet+swiglu x2"))
    with pytest.raises(ConfigError, match="4,096.* 1,000") as error:
        normalise(mad_model("gla+swiglu hgrn2+swiglu"), total=1000)
    assert len(error.value.problems) == 2


def test_a_state_that_no_layer_can_have_names_one_that_fits():
    with pytest.raises(ConfigError, match="1,365.3") as error:
        normalise(mad_model("gla+swiglu x3"))
    assert "6,144" in str(error.value)
    assert state_size(normalise(mad_model("gla+swiglu x3"), total=6144)) == 6144
    with pytest.raises(ConfigError, match=" 256"):
        normalise(mad_model("hgrn+swiglu x2"))
    assert state_size(normalise(mad_model("hgrn+swiglu x2"), total=256)) == 256
