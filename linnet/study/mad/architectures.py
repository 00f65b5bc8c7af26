"""Architectures by what a person types: a recipe such as mad-hyena-swiglu, or a layout such as `tnl+swiglu x2`."""

from collections.abc import Mapping
from typing import Any

from linnet.config import ConfigError, parse
from linnet.models import RECIPES, ModelConfig, get_recipe, parse_layout
from linnet.models.recipes.mad import mad_model
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
        try:
            parse_layout(name)
        except ValueError as error:
            raise ConfigError([str(error)], name) from None
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
