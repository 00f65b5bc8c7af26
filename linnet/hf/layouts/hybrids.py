"""Hybrids and Mamba-2 of transformers: Qwen3.5, Qwen3-Next, Olmo-Hybrid, LFM2, Granite 4, Bamba, Falcon-H1, Nemotron-H.

Each family is its differences to common tables: the names of the tensors of a mixer or channel mixer, and the keys of
config.json that describe it. Only dense models are read, without experts.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from linnet.hf.layouts.base import LARGEST, Plan, Settings
from linnet.hf.layouts.family import (
    LEGACY,
    Entry,
    Family,
    Joint,
    Kind,
    Layers,
    Values,
    always,
    below,
    counted,
    ends,
    entry,
    one_kind,
    only,
    typed,
)
from linnet.hf.layouts.llama import read_rope, write_rope

ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "out_proj"}
QK_NORMS = {"q_norm": "q_norm", "k_norm": "k_norm"}
GATED = {**ATTENTION, **QK_NORMS, "q_proj": Joint("q_proj gate_proj", "attention.num_heads")}
DECAY = {"A_log": "A_log", "dt_bias": "dt_bias"}
GDN = DECAY | {
    "in_proj_qkv": "q_proj k_proj v_proj",
    "in_proj_z": "gate_proj",
    "in_proj_b": "beta_proj",
    "in_proj_a": "decay_proj",
    "conv1d": "q_conv k_conv v_conv",
    "norm": "norm",
    "out_proj": "out_proj",
}
GROUPED = {name: ours for name, ours in GDN.items() if not name.startswith("in_proj")} | {
    "in_proj_qkvz": Joint("q_proj k_proj v_proj gate_proj", "gdn.num_heads"),
    "in_proj_ba": Joint("beta_proj decay_proj", "gdn.num_heads"),
}
DELTA = {
    **{f"{name}_proj": f"{name}_proj" for name in "qkv"},
    **{f"{name}_conv1d": f"{name}_conv" for name in "qkv"},
    "b_proj": "beta_proj",
    "o_norm": "norm",
    "o_proj": "out_proj",
}
GDN_APART = DELTA | DECAY | {"a_proj": "decay_proj", "g_proj": "gate_proj"}
MAMBA2 = DECAY | {
    "in_proj": "gate_proj in_proj B_proj C_proj dt_proj",
    "conv1d": "x_conv B_conv C_conv",
    "D": "skip",
    "norm": "norm",
    "out_proj": "out_proj",
}
SHORT_CONV = {"in_proj": "write_proj read_proj in_proj", "conv": "conv", "out_proj": "out_proj"}
GLU = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
NORMS = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "channel_norm"}
FEED_FORWARD = {"input_layernorm": "mixer_norm", "pre_ff_layernorm": "channel_norm"} | below(
    "feed_forward", "channel", GLU
)
LLAMA_BLOCK = NORMS | below("mlp", "channel", GLU)
EMBEDDING = "model.embed_tokens"
LAYER = "model.layers.{}"
FULL, LINEAR = "full_attention", "linear_attention"

SILU = only("hidden_act", "silu", "swish", why="Linnet gates with SiLU")
UNLIMITED = (0.0, math.inf)
LARGEST_STEP = 1e30  # Linnet's options are finite, and no step is that large


def shape(width: int, vocabulary: int, inner: int | None, eps: float, key: str = "rms_norm_eps", *more: str) -> tuple:
    """Returns the entries of a model's shape, with their defaults; `more` paths have the epsilon of its norms."""
    entries = (
        entry("integer", "hidden_size", "d_model", default=width),
        entry("integer", "vocab_size", "vocab_size", default=vocabulary, largest=LARGEST["vocabulary"]),
        entry("number", key, "norm_eps", *more, default=eps, largest=1.0),
    )
    return (
        entries if inner is None else (*entries, entry("integer", "intermediate_size", "swiglu.inner", default=inner))
    )


def heads(count: int, shared: int | None, width: int | None = None, bias: bool = True) -> tuple[Entry, ...]:
    """Returns the entries of attention: its heads, those of keys and values, their width and its biases.

    Args:
        count, shared, width: defaults; None for `shared` is the number of heads, for `width` its share of the model's.
    """

    def query(settings: Settings) -> int:
        return settings.integer("num_attention_heads", count)

    def pairs(settings: Settings) -> int:  # null is the number of heads, for every family
        return shared if shared is not None and "num_key_value_heads" not in settings.values else query(settings)

    def wide(settings: Settings) -> int:
        return width or max(1, settings.integer("hidden_size", 4096) // query(settings))

    return (
        entry("integer", "num_attention_heads", "attention.num_heads", default=count),
        entry("integer", "num_key_value_heads", "attention.num_kv_heads", default=pairs),
        entry("integer", "head_dim", "attention.head_dim", default=wide),
        *([entry("flag", "attention_bias", "attention.bias", default=False)] if bias else []),
    )


def rope(fraction: float | None = None, theta: float = 10000.0, inert: tuple[str, ...] = ()) -> Entry:
    def read(settings: Settings) -> Values:
        return {f"attention.{key}": value for key, value in read_rope(settings, fraction, theta, inert).items()}

    def write(values: Values) -> Values:
        options = {key.removeprefix("attention."): value for key, value in values.items() if "attention." in key}
        keys = write_rope(options) if options.get("rope") else {}
        if keys and fraction is not None:
            keys["rope_parameters"]["partial_rotary_factor"] = options["rope_fraction"]
        return keys

    paths = ("attention.rope_base", "attention.rope_fraction", "attention.rope_scaling")
    return Entry(read, write, "rope_parameters", paths)


def inverse(key: str, path: str) -> Entry:
    """Returns the entry of a key that divides where the model multiplies."""

    def read(settings: Settings) -> Values:
        return {path: 1.0 / settings.number(key, 1.0)}

    return Entry(read, lambda values: {key: 1.0 / values[path]}, key, (path,))


def ratio(key: str, of: str, path: str, width: str, default: Callable[[Settings], int] | int, base: Any) -> Entry:
    """Returns the entry of a width that the model has as a multiple of another.

    Args:
        key, of: the key of the width and that of the other. path, width: of the multiple and of the other in the model.
        default, base: defaults of both keys.
    """

    def read(settings: Settings) -> Values:
        other = settings.integer(of, base(settings) if callable(base) else base)
        return {path: settings.integer(key, default(settings) if callable(default) else default) / other}

    def write(values: Values) -> Values:
        return {key: round(values[path] * values[width])} if path in values else {}

    return Entry(read, write, key, (path,))


def limits(key: str, path: str = "mamba2.dt_limit") -> Entry:
    """Returns the entry of the least and the largest step of Mamba-2."""

    def read(settings: Settings) -> Values:
        given = settings.values.get(key)
        ends = [math.inf if one == {"__float__": "Infinity"} else one for one in given] if _pair(given) else given
        if given is None or (_pair(ends) and tuple(ends) == UNLIMITED):
            return {path: None}
        if not _pair(ends) or not all(type(one) in (int, float) and one >= 0 for one in ends) or ends[0] > ends[1]:
            settings.problems.append(f"{key}: must be two numbers from 0 on, the smaller one first (given {given!r})")
            return {path: None}
        return {path: [min(float(one), LARGEST_STEP) for one in ends]}

    def write(values: Values) -> Values:
        if path not in values:
            return {}
        ends = values[path] or UNLIMITED
        return {key: [{"__float__": "Infinity"} if one >= LARGEST_STEP else one for one in ends]}

    return Entry(read, write, key, (path,))


def _pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def channels(
    count: str, width: str, expand: str, total: str | None, defaults: tuple[int, int | str, int, int | None]
) -> Entry:
    """Returns the entry of the heads of Mamba-2.

    Args:
        count, width, expand, total: keys of the number of heads, their width, the channels over the model's width, and
            the channels, which has precedence; None for no such key. defaults: of the four.
    """

    def read(settings: Settings) -> Values:
        model, number = settings.integer("hidden_size", 4096), settings.integer(count, defaults[0])
        times = settings.integer(expand, defaults[2], largest=64) if expand else 0
        inner = times * model
        if total is not None and settings.values.get(total, defaults[3]) is not None:
            inner = settings.integer(total, defaults[3])
        head = settings.values.get(width, defaults[1])
        head = (
            max(1, inner // number)
            if head in (None, "auto")
            else settings.integer(width, head if type(head) is int else None)
        )
        inner = inner or number * head
        if number * head != inner:
            settings.problems.append(f"{count}: {number} heads of {head} ({width}) are not the {inner} channels")
        same = {"mamba2.expand": times} if inner == times * model else {"mamba2.inner": inner}
        return same | {"mamba2.head_dim": head}

    def write(values: Values) -> Values:
        model = values["d_model"]  # without such a layer the keys must still fit each other
        inner = values.get("mamba2.inner", 2 * model)
        keys = {count: values.get("mamba2.num_heads", 1), width: values.get("mamba2.head_dim", inner)}
        keys |= {expand: max(1, inner // model)} if expand else {}
        return keys if total is None else keys | {total: inner}

    return Entry(read, write, count, ("mamba2.inner", "mamba2.expand", "mamba2.head_dim"))


def mamba2(groups: tuple[str, int], state: tuple[str, int], taps: str, bias: str) -> tuple[Entry, ...]:
    """Returns the entries of Mamba-2 by the keys of its groups and states, with defaults, convolution and its bias."""
    return (
        entry("integer", groups[0], "mamba2.num_groups", default=groups[1]),
        entry("integer", state[0], "mamba2.state", default=state[1]),
        entry("integer", taps, "mamba2.conv_width", default=4, largest=4096),
        entry("flag", bias, "mamba2.conv_bias", default=True),
    )


MAMBA_KEYS = mamba2(("mamba_n_groups", 1), ("mamba_d_state", 256), "mamba_d_conv", "mamba_conv_bias")


def linear(heads_k: Any, heads_v: Any, width_k: Any, width_v: Any) -> tuple[Entry, ...]:
    """Returns the entries of Gated DeltaNet by `linear_*` keys, with the defaults of its heads and their widths."""
    return (
        entry("integer", "linear_num_key_heads", "gdn.num_heads", default=heads_k),
        entry("integer", "linear_num_value_heads", "gdn.num_v_heads", default=heads_v),
        entry("integer", "linear_key_head_dim", "gdn.head_dim", default=width_k),
        ratio("linear_value_head_dim", "linear_key_head_dim", "gdn.expand_v", "gdn.head_dim", width_v, width_k),
        entry("integer", "linear_conv_kernel_dim", "gdn.conv_width", default=4, largest=4096),
    )


def every(settings: Settings, layers: int) -> list[str]:
    """Returns Qwen's kinds of blocks: attention in every fourth, or as `full_attention_interval` says."""
    step = settings.integer("full_attention_interval", 4)
    return [FULL if (index + 1) % step == 0 else LINEAR for index in range(layers)]


QWEN_KEYS = (
    *linear(16, 32, 128, 128),
    rope(0.25, inert=("mrope_section", "mrope_interleaved")),
    SILU,
    always(norm="zero_centred_rmsnorm", attention__gate="channel", attention__qk_norm=True),
    always(attention__qk_norm_kind="zero_centred_rmsnorm"),
)
QWEN = Family(
    "Qwen3.5",
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (
        *shape(4096, 248320, 12288, 1e-6, "rms_norm_eps", "gdn.norm_eps"),
        *heads(16, 4, 256),
        *QWEN_KEYS,
    ),
    typed(32, every, LINEAR, FULL),
    {
        LINEAR: Kind("gdn+swiglu", LLAMA_BLOCK | below("linear_attn", "mixer", GDN)),
        FULL: Kind("attention+swiglu", LLAMA_BLOCK | below("self_attn", "mixer", GATED)),
    },
    ends(EMBEDDING, "model.norm"),
    LAYER,
    ("model.", "model.language_model."),
    skipped={
        r"(model\.)?visual\..*": "the vision tower",
        r"(model\.)?mtp\..*": "multi-token prediction",
    },
)


def dense(settings: Settings) -> Values:
    """Adds a problem if Qwen3-Next has experts in some layer."""
    count, layers = settings.values.get("num_experts", 512), counted(48)(settings)
    plain = settings.values.get("mlp_only_layers") or []
    if count not in (0, None) and not (
        isinstance(plain, list) and set(range(layers)) <= {x for x in plain if type(x) is int}
    ):
        settings.problems.append(
            f"num_experts: Linnet does not read experts (given {count!r}; only 0 can be converted)"
        )
    return {}


QWEN_NEXT = replace(
    QWEN,
    title="Qwen3-Next",
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    entries=(
        *shape(2048, 151936, 5632, 1e-6, "rms_norm_eps", "gdn.norm_eps"),
        *heads(16, 2, 256),
        *QWEN_KEYS,
        Entry(dense, lambda values: {"num_experts": 0}),
    ),
    layers=typed(48, every, LINEAR, FULL),
    kinds=QWEN.kinds | {LINEAR: Kind("gdn+swiglu", LLAMA_BLOCK | below("linear_attn", "mixer", GROUPED))},
    root=("", ""),
)


def key_width(settings: Settings) -> int:
    count = settings.integer("linear_num_key_heads", settings.integer("num_attention_heads", 30))
    return max(1, int(0.75 * settings.integer("hidden_size", 3840) / count))


def last_of_four(settings: Settings, layers: int) -> list[str]:
    kinds = [FULL if index % 4 == 3 else LINEAR for index in range(layers)]
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def positions(settings: Settings) -> Values:
    """Reads RoPE of Olmo-Hybrid, which a `rope_theta` of null leaves out."""
    given = settings.values.get("rope_parameters")
    if isinstance(given, dict) and given.get("rope_theta", 1) is None:
        return {"attention.rope": False}
    return {"attention.rope": True} | OLMO_ROPE.read(settings)


OLMO_ROPE = rope()
OLMO = Family(
    "Olmo-Hybrid",
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    (
        *shape(3840, 100352, 11008, 1e-6),
        *heads(30, None),
        *linear(
            lambda settings: settings.integer("num_attention_heads", 30),
            lambda settings: settings.integer("num_attention_heads", 30),
            key_width,
            lambda settings: 2 * settings.integer("linear_key_head_dim", key_width(settings)),
        ),
        entry("flag", "linear_allow_neg_eigval", "gdn.allow_neg_eigval", default=True),
        Entry(
            positions,
            lambda values: (
                OLMO_ROPE.write(values)
                or (
                    {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
                    if "attention.rope" in values
                    else {}
                )
            ),
            *("rope_parameters", OLMO_ROPE.paths),
        ),
        SILU,
        always(norm="rmsnorm", norm_after=["attention"], attention__qk_norm=True, attention__qk_norm_over="width"),
    ),
    typed(32, last_of_four, LINEAR, FULL, mixed=True),
    {
        LINEAR: Kind(
            "gdn+swiglu",
            below("mlp", "channel", GLU)
            | below("linear_attn", "mixer", GDN_APART)
            | {"attention_layer_norm|input_layernorm": "mixer_norm"}
            | {"feedforward_layer_norm|post_attention_layernorm": "channel_norm"},
        ),
        FULL: Kind(
            "attention+swiglu",
            below("mlp", "channel", GLU)
            | below("self_attn", "mixer", ATTENTION | QK_NORMS)
            | {"post_attention_layernorm|feedforward_layer_norm": "mixer_norm"}
            | {"post_feedforward_layernorm": "channel_norm"},
        ),
    },
    ends(EMBEDDING, "model.norm"),
    LAYER,
    recut=tuple(f"linear_attn.{name}_conv1d.weight" for name in "qkv"),  # transformers saves equal thirds
)


def inner_of_lfm2(settings: Settings) -> Values:
    """Reads the width of LFM2's SwiGLU, which `block_auto_adjust_ff_dim` computes from another."""
    inner = settings.integer("block_ff_dim", settings.integer("intermediate_size", 12288))
    if settings.flag("block_auto_adjust_ff_dim", True):
        times, unit = settings.number("block_ffn_dim_multiplier", 1.0), settings.integer("block_multiple_of", 256)
        inner = unit * -(-int(times * int(2 * inner / 3)) // unit)
    return {"swiglu.inner": max(1, inner)}


def listed(settings: Settings, layers: int) -> list[str]:
    chosen = settings.values.get("full_attn_idxs")
    return [FULL if not isinstance(chosen, list) or index in chosen else "conv" for index in range(layers)]


LFM2 = Family(
    "LFM2",
    "lfm2",
    "Lfm2ForCausalLM",
    (
        *shape(2560, 65536, None, 1e-5, "norm_eps"),
        Entry(
            inner_of_lfm2,
            lambda values: {"intermediate_size": values["swiglu.inner"], "block_auto_adjust_ff_dim": False},
            *("intermediate_size", ("swiglu.inner",)),
        ),
        *heads(32, 8, bias=False),
        rope(theta=1000000.0),
        entry("flag", "conv_bias", "short_conv.bias", default=False),
        entry("integer", "conv_L_cache", "short_conv.conv_width", default=3, largest=4096),
        always(norm="rmsnorm", attention__qk_norm=True),
    ),
    typed(32, listed, FULL, "conv"),
    {
        kind: Kind(
            f"{mixer}+swiglu",
            {"operator_norm": "mixer_norm", "ffn_norm": "channel_norm"}
            | below("feed_forward", "channel", {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"})
            | names,
        )
        for kind, mixer, names in (
            ("conv", "short_conv", below("conv", "mixer", SHORT_CONV)),
            (
                FULL,
                "attention",
                below("self_attn", "mixer", {f"{name}_proj": f"{name}_proj" for name in ("q", "k", "v", "out")})
                | {"self_attn.q_layernorm": "mixer.q_norm", "self_attn.k_layernorm": "mixer.k_norm"},
            ),
        )
    },
    ends(EMBEDDING, "model.embedding_norm|model.norm"),
    LAYER,
)


def factor(key: str, path: str) -> Entry:
    return entry("number", key, path, default=1.0)


def dense_experts(key: str, default: int) -> Entry:
    """Returns the entry of a number of experts, which must be 0."""

    def read(settings: Settings) -> Values:
        count = settings.values.get(key, default)
        if count not in (0, None):
            settings.problems.append(f"{key}: Linnet does not read experts (given {count!r}; only 0 can be converted)")
        return {}

    return Entry(read, lambda values: {key: 0})


def rotated(settings: Settings) -> Values:
    """Reads whether Granite rotates queries and keys."""
    settings.only("position_embedding_type", None, "nope", "rope", why="Linnet does not have these positions")
    rotates = settings.values.get("position_embedding_type") == "rope"
    return {"attention.rope": rotates} | (GRANITE_ROPE.read(settings) if rotates else {})


GRANITE_ROPE = rope()
GRANITE = Family(
    "Granite 4",
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    (
        *shape(4096, 32000, None, 1e-6, "rms_norm_eps", "mamba2.norm_eps"),
        entry("integer", "shared_intermediate_size", "swiglu.inner", default=1024),
        *heads(32, None),
        Entry(
            rotated,
            lambda values: (
                GRANITE_ROPE.write(values)
                | {"position_embedding_type": "rope" if values.get("attention.rope") else "nope"}
            ),
            *("rope_parameters", GRANITE_ROPE.paths),
        ),
        channels("mamba_n_heads", "mamba_d_head", "mamba_expand", None, (128, "auto", 2, None)),
        *MAMBA_KEYS,
        entry("flag", "mamba_proj_bias", "mamba2.bias", "mamba2.out_bias", default=False),
        limits("time_step_limit"),
        factor("embedding_multiplier", "embedding_scale"),
        factor("residual_multiplier", "residual_scale"),
        factor("attention_multiplier", "attention.scale"),
        inverse("logits_scaling", "logit_scale"),
        dense_experts("num_local_experts", 8),
        SILU,
        always(norm="rmsnorm"),
    ),
    typed(32, lambda settings, layers: [LINEAR] * layers, LINEAR, FULL),
    {
        kind: Kind(
            f"{mixer}+swiglu",
            NORMS
            | below("shared_mlp", "channel", {"input_linear": "gate_proj up_proj", "output_linear": "down_proj"})
            | names,
        )
        for kind, mixer, names in (
            (LINEAR, "mamba2", below("mamba", "mixer", MAMBA2)),
            (FULL, "attention", below("self_attn", "mixer", ATTENTION)),
        )
    },
    ends(EMBEDDING, "model.norm"),
    LAYER,
)


def indexed(default: int) -> Layers:
    """Returns Bamba's list of blocks: attention in those of `attn_layer_indices`."""
    count = counted(default)

    def read(settings: Settings) -> list[str]:
        number, chosen = count(settings), settings.values.get("attn_layer_indices") or []
        if not isinstance(chosen, list) or any(type(one) is not int or not 0 <= one < number for one in chosen):
            settings.problems.append(
                f"attn_layer_indices: must be a list of blocks from 0 to {number - 1} (given {chosen!r})"
            )
            return [LINEAR] * number
        return [FULL if index in chosen else LINEAR for index in range(number)]

    def write(kinds: list[str]) -> Values:
        chosen = [index for index, kind in enumerate(kinds) if kind == FULL]
        return {"num_hidden_layers": len(kinds), "attn_layer_indices": chosen}

    return Layers(read, write)


BAMBA = Family(
    "Bamba",
    "bamba",
    "BambaForCausalLM",
    (
        *shape(4096, 128000, 14336, 1e-5, "rms_norm_eps", "mamba2.norm_eps"),
        *heads(32, 8),
        rope(0.5),
        channels("mamba_n_heads", "mamba_d_head", "mamba_expand", None, (128, "auto", 2, None)),
        *MAMBA_KEYS,
        entry("flag", "mamba_proj_bias", "mamba2.bias", "mamba2.out_bias", default=False),
        entry("flag", "mlp_bias", "swiglu.bias", default=False),
        limits("time_step_limit"),
        SILU,
        always(norm="rmsnorm"),
    ),
    indexed(32),
    {
        LINEAR: Kind("mamba2+swiglu", FEED_FORWARD | below("mamba", "mixer", MAMBA2)),
        FULL: Kind("attention+swiglu", FEED_FORWARD | below("self_attn", "mixer", ATTENTION)),
    },
    ends(EMBEDDING, "model.final_layernorm"),
    LAYER,
)


def several(key: str, count: int, read: Callable[[list[float]], Values], write: Callable[[Values], Any]) -> Entry:
    """Returns the entry of a list of factors; null is all 1."""

    def factors(settings: Settings) -> Values:
        given = settings.values.get(key)
        fits = isinstance(given, list) and len(given) == count
        if given is not None and not (fits and all(type(one) in (int, float) and 0 < one <= 1e9 for one in given)):
            settings.problems.append(f"{key}: must be {count} numbers above 0 (given {given!r})")
            given = None
        return read([1.0] * count if given is None else [float(one) for one in given])

    return Entry(factors, lambda values: {key: write(values)}, key)


def key_factor(settings: Settings) -> Values:
    """Reads the factor of keys, which the scale of the scores takes in."""
    times = settings.number("key_multiplier", 1.0)
    query = settings.integer("num_attention_heads", 32)
    width = settings.integer("head_dim", max(1, settings.integer("hidden_size", 4096) // query))
    return {"attention.scale": None if times == 1.0 else times * width**-0.5}


def written_key_factor(values: Values) -> Values:
    times = values["attention.scale"] * values["attention.head_dim"] ** 0.5
    return {"key_multiplier": 1.0 if math.isclose(times, 1.0, rel_tol=1e-12) else times}


FALCON = Family(
    "Falcon-H1",
    "falcon_h1",
    "FalconH1ForCausalLM",
    (
        *shape(4096, 128000, 14336, 1e-5, "rms_norm_eps", "mamba2.norm_eps"),
        *heads(32, 8),
        rope(),
        channels("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_d_ssm", (128, "auto", 2, 1024)),
        *MAMBA_KEYS,
        entry("flag", "mamba_proj_bias", "mamba2.bias", default=False),
        entry("flag", "projectors_bias", "mamba2.out_bias", default=False),
        entry("flag", "mlp_bias", "swiglu.bias", default=False),
        entry("flag", "mamba_rms_norm", "mamba2.norm", default=False),
        Entry(
            lambda settings: {
                "mamba2.norm_before_gate": settings.flag("mamba_norm_before_gate", True)
                and settings.flag("mamba_rms_norm", False)
            },
            lambda values: {"mamba_norm_before_gate": values["mamba2.norm_before_gate"]},
        ),
        limits("time_step_limit"),
        factor("embedding_multiplier", "embedding_scale"),
        factor("lm_head_multiplier", "logit_scale"),
        factor("attention_in_multiplier", "parallel.input_scales.attention"),
        factor("attention_out_multiplier", "parallel.output_scales.attention"),
        factor("ssm_in_multiplier", "parallel.input_scales.mamba2"),
        factor("ssm_out_multiplier", "parallel.output_scales.mamba2"),
        Entry(key_factor, written_key_factor, "key_multiplier", ("attention.scale",)),
        several(
            *("mlp_multipliers", 2),
            lambda given: {"swiglu.gate_scale": given[0], "swiglu.out_scale": given[1]},
            lambda values: [values["swiglu.gate_scale"], values["swiglu.out_scale"]],
        ),
        several(
            *("ssm_multipliers", 5),
            lambda given: {"mamba2.scales": None if given == [1.0] * 5 else given},
            lambda values: values["mamba2.scales"] or [1.0] * 5,
        ),
        SILU,
        always(norm="rmsnorm"),
    ),
    one_kind("hybrid", 32),
    {
        "hybrid": Kind(
            "parallel+swiglu",
            FEED_FORWARD
            | below("mamba", "mixer.mixers.mamba2", MAMBA2)
            | below("self_attn", "mixer.mixers.attention", ATTENTION),
        )
    },
    ends(EMBEDDING, "model.final_layernorm"),
    LAYER,
)

PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
NEMOTRON_KINDS = {
    LINEAR: Kind("mamba2", {"norm": "mixer_norm"} | below("mixer", "mixer", MAMBA2)),
    FULL: Kind("attention", {"norm": "mixer_norm"} | below("mixer", "mixer", ATTENTION)),
    "mlp": Kind(
        "mlp", {"norm": "channel_norm"} | below("mixer", "channel", {"up_proj": "up_proj", "down_proj": "down_proj"})
    ),
}


def pattern(settings: Settings) -> list[str]:
    """Reads Nemotron-H's kinds of blocks, from a list or from a string of letters."""
    given = settings.values.get("layers_block_type", settings.values.get("layer_types"))
    key = "layers_block_type"
    if given is None:
        key, given = "hybrid_override_pattern", settings.values.get("hybrid_override_pattern", "ME*-")
        kinds = [PATTERN.get(letter, letter) for letter in given] if isinstance(given, str) else []
    else:
        kinds = (
            [LEGACY.get(one, one) if isinstance(one, str) else "" for one in given] if isinstance(given, list) else []
        )
    if not kinds or len(kinds) > LARGEST["layers"] or not set(kinds) <= set(NEMOTRON_KINDS):
        settings.problems.append(
            f"{key}: must be blocks of Mamba-2, attention or MLP, without experts (given {given!r})"
        )
        return ["mlp"]
    return kinds


NEMOTRON = Family(
    "Nemotron-H",
    "nemotron_h",
    "NemotronHForCausalLM",
    (
        *shape(4096, 131072, None, 1e-5, "layer_norm_epsilon", "mamba2.norm_eps"),
        entry("integer", "intermediate_size", "mlp.inner", default=21504),
        Entry(
            lambda settings: {
                "mlp.activation": settings.choice(
                    "mlp_hidden_act", "relu2", {name: name for name in ("relu2", "relu", "silu", "gelu")}
                )
            },
            lambda values: {"mlp_hidden_act": values["mlp.activation"]} if "mlp.activation" in values else {},
        ),
        entry("flag", "mlp_bias", "mlp.bias", default=False),
        *heads(32, 8, 128, bias=False),
        channels("mamba_num_heads", "mamba_head_dim", "", None, (128, 64, 0, None)),
        *mamba2(("n_groups", 8), ("ssm_state_size", 128), "conv_kernel", "use_conv_bias"),
        entry("flag", "use_bias", "mamba2.bias", "mamba2.out_bias", default=False),
        Entry(
            lambda settings: {"mamba2.dt_limit": [settings.number("time_step_min", 0.001), LARGEST_STEP]},
            lambda values: (
                {"time_step_min": (values["mamba2.dt_limit"] or [0.0])[0]} if "mamba2.dt_limit" in values else {}
            ),
            *("time_step_min", ("mamba2.dt_limit",)),
        ),
        only("mamba_hidden_act", "silu", "swish", why="Linnet's Mamba-2 has SiLU"),
        only("sliding_window", None, why="Nemotron-H's own code has no windows"),
        always(norm="rmsnorm", attention__rope=False),
    ),
    Layers(
        pattern,
        lambda kinds: {
            "layers_block_type": kinds,
            "hybrid_override_pattern": "".join(
                {kind: letter for letter, kind in PATTERN.items()}[kind] for kind in kinds
            ),
            "num_hidden_layers": len(kinds),
        },
    ),
    NEMOTRON_KINDS,
    ends("backbone.embeddings", "backbone.norm_f"),
    "backbone.layers.{}",
    ("backbone.", "model."),
    skipped={r"mtp\..*": "multi-token prediction"},
)

MAMBA = Family(
    "Mamba-2",
    "mamba2",
    "Mamba2ForCausalLM",
    (
        *shape(4096, 32768, None, 1e-5, "layer_norm_epsilon", "mamba2.norm_eps"),
        channels("num_heads", "head_dim", "expand", None, (128, 64, 2, None)),
        *mamba2(("n_groups", 8), ("state_size", 128), "conv_kernel", "use_conv_bias"),
        entry("flag", "use_bias", "mamba2.bias", "mamba2.out_bias", default=False),
        limits("time_step_limit"),
        SILU,
        always(norm="rmsnorm"),
    ),
    one_kind("mamba2", 64),
    {"mamba2": Kind("mamba2", {"norm": "mixer_norm"} | below("mixer", "mixer", MAMBA2))},
    ends("backbone.embeddings|backbone.embedding", "backbone.norm_f"),
    "backbone.layers.{}",
)


def step_limits(settings: Settings) -> Values:
    """Reads the limits of steps of flash-linear-attention, whose key has changed."""
    return limits("dt_limit" if "dt_limit" in settings.values else "time_step_limit").read(settings)


FLA_MAMBA = replace(
    MAMBA,
    title="Mamba-2 of flash-linear-attention",
    entries=(
        *shape(2048, 32000, None, 1e-5, "norm_eps", "mamba2.norm_eps"),
        entry("integer", "expand", "mamba2.expand", default=2, largest=64),
        entry("integer", "head_dim", "mamba2.head_dim", default=64),
        *mamba2(("n_groups", 1), ("state_size", 128), "conv_kernel", "use_conv_bias")[1:],
        entry("flag", "use_bias", "mamba2.bias", "mamba2.out_bias", default=False),
        entry("flag", "norm_before_gate", "mamba2.norm_before_gate", default=False),
        Entry(step_limits),
        only("n_groups", 1, why="the norm of its layer runs over all groups, and Linnet's over each"),
        only("rmsnorm", True, why="its layer is read with its norm"),
        only("D_has_hdim", False, why="Linnet's Mamba-2 has one D per head"),
        *MAMBA.entries[-2:],
    ),
    layers=one_kind("mamba2", 48),
)


def read_mamba2(settings: Settings) -> Plan:
    """Returns the plan of a Mamba-2 of transformers, or of flash-linear-attention, which has the same `model_type`."""
    theirs = "norm_eps" in settings.values and "layer_norm_epsilon" not in settings.values
    return (FLA_MAMBA if theirs else MAMBA).read(settings)


SSM = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "headdim": "head_dim",
    "ngroups": "n_groups",
}
SSM |= {"bias": "use_bias", "conv_bias": "use_conv_bias", "dt_limit": "time_step_limit"}
SSM_INERT = (
    "layer",
    "chunk_size",
    "A_init_range",
    "dt_min",
    "dt_max",
    "dt_init_floor",
    "use_mem_eff_path",
    "conv_init",
)


def read_mamba_ssm(settings: Settings) -> Plan:
    """Returns the plan of a Mamba-2 as state-spaces' own package saves it: other keys, without a `model_type`."""
    given = settings.values.get("ssm_cfg")
    inner = Settings(given if isinstance(given, dict) else {})
    inner.only("layer", "Mamba1", "Mamba2", why="it is not a Mamba-2")
    if inner.values.get("layer", "Mamba1") == "Mamba1":
        inner.problems.append("layer: Mamba-1 is read in the layout of transformers (`model_type` mamba)")
    for key, neutral in (("rmsnorm", True), ("norm_before_gate", False), ("D_has_hdim", False), ("d_ssm", None)):
        inner.only(key, neutral, why="Linnet reads state-spaces' Mamba-2 with its defaults here")
    known = {*SSM, *SSM_INERT, "rmsnorm", "norm_before_gate", "D_has_hdim", "d_ssm"}
    inner.problems += [f"{key}: Linnet does not know this key" for key in sorted(set(inner.values) - known)]
    settings.problems += [f"ssm_cfg.{problem}" for problem in inner.problems]
    settings.only("rms_norm", True, why="the norms of its blocks are RMSNorm")
    settings.only("d_intermediate", 0, why="Linnet reads blocks of Mamba-2 alone")
    if settings.values.get("attn_layer_idx"):
        settings.problems.append("attn_layer_idx: Linnet reads blocks of Mamba-2 alone")
    width, unit = settings.integer("d_model", 2560), settings.integer("pad_vocab_size_multiple", 8)
    vocabulary = unit * -(-settings.integer("vocab_size", 50277, LARGEST["vocabulary"]) // unit)
    values = {SSM[key]: value for key, value in inner.values.items() if key in SSM}
    values = {"expand": 2, "head_dim": 64, "n_groups": 1, "hidden_size": width, "vocab_size": vocabulary} | values
    values["num_hidden_layers"] = settings.integer("n_layer", 64, LARGEST["layers"])
    if all(type(values[key]) is int and values[key] > 0 for key in ("expand", "head_dim")):
        values["num_heads"] = max(1, values["expand"] * width // values["head_dim"])
    return MAMBA.read(replace(settings, values=values))
