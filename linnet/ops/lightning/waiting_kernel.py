"""One token of Lightning Attention in one launch, with a state that is written only every few tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.stepping import as_heads, choose_columns


def waiting_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    keys: Tensor,
    values: Tensor,
    waiting: Tensor,
    log_decay: Tensor | None,
    scale: float,
    activation: str = "none",
) -> Tensor:
    """As `lightning_waiting_step`; state, keys and values in one piece, the state float32."""
    (B, H, K), V = q.shape, v.shape[2]
    q, k, v = as_heads(q), as_heads(k), as_heads(v)
    log_decay = None if log_decay is None else log_decay.contiguous()
    o = torch.empty((B, H, V), dtype=v.dtype, device=v.device)
    rows, columns, blocks, warps = choose_columns(K, V, B * H)
    even = rows == K and columns * blocks == V
    room = keys.shape[2]
    with torch.cuda.device_of(state):
        waiting_kernel[(B * H * blocks,)](
            q, k, v, state, keys, values, waiting, o, log_decay, scale, q.stride(0), k.stride(0), v.stride(0),
            H, K, V, room, triton.next_power_of_2(room + 1), rows, columns, even, log_decay is not None, activation,
            num_warps=warps,
        )  # fmt: skip
    return o


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def waiting_kernel(
    q, k, v, state, keys, values, waiting, o, rates, scale, q_stride, k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROOM: tl.constexpr, PLACES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, HAS_DECAY: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    b, h = (head // H).to(tl.int64), head % H
    number = tl.load(waiting + b)
    i, j, n = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PLACES)
    rows, columns = i < K, j < V
    at = state + head.to(tl.int64) * (K * V) + i[:, None] * V + j[None, :]
    if EVEN:
        S = tl.load(at)
    else:
        S = tl.load(at, mask=rows[:, None] & columns[None, :], other=0.0)
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
        query, all_keys = _silu(query), _silu(all_keys)
    scores = tl.sum(all_keys * query[None, :], 1)
    out = tl.sum(S * query[:, None], 0)
    if HAS_DECAY:
        rate = tl.load(rates + h).to(tl.float32)
        scores *= tl.where(n < number, tl.exp(rate * tl.maximum(number - n, 1)), 1.0)  # no infinity times zero
        decay = tl.exp(rate * (number + 1))
        out *= decay
    out += tl.sum(scores[:, None] * all_values, 0)
    tl.store(o + head * V + j, (out * scale).to(o.dtype.element_ty), mask=columns)
    if number == ROOM:  # all that waited, and this token, go into the state
        if HAS_DECAY:
            S *= decay
        for m in tl.static_range(ROOM + 1):
            if m < ROOM:
                key = tl.load(keys + m * K + i, mask=rows, other=0.0).to(tl.float32)
                value = tl.load(values + m * V + j, mask=columns, other=0.0).to(tl.float32)
            else:
                key, value = own_key.to(tl.float32), own_value.to(tl.float32)
            if ACTIVATION == "silu":
                key = _silu(key)
            if HAS_DECAY and m < ROOM:
                key *= tl.exp(rate * (ROOM - m))
            S += key[:, None] * value[None, :]
        if EVEN:
            tl.store(at, S)
        else:
            tl.store(at, S, mask=rows[:, None] & columns[None, :])
    else:  # programs of the same head read other rows than this one
        tl.store(values + number * V + j, own_value, mask=columns)
        if block == 0:
            tl.store(keys + number * K + i, own_key, mask=rows)
