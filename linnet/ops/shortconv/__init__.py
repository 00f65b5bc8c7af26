"""The short convolution: a few taps a channel on the tokens before, and an activation (Mamba, Hyena)."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.arguments import check_devices
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.direct import shorten
from linnet.ops.folding import fold_all, unfold
from linnet.ops.shortconv import chunked

__all__ = ["short_convolution"]

OP = "shortconv"


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, offset: Tensor | None = None, silu: bool = False
) -> Tensor:
    """y_t = act(sum_j w_j (x_{t - (W - 1) + j} + a) + b), each channel on its own; nothing is before the first token.

    Computes in float32 (float64 for float64 inputs), whatever autocast says, and rounds once. On a GPU it is one launch
    and one for the backward, which keep nothing but the inputs.

    Args:
        x: [B, T, D].
        weight: [D, W], the newest token's last.
        bias: b, [D] or None.
        offset: a, [D] or None: the bias of a linear layer that x comes from, which costs no pass of its own here.
        silu: whether the activation is x sigmoid(x); else there is none.

    Returns:
        y [B, T, D] in the dtype of x. Gradients reach every argument.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    more = {name: y for name, y in (("bias", bias), ("offset", offset)) if y is not None}
    parts = {"x": x, "weight": weight} | more
    if (
        x.ndim != 3
        or weight.ndim != 2
        or weight.shape[0] != x.shape[2]
        or any(y.shape != x.shape[2:] for y in more.values())
        or 0 in weight.shape
        or not all(y.is_floating_point() for y in parts.values())
    ):
        shapes = ", ".join(f"{name} {list(y.shape)} {y.dtype}" for name, y in parts.items())
        raise ValueError(
            f"short_convolution: {shapes}; give floating-point x [B, T, D], weight [D, W], and bias and offset [D] "
            "or None, with at least one channel and tap"
        )
    check_devices("short_convolution", **parts)
    if x.numel() == 0:
        return x.clone()
    if backend.use_reference():
        taps = weight.to(state_dtype(x, weight))[:, None]
        line = x.to(taps.dtype) if offset is None else x.to(taps.dtype) + offset
        past = F.pad(line.mT, (weight.shape[1] - 1, 0))
        y = F.conv1d(past, taps, None if bias is None else bias.to(taps.dtype), groups=x.shape[2]).mT
        return (F.silu(y) if silu else y).to(x.dtype)
    return _direct(x, weight[None], *(None if y is None else y[None] for y in (bias, offset)), silu)


# What is registered has an axis of models, for vmap: weight [M, D, W], bias and offset [M, D], each for R / M rows.


@torch.library.custom_op("linnet::short_convolution", mutates_args=())
def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None, silu: bool) -> Tensor:
    with exact(x):
        return _form(x).forward(x, weight, bias, offset, silu)


@torch.library.custom_op("linnet::short_convolution_backward", mutates_args=())
def _convolve_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None, dy: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with exact(x):
        return _form(x).backward(x, weight, bias, offset, dy, silu)


def _form(x: Tensor):
    return importlib.import_module("linnet.ops.shortconv.triton") if backend.use_triton(OP, x.is_cuda) else chunked


@_convolve.register_fake
def _(x, weight, bias, offset, silu):
    return x.new_empty(x.shape)


@_convolve_backward.register_fake
def _(x, weight, bias, offset, dy, silu):
    sums = (weight.new_empty(weight.shape[:2]) for _ in range(2))
    return x.new_empty(x.shape), weight.new_empty(weight.shape), *sums


def _setup_context(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):
    x, weight, *more = ctx.saved_tensors
    dx, dweight, *sums = _direct_backward(x, weight, *more, dy, ctx.silu)
    return dx, dweight, *(None if y is None else total.to(y.dtype) for y, total in zip(more, sums, strict=True)), None


_convolve.register_autograd(_backward, setup_context=_setup_context)
_direct = shorten(_convolve, _setup_context, _backward)
_direct_backward = shorten(_convolve_backward)


@_convolve.register_vmap
def _(info, in_dims, *inputs):
    *tensors, silu = inputs
    folded = fold_all(tensors, in_dims, info.batch_size, (0, 0, 0, 0))
    return unfold(_convolve(*folded, silu), info.batch_size, 0), 0


@_convolve_backward.register_vmap
def _(info, in_dims, *inputs):
    *tensors, silu = inputs
    grads = _convolve_backward(*fold_all(tensors, in_dims, info.batch_size, (0, 0, 0, 0, 0)), silu)
    return tuple(unfold(x, info.batch_size, 0) for x in grads), (0, 0, 0, 0)
