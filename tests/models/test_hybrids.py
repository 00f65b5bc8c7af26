"""Hybrids: published parameter counts, and logits of transformers' models from the same weights."""

import math

import pytest
import torch

from linnet.config import parse
from linnet.models import ModelConfig, build_model, count_parameters, family, get_recipe
from linnet.models.recipes.baselines import qwen3_5

SIZES = {"qwen3.5-0.8b": 752_393_024, "qwen3.5-27b": 26_895_998_464}
SIZES |= {"lfm2-350m": 354_483_968, "lfm2-700m": 742_489_344, "lfm2-1.2b": 1_170_340_608}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_the_published_ones(name):
    assert count_parameters(get_recipe(name))[0] == SIZES[name]


def test_layers_of_hybrids():
    mixers = [spec.mixer for spec in get_recipe("lfm2-350m").blocks]
    assert [index for index, name in enumerate(mixers) if name == "attention"] == [2, 5, 8, 10, 12, 14]
    for name, every in (("gdn_hybrid", 4), ("lfm2", 3)):
        for layers in (1, 2, 7, 8, 9):
            mixers = [spec.mixer for spec in family(name)(64, layers).blocks]
            places = [index for index, mixer in enumerate(mixers) if mixer == "attention"]
            assert len(mixers) == layers and places == (list(range(every - 1, layers, every)) or [layers - 1])
    assert [spec.mixer for spec in qwen3_5(64, 8, (2, 1), 16, 96, True).blocks].count("attention") == 2


SHAPE = {"hidden_size": 32, "vocab_size": 97, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 48, "initializer_range": 0.2, "tie_word_embeddings": True, "pad_token_id": None}
HEADS = {"num_heads": 4, "num_kv_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
WINDOW = {"layer": "attention+swiglu", "options": {"attention": {"window": 7}}}
GDN = {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.0, "norm_eps": 1e-6}
GATED = {"head_dim": 16, "rope_fraction": 0.25, "gate": "channel"}
GATED |= {"qk_norm": True, "qk_norm_kind": "zero_centred_rmsnorm"}

# name -> (transformers' configuration class and its keys, the keys of Linnet's model)
CASES = {
    "lfm2": (
        ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False})
        + ({"conv_bias": True, "rope_parameters": ROPE, "norm_eps": 1e-5},),
        {"layout": "short_conv+swiglu attention+swiglu short_conv+swiglu", "norm_eps": 1e-5}
        | {"options": {"short_conv": {"bias": True}, "attention": HEADS | {"qk_norm": True}}},
    ),
    "qwen3.5": (
        ("Qwen3_5TextConfig", {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4})
        + ({"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4},)
        + ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}},),
        {"layout": "gdn+swiglu x3 attention+swiglu", "norm": "zero_centred_rmsnorm"}
        | {"options": {"gdn": GDN, "attention": HEADS | GATED}},
    ),
    "granite": (
        ("GraniteConfig", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05})
        + ({"logits_scaling": 8.0, "rms_norm_eps": 1e-6, "rope_parameters": ROPE},),
        {"layout": "attention+swiglu x3", "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.125}
        | {"options": {"attention": HEADS | {"scale": 0.05}}},
    ),
    "olmo3": (
        ("Olmo3Config", {"sliding_window": 7, "rms_norm_eps": 1e-6})
        + ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},),
        {"layout": "W attention+swiglu W", "aliases": {"W": WINDOW}, "norm_after": ["attention"]}
        | {"options": {"attention": HEADS | {"qk_norm": True, "qk_norm_over": "width", "rope_base": 5e5}}},
    ),
}
MLA = {"kv_rank": 12, "nope_dim": 8, "rope_dim": 6, "v_dim": 10}
LATENTS = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10, "rope_interleave": False}
LATENTS |= {"first_k_dense_replace": 3, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "num_attention_heads": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 4.0}
SCALING = {"kind": "yarn", "factor": 4.0, "length": 16, "high": 4.0, "attention_factor": 1.0}
ENLARGED = 14**-0.5 * (0.1 * math.log(4.0) + 1.0) ** 2  # as DeepSeek has it with mscale_all_dim
CASES |= {
    "deepseek": (
        ("DeepseekV3Config", LATENTS | {"q_lora_rank": 9, "attention_bias": True, "rope_parameters": ROPE}),
        {"layout": "mla+swiglu x3", "options": {"mla": MLA | {"num_heads": 4, "q_rank": 9, "bias": True}}},
    ),
    "deepseek-yarn": (
        ("DeepseekV3Config", LATENTS | {"q_lora_rank": None, "rope_parameters": YARN}),
        {"layout": "mla+swiglu x3"}
        | {"options": {"mla": MLA | {"num_heads": 4, "rope_scaling": SCALING, "scale": ENLARGED}}},
    ),
}
LATENT = {"kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up"}
LATENT |= {"q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_proj"}
NORMS = {
    "lfm2": ("operator_norm", "ffn_norm"),
    "olmo3": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


def parts(weights, name, mixer):
    """The tensors of a layer of transformers' under Linnet's names."""
    mixer_norm, channel_norm = NORMS.get(name, ("input_layernorm", "post_attention_layernorm"))
    yield "mixer_norm.weight", weights[f"{mixer_norm}.weight"]
    yield "channel_norm.weight", weights[f"{channel_norm}.weight"]
    for own, its in zip(("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), strict=True):
        place = f"feed_forward.{its}" if name == "lfm2" else f"mlp.{own}"
        yield f"channel.{own}.weight", weights[f"{place}.weight"]
    if mixer == "attention":
        found = {key.removeprefix("self_attn."): x for key, x in weights.items() if key.startswith("self_attn.")}
        if name == "qwen3.5":
            q, gate = found["q_proj.weight"].view(4, 2, 16, 32).transpose(0, 1).flatten(1, 2)
            found |= {"q_proj.weight": q, "gate_proj.weight": gate}
        for key, x in found.items():
            yield f"mixer.{key.replace('layernorm', 'norm').replace('o_proj', 'out_proj')}", x
    elif mixer == "mla":
        found = {key.removeprefix("self_attn."): x for key, x in weights.items() if key.startswith("self_attn.")}
        for key, x in found.items():
            layer, kind = key.split(".")
            yield f"mixer.{LATENT.get(layer, layer).replace('o_proj', 'out_proj')}.{kind}", x
    elif mixer == "short_conv":
        for kind in ("weight", "bias"):
            yield from zip(
                (f"mixer.{one}_proj.{kind}" for one in ("write", "read", "in")),
                weights[f"conv.in_proj.{kind}"].chunk(3),
                strict=True,
            )
            yield f"mixer.out_proj.{kind}", weights[f"conv.out_proj.{kind}"]
            x = weights[f"conv.conv.{kind}"]
            yield f"mixer.conv.{kind}", x.squeeze(1) if kind == "weight" else x
    else:
        linear = {key.removeprefix("linear_attn."): x for key, x in weights.items() if key.startswith("linear_attn.")}
        for kind, joined in (("proj", linear["in_proj_qkv.weight"]), ("conv", linear["conv1d.weight"].squeeze(1))):
            yield from zip((f"mixer.{one}_{kind}.weight" for one in "qkv"), joined.split([16, 16, 32]), strict=True)
        for own, its in (("gate_proj", "in_proj_z"), ("beta_proj", "in_proj_b"), ("decay_proj", "in_proj_a")):
            yield f"mixer.{own}.weight", linear[f"{its}.weight"]
        for key in ("A_log", "dt_bias", "norm.weight", "out_proj.weight"):
            yield f"mixer.{key}", linear[key]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    (kind, *keys), own = CASES[name]
    settings = SHAPE | {"num_hidden_layers": 3}
    for more in keys:
        settings |= more
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # so that gains and biases show
            parameter.add_(0.1 * torch.randn_like(parameter))
    own["options"] = own["options"] | {"swiglu": {"inner": 48}}
    model = build_model(parse(ModelConfig, {"d_model": 32, "vocab_size": 97} | own))
    weights = theirs.state_dict()
    last = "embedding_norm" if name == "lfm2" else "norm"
    found = {"embedding.weight": weights["model.embed_tokens.weight"]}
    found["backbone.norm.weight"] = weights[f"model.{last}.weight"]
    for index, spec in enumerate(model.config.blocks):
        place = f"model.layers.{index}."
        layer = {key.removeprefix(place): x for key, x in weights.items() if key.startswith(place)}
        found |= {f"backbone.blocks.{index}.{key}": x for key, x in parts(layer, name, spec.mixer)}
    model.load_state_dict(found)
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs(tokens).logits, model(tokens)[0]
        states = model.init_state(2, 40)
        for place in range(40):
            stepped, states = model.step(tokens[:, place], states)
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (stepped - expected[:, -1]).abs().max() < 1e-4 * expected.abs().max()
