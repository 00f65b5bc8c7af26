"""Lightning Attention for one token where the state is written only every N tokens, as in decoding many sequences.

A step that reads and writes a state of [K, V] for each head is bound by these bytes. A pair (k, v) has K + V numbers,
so those of the last tokens may wait beside the state: every token reads state and pairs, and one in N adds the pairs to
the state and writes it. The result is the same, sums are taken in another order.
"""

import importlib
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops.chunks import exact
from linnet.ops.direct import shorten
from linnet.ops.stepping import use_kernel
from linnet.ops.waiting import check_room, enter, is_room


def lightning_waiting_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    keys: Tensor,
    values: Tensor,
    waiting: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float = 1.0,
    activation: Literal["none", "silu"] = "none",
) -> Tensor:
    """One token behind n waiting ones: o = scale q (lambda^(n+1) S + sum_j lambda^(n-j) k_j^T v_j + k^T v).

    With n = N - 1 the bracket is the new state; before that the pair becomes the next one that waits. S is the state of
    paper 001, eq. 17, n tokens ago. Whoever calls counts: behind the step of all layers, n <- (n + 1) mod N.

    Args:
        q, k: [B, H, K].
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64; updated in place.
        keys: [B, H, N - 1, K], values: [B, H, N - 1, V]: what waits, in the dtypes of k and v, before the activation;
            updated in place. Only the first n are read.
        waiting: int32 [B], n of each sequence, 0 to N - 1.
        log_decay: [H], at most 0; None for no decay.
        activation: none or silu, on q and k before anything else.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes that do not go together, an unknown activation.
    """
    B, H, K = q.shape
    if activation not in ("none", "silu"):
        raise ValueError(f"lightning_waiting_step: activation {activation!r} is unknown; use none or silu")
    if k.shape != q.shape or v.shape[:-1] != (B, H) or state.shape != (B, H, K, v.shape[-1]):
        raise ValueError(
            f"lightning_waiting_step: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, state "
            f"{list(state.shape)}; give q and k [B, H, K], v [B, H, V] and the state [B, H, K, V]"
        )
    check_room("lightning_waiting_step", waiting, keys=(keys, k), values=(values, v))
    if log_decay is not None and log_decay.shape != (H,):
        raise ValueError(f"lightning_waiting_step: log_decay has shape {list(log_decay.shape)}; give [{H}], one a head")
    if is_room(waiting, keys, values) and use_kernel("lightning", state, q, k, v, log_decay):
        return _kernel(q, k, v, state, keys, values, waiting, log_decay, float(scale), activation)
    with exact(q):
        return _plain(q, k, v, state, keys, values, waiting, log_decay, scale, activation)


def _plain(q, k, v, state, keys, values, waiting, log_decay, scale, activation):
    (k, _, full), (v_all, _, _) = enter(k, keys, waiting), enter(v, values, waiting)
    if activation == "silu":
        q, k = F.silu(q), F.silu(k)
    k, after = k.to(state.dtype), state
    if log_decay is not None:
        rate = log_decay.to(state.dtype)[:, None, None]
        number = waiting.long()[:, None, None, None]
        age = (number - torch.arange(k.shape[2], device=q.device)[:, None]).clamp_min(0)
        k = k * torch.where(age > 0, (rate * age.clamp_min(1)).exp(), 1.0)  # no infinity times zero
        after = state * (rate * (number + 1)).exp()
    after = after + k.mT @ v_all.to(state.dtype)
    state.copy_(torch.where(full, after, state))
    return (scale * (q.to(state.dtype)[..., None, :] @ after).squeeze(-2)).to(v.dtype)


@torch.library.custom_op("linnet::lightning_waiting_step", mutates_args=("state", "keys", "values"))
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    keys: Tensor,
    values: Tensor,
    waiting: Tensor,
    log_decay: Tensor | None,
    scale: float,
    activation: str,
) -> Tensor:
    kernel = importlib.import_module("linnet.ops.lightning.waiting_kernel")
    return kernel.waiting_step(q, k, v, state, keys, values, waiting, log_decay, scale, activation)


@_step.register_fake
def _(q, k, v, state, keys, values, waiting, log_decay, scale, activation):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


_kernel = shorten(_step)
