"""One token of Lightning Attention in one launch: every element of the state is read once, and written once or, with
pending tokens, every few tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import after_previous, load_masked, silu, store_masked, take_columns
from linnet.ops.launching import launch, next_power_of_2
from linnet.ops.stepping import as_heads, choose_columns


def step(q, k, v, state, log_decay, scale, activation="none") -> Tensor:
    """As `lightning_step`: q, k [B, H, K], v [B, H, V], the state [B, H, K, V] float32, contiguous."""
    return _run(step_kernel, q, k, v, (state,), (), log_decay, scale, activation)


def pending_step(q, k, v, state, keys, values, pending, log_decay, scale, activation="none") -> Tensor:
    """As `lightning_pending_step`; state, keys and values contiguous, the state float32."""
    room = keys.shape[2]
    sizes = room, next_power_of_2(room + 1)
    return _run(pending_kernel, q, k, v, (state, keys, values, pending), sizes, log_decay, scale, activation)


def _run(kernel, q, k, v, held: tuple[Tensor, ...], sizes: tuple[int, ...], log_decay, scale, activation) -> Tensor:
    (B, H, K), V = q.shape, v.shape[2]
    q, k, v = as_heads(q), as_heads(k), as_heads(v)
    log_decay = None if log_decay is None else log_decay.contiguous()
    o = torch.empty((B, H, V), dtype=v.dtype, device=v.device)
    rows, columns, blocks, warps = choose_columns(K, V, B * H)
    even = rows == K and columns * blocks == V
    constants = (
        q.stride(0), k.stride(0), v.stride(0), H, K, V, *sizes, rows, columns, even, log_decay is not None, activation,
    )  # fmt: skip
    tensors = q, k, v, *held, o, log_decay
    launch(kernel, B * H * blocks, tensors, (scale,), constants, num_warps=warps)
    return o


@triton.jit
def step_kernel(
    q, k, v, state, o, rates, scale, q_stride, k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    HAS_DECAY: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    _, head, b, h, i, j, state, inside = take_columns(state, H, K, V, ROWS, COLUMNS)
    at = j[None, :]
    after_previous(OVERLAPS)
    S = load_masked(state, at, inside, not EVEN)
    key = load_masked(k + b * k_stride + h * K, i, i < K, not EVEN)
    value = load_masked(v + b * v_stride + h * V, j, j < V, not EVEN)
    query = load_masked(q + b * q_stride + h * K, i, i < K, not EVEN)
    key, query = key.to(tl.float32), query.to(tl.float32)
    if ACTIVATION == "silu":
        key, query = silu(key), silu(query)
    if HAS_DECAY:
        S *= tl.exp(tl.load(rates + h).to(tl.float32))
    S += key[:, None] * value.to(tl.float32)[None, :]
    out = (tl.sum(S * query[:, None], 0) * scale).to(o.dtype.element_ty)
    store_masked(state, at, S, inside, not EVEN)
    store_masked(o + head * V, j, out, j < V, not EVEN)


@triton.jit
def pending_kernel(
    q, k, v, state, keys, values, pending, o, rates, scale, q_stride, k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROOM: tl.constexpr, PLACES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, HAS_DECAY: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    block, head, b, h, i, j, state, inside = take_columns(state, H, K, V, ROWS, COLUMNS)
    n, at, rows, columns = tl.arange(0, PLACES), j[None, :], i < K, j < V
    after_previous(OVERLAPS)
    S = load_masked(state, at, inside, not EVEN)
    number = tl.load(pending + b)
    own_key = tl.load(k + b * k_stride + h * K + i, mask=rows, other=0.0)
    own_value = tl.load(v + b * v_stride + h * V + j, mask=columns, other=0.0)
    query = tl.load(q + b * q_stride + h * K + i, mask=rows, other=0.0).to(tl.float32)
    keys += head.to(tl.int64) * (ROOM * K)
    values += head.to(tl.int64) * (ROOM * V)
    earlier, own = (n < number)[:, None], (n == number)[:, None]
    all_keys = tl.load(keys + n[:, None] * K + i[None, :], mask=earlier & rows[None, :], other=0.0)
    all_values = tl.load(values + n[:, None] * V + j[None, :], mask=earlier & columns[None, :], other=0.0)
    all_keys = tl.where(own, own_key[None, :], all_keys).to(tl.float32)
    all_values = tl.where(own, own_value[None, :], all_values).to(tl.float32)
    if ACTIVATION == "silu":
        query, all_keys = silu(query), silu(all_keys)
    scores = tl.sum(all_keys * query[None, :], 1)
    out = tl.sum(S * query[:, None], 0)
    if HAS_DECAY:
        rate = tl.load(rates + h).to(tl.float32)
        scores *= tl.where(n < number, tl.exp(rate * tl.maximum(number - n, 1)), 1.0)  # no infinity times zero
        decay = tl.exp(rate * (number + 1))
        out *= decay
    out += tl.sum(scores[:, None] * all_values, 0)
    tl.store(o + head * V + j, (out * scale).to(o.dtype.element_ty), mask=columns)
    if number == ROOM:  # all pending tokens, and this one, go into the state
        if HAS_DECAY:
            S *= decay
        for m in tl.static_range(ROOM + 1):
            if m < ROOM:
                key = tl.load(keys + m * K + i, mask=rows, other=0.0).to(tl.float32)
                value = tl.load(values + m * V + j, mask=columns, other=0.0).to(tl.float32)
            else:
                key, value = own_key.to(tl.float32), own_value.to(tl.float32)
            if ACTIVATION == "silu":
                key = silu(key)
            if HAS_DECAY and m < ROOM:
                key *= tl.exp(rate * (ROOM - m))
            S += key[:, None] * value[None, :]
        store_masked(state, at, S, inside, not EVEN)
    else:  # programs of the same head read other rows than this one
        tl.store(values + number * V + j, own_value, mask=columns)
        if block == 0:
            tl.store(keys + number * K + i, own_key, mask=rows)
