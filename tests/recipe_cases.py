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


TWICE = {"hgrn", "hgrn2", "rwkv7", "tnl"}  # the first such layer of a model runs other code than those after it


def joined(configs: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    """Models that have each kind of layer and each value of its options and of other keys; numbers change no code.

    Models that differ in nothing but layers are one, as long as they give no layer other options: a layer runs the same
    code whatever it stands beside. Experts take longest: models with them come last, so that each other layer is
    beside another channel mixer, and once.
    """

    def order(name: str) -> tuple[bool, int]:
        kinds = len(configs[name].options)
        return "moe" in configs[name].options, -kinds if "moe" in configs[name].options else kinds

    def rest(config: ModelConfig) -> frozenset:
        return frozenset((key, _switch(value)) for key, value in flat(config.model_dump(exclude={"layout", "options"})))

    def values(name: str) -> set[tuple[str, str]]:
        config = configs[name]
        return {(kind, "") for kind in layers(config.layout)} | {
            (key, _switch(value)) for key, value in flat(config.model_dump(exclude={"layout"}))
        }

    names, seen = [], set()
    for name in sorted(configs, key=order):
        if not values(name) <= seen:
            names.append(name)
        seen |= values(name)
    for name in list(names):
        names.remove(name)
        if not values(name) <= set().union(*map(values, names)):  # no later one has all that it has
            names.append(name)
    groups: list[tuple[list[str], ModelConfig]] = []
    for name in names:
        config = configs[name]
        for index, (group, model) in enumerate(groups):
            same = all(model.options.get(layer, keys) == keys for layer, keys in config.options.items())
            if same and rest(model) == rest(config):
                group.append(name)
                groups[index] = group, model.model_copy(update={"options": model.options | config.options})
                break
        else:
            groups.append(([name], config))
    return {
        " ".join(group): model.model_copy(update={"layout": _layout([configs[name].layout for name in group])})
        for group, model in groups
    }


def _switch(value: str) -> str:
    """What a value, as text, may change in what is run: a number that is not 0 is as good as any other."""
    return re.sub(r"^-?[1-9.e+-][\d.e+-]*$|^0\.[\d.e-]*[1-9][\d.e-]*$", "a number", value)


def _layout(layouts: list[str]) -> str:
    words = dict.fromkeys(word for layout in layouts for word in re.split(r"[\s()]+", layout))
    # `tpe` is before all layers.
    words = sorted((word for word in words if not re.fullmatch(r"(x\d+)?", word)), key=lambda word: word != "tpe")
    alone = len(words) == 1  # a model of one layer says the same token again and again
    return " ".join(f"{word} x2" if alone or word.split("+")[0] in TWICE else word for word in words)


def layers(layout: str) -> set[str]:
    return {word for word in re.split(r"[\s+()]+", layout) if not re.fullmatch(r"(x\d+)?", word)}


def flat(values: Mapping, prefix: str = "") -> list[tuple[str, str]]:
    """Every value by its dotted key."""
    pairs = []
    for key, value in values.items():
        pairs += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", repr(value))]
    return pairs
