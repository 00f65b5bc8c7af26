"""The diagonal recurrence, real and complex (HGRN v1, in paper 002)."""

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.arguments import check_decay_values, check_sequence
from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states
from linnet.ops.registration import empty_like, register, register_step
from linnet.ops.scan import chunked
from linnet.ops.scan.reference import scan_reference
from linnet.ops.spans import cut_linear, run_form, split_rows
from linnet.ops.stepping import use_kernel

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

    Time and memory are linear in T. Computes in float32 (float64 for float64 inputs). Weak decays drift in float32:
    over 100,000 tokens on a CPU the error is 1.1e-5 of the largest output at log-decays of -1e-3, 2.0e-4 at -1e-4, and
    at most 1.1e-3 at weaker ones (docs/kernels.md has the command).

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
    check_decay_values(OP, log_decay)
    arguments = (x, log_decay, theta, initial_state, cu_seqlens)
    return run_form(scan, scan_span, scan_reference, arguments, output_final_state, asks=False)


def _shapes(x, log_decay, theta, initial_state, cu_seqlens):
    states = (count_states(cu_seqlens, x.shape[0]), *x.shape[2:])
    return empty_like(x), x.new_empty(states, dtype=state_dtype(x, log_decay))


def _axes(arguments, in_dims):
    """Models fold into the batch, or into the channels where there is theta or documents are packed (B = 1)."""
    if in_dims[4] is not None:
        return None
    by_channel = arguments[2] is not None or arguments[4] is not None
    return ((2, 2, 0, 1, None), (2, 1)) if by_channel else ((0, 0, None, 0, None), (0, 0))


# FLOPs of the recurrence itself, 2 per multiply-add (8 in complex numbers); exponentials are free.


def _flops(x_shape, log_decay_shape, theta_shape, *_, **__) -> int:
    """2 per token and channel: h = a h + x; 8 if complex."""
    B, T, D = log_decay_shape
    return B * T * D * (2 if theta_shape is None else 8)


def _backward_flops(x_shape, log_decay_shape, theta_shape, *_, **__) -> int:
    """3 per token and channel: w = a g, g = dh + w, dlog_decay = w h; 14 if complex."""
    B, T, D = log_decay_shape
    return B * T * D * (3 if theta_shape is None else 14)


scan = register(
    "scan",
    "Tensor x, Tensor log_decay, Tensor? theta, Tensor? initial_state, Tensor? cu_seqlens",
    *backend.forms("scan", chunked, "scan_forward", "scan_backward"),
    outputs=2,
    learned=range(4),
    kept=(0,),
    shapes=_shapes,
    axes=_axes,
    flops=_flops,
    backward_flops=_backward_flops,
)


def _decay(rows: int, x, log_decay, theta, *_) -> Tensor:
    """[B, D]: the decay over a span; [B, D, 2] with theta."""
    size = split_rows(log_decay, rows).sum(1, dtype=state_dtype(x, log_decay)).exp()
    if theta is None:
        return size
    angle = theta.double() * (x.shape[1] // max(1, rows))
    return size[..., None] * torch.stack([angle.cos(), angle.sin()], -1).to(size.dtype)


scan_span = cut_linear(scan, 3, 4, _decay, pairs=2)


def _check(x, log_decay, theta, initial_state, cu_seqlens) -> None:
    if log_decay.ndim != 3 or tuple(x.shape) != tuple(log_decay.shape) + (() if theta is None else (2,)):
        raise ValueError(
            f"{OP}: x {list(x.shape)}, log_decay {list(log_decay.shape)}; give log_decay [B, T, D] and x "
            f"{'[B, T, D] (with theta [B, T, D, 2])' if theta is None else '[B, T, D, 2], because theta is given'}"
        )
    if theta is not None and theta.shape != log_decay.shape[2:]:
        raise ValueError(f"{OP}: theta has shape {list(theta.shape)}; give [{log_decay.shape[2]}]")
    inputs = {"x": x, "log_decay": log_decay} | ({} if theta is None else {"theta": theta})
    check_sequence(OP, inputs, initial_state, x.shape[2:], state_dtype(x, log_decay), cu_seqlens)


def diagonal_step(x: Tensor, log_decay: Tensor, state: Tensor, *, theta: Tensor | None = None) -> Tensor:
    """One token of `diagonal_scan`: state <- exp(log_decay + i theta) state + x, in place.

    Args:
        x: [B, D]; with theta [B, D, 2] (real and imaginary part).
        log_decay: [B, D], at most 0; -inf forgets all that was before.
        state: like x, float32 or float64.
        theta: [D], radians a token.

    Returns:
        The new state as a tensor of its own, in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    expected = tuple(log_decay.shape) + (() if theta is None else (2,))
    if log_decay.ndim != 2 or tuple(x.shape) != expected or tuple(state.shape) != expected:
        raise ValueError(
            f"diagonal_step: x {list(x.shape)}, log_decay {list(log_decay.shape)}, state {list(state.shape)}; "
            f"give log_decay [B, D], and x and state {'[B, D]' if theta is None else '[B, D, 2]'}"
        )
    if theta is not None and theta.shape != log_decay.shape[1:]:
        raise ValueError(f"diagonal_step: theta has shape {list(theta.shape)}; give [{log_decay.shape[1]}]")
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"diagonal_step: state has dtype {state.dtype}; give float32 or float64")
    if use_kernel("scan", state, x, log_decay, theta):
        return _step(x, log_decay, state, theta)
    decay = log_decay.to(state.dtype).exp()
    if theta is None:
        state.mul_(decay)
    else:
        real, imaginary = decay * theta.to(state.dtype).cos(), decay * theta.to(state.dtype).sin()
        re, im = state.unbind(-1)
        state.copy_(torch.stack([real * re - imaginary * im, imaginary * re + real * im], -1))
    state.add_(x.to(state.dtype))
    return state.to(x.dtype, copy=True)


_step = register_step(
    "diagonal_step", "Tensor x, Tensor log_decay, Tensor(a!) state, Tensor? theta", "scan.triton.step"
)
