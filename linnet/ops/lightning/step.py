"""Lightning Attention for one token, as in decoding."""

import importlib
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops.chunks import exact
from linnet.ops.direct import shorten
from linnet.ops.stepping import use_kernel


def lightning_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float = 1.0,
    activation: Literal["none", "silu"] = "none",
) -> Tensor:
    """One step of paper 001, eq. 17: S <- lambda S + k^T v, o = scale q S.

    Args:
        q, k: [B, H, K].
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state after the previous token; updated in place.
        log_decay: [H], at most 0; None for no decay.
        activation: none or silu, on q and k before anything else; in the same launch on a GPU.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together, an unknown activation.
    """
    B, H, K = q.shape
    if activation not in ("none", "silu"):
        raise ValueError(f"lightning_step: activation {activation!r} is unknown; use none or silu")
    if k.shape != q.shape or v.shape[:-1] != (B, H) or state.shape != (B, H, K, v.shape[-1]):
        raise ValueError(
            f"lightning_step: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, state {list(state.shape)}; "
            "give q and k [B, H, K], v [B, H, V] and the state [B, H, K, V]"
        )
    if log_decay is not None and log_decay.shape != (H,):
        raise ValueError(f"lightning_step: log_decay has shape {list(log_decay.shape)}; give [{H}], one a head")
    if use_kernel("lightning", state, q, k, v, log_decay):
        return _kernel(q, k, v, state, log_decay, float(scale), activation)
    if activation == "silu":
        q, k = F.silu(q), F.silu(k)
    with exact(q):
        if log_decay is not None:
            state.mul_(log_decay.to(state.dtype).exp()[:, None, None])
        state.addcmul_(k.to(state.dtype)[..., None], v.to(state.dtype)[..., None, :])
        return (scale * (q.to(state.dtype)[..., None, :] @ state).squeeze(-2)).to(v.dtype)


@torch.library.custom_op("linnet::lightning_step", mutates_args=("state",))
def _step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None, scale: float, activation: str
) -> Tensor:
    kernel = importlib.import_module("linnet.ops.lightning.step_kernel")
    return kernel.step(q, k, v, state, log_decay, scale, activation)


@_step.register_fake
def _(q, k, v, state, log_decay, scale, activation):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


_kernel = shorten(_step)
