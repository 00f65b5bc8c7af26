"""Root-mean-square norm with an optional gain, with the residual sum before it and the gate after it (001, eq. 14)."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.activation import ACTIVATIONS
from linnet.ops.compat_torch import is_plain
from linnet.ops.fast_path import find_apply
from linnet.ops.tensor_parallel import Split, sum_over
from linnet.ops.vmap_rules import Mapped, is_mapped, lead

__all__ = ["rms_norm", "split_rms_norm"]

GATE_ACTIVATIONS = ("none", "sigmoid", "silu")


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    gate: Tensor | None = None,
    gate_activation: str = "none",
    residual: Tensor | None = None,
    keep: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """y = h / sqrt(mean(h^2) + eps) * weight * act(gate) over the last axis, with h = x + residual.

    Without a weight it is SRMSNorm (paper 001, equation 14). On a GPU in eager mode one kernel does all of it, and one
    the backward, from the inputs alone; elsewhere, and for a compiler (which fuses the norm with its neighbours), it is
    a composition of PyTorch's functions.

    Args:
        x: [..., D].
        weight: [D], the gain, or None.
        gate: as x; multiplies the result after its activation.
        gate_activation: none, sigmoid or silu.
        residual: as x; the result is then (y, h), and the next residual is h.
        keep: the result is (y, h) without a residual as well. What reads x beside the norm reads that h: its gradient
            is then added in the pass of the norm's backward, not in one of its own.

    Returns:
        y (and h with a residual or `keep`), in the dtype of h; under autocast y has autocast's dtype, since products
        follow.

    Raises:
        ValueError: shapes that do not go together, an unknown activation.
    """
    _check(x, weight, gate, gate_activation, residual)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    if dtype != torch.float64 and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    tensors, keep = (x, weight, gate, residual), keep or residual is not None
    if is_plain(tensors) and _has_kernel(*tensors):
        y, h = _apply(*tensors, float(eps), gate_activation, dtype, keep)
    elif is_mapped(*tensors) and _has_kernel(*tensors):
        y, h = Mapped.apply(_rule, *tensors, float(eps), gate_activation, dtype, keep)
    else:
        y, h = rms_norm_reference(x, weight, eps, gate, gate_activation, residual, dtype)
    return (y, h) if keep else y


def _has_kernel(*tensors: Tensor | None) -> bool:
    if not backend.use_triton("norm", tensors[0].is_cuda):
        return False
    return importlib.import_module("linnet.ops.norm.triton").supports(*tensors)


def _rule(size, dims, x, weight, gate, residual, *constants):
    """Models are the first axis, and a gain [models, D] has its part of the rows."""
    x, gate, residual = (lead(t, dims[i], size) for i, t in ((0, x), (2, gate), (3, residual)))
    weight = weight if dims[1] is None else lead(weight, dims[1], size)
    outputs = _RmsNorm.apply(x, weight, gate, residual, *constants)
    return outputs, (0, None if outputs[1] is None else 0)


def _check(x: Tensor, weight: Tensor | None, gate: Tensor | None, gate_activation: str, residual: Tensor | None):
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight has shape {list(weight.shape)}; give [{x.shape[-1]}], one a feature")
    for name, other in (("gate", gate), ("residual", residual)):
        if other is not None and other.shape != x.shape:
            raise ValueError(f"rms_norm: {name} has shape {list(other.shape)}; give that of x, {list(x.shape)}")
    if gate_activation not in GATE_ACTIVATIONS:
        raise ValueError(f"rms_norm: gate_activation {gate_activation!r} is unknown; use {', '.join(GATE_ACTIVATIONS)}")


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gate, residual, eps, gate_activation, dtype, keep):
        kernels = importlib.import_module("linnet.ops.norm.triton")
        y, h = kernels.norm_forward(x, weight, gate, residual, eps, gate_activation, dtype)
        ctx.save_for_backward(h, weight, gate)
        ctx.constants = kernels, eps, gate_activation
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, (h if keep else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dh):
        h, weight, gate = ctx.saved_tensors
        kernels, eps, gate_activation = ctx.constants
        dy = torch.zeros_like(h) if dy is None else dy
        of_x, of_residual = ctx.dtypes
        dresidual, dweight, dgate, dx = kernels.norm_backward(
            h, weight, gate, dy, dh, eps, gate_activation, ctx.needs_input_grad[1], of_x
        )
        dresidual = None if of_residual is None else dresidual.to(of_residual)
        return dx, dweight, dgate, dresidual, None, None, None, None


_apply = find_apply(_RmsNorm)


def rms_norm_reference(
    x, weight, eps, gate=None, gate_activation="none", residual=None, dtype=None
) -> tuple[Tensor, Tensor]:
    """y = (h / rms(h) * weight) act(gate) and h = x + residual (or x); arguments as `rms_norm`."""
    h = x if residual is None else x + residual
    if weight is None or weight.dtype == h.dtype:
        y = F.rms_norm(h, h.shape[-1:], weight, eps)
    else:  # PyTorch warns of it that it is not fused
        both = torch.promote_types(h.dtype, weight.dtype)
        y = F.rms_norm(h.to(both), h.shape[-1:], weight.to(both), eps)
    if gate is not None:
        y = y * ACTIVATIONS[gate_activation](gate)
    return y.to(h.dtype if dtype is None else dtype), h


def split_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    split: Split,
    *,
    eps: float = 1e-6,
    gate: Tensor | None = None,
    gate_activation: str = "none",
) -> Tensor:
    """Returns this rank's channels of `rms_norm`, with the last axis split evenly over ranks (001, eq. 41).

    One number per token is summed over the ranks: the sum of squares, in at least float32. On a GPU in eager mode one
    kernel does the rest, and two the backward; elsewhere it is a composition of PyTorch's functions, which a compiler
    fuses.

    Args:
        x: [..., D / ranks], this rank's channels. weight, gate: as in `rms_norm`, of these channels.
    """
    _check(x, weight, gate, gate_activation, None)
    dtype = x.dtype
    if dtype != torch.float64 and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    if is_plain((x, weight, gate)) and _has_kernel(x, weight, gate, None):
        return _apply_split(x, weight, gate, split, float(eps), gate_activation, dtype)
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = sum_over(h.square().sum(-1, keepdim=True), split)
    y = h * torch.rsqrt(squares / (x.shape[-1] * split.size) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if gate is not None:
        y = y * ACTIVATIONS[gate_activation](gate)
    return y.to(dtype)


class _SplitRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gate, split, eps, gate_activation, dtype):
        kernels = importlib.import_module("linnet.ops.norm.split_triton")
        squares = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square()
        inverse = sum_over(squares, split).div_(x.shape[-1] * split.size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, gate, inverse)
        ctx.constants = kernels, split, gate_activation
        return kernels.scale(x, weight, gate, inverse, gate_activation, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, gate, inverse = ctx.saved_tensors
        kernels, split, gate_activation = ctx.constants
        given = x, weight, gate, inverse, dy
        along, dweight, dgate = kernels.gradients_along(*given, gate_activation, ctx.needs_input_grad[1])
        along = sum_over(along, split).div_(x.shape[-1] * split.size)
        return kernels.gradient(*given, along, gate_activation, x.dtype), dweight, dgate, None, None, None, None


_apply_split = find_apply(_SplitRmsNorm)
