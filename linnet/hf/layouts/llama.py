"""Llama and its near relatives as transformers saves them: Mistral, Qwen2 and Qwen3.

All are pre-norm stacks of softmax attention with grouped queries and RoPE, and SwiGLU (Touvron et al. 2023,
arXiv:2302.13971). Mistral (arXiv:2310.06825) adds a sliding window, Qwen2 (arXiv:2407.10671) biases of q, k and v, and
Qwen3 (arXiv:2505.09388) norms of q and k and heads of a width of their own. Both Qwens may have windows in some layers.
"""

import math
from collections.abc import Mapping
from typing import Any

from linnet.config import ConfigError, parse, refuse
from linnet.hf.layouts.base import BLOCK, GLU, LARGEST, Plan, Settings, ends, stack
from linnet.layers.channels.glu import default_inner
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
BIASES = {
    "none": {},
    "qkv": {f"mixer.{name}.bias": f"self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")},
}
BIASES["all"] = {
    **BIASES["qkv"],
    "mixer.out_proj.bias": "self_attn.o_proj.bias",
    **{f"channel.{name}.bias": f"mlp.{name}.bias" for name in ("gate_proj", "up_proj", "down_proj")},
}
QWEN = {"inner": 22016, "kv_heads": 32, "vocabulary": 151936}  # defaults of both
ROTATIONS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
ROPE_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
YARN_KEYS = ("beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim", "truncate")
QK_NORMS = {f"mixer.{name}.weight": f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")}


def read(settings: Settings) -> Plan:
    attention, mlp = settings.flag("attention_bias", False), settings.flag("mlp_bias", False)
    if attention != mlp:
        settings.problems.append(
            f"attention_bias: {attention} with mlp_bias {mlp} cannot be converted; Linnet's `bias: all` is both, and "
            "`bias: none` neither"
        )
    return _plan(settings, inner=11008, bias="all" if attention and mlp else "none")


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a Llama from the configuration of a Linnet model; `read` gives that model back.

    Raises:
        ConfigError: names all settings that a Llama does not have.
    """
    kinds = {spec.names for spec in config.blocks}
    if config.stack.before or kinds != {("attention", "swiglu")}:
        problem = f"layout: {config.layout!r} is not attention+swiglu alone; export it with --to hf"
        raise ConfigError([problem], "export as Llama")
    attention, swiglu = config.options["attention"], config.options["swiglu"]
    heads, width = attention["num_heads"], config.d_model
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": attention["num_kv_heads"] or heads,
        "head_dim": attention["head_dim"] or width // heads,
        "intermediate_size": swiglu["inner"] or default_inner(width),
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps or 1e-6,
        "hidden_act": "silu",
        "attention_bias": config.bias == "all",
        "mlp_bias": config.bias == "all",
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        **write_rope(attention),
    }
    again = read(Settings(values, config.tie_embeddings)).model
    problems = [
        f"{key}: {its!r} is not what a Llama does, which is {own!r}; export with --to hf"
        for key, its, own in _differences(config, again)
    ]
    refuse(problems, "export as Llama")
    return values


def _differences(config: ModelConfig, llama: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Returns the keys, with both values, in which a model of attention+swiglu differs from a Llama of its shape."""
    found = {}
    for spec in config.blocks:
        for name in ("attention", "swiglu"):
            its = config.layer_options(name, spec).model_dump()
            own = llama.layer_options(name).model_dump()
            resolved = ("num_kv_heads", "head_dim", "inner")  # 0 is a default of the shape
            found |= {
                f"options.{name}.{key}": (value, own.get(key, "its default"))
                for key, value in its.items()
                if value != own.get(key) and not (key in resolved and not value)
            }
    keys = ("norm", "norm_after", "residual_scale", "bias", "positions")
    keys += ("embedding_scale", "embedding_norm", "logit_scale", "head_bias", "parametrisation")
    for key in keys:
        if getattr(config, key) != getattr(llama, key):
            found[key] = (getattr(config, key), getattr(llama, key))
    return [(key, its, own) for key, (its, own) in found.items()]


def read_mistral(settings: Settings) -> Plan:
    window = settings.values.get("sliding_window", 4096)  # null means none; a missing key, the default of transformers
    layers = settings.integer("num_hidden_layers", 32, LARGEST["layers"])
    return _plan(settings, inner=14336, kv_heads=8, windows=_windows(settings, layers, window, first=0))


def read_qwen2(settings: Settings) -> Plan:
    return _plan(settings, windows=_late_windows(settings), bias="qkv", **QWEN)


def read_qwen3(settings: Settings) -> Plan:
    settings.only("attention_bias", False, why="Linnet has no biases in attention alone, its output included")
    return _plan(settings, windows=_late_windows(settings), extra={"qk_norm": True}, head_dim=128, **QWEN)


def _plan(
    settings: Settings,
    inner: int,
    kv_heads: int | None = None,
    windows: list[int] | None = None,
    bias: str = "none",
    extra: Mapping[str, Any] | None = None,
    head_dim: int | None = None,
    vocabulary: int = 32000,
) -> Plan:
    """Returns the plan of a model.

    Args:
        inner, kv_heads, head_dim, vocabulary: defaults of transformers for this kind of model; None for `kv_heads` is
            the number of heads, and for `head_dim` its share of the width.
        windows: tokens that each layer sees, 0 for all; None for no windows.
        bias: Linnet's key `bias`.
        extra: further options of attention.
    """
    width, layers = settings.integer("hidden_size", 4096), settings.integer("num_hidden_layers", 32, LARGEST["layers"])
    heads = settings.integer("num_attention_heads", 32)
    if "num_key_value_heads" in settings.values:  # null means the number of heads, for every kind
        kv_heads = None
    own = settings.integer("head_dim", head_dim or max(1, width // heads))
    attention = {
        "num_heads": heads,
        "num_kv_heads": settings.integer("num_key_value_heads", kv_heads or heads),
        "head_dim": 0 if own * heads == width else own,
        **read_rope(settings),
        **(extra or {}),
    }
    glu = {"inner": settings.integer("intermediate_size", inner)}
    vocabulary = settings.integer("vocab_size", vocabulary, LARGEST["vocabulary"])
    eps = settings.number("rms_norm_eps", 1e-6)
    settings.only("hidden_act", "silu", "swish", why="Linnet's swiglu gates with SiLU")
    settings.check()
    windows = windows or [0] * layers
    layout, aliases = f"attention+swiglu x{layers}", {}
    if len(set(windows)) == 1:
        attention["window"] = windows[0]
    else:  # a window in some layers
        near = {"layer": "attention+swiglu", "options": {"attention": {"window": max(windows)}}}
        aliases = {"near": near, "far": "attention+swiglu"}
        layout = " ".join("near" if window else "far" for window in windows)
    model = parse(
        ModelConfig,
        {
            "d_model": width,
            "layout": layout,
            "aliases": aliases,
            "vocab_size": vocabulary,
            "options": {"attention": attention, "swiglu": glu},
            "norm": "rmsnorm",
            "norm_eps": eps,
            "bias": bias,
            "tie_embeddings": settings.tied,
        },
        "config.json",
    )
    names = NAMES | BIASES[bias] | (QK_NORMS if attention.get("qk_norm") else {})
    parts = ends(settings, EMBEDDING, "model.norm.weight") | stack(range(layers), BLOCK, LAYER, names)
    return Plan(model, parts, (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",))


def _late_windows(settings: Settings) -> list[int]:
    """Returns the windows of the layers of a Qwen, which has them only if `use_sliding_window` is set."""
    layers = settings.integer("num_hidden_layers", 32, LARGEST["layers"])
    window = settings.values.get("sliding_window", 4096) if settings.flag("use_sliding_window", False) else None
    first = settings.values.get("max_window_layers", 28)
    return _windows(settings, layers, window, first if type(first) is int else 0)


def _windows(settings: Settings, layers: int, window: Any, first: int) -> list[int]:
    """Returns the window of each layer, 0 for none: from `layer_types`, or else from the layer `first` on."""
    if window is not None and (type(window) is not int or not 1 <= window <= LARGEST["width"]):
        settings.problems.append(
            f"sliding_window: must be a whole number from 1 to {LARGEST['width']}, or null (given {window!r})"
        )
        return [0] * layers
    kinds = settings.values.get("layer_types")
    if kinds is None:
        return [window if window is not None and layer >= first else 0 for layer in range(layers)]
    known = {"full_attention": 0, "sliding_attention": window or 0}
    if not isinstance(kinds, list) or len(kinds) != layers or any(str(kind) not in known for kind in kinds):
        settings.problems.append(
            f"layer_types: must have full_attention or sliding_attention for each of {layers} layers (given {kinds!r})"
        )
        return [0] * layers
    return [known[kind] for kind in kinds]


def read_rope(
    settings: Settings, fraction: float | None = None, theta: float = 10000.0, inert: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns RoPE's options, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        fraction: default of `partial_rotary_factor`; None: the source rotates all channels.
        theta: default of `rope_theta`.
        inert: keys that do not change the rotation of text.
    """
    given = settings.values.get("rope_parameters") or settings.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        settings.problems.append(f"rope_parameters: must be an object (given {given!r})")
        return {}
    outer = {key: settings.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = Settings({**outer, **given})
    if fraction is None:
        rope.only("partial_rotary_factor", 1, why="Linnet's RoPE rotates all channels of a head")
    share = {} if fraction is None else {"rope_fraction": rope.number("partial_rotary_factor", fraction, largest=1)}
    base, kind = rope.number("rope_theta", theta), given.get("rope_type", given.get("type", "default"))
    known = (*ROPE_KEYS, *inert, *(YARN_KEYS if kind == "yarn" else ()))
    for key in sorted(key for key, value in given.items() if value is not None and key not in known):
        rope.problems.append(f"{key}: Linnet's RoPE does not have it (given {given[key]!r}); it has {', '.join(known)}")
    scaling = None
    if kind == "linear":
        scaling = {"kind": "linear", "factor": rope.number("factor", None)}
    elif kind in ROTATIONS:
        (low, high), yarn = ROTATIONS[kind], kind == "yarn"
        scaling = {
            "kind": kind,
            "factor": rope.number("factor", None),
            "low": rope.number(low, 1.0 if yarn else None),
            "high": rope.number(high, 32.0 if yarn else None),
            "length": rope.integer("original_max_position_embeddings", None),
        }
        if yarn:
            scaling |= {
                "truncate": rope.flag("truncate", True),
                "attention_factor": _amplitude(rope, scaling["factor"]),
            }
    elif kind != "default":
        rope.problems.append(f"rope_type: Linnet does not have {kind!r}; it has default, linear, llama3 and yarn")
    settings.problems += [f"rope_parameters.{problem}" for problem in rope.problems]
    return {"rope_base": base, "rope_scaling": scaling, **share}


def write_rope(attention: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of config.json for RoPE's options, the inverse of `read_rope`."""
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": attention["rope_base"]}
    if attention.get("rope_fraction", 1.0) != 1.0:
        values["partial_rotary_factor"] = attention["rope_fraction"]
    scaling = attention["rope_scaling"]
    if not scaling:
        return {"rope_parameters": values}
    scaling = scaling if isinstance(scaling, Mapping) else scaling.model_dump()
    values |= {"rope_type": scaling["kind"], "factor": scaling["factor"]}
    if scaling["kind"] == "linear":
        return {"rope_parameters": values}
    low, high = ROTATIONS[scaling["kind"]]
    values |= {
        low: scaling["low"],
        high: scaling["high"],
        "original_max_position_embeddings": scaling["length"],
        **{key: scaling[key] for key in ("attention_factor", "truncate") if key in scaling},
    }
    return {"rope_parameters": values, "max_position_embeddings": int(scaling["factor"] * scaling["length"])}


def _amplitude(rope: Settings, factor: float) -> float | None:
    """Returns the factor of rotated queries and keys that YaRN's keys name, None for Linnet's default."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor", None)
    if not (rope.values.get("mscale") and rope.values.get("mscale_all_dim")):
        return None
    own, all_dim = (
        0.1 * rope.number(key, None) * math.log(max(1.0, factor)) + 1.0 for key in ("mscale", "mscale_all_dim")
    )
    return own / all_dim
