"""The costs of all recipes, counted once and stored beside this file, so that `linnet models` answers at once.

A count builds each model on the meta device and runs each kind of layer there, which takes 12 s for all recipes. A row
is used only if its recipe still has the configuration that was counted; otherwise it is counted again.

    python -m linnet.models.recipes.table      # after a change of a recipe or of a layer's costs: writes costs.json
"""

import functools
import json
from pathlib import Path
from typing import Any

from linnet.config import digest
from linnet.models.costs import count, image_count, image_summary, summary
from linnet.models.recipes.registry import get_recipe, kind_of_recipe, recipes_of

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


if __name__ == "__main__":
    rows = (f" {json.dumps(name)}: {json.dumps(counted(name))}" for name in names_of(TEXT + IMAGES))
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
