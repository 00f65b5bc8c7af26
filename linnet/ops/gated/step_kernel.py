"""One token of gated linear attention in one launch: every element of the state is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.stepping import as_heads, choose_columns


def step(
    q: Tensor, k: Tensor | None, v: Tensor, gate: Tensor, lower_bound: Tensor | None, state: Tensor, scale: float
) -> Tensor:
    """As `gated_step`, `gate` being its log-decay, or without k as `forget_gated_step`, `gate` being its logits x.

    q, k, gate [B, H, K], v [B, H, V], lower_bound [H, K], the state [B, H, K, V] float32, in one piece.
    """
    (B, H, K), V = q.shape, v.shape[2]
    q, v, gate = as_heads(q), as_heads(v), as_heads(gate)
    k = None if k is None else as_heads(k)
    lower_bound = None if lower_bound is None else lower_bound.contiguous()
    o = torch.empty((B, H, V), dtype=v.dtype, device=v.device)
    rows, columns, blocks, warps = choose_columns(K, V, B * H)
    even = rows == K and columns * blocks == V
    with torch.cuda.device_of(state):
        step_kernel[(B * H * blocks,)](
            q, k, v, gate, lower_bound, state, o, scale,
            q.stride(0), 0 if k is None else k.stride(0), v.stride(0), gate.stride(0),
            H, K, V, rows, columns, even, k is None, lower_bound is not None, num_warps=warps,
        )  # fmt: skip
    return o


@triton.jit
def _load(pointer, i, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer + i).to(tl.float32)
    return tl.load(pointer + i, mask=i < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def step_kernel(
    q, k, v, gate, lower_bound, state, o, scale, q_stride, k_stride, v_stride, gate_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    FORGET: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    b, h = (head // H).to(tl.int64), head % H
    i, j = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    at = state + head.to(tl.int64) * (K * V) + i[:, None] * V + j[None, :]
    inside = (i < K)[:, None] & (j < V)[None, :]
    if EVEN:
        S = tl.load(at)
    else:
        S = tl.load(at, mask=inside, other=0.0)
    decay = _load(gate + b * gate_stride + h * K, i, K, EVEN)
    value = _load(v + b * v_stride + h * V, j, V, EVEN)
    query = _load(q + b * q_stride + h * K, i, K, EVEN)
    if FORGET:
        key = 1.0 / (1.0 + tl.exp(decay))
        decay = 1.0 / (1.0 + tl.exp(-decay))
        if BOUNDED:
            bound = _load(lower_bound + h * K, i, K, EVEN)
            key *= 1.0 - bound
            decay = bound + (1.0 - bound) * decay
    else:
        key = _load(k + b * k_stride + h * K, i, K, EVEN)
        decay = tl.exp(decay)
    S = S * decay[:, None] + key[:, None] * value[None, :]
    out = (tl.sum(S * query[:, None], 0) * scale).to(o.dtype.element_ty)
    if EVEN:
        tl.store(at, S)
        tl.store(o + head * V + j, out)
    else:
        tl.store(at, S, mask=inside)
        tl.store(o + head * V + j, out, mask=j < V)
