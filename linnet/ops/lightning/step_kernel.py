"""One token of Lightning Attention in one launch: every element of the state is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.stepping import as_heads, choose_columns


def step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None, scale: float, activation: str = "none"
) -> Tensor:
    """As `lightning_step`: q, k [B, H, K], v [B, H, V], the state [B, H, K, V] float32, in one piece."""
    (B, H, K), V = q.shape, v.shape[2]
    q, k, v = as_heads(q), as_heads(k), as_heads(v)
    log_decay = None if log_decay is None else log_decay.contiguous()
    o = torch.empty((B, H, V), dtype=v.dtype, device=v.device)
    rows, columns, blocks, warps = choose_columns(K, V, B * H)
    even = rows == K and columns * blocks == V
    with torch.cuda.device_of(state):
        step_kernel[(B * H * blocks,)](
            q, k, v, state, o, log_decay, scale, q.stride(0), k.stride(0), v.stride(0),
            H, K, V, rows, columns, even, log_decay is not None, activation,
            num_warps=warps,
        )  # fmt: skip
    return o


@triton.jit
def step_kernel(
    q, k, v, state, o, rates, scale, q_stride, k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    HAS_DECAY: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    b, h = (head // H).to(tl.int64), head % H
    i, j = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    at = state + head.to(tl.int64) * (K * V) + i[:, None] * V + j[None, :]
    if EVEN:
        S = tl.load(at)
        key = tl.load(k + b * k_stride + h * K + i)
        value = tl.load(v + b * v_stride + h * V + j)
        query = tl.load(q + b * q_stride + h * K + i)
    else:
        inside = (i < K)[:, None] & (j < V)[None, :]
        S = tl.load(at, mask=inside, other=0.0)
        key = tl.load(k + b * k_stride + h * K + i, mask=i < K, other=0.0)
        value = tl.load(v + b * v_stride + h * V + j, mask=j < V, other=0.0)
        query = tl.load(q + b * q_stride + h * K + i, mask=i < K, other=0.0)
    key, query = key.to(tl.float32), query.to(tl.float32)
    if ACTIVATION == "silu":
        key, query = key * tl.sigmoid(key), query * tl.sigmoid(query)
    if HAS_DECAY:
        S *= tl.exp(tl.load(rates + h).to(tl.float32))
    S += key[:, None] * value.to(tl.float32)[None, :]
    out = (tl.sum(S * query[:, None], 0) * scale).to(o.dtype.element_ty)
    if EVEN:
        tl.store(at, S)
        tl.store(o + head * V + j, out)
    else:
        tl.store(at, S, mask=inside)
        tl.store(o + head * V + j, out, mask=j < V)
