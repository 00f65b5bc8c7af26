"""Named models. One file per family, with the paper, its sizes and every departure; importing registers all of them."""

from linnet.models.recipes import (
    cosformer2,
    delta,
    gla,
    hgrn,
    hybrid,
    lightnet,
    llama,
    mad,
    mamba,
    rwkv7,
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
    "cosformer2",
    "delta",
    "families_of",
    "family",
    "get_recipe",
    "gla",
    "hgrn",
    "hybrid",
    "kind_of_recipe",
    "lightnet",
    "llama",
    "mad",
    "mamba",
    "recipes_of",
    "rwkv7",
    "sizes_004",
    "tnl",
    "wt103",
]
