"""Gated linear attention for one token, as in decoding."""

import importlib

from torch import Tensor

from linnet.ops.chunks import exact
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
        return importlib.import_module("linnet.ops.gated.step_kernel").step(q, k, v, log_decay, state, scale)
    with exact(q):
        state.mul_(log_decay.to(state.dtype).exp()[..., None])
        state.addcmul_(k.to(state.dtype)[..., None], v.to(state.dtype)[..., None, :])
        return (scale * (q.to(state.dtype)[..., None, :] @ state).squeeze(-2)).to(v.dtype)
