"""Lightning Attention for one token, as in decoding; also with a state that is written only every N tokens.

A pair (k, v) has K + V numbers where the state has K V. With pending tokens (`linnet.ops.stepping`) every step reads
the state and the pending pairs, and one in N adds the pairs to the state and writes it. The result is the same; sums
are taken in another order.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops.chunks import exact
from linnet.ops.registration import register_step
from linnet.ops.stepping import append, check_pending, check_step, fits_kernel, use_kernel


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
    _check("lightning_step", q, k, v, state, log_decay, activation)
    if use_kernel("lightning", state, q, k, v, log_decay):
        return _step(q, k, v, state, log_decay, float(scale), activation)
    if activation == "silu":
        q, k = F.silu(q), F.silu(k)
    with exact(q):
        if log_decay is not None:
            state.mul_(log_decay.to(state.dtype).exp()[:, None, None])
        state.addcmul_(k.to(state.dtype)[..., None], v.to(state.dtype)[..., None, :])
        return (scale * (q.to(state.dtype)[..., None, :] @ state).squeeze(-2)).to(v.dtype)


def lightning_pending_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    keys: Tensor,
    values: Tensor,
    pending: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float = 1.0,
    activation: Literal["none", "silu"] = "none",
) -> Tensor:
    """One token behind n pending ones: o = scale q (lambda^(n+1) S + sum_j lambda^(n-j) k_j^T v_j + k^T v).

    With n = N - 1 the bracket is the new state; before that the pair becomes the next pending one. S is the state of
    paper 001, eq. 17, n tokens ago. The caller counts: after the step of all layers, n <- (n + 1) mod N.

    Args:
        q, k: [B, H, K].
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64; updated in place.
        keys: [B, H, N - 1, K], values: [B, H, N - 1, V]: the pending pairs, in the dtypes of k and v, before the
            activation; updated in place. Only the first n are read.
        pending: int32 [B], n of each sequence, 0 to N - 1.
        log_decay: [H], at most 0; None for no decay.
        activation: none or silu, on q and k before anything else.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes that do not go together, an unknown activation.
    """
    _check("lightning_pending_step", q, k, v, state, log_decay, activation)
    check_pending("lightning_pending_step", pending, keys=(keys, k), values=(values, v))
    if fits_kernel(pending, keys, values) and use_kernel("lightning", state, q, k, v, log_decay):
        return _pending_step(q, k, v, state, keys, values, pending, log_decay, float(scale), activation)
    with exact(q):
        return _pending_plain(q, k, v, state, keys, values, pending, log_decay, scale, activation)


def _check(op: str, q, k, v, state, log_decay, activation) -> None:
    if activation not in ("none", "silu"):
        raise ValueError(f"{op}: activation {activation!r} is unknown; use none or silu")
    check_step(op, v, state, q=q, k=k)
    if log_decay is not None and log_decay.shape != q.shape[1:2]:
        raise ValueError(f"{op}: log_decay has shape {list(log_decay.shape)}; give [{q.shape[1]}], one per head")


def _pending_plain(q, k, v, state, keys, values, pending, log_decay, scale, activation):
    (k, _, full), (v_all, _, _) = append(k, keys, pending), append(v, values, pending)
    if activation == "silu":
        q, k = F.silu(q), F.silu(k)
    k, after = k.to(state.dtype), state
    if log_decay is not None:
        rate = log_decay.to(state.dtype)[:, None, None]
        number = pending.long()[:, None, None, None]
        age = (number - torch.arange(k.shape[2], device=q.device)[:, None]).clamp_min(0)
        k = k * torch.where(age > 0, (rate * age.clamp_min(1)).exp(), 1.0)  # no infinity times zero
        after = state * (rate * (number + 1)).exp()
    after = after + k.mT @ v_all.to(state.dtype)
    state.copy_(torch.where(full, after, state))
    return (scale * (q.to(state.dtype)[..., None, :] @ after).squeeze(-2)).to(v.dtype)


_step = register_step(
    "lightning_step",
    "Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? log_decay, float scale, str activation",
    "lightning.step_kernel.step",
    like="v",
)
_pending_step = register_step(
    "lightning_pending_step",
    "Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor(b!) keys, Tensor(c!) values, Tensor pending, "
    "Tensor? log_decay, float scale, str activation",
    "lightning.step_kernel.pending_step",
    like="v",
)
