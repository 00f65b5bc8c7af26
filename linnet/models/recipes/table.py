"""The costs of all recipes, counted once and stored beside this file, so that `linnet models` answers at once.

A count builds each model on the meta device and runs each kind of layer there, which takes 12 s for all recipes. A row
is used only if its recipe still has the configuration that was counted; otherwise it is counted again.

    python -m linnet.models.recipes.table      # after a change of a recipe or of a layer's costs: writes costs.json
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linnet.config import digest
from linnet.models.costs import count, image_count, image_summary, summary
from linnet.models.registry import get_recipe, kind_of_recipe, recipes_of

FILE = Path(__file__).with_name("costs.json")
LENGTHS = (1 << 10, 1 << 20)  # contexts from which the bytes of state per token follow; no recipe has a window
TEXT, IMAGES = ("causal_lm", "masked_lm"), ("classifier", "denoiser")  # kinds of models with a table


def names_of(kinds: tuple[str, ...]) -> list[str]:
    """Returns the names of the recipes of some kinds of models."""
    return [name for kind in kinds for name in recipes_of(kind)]


def recipe_summary(name: str, context_length: int, recount: bool = False) -> dict[str, Any]:
    """Returns `linnet.models.costs.summary` of a recipe, from the stored counts unless `recount` is set.

    A recipe of a model of images has a `linnet.models.costs.image_summary` instead.
    """
    config, images = get_recipe(name), kind_of_recipe(name) in IMAGES
    row = stored().get(name)
    if recount or row is None or row["digest"] != digest(config):
        return image_summary(name, config) if images else summary(name, config, context_length)
    if images:
        return image_summary(name, config, {key: value for key, value in row.items() if key != "digest"})
    fixed, per_token = row["state"]
    return summary(name, config, context_length, {**row, "state_bytes": fixed + per_token * context_length})


def model_summary(name: str, config: Any, context_length: int) -> dict[str, Any]:
    """Returns the summary of a model by its configuration, counted from its layers."""
    images = hasattr(config, "image_size")
    return image_summary(name, config) if images else summary(name, config, context_length)


@functools.cache
def stored() -> dict[str, dict[str, Any]]:
    """Returns the stored counts by the names of recipes."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def counted(name: str) -> dict[str, Any]:
    """Returns the row of a recipe: the digest of its configuration, its counts, and of a model of sequences its state
    as bytes [fixed, per token]."""
    config = get_recipe(name)
    if kind_of_recipe(name) in IMAGES:
        return {"digest": digest(config), **image_count(config)}
    (short, near), (long, far) = ((length, count(config, length)) for length in LENGTHS)
    per_token, rest = divmod(far["state_bytes"] - near["state_bytes"], long - short)
    assert not rest, f"{name}: the state is not linear in the context"
    state = [near["state_bytes"] - per_token * short, per_token]
    return {"digest": digest(config), **{key: near[key] for key in near if key != "state_bytes"}, "state": state}


@dataclass(frozen=True)
class Published:
    """Published numbers of a recipe.

    Attributes:
        params: parameters in millions, with the digits that are printed.
        top1: ImageNet-1k top-1 accuracy after training at 224 x 224 pixels, in percent; None for denoisers.
    """

    params: str
    top1: float | None = None


# Numbers that papers print of the models of images that are recipes here.
PUBLISHED: dict[str, Published] = {
    # Paper 003, Table 1.
    "lightnet-vit-t": Published("6.0", 74.46),
    "lightnet-vit-s": Published("22.64", 80.12),
    "lightnet-vit-b": Published("87.74", 81.90),
    # DeiT: H. Touvron et al., arXiv:2012.12877.
    "deit-t": Published("5.7", 72.2),
    "deit-s": Published("22", 79.9),
    "deit-b": Published("86", 81.8),
    # Paper 002, Table 8.
    "hgrn-vit-t": Published("6.1", 74.40),
    "hgrn-vit-s": Published("23.7", 80.09),
    "hgrn2-vit-t": Published("6.1", 75.39),
    "hgrn2-vit-s": Published("23.8", 80.12),
    "tnn-vit-t": Published("6.4", 72.29),
    "tnn-vit-s": Published("23.4", 79.20),
    # Vim: L. Zhu et al., arXiv:2401.09417; paper 003, Table 1.
    "vim-t": Published("7", 76.1),
    "vim-s": Published("26", 80.5),
    # DiT: W. Peebles and S. Xie, arXiv:2212.09748.
    "dit-s": Published("33"),
    "dit-b": Published("130"),
    "dit-l": Published("458"),
    "dit-xl": Published("675"),
    # Paper 003, Table 11.
    "lightnet-dit-s": Published("33"),
    "lightnet-dit-b": Published("131"),
    "lightnet-dit-l": Published("470"),
    "lightnet-dit-xl": Published("680"),
}


if __name__ == "__main__":
    rows = (f" {json.dumps(name)}: {json.dumps(counted(name))}" for name in names_of(TEXT + IMAGES))
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
