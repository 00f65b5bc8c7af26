"""The diagonal recurrence, one token: the state is updated in place."""

import torch
from torch import Tensor

from linnet.ops.registration import register_step
from linnet.ops.stepping import use_kernel


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
