"""Recipes by name, and families: functions from a shape to a model, which recipes and ladders are made with."""

from collections.abc import Callable

from linnet.config import ConfigError, nearest
from linnet.layers.base import MIXERS
from linnet.models.config import ModelConfig
from linnet.models.layout import nearest_layer

RECIPES: dict[str, Callable[[], ModelConfig]] = {}
FAMILIES: dict[str, Callable[..., ModelConfig]] = {}

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


def register_family(name: str):
    """Registers a function (d_model, num_layers, num_heads=0, inner=0, vocab_size=256) -> ModelConfig."""

    def decorate(function):
        FAMILIES[name] = function
        return function

    return decorate


def register_recipe(name: str, build: Callable[[], ModelConfig]) -> None:
    """Gives a model a name; `build` is called when it is asked for."""
    assert name not in RECIPES, f"recipe {name} is registered twice"
    RECIPES[name] = build


def get_recipe(name: str) -> ModelConfig:
    """The configuration of a recipe. Raises ConfigError for an unknown name, with the nearest one."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ConfigError([unknown_recipe(name)], "model")
    return RECIPES[name]()


def unknown_recipe(name: str) -> str:
    """The message about a name that no recipe has."""
    return f"recipe {name!r} is unknown; {nearest(str(name), RECIPES)} (linnet models lists them)"


def family(name: str) -> Callable[..., ModelConfig]:
    """The family of a name. A registered mixer without one (an outside file) gets `name+swiglu` with RMSNorm."""
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
    """Heads of width 128 from d_model 512 on, 64 from 256 on, else 32 or 16, as far as they divide the width."""
    width = 128 if d_model >= 512 else 64 if d_model >= 256 else 32 if d_model >= 64 else 16
    while d_model % width:
        width //= 2
    return d_model // width
