"""Llama as transformers saves it (Touvron et al. 2023, arXiv:2302.13971), with grouped queries and scaled RoPE."""

from linnet.config import parse
from linnet.hf.layouts.base import BLOCK, GLU, LARGEST, Plan, Settings, ends, stack
from linnet.models import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.{}"
NAMES = {
    "mixer_norm.weight": "input_layernorm.weight",
    "mixer.q_proj.weight": "self_attn.q_proj.weight",
    "mixer.k_proj.weight": "self_attn.k_proj.weight",
    "mixer.v_proj.weight": "self_attn.v_proj.weight",
    "mixer.out_proj.weight": "self_attn.o_proj.weight",
    "channel_norm.weight": "post_attention_layernorm.weight",
    **GLU,
}


def read(settings: Settings) -> Plan:
    width, layers = settings.integer("hidden_size", 4096), settings.integer("num_hidden_layers", 32, LARGEST["layers"])
    heads = settings.integer("num_attention_heads", 32)
    attention = {
        "num_heads": heads,
        "num_kv_heads": settings.integer("num_key_value_heads", heads),
        **_rope(settings),
    }
    glu = {"inner": settings.integer("intermediate_size", 11008)}
    vocabulary = settings.integer("vocab_size", 32000, LARGEST["vocabulary"])
    eps = settings.number("rms_norm_eps", 1e-6)
    settings.only("hidden_act", "silu", "swish", why="Linnet's swiglu gates with SiLU")
    settings.only("attention_bias", False, why="Linnet's attention has no biases")
    settings.only("mlp_bias", False, why="Linnet's swiglu has no biases")
    settings.only("head_dim", width // heads, why="Linnet's heads divide the model's width equally")
    settings.check()
    model = parse(
        ModelConfig,
        {
            "d_model": width,
            "layout": f"attention+swiglu x{layers}",
            "vocab_size": vocabulary,
            "options": {"attention": attention, "swiglu": glu},
            "norm": "rmsnorm",
            "norm_eps": eps,
            "tie_embeddings": settings.tied,
        },
        "config.json",
    )
    parts = ends(settings, EMBEDDING, "model.norm.weight") | stack(range(layers), BLOCK, LAYER, NAMES)
    return Plan(model, parts, (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",))


def _rope(settings: Settings) -> dict:
    """Returns RoPE's options, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = settings.values.get("rope_parameters") or settings.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        settings.problems.append(f"rope_parameters: must be an object (given {given!r})")
        return {}
    rope = Settings({"rope_theta": settings.values.get("rope_theta"), **given})
    base, kind = rope.number("rope_theta", 10000.0), given.get("rope_type", given.get("type", "default"))
    scaling = None
    if kind == "linear":
        scaling = {"kind": "linear", "factor": rope.number("factor", None)}
    elif kind == "llama3":
        scaling = {
            "kind": "llama3",
            "factor": rope.number("factor", None),
            "low": rope.number("low_freq_factor", None),
            "high": rope.number("high_freq_factor", None),
            "length": rope.integer("original_max_position_embeddings", None),
        }
    elif kind != "default":
        rope.problems.append(f"rope_type: Linnet does not have {kind!r}; it has default, linear and llama3")
    settings.problems += [f"rope_parameters.{problem}" for problem in rope.problems]
    return {"rope_base": base, "rope_scaling": scaling}
