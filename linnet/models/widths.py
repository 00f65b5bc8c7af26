"""The same model at another width: heads keep their width, and every option that counts channels or heads grows."""

from typing import Any, TypeVar

from linnet.config import refuse
from linnet.layers.base import CHANNELS, MIXERS, LayerConfig
from linnet.models.stack import StackConfig

C = TypeVar("C", bound=StackConfig)


def at_width(config: C, d_model: int) -> C:
    """Returns the configuration with another width, of the same depth.

    The options that a layer's `Config.grows` names are multiplied by d_model / config.d_model; 0, which stands for a
    default that follows the width, stays 0.

    Raises:
        ConfigError: an option would not be a whole number, or a layer refuses the width.
    """
    values, problems = config.model_dump(), []

    def scaled(name: str, options: dict[str, Any], where: str) -> dict[str, Any]:
        layer = MIXERS.get(name) or CHANNELS[name]
        new = dict(options)
        for key in getattr(layer.Config, "nested", ()):
            nested = new.get(key, {}).items()
            new[key] = {inner: scaled(inner, given, f"{where}.{name}.{key}") for inner, given in nested}
        for key in getattr(layer.Config, "grows", LayerConfig.grows):
            if not new.get(key):
                continue
            value, left = divmod(new[key] * d_model, config.d_model)
            if left or not value:
                fix = f"use a multiple of {config.d_model} / {new[key]}, or fewer channels per head"
                problems.append(
                    f"{where}.{name}.{key}: {new[key]} at d_model {config.d_model} is not a whole number at width "
                    f"{d_model}; {fix}"
                )
            new[key] = value
        return new

    values["options"] = {name: scaled(name, options, "options") for name, options in values["options"].items()}
    for alias, given in values["aliases"].items():
        if isinstance(given, dict) and given.get("options"):
            where = f"aliases.{alias}.options"
            given["options"] = {name: scaled(name, own, where) for name, own in given["options"].items()}
    refuse(problems, "model")
    return type(config).model_validate(values | {"d_model": d_model})
