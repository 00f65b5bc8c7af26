"""Architectures by what a person types: a recipe such as mad-hyena-swiglu, or a layout such as `tnl+swiglu x2`.

Those of MQAR are what zoology's Figure 2 and section 4.1 of paper 002 compare: a token mixer in two layers, without
channel mixers; LayerNorm, tied embeddings, one head (paper 002: an expansion of 128, or all of a narrower width).
Departures from zoology: its blocks add their normalised input once more in place of a channel mixer; attention has
RoPE here and learned positions there; there is no dropout here.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from linnet.config import ConfigError, parse
from linnet.layers.base import CHANNELS, MIXERS
from linnet.models import RECIPES, ModelConfig, get_recipe, parse_layout
from linnet.models.recipes.mad import mad_model
from linnet.study.mad.settings import MQAR_WIDTHS
from linnet.study.mad.state import TOTAL, check_state, normalise


def architecture(name: str, changes: Mapping[str, Any] | None = None, state: int = TOTAL) -> ModelConfig:
    """The model of a recipe, or of a layout with the width and the options of paper 004.

    Args:
        changes: keys of `ModelConfig` in place of those.
        state: fixed state of the whole model, for which one option of a mixer may change; 0 leaves it as it is.

    Raises:
        ConfigError: an unknown layer or recipe, options that a layer refuses, or a state that cannot be reached.
    """
    changes = dict(changes or {})
    if name in RECIPES:
        base = get_recipe(name)
    else:
        _check(name)
        base = mad_model(name)
    values = base.model_dump() | changes
    own = changes.get("options", {})
    values["options"] = {
        layer: {**base.options.get(layer, {}), **own.get(layer, {})} for layer in {**base.options, **own}
    }
    config = parse(ModelConfig, values, name)
    if not state:
        return config
    found = normalise(config, state)
    if any(found.options[layer] != config.options[layer] for layer in own):
        check_state(config, state)  # says so: what was asked for is not changed
    return found


def mqar_architecture(name: str, changes: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model of a token mixer (`hgrn2`), in two layers, or of a layout; at the smallest width of MQAR.

    Args:
        changes: keys of `ModelConfig` in place of what zoology has.

    Raises:
        ConfigError: an unknown layer, a recipe, or options that a layer refuses.
    """
    if name in RECIPES:
        raise ConfigError(["a recipe has a width of its own; give a token mixer or a layout"], name)
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


def _check(layout: str) -> None:
    try:
        parse_layout(layout)
    except ValueError as error:
        close = difflib.get_close_matches(layout, RECIPES, n=1, cutoff=0.8)
        recipe = f"there is no such recipe; did you mean {close[0]!r}? As a " if close else ""
        raise ConfigError([f"{recipe}{error}"], layout) from None
