"""Shared by the recipes: published sizes, default head counts, and the family of a name."""

from collections.abc import Callable

from linnet.config import ConfigError
from linnet.layers.base import MIXERS
from linnet.models.config import ModelConfig
from linnet.models.layout import nearest_layer
from linnet.models.registry import FAMILIES, RECIPES, get_recipe, register_family, register_recipe, unknown_recipe

__all__ = [
    "FAMILIES",
    "PAPER_SIZES",
    "PAPER_VOCAB",
    "RECIPES",
    "default_heads",
    "family",
    "get_recipe",
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


def family(name: str) -> Callable[..., ModelConfig]:
    """Returns the family of a name. A registered mixer without a family (a plugin) gets `name+swiglu` with RMSNorm."""
    if name in FAMILIES:
        return FAMILIES[name]
    if name not in MIXERS:
        told = nearest_layer(name, {*FAMILIES, *MIXERS})
        raise ConfigError([f"architecture {name!r} is unknown; {told}"], "architectures")

    def build(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
        options: dict[str, dict] = {"swiglu": {"inner": inner}}
        if "num_heads" in MIXERS[name].Config.model_fields:
            options[name] = {"num_heads": num_heads or default_heads(d_model)}
        return ModelConfig(
            d_model=d_model, layout=f"{name}+swiglu x{num_layers}", vocab_size=vocab_size, options=options
        )

    return build


def default_heads(d_model: int) -> int:
    """Returns a head count: heads of width 128 from d_model 512 on, 64 from 256 on, else 32 or 16, if these divide."""
    width = 128 if d_model >= 512 else 64 if d_model >= 256 else 32 if d_model >= 64 else 16
    while d_model % width:
        width //= 2
    return d_model // width
