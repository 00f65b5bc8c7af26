"""Named models, with the paper, the sizes and every departure of each family; importing registers all of them."""

from linnet.models.recipes import (
    baselines,
    linear,
    mad,
    sizes_004,
)
from linnet.models.recipes.registry import family
from linnet.models.registry import FAMILIES, RECIPES, families_of, get_recipe, kind_of_recipe, recipes_of

__all__ = [
    "FAMILIES",
    "RECIPES",
    "baselines",
    "families_of",
    "family",
    "get_recipe",
    "kind_of_recipe",
    "linear",
    "mad",
    "recipes_of",
    "sizes_004",
]
