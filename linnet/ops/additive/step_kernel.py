"""One token of additive decay attention in one launch: every element of the state is read once and written once.

A program owns a head, since whatever reads its running log-sum must have done so before it is overwritten; it walks the
columns of S in blocks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.stepping import PROGRAMS, as_heads, choose_columns

TURNS = tl.constexpr(1 / (2 * math.pi))


def step(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor, theta: Tensor | None, positions: Tensor | None,
         scale: float) -> Tensor:  # fmt: skip
    """As `additive_step`: q, k [B, H, K], v [B, H, V], S [B, H, K or 2K, V] and z [B, H, K] float32, in one piece."""
    (B, H, K), V = q.shape, v.shape[2]
    q, k, v = as_heads(q), as_heads(k), as_heads(v)
    o = torch.empty((B, H, V), dtype=v.dtype, device=v.device)
    # Few heads: all of a head at a time, by many warps. Many: blocks, so that a multiprocessor holds several programs.
    wide = B * H < PROGRAMS
    copies = 1 if theta is None else 2
    rows, columns, blocks, warps = choose_columns(K, V, PROGRAMS, (32768 if wide else 8192) // copies)
    even = rows == K and columns * blocks == V
    if theta is not None:
        theta, positions = theta.contiguous(), positions.contiguous()
    with torch.cuda.device_of(S):
        step_kernel[(B * H,)](
            q, k, v, S, z, o, theta, positions, scale,
            q.stride(0), k.stride(0), v.stride(0), H, K, V, rows, columns, even, theta is not None,
            num_warps=min(16, warps * copies * 2) if wide else 4,
        )  # fmt: skip
    return o


@triton.jit
def _logaddexp(a, b):
    # log1p(x) = log(1 + x) plus what rounding took from x: an error that every token adds would become a drift.
    high = tl.maximum(a, b)
    x = tl.exp(tl.minimum(a, b) - tl.where(high == float("-inf"), 0.0, high))
    one = 1.0 + x
    return high + (tl.log(one) + (x - (one - 1.0)) / one)


@triton.jit
def _load_row(pointer, i, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer + i)
    return tl.load(pointer + i, mask=i < WIDTH, other=0.0)


@triton.jit
def _update(at, keep, key, value, query, inside, EVEN: tl.constexpr):
    """S <- diag(keep) S + key^T value for the rows and columns of a tile, and what query reads of it."""
    if EVEN:
        S = tl.load(at)
    else:
        S = tl.load(at, mask=inside, other=0.0)
    S = S * keep[:, None] + key[:, None] * value[None, :]
    if EVEN:
        tl.store(at, S)
    else:
        tl.store(at, S, mask=inside)
    return tl.sum(S * query[:, None], 0)


@triton.jit
def step_kernel(
    q, k, v, S, z, o, theta, positions, scale, q_stride, k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    i = tl.arange(0, ROWS)
    logit = _load_row(k + b * k_stride + h * K, i, K, EVEN).to(tl.float32)
    query = _load_row(q + b * q_stride + h * K, i, K, EVEN).to(tl.float32) * scale
    before = _load_row(z + head * K, i, K, EVEN)
    after = _logaddexp(before, logit)
    key = tl.exp(logit - tl.where(after == float("-inf"), 0.0, after))
    keep = 1.0 - key
    if TURNED:
        # In turns and float64: t theta in float32 is off by 0.01 radian near t = 131,072.
        turns = tl.load(positions + b).to(tl.float64) * _load_row(theta + h * K, i, K, EVEN).to(tl.float64) * TURNS
        angle = (turns - tl.floor(turns)).to(tl.float32) * 6.283185307179586
        cosine, sine = tl.cos(angle), tl.sin(angle)
    S += head * (K * V * (1 + TURNED))
    for block in tl.range(0, (V + COLUMNS - 1) // COLUMNS):
        j = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = (i < K)[:, None] & (j < V)[None, :]
        value = _load_row(v + b * v_stride + h * V, j, V, EVEN).to(tl.float32)
        at = S + i[:, None] * V + j[None, :]
        if TURNED:
            out = _update(at, keep, key * cosine, value, query * cosine, inside, EVEN)
            out += _update(at + K * V, keep, key * sine, value, query * sine, inside, EVEN)
        else:
            out = _update(at, keep, key, value, query, inside, EVEN)
        out = out.to(o.dtype.element_ty)
        if EVEN:
            tl.store(o + head * V + j, out)
        else:
            tl.store(o + head * V + j, out, mask=j < V)
    tl.debug_barrier()  # every warp has a copy of z, so all must have read it
    tl.store(z + head * K + i, after, mask=i < K)
