"""Recipes and families by name. `linnet.models.recipes` fills both, and configurations look names up here."""

from collections.abc import Callable
from typing import Any

from linnet.config import ConfigError, nearest

# Recipes are functions that return a `ModelConfig`, and that class imports this module, so it is not imported here.
RECIPES: dict[str, Callable[[], Any]] = {}
FAMILIES: dict[str, Callable[..., Any]] = {}


def register_family(name: str):
    """Registers a function (d_model, num_layers, num_heads=0, inner=0, vocab_size=256) -> ModelConfig."""

    def decorate(function):
        FAMILIES[name] = function
        return function

    return decorate


def register_recipe(name: str, build: Callable[[], Any]) -> None:
    """Registers a recipe; `build` is called when the recipe is requested."""
    assert name not in RECIPES, f"recipe {name} is registered twice"
    RECIPES[name] = build


def get_recipe(name: str):
    """Returns the `ModelConfig` of a recipe. Raises ConfigError for an unknown name, with the nearest one."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ConfigError([unknown_recipe(name)], "model")
    return RECIPES[name]()


def unknown_recipe(name: str) -> str:
    """Returns the message about a name that belongs to no recipe."""
    return f"recipe {name!r} is unknown; {nearest(str(name), RECIPES)} (linnet models lists them)"
