"""The 21 architectures of MAD (paper 004, section 3.2 and appendix B.3): two blocks, four layers, width 128.

Ten are uniform (five token mixers, each with SwiGLU or experts, twice), one is Mamba alone in all four layers, and ten
are striped: a block of another mixer (or two layers of Mamba), then a block of attention. `mad-hyena-swiglu` is
uniform, `mad-hyena-attention-swiglu` is striped. All use RMSNorm and untied embeddings; RoPE in attention is the only
position encoding.

State: 2,048 numbers per block (1,024 per layer of Mamba), 4,096 per model without attention: Hyena 128 channels of 16
modes, multi-head Hyena 16 heads of 8 x 8 with 2 modes, Hyena experts 8 of 16 channels with 16 modes, GLA 8 heads of 16
x 16, Mamba 256 channels of 4 states. Departures: the head has no bias, as in all models of Linnet; SwiGLU is 512 wide,
as the paper says (the published implementation: 352). The other parameter counts follow from the layers.

`layers="mad-lab"` gives the layers of the published implementation: `MAD_LAB` and a head with a bias, norms with an
epsilon of 1e-5. Its parameter counts are those of that implementation.
"""

from typing import Literal, get_args

from linnet.layers.base import MIXERS
from linnet.models.config import ModelConfig
from linnet.models.layout import parse_stack
from linnet.models.recipes.registry import register_recipe

WIDTH = 128

# Options of the paper for each layer; `mad_model` uses those of the layers that a layout names.
OPTIONS: dict[str, dict] = {
    "attention": {"num_heads": 16},
    "gla": {"num_heads": 8},
    "hyena": {"num_modes": 16},
    "hyena_experts": {"num_experts": 8, "num_active": 2, "expert_width": 16, "num_modes": 16},
    "mamba": {"expand": 2, "state": 4, "conv_width": 4},
    "mh_hyena": {"num_heads": 16, "num_modes": 2},
    "moe": {"num_experts": 8, "num_active": 2, "inner": 16},
    "swiglu": {"inner": 512},
}

# Of mixers after the paper, with which a layer has the state of GLA (2,048 a block) or of Mamba (1,024).
_DELTA = {"num_heads": 8, "head_dim": 16, "expand_v": 1.0}
LATER: dict[str, dict] = {
    **dict.fromkeys(("delta_net", "gdn", "kda", "gdn2", "gated_delta_product"), _DELTA),
    "mamba2": {"state": 4},
    "mamba3": {"state": 4},
    "retnet": {"num_heads": 8, "expand_v": 1.0},
    "rwkv7": {"num_heads": 8},
}

# Options of the published implementation (mad-lab), where they differ from the paper's.
_FILTER = {"filter": "implicit", "filter_length": 128}
_ROUTING = {"routing": "zero_logits", "router_bias": True}
MAD_LAB: dict[str, dict] = OPTIONS | {
    "attention": {"num_heads": 16, "bias": True},
    "hyena": {**_FILTER, "filter_width": 4, "expand": 4, "proj_groups": 4},
    "hyena_experts": {**OPTIONS["hyena_experts"], **_FILTER, "filter_width": 16, **_ROUTING},
    "mamba": {**OPTIONS["mamba"], "conv_bias": True},
    "mh_hyena": {**_FILTER, "filter_width": 2, "num_heads": 8, "proj_groups": 4},
    "moe": {**OPTIONS["moe"], **_ROUTING, "down": "dense", "activation": "gelu"},
    "swiglu": {"inner": 352},
}
Layers = Literal["paper", "mad-lab"]
LAYERS: tuple[Layers, ...] = get_args(Layers)

_MIXERS = ("hyena", "mh_hyena", "hyena_experts", "gla", "attention")
_CHANNELS = ("swiglu", "moe")


def _architectures() -> dict[str, str]:
    layouts = {f"mad-{m}-{c}": f"{m}+{c} x2" for m in _MIXERS for c in _CHANNELS}
    layouts["mad-mamba"] = "mamba x4"
    layouts |= {
        f"mad-{m}-attention-{c}": f"{m}+{c} attention+{c}" for m in _MIXERS if m != "attention" for c in _CHANNELS
    }
    layouts |= {f"mad-mamba-attention-{c}": f"mamba x2 attention+{c}" for c in _CHANNELS}
    return {name.replace("_", "-"): layout for name, layout in layouts.items()}


ARCHITECTURES = _architectures()  # name -> layout


def mad_model(
    layout: str, vocab_size: int = 16, aliases: dict[str, str] | None = None, layers: Layers = "paper"
) -> ModelConfig:
    """Returns the model of MAD with a layout: width 128, and the paper's options for the layers that have some.

    Args:
        layout: a layout of any layers, or the name of one of `ARCHITECTURES`.
        layers: "paper", or "mad-lab" for the layers of the published implementation.

    Raises:
        ValueError: the layout does not parse.
    """
    layout = ARCHITECTURES.get(layout, layout)
    used = set(parse_stack(layout, aliases).names)
    published = layers == "mad-lab"
    options = LATER | (MAD_LAB if published else OPTIONS)
    return ModelConfig(
        d_model=WIDTH,
        layout=layout,
        aliases=aliases or {},
        vocab_size=vocab_size,
        options={name: options[name] for name in sorted(used & set(options))},
        norm="rmsnorm",
        norm_eps=1e-5 if published else None,
        tie_embeddings=False,
        head_bias=published,
    )


def fit_length(config: ModelConfig, length: int, longest: int | None = None) -> ModelConfig:
    """Returns the model for sequences of one length: time constants of long filters start at up to this length.

    This sets the options `max_time_constant` and `max_length` of the layers that have one, unless it differs from its
    default, and `filter_length` of implicit filters.

    Args:
        longest: length of implicit filters; `length` if it is None.
    """
    options = {}
    for name in config.options:
        if name in MIXERS and MIXERS[name].before_layers:
            continue
        layer_config = config.layer_options(name)
        changes = {}
        if getattr(layer_config, "filter", None) == "implicit":
            changes["filter_length"] = longest or length
        else:
            fields = type(layer_config).model_fields
            for key in fields.keys() & {"max_time_constant", "max_length"}:
                if getattr(layer_config, key) == fields[key].default:
                    changes[key] = max(length, 2)
        if changes:
            options[name] = {**config.options[name], **changes}
    if not options:
        return config
    return ModelConfig(**{**config.model_dump(), "options": {**config.options, **options}})


for recipe in ARCHITECTURES:
    register_recipe(recipe, lambda name=recipe: mad_model(name))
