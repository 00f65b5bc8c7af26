"""The diagonal recurrence, real and complex (HGRN v1, in paper 002)."""

import importlib

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linnet.ops import backend
from linnet.ops.arguments import check_decay_values, check_devices, check_state
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.direct import shorten
from linnet.ops.documents import check_documents, count_states
from linnet.ops.folding import fold_all, unfold
from linnet.ops.looping import each
from linnet.ops.scan import chunked
from linnet.ops.scan.reference import scan_reference
from linnet.ops.scan.step import diagonal_step

__all__ = ["diagonal_scan", "diagonal_step"]

OP = "diagonal_scan"


def diagonal_scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    theta: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """h_t = exp(log_decay_t) h_{t-1} + x_t, each channel on its own; log_decay_t + i theta with theta.

    Time and memory are linear in T. Computes in float32 (float64 for float64 inputs).

    Args:
        x: [B, T, D]; with theta [B, T, D, 2], the real and the imaginary part.
        log_decay: [B, T, D], at most 0; -inf is a reset.
        theta: [D], radians a token, the same for all tokens.
        initial_state: [N, D] or [N, D, 2], float32 (float64 for float64 inputs), the state after the token before the
            first; None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        h, shaped like x and in its dtype, and the final state or None. Gradients reach x, log_decay, theta and the
        state.

    Raises:
        ValueError: shapes or dtypes that do not go together, offsets that do not rise from 0 to T.

    Source: HGRN, as paper 002 recalls it (eq. 1, and the complex recurrence in the text after it).
    """
    _check(x, log_decay, theta, initial_state, cu_seqlens)
    if backend.debugging():
        check_decay_values(OP, log_decay)
    form = scan_reference if backend.use_reference() else _direct
    h, final_state = form(x, log_decay, theta, initial_state, cu_seqlens)
    return h, final_state if output_final_state else None


@torch.library.custom_op("linnet::scan", mutates_args=())
def scan(
    x: Tensor,
    log_decay: Tensor,
    theta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    with exact(x):
        return _form(x).scan_forward(x, log_decay, theta, initial_state, cu_seqlens)


@torch.library.custom_op("linnet::scan_backward", mutates_args=())
def scan_backward(
    x: Tensor,
    log_decay: Tensor,
    theta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    h: Tensor,
    dh: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with exact(x):
        return _form(x).scan_backward(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal)


def _form(x: Tensor):
    return importlib.import_module("linnet.ops.scan.triton") if backend.use_triton("scan", x.is_cuda) else chunked


@scan.register_fake
def _(x, log_decay, theta, initial_state, cu_seqlens):
    return x.new_empty(x.shape), _empty_state(x, log_decay, cu_seqlens)


@scan_backward.register_fake
def _(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal):
    dtheta = x.new_empty(0, dtype=state_dtype(x, log_decay)) if theta is None else theta.new_empty(theta.shape)
    dlog_decay = log_decay.new_empty(log_decay.shape)
    return x.new_empty(x.shape), dlog_decay, dtheta, _empty_state(x, log_decay, cu_seqlens)


def _empty_state(x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty((count_states(cu_seqlens, x.shape[0]), *x.shape[2:]), dtype=state_dtype(x, log_decay))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[0])
    ctx.set_materialize_grads(False)


def _backward(ctx, dh, dfinal):
    x, log_decay, theta, initial_state, cu_seqlens, h = ctx.saved_tensors
    dh = torch.zeros_like(h) if dh is None else dh
    dx, dlog_decay, dtheta, dinitial = _direct_backward(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal)
    return dx, dlog_decay, None if theta is None else dtheta, None if initial_state is None else dinitial, None


scan.register_autograd(_backward, setup_context=_setup_context)
_direct = shorten(scan, _setup_context, _backward)
_direct_backward = shorten(scan_backward)


def _fold(size: int, dims: tuple, tensors: tuple) -> tuple[list[Tensor | None], bool]:
    """Folds the models into the batch, or into the channels where there is theta or documents are packed (B = 1)."""
    by_channel = tensors[2] is not None or tensors[4] is not None
    axes = (2, 2, 0, 1, None, 2, 2, 1) if by_channel else (0, 0, None, 0, None, 0, 0, 0)
    return fold_all(tensors, dims, size, axes), by_channel


@scan.register_vmap
def _(info, in_dims, *tensors):
    if in_dims[4] is not None:
        return each(scan, info.batch_size, in_dims, tensors)
    folded, by_channel = _fold(info.batch_size, in_dims, tensors)
    axes = (2, 1) if by_channel else (0, 0)
    return tuple(unfold(x, info.batch_size, axis) for x, axis in zip(scan(*folded), axes, strict=True)), axes


@scan_backward.register_vmap
def _(info, in_dims, *tensors):
    if in_dims[4] is not None:
        return each(scan_backward, info.batch_size, in_dims, tensors)
    folded, by_channel = _fold(info.batch_size, in_dims, tensors)
    axes = (2, 2, 0, 1) if by_channel else (0, 0, None, 0)
    if tensors[2] is None:
        axes = (*axes[:2], None, axes[3])
    grads = scan_backward(*folded)
    return tuple(
        x if axis is None else unfold(x, info.batch_size, axis) for x, axis in zip(grads, axes, strict=True)
    ), axes


# FLOPs of the recurrence itself, 2 a multiply-add (8 in complex numbers); exponentials are free.


@register_flop_formula(torch.ops.linnet.scan)
def scan_flops(x_shape, log_decay_shape, theta_shape, *_, **__) -> int:
    """2 a token and channel: h = a h + x; 8 if complex."""
    B, T, D = log_decay_shape
    return B * T * D * (2 if theta_shape is None else 8)


@register_flop_formula(torch.ops.linnet.scan_backward)
def scan_backward_flops(x_shape, log_decay_shape, theta_shape, *_, **__) -> int:
    """3 a token and channel: w = a g, g = dh + w, dlog_decay = w h; 14 if complex."""
    B, T, D = log_decay_shape
    return B * T * D * (3 if theta_shape is None else 14)


def _check(x, log_decay, theta, initial_state, cu_seqlens) -> None:
    if log_decay.ndim != 3 or tuple(x.shape) != tuple(log_decay.shape) + (() if theta is None else (2,)):
        raise ValueError(
            f"{OP}: x {list(x.shape)}, log_decay {list(log_decay.shape)}; give log_decay [B, T, D] and x "
            f"{'[B, T, D] (with theta [B, T, D, 2])' if theta is None else '[B, T, D, 2], because theta is given'}"
        )
    if 0 in x.shape:
        raise ValueError(f"{OP}: x {list(x.shape)}; every size must be at least 1")
    if not (x.is_floating_point() and log_decay.is_floating_point()):
        raise ValueError(f"{OP}: x and log_decay have dtypes {x.dtype}, {log_decay.dtype}; give floating-point tensors")
    if theta is not None and theta.shape != log_decay.shape[2:]:
        raise ValueError(f"{OP}: theta has shape {list(theta.shape)}; give [{log_decay.shape[2]}]")
    check_devices(OP, x=x, log_decay=log_decay, theta=theta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    check_documents(cu_seqlens, x.shape[0])
    shape = (count_states(cu_seqlens, x.shape[0]), *x.shape[2:])
    check_state(OP, initial_state, shape, state_dtype(x, log_decay))
