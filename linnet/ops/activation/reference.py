"""The definition of a gated activation; also the form that runs on a CPU."""

from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = {"none": lambda x: x, "silu": F.silu, "sigmoid": F.sigmoid, "gelu": F.gelu, "relu": F.relu}


def gated_activation_reference(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    """act(gate) * x."""
    return ACTIVATIONS[activation](gate) * x
