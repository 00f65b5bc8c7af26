"""Maximal update parametrisation: initial weights and learning rates that do not depend on the width of a model.

With `parametrisation: mup`, base width d0 and width d:

| parameter | initial standard deviation | learning rate |
|---|---|---|
| hidden matrix (inputs and outputs grow with d) | s sqrt(d0 / d) | AdamW: x d0 / d; Muon: x sqrt(d0 / d) |
| vector (gains, biases, decays, filters, embedding, head) | that of its layer, s for embedding and head | x 1 |

The output of the backbone is multiplied by d0 / d before the head, tied or not, and softmax attention divides by the
width of a head instead of its square root. At d = d0, that scale of attention alone differs from `standard`. The scores
of linear attention need no factor, because the norm of the output divides by their size. Of a low-rank product only the
second factor is a vector. The first (many inputs, few outputs) is a hidden matrix; docs/design.md says why.

G. Yang et al., Tensor Programs V, arXiv:2203.03466, table 8. Muon: its update has full rank, so that its spectral norm
is sqrt(d) times its elements and not d times (G. Yang, J. Simon and J. Bernstein, arXiv:2310.17813).

Roles come from the configuration and from the class of a module, never from the shape of a tensor, so shards and slices
of a parameter get the role of the whole.

In the same model at another width (`at_width`) heads keep their width, and every option that counts channels or heads
grows.
"""

import math
from typing import Any, Literal, TypeVar

from torch import nn

from linnet.config import refuse
from linnet.layers.base import CHANNELS, MIXERS, LayerConfig, Role
from linnet.models.stack import StackConfig


def role_of(module: nn.Module, parameter: str) -> Role:
    """Returns the role of a module's own parameter: declared in `module.mup_roles`, or by the class of the module."""
    declared = getattr(module, "mup_roles", {}).get(parameter)
    if declared is not None:
        return declared
    return "hidden" if isinstance(module, nn.Linear) and parameter == "weight" else "vector"


def roles(model: nn.Module) -> dict[str, Role]:
    """Returns the role of each parameter of a model, tied ones once; outside `backbone` everything is a vector."""
    parameter_roles: dict[str, Role] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                inside = path == "backbone" or path.startswith("backbone.")
                parameter_roles[f"{path}.{name}" if path else name] = role_of(module, name) if inside else "vector"
    return parameter_roles


def rate_factors(model: nn.Module, optimizer: Literal["adamw", "muon"]) -> dict[str, float]:
    """Returns the factor of the learning rate of each hidden matrix; {} if every parameter has the same rate.

    Args:
        model: with its configuration in `model.config`.
        optimizer: what updates the hidden matrices.
    """
    ratio = getattr(getattr(model, "config", None), "width_ratio", 1.0)
    if ratio == 1.0:
        return {}
    hidden = ratio if optimizer == "adamw" else math.sqrt(ratio)
    return {name: hidden for name, role in roles(model).items() if role == "hidden"}


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
            new[key] = {inner: scaled(inner, settings, f"{where}.{name}.{key}") for inner, settings in nested}
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
    for alias, target in values["aliases"].items():
        if isinstance(target, dict) and target.get("options"):
            where = f"aliases.{alias}.options"
            target["options"] = {name: scaled(name, options, where) for name, options in target["options"].items()}
    refuse(problems, "model")
    return type(config).model_validate(values | {"d_model": d_model})
