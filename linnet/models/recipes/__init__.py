"""Named models. One file per family, with the paper, its sizes and every departure; importing registers all of them."""

from linnet.models.recipes import (
    bert,
    cosformer2,
    dit,
    gla,
    hgrn,
    lightnet,
    llama,
    mad,
    mamba,
    sizes_004,
    tnl,
    vit,
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
    "bert",
    "cosformer2",
    "dit",
    "families_of",
    "family",
    "get_recipe",
    "gla",
    "hgrn",
    "kind_of_recipe",
    "lightnet",
    "llama",
    "mad",
    "mamba",
    "recipes_of",
    "sizes_004",
    "tnl",
    "vit",
    "wt103",
]
