"""Gated activations act(gate) * x, the middle of a gated linear unit; and the logarithm of a sigmoid."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.compat_torch import is_plain
from linnet.ops.fast_path import find_apply
from linnet.ops.registration import Mapped, is_mapped, lead

__all__ = ["ACTIVATIONS", "gated_activation", "log_sigmoid"]

ACTIVATIONS = {"none": lambda x: x, "silu": F.silu, "sigmoid": F.sigmoid, "gelu": F.gelu, "relu": F.relu}
ACTIVATIONS["relu2"] = lambda x: F.relu(x).square()


def gated_activation(gate: Tensor, x: Tensor, activation: str = "none") -> Tensor:
    """act(gate) * x, element by element.

    On a GPU in eager mode one kernel does it and one its backward, which keep nothing but gate and x; elsewhere, and
    for a compiler (which fuses it with its neighbours), it is a composition of PyTorch's functions.

    Args:
        gate, x: [...], of one shape.
        activation: none, silu, sigmoid, gelu, relu, or relu2, the square of relu.

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
            return _apply_activation(gate, x, activation)
    if is_mapped(gate, x) and backend.use_triton("activation", x.is_cuda):
        return Mapped.apply(_activation_rule, gate, x, activation)
    return gated_reference(gate, x, activation)


def gated_reference(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    """As `gated_activation`: the composition of PyTorch's functions."""
    return ACTIVATIONS[activation](gate) * x


def _activation_rule(size, dims, gate, x, activation):
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


_apply_activation = find_apply(_GatedActivation)


def log_sigmoid(x: Tensor, divisor: float = 1.0) -> Tensor:
    """log(sigmoid(x)) / divisor in float32 (float64 stays), whatever the dtype of x.

    On a GPU in eager mode one kernel does it and one its backward, which keep nothing but x; elsewhere, and for a
    compiler, it is a composition of PyTorch's functions.
    """
    plain = is_plain((x,))
    if (plain or is_mapped(x)) and backend.use_triton("activation", x.is_cuda) and x.numel() > 0:
        if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
            return _apply_log_sigmoid(x, float(divisor)) if plain else Mapped.apply(_log_sigmoid_rule, x, divisor)
        backend.is_wide("log_sigmoid", x)
    return log_sigmoid_reference(x, divisor)


def log_sigmoid_reference(x: Tensor, divisor: float) -> Tensor:
    """As `log_sigmoid`: the composition of PyTorch's functions."""
    return F.logsigmoid(x if x.dtype == torch.float64 else x.float()) / divisor


def _log_sigmoid_rule(size, dims, x, divisor):
    return log_sigmoid(lead(x, dims[0], size), divisor), 0


class _LogSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, divisor):
        kernels = importlib.import_module("linnet.ops.activation.triton")
        ctx.save_for_backward(x)
        ctx.constants = kernels, divisor
        return kernels.log_sigmoid_forward(x, divisor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        kernels, divisor = ctx.constants
        return kernels.log_sigmoid_backward(*ctx.saved_tensors, dy, divisor), None


_apply_log_sigmoid = find_apply(_LogSigmoid)
