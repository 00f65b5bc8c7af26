"""Recipes and families by name. `linnet.models.recipes` fills both, and configurations look names up here.

Each belongs to a kind of model (`linnet.models.kinds`): `RECIPES` and `FAMILIES` hold those of causal language models,
`recipes_of` and `families_of` those of any kind. A recipe's name is unique over all kinds.
"""

import functools
from collections.abc import Callable
from typing import Any

from linnet.companions import Offer
from linnet.config import ConfigError, nearest
from linnet.layers.base import known_as

# Recipes are functions that return a configuration, whose class imports this module, so none is imported here.
RECIPES: dict[str, Callable[[], Any]] = {}
FAMILIES: dict[str, Callable[..., Any]] = {}
_RECIPES: dict[str, dict[str, Callable[[], Any]]] = {"causal_lm": RECIPES}
_FAMILIES: dict[str, dict[str, Callable[..., Any]]] = {"causal_lm": FAMILIES}


def register_family(name: str, kind: str = "causal_lm"):
    """Registers a function (d_model, num_layers, num_heads=0, inner=0, ...) -> configuration.

    The further arguments are those of the kind: `vocab_size=256` for language models; `image_size`, `patch`, `channels`
    and `classes` for models of images.
    """

    def decorate(function):
        _FAMILIES.setdefault(kind, {})[name] = function
        return function

    return decorate


def register_recipe(name: str, build: Callable[[], Any], kind: str = "causal_lm") -> None:
    """Registers a recipe of a kind of model; `build` is called when the recipe is requested."""
    assert all(name not in recipes for recipes in _RECIPES.values()), f"recipe {name} is registered twice"
    _RECIPES.setdefault(kind, {})[name] = build


@functools.cache
def _complete() -> None:
    """Registers the recipes of the rooms that are there, at the first look-up: their modules need this package."""
    list(Offer("recipes").values())


def recipes_of(kind: str) -> dict[str, Callable[[], Any]]:
    """Returns the recipes of one kind of model."""
    _complete()
    return _RECIPES.setdefault(kind, {})


def families_of(kind: str) -> dict[str, Callable[..., Any]]:
    """Returns the families of one kind of model."""
    _complete()
    return _FAMILIES.setdefault(kind, {})


def kind_of_recipe(name: str) -> str | None:
    """Returns the kind of model that a recipe describes, None for an unknown name."""
    _complete()
    return next((kind for kind, recipes in _RECIPES.items() if name in recipes), None)


def get_recipe(name: str):
    """Returns the configuration of a recipe. Raises ConfigError for an unknown name, with the nearest one."""
    kind = kind_of_recipe(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError([unknown_recipe(name)], "model")
    return recipes_of(kind)[name]()


def set_by_recipe(layer: str, key: str, value: Any) -> bool:
    """Returns whether a recipe of any kind gives an option of a layer this value."""
    _complete()
    recipes = (recipe() for recipes in _RECIPES.values() for recipe in recipes.values())
    return any(recipe.options.get(layer, {}).get(key) == value for recipe in recipes)


def unknown_recipe(name: str) -> str:
    """Returns the message about a name that belongs to no recipe of a causal language model."""
    if kind_of_recipe(name) not in (None, "causal_lm"):
        title = get_recipe(name).TITLE
        return f"recipe {name!r} describes {title}, but a causal language model is needed here; choose another recipe"
    known = [recipe for recipes in _RECIPES.values() for recipe in recipes]
    family, dash, size = str(name).rpartition("-")
    families = dict.fromkeys(recipe.partition("-")[0] for recipe in known)
    wanted = (known_as(family, families) or family) + dash + size if dash else known_as(size, families) or size
    return f"recipe {name!r} is unknown; {nearest(wanted, known)} (linnet models lists them)"
