"""Architectures by name: a recipe such as mad-hyena-swiglu, or a layout such as `tnl+swiglu x2`.

The architectures of MQAR are those that zoology's Figure 2 and section 4.1 of paper 002 compare: a token mixer in two
layers, without channel mixers; LayerNorm, tied embeddings, one head (paper 002: an expansion of 128, or the full width
if it is smaller). Departures from zoology: its blocks add their normalised input once more in place of a channel mixer;
it gives attention learned positions, Linnet RoPE; it uses dropout, Linnet does not.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from linnet.config import ConfigError, parse
from linnet.layers.base import CHANNELS, MIXERS
from linnet.mad.settings import MQAR_WIDTHS
from linnet.mad.state import TOTAL, check_state, normalise
from linnet.models import RECIPES, ModelConfig, get_recipe, parse_layout
from linnet.models.recipes.mad import ARCHITECTURES, MAD_LAB, Layers, mad_model


def architecture(
    name: str, changes: Mapping[str, Any] | None = None, state: int = TOTAL, layers: Layers = "paper"
) -> ModelConfig:
    """Returns the model of a recipe, or of a layout with the width and the options of paper 004.

    Args:
        changes: keys of `ModelConfig` that override the defaults.
        state: fixed state of the whole model. One option of each mixer may change to reach it; 0 changes nothing.
        layers: "mad-lab" takes the layers of the published implementation, whose own mixers keep their state (8,192
            for multi-head Hyena).

    Raises:
        ConfigError: an unknown layer or recipe, options that a layer rejects, or a state that cannot be reached.
    """
    changes = dict(changes or {})
    if name in RECIPES and not (layers == "mad-lab" and name in ARCHITECTURES):
        base = get_recipe(name)
    else:
        _check(ARCHITECTURES.get(name, name))
        base = mad_model(name, layers=layers)
    values = base.model_dump() | changes
    own = changes.get("options", {})
    values["options"] = {
        layer: {**base.options.get(layer, {}), **own.get(layer, {})} for layer in {**base.options, **own}
    }
    config = parse(ModelConfig, values, name)
    published = layers == "mad-lab" and not own and {b.mixer for b in config.blocks if b.mixer} <= MAD_LAB.keys()
    if not state or published:
        return config
    found = normalise(config, state)
    if any(found.options[layer] != config.options[layer] for layer in own):
        check_state(config, state)  # normalising would change an option that the caller gave, so raise instead
    return found


def mqar_architecture(name: str, changes: Mapping[str, Any] | None = None) -> ModelConfig:
    """Returns the model of two layers of a token mixer (`hgrn2`), or of a layout, at the smallest width of MQAR.

    Args:
        changes: keys of `ModelConfig` that override those of zoology.

    Raises:
        ConfigError: an unknown layer, a recipe, or options that a layer rejects.
    """
    if name in RECIPES:
        raise ConfigError(["a recipe has its own width; give a token mixer or a layout"], name)
    _check(name)
    changes = dict(changes or {})
    layout = f"{name} x2" if name in MIXERS else name
    used = {layer for block in parse_layout(layout, changes.get("aliases")) for layer in block if layer}
    heads = [layer for layer in used if "num_heads" in {**MIXERS, **CHANNELS}[layer].Config.model_fields]
    options = {layer: {"num_heads": 1} for layer in heads}
    own = changes.pop("options", {})
    options = {layer: {**options.get(layer, {}), **own.get(layer, {})} for layer in {**options, **own}}
    values = {"d_model": min(MQAR_WIDTHS), "layout": layout, "norm": "layernorm", "options": options}
    return parse(ModelConfig, values | changes, name)


def recorded(config: ModelConfig) -> dict[str, Any]:
    """Returns a model as runs and plan.json record it: the same for an unchanged model in every release.

    The names of run folders are digests that include it, so it holds every key of the first release, and a key that a
    later release added only if it is not at its default.
    """
    own = config.model_dump(mode="json", exclude_defaults=True)
    values = config.model_dump(mode="json")
    found = {key: values.get(key) for key in _KEYS} | own
    options = {}
    for layer, given in values["options"].items():
        kind = MIXERS.get(layer) or CHANNELS[layer]
        defaults = {key: field.default for key, field in kind.Config.model_fields.items()}
        always = _OPTIONS.get(layer, given)
        options[layer] = {key: one for key, one in given.items() if key in always or one != defaults[key]}
    return found | {"options": options}


_KEYS = "d_model layout vocab_size options aliases norm norm_eps tpe tie_embeddings embedding_scale init_std".split()
_GATED = "norm norm_eps gate gate_rank gate_activation gate_first num_heads"
_OPTIONS = {
    layer: keys.split()
    for layer, keys in {
        "attention": "num_heads num_kv_heads rope rope_base rope_scaling window",
        "cosformer2": f"{_GATED} gate_input lrpe_shared_heads",
        "gla": "num_heads expand_k gate_rank gate_temperature norm_eps",
        "hgrn": "complex norm norm_first",
        "hgrn2": "num_heads norm norm_eps output_activation value_activation lower_bound",
        "hyena": "num_modes max_time_constant conv_width",
        "hyena_experts": "num_modes max_time_constant conv_width num_experts num_active expert_width",
        "lightnet": f"{_GATED} lrpe lrpe_shared_heads",
        "mamba": "expand state dt_rank conv_width conv_bias",
        "mh_hyena": "num_modes max_time_constant conv_width num_heads",
        "tnl": f"{_GATED} qk_activation v_activation gate_input slopes layer_factor lrpe lrpe_form lrpe_shared_heads",
        "swiglu": "inner",
        "sglu": "inner",
        "glu": "inner activation",
        "mlp": "inner activation bias",
        "moe": "num_experts num_active inner",
    }.items()
}  # keys of the first release; the options of other layers are all recorded


def _check(layout: str) -> None:
    try:
        parse_layout(layout)
    except ValueError as error:
        close = difflib.get_close_matches(layout, RECIPES, n=1, cutoff=0.8)
        recipe = f"there is no such recipe; did you mean {close[0]!r}? As a " if close else ""
        raise ConfigError([f"{recipe}{error}"], layout) from None
