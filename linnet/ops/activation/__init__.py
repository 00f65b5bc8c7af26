"""Gated activations act(gate) * x, the middle of a gated linear unit; and the logarithm of a sigmoid."""

import importlib

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.activation.log_sigmoid import log_sigmoid
from linnet.ops.activation.reference import ACTIVATIONS, gated_activation_reference
from linnet.ops.compat_torch import is_plain
from linnet.ops.fast_path import find_apply
from linnet.ops.vmap_rules import Mapped, is_mapped, lead

__all__ = ["ACTIVATIONS", "gated_activation", "log_sigmoid"]


def gated_activation(gate: Tensor, x: Tensor, activation: str = "none") -> Tensor:
    """act(gate) * x, element by element.

    On a GPU in eager mode one kernel does it and one its backward, which keep nothing but gate and x; elsewhere, and
    for a compiler (which fuses it with its neighbours), it is a composition of PyTorch's functions.

    Args:
        gate, x: [...], of one shape.
        activation: none, silu, sigmoid, gelu or relu.

    Returns:
        A tensor of that shape.

    Raises:
        ValueError: different shapes, an unknown activation.
    """
    if gate.shape != x.shape:
        raise ValueError(f"gated_activation: gate has shape {list(gate.shape)}; give that of x, {list(x.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_activation: activation {activation!r} is unknown; use {', '.join(ACTIVATIONS)}")
    if is_plain((gate, x)) and backend.use_triton("activation", x.is_cuda):
        kernels = importlib.import_module("linnet.ops.activation.triton")
        if kernels.supports(gate, x, activation):
            return _apply(gate, x, activation)
    if is_mapped(gate, x) and backend.use_triton("activation", x.is_cuda):
        return Mapped.apply(_rule, gate, x, activation)
    return gated_activation_reference(gate, x, activation)


def _rule(size, dims, gate, x, activation):
    return gated_activation(lead(gate, dims[0], size), lead(x, dims[1], size), activation), 0


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, x, activation):
        kernels = importlib.import_module("linnet.ops.activation.triton")
        ctx.save_for_backward(gate, x)
        ctx.constants = kernels, activation
        return kernels.gated_forward(gate, x, activation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        kernels, activation = ctx.constants
        return *kernels.gated_backward(*ctx.saved_tensors, dy, activation), None


_apply = find_apply(_GatedActivation)
