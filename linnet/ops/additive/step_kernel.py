"""One token of additive decay attention in one launch: every element of the state is read once and written once.

A program owns a head, because all of it must have read the running log-sum before that is overwritten. It walks the
columns of S in blocks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import KEEP_NAN, load_masked, store_masked
from linnet.ops.launching import launch
from linnet.ops.stepping import PROGRAMS, as_heads, choose_columns

TURNS = tl.constexpr(1 / (2 * math.pi))


def step(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor, theta: Tensor | None, positions: Tensor | None,
         scale: float) -> Tensor:  # fmt: skip
    """As `additive_step`: q, k [B, H, K], v [B, H, V], S [B, H, K or 2K, V] and z [B, H, K] float32, in one piece."""
    (B, H, K), V = q.shape, v.shape[2]
    q, k, v = as_heads(q), as_heads(k), as_heads(v)
    o = torch.empty((B, H, V), dtype=v.dtype, device=v.device)
    rows, columns, blocks, warps = choose_columns(K, V, PROGRAMS)  # the columns of many heads, whatever B and H
    if theta is not None and rows > 128:  # two tiles at a time, and the two after them: more would not fit registers
        columns, blocks = columns // 2, -(-V // (columns // 2))
    even = rows == K and columns * blocks == V
    if theta is not None:
        theta, positions = theta.contiguous(), positions.contiguous()
    sizes = (q.stride(0), k.stride(0), v.stride(0), H, K, V, rows, columns, even, theta is not None)
    launch(step_kernel, B * H, (q, k, v, S, z, o, theta, positions), (scale,), sizes, num_warps=warps)
    return o


@triton.jit
def _logaddexp(a, b):
    # log1p(x) = log(1 + x) plus what rounding took from x: an error that every token adds would become a drift.
    high = tl.maximum(a, b, KEEP_NAN)
    x = tl.exp(tl.minimum(a, b) - tl.where(high == float("-inf"), 0.0, high))
    one = 1.0 + x
    return high + (tl.log(one) + (x - (one - 1.0)) / one)


@triton.jit
def _load_tile(S, i, j, K: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr):
    at = S + i[:, None] * V + j[None, :]
    if EVEN:
        return tl.load(at, mask=(j < V)[None, :], other=0.0)
    return tl.load(at, mask=(i < K)[:, None] & (j < V)[None, :], other=0.0)


@triton.jit
def _store_tile(S, tile, i, j, K: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr):
    store_masked(S + i[:, None] * V, j[None, :], tile, (i < K)[:, None] & (j < V)[None, :], not EVEN)


@triton.jit
def step_kernel(
    q, k, v, S, z, o, theta, positions, scale, q_stride, k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    S += head * (K * V * (1 + ROTATED))
    # Every tile is requested before the work on the one before it, the first one before the work on the key.
    tile = _load_tile(S, i, j, K, V, EVEN)
    if ROTATED:
        tile_sine = _load_tile(S + K * V, i, j, K, V, EVEN)
    logit = load_masked(k + b * k_stride + h * K, i, i < K, not EVEN).to(tl.float32)
    query = load_masked(q + b * q_stride + h * K, i, i < K, not EVEN).to(tl.float32) * scale
    before = load_masked(z + head * K, i, i < K, not EVEN)
    after = _logaddexp(before, logit)
    key = tl.exp(logit - tl.where(after == float("-inf"), 0.0, after))
    decay = 1.0 - key
    if ROTATED:
        # In turns and float64: t theta in float32 is off by 0.01 radian near t = 131,072.
        frequency = load_masked(theta + h * K, i, i < K, not EVEN).to(tl.float64)
        turns = tl.load(positions + b).to(tl.float64) * frequency * TURNS
        angle = (turns - tl.floor(turns)).to(tl.float32) * 6.283185307179586
        cosine, sine = tl.cos(angle), tl.sin(angle)
        key_sine, query_sine = key * sine, query * sine
        key, query = key * cosine, query * cosine
    for _ in tl.range(0, (V + COLUMNS - 1) // COLUMNS):
        value = tl.load(v + b * v_stride + h * V + j, mask=j < V, other=0.0).to(tl.float32)[None, :]
        updated = tile * decay[:, None] + key[:, None] * value
        tile = _load_tile(S, i, j + COLUMNS, K, V, EVEN)
        _store_tile(S, updated, i, j, K, V, EVEN)
        out = tl.sum(updated * query[:, None], 0)
        if ROTATED:
            updated = tile_sine * decay[:, None] + key_sine[:, None] * value
            tile_sine = _load_tile(S + K * V, i, j + COLUMNS, K, V, EVEN)
            _store_tile(S + K * V, updated, i, j, K, V, EVEN)
            out += tl.sum(updated * query_sine[:, None], 0)
        tl.store(o + head * V + j, out.to(o.dtype.element_ty), mask=j < V)
        j += COLUMNS
    tl.debug_barrier()  # every warp has a copy of z, so all must have read it
    tl.store(z + head * K + i, after, mask=i < K)
