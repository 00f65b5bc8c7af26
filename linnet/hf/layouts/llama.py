"""Llama and its near relatives as transformers saves them: Mistral, Qwen2 and Qwen3.

All are pre-norm stacks of softmax attention with grouped queries and RoPE, and SwiGLU (Touvron et al. 2023,
arXiv:2302.13971). Mistral (arXiv:2310.06825) adds a sliding window, Qwen2 (arXiv:2407.10671) biases of q, k and v, and
Qwen3 (arXiv:2505.09388) norms of q and k and heads of a width of their own. Both Qwens may have windows in some layers.
"""

from dataclasses import replace

from linnet.hf.layouts.base import LARGEST, Settings
from linnet.hf.layouts.family import Entry, Family, Kind, Layers, Values, always, below, counted, keys, one_kind
from linnet.hf.layouts.hybrids import ATTENTION, BIAS, FULL, LLAMA_BLOCK, PLAIN, QK_NORMS, heads, rope

SLIDING = "sliding_attention"
NAMES = LLAMA_BLOCK | below("self_attn", "mixer", ATTENTION | QK_NORMS)
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
    {FULL: Kind("attention+swiglu", NAMES)},
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
SOMETIMES = LLAMA.kinds | {SLIDING: Kind("attention+swiglu", NAMES, "attention.window")}
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
