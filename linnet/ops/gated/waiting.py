"""Gated linear attention from a forget gate for one token, where the state is written only every N tokens.

As `linnet.ops.lightning.waiting`: the gate's logits and the values of the last tokens wait beside the state.
"""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops.chunks import exact
from linnet.ops.direct import shorten
from linnet.ops.gated.forget import forget_gate
from linnet.ops.stepping import use_kernel
from linnet.ops.waiting import check_room, enter, is_room


def forget_gated_waiting_step(
    q: Tensor,
    x: Tensor,
    v: Tensor,
    state: Tensor,
    gates: Tensor,
    values: Tensor,
    waiting: Tensor,
    *,
    lower_bound: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """One step of `forget_gated_step` behind n tokens that wait; as the last of N it writes the state.

    Args:
        q, x: [B, H, K]; x are the logits of the forget gate.
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state n tokens ago; updated in place.
        gates: [B, H, N - 1, K], values: [B, H, N - 1, V]: the tokens that wait, in the dtypes of x and v; updated in
            place. Only the first n are read.
        waiting: int32 [B], n of each sequence, 0 to N - 1; whoever calls counts, behind the step of all layers.
        lower_bound: [H, K], beta in (0, 1); None for 0.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    B, H, K = q.shape
    if x.shape != q.shape or v.shape[:-1] != (B, H) or state.shape != (B, H, K, v.shape[-1]):
        raise ValueError(
            f"forget_gated_waiting_step: q {list(q.shape)}, x {list(x.shape)}, v {list(v.shape)}, state "
            f"{list(state.shape)}; give q and x [B, H, K], v [B, H, V] and the state [B, H, K, V]"
        )
    check_room("forget_gated_waiting_step", waiting, gates=(gates, x), values=(values, v))
    if lower_bound is not None and lower_bound.shape != (H, K):
        raise ValueError(f"forget_gated_waiting_step: lower_bound has shape {list(lower_bound.shape)}; give [{H}, {K}]")
    if is_room(waiting, gates, values) and use_kernel("gated", state, q, x, v, lower_bound):
        return _kernel(q, x, v, state, gates, values, waiting, lower_bound, float(scale))
    with exact(q):
        return _plain(q, x, v, state, gates, values, waiting, lower_bound, scale)


def _plain(q, x, v, state, gates, values, waiting, lower_bound, scale):
    x, there, full = enter(x, gates, waiting)
    v_all, _, _ = enter(v, values, waiting)
    log_decay, k = forget_gate(x, None if lower_bound is None else lower_bound[:, None])
    log_decay, k = log_decay.to(state.dtype).where(there, 0.0), k.to(state.dtype).where(there, 0.0)
    behind = F.pad(log_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)  # of the tokens behind each
    after = state * log_decay.sum(2).exp()[..., None] + (k * behind.exp()).mT @ v_all.to(state.dtype)
    state.copy_(torch.where(full, after, state))
    return (scale * (q.to(state.dtype)[..., None, :] @ after).squeeze(-2)).to(v.dtype)


@torch.library.custom_op("linnet::forget_gated_waiting_step", mutates_args=("state", "gates", "values"))
def _step(
    q: Tensor,
    x: Tensor,
    v: Tensor,
    state: Tensor,
    gates: Tensor,
    values: Tensor,
    waiting: Tensor,
    lower_bound: Tensor | None,
    scale: float,
) -> Tensor:
    kernel = importlib.import_module("linnet.ops.gated.waiting_kernel")
    return kernel.waiting_step(q, x, v, state, gates, values, waiting, lower_bound, scale)


@_step.register_fake
def _(q, x, v, state, gates, values, waiting, lower_bound, scale):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


_kernel = shorten(_step)
