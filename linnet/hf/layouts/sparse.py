"""Families whose feed-forward layers are mixtures of experts: Kimi Linear, Ling 3, MiniMax-01 and Jamba.

Those that are dense as well (Qwen3-Next, Granite 4, Nemotron-H) stand in `hybrids`.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from linnet.hf.layouts.base import Plan, Settings
from linnet.hf.layouts.family import (
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
    keys,
    only,
    table,
    typed,
)
from linnet.hf.layouts.hybrids import (
    ATTENTION,
    CHOSEN,
    CORRECTED,
    DECAY,
    DELTA,
    EXPERTS,
    FEED_FORWARD,
    FULL,
    GLU,
    LINEAR,
    LLAMA_BLOCK,
    NORMS,
    OWN_EXPERTS,
    PLAIN,
    QKV,
    SILU,
    bound,
    count_experts,
    every,
    experts,
    heads,
    one_by_one,
    optional,
    query,
    rope,
    some_sparse,
    with_experts,
)
from linnet.hf.layouts.uniform import MAMBA1

MLA = table("q_proj q_a_proj:q_down q_a_layernorm:q_norm kv_b_proj:kv_up o_proj:out_proj")
MLA |= table("kv_a_proj_with_mqa:kv_down kv_a_layernorm:kv_norm") | {"q_b_proj": Joint("q_proj", where="mla.q_rank")}
KDA_HEADS = {"A_log": Joint("A_log", view=(1, 1, -1, 1))}
SHARED = {f"shared_experts.{name}": f"shared_{name}" for name in GLU}


def all_heads(settings: Settings) -> Values:
    settings.only("num_key_value_heads", query(settings, 32), why="all heads of latent attention share one latent")
    return {}


def written_all_heads(values: Values) -> Values:
    return {"num_key_value_heads": values["mla.num_heads"]} if "mla.num_heads" in values else {}


LATENT_KEYS = (
    *keys("num_attention_heads:mla.num_heads=32 kv_lora_rank:mla.kv_rank=512 qk_nope_head_dim:mla.nope_dim=128"),
    *keys("qk_rope_head_dim:mla.rope_dim=64 v_head_dim:mla.v_dim=128 attention_bias:mla.bias=false"),
    Entry(all_heads, written_all_heads),
    always(mla__norm_eps=1e-6),
)


def corrected(inner: int, count: int, scale: float, groups: int, active: int) -> tuple[Entry, ...]:
    """Returns the entries of experts as in DeepSeek-V3, with the defaults of the keys that differ."""

    def read(settings: Settings) -> Values:  # several shared experts are one
        key = "num_shared_experts" if "num_shared_experts" in settings.values else "n_shared_experts"
        return {"moe.shared_inner": settings.integer("moe_intermediate_size", inner) * settings.integer(key, 1, 1 << 8)}

    def write(values: Values) -> Values:
        return {"num_shared_experts": values["moe.shared_inner"] // values["moe.inner"]} if EXPERTS in values else {}

    return (
        *keys(f"moe_intermediate_size:moe.inner={inner} num_experts|num_local_experts:moe.num_experts={count}"),
        *keys(
            f"num_experts_per_token|num_experts_per_tok:moe.num_active=8 routed_scaling_factor:moe.weight_scale={scale}"
        ),
        *keys(f"num_expert_group|n_group:moe.groups={groups} topk_group:moe.active_groups={active}"),
        *keys("moe_renormalize|norm_topk_prob:moe.normalise=true"),
        *(SILU, CHOSEN, always(norm="rmsnorm"), Entry(read, write)),
    )


def sparse_after(default: int) -> Callable[[Settings, int], list[bool]]:
    """Returns which blocks have experts: as `mlp_layer_types` lists them, or all after `first_k_dense_replace`."""

    def read(settings: Settings, layers: int) -> list[bool]:
        listed, dense = settings.values.get("mlp_layer_types"), settings.values.get("first_k_dense_replace", default)
        kinds = listed if isinstance(listed, list) else []
        if len(kinds) == layers and all(kind in ("dense", "sparse") for kind in kinds):
            return [kind == "sparse" for kind in kinds]
        if listed is not None:
            problem = f"mlp_layer_types: must have dense or sparse for each of {layers} layers (given {listed!r})"
            settings.problems.append(problem)
        if type(dense) is not int or dense < 0:
            settings.problems.append(f"first_k_dense_replace: must be a whole number from 0 on (given {dense!r})")
            dense = 0
        return [index >= dense for index in range(layers)]

    return read


def written_sparse(sparse: list[bool]) -> Values:
    return {"mlp_layer_types": ["sparse" if has else "dense" for has in sparse]}


def every_fourth(settings: Settings, layers: int) -> list[str]:
    """Returns Kimi's kinds of blocks, as its own lists say, which count from 1."""
    full, linear = (settings.values.get(key) for key in ("full_attn_layers", "kda_layers"))
    if full is None or linear is None:
        return [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]
    both = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    if any(type(index) is not int for index in both) or sorted(both) != list(range(1, layers + 1)):
        problem = f"linear_attn_config: full_attn_layers and kda_layers must be the numbers from 1 to {layers}"
        settings.problems.append(f"{problem} (given {full!r} and {linear!r})")
        return [LINEAR] * layers
    return [FULL if index + 1 in full else LINEAR for index in range(layers)]


NESTED = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "kda_layers": "kda_layers"}
NESTED |= {"short_conv_kernel_size": "linear_conv_kernel_dim", "full_attn_layers": "full_attn_layers"}


def read_kimi(settings: Settings) -> Plan:
    """Returns the plan of Kimi Linear, of which a released config.json has the keys of KDA in an object."""
    nested = settings.values.get("linear_attn_config")
    if nested is None:
        return KIMI.read(settings)
    if not isinstance(nested, dict):
        settings.problems.append(f"linear_attn_config: must be an object (given {nested!r})")
        nested = {}
    outer = {name: nested[key] for key, name in NESTED.items() if key in nested}
    return KIMI.read(replace(settings, values={**settings.values, **outer}))


KIMI_BLOCK = NORMS | {f"mlp.{name}|block_sparse_moe.{name}": f"channel.{name}" for name in GLU}
KIMI_DELTA = (
    DELTA | KDA_HEADS | table("dt_bias f_a_proj:decay_down f_b_proj:decay_up g_a_proj:gate_down g_b_proj:gate_up")
)
KIMI = Family(
    *("Kimi Linear", "kimi_linear", "KimiLinearForCausalLM"),
    (
        *keys("hidden_size:d_model=2304 vocab_size:vocab_size=163840 intermediate_size:swiglu.inner=9216"),
        *keys("rms_norm_eps:norm_eps+kda.norm_eps=1e-5 linear_num_heads:kda.num_heads=32"),
        *(*LATENT_KEYS, *corrected(1024, 256, 2.446, 1, 1)),
        *keys("linear_head_dim:kda.head_dim=128 linear_conv_kernel_dim:kda.conv_width=4"),
        optional("q_lora_rank", "mla.q_rank"),
        always(mla__rope=False, kda__gate_bias=False),
        only("mla_use_nope", True, why="its own code has attention without positions"),
        only("moe_router_activation_func", "sigmoid", why="its own code has a sigmoid"),
    ),
    some_sparse(typed(27, every_fourth, LINEAR, FULL), sparse_after(1), written_sparse),
    with_experts(
        {
            LINEAR: Kind("kda+swiglu", KIMI_BLOCK | below("self_attn", "mixer", KIMI_DELTA)),
            FULL: Kind("mla+swiglu", KIMI_BLOCK | below("self_attn", "mixer", MLA)),
        },
        below("block_sparse_moe", "channel", CORRECTED | SHARED | one_by_one("w1", "w3", "w2")),
    ),
    skipped={r"(model\.)?mtp\..*": "multi-token prediction"},
    stores_head=True,
)


def scale_of_yarn(settings: Settings) -> Values:
    """Reads the factor of scores that YaRN's `mscale_all_dim` gives."""
    width = settings.integer("qk_nope_head_dim", 128) + settings.integer("qk_rope_head_dim", 64)
    scaling = settings.values.get("rope_parameters") or settings.values.get("rope_scaling")
    parameters = Settings(scaling if isinstance(scaling, dict) else {})
    if not parameters.values.get("mscale_all_dim"):
        return {"mla.scale": None}
    factor = max(1.0, parameters.number("factor", 1.0))
    return {"mla.scale": (0.1 * parameters.number("mscale_all_dim", None) * math.log(factor) + 1.0) ** 2 * width**-0.5}


def written_scale_of_yarn(values: Values) -> Values:
    scaling = values.get("mla.rope_scaling")
    times = values.get("mla.scale", 1.0) * (values.get("mla.nope_dim", 1) + values.get("mla.rope_dim", 0)) ** 0.5
    if not scaling or scaling.kind != "yarn" or math.isclose(times, 1.0, rel_tol=1e-12) or scaling.factor <= 1.0:
        return {}
    return {"rope_parameters": {"mscale_all_dim": 10.0 * (times**0.5 - 1.0) / math.log(scaling.factor)}}


BAILING_DELTA = DELTA | DECAY | table("f_proj:decay_proj g_proj:gate_proj dense:out_proj")
BAILING_MLA = MLA | table("g_proj:gate_proj dense:out_proj")
BAILING = Family(
    *("Ling 3", "bailing_hybrid", "BailingHybridForCausalLM"),
    (
        *keys("hidden_size:d_model=2560 vocab_size:vocab_size=157184 intermediate_size:swiglu.inner=6144"),
        *keys("rms_norm_eps:norm_eps+kda.norm_eps=1e-6 linear_head_dim|head_dim:kda.head_dim=128"),
        *keys("linear_conv_kernel_dim|short_conv_kernel_size:kda.conv_width=4"),
        entry("integer", "linear_num_heads", "kda.num_heads", default=lambda settings: query(settings, 32)),
        *(*LATENT_KEYS, *corrected(768, 512, 2.5, 8, 4), rope(theta=6000000.0, layer="mla")),
        *(bound("kda_lower_bound", -5.0, "kda_safe_gate"), Entry(scale_of_yarn, written_scale_of_yarn)),
        always(mla__rope_interleaved=True, mla__gate=True, mla__gate_per_head=True),
        always(kda__decay="full", kda__gate="full"),
    ),
    some_sparse(typed(42, every("layer_group_size", 6), LINEAR, FULL), sparse_after(2), written_sparse),
    with_experts(
        {
            LINEAR: Kind("kda+swiglu", LLAMA_BLOCK | below("attention", "mixer", BAILING_DELTA)),
            FULL: Kind("mla+swiglu", LLAMA_BLOCK | below("attention", "mixer", BAILING_MLA)),
        },
        below("mlp", "channel", table("gate:router gate.expert_bias:correction") | SHARED | OWN_EXPERTS),
    ),
    ends("model.word_embeddings|model.embed_tokens", "model.norm"),
    skipped={r"model\.layers\.{count}\..*": "multi-token prediction"},
    stores_head=True,
)

ALPHA, BETA = (
    [f"{name}_{letter}_factor" for name in ("full_attn", "linear_attn", "mlp")] for letter in ("alpha", "beta")
)


def factors_of_minimax(settings: Settings) -> Values:
    """Reads the factors of the normed stream (alpha) and of what a layer adds (beta)."""
    values = {}
    for path, names in (("residual_norm", ALPHA), ("residual_scale", BETA)):
        first, *others = names
        values[path] = settings.number(first, 1.0)
        for key in others:
            if settings.number(key, 1.0) != values[path]:
                settings.problems.append(f"{key}: Linnet has one such factor for all layers, that of {first}")
    return values


def written_factors_of_minimax(values: Values) -> Values:
    return dict.fromkeys(ALPHA, values["residual_norm"] or 1.0) | dict.fromkeys(BETA, values["residual_scale"])


LIGHTNING = table("norm:output.norm output_gate:output.gate_up out_proj:output.out_proj")
LIGHTNING |= {"qkv_proj": Joint(QKV, "tnl.num_heads")}
MINIMAX_BLOCK = NORMS | below("block_sparse_moe", "channel", table("gate:router") | one_by_one("w1", "w3", "w2"))
MINIMAX = Family(
    *("MiniMax-01", "minimax", "MiniMaxForCausalLM"),
    (
        *keys("hidden_size:d_model=4096 vocab_size:vocab_size=32000 intermediate_size:moe.inner=14336"),
        *keys("rms_norm_eps:norm_eps=1e-5 num_local_experts|num_experts:moe.num_experts=8"),
        *keys("num_experts_per_tok:moe.num_active=2"),
        *(*heads(32, 8, also="tnl"), rope(theta=1000000.0), optional("sliding_window", "attention.window"), *PLAIN),
        Entry(factors_of_minimax, written_factors_of_minimax),
        always(tnl__norm="rmsnorm", tnl__norm_eps=1e-6, tnl__gate="full", tnl__v_activation="silu"),
        always(tnl__slopes="geometric"),
    ),
    typed(32, lambda settings, layers: [(FULL, LINEAR)[index % 2] for index in range(layers)], LINEAR, FULL),
    {
        LINEAR: Kind("tnl+moe", MINIMAX_BLOCK | below("self_attn", "mixer", LIGHTNING)),
        FULL: Kind("attention+moe", MINIMAX_BLOCK | below("self_attn", "mixer", ATTENTION)),
    },
    ignored=(r"model\.layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",),
)


def periodic(name: str, period: int, offset: int) -> Callable[[Settings, int], list[bool]]:
    """Returns which blocks are every so many ones, from an offset on; with the defaults of the two keys."""

    def read(settings: Settings, layers: int) -> list[bool]:
        step, start = settings.integer(f"{name}_period", period), settings.values.get(f"{name}_offset", offset)
        if type(start) is not int or not 0 <= start < step:
            problem = f"{name}_offset: must be a whole number from 0 on, below {name}_period {step} (given {start!r})"
            settings.problems.append(problem)
        return [index % step == start for index in range(layers)]

    return read


def written_periodic(name: str, chosen: list[bool]) -> Values:
    """Returns the keys of blocks that are every so many; of others, keys that are read as another model."""
    places = [index for index, has in enumerate(chosen) if has] or [len(chosen)]
    step = places[1] - places[0] if len(places) > 1 else len(chosen) + 1
    return {f"{name}_period": step, f"{name}_offset": places[0] % step}


def blocks_of_jamba(settings: Settings) -> list[str]:
    attention = periodic("attn_layer", 8, 4)(settings, counted(32)(settings))
    return [FULL if has else LINEAR for has in attention]


def written_blocks_of_jamba(kinds: list[str]) -> Values:
    return {"num_hidden_layers": len(kinds)} | written_periodic("attn_layer", [kind == FULL for kind in kinds])


def sparse_of_jamba(settings: Settings, layers: int) -> list[bool]:
    several = count_experts(settings, "num_experts", 16) > 1
    return [has and several for has in periodic("expert_layer", 2, 1)(settings, layers)]


JAMBA_MIXER = MAMBA1 | table("dt_layernorm:dt_norm b_layernorm:B_norm c_layernorm:C_norm")
JAMBA = Family(
    *("Jamba", "jamba", "JambaForCausalLM"),
    (
        *keys("hidden_size:d_model=4096 vocab_size:vocab_size=65536 intermediate_size:swiglu.inner+moe.inner=14336"),
        *keys("rms_norm_eps:norm_eps=1e-6 num_experts_per_tok:moe.num_active=2 mamba_d_state:mamba.state=16"),
        *keys("mamba_d_conv:mamba.conv_width=4 mamba_expand:mamba.expand=2 mamba_conv_bias:mamba.conv_bias=true"),
        *(
            optional("mamba_dt_rank", "mamba.dt_rank", "auto"),
            *heads(32, 8),
            experts("num_experts", 16),
            *PLAIN,
        ),
        only("mamba_proj_bias", False, why="Linnet's Mamba has no biases in its projections"),
        always(attention__rope=False, mamba__norms=True, moe__normalise=False),
    ),
    some_sparse(
        Layers(blocks_of_jamba, written_blocks_of_jamba),
        *(sparse_of_jamba, lambda sparse: written_periodic("expert_layer", sparse)),
    ),
    with_experts(
        {
            LINEAR: Kind("mamba+swiglu", FEED_FORWARD | below("mamba", "mixer", JAMBA_MIXER)),
            FULL: Kind("attention+swiglu", FEED_FORWARD | below("self_attn", "mixer", ATTENTION)),
        },
        below("feed_forward", "channel", table("router") | OWN_EXPERTS),
    ),
    ends("model.embed_tokens", "model.final_layernorm"),
)
