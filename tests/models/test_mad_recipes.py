"""The 21 architectures of MAD: their layouts, and parameters against the published implementation where forms agree."""

import pytest

from linnet.models import ModelConfig, count_parameters, get_recipe
from linnet.models.recipes.mad import ARCHITECTURES, OPTIONS, fit_length, mad_model

# Parameters of one layer of the published implementation (width 128), and what it has besides ours.
PUBLISHED_LAYERS = {
    "gla": (86_160, 0),
    "attention": (66_048, 4 * 128),  # biases; the paper: none
    "mamba": (107_264, 256),  # the bias of its convolution; the paper: none
}
# Of another form there (filters of a network, tied projections): three projections of 16,640 weights and biases with
# short convolutions of 384, their output, and filters of 4 numbers a mode and a skip.
HYENA = {
    "hyena": 3 * (16_640 + 384) + 16_512 + 128 * (4 * 16 + 1),
    "mh_hyena": 3 * (16_640 + 384) + 16_512 + 16 * (4 * 2 + 1),
    "hyena_experts": 3 * (16_640 + 384) + 2_176 + 1_024 + 128 * (4 * 16 + 1),
}
PUBLISHED_MODELS = {
    "mad-gla-swiglu": 447_408,
    "mad-attention-swiglu": 407_184,
    "mad-mamba": 433_808,
    "mad-gla-attention-swiglu": 427_296,
    "mad-mamba-attention-swiglu": 420_496,
}
HEAD_BIAS = 16


def test_there_are_21():
    assert len(ARCHITECTURES) == len(set(ARCHITECTURES.values())) == 21
    assert sum(" attention+" in layout for layout in ARCHITECTURES.values()) == 10
    assert ARCHITECTURES["mad-hyena-swiglu"] == "hyena+swiglu x2"
    assert ARCHITECTURES["mad-mh-hyena-attention-moe"] == "mh_hyena+moe attention+moe"
    assert ARCHITECTURES["mad-mamba-attention-moe"] == "mamba x2 attention+moe"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_four_layers_of_width_128(name):
    config = get_recipe(name)
    assert (config.d_model, config.vocab_size, config.tie_embeddings) == (128, 16, False)
    assert sum(part is not None for block in config.blocks for part in block) == 4


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_parameters_are_the_published_ones_where_forms_agree(name):
    narrow = mad_model(name)
    options = {**narrow.options, **({"swiglu": {"inner": 352}} if "swiglu" in narrow.options else {})}
    total, _ = count_parameters(ModelConfig(**{**narrow.model_dump(), "options": options}))
    besides = sum(PUBLISHED_LAYERS[block.mixer][1] for block in narrow.blocks)
    assert total == PUBLISHED_MODELS[name] - HEAD_BIAS - besides


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_add_up_from_the_layers(name):
    """And 2 x 16 x 128 of embedding and head, a norm a layer and one more; SwiGLU is 3 x 128 x 512."""
    config = get_recipe(name)
    layers = {"swiglu": 196_608, "moe": 50_176} | {mixer: a - b for mixer, (a, b) in PUBLISHED_LAYERS.items()}
    parts = sum((layers | HYENA)[part] for block in config.blocks for part in block if part)
    norms = 128 * (1 + sum(part is not None for block in config.blocks for part in block))
    assert count_parameters(config)[0] == parts + 4096 + norms


def test_filters_start_as_long_as_the_sequences():
    config = fit_length(mad_model("mad-gla-moe"), 256)
    assert config == mad_model("mad-gla-moe")
    config = mad_model("hyena+moe gla+moe")
    assert fit_length(config, 256).options["hyena"] == {**config.options["hyena"], "max_time_constant": 256}
    own = ModelConfig(**{**config.model_dump(), "options": {"hyena": {"max_time_constant": 9}}})
    assert fit_length(own, 256) is own
    weighted = mad_model("cosformer+swiglu x2")
    assert fit_length(weighted, 256).options["cosformer"]["max_length"] == 256


def test_any_layout_gets_the_paper_s_options_for_what_it_names():
    config = mad_model("(gla+moe A) x2", 32, {"A": "attention"})
    assert config.vocab_size == 32 and config.num_layers == 4
    assert config.options["gla"]["num_heads"] == OPTIONS["gla"]["num_heads"] == 8
    assert OPTIONS["moe"].items() <= config.options["moe"].items()
    assert mad_model("tnl+sglu").options["sglu"] == {"inner": 0}
    with pytest.raises(ValueError, match="'gla'"):
        mad_model("glaa+moe")


# Parameters of the published implementation at 16 ids and 128 tokens (mad-lab, commit 0f49a45).
MAD_LAB_MODELS = {
    "mad-hyena-swiglu": 523_784,
    "mad-hyena-moe": 583_448,
    "mad-mh-hyena-swiglu": 336_812,
    "mad-mh-hyena-moe": 396_476,
    "mad-hyena-experts-swiglu": 390_016,
    "mad-hyena-experts-moe": 449_680,
    "mad-gla-swiglu": 447_408,
    "mad-gla-moe": 507_072,
    "mad-attention-swiglu": 407_184,
    "mad-attention-moe": 466_848,
    "mad-mamba": 433_808,
    "mad-hyena-attention-swiglu": 465_484,
    "mad-hyena-attention-moe": 525_148,
    "mad-mh-hyena-attention-swiglu": 371_998,
    "mad-mh-hyena-attention-moe": 431_662,
    "mad-hyena-experts-attention-swiglu": 398_600,
    "mad-hyena-experts-attention-moe": 458_264,
    "mad-gla-attention-swiglu": 427_296,
    "mad-gla-attention-moe": 486_960,
    "mad-mamba-attention-swiglu": 420_496,
    "mad-mamba-attention-moe": 450_328,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_layers_of_the_published_implementation_have_its_parameters(name):
    assert len(MAD_LAB_MODELS) == 21
    config = mad_model(name, layers="mad-lab")
    assert count_parameters(config)[0] == MAD_LAB_MODELS[name]
    assert config.head_bias and config.norm_eps == 1e-5
    # Filters depend on the length: 3 numbers for each position of each layer.
    long = [block.mixer for block in config.blocks if block.mixer in HYENA]
    assert count_parameters(fit_length(config, 255, 256))[0] == MAD_LAB_MODELS[name] + 3 * 128 * len(long)
