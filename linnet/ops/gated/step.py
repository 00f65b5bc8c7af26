"""Gated linear attention for one token, as in decoding."""

import importlib

import torch
from torch import Tensor

from linnet.ops.chunks import exact
from linnet.ops.direct import shorten
from linnet.ops.gated.forget import forget_gate
from linnet.ops.stepping import use_kernel


def gated_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """One step of paper 002, eq. 3: S <- diag(exp(log_decay)) S + k^T v, o = scale q S.

    Args:
        q, k, log_decay: [B, H, K]; log_decay at most 0.
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state after the previous token; updated in place.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together.
    """
    B, H, K = q.shape
    if not (k.shape == log_decay.shape == q.shape) or v.shape[:-1] != (B, H) or state.shape != (B, H, K, v.shape[-1]):
        raise ValueError(
            f"gated_step: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, log_decay {list(log_decay.shape)}, "
            f"state {list(state.shape)}; give q, k and log_decay [B, H, K], v [B, H, V] and the state [B, H, K, V]"
        )
    if use_kernel("gated", state, q, k, v, log_decay):
        return _kernel(q, k, v, log_decay, None, state, float(scale))
    with exact(q):
        state.mul_(log_decay.to(state.dtype).exp()[..., None])
        state.addcmul_(k.to(state.dtype)[..., None], v.to(state.dtype)[..., None, :])
        return (scale * (q.to(state.dtype)[..., None, :] @ state).squeeze(-2)).to(v.dtype)


def forget_gated_step(
    q: Tensor, x: Tensor, v: Tensor, state: Tensor, *, lower_bound: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """One step of `forget_gated_attention` (paper 002, 3.2): the gate too is made in the one launch, in float32.

    Args:
        q, x: [B, H, K]; x are the logits of the forget gate.
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state after the previous token; updated in place.
        lower_bound: [H, K], beta in (0, 1); None for 0.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together.
    """
    B, H, K = q.shape
    if x.shape != q.shape or v.shape[:-1] != (B, H) or state.shape != (B, H, K, v.shape[-1]):
        raise ValueError(
            f"forget_gated_step: q {list(q.shape)}, x {list(x.shape)}, v {list(v.shape)}, state {list(state.shape)}; "
            "give q and x [B, H, K], v [B, H, V] and the state [B, H, K, V]"
        )
    if lower_bound is not None and lower_bound.shape != (H, K):
        raise ValueError(f"forget_gated_step: lower_bound has shape {list(lower_bound.shape)}; give [{H}, {K}]")
    if use_kernel("gated", state, q, x, v, lower_bound):
        return _kernel(q, None, v, x, lower_bound, state, float(scale))
    log_decay, k = forget_gate(x, lower_bound)
    return gated_step(q, k.to(q.dtype), v, log_decay, state, scale=scale)


@torch.library.custom_op("linnet::gated_step", mutates_args=("state",))
def _step(
    q: Tensor, k: Tensor | None, v: Tensor, gate: Tensor, lower_bound: Tensor | None, state: Tensor, scale: float
) -> Tensor:
    return importlib.import_module("linnet.ops.gated.step_kernel").step(q, k, v, gate, lower_bound, state, scale)


@_step.register_fake
def _(q, k, v, gate, lower_bound, state, scale):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


_kernel = shorten(_step)
