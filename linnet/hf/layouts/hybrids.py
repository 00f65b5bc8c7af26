"""Hybrids and Mamba-2 of transformers: Qwen3.5, Qwen3-Next, Olmo-Hybrid, LFM2, Granite 4, Bamba, Falcon-H1, Nemotron-H.

Each family is its differences to common tables: the names of the tensors of a mixer or channel mixer, and the keys of
config.json that describe it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from linnet.hf.layouts.base import LARGEST, Plan, Settings, read_rope, write_rope
from linnet.hf.layouts.family import (
    LEGACY,
    Entry,
    Family,
    Joint,
    Kind,
    Layers,
    Names,
    Values,
    always,
    below,
    counted,
    ends,
    entry,
    keys,
    one_kind,
    only,
    table,
    typed,
)

QKV = "q_proj k_proj v_proj"
ATTENTION = table(f"{QKV} o_proj:out_proj")
QK_NORMS = table("q_norm k_norm")
GATED = ATTENTION | QK_NORMS | {"q_proj": Joint("q_proj gate_proj", "attention.num_heads")}
DECAY = table("A_log dt_bias")
CONVOLVED = DECAY | table("conv1d:q_conv+k_conv+v_conv norm out_proj")
GDN = CONVOLVED | table("in_proj_qkv:q_proj+k_proj+v_proj in_proj_z:gate_proj in_proj_b:beta_proj in_proj_a:decay_proj")
GROUPED = CONVOLVED | {
    "in_proj_qkvz": Joint(f"{QKV} gate_proj", "gdn.num_heads"),
    "in_proj_ba": Joint("beta_proj decay_proj", "gdn.num_heads"),
}
DELTA = table(f"{QKV} q_conv1d:q_conv k_conv1d:k_conv v_conv1d:v_conv b_proj:beta_proj o_norm:norm o_proj:out_proj")
GDN_APART = DELTA | DECAY | table("a_proj:decay_proj g_proj:gate_proj")
MIXED = "in_proj:gate_proj+in_proj+B_proj+C_proj+dt_proj conv1d:x_conv+B_conv+C_conv"
MAMBA2 = DECAY | table(f"{MIXED} D:skip norm out_proj")
SHORT_CONV = table("in_proj:write_proj+read_proj+in_proj conv out_proj")
GLU = table("gate_proj up_proj down_proj")
NORMS = table("input_layernorm:mixer_norm post_attention_layernorm:channel_norm")
LLAMA_BLOCK = NORMS | below("mlp", "channel", GLU)
FEED_FORWARD = table("input_layernorm:mixer_norm pre_ff_layernorm:channel_norm") | below("feed_forward", "channel", GLU)
FULL, LINEAR = "full_attention", "linear_attention"

SILU = only("hidden_act", "silu", "swish", why="Linnet gates with SiLU")
PLAIN = (SILU, always(norm="rmsnorm"))
LARGEST_STEP = 1e30  # Linnet's options are finite, and no step is that large


def query(settings: Settings, default: int) -> int:
    return settings.integer("num_attention_heads", default)


def heads(count: int, shared: int | None, width: int | None = None, also: str = "attention") -> tuple[Entry, ...]:
    """Returns the entries of attention: its heads, those of keys and values, and their width.

    Args:
        also: another layer that has so many heads of this width.
        count, shared, width: defaults; None for `shared` is the number of heads, for `width` its share of the model's.
    """

    def pairs(settings: Settings) -> int:  # null is the number of heads, for every family
        everywhere = shared is None or "num_key_value_heads" in settings.values
        return query(settings, count) if everywhere else shared

    def wide(settings: Settings) -> int:
        return width or max(1, settings.integer("hidden_size", 4096) // query(settings, count))

    return (
        *keys(f"num_attention_heads:attention.num_heads+{also}.num_heads={count}"),
        entry("integer", "num_key_value_heads", "attention.num_kv_heads", default=pairs),
        entry("integer", "head_dim", "attention.head_dim", f"{also}.head_dim", default=wide),
    )


BIAS = keys("attention_bias:attention.bias=false")


def rope(
    fraction: float | None = None, theta: float = 10000.0, inert: tuple[str, ...] = (), layer: str = "attention"
) -> Entry:
    def read(settings: Settings) -> Values:
        return {f"{layer}.{key}": value for key, value in read_rope(settings, fraction, theta, inert).items()}

    def write(values: Values) -> Values:
        options = {key.removeprefix(f"{layer}."): value for key, value in values.items() if f"{layer}." in key}
        written = write_rope(options) if options.get("rope") else {}
        if written and fraction is not None:
            written["rope_parameters"]["partial_rotary_factor"] = options["rope_fraction"]
        return written

    paths = tuple(f"{layer}.rope_{name}" for name in ("base", "fraction", "scaling"))
    return Entry(read, write, "rope_parameters", paths)


def optional_rope(rotates: Callable[[Settings], bool], on: Values, off: Values) -> Entry:
    """Returns the entry of RoPE that a family may leave out; `on` and `off` are the keys that say so."""
    always_on = rope()

    def read(settings: Settings) -> Values:
        return {"attention.rope": True} | always_on.read(settings) if rotates(settings) else {"attention.rope": False}

    def write(values: Values) -> Values:
        return on | always_on.write(values) if values.get("attention.rope") else off

    return Entry(read, write, "rope_parameters", always_on.paths)


def ratio(key: str, of: str, path: str, width: str, default: Any, base: Any) -> Entry:
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


def bound(key: str, default: float | None, flag: str) -> Entry:
    """Returns the entry of the lower bound of KDA's log-decays, which null or, with a default, a flag leaves out."""

    def read(settings: Settings) -> Values:
        value = settings.values.get(key, default)
        if value is not None and (type(value) not in (int, float) or not -1e9 < value < 0):
            settings.problems.append(f"{key}: must be a number below 0 (given {value!r})")
            value = None
        bounded = value is not None and (default is None or settings.flag(flag, True))
        return {"kda.lower_bound": float(value) if bounded else None}

    def write(values: Values) -> Values:
        value = values.get("kda.lower_bound")
        return {key: value if value is not None else default, flag: value is not None}

    return Entry(read, write, key, ("kda.lower_bound",))


def optional(key: str, path: str, absent: Any = None) -> Entry:
    """Returns the entry of a whole number that may be `absent` or null, which is 0 in the model."""

    def read(settings: Settings) -> Values:
        return {path: 0 if settings.values.get(key) in (None, absent) else settings.integer(key, None)}

    return Entry(read, lambda values: {key: values.get(path) or absent}, key, (path,))


def limits(*names: str) -> Entry:
    """Returns the entry of the least and the largest step of Mamba-2; the key may have several names."""
    path = "mamba2.dt_limit"

    def read(settings: Settings) -> Values:
        key = next((name for name in names if name in settings.values), names[0])
        value = settings.values.get(key)
        listed = value if isinstance(value, list | tuple) else []
        ends = [math.inf if item == {"__float__": "Infinity"} else item for item in listed]
        fits = len(ends) == 2 and all(type(item) in (int, float) and item >= 0 for item in ends) and ends[0] <= ends[1]
        if value is not None and not fits:
            settings.problems.append(f"{key}: must be two numbers from 0 on, the smaller one first (given {value!r})")
        unlimited = not fits or ends == [0.0, math.inf]
        return {path: None if unlimited else [min(float(item), LARGEST_STEP) for item in ends]}

    def write(values: Values) -> Values:
        ends = values.get(path) or [0.0, LARGEST_STEP]
        return {names[0]: [{"__float__": "Infinity"} if item >= LARGEST_STEP else item for item in ends]}

    return Entry(read, write, names[0], (path,))


def channels(count: str, width: str, expand: str, total: str, defaults: tuple[int, Any, int, int | None]) -> Entry:
    """Returns the entry of the heads of Mamba-2.

    Args:
        count, width, expand, total: keys of the number of heads, their width, the channels over the model's width, and
            the channels, which has precedence; "" for no such key. defaults: of the four.
    """

    def read(settings: Settings) -> Values:
        model, number = settings.integer("hidden_size", 4096), settings.integer(count, defaults[0])
        times = settings.integer(expand, defaults[2], largest=64) if expand else 0
        inner = times * model
        if total and settings.values.get(total, defaults[3]) is not None:
            inner = settings.integer(total, defaults[3])
        share = max(1, inner // number)
        whole = settings.values.get(width, defaults[1]) in (None, "auto")
        head = share if whole else settings.integer(width, share if defaults[1] == "auto" else defaults[1])
        inner = inner or number * head
        if number * head != inner:
            settings.problems.append(f"{count}: {number} heads of {head} ({width}) are not the {inner} channels")
        same = {"mamba2.expand": times} if inner == times * model else {"mamba2.inner": inner}
        return same | {"mamba2.head_dim": head}

    def write(values: Values) -> Values:
        model = values["d_model"]  # without such a layer the keys must still fit each other
        inner = values.get("mamba2.inner", 2 * model)
        written = {count: values.get("mamba2.num_heads", 1), width: values.get("mamba2.head_dim", inner)}
        written |= {expand: max(1, inner // model), total: inner}
        return {key: value for key, value in written.items() if key}

    return Entry(read, write, count, ("mamba2.inner", "mamba2.expand", "mamba2.head_dim"))


MAMBA_KEYS = (
    *keys("mamba_n_groups:mamba2.num_groups=1 mamba_d_state:mamba2.state=256 mamba_d_conv:mamba2.conv_width=4"),
    *keys("mamba_conv_bias:mamba2.conv_bias=true"),
    limits("time_step_limit"),
)
PROJ_BIAS = keys("mamba_proj_bias:mamba2.bias+mamba2.out_bias=false")
AUTO = ("mamba_n_heads", "mamba_d_head", "mamba_expand")


def linear(heads_k: Any, heads_v: Any, width_k: Any, width_v: Any) -> tuple[Entry, ...]:
    """Returns the entries of Gated DeltaNet by `linear_*` keys, with the defaults of its heads and their widths."""
    return (
        entry("integer", "linear_num_key_heads", "gdn.num_heads", default=heads_k),
        entry("integer", "linear_num_value_heads", "gdn.num_v_heads", default=heads_v),
        entry("integer", "linear_key_head_dim", "gdn.head_dim", default=width_k),
        ratio("linear_value_head_dim", "linear_key_head_dim", "gdn.expand_v", "gdn.head_dim", width_v, width_k),
        *keys("linear_conv_kernel_dim:gdn.conv_width=4"),
    )


def every(key: str, default: int) -> Callable[[Settings, int], list[str]]:
    """Returns the kinds of blocks with attention in each one after so many as a key says."""

    def kinds(settings: Settings, layers: int) -> list[str]:
        step = settings.integer(key, default)
        return [FULL if (index + 1) % step == 0 else LINEAR for index in range(layers)]

    return kinds


OF_QWEN = every("full_attention_interval", 4)
MOE, EXPERTS = " moe", "moe.num_experts"  # the end of the name of a kind with experts, and the path of their number


def count_experts(settings: Settings, key: str, default: int) -> int:
    """Returns the number of experts, 0 for none."""
    value = settings.values.get(key, default)
    absent = value is None or (value == 0 and not isinstance(value, bool))
    return 0 if absent else settings.integer(key, default, LARGEST["experts"])


def experts(key: str, default: int) -> Entry:
    """Returns the entry of a number of experts, which may be 0."""

    def read(settings: Settings) -> Values:
        count = count_experts(settings, key, default)
        return {EXPERTS: count} if count else {}

    return Entry(read, lambda values: {key: values.get(EXPERTS, 0)}, key, (EXPERTS,))


def one_by_one(gate: str, up: str, down: str) -> dict[str, Joint]:
    """Returns the names of the matrices of experts that are stored one by one; "" for no gate."""
    ours = {gate: Joint("gate_proj", experts=EXPERTS), up: Joint("up_proj", experts=EXPERTS)}
    ours |= {down: Joint("down_proj", experts=EXPERTS, across=True)}
    return {f"experts.{{}}.{name}": joint for name, joint in ours.items() if name}


OWN_EXPERTS = one_by_one("gate_proj", "up_proj", "down_proj")


def with_experts(kinds: Mapping[str, Kind], names: Names) -> dict[str, Kind]:
    """Returns kinds of blocks, and after them the same with experts, whose tensors have `names`, for a SwiGLU."""
    sparse = {}
    for kind, block in kinds.items():
        rest = {
            its: ours for its, ours in block.names.items() if not getattr(ours, "ours", ours).startswith("channel.")
        }
        sparse[kind + MOE] = Kind(block.layer.replace("swiglu", "moe"), rest | names)
    return {**kinds, **sparse}


def some_sparse(
    layers: Layers, sparse: Callable[[Settings, int], list[bool]], write: Callable[[list[bool]], Values]
) -> Layers:
    """Returns the list of blocks of which some have experts.

    Args:
        sparse: which of so many blocks have experts. write: the keys that say so.
    """

    def read(settings: Settings) -> list[str]:
        kinds = layers.read(settings)
        return [kind + MOE * has for kind, has in zip(kinds, sparse(settings, len(kinds)), strict=True)]

    def written(kinds: list[str]) -> Values:
        return layers.write([kind.removesuffix(MOE) for kind in kinds]) | write([MOE in kind for kind in kinds])

    return Layers(read, written)


def sparse_of_qwen(settings: Settings, layers: int) -> list[bool]:
    count, step = count_experts(settings, "num_experts", 512), settings.integer("decoder_sparse_step", 1)
    dense = settings.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        settings.problems.append(f"mlp_only_layers: must be a list of numbers of blocks (given {dense!r})")
        dense = []
    return [count > 0 and index not in dense and (index + 1) % step == 0 for index in range(layers)]


def written_sparse_of_qwen(sparse: list[bool]) -> Values:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [index for index, has in enumerate(sparse) if not has]}


QWEN_KEYS = (
    *keys("rms_norm_eps:norm_eps+gdn.norm_eps=1e-6"),
    *linear(16, 32, 128, 128),
    rope(0.25, inert=("mrope_section", "mrope_interleaved")),
    *BIAS,
    SILU,
    always(norm="zero_centred_rmsnorm", attention__gate="channel", attention__qk_norm=True),
    always(attention__qk_norm_kind="zero_centred_rmsnorm"),
)
QWEN = Family(
    *("Qwen3.5", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    (
        *keys("hidden_size:d_model=4096 vocab_size:vocab_size=248320 intermediate_size:swiglu.inner=12288"),
        *(*heads(16, 4, 256), *QWEN_KEYS),
    ),
    typed(32, OF_QWEN, LINEAR, FULL),
    {
        LINEAR: Kind("gdn+swiglu", LLAMA_BLOCK | below("linear_attn", "mixer", GDN)),
        FULL: Kind("attention+swiglu", LLAMA_BLOCK | below("self_attn", "mixer", GATED)),
    },
    root=("model.", "model.language_model."),
    skipped={r"(model\.)?visual\..*": "the vision tower", r"(model\.)?mtp\..*": "multi-token prediction"},
)
QWEN_SHARED = table("gate:router shared_expert_gate:shared_gate")
QWEN_SHARED |= {f"shared_expert.{name}": f"shared_{name}" for name in GLU}
QWEN_NEXT = Family(
    *("Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM"),
    (
        *keys("hidden_size:d_model=2048 vocab_size:vocab_size=151936 intermediate_size:swiglu.inner=5632"),
        *(*heads(16, 2, 256), *QWEN_KEYS, experts("num_experts", 512), always(moe__shared_gate=True)),
        *keys("moe_intermediate_size:moe.inner=512 shared_expert_intermediate_size:moe.shared_inner=512"),
        *keys("num_experts_per_tok:moe.num_active=10 norm_topk_prob:moe.normalise=true"),
    ),
    some_sparse(typed(48, OF_QWEN, LINEAR, FULL), sparse_of_qwen, written_sparse_of_qwen),
    with_experts(
        {**QWEN.kinds, LINEAR: Kind("gdn+swiglu", LLAMA_BLOCK | below("linear_attn", "mixer", GROUPED))},
        below("mlp", "channel", OWN_EXPERTS | QWEN_SHARED),
    ),
    skipped={r"(model\.)?mtp\..*": "multi-token prediction"},
)


def key_width(settings: Settings) -> int:
    count = settings.integer("linear_num_key_heads", query(settings, 30))
    return max(1, int(0.75 * settings.integer("hidden_size", 3840) / count))


def last_of_four(settings: Settings, layers: int) -> list[str]:
    kinds = [FULL if index % 4 == 3 else LINEAR for index in range(layers)]
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def has_theta(settings: Settings) -> bool:
    value = settings.values.get("rope_parameters")
    return not isinstance(value, dict) or value.get("rope_theta", 1) is not None


OLMO = Family(
    *("Olmo-Hybrid", "olmo_hybrid", "OlmoHybridForCausalLM"),
    (
        *keys("hidden_size:d_model=3840 vocab_size:vocab_size=100352 intermediate_size:swiglu.inner=11008"),
        *keys("rms_norm_eps:norm_eps=1e-6 linear_allow_neg_eigval:gdn.allow_neg_eigval=true"),
        *(*heads(30, None), *BIAS, *PLAIN),
        *linear(
            lambda settings: query(settings, 30),
            lambda settings: query(settings, 30),
            key_width,
            lambda settings: 2 * settings.integer("linear_key_head_dim", key_width(settings)),
        ),
        optional_rope(has_theta, {}, {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}),
        always(norm_after=["attention"], attention__qk_norm=True, attention__qk_norm_over="width"),
    ),
    typed(32, last_of_four, LINEAR, FULL, mixed=True),
    {
        LINEAR: Kind(
            "gdn+swiglu",
            table("attention_layer_norm|input_layernorm:mixer_norm")
            | table("feedforward_layer_norm|post_attention_layernorm:channel_norm")
            | below("mlp", "channel", GLU)
            | below("linear_attn", "mixer", GDN_APART),
        ),
        FULL: Kind(
            "attention+swiglu",
            table("post_attention_layernorm|feedforward_layer_norm:mixer_norm post_feedforward_layernorm:channel_norm")
            | below("mlp", "channel", GLU)
            | below("self_attn", "mixer", ATTENTION | QK_NORMS),
        ),
    },
    recut=tuple(f"linear_attn.{name}_conv1d.weight" for name in "qkv"),  # transformers saves equal thirds
)


def inner_of_lfm2(settings: Settings) -> Values:
    """Reads the width of LFM2's SwiGLU, which `block_auto_adjust_ff_dim` computes from another."""
    inner = settings.integer("block_ff_dim", settings.integer("intermediate_size", 12288))
    if settings.flag("block_auto_adjust_ff_dim", True):
        times, unit = settings.number("block_ffn_dim_multiplier", 1.0), settings.integer("block_multiple_of", 256)
        inner = unit * -(-int(times * int(2 * inner / 3)) // unit)
    return {"swiglu.inner": max(1, inner)}


def written_inner_of_lfm2(values: Values) -> Values:
    return {"intermediate_size": values["swiglu.inner"], "block_auto_adjust_ff_dim": False}


def listed(settings: Settings, layers: int) -> list[str]:
    chosen = settings.values.get("full_attn_idxs")
    return [FULL if not isinstance(chosen, list) or index in chosen else "conv" for index in range(layers)]


LFM2_BLOCK = table("operator_norm:mixer_norm ffn_norm:channel_norm") | below(
    "feed_forward", "channel", table("w1:gate_proj w3:up_proj w2:down_proj")
)
LFM2_ATTENTION = table(f"{QKV} out_proj q_layernorm:q_norm k_layernorm:k_norm")
LFM2 = Family(
    *("LFM2", "lfm2", "Lfm2ForCausalLM"),
    (
        *keys("hidden_size:d_model=2560 vocab_size:vocab_size=65536 norm_eps:norm_eps=1e-5"),
        *keys("conv_bias:short_conv.bias=false conv_L_cache:short_conv.conv_width=3"),
        Entry(inner_of_lfm2, written_inner_of_lfm2, "intermediate_size", ("swiglu.inner",)),
        *(*heads(32, 8), rope(theta=1000000.0), always(norm="rmsnorm", attention__qk_norm=True)),
    ),
    typed(32, listed, FULL, "conv"),
    {
        "conv": Kind("short_conv+swiglu", LFM2_BLOCK | below("conv", "mixer", SHORT_CONV)),
        FULL: Kind("attention+swiglu", LFM2_BLOCK | below("self_attn", "mixer", LFM2_ATTENTION)),
    },
    ends("model.embed_tokens", "model.embedding_norm|model.norm"),
)


def rotates(settings: Settings) -> bool:
    settings.only("position_embedding_type", None, "nope", "rope", why="Linnet does not have these positions")
    return settings.values.get("position_embedding_type") == "rope"


GRANITE_BLOCK = NORMS | below("shared_mlp", "channel", table("input_linear:gate_proj+up_proj output_linear:down_proj"))
GRANITE_EXPERTS = below(
    *("block_sparse_moe", "channel"),
    {
        "router.layer": "router",
        "input_linear": Joint("gate_proj up_proj", EXPERTS, (EXPERTS, -1, "d_model")),
        "output_linear": Joint("down_proj", experts=EXPERTS, across=True),
    },
)
GRANITE_EXPERTS |= below(
    *("shared_mlp", "channel"), table("input_linear:shared_gate_proj+shared_up_proj output_linear:shared_down_proj")
)
GRANITE = Family(
    *("Granite 4", "granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    (
        *keys("hidden_size:d_model=4096 vocab_size:vocab_size=32000 intermediate_size:moe.inner=11008"),
        *keys("shared_intermediate_size:swiglu.inner+moe.shared_inner=1024 num_experts_per_tok:moe.num_active=2"),
        *keys("rms_norm_eps:norm_eps+mamba2.norm_eps=1e-6 embedding_multiplier:embedding_scale=1.0"),
        *keys("residual_multiplier:residual_scale=1.0 attention_multiplier:attention.scale=1.0"),
        Entry(
            lambda settings: {"logit_scale": 1.0 / settings.number("logits_scaling", 1.0)},
            lambda values: {"logits_scaling": 1.0 / values["logit_scale"]},
            *("logits_scaling", ("logit_scale",)),
        ),
        *(*heads(32, None), *BIAS, channels(*AUTO, "", (128, "auto", 2, None)), *MAMBA_KEYS, *PROJ_BIAS, *PLAIN),
        optional_rope(rotates, {"position_embedding_type": "rope"}, {"position_embedding_type": "nope"}),
        experts("num_local_experts", 8),
    ),
    some_sparse(
        typed(32, lambda settings, layers: [LINEAR] * layers, LINEAR, FULL),
        lambda settings, layers: [count_experts(settings, "num_local_experts", 8) > 0] * layers,
        lambda sparse: {},
    ),
    with_experts(
        {
            LINEAR: Kind("mamba2+swiglu", GRANITE_BLOCK | below("mamba", "mixer", MAMBA2)),
            FULL: Kind("attention+swiglu", GRANITE_BLOCK | below("self_attn", "mixer", ATTENTION)),
        },
        GRANITE_EXPERTS,
    ),
)


def indexed(settings: Settings) -> list[str]:
    """Reads Bamba's kinds of blocks: attention in those of `attn_layer_indices`."""
    number, chosen = counted(32)(settings), settings.values.get("attn_layer_indices") or []
    if not isinstance(chosen, list) or any(type(item) is not int or not 0 <= item < number for item in chosen):
        problem = f"attn_layer_indices: must be a list of blocks from 0 to {number - 1} (given {chosen!r})"
        settings.problems.append(problem)
        chosen = []
    return [FULL if index in chosen else LINEAR for index in range(number)]


def written_indices(kinds: list[str]) -> Values:
    chosen = [index for index, kind in enumerate(kinds) if kind == FULL]
    return {"num_hidden_layers": len(kinds), "attn_layer_indices": chosen}


BAMBA = Family(
    *("Bamba", "bamba", "BambaForCausalLM"),
    (
        *keys("hidden_size:d_model=4096 vocab_size:vocab_size=128000 intermediate_size:swiglu.inner=14336"),
        *keys("rms_norm_eps:norm_eps+mamba2.norm_eps=1e-5 mlp_bias:swiglu.bias=false"),
        *(*heads(32, 8), *BIAS, rope(0.5), channels(*AUTO, "", (128, "auto", 2, None)), *MAMBA_KEYS, *PROJ_BIAS),
        only("partial_rotary_factor", 0.5, why="its own code reads this key in rope_parameters alone"),
        *PLAIN,
    ),
    Layers(indexed, written_indices),
    {
        LINEAR: Kind("mamba2+swiglu", FEED_FORWARD | below("mamba", "mixer", MAMBA2)),
        FULL: Kind("attention+swiglu", FEED_FORWARD | below("self_attn", "mixer", ATTENTION)),
    },
    ends("model.embed_tokens", "model.final_layernorm"),
)


def several(key: str, count: int, read: Callable[[list[float]], Values], write: Callable[[Values], Any]) -> Entry:
    """Returns the entry of a list of factors; null is all 1."""

    def factors(settings: Settings) -> Values:
        value = settings.values.get(key)
        listed = value if isinstance(value, list) else []
        fits = len(listed) == count and all(type(item) in (int, float) and 0 < item <= 1e6 for item in listed)
        if value is not None and not fits:
            settings.problems.append(f"{key}: must be {count} numbers above 0 (given {value!r})")
        return read([float(item) for item in listed] if fits else [1.0] * count)

    return Entry(factors, lambda values: {key: write(values)}, key)


def key_factor(settings: Settings) -> Values:
    """Reads the factor of keys, which the scale of the scores takes in."""
    times = settings.number("key_multiplier", 1.0)
    width = settings.integer("head_dim", max(1, settings.integer("hidden_size", 4096) // query(settings, 32)))
    return {"attention.scale": None if times == 1.0 else times * width**-0.5}


def written_key_factor(values: Values) -> Values:
    times = values["attention.scale"] * values["attention.head_dim"] ** 0.5
    return {"key_multiplier": 1.0 if math.isclose(times, 1.0, rel_tol=1e-12) else times}


def norm_before_gate(settings: Settings) -> Values:
    early, norm = settings.flag("mamba_norm_before_gate", True), settings.flag("mamba_rms_norm", False)
    return {"mamba2.norm_before_gate": early and norm}


FALCON = Family(
    *("Falcon-H1", "falcon_h1", "FalconH1ForCausalLM"),
    (
        *keys("hidden_size:d_model=4096 vocab_size:vocab_size=128000 intermediate_size:swiglu.inner=14336"),
        *keys(
            "rms_norm_eps:norm_eps+mamba2.norm_eps=1e-5 mlp_bias:swiglu.bias=false mamba_proj_bias:mamba2.bias=false"
        ),
        *keys("projectors_bias:mamba2.out_bias=false mamba_rms_norm:mamba2.norm=false"),
        *keys("embedding_multiplier:embedding_scale=1.0 lm_head_multiplier:logit_scale=1.0"),
        *keys("attention_in_multiplier:parallel.input_scales.attention=1.0"),
        *keys("ssm_in_multiplier:parallel.input_scales.mamba2=1.0"),
        *keys("attention_out_multiplier:parallel.output_scales.attention=1.0"),
        *keys("ssm_out_multiplier:parallel.output_scales.mamba2=1.0"),
        *(*heads(32, 8), *BIAS, rope(), channels(*AUTO, "mamba_d_ssm", (128, "auto", 2, 1024)), *MAMBA_KEYS, *PLAIN),
        Entry(norm_before_gate, lambda values: {"mamba_norm_before_gate": values["mamba2.norm_before_gate"]}),
        Entry(key_factor, written_key_factor, "key_multiplier", ("attention.scale",)),
        several(
            *("mlp_multipliers", 2),
            lambda value: {"swiglu.gate_scale": value[0], "swiglu.out_scale": value[1]},
            lambda values: [values["swiglu.gate_scale"], values["swiglu.out_scale"]],
        ),
        several(
            *("ssm_multipliers", 5),
            lambda value: {"mamba2.scales": None if value == [1.0] * 5 else value},
            lambda values: values["mamba2.scales"] or [1.0] * 5,
        ),
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
    ends("model.embed_tokens", "model.final_layernorm"),
)

CORRECTED = table("gate:router gate.e_score_correction_bias:correction")
CHOSEN = always(moe__score="sigmoid", moe__correction=True)  # as in DeepSeek-V3
PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
NEMOTRON_KINDS = {
    LINEAR: Kind("mamba2", table("norm:mixer_norm") | below("mixer", "mixer", MAMBA2)),
    FULL: Kind("attention", table("norm:mixer_norm") | below("mixer", "mixer", ATTENTION)),
    "mlp": Kind("mlp", table("norm:channel_norm") | below("mixer", "channel", table("up_proj down_proj"))),
    "moe": Kind(
        "moe",
        table("norm:channel_norm")
        | below(
            *("mixer", "channel"),
            CORRECTED
            | one_by_one("", "up_proj", "down_proj")
            | table("shared_experts.up_proj:shared_up_proj shared_experts.down_proj:shared_down_proj")
            | table("fc1_latent_proj:latent_down fc2_latent_proj:latent_up"),
        ),
    ),
}


def pattern(settings: Settings) -> list[str]:
    """Reads Nemotron-H's kinds of blocks, from a list or from a string of letters."""
    key, value = "layers_block_type", settings.values.get("layers_block_type", settings.values.get("layer_types"))
    if value is None:
        key, value = "hybrid_override_pattern", settings.values.get("hybrid_override_pattern", "ME*-")
    named = {**PATTERN, **LEGACY, **{kind: kind for kind in NEMOTRON_KINDS}}
    kinds = [named.get(str(item), "") for item in value] if isinstance(value, list | str) else []
    if not kinds or len(kinds) > LARGEST["layers"] or not set(kinds) <= set(NEMOTRON_KINDS):
        problem = f"{key}: must be blocks of Mamba-2, attention, MLP or experts (given {value!r})"
        settings.problems.append(problem)
        return ["mlp"]
    return kinds


def written_pattern(kinds: list[str]) -> Values:
    letters = {kind: letter for letter, kind in PATTERN.items()}
    text = "".join(letters[kind] for kind in kinds)
    return {"layers_block_type": kinds, "hybrid_override_pattern": text, "num_hidden_layers": len(kinds)}


def activation(settings: Settings) -> Values:
    known = {name: name for name in ("relu2", "relu", "silu", "gelu")}
    if "moe" in pattern(settings):
        settings.only("mlp_bias", False, why="Linnet's experts have no biases")
        del known["gelu"]  # that of experts is its tanh form
    return dict.fromkeys(("mlp.activation", "moe.activation"), settings.choice("mlp_hidden_act", "relu2", known))


def written_activation(values: Values) -> Values:
    return {"mlp_hidden_act": values.get("mlp.activation", values.get("moe.activation", "relu2"))}


def least_step(settings: Settings) -> Values:
    return {"mamba2.dt_limit": [settings.number("time_step_min", 0.001), LARGEST_STEP]}


NEMOTRON = Family(
    *("Nemotron-H", "nemotron_h", "NemotronHForCausalLM"),
    (
        *keys("hidden_size:d_model=4096 vocab_size:vocab_size=131072 intermediate_size:mlp.inner=21504"),
        *keys("layer_norm_epsilon:norm_eps+mamba2.norm_eps=1e-5 mlp_bias:mlp.bias=false n_groups:mamba2.num_groups=8"),
        *keys("ssm_state_size:mamba2.state=128 conv_kernel:mamba2.conv_width=4 use_conv_bias:mamba2.conv_bias=true"),
        *keys("use_bias:mamba2.bias+mamba2.out_bias=false"),
        *(*heads(32, 8, 128), channels("mamba_num_heads", "mamba_head_dim", "", "", (128, 64, 0, None))),
        Entry(activation, written_activation),
        *keys(
            "n_routed_experts:moe.num_experts=8 num_experts_per_tok:moe.num_active=2 norm_topk_prob:moe.normalise=true"
        ),
        *keys("moe_intermediate_size:moe.inner=7688 moe_shared_expert_intermediate_size:moe.shared_inner=7688"),
        *keys("routed_scaling_factor:moe.weight_scale=1.0 n_group:moe.groups=1 topk_group:moe.active_groups=1"),
        *(CHOSEN, always(moe__gated=False)),
        optional("moe_latent_size", "moe.latent"),
        Entry(
            least_step,
            lambda values: {"time_step_min": (values.get("mamba2.dt_limit") or [0.001])[0]},
            *("time_step_min", ("mamba2.dt_limit",)),
        ),
        only("mamba_hidden_act", "silu", "swish", why="Linnet's Mamba-2 has SiLU"),
        only("sliding_window", None, why="Nemotron-H's own code has no windows"),
        always(norm="rmsnorm", attention__rope=False),
    ),
    Layers(pattern, written_pattern),
    NEMOTRON_KINDS,
    ends("backbone.embeddings", "backbone.norm_f"),
    "backbone.layers.{}",
    ("backbone.", "model."),
    skipped={r"mtp\..*": "multi-token prediction"},
    stores_head=True,
)

SSM_KEYS = (
    *keys("state_size:mamba2.state=128 conv_kernel:mamba2.conv_width=4 use_conv_bias:mamba2.conv_bias=true"),
    *keys("use_bias:mamba2.bias+mamba2.out_bias=false"),
    *PLAIN,
)
MAMBA = Family(
    *("Mamba-2", "mamba2", "Mamba2ForCausalLM"),
    (
        *keys("hidden_size:d_model=4096 vocab_size:vocab_size=32768 layer_norm_epsilon:norm_eps+mamba2.norm_eps=1e-5"),
        *keys("n_groups:mamba2.num_groups=8"),
        *(channels("num_heads", "head_dim", "expand", "", (128, 64, 2, None)), *SSM_KEYS, limits("time_step_limit")),
    ),
    one_kind("mamba2", 64),
    {"mamba2": Kind("mamba2", table("norm:mixer_norm") | below("mixer", "mixer", MAMBA2))},
    ends("backbone.embeddings|backbone.embedding", "backbone.norm_f"),
    "backbone.layers.{}",
)
FLA_MAMBA = replace(
    MAMBA,
    title="Mamba-2 of flash-linear-attention",
    entries=(
        *keys("hidden_size:d_model=2048 vocab_size:vocab_size=32000 norm_eps:norm_eps+mamba2.norm_eps=1e-5"),
        *keys("expand:mamba2.expand=2 head_dim:mamba2.head_dim=64 norm_before_gate:mamba2.norm_before_gate=false"),
        *(*SSM_KEYS, limits("dt_limit", "time_step_limit")),
        only("n_groups", 1, why="the norm of its layer runs over all groups, and Linnet's over each"),
        only("rmsnorm", True, why="its layer is read with its norm"),
        only("D_has_hdim", False, why="Linnet's Mamba-2 has one D per head"),
    ),
    layers=one_kind("mamba2", 48),
)


def read_mamba2(settings: Settings) -> Plan:
    """Returns the plan of a Mamba-2 of transformers, or of flash-linear-attention, which has the same `model_type`."""
    theirs = "norm_eps" in settings.values and "layer_norm_epsilon" not in settings.values
    return (FLA_MAMBA if theirs else MAMBA).read(settings)


SSM = {"d_state": "state_size", "d_conv": "conv_kernel", "expand": "expand", "headdim": "head_dim"}
SSM |= {"ngroups": "n_groups", "bias": "use_bias", "conv_bias": "use_conv_bias", "dt_limit": "time_step_limit"}
SSM_FIXED = {"layer": "Mamba2", "rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False, "d_ssm": None}
SSM_INERT = {"chunk_size", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "use_mem_eff_path", "conv_init"}


def read_mamba_ssm(settings: Settings) -> Plan:
    """Returns the plan of a Mamba-2 as state-spaces' own package saves it: other keys, without a `model_type`."""
    value = settings.values.get("ssm_cfg")
    inner = Settings({"layer": "Mamba1", **(value if isinstance(value, dict) else {})})
    for key, value in SSM_FIXED.items():
        inner.only(key, value, why="Linnet reads state-spaces' Mamba-2 without it")
    unknown = sorted(inner.values.keys() - SSM.keys() - SSM_FIXED.keys() - SSM_INERT)
    inner.problems += [f"{key}: Linnet does not know this key" for key in unknown]
    settings.problems += [f"ssm_cfg.{problem}" for problem in inner.problems]
    for key, value in (("rms_norm", True), ("d_intermediate", 0), ("attn_layer_idx", [])):
        settings.only(key, value, why="Linnet reads blocks of Mamba-2 alone, with RMSNorm")
    width, unit = settings.integer("d_model", 2560), settings.integer("pad_vocab_size_multiple", 8)
    vocabulary = unit * -(-settings.integer("vocab_size", 50277, LARGEST["vocabulary"]) // unit)
    values = {"expand": 2, "head_dim": 64, "n_groups": 1, "hidden_size": width, "vocab_size": vocabulary}
    values |= {SSM[key]: value for key, value in inner.values.items() if key in SSM}
    values["num_hidden_layers"] = settings.integer("n_layer", 64, LARGEST["layers"])
    if all(type(values[key]) is int and values[key] > 0 for key in ("expand", "head_dim")):
        values["num_heads"] = max(1, values["expand"] * width // values["head_dim"])
    return MAMBA.read(replace(settings, values=values))
