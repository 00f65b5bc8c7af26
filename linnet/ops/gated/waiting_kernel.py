"""One token of HGRN2's recurrence in one launch, with a state that is written only every few tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.stepping import as_heads, choose_columns


def waiting_step(
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
    """As `forget_gated_waiting_step`; state, gates and values in one piece, the state float32."""
    (B, H, K), V = q.shape, v.shape[2]
    q, x, v = as_heads(q), as_heads(x), as_heads(v)
    lower_bound = None if lower_bound is None else lower_bound.contiguous()
    o = torch.empty((B, H, V), dtype=v.dtype, device=v.device)
    rows, columns, blocks, warps = choose_columns(K, V, B * H)
    even = rows == K and columns * blocks == V
    room = gates.shape[2]
    with torch.cuda.device_of(state):
        waiting_kernel[(B * H * blocks,)](
            q, x, v, state, gates, values, waiting, lower_bound, o, scale, q.stride(0), x.stride(0), v.stride(0),
            H, K, V, room, triton.next_power_of_2(room), rows, columns, even, lower_bound is not None,
            num_warps=warps,
        )  # fmt: skip
    return o


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
def waiting_kernel(
    q, x, v, state, gates, values, waiting, lower_bound, o, scale, q_stride, x_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROOM: tl.constexpr, PLACES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, BOUNDED: tl.constexpr,
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
    own_gate = tl.load(x + b * x_stride + h * K + i, mask=rows, other=0.0)
    own_value = tl.load(v + b * v_stride + h * V + j, mask=columns, other=0.0)
    query = tl.load(q + b * q_stride + h * K + i, mask=rows, other=0.0).to(tl.float32)
    bound = 0.0
    if BOUNDED:
        bound = tl.load(lower_bound + h * K + i, mask=rows, other=0.0).to(tl.float32)
    gates += head.to(tl.int64) * (ROOM * K)
    values += head.to(tl.int64) * (ROOM * V)
    there, followed = n < number, n < number - 1
    earlier = tl.load(gates + n[:, None] * K + i[None, :], mask=there[:, None] & rows[None, :], other=0.0)
    later = tl.load(gates + (n + 1)[:, None] * K + i[None, :], mask=followed[:, None] & rows[None, :], other=0.0)
    earlier_values = tl.load(values + n[:, None] * V + j[None, :], mask=there[:, None] & columns[None, :], other=0.0)
    bounds = 0.0
    if BOUNDED:
        bounds = bound[None, :]
    forget, key = _open(own_gate, bound, BOUNDED)
    earlier_forget, earlier_key = _open(earlier, bounds, BOUNDED)
    later_forget, _ = _open(later, bounds, BOUNDED)
    # What the tokens behind each that waits have left of it, this one the last of them.
    later_forget = tl.where(followed[:, None], later_forget, tl.where(there[:, None], forget[None, :], 1.0))
    left = tl.cumprod(later_forget, 0, reverse=True)
    first = tl.sum(tl.where((n == 0)[:, None], earlier_forget * left, 0.0), 0)
    decay = tl.where(number > 0, first, forget)  # of the state
    scores = tl.sum(tl.where(there[:, None], earlier_key * left * query[None, :], 0.0), 1)
    value = own_value.to(tl.float32)
    out = tl.sum(S * (decay * query)[:, None], 0) + tl.sum(key * query, 0) * value
    out += tl.sum(scores[:, None] * earlier_values.to(tl.float32), 0)
    tl.store(o + head * V + j, (out * scale).to(o.dtype.element_ty), mask=columns)
    if number == ROOM:  # all that waited, and this token, go into the state
        S = S * decay[:, None] + key[:, None] * value[None, :]
        left_of = forget
        for m in range(ROOM):
            row = ROOM - 1 - m
            gate = tl.load(gates + row * K + i, mask=rows, other=0.0)
            one = tl.load(values + row * V + j, mask=columns, other=0.0).to(tl.float32)
            gate_forget, gate_key = _open(gate, bound, BOUNDED)
            S += (gate_key * left_of)[:, None] * one[None, :]
            left_of *= gate_forget
        if EVEN:
            tl.store(at, S)
        else:
            tl.store(at, S, mask=rows[:, None] & columns[None, :])
    else:  # programs of the same head read other rows than this one
        tl.store(values + number * V + j, own_value, mask=columns)
        if block == 0:
            tl.store(gates + number * K + i, own_gate, mask=rows)
