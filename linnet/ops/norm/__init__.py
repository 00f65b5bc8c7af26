"""Root-mean-square norm (001, equation 14) and LayerNorm, with the residual sum before and the gate around them."""

import functools
import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.activation import ACTIVATIONS
from linnet.ops.chunks import at_least_float32, product_dtype
from linnet.ops.compat_torch import is_plain
from linnet.ops.fast_path import find_apply, no_state
from linnet.ops.registration import Mapped, empty_like, is_mapped, lead, register_plain
from linnet.ops.tensor_parallel import Split, sum_over

__all__ = ["layer_norm", "rms_norm", "split_rms_norm", "unit_norm"]

GATE_ACTIVATIONS = ("none", "sigmoid", "silu")


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    gate: Tensor | None = None,
    gate_activation: str = "none",
    gate_first: bool = False,
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
        gate_first: the norm is that of h = x * act(gate), as in Mamba-2; without a residual and `keep`.
        residual: as x; the result is then (y, h), and the next residual is h.
        keep: the result is (y, h) without a residual as well. What reads x beside the norm reads that h: its gradient
            is then added in the pass of the norm's backward, not in one of its own.

    Returns:
        y (and h with a residual or `keep`), in the dtype of h; under autocast y has autocast's dtype, since products
        follow.

    Raises:
        ValueError: shapes that do not go together, an unknown activation, `gate_first` without a gate, or with a
            residual or `keep`.
    """
    _check("rms_norm", x, {"weight": weight}, gate, gate_activation, residual, gate_first, keep)
    dtype = product_dtype(x, x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    tensors, keep = (x, weight, gate, residual), keep or residual is not None
    if is_plain(tensors) and _has_kernel(*tensors):
        y, h = _apply(*tensors, float(eps), gate_activation, gate_first, dtype, keep)
    elif is_mapped(*tensors) and _has_kernel(*tensors):
        y, h = Mapped.apply(_rule, *tensors, float(eps), gate_activation, gate_first, dtype, keep)
    else:
        y, h = rms_norm_reference(x, weight, eps, gate, gate_activation, residual, dtype, gate_first)
    return (y, h) if keep else y


def unit_norm(x: Tensor) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6) over the last dimension, computed in float32 and rounded once.

    On a GPU it is a launch of `rms_norm`, whose gain is one over the root of the width.
    """
    if is_plain((x,)) and _has_kernel(x):
        width = x.shape[-1]
        y, _ = _apply(x, _unit_gain(width, x.device), None, None, 1e-6 / width, "none", False, x.dtype, False)
        return y
    wide = at_least_float32(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


@functools.lru_cache(64)
def _unit_gain(width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later gradient may save it
        return torch.full((width,), width**-0.5, device=device)


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


def _check(
    op: str,
    x: Tensor,
    gains: dict[str, Tensor | None],
    gate: Tensor | None,
    gate_activation: str,
    residual: Tensor | None,
    gate_first: bool = False,
    keep: bool = False,
) -> None:
    if gate_first and (gate is None or residual is not None or keep):
        raise ValueError(f"{op}: gate_first needs a gate, and takes no residual and no keep")
    for name, gain in gains.items():
        if gain is not None and gain.shape != x.shape[-1:]:
            raise ValueError(f"{op}: {name} has shape {list(gain.shape)}; give [{x.shape[-1]}], one a feature")
    for name, other in (("gate", gate), ("residual", residual)):
        if other is not None and other.shape != x.shape:
            raise ValueError(f"{op}: {name} has shape {list(other.shape)}; give that of x, {list(x.shape)}")
    if gate_activation not in GATE_ACTIVATIONS:
        raise ValueError(f"{op}: gate_activation {gate_activation!r} is unknown; use {', '.join(GATE_ACTIVATIONS)}")


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gate, residual, eps, gate_activation, gate_first, dtype, keep):
        kernels = importlib.import_module("linnet.ops.norm.triton")
        y, h = kernels.norm_forward(x, weight, gate, residual, eps, gate_activation, dtype, gate_first=gate_first)
        ctx.save_for_backward(h, weight, gate)
        ctx.constants = kernels, eps, gate_activation, gate_first
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, (h if keep else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dh):
        h, weight, gate = ctx.saved_tensors
        kernels, eps, gate_activation, first = ctx.constants
        dy = torch.zeros_like(h) if dy is None else dy
        of_x, of_residual = ctx.dtypes
        dresidual, dweight, dgate, dx = kernels.norm_backward(
            h, weight, gate, dy, dh, eps, gate_activation, ctx.needs_input_grad[1], of_x, gate_first=first
        )
        dresidual = None if of_residual is None else dresidual.to(of_residual)
        return dx, dweight, dgate, dresidual, *[None] * 5


_apply = find_apply(_RmsNorm)


def rms_norm_reference(
    x, weight, eps, gate=None, gate_activation="none", residual=None, dtype=None, gate_first=False
) -> tuple[Tensor, Tensor]:
    """y = (h / rms(h) * weight) act(gate) and h = x + residual (or x); arguments as `rms_norm`."""
    if gate_first:
        x, gate = x * ACTIVATIONS[gate_activation](gate), None
    h = x if residual is None else x + residual
    if weight is None or weight.dtype == h.dtype:
        y = F.rms_norm(h, h.shape[-1:], weight, eps)
    else:  # PyTorch warns of it that it is not fused
        both = torch.promote_types(h.dtype, weight.dtype)
        y = F.rms_norm(h.to(both), h.shape[-1:], weight.to(both), eps)
    if gate is not None:
        y = y * ACTIVATIONS[gate_activation](gate)
    return y.to(h.dtype if dtype is None else dtype), h


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    gate_activation: str = "none",
    gate_first: bool = False,
    residual: Tensor | None = None,
    keep: bool = False,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """y = ((h - mean(h)) / sqrt(var(h) + eps) * weight + bias) * act(gate) over the last axis, with h = x + residual.

    On a GPU one kernel does all of it, and one the backward, from the inputs alone. A compiler keeps these kernels if
    there is a gain, since its own backward reads the rows several times. Elsewhere it is a composition of PyTorch's
    functions.

    Args:
        x: [..., D].
        weight, bias: [D], both or neither.
        gate: as x; multiplies the result after its activation.
        gate_activation: none, sigmoid or silu.
        gate_first: as in `rms_norm`.
        residual: as x.
        keep: as in `rms_norm`: what reads x beside the norm should read the returned h.
        narrow: matrix products alone read y, so that under autocast the kernels may give it in autocast's dtype.

    Returns:
        y and h, in the dtype of h, but for `narrow`.

    Raises:
        ValueError: as `rms_norm`, or a weight without a bias or the reverse.

    Source: arXiv:1607.06450.
    """
    _check("layer_norm", x, {"weight": weight, "bias": bias}, gate, gate_activation, residual, gate_first, keep)
    if (weight is None) != (bias is None):
        raise ValueError("layer_norm: give weight and bias, or neither")
    tensors = (x, weight, bias, gate, residual)
    # A compiler fuses a norm without a gain with what scales its result, so that only others keep the kernels.
    keeps = torch.compiler.is_compiling() and weight is not None
    if (keeps or is_plain(tensors)) and _has_layer_norm_kernel(*tensors):
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        if torch.is_autocast_enabled(x.device.type):  # PyTorch's layer_norm gives float32 there
            dtype = torch.get_autocast_dtype(x.device.type) if narrow else torch.float32
        apply = _LayerNorm.apply if torch.compiler.is_compiling() else _apply_layer_norm
        name = str(dtype).removeprefix("torch.")
        constants = float(eps), gate_activation, gate_first, name, keep or residual is not None
        y, h = apply(*tensors, *constants)
        return y, x if h is None else h
    return layer_norm_reference(x, weight, bias, eps, gate, gate_activation, residual, narrow, gate_first)


def layer_norm_reference(
    x, weight, bias, eps, gate, gate_activation, residual, narrow, gate_first
) -> tuple[Tensor, Tensor]:
    """y and h, as `layer_norm`; the product that follows makes y narrow."""
    if gate_first:
        x, gate = x * ACTIVATIONS[gate_activation](gate), None
    h = x if residual is None else x + residual
    y = F.layer_norm(h, h.shape[-1:], weight, bias, eps)
    return (y if gate is None else y * ACTIVATIONS[gate_activation](gate)), h


def _has_layer_norm_kernel(x: Tensor, *more: Tensor | None) -> bool:
    """As `supports` of the kernels, without a look into their module, which a compiler cannot follow."""
    if not backend.use_triton("norm", x.is_cuda) or not 1 <= x.shape[-1] <= 16_384 or x.numel() == 0:
        return False
    weight, bias, gate, residual = more
    tensors = [x, *(t for t in more if t is not None)]
    alike = (weight is None or weight.dtype == bias.dtype) and (gate is None or gate.dtype == x.dtype)
    low = all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) and t.device == x.device for t in tensors)
    return low and alike


def _run_layer_norm(x, weight, bias, gate, residual, eps, gate_activation, gate_first, dtype) -> tuple[Tensor, Tensor]:
    kernels = importlib.import_module("linnet.ops.norm.triton")
    settings = eps, gate_activation, getattr(torch, dtype), bias
    y, h = kernels.norm_forward(x, weight, gate, residual, *settings, center=True, gate_first=gate_first)
    return y, no_state(x) if residual is None else h  # an op may not return its argument


def _run_layer_norm_backward(
    h, weight, bias, gate, dy, dh, eps, gate_activation, gate_first, dtype, learns
) -> tuple[Tensor, ...]:
    kernels = importlib.import_module("linnet.ops.norm.triton")
    settings = eps, gate_activation, learns, getattr(torch, dtype), bias
    d, dgains, dgate, dx = kernels.norm_backward(h, weight, gate, dy, dh, *settings, center=True, gate_first=gate_first)
    return d, *(no_state(h) if x is None else x for x in (None if dx is d else dx, dgains, dgate))


_layer_norm_forward = register_plain(
    "layer_norm",
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? gate, Tensor? residual, float eps, str gate_activation, "
    "bool gate_first, str dtype",
    2,
    _run_layer_norm,
    lambda x, weight, bias, gate, residual, eps, gate_activation, gate_first, dtype: (
        empty_like(x).to(getattr(torch, dtype)),
        no_state(x) if residual is None else empty_like(x).to(torch.promote_types(x.dtype, residual.dtype)),
    ),
)
_layer_norm_backward = register_plain(
    "layer_norm_backward",
    "Tensor h, Tensor? weight, Tensor? bias, Tensor? gate, Tensor dy, Tensor? dh, float eps, str gate_activation, "
    "bool gate_first, str dtype, bool learns",
    4,
    _run_layer_norm_backward,
    lambda h, weight, bias, gate, dy, dh, eps, gate_activation, gate_first, dtype, learns: (
        empty_like(h),
        no_state(h) if getattr(torch, dtype) == h.dtype else empty_like(h).to(getattr(torch, dtype)),
        weight.new_empty(2, *weight.shape) if learns else no_state(h),
        no_state(h) if gate is None else empty_like(gate),
    ),
)


class _LayerNorm(torch.autograd.Function):
    """Of two registered ops, so that a compiler traces it."""

    @staticmethod
    def forward(ctx, x, weight, bias, gate, residual, eps, gate_activation, gate_first, dtype, keep):
        y, h = _layer_norm_forward(x, weight, bias, gate, residual, eps, gate_activation, gate_first, dtype)
        h = x if residual is None else h
        ctx.save_for_backward(h, weight, bias, gate)
        ctx.constants = eps, gate_activation, gate_first
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, (h.view_as(h) if keep else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dh):
        h, weight, bias, gate = ctx.saved_tensors
        of_x, of_residual = ctx.dtypes
        dy = torch.zeros_like(h) if dy is None else dy
        narrow = str(of_x).removeprefix("torch.")
        learns = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        d, dx, dgains, dgate = _layer_norm_backward(h, weight, bias, gate, dy, dh, *ctx.constants, narrow, learns)
        dx = d if of_x == h.dtype else dx
        dweight, dbias = (dgains[0], dgains[1]) if learns else (None, None)
        dresidual = None if of_residual is None else d.to(of_residual)
        return dx, dweight, dbias, None if gate is None else dgate, dresidual, *[None] * 5


_apply_layer_norm = find_apply(_LayerNorm)


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
    _check("split_rms_norm", x, {"weight": weight}, gate, gate_activation, None)
    dtype = product_dtype(x, x.dtype)
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
        inputs = x, weight, gate, inverse, dy
        along, dweight, dgate = kernels.gradients_along(*inputs, gate_activation, ctx.needs_input_grad[1])
        along = sum_over(along, split).div_(x.shape[-1] * split.size)
        return kernels.gradient(*inputs, along, gate_activation, x.dtype), dweight, dgate, None, None, None, None


_apply_split = find_apply(_SplitRmsNorm)
