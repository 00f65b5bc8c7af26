"""A model in the precision that it is served with."""

import torch
from torch import nn


def lower_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters of a model, but those that a layer names in its attribute `full_precision`.

    Frequencies times positions and rates of decay times lengths need float32 however long the context is; fixed tables
    of these (buffers) stay as they are too.
    """
    for module in model.modules():
        kept = getattr(module, "full_precision", ())
        for name, parameter in module.named_parameters(recurse=False):
            if name not in kept and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
