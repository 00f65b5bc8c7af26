"""Named models, with the paper, the sizes and every departure of each family; importing registers all of them."""

from linnet.models.recipes import (
    baselines,
    delta,
    hgrn,
    hybrid,
    linear,
    llama,
    mad,
    mamba,
    sizes_004,
    tnl,
    wt103,
)
from linnet.models.recipes.registry import (
    FAMILIES,
    RECIPES,
    families_of,
    family,
    get_recipe,
    kind_of_recipe,
    recipes_of,
)

__all__ = [
    "FAMILIES",
    "RECIPES",
    "baselines",
    "delta",
    "families_of",
    "family",
    "get_recipe",
    "hgrn",
    "hybrid",
    "kind_of_recipe",
    "linear",
    "llama",
    "mad",
    "mamba",
    "recipes_of",
    "sizes_004",
    "tnl",
    "wt103",
]
