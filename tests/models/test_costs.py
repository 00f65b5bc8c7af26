"""Table 7 of paper 000 from the layers themselves, and FLOPs against counts of the whole model."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linnet.models import (
    CausalLM,
    ModelConfig,
    active_parameters,
    attention_share,
    count_parameters,
    family,
    flops_004,
    flops_causal,
    flops_exact,
    flops_paper,
    get_recipe,
    state_bytes,
    state_numbers,
)
from linnet.models.costs import PAPER_BATCH, PAPER_SEQ_LEN, model_flops
from linnet.models.recipes.linear import tnl
from linnet.models.synthetic import AutoEncoder, RecallLM

SIZES = ("70m", "160m", "410m", "1b", "3b", "7b")
PARAMETERS = {  # millions, without embeddings
    "llama": (20.5, 85.0, 334.1, 906.2, 2775.8, 6476.5),
    "tnl": (21.2, 87.3, 327.7, 918.6, 2798.4, 6509.6),
    "hgrn2": (20.5, 84.9, 334.0, 906.0, 2775.5, 6476.1),
    "cosformer2": (21.3, 87.5, 328.0, 919.1, 2799.0, 6511.0),
}
PFLOPS_PER_STEP = {
    "llama": (1.6, 5.6, 18.0, 40.4, 99.6, 202.7),
    "tnl": (0.5, 2.2, 7.9, 22.3, 66.6, 154.4),
    "hgrn2": (0.5, 2.1, 8.0, 22.0, 66.0, 153.6),
    "cosformer2": (0.5, 2.3, 8.1, 22.7, 67.4, 155.6),
}
ROWS = [(name, size) for name in PARAMETERS for size in SIZES]


def pflops_per_step(config: ModelConfig) -> float:
    return PAPER_BATCH * flops_paper(config, PAPER_SEQ_LEN) / 1e15


@pytest.mark.parametrize("name, size", ROWS)
def test_table_7(name, size):
    config, column = get_recipe(f"{name}-{size}"), SIZES.index(size)
    assert round(pflops_per_step(config), 1) == PFLOPS_PER_STEP[name][column]
    millions = count_parameters(config)[1] / 1e6
    assert abs(millions / PARAMETERS[name][column] - 1) <= 0.0025
    if name in ("tnl", "hgrn2"):
        assert round(millions, 1) == PARAMETERS[name][column]


def test_the_1b_rows_as_printed_do_not_give_their_own_columns():
    """Erratum: Table 7 prints h = 16 and g = 5632 beside 1536 x 32, but counts with h = 12 and g = 4096."""
    listed_heads, listed_glu = tnl(1536, 32, 16, 4096, 100_280), tnl(1536, 32, 12, 5632, 100_280)
    assert round(pflops_per_step(listed_heads), 1) != 22.3
    assert abs(count_parameters(listed_glu)[1] / 918.6e6 - 1) > 0.2


def test_the_heads_of_table_2_contradict_its_head_width():
    """Erratum: 8 heads of 128 do not fit a width of 512 (70M) or 768 (160M), nor 16 a width of 1536 (1B)."""
    for size, listed in (("70m", 8), ("160m", 8), ("1b", 16)):
        config = get_recipe(f"tnl-{size}")
        assert listed * 128 != config.d_model
        assert config.shown_option("num_heads") * 128 == config.d_model


def test_the_paper_s_norms_for_llama_are_an_option():
    config = get_recipe("llama-7b").model_copy(update={"norm": "layernorm"})
    assert round(count_parameters(config)[1] / 1e6, 1) == 6476.5


NAMES = ["llama", "tnl", "hgrn2", "cosformer2", "lightnet", "hgrn", "gla", "tnl1", "lru", "rwkv4", "s4d", "tnn"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_exact_flops_are_those_of_the_whole_model(name, training):
    config = family(name)(64, 3, vocab_size=128)
    with torch.device("meta"):
        model, tokens = CausalLM(config), torch.zeros(1, 200, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(training):
        total, _ = model.loss(tokens, tokens)
        if training:
            total.backward()
    assert counter.get_total_flops() == flops_exact(config, 200, training=training)
    assert flops_exact(config, 200, batch=3, training=training) == 3 * flops_exact(config, 200, training=training)


def test_exact_flops_of_a_projection_by_hand():
    config = ModelConfig(d_model=16, layout="sglu x2", options={"sglu": {"inner": 24}}, vocab_size=10)
    assert flops_exact(config, 7) == 6 * 7 * (2 * 3 * 16 * 24 + 16 * 10)


def test_attention_costs_grow_with_the_square_and_linear_layers_do_not():
    softmax, linear = family("llama")(64, 2), family("tnl")(64, 2)
    assert flops_exact(linear, 4096) / flops_exact(linear, 1024) == pytest.approx(4, rel=1e-6)
    assert flops_exact(softmax, 4096) / flops_exact(softmax, 1024) > 6


def test_state_bytes_follow_from_the_layers():
    linear, softmax = tnl(64, 3, num_heads=2), family("llama")(64, 3, num_heads=2)
    assert state_bytes(linear, 1000) == state_bytes(linear, 10) == 3 * 2 * 32 * 32 * 4
    assert state_bytes(softmax, 1000) == 3 * (1000 * (2 * 64 * 2 + 8) + 8)  # bf16 keys and values, positions


def test_each_head_says_what_it_costs():
    """Causal: every position; recall: those that are asked; auto-encoder: one per position. The backbone is shared."""
    config = family("tnl")(32, 2, num_heads=2, vocab_size=64)
    with torch.device("meta"):
        models = [CausalLM(config), RecallLM(config, 3), AutoEncoder(config, 24)]
    product = 6.0 * config.d_model * config.vocab_size  # forward and backward of one token's logits
    backbone = flops_exact(config, 24) - 24 * product
    assert [model_flops(model, 24) - backbone for model in models] == [24 * product, 3 * product, 24 * product]
    other = config.model_copy(update={"vocab_size": 640, "tie_embeddings": False})
    assert flops_exact(other, 24) - backbone == 240 * product
    for model in models:
        with torch.device("meta"):
            tokens = torch.zeros(1, 24, dtype=torch.int64)
        counter = FlopCounterMode(display=False)
        with counter:
            total, _ = model.loss(tokens, tokens)
            total.backward()
        hidden = 6.0 * 24 * config.d_model**2 if isinstance(model, AutoEncoder) else 0.0
        own = 3.0 * sum(p.flops(24) for b in model.backbone.blocks for p in (b.mixer, b.channel))
        assert counter.get_total_flops() + own == model_flops(model, 24) + hidden


def test_causal_flops_leave_out_hidden_pairs_of_softmax_attention_alone():
    one = ModelConfig(d_model=32, layout="attention+swiglu x2", vocab_size=256, options={"attention": {"num_heads": 2}})
    T = 96
    hidden = T * T - T * (T + 1) / 2
    assert flops_exact(one, T) - flops_causal(one, T) == 3 * 2 * 4 * 32 * hidden  # 2 layers, forward and backward
    wide = one.model_copy(update={"options": {"attention": {"num_heads": 2, "head_dim": 40}}})
    assert flops_exact(wide, T) - flops_causal(wide, T) == 3 * 2 * 4 * 80 * hidden
    assert flops_causal(get_recipe("tnl-70m"), T) == flops_exact(get_recipe("tnl-70m"), T)


def test_flops_by_the_formulas_of_paper_004():
    """C.4: sums over mixers, channel mixers and 4LDV, forward; times three for training."""
    L, D, V, H, g, S = 512, 64, 500, 4, 96, 16
    attention = 6 * L * D**2 + 4 * L**2 * D + 2 * H * L**2 + 2 * L * D**2
    glu, vocabulary = 6 * L * D * g, 4 * L * D * V
    hyena = 6 * L * D**2 + 18 * L * D + S * L * D + 10 * L * 9 * D + 4 * L * D + 2 * L * D**2
    heads = 6 * L * D**2 + 18 * L * D + S * L * 8 + (10 * L * 9 + 4 * L) * D**2 / 8 + 2 * L * D**2
    E, N, R = 2, 16, 4
    mamba = L * (4 * D**2 * E + 6 * D * E + 2 * D * E * (R + 2 * N) + 2 * D * E * R + 2 * D * E * N + 2 * D**2 * E)
    A, G, W = 8, 2, 48
    moe = L * (D * A + 4 * D * W * A + 2 * D * W * G)
    options = {
        "attention": {"num_heads": H}, "swiglu": {"inner": g}, "moe": {"inner": W, "num_experts": A, "num_active": G},
        "hyena": {"num_modes": S}, "mh_hyena": {"num_modes": S, "num_heads": 8}, "mamba": {"state": N, "dt_rank": R},
    }  # fmt: skip
    counted = {
        "(attention+swiglu) x3": 3 * (attention + glu),
        "hyena+swiglu attention+swiglu": hyena + attention + 2 * glu,
        "mh_hyena+moe attention+swiglu": heads + moe + attention + glu,
        "mamba mamba attention+swiglu": 2 * mamba + attention + glu,
    }
    for layout, forward in counted.items():
        chosen = {name: values for name, values in options.items() if name in re.split(r"[ +()]", layout)}
        for tied in (False, True):
            config = ModelConfig(d_model=D, layout=layout, vocab_size=V, options=chosen, tie_embeddings=tied)
            assert flops_004(config, L) == pytest.approx(3 * (forward + vocabulary), rel=1e-12)


def test_causal_flops_of_a_window_count_the_pairs_in_it():
    options = {"attention": {"num_heads": 2, "window": 16}}
    one = ModelConfig(d_model=32, layout="attention x1", vocab_size=256, options=options)
    T, visible = 512, 512 * 16 - 16 * 15 / 2
    projections = flops_exact(one.model_copy(update={"layout": "attention x1"}), 1, training=False) - 2 * 32 * 256
    bare = flops_causal(one, T, training=False) - 4 * 32 * visible - T * 2 * 32 * 256
    assert bare == pytest.approx(T * (projections - 4 * 32), rel=1e-12)  # one token sees one pair


def test_state_numbers_by_hand():
    layout, heads = "attention+swiglu hgrn2+swiglu x2", {"num_heads": 4}
    options = {"attention": heads | {"num_kv_heads": 2}, "hgrn2": heads}
    hybrid = ModelConfig(d_model=32, layout=layout, vocab_size=256, options=options)
    assert state_numbers(hybrid, 100) == (2 * 32 * 8, 1 * 2 * 16 * 100)
    assert attention_share(hybrid) == pytest.approx(1 / 3)
    options["attention"]["window"] = 10  # the cache no longer grows with the context
    windowed = ModelConfig(d_model=32, layout=layout, vocab_size=256, options=options)
    assert state_numbers(windowed, 100) == (2 * 32 * 8 + 2 * 16 * 10, 0)


def test_state_numbers_of_mixers_side_by_side():
    """The caches of a layer are told apart: inputs of a short convolution do not count, a window is fixed."""
    mixers = {
        "gdn": {"num_heads": 2, "head_dim": 6},
        "attention": {"num_heads": 2},
        "mla": {"num_heads": 2, "kv_rank": 8},
    }
    options = {"parallel": {"mixers": mixers}}
    together = ModelConfig(d_model=16, layout="parallel+swiglu x2", vocab_size=256, options=options)
    alone = ModelConfig(d_model=16, layout="gdn+swiglu x2", vocab_size=256, options={"gdn": mixers["gdn"]})
    fixed, growing = state_numbers(alone, 64)
    assert growing == 0
    assert state_numbers(together, 64) == (fixed, 2 * (2 * 16 + 8 + 64) * 64)
    mixers["attention"]["window"] = 10
    windowed = ModelConfig(d_model=16, layout="parallel+swiglu x2", vocab_size=256, options=options)
    assert state_numbers(windowed, 64) == (fixed + 2 * 2 * 16 * 10, 2 * (8 + 64) * 64)


def test_active_parameters_leave_out_experts_that_a_token_does_not_use():
    options = {"attention": {"num_heads": 2}, "moe": {"num_experts": 8, "num_active": 2, "inner": 16}}
    sparse = ModelConfig(d_model=32, layout="attention+moe x2", vocab_size=256, options=options)
    assert count_parameters(sparse)[1] - active_parameters(sparse) == 2 * 6 * 3 * 32 * 16
    dense = get_recipe("llama-70m")
    assert active_parameters(dense) == count_parameters(dense)[1]
