"""The modal convolution, one token: the state is updated in place."""

import torch
from torch import Tensor

from linnet.ops.registration import register_step
from linnet.ops.stepping import use_kernel


def modal_step(x: Tensor, log_decay: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """One token of `modal_convolution`: state <- exp(log_decay) state + x, in place.

    Args:
        x: [B, D].
        log_decay, weight: [D, E].
        state: [B, D, E], float32 or float64.

    Returns:
        y [B, D] in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if x.ndim != 2 or log_decay.shape != weight.shape or tuple(state.shape) != (x.shape[0], *log_decay.shape):
        raise ValueError(
            f"modal_step: x {list(x.shape)}, log_decay {list(log_decay.shape)}, weight {list(weight.shape)}, state "
            f"{list(state.shape)}; give x [B, D], log_decay and weight [D, E] and the state [B, D, E]"
        )
    if x.shape[1] != log_decay.shape[0]:
        raise ValueError(f"modal_step: x {list(x.shape)} has not the channels of log_decay {list(log_decay.shape)}")
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"modal_step: state has dtype {state.dtype}; give float32 or float64")
    if use_kernel("modal", state, x, log_decay, weight):
        return _step(x, log_decay, weight, state)
    state.mul_(log_decay.to(state.dtype).exp()).add_(x.to(state.dtype)[..., None])
    return (state * weight.to(state.dtype)).sum(-1).to(x.dtype)


_step = register_step("modal_step", "Tensor x, Tensor log_decay, Tensor weight, Tensor(a!) state", "modal.triton.step")
