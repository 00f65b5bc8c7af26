"""Casts a model to the precision in which it is served."""

import torch
from torch import nn


def lower_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters of a model to `dtype`, except those that a layer names in its attribute `full_precision`.

    Products of frequencies with positions, and of decay rates with lengths, need float32 in long contexts. Buffers
    with fixed tables of these keep their dtype too.
    """
    for module in model.modules():
        kept = getattr(module, "full_precision", ())
        for name, parameter in module.named_parameters(recurse=False):
            if name not in kept and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
