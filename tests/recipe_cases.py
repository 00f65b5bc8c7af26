"""Which recipes a test of all of them needs: sizes of a family are one model, and many families share layers."""

import re
from collections.abc import Callable, Mapping

import pytest

from linnet.models import RECIPES, ModelConfig

LADDERS = ("c3-", "c4-")  # of layers that other recipes have


def cases(shrunk: Callable[[str], ModelConfig]) -> list:
    """Recipes that have, when shrunk, a layer, an option or a key's value that none before them has; others thorough.

    A layer runs the same code whatever it stands beside, so hybrids of the same layers repeat each other.
    Recipes of most kinds of layer come first: they leave the least to others.
    """
    models = {name: shrunk(name) for name in distinct(shrunk).values()}
    kinds = {name: layers(config.layout) for name, config in models.items()}
    seen: set[tuple] = set()
    params = []
    for name in sorted(models, key=lambda name: -len(kinds[name])):
        values = models[name].model_dump(exclude={"layout"})
        parts = {(kind,) for kind in kinds[name]} | {(*item,) for item in flat(values)}
        params.append(name if parts - seen else pytest.param(name, marks=pytest.mark.thorough))
        seen |= parts
    return params


def distinct(shrunk: Callable[[str], ModelConfig]) -> dict[str, str]:
    """The first recipe of each shrunk model, by its text."""
    return {shrunk(name).model_dump_json(): name for name in reversed(RECIPES) if not name.startswith(LADDERS)}


def layers(layout: str) -> set[str]:
    return {word for word in re.split(r"[\s+()]+", layout) if not re.fullmatch(r"(x\d+)?", word)}


def flat(values: Mapping, prefix: str = "") -> list[tuple[str, str]]:
    """Every value by its dotted key."""
    pairs = []
    for key, value in values.items():
        pairs += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", repr(value))]
    return pairs
