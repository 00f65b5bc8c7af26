"""Shared by the recipes: published sizes, default head counts, and the family of a name."""

from collections.abc import Callable
from typing import Any

from linnet.config import ConfigError
from linnet.layers.base import MIXERS
from linnet.models.layout import nearest_layer
from linnet.models.registry import (
    FAMILIES,
    RECIPES,
    families_of,
    get_recipe,
    kind_of_recipe,
    recipes_of,
    register_family,
    register_recipe,
    unknown_recipe,
)
from linnet.models.stack import StackConfig

__all__ = [
    "FAMILIES",
    "PAPER_SIZES",
    "PAPER_VOCAB",
    "RECIPES",
    "default_heads",
    "families_of",
    "family",
    "get_recipe",
    "kind_of_recipe",
    "recipes_of",
    "register_family",
    "register_recipe",
    "unknown_recipe",
]

PAPER_VOCAB = 100_280  # tiktoken's cl100k with its special tokens (paper 000, 3.2)

# Paper 000's sizes: layers, width, heads, GLU width. Table 7 prints h = 16 and g = 5632 in its 1B rows, but its own
# parameter and FLOP columns need h = 12 and g = 4096; Table 2's head counts contradict its head width of 128.
PAPER_SIZES = {
    "70m": (6, 512, 4, 1536),
    "160m": (12, 768, 6, 2048),
    "410m": (26, 1024, 8, 2816),
    "1b": (32, 1536, 12, 4096),
    "3b": (35, 2560, 20, 6912),
    "7b": (32, 4096, 32, 11008),
}


def family(name: str, kind: str = "causal_lm") -> Callable[..., StackConfig]:
    """Returns the family of a name among the models of one kind (`linnet.models.registry.register_family`).

    A registered mixer without a family of that kind (a plugin) gets `name+swiglu` with RMSNorm, as a language model or
    an image classifier.
    """
    families = families_of(kind)
    if name in families:
        return families[name]
    from linnet.models.kinds import KINDS

    config = KINDS[kind].config
    known = MIXERS if config.INPUTS else {}
    if name not in known:
        told = nearest_layer(name, {*families, *known})
        raise ConfigError([f"architecture {name!r} is unknown; {told}"], "architectures")

    def build(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, **inputs: int) -> StackConfig:
        options: dict[str, dict] = {"swiglu": {"inner": inner}}
        if "num_heads" in MIXERS[name].Config.model_fields:
            options[name] = {"num_heads": num_heads or default_heads(d_model)}
        layers: dict[str, Any] = {"d_model": d_model, "layout": f"{name}+swiglu x{num_layers}", "options": options}
        return config(**{**layers, **config.INPUTS, **inputs})

    return build


def default_heads(d_model: int) -> int:
    """Returns a head count: heads of width 128 from d_model 512 on, 64 from 256 on, else 32 or 16, if these divide."""
    width = 128 if d_model >= 512 else 64 if d_model >= 256 else 32 if d_model >= 64 else 16
    while d_model % width:
        width //= 2
    return d_model // width
