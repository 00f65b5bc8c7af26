"""Gated linear attention for one token, as in decoding; from a forget gate also with a state that is written only every
N tokens: then the gate's logits and the values of the last tokens are pending (`linnet.ops.stepping`)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops.chunks import decay_rest, exact
from linnet.ops.gated.reference import forget_gate
from linnet.ops.registration import register_step
from linnet.ops.stepping import append, check_pending, check_step, fits_kernel, use_kernel


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
    check_step("gated_step", v, state, q=q, k=k, log_decay=log_decay)
    if use_kernel("gated", state, q, k, v, log_decay):
        return _step(q, k, v, log_decay, None, state, float(scale))
    with exact(q):
        log_decay = log_decay.to(state.dtype)
        decay = log_decay.exp()
        update = k.to(state.dtype)[..., None] * v.to(state.dtype)[..., None, :]
        update.addcmul_(state, decay_rest(log_decay, decay)[..., None])
        state.mul_(decay[..., None]).add_(update)
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
    _check("forget_gated_step", q, x, v, state, lower_bound)
    if use_kernel("gated", state, q, x, v, lower_bound):
        return _step(q, None, v, x, lower_bound, state, float(scale))
    log_decay, k = forget_gate(x, lower_bound)
    return gated_step(q, k.to(q.dtype), v, log_decay, state, scale=scale)


def forget_gated_pending_step(
    q: Tensor,
    x: Tensor,
    v: Tensor,
    state: Tensor,
    gates: Tensor,
    values: Tensor,
    pending: Tensor,
    *,
    lower_bound: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """One step of `forget_gated_step` behind n pending tokens; as the last of N it writes the state.

    Args:
        q, x: [B, H, K]; x are the logits of the forget gate.
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state n tokens ago; updated in place.
        gates: [B, H, N - 1, K], values: [B, H, N - 1, V]: the pending tokens, in the dtypes of x and v; updated in
            place. Only the first n are read.
        pending: int32 [B], n of each sequence, 0 to N - 1; the caller counts, after the step of all layers.
        lower_bound: [H, K], beta in (0, 1); None for 0.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    _check("forget_gated_pending_step", q, x, v, state, lower_bound)
    check_pending("forget_gated_pending_step", pending, gates=(gates, x), values=(values, v))
    if fits_kernel(pending, gates, values) and use_kernel("gated", state, q, x, v, lower_bound):
        return _pending_step(q, x, v, state, gates, values, pending, lower_bound, float(scale))
    with exact(q):
        return _pending_plain(q, x, v, state, gates, values, pending, lower_bound, scale)


def _check(op: str, q, x, v, state, lower_bound) -> None:
    check_step(op, v, state, q=q, x=x)
    if lower_bound is not None and lower_bound.shape != q.shape[1:]:
        raise ValueError(f"{op}: lower_bound has shape {list(lower_bound.shape)}; give {list(q.shape[1:])}")


def _pending_plain(q, x, v, state, gates, values, pending, lower_bound, scale):
    x, there, full = append(x, gates, pending)
    v_all, _, _ = append(v, values, pending)
    log_decay, k = forget_gate(x, None if lower_bound is None else lower_bound[:, None])
    log_decay, k = log_decay.to(state.dtype).where(there, 0.0), k.to(state.dtype).where(there, 0.0)
    behind = F.pad(log_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)  # of the tokens behind each
    total = log_decay.sum(2)
    decay = total.exp()
    update = (k * behind.exp()).mT @ v_all.to(state.dtype)
    after = torch.addcmul(update, state, decay_rest(total, decay)[..., None]).addcmul_(state, decay[..., None])
    state.copy_(torch.where(full, after, state))
    return (scale * (q.to(state.dtype)[..., None, :] @ after).squeeze(-2)).to(v.dtype)


_step = register_step(
    "gated_step",
    "Tensor q, Tensor? k, Tensor v, Tensor gate, Tensor? lower_bound, Tensor(a!) state, float scale",
    "gated.step_kernel.step",
    like="v",
)
_pending_step = register_step(
    "forget_gated_pending_step",
    "Tensor q, Tensor x, Tensor v, Tensor(a!) state, Tensor(b!) gates, Tensor(c!) values, Tensor pending, "
    "Tensor? lower_bound, float scale",
    "gated.step_kernel.pending_step",
    like="v",
)
