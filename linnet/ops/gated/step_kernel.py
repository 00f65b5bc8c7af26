"""One token of gated linear attention in one launch: every element of the state is read once, and written once or, with
pending tokens, every few tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import LOG2_E, after_previous, load_masked, silu, store_masked, take_columns
from linnet.ops.gated.kernels import NO_DECAY, decayed, pack_decay
from linnet.ops.launching import launch, next_power_of_2
from linnet.ops.stepping import as_heads, choose_columns


def step(q, k, v, gate, lower_bound, state, scale, activation="none") -> Tensor:
    """As `gated_step`, `gate` being its log-decay, or without k as `forget_gated_step`, `gate` being its logits x.

    q, k, gate [B, H, K], v [B, H, V], lower_bound [H, K], the state [B, H, K, V] float32, contiguous.
    """
    (B, H, K), V = q.shape, v.shape[2]
    q, v, gate = as_heads(q), as_heads(v), as_heads(gate)
    k = None if k is None else as_heads(k)
    lower_bound = None if lower_bound is None else lower_bound.contiguous()
    o = torch.empty((B, H, V), dtype=v.dtype, device=v.device)
    rows, columns, blocks, warps = choose_columns(K, V, B * H)
    even = rows == K and columns * blocks == V
    constants = (
        q.stride(0), 0 if k is None else k.stride(0), v.stride(0), gate.stride(0), H, K, V, rows, columns, even,
        k is None, lower_bound is not None, activation,
    )  # fmt: skip
    tensors = q, k, v, gate, lower_bound, state, o
    launch(step_kernel, B * H * blocks, tensors, (scale,), constants, num_warps=warps)
    return o


def pending_step(q, x, v, state, gates, values, pending, lower_bound, scale, activation="none") -> Tensor:
    """As `forget_gated_pending_step`; state, gates and values contiguous, the state float32."""
    (B, H, K), V = q.shape, v.shape[2]
    q, x, v = as_heads(q), as_heads(x), as_heads(v)
    lower_bound = None if lower_bound is None else lower_bound.contiguous()
    o = torch.empty((B, H, V), dtype=v.dtype, device=v.device)
    # A program of one warp needs no barriers; of very many, each repeats too much of what is not the state's.
    rows, columns, blocks, warps = choose_columns(K, V, B * H, 16 if B * H < 2048 else 64)
    even, room = rows == K and columns * blocks == V, gates.shape[2]
    constants = (
        q.stride(0), x.stride(0), v.stride(0), H, K, V, room, next_power_of_2(room + 1), rows, columns, even,
        lower_bound is not None, activation,
    )  # fmt: skip
    tensors = q, x, v, state, gates, values, pending, lower_bound, o
    launch(pending_kernel, B * H * blocks, tensors, (scale,), constants, num_warps=warps)
    return o


@triton.jit
def step_kernel(
    q, k, v, gate, lower_bound, state, o, scale, q_stride, k_stride, v_stride, gate_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    FORGET: tl.constexpr, BOUNDED: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    _, head, b, h, i, j, state, inside = take_columns(state, H, K, V, ROWS, COLUMNS)
    at = j[None, :]
    after_previous(OVERLAPS)
    S = load_masked(state, at, inside, not EVEN)
    decay = load_masked(gate + b * gate_stride + h * K, i, i < K, not EVEN).to(tl.float32)
    value = load_masked(v + b * v_stride + h * V, j, j < V, not EVEN).to(tl.float32)
    query = load_masked(q + b * q_stride + h * K, i, i < K, not EVEN).to(tl.float32)
    if ACTIVATION == "silu":
        query = silu(query)
    if FORGET:
        key = 1.0 / (1.0 + tl.exp(decay))
        decay = 1.0 / (1.0 + tl.exp(-decay))
        if BOUNDED:
            bound = load_masked(lower_bound + h * K, i, i < K, not EVEN).to(tl.float32)
            key *= 1.0 - bound
            decay = bound + (1.0 - bound) * decay
        decay = tl.where(decay > 0.5, tl.minimum(-key, NO_DECAY), decay)  # packed; less 1 it is minus the key
    else:
        key = load_masked(k + b * k_stride + h * K, i, i < K, not EVEN).to(tl.float32)
        decay = pack_decay(decay * LOG2_E, tl.float32)
    S = decayed(S, decay[:, None], key[:, None] * value[None, :])
    out = (tl.sum(S * query[:, None], 0) * scale).to(o.dtype.element_ty)
    store_masked(state, at, S, inside, not EVEN)
    store_masked(o + head * V, j, out, j < V, not EVEN)


@triton.jit
def _open(x, bound, BOUNDED: tl.constexpr):
    """f and 1 - f, float32."""
    x = x.to(tl.float32)
    forget, key = 1.0 / (1.0 + tl.exp(-x)), 1.0 / (1.0 + tl.exp(x))
    if BOUNDED:
        key *= 1.0 - bound
        forget = bound + (1.0 - bound) * forget
    return forget, key


@triton.jit
def pending_kernel(
    q, x, v, state, gates, values, pending, lower_bound, o, scale, q_stride, x_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROOM: tl.constexpr, PLACES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, BOUNDED: tl.constexpr,
    ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    block, head, b, h, i, j, state, inside = take_columns(state, H, K, V, ROWS, COLUMNS)
    n, at, rows, columns = tl.arange(0, PLACES), j[None, :], i < K, j < V
    after_previous(OVERLAPS)
    S = load_masked(state, at, inside, not EVEN)
    number = tl.load(pending + b)
    own_gate = tl.load(x + b * x_stride + h * K + i, mask=rows, other=0.0)
    own_value = tl.load(v + b * v_stride + h * V + j, mask=columns, other=0.0)
    query = tl.load(q + b * q_stride + h * K + i, mask=rows, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        query = silu(query)
    bound = tl.load(lower_bound + h * K + i, mask=rows, other=0.0).to(tl.float32) if BOUNDED else 0.0
    bounds = bound[None, :] if BOUNDED else 0.0
    gates += head.to(tl.int64) * (ROOM * K)
    values += head.to(tl.int64) * (ROOM * V)
    earlier, own, next_is_own = (n < number)[:, None], (n == number)[:, None], (n == number - 1)[:, None]
    all_values = tl.load(values + n[:, None] * V + j[None, :], mask=earlier & columns[None, :], other=0.0)
    all_values = tl.where(own, own_value[None, :], all_values).to(tl.float32)
    gate_at = gates + n[:, None] * K + i[None, :]
    gate = tl.load(gate_at, mask=earlier & rows[None, :], other=0.0)
    next_gate = tl.load(gate_at + K, mask=(n < number - 1)[:, None] & rows[None, :], other=0.0)
    forget, key = _open(tl.where(own, own_gate[None, :], gate), bounds, BOUNDED)
    next_forget, _ = _open(tl.where(next_is_own, own_gate[None, :], next_gate), bounds, BOUNDED)
    left = tl.cumprod(tl.where(earlier, next_forget, 1.0), 0, reverse=True)  # the decay by the tokens behind each
    decay = tl.sum(tl.where((n == 0)[:, None], forget * left, 0.0), 0)
    scores = tl.sum(tl.where(earlier | own, key * left * query[None, :], 0.0), 1)
    out = tl.sum(S * (decay * query)[:, None], 0) + tl.sum(scores[:, None] * all_values, 0)
    tl.store(o + head * V + j, (out * scale).to(o.dtype.element_ty), mask=columns)
    if number == ROOM:  # all pending tokens, and this one, go into the state
        # All f less 1 is minus the sum of every 1 - f times all f behind it.
        less = -tl.sum(tl.where(earlier | own, key * left, 0.0), 0)
        decay = tl.where(decay > 0.5, tl.minimum(less, NO_DECAY), decay)
        own_forget, own_key = _open(own_gate, bound, BOUNDED)
        S = decayed(S, decay[:, None], own_key[:, None] * own_value.to(tl.float32)[None, :])
        for m in tl.static_range(ROOM - 1, -1, -1):
            one = tl.load(gates + m * K + i, mask=rows, other=0.0)
            value = tl.load(values + m * V + j, mask=columns, other=0.0).to(tl.float32)
            one_forget, one_key = _open(one, bound, BOUNDED)
            S += (one_key * own_forget)[:, None] * value[None, :]
            own_forget *= one_forget
        store_masked(state, at, S, inside, not EVEN)
    else:  # programs of the same head read other rows than this one
        tl.store(values + number * V + j, own_value, mask=columns)
        if block == 0:
            tl.store(gates + number * K + i, own_gate, mask=rows)
