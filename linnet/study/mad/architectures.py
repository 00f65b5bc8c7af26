"""Architectures by what a person types: a recipe such as mad-hyena-swiglu, or a layout such as `tnl+swiglu x2`."""

from collections.abc import Mapping
from typing import Any

import linnet.layers  # noqa: F401  (registers the layers)
from linnet.config import parse
from linnet.models import RECIPES, ModelConfig, parse_layout
from linnet.models.costs import meta_model

WIDTH = 128
# Paper 004, appendix B.3: what its models of width 128 have. Heads of width 16 carry a state of 2,048 a layer.
_OPTIONS: dict[str, dict[str, Any]] = {
    "attention": {"num_heads": 16},
    "swiglu": {"inner": 512},
    "gla": {"num_heads": 8},
}


def architecture(name: str, changes: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model of a recipe, or two blocks of the paper's width for a layout.

    Args:
        changes: keys of `ModelConfig` in place of those.

    Raises:
        ConfigError: an unknown layer or recipe, or options that a layer refuses.
    """
    changes = dict(changes or {})
    if name in RECIPES:
        return parse(ModelConfig, {"recipe": name, **changes}, name)
    own = changes.pop("options", {})
    known = {layer: options for layer, options in _OPTIONS.items() if layer in _layers(name)}
    options = {layer: {**known.get(layer, {}), **own.get(layer, {})} for layer in {**known, **own}}
    values = {"d_model": WIDTH, "layout": name, "tie_embeddings": False, "options": options}
    return parse(ModelConfig, values | changes, name)


def state_size(config: ModelConfig) -> int:
    """Numbers of fixed state of the whole model, as paper 004 counts them: no caches, a complex number as one."""
    blocks = meta_model(config.model_dump_json()).backbone.blocks
    return sum(spec.size for block in blocks for spec in block.state_spec(1, 1).values())


def _layers(layout: str) -> set[str]:
    try:
        return {layer for block in parse_layout(layout) for layer in block if layer}
    except ValueError:
        return set()  # the configuration says what is wrong with it
