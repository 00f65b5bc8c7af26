"""HGRN, HGRN2, GLA, LightNet, the delta rule and the Transformer as flash-linear-attention saves them (version 0.6).

All have RMSNorm and SwiGLU. The kernels of flash-linear-attention multiply queries by K^(-1/2); Linnet's HGRN2 and
LightNet do not. A norm follows, so an epsilon that is K times as large has the same effect. The norms inside HGRN2 and
LightNet ignore `norm_eps`: they use 1e-5 and 1e-6. Some layers may be attention layers (`attn`). For HGRN and HGRN2
this works only without lower bounds, because it distributes lower bounds over all layers, including attention layers.
"""

from linnet.hf.layouts import hybrids
from linnet.hf.layouts.base import Settings
from linnet.hf.layouts.family import (
    Entry,
    Family,
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
)

HGRN2_EPS, LIGHTNET_EPS = 1e-5, 1e-6


def _attention(settings: Settings, heads: int | None) -> dict:
    heads = settings.integer("num_heads", heads)
    settings.only("qkv_bias", False, why="Linnet does not read flash-linear-attention's biases in attention")
    return {
        "num_heads": heads,
        "num_kv_heads": settings.integer("num_kv_heads", heads),
        "rope_base": settings.number("rope_theta", 10000.0),
        "window": 0 if settings.values.get("window_size") is None else settings.integer("window_size", None),
    }


def _hybrid(settings: Settings, layers: int) -> tuple[dict, list[int]]:
    """Returns the options and the numbers of the attention layers that `attn` describes."""
    attention = settings.values.get("attn")
    specs = attention if isinstance(attention, list) else [attention] if attention is not None else []
    if not specs:
        return {}, []
    spec = specs[0]
    where = spec.get("layers") if isinstance(spec, dict) else None
    places = [index for index in where if type(index) is int and 0 <= index < layers] if isinstance(where, list) else []
    if len(specs) > 1 or not places or len(set(places)) != len(where):
        settings.problems.append(
            f"attn: must be one object with num_heads and the numbers of its layers (given {attention!r}); "
            "attention layers of several kinds cannot be converted"
        )
        return {}, []
    inner = Settings(spec)
    options = _attention(inner, None)
    settings.problems += [f"attn.{problem}" for problem in inner.problems]
    return options, places


def _ideal(settings: Settings) -> int:
    """Returns the width of a SwiGLU that config.json does not name."""
    ratio = settings.integer("hidden_ratio", 4)
    return 256 * -(-int(settings.integer("hidden_size", 2048) * ratio * 2 / 3) // 256)


def _head(settings: Settings, ratio_wins: bool) -> tuple[int, int]:
    """Returns the widths of the model and of a key, from `expand_ratio` or `num_heads`.

    The source's HGRN2 uses only `expand_ratio` if both are given (`ratio_wins`).
    """
    width = settings.integer("hidden_size", 2048)
    ratio, heads = settings.values.get("expand_ratio", 128), settings.values.get("num_heads")
    if ratio is None:
        ratio = width // settings.integer("num_heads", None)
    else:
        ratio = settings.integer("expand_ratio", 128)
        heads = None if ratio_wins else heads
    if ratio < 1 or width % ratio or (heads is not None and heads != width // ratio):
        settings.problems.append(
            f"expand_ratio: {ratio} with num_heads {heads!r} does not split hidden_size {width} into heads with keys "
            "as wide as values, which Linnet's layer needs"
        )
        ratio = width
    return width, ratio


def _between(default: int, kind: str) -> Layers:
    """Returns the list of blocks of which those of `attn` are softmax attention."""

    def read(settings: Settings) -> list[str]:
        layers = counted(default)(settings)
        places = _hybrid(settings, layers)[1]
        return ["attention" if index in places else kind for index in range(layers)]

    def write(kinds: list[str]) -> Values:
        places = [index for index, kind in enumerate(kinds) if kind == "attention"]
        return {"num_hidden_layers": len(kinds)} | ({"attn": {"layers": places}} if places else {})

    return Layers(read, write)


def _attention_keys(default: int) -> Entry:
    names = {"num_heads": "num_heads", "num_kv_heads": "num_kv_heads", "rope_theta": "rope_base"}

    def read(settings: Settings) -> Values:
        return {f"attention.{key}": value for key, value in _hybrid(settings, counted(default)(settings))[0].items()}

    def write(values: Values) -> Values:
        if "attention.num_heads" not in values:
            return {}
        keys = {key: values.get(f"attention.{path}") for key, path in names.items()}
        return {"attn": keys | {"qkv_bias": False, "window_size": values["attention.window"] or None}}

    return Entry(read, write)


def _family(title: str, kind: str, architecture: str, mixer: str, layers: int, entries: tuple, names: dict) -> Family:
    """Returns a family; `entries` and `names` are those of its mixer, the rest is common to all."""
    around = table("attn_norm:mixer_norm mlp_norm:channel_norm") | below("mlp", "channel", hybrids.GLU)
    outer = ends("model.embeddings", "model.norm") | {"model.lower_bounds": f"backbone.shared.{mixer}.gamma"}
    return Family(
        *(f"{title} of flash-linear-attention", kind, architecture),
        (
            *keys("hidden_size:d_model=2048 vocab_size:vocab_size=32000 norm_eps:norm_eps=1e-6"),
            entry("integer", "intermediate_size", "swiglu.inner", default=_ideal),
            only("hidden_act", "swish", "silu", why="Linnet's swiglu gates with SiLU"),
            only("elementwise_affine", True, why="the norms must have gains"),
            only("attnres_block_size", None, why="Linnet's residual stream is a plain sum"),
            *(_attention_keys(layers), *entries, always(norm="rmsnorm")),
        ),
        _between(layers, mixer),
        {
            "attention": Kind("attention+swiglu", around | below("attn", "mixer", hybrids.ATTENTION)),
            mixer: Kind(f"{mixer}+swiglu", around | below("attn", "mixer", names)),
        },
        outer,
        ignored=(r"model\.layers\.\d+\.attn\.rotary\.inv_freq",),
    )


def _bounds(mixer: str) -> Entry:
    """Returns the entry of lower bounds, which all layers of a model share."""

    def read(settings: Settings) -> Values:
        bounded = settings.flag("use_lower_bound", True)
        if bounded:
            settings.only("attn", None, why=f"Linnet cannot convert {mixer} with attention layers in between")
        return {f"{mixer}.lower_bound": "inclusive" if bounded else "none"}

    return Entry(read)


def _normed(mixer: str, eps: float, ratio_wins: bool) -> Entry:
    """Returns the entry of heads whose norm has an epsilon of its own."""

    def read(settings: Settings) -> Values:
        width, key = _head(settings, ratio_wins)
        return {f"{mixer}.num_heads": width // key, f"{mixer}.norm": "rmsnorm", f"{mixer}.norm_eps": eps * key}

    return Entry(read)


def _no_convolutions(mixer: str) -> Entry:
    return only("use_short_conv", False, why=f"Linnet's {mixer} has no short convolutions")


def _of_gla(settings: Settings) -> Values:
    heads = settings.integer("num_heads", 4)
    settings.only("num_kv_heads", None, heads, why="Linnet's GLA does not share keys and values among heads")
    return {"gla.num_heads": heads, "gla.expand_k": settings.number("expand_k", 0.5, largest=64)}


def _of_transformer(settings: Settings) -> Values:
    return {f"attention.{key}": value for key, value in _attention(settings, 32).items()}


HGRN = _family(
    *("HGRN", "hgrn", "HGRNForCausalLM", "hgrn", 24),
    (
        *keys("norm_eps:norm_eps+hgrn.norm_eps=1e-6"),
        *(_bounds("hgrn"), _no_convolutions("hgrn"), always(hgrn__norm="rmsnorm", hgrn__norm_first=True)),
        only("expand_ratio", 1, 1.0, why="Linnet's real HGRN has one state per channel of the model"),
    ),
    table("i_proj:in_proj f_proj g_proj:gate_proj g_norm:norm o_proj:out_proj"),
)
HGRN2 = _family(
    *("HGRN2", "hgrn2", "HGRN2ForCausalLM", "hgrn2", 24),
    (_normed("hgrn2", HGRN2_EPS, ratio_wins=True), _bounds("hgrn2"), _no_convolutions("hgrn2")),
    table("q_proj f_proj i_proj g_norm:norm o_proj:out_proj"),
)
LIGHTNET = _family(
    *("LightNet", "lightnet", "LightNetForCausalLM", "lightnet", 24),
    (
        *keys("gate_low_rank_dim:lightnet.gate_rank=128"),
        *(_normed("lightnet", LIGHTNET_EPS, ratio_wins=False), _no_convolutions("lightnet")),
        always(lightnet__lrpe=False, lightnet__gate_activation="silu"),
    ),
    table(f"{hybrids.QKV} g_proj.0:output.gate_down g_proj.1:output.gate_up g_norm:output.norm o_proj:output.out_proj"),
)
GLA = _family(
    *("GLA", "gla", "GLAForCausalLM", "gla", 24),
    (
        *keys("norm_eps:norm_eps+gla.norm_eps=1e-6"),
        *(Entry(_of_gla), _no_convolutions("gla"), always(gla__gate_rank=16, gla__gate_temperature=16.0)),
        only("expand_v", 1.0, 1, why="Linnet's values have the model's width"),
        only("feature_map", None, why="Linnet's GLA has no feature map"),
        only("use_output_gate", True, why="Linnet's GLA has an output gate"),
        only("clamp_min", None, why="Linnet's GLA does not clamp its decays"),
    ),
    table(f"{hybrids.QKV} gk_proj.0:decay_down gk_proj.1:decay_up g_proj:gate_proj o_proj:out_proj")
    | {"g_norm_swish_gate|g_norm": "norm"},  # `fuse_norm` says which
)
TRANSFORMER = _family(
    *("Transformer", "transformer", "TransformerForCausalLM", "attention", 24),
    (
        Entry(_of_transformer),
        only("attn", None, why="Linnet cannot convert attention with attention layers in between"),
        only("use_short_conv", False, why="Linnet's attention has no short convolutions"),
        only("qk_norm", False, why="Linnet does not read flash-linear-attention's normalised queries and keys"),
    ),
    hybrids.ATTENTION,
)


def _delta_keys(mixer: str) -> tuple[Entry, ...]:
    """Returns the entries of every mixer on the delta rule."""
    return (
        *keys(f"norm_eps:norm_eps+{mixer}.norm_eps=1e-6 conv_size:{mixer}.conv_width=4"),
        *keys(f"allow_neg_eigval:{mixer}.allow_neg_eigval=false"),
        only("use_short_conv", True, why="Linnet's mixers on the delta rule have short convolutions"),
        only("conv_bias", False, why="Linnet's mixers on the delta rule have convolutions without biases"),
    )


def _heads(mixer: str, count: int, width: int, expand: float) -> tuple[Entry, ...]:
    """Returns the entries of heads, those of values, and their widths, with defaults."""

    def same(settings: Settings) -> int:
        return settings.integer("num_heads", count)

    return (
        *keys(
            f"num_heads:{mixer}.num_heads={count} head_dim:{mixer}.head_dim={width} expand_v:{mixer}.expand_v={expand}"
        ),
        entry("integer", "num_v_heads", f"{mixer}.num_v_heads", default=same),
    )


def _shares(settings: Settings) -> Values:
    """Reads the widths of DeltaNet's heads, which are shares of the model's."""
    width, heads = settings.integer("hidden_size", 2048), settings.integer("num_heads", 16)
    key, value = (int(width * settings.number(name, 1.0, largest=64)) // heads for name in ("expand_k", "expand_v"))
    if not key or not value:
        settings.problems.append(f"expand_k: {heads} heads of width {width} would have no channels")
    return {"delta_net.head_dim": max(1, key), "delta_net.expand_v": max(1, value) / max(1, key)}


def _written_shares(values: Values) -> Values:
    keys = values["delta_net.num_heads"] * values["delta_net.head_dim"] / values["d_model"]
    return {"expand_k": keys, "expand_v": keys * values["delta_net.expand_v"]}


GATED_DELTANET = _family(
    *("Gated DeltaNet", "gated_deltanet", "GatedDeltaNetForCausalLM", "gdn", 21),
    (*_delta_keys("gdn"), *_heads("gdn", 6, 256, 2.0), *keys("use_gate:gdn.use_gate=true")),
    hybrids.GDN_APART,
)
DELTA_NET = _family(
    *("DeltaNet", "delta_net", "DeltaNetForCausalLM", "delta_net", 24),
    (
        *_delta_keys("delta_net"),
        *keys("num_heads:delta_net.num_heads=16 use_gate:delta_net.use_gate=false"),
        Entry(_shares, _written_shares, "expand_k", ("delta_net.head_dim", "delta_net.expand_v")),
        only("use_beta", True, why="Linnet's DeltaNet has beta"),
        only("qk_norm", "l2", why="Linnet's DeltaNet has keys of unit length"),
        only("qk_activation", "silu", why="Linnet's DeltaNet has SiLU after its convolutions"),
        only("use_output_norm", True, why="Linnet's DeltaNet has a norm of its output"),
    ),
    hybrids.DELTA | {"g_proj": "gate_proj"},
)
KDA = _family(
    *("KDA", "kda", "KDAForCausalLM", "kda", 24),
    (
        *(*_delta_keys("kda"), *_heads("kda", 16, 128, 1.0)),
        hybrids.bound("lower_bound", None, "safe_gate"),
    ),
    hybrids.DELTA | hybrids.DECAY | table("f_proj.0:decay_down f_proj.1:decay_up g_proj.0:gate_down g_proj.1:gate_up"),
)
