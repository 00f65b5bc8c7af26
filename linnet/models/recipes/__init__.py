"""Named models. One file per family, with the paper, its sizes and every departure; importing registers all of them."""

from linnet.models.recipes import cosformer2, gla, hgrn, lightnet, llama, mad, mamba, tnl
from linnet.models.recipes.registry import FAMILIES, RECIPES, family, get_recipe

__all__ = [
    "FAMILIES",
    "RECIPES",
    "cosformer2",
    "family",
    "get_recipe",
    "gla",
    "hgrn",
    "lightnet",
    "llama",
    "mad",
    "mamba",
    "tnl",
]
