"""Models whose blocks are alike: Llama and its near relatives, Mamba, RWKV-7 and TransNormerLLM.

Llama (Touvron et al. 2023, arXiv:2302.13971), Mistral, Qwen2 and Qwen3, as transformers saves them, are pre-norm stacks
of softmax attention with grouped queries and RoPE, and SwiGLU. Mistral (arXiv:2310.06825) adds a sliding window, Qwen2
(arXiv:2407.10671) biases of q, k and v, and Qwen3 (arXiv:2505.09388) norms of q and k and heads of a width of their
own. Both Qwens may have windows in some layers.
"""

from collections.abc import Callable
from dataclasses import replace

from linnet.hf.layouts.base import LARGEST, Plan, Settings
from linnet.hf.layouts.family import (
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
)
from linnet.hf.layouts.hybrids import ATTENTION, BIAS, FULL, LLAMA_BLOCK, PLAIN, QK_NORMS, heads, optional, rope

SLIDING = "sliding_attention"
LLAMA_NAMES = LLAMA_BLOCK | below("self_attn", "mixer", ATTENTION | QK_NORMS)
SHAPE = keys("hidden_size:d_model=4096 rms_norm_eps:norm_eps=1e-6")
QWEN = keys("vocab_size:vocab_size=151936 intermediate_size:swiglu.inner=22016")


def window(settings: Settings, optional: bool) -> int:
    """Returns the tokens that a layer with a window sees; 0 for none. Qwens have an `optional` one."""
    if optional and not settings.flag("use_sliding_window", False):
        return 0
    value = settings.values.get("sliding_window", 4096)  # null means none; a missing key, the default of transformers
    if value is not None and (type(value) is not int or not 1 <= value <= LARGEST["width"]):
        limit = f"must be a whole number from 1 to {LARGEST['width']}, or null"
        settings.problems.append(f"sliding_window: {limit} (given {value!r})")
        return 0
    return value or 0


def windows(optional: bool) -> tuple[Entry, Layers]:
    """Returns the entry of the window and the list of blocks, of which `layer_types` or a first layer have it."""

    def read(settings: Settings) -> list[str]:
        layers, first = counted(32)(settings), settings.values.get("max_window_layers", 28) if optional else 0
        kinds = settings.values.get("layer_types")
        if kinds is None:
            kinds = [SLIDING if index >= (first if type(first) is int else 0) else FULL for index in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            limit = f"must have full_attention or sliding_attention for each of {layers} layers"
            settings.problems.append(f"layer_types: {limit} (given {kinds!r})")
            kinds = [FULL] * layers
        return kinds if window(settings, optional) else [FULL] * layers

    def write(kinds: list[str]) -> Values:
        return {"num_hidden_layers": len(kinds), "layer_types": kinds, "use_sliding_window": SLIDING in kinds}

    size = Entry(
        lambda settings: {"attention.window": window(settings, optional)},
        lambda values: {"sliding_window": values["attention.window"] or None},
        *("sliding_window", ("attention.window",)),
    )
    return size, Layers(read, write)


LLAMA = Family(
    *("Llama", "llama", "LlamaForCausalLM"),
    (
        *keys("vocab_size:vocab_size=32000 intermediate_size:swiglu.inner=11008 mlp_bias:swiglu.bias=false"),
        *(*SHAPE, *heads(32, None), *BIAS, rope(), *PLAIN),
    ),
    one_kind(FULL, 32),
    {FULL: Kind("attention+swiglu", LLAMA_NAMES)},
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
SOMETIMES = LLAMA.kinds | {SLIDING: Kind("attention+swiglu", LLAMA_NAMES, "attention.window")}
WINDOW, LISTED = windows(optional=False)
MISTRAL = replace(
    LLAMA,
    title="Mistral",
    entries=(
        *keys("vocab_size:vocab_size=32000 intermediate_size:swiglu.inner=14336"),
        *(*SHAPE, *heads(32, 8), rope(), WINDOW, *PLAIN),
    ),
    layers=LISTED,
    kinds=SOMETIMES,
)
WINDOW, LISTED = windows(optional=True)
QWEN2 = replace(
    LLAMA,
    **{"title": "Qwen2", "model_type": "qwen2", "architecture": "Qwen2ForCausalLM"},
    entries=(*QWEN, *SHAPE, *heads(32, 32), rope(), WINDOW, *PLAIN, always(bias="qkv")),
    layers=LISTED,
    kinds=SOMETIMES,
)
QWEN3 = replace(
    QWEN2,
    **{"title": "Qwen3", "model_type": "qwen3", "architecture": "Qwen3ForCausalLM"},
    entries=(*QWEN, *SHAPE, *heads(32, 32, 128), *BIAS, rope(), WINDOW, *PLAIN, always(attention__qk_norm=True)),
)


# Mamba as transformers and flash-linear-attention save it, one layout with two sets of names in config.json.

MAMBA1 = table("in_proj:in_proj+gate_proj conv1d:conv A_log D:skip x_proj:select_proj out_proj")
MAMBA1 |= table("dt_proj.weight:dt_weight dt_proj.bias:dt_bias")


def mamba_inner(settings: Settings) -> Values:
    wide = settings.integer("expand", 2, largest=64) * settings.integer("hidden_size", 768)
    settings.only("intermediate_size", wide, why="Linnet's Mamba has the inner width expand * width")
    return {}


KEYS = (
    *keys("expand:mamba.expand=2 state_size:mamba.state=16 conv_kernel:mamba.conv_width=4"),
    *keys("use_conv_bias:mamba.conv_bias=true"),
    only("use_bias", False, why="Linnet's Mamba has no biases in its projections"),
    *PLAIN,
)
MAMBA = Family(
    *("Mamba", "mamba", "MambaForCausalLM"),
    (
        *keys("hidden_size:d_model=768 vocab_size:vocab_size=50280 layer_norm_epsilon:norm_eps=1e-5"),
        *(optional("time_step_rank", "mamba.dt_rank", "auto"), Entry(mamba_inner), *KEYS),
    ),
    one_kind("mamba", 32),
    {"mamba": Kind("mamba", table("norm:mixer_norm") | below("mixer", "mixer", MAMBA1))},
    ends("backbone.embeddings", "backbone.norm_f"),
    "backbone.layers.{}",
)
MAMBA_FLA = replace(
    MAMBA,
    entries=(
        *keys("hidden_size:d_model=2048 vocab_size:vocab_size=32000 norm_eps:norm_eps=1e-5"),
        *(optional("dt_rank", "mamba.dt_rank", "auto"), Entry(mamba_inner), *KEYS),
    ),
    layers=one_kind("mamba", 48),
)


def read_mamba(settings: Settings) -> Plan:
    native = "time_step_rank" in settings.values or "layer_norm_epsilon" in settings.values  # the names of transformers
    return (MAMBA if native else MAMBA_FLA).read(settings)


# RWKV-7 as flash-linear-attention saves it, and with the names of its author's files.
#
# The author publishes .pth files without a config.json; saved as safetensors, the shapes of their tensors say all that
# it would. What a config.json leaves out is read from the shapes for both.

ROW = (1, 1, -1)
SHARES = {f"x_{name}": Joint(f"x_{name}", view=ROW) for name in "rwkvag"}
HEADS = {"r_k": Joint("r_k", view=("rwkv7.num_heads", -1))}
NORM_EPS = 1e-5
LOW = (("w", "decay", "w0"), ("a", "rate", "a0"), ("v", "value", "v0"), ("g", "gate", "none"))

FLA_MIXER = {**SHARES, **HEADS, **table("k_k k_a r_proj k_proj v_proj o_proj:out_proj")}
FLA_MIXER |= table("g_norm.weight:norm_weight g_norm.bias:norm_bias")
OWN_MIXER = {**SHARES, **HEADS, **{name: Joint(name, view=ROW) for name in ("k_k", "k_a", "w0", "a0", "v0")}}
OWN_MIXER |= table("receptance:r_proj key:k_proj value:v_proj output:out_proj")
OWN_MIXER |= table("ln_x.weight:norm_weight ln_x.bias:norm_bias")
for letter, rank, shift in LOW:
    lora = f"{letter}_lora.lora"
    FLA_MIXER |= table(f"{lora}.0:{rank}.down {lora}.2.weight:{rank}.up.weight {lora}.2.bias:{shift}")
    OWN_MIXER[f"{letter}1"] = Joint(f"{rank}.down.weight", transposed=True)
    OWN_MIXER[f"{letter}2"] = Joint(f"{rank}.up.weight", transposed=True)
FEED_FORWARD = table("key:up_proj value:down_proj")


def measured(tensor: str, axis: int, default: int) -> Callable[[Settings], int]:
    """Returns a function that reads a number from the shape of a tensor, or returns a default without it."""

    def read(settings: Settings) -> int:
        shape = settings.shapes.get(tensor, ())
        return shape[axis] if len(shape) > axis else default

    return read


def blocks(norm: str) -> Layers:
    """Returns the list of blocks, as many as there are norms if config.json has no number of them."""

    def read(settings: Settings) -> list[str]:
        number = next((index for index in range(1 << 10) if norm.format(index) not in settings.shapes), 0)
        return ["rwkv7"] * settings.integer("num_hidden_layers", number or 24, 1 << 10)

    return Layers(read, lambda kinds: {"num_hidden_layers": len(kinds)})


def rwkv_heads(count: Callable[[Settings], int]) -> Entry:
    """Returns the entry of the heads, by their width or, without it, their number."""

    def read(settings: Settings) -> Values:
        width = settings.integer("hidden_size", settings.shapes.get("emb.weight", (0, 2048))[-1])
        number = settings.integer("num_heads", count(settings) or max(1, width // 64))
        if settings.values.get("head_dim") is not None:
            head = settings.integer("head_dim", None)
            number = max(1, width // head)
            if number * head != width:
                settings.problems.append(f"head_dim: {head} does not divide hidden_size {width}")
        return {"rwkv7.num_heads": number}

    def write(values: Values) -> Values:
        number = values["rwkv7.num_heads"]
        return {"head_dim": values["d_model"] // number, "num_heads": number}

    return Entry(read, write, "head_dim", ("rwkv7.num_heads",))


def entries(embedding: str, layer: str, rank: str, axis: int, inner: str) -> tuple[Entry, ...]:
    """Returns the entries by the names of tensors whose shapes say what config.json may leave out.

    Args:
        layer, rank, axis: prefix of a mixer, the end of the name of a low rank's first factor, and its axis.
    """
    width = measured(embedding, 1, 2048)

    def wide(settings: Settings) -> int:
        times = settings.integer("hidden_ratio", 4)
        return measured(inner, 0, 32 * -(-settings.integer("hidden_size", width(settings)) * times // 32))(settings)

    def low(key: str, path: str, letter: str, default: int) -> Entry:
        tensor = f"{layer.format(int(letter == 'v'))}.{letter}{rank}"  # the first layer has no share of values
        return entry("integer", f"{key}_low_rank_dim", f"rwkv7.{path}_rank", default=measured(tensor, axis, default))

    return (
        entry("integer", "hidden_size", "d_model", default=width),
        entry("integer", "vocab_size", "vocab_size", default=measured(embedding, 0, 32000), largest=1 << 24),
        rwkv_heads(measured(f"{layer.format(0)}.r_k", 0, 0)),
        entry("integer", "intermediate_size", "rwkv.inner", default=wide),
        *(low("decay", "decay", "w", 64), low("gate", "gate", "g", 128)),
        *(low("a", "rate", "a", 64), low("v", "value", "v", 16)),
        only("norm_eps", NORM_EPS, why="the norm inside Linnet's rwkv7 has this epsilon per channel of a head"),
        only("hidden_act", "sqrelu", why="Linnet's rwkv squares a relu"),
        only("norm_first", True, why="Linnet's model has a norm of the embedding"),
        only("norm_bias", True, why="Linnet's LayerNorms have biases"),
        only("attn", None, why="Linnet reads RWKV-7 without attention layers in between"),
        always(norm="layernorm", norm_eps=NORM_EPS, embedding_norm=True),
    )


def kinds(norms: str, mixer: str, names: Names, channel: str, shifted: Joint) -> dict[str, Kind]:
    inside = below(mixer, "mixer", names) | below(channel, "channel", FEED_FORWARD | {"x_k": shifted})
    return {"rwkv7": Kind("rwkv7+rwkv", table(norms) | inside)}


FIRST = "model.layers.0"
RWKV_FLA = Family(
    *("RWKV-7 of flash-linear-attention", "rwkv7", "RWKV7ForCausalLM"),
    entries(
        "model.embeddings.weight", "model.layers.{}.attn", "_lora.lora.0.weight", 0, "model.layers.0.ffn.key.weight"
    ),
    blocks("model.layers.{}.attn_norm.weight"),
    kinds("attn_norm:mixer_norm ffn_norm:channel_norm", "attn", FLA_MIXER, "ffn", Joint("x_k")),
    ends("model.embeddings", "model.norm") | {f"{FIRST}.pre_norm": "backbone.input_norm"},
)
RWKV_OWN = Family(
    *("RWKV-7 with its author's names", "rwkv7", ""),
    entries("emb.weight", "blocks.{}.att", "1", 1, "blocks.0.ffn.key.weight"),
    blocks("blocks.{}.ln1.weight"),
    kinds("ln1:mixer_norm ln2:channel_norm", "att", OWN_MIXER, "ffn", Joint("x_k", view=ROW)),
    ends("emb", "ln_out", "head") | {"blocks.0.ln0": "backbone.input_norm"},
    "blocks.{}",
    ignored=(r"blocks\.0\.att\.v[012]",),  # the first layer of some files has them, and its values are v_first
    stores_head=True,
)


# TransNormerLLM as its authors released it in 385M, 1B and 7B (paper 001, section 4): TNL v1.
#
# One projection gives queries, keys, values and the output gate, in this order. Norms have no gain, the slopes are
# those of ALiBi, later layers decay more slowly, and embeddings are multiplied by sqrt(d). Names and shapes are those
# of the modelling file that is released with the weights. The cache of that file has one position for all sequences
# and does not reset it before a second prompt; Linnet stores positions in the state.

TRANSNORMER_NAMES = "token_mixer.qkvu_proj:mixer.q_proj+mixer.k_proj+mixer.v_proj+mixer.output.gate_up"
TRANSNORMER_NAMES += (
    " token_mixer.out_proj:mixer.output.out_proj channel_mixer.l1:channel.gate_proj channel_mixer.l2:channel.up_proj"
)
TRANSNORMER_NAMES += " channel_mixer.l3:channel.down_proj"
THETA = Joint("mixer.lrpe.theta", view=("tnl.num_heads", 1, -1))
ACTIVATIONS = {"silu": "silu", "swish": "silu", "1+elu": "elu1", "none": "none"}


def transnormer_values(settings: Settings) -> Values:
    width = settings.integer("decoder_embed_dim", 1024)
    settings.only("hidden_dim", width, why="Linnet's heads share the model's width")
    return {
        "sglu.inner": width if settings.values.get("glu_dim") == -1 else settings.integer("glu_dim", 2816),
        "tnl.qk_activation": settings.choice("linear_act_fun", "silu", ACTIVATIONS),
        "tnl.lrpe": _lrpe(settings, counted(24, "decoder_layers")(settings)),
        "embedding_scale": 1.0 if settings.flag("no_scale_embedding", False) else float(width) ** 0.5,
    }


TRANSNORMER = Family(
    *("TransNormerLLM", "transnormer", "TransnormerForCausalLM"),
    (
        *keys("decoder_embed_dim:d_model=1024 vocab_size:vocab_size=64000 decoder_attention_heads:tnl.num_heads=8"),
        Entry(transnormer_values),
        only("norm_type", "simplermsnorm", why="the released models have norms without a gain"),
        only("bias", False, why="Linnet's layers have no biases"),
        always(norm="srmsnorm", tnl__gate="full", tnl__gate_activation="none"),
    ),
    one_kind("tnl", 24, "decoder_layers"),
    {"tnl": Kind("tnl+sglu", table(TRANSNORMER_NAMES) | {"token_mixer.lrpe.theta": THETA})},
)


def _lrpe(settings: Settings, layers: int) -> str:
    """Returns which layers have LRPE: from a list of one flag per layer or, if it is empty, from one flag for all."""
    flags = settings.values.get("linear_use_lrpe_list") or []
    if not flags:
        return "all_layers" if settings.flag("linear_use_lrpe", False) else "none"
    if not isinstance(flags, list) or len(flags) != layers or any(flag not in (0, 1) for flag in flags):
        settings.problems.append(
            f"linear_use_lrpe_list: must have 0 or 1 for each of {layers} layers (given {flags!r})"
        )
        return "none"
    if not any(flags):
        return "none"
    if flags[0] and not any(flags[1:]):
        return "first_layer"
    if all(flags):
        return "all_layers"
    settings.problems.append(
        f"linear_use_lrpe_list: Linnet supports LRPE in the first layer, in all or in none (given {flags!r})"
    )
    return "none"
