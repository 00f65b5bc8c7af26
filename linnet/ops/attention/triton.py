"""Causal attention with narrow heads on a GPU, forward and backward in blocks of scores that stay on the chip.

PyTorch's kernels are made for heads of 64 and more: they pad heads of 8 (MAD) to 32 or 64. These pad to 16, and need
no separate pass for the sums of the backward.

Rows are [T, H, D] of q, k, v. A program takes a block of BT queries (or keys) of one head of one row and walks over the
blocks of the others. PD is the power of two that holds D. Scores are in base 2: `scale` includes log2(e).
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import Launcher, align, cdiv, choose_operands, pad

# Forward and backward on an H200, 393,216 tokens of width 128 in sequences of 128, in milliseconds with heads of 8, 16
# and 32: 2.08, 1.09, 0.66; with 8 warps 4.08, 2.10, 1.54; with 2 2.00, 0.95, 0.73; blocks of 128 4.29, 2.20, 1.31, of
# 32 3.02, 1.52, 1.09. PyTorch's: flash 4.89, 2.40, 1.12; cuDNN 4.15, 1.97, 1.09; memory-efficient 4.35, 2.21, 1.14.
BLOCK, WARPS = 64, 4


def attend_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """o, and the logarithm (base 2) of each query's sum [B, H, T], float32."""
    q, k, v = align(q), align(k), align(v)
    o, lse = torch.empty_like(q), _numbers(q)
    _plan(forward_kernel, q.shape, q.dtype, q.device)(q, k, v, o, lse, q.shape[1], _scale(q))
    return o, lse


def attend_backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k and v."""
    q, k, v, o, lse, do = (align(x) for x in (q, k, v, o, lse, do))
    dq, dk, dv, along = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _numbers(q)
    key, sizes = (q.shape, q.dtype, q.device), (q.shape[1], _scale(q))
    _plan(queries_kernel, *key)(q, k, v, o, do, lse, along, dq, *sizes)
    _plan(keys_kernel, *key)(q, k, v, do, lse, along, dk, dv, *sizes)
    return dq, dk, dv


def _numbers(q: Tensor) -> Tensor:
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)


def _scale(q: Tensor) -> float:
    return q.shape[3] ** -0.5 * math.log2(math.e)


@functools.lru_cache(1024)
def _plan(kernel, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Launcher:
    batch, length, heads, width = shape
    block = min(BLOCK if dtype != torch.float32 else 32, pad(length))
    constants = (heads, width, pad(width), block, *choose_operands(dtype))
    return Launcher(kernel, batch * heads * cdiv(length, block), constants, num_warps=WARPS)


@triton.jit
def _load(pointer, first, block, T, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr):
    """[BT, PD] of the tokens of a block, 0 beyond the ends."""
    t, d = block * BT + tl.arange(0, BT)[:, None], tl.arange(0, PD)[None, :]
    return tl.load(pointer + first + t * (H * D) + d, mask=(t < T) & (d < D), other=0.0)


@triton.jit
def _store(pointer, value, first, block, T, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr):
    t, d = block * BT + tl.arange(0, BT)[:, None], tl.arange(0, PD)[None, :]
    tl.store(pointer + first + t * (H * D) + d, value.to(pointer.dtype.element_ty), mask=(t < T) & (d < D))


@triton.jit
def _place(T, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr):
    """The block of this program, where its row and head start, and where their numbers [R, H, T] do."""
    blocks = tl.cdiv(T, BT)
    head, row = tl.program_id(0) // blocks % H, (tl.program_id(0) // (blocks * H)).to(tl.int64)
    return tl.program_id(0) % blocks, row * T * (H * D) + head * D, (row * H + head) * T


@triton.jit
def forward_kernel(
    q, k, v, o, lse, T, scale, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, first, numbers = _place(T, H, D, BT)
    tq = _load(q, first, i, T, H, D, PD, BT).to(OPERAND)
    index = tl.arange(0, BT)
    top = tl.full([BT], float("-inf"), tl.float32)
    denominator = tl.zeros([BT], tl.float32)
    total = tl.zeros([BT, PD], tl.float32)
    for j in range(0, i + 1):
        tk = _load(k, first, j, T, H, D, PD, BT).to(OPERAND)
        tv = _load(v, first, j, T, H, D, PD, BT).to(OPERAND)
        scores = tl.dot(tq, tl.trans(tk), input_precision=PRECISION) * scale
        scores = tl.where((i - j) * BT + index[:, None] >= index[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(top - higher)
        denominator = denominator * shrunk + tl.sum(shares, 1)
        total = total * shrunk[:, None] + tl.dot(shares.to(OPERAND), tv, input_precision=PRECISION)
        top = higher
    _store(o, total / denominator[:, None], first, i, T, H, D, PD, BT)
    t = i * BT + index
    tl.store(lse + numbers + t, top + tl.log2(denominator), mask=t < T)


@triton.jit
def queries_kernel(
    q, k, v, o, do, lse, along, dq, T, scale, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq without its factor `scale`'s log2(e), and do o of each query, which the keys need too."""
    i, first, numbers = _place(T, H, D, BT)
    index = tl.arange(0, BT)
    t = i * BT + index
    td = _load(do, first, i, T, H, D, PD, BT)
    inner = tl.sum(td.to(tl.float32) * _load(o, first, i, T, H, D, PD, BT).to(tl.float32), 1)
    tl.store(along + numbers + t, inner, mask=t < T)
    level = tl.load(lse + numbers + t, mask=t < T, other=0.0)
    tq, td = _load(q, first, i, T, H, D, PD, BT).to(OPERAND), td.to(OPERAND)
    total = tl.zeros([BT, PD], tl.float32)
    for j in range(0, i + 1):
        tk = _load(k, first, j, T, H, D, PD, BT).to(OPERAND)
        tv = _load(v, first, j, T, H, D, PD, BT).to(OPERAND)
        shares = tl.exp2(tl.dot(tq, tl.trans(tk), input_precision=PRECISION) * scale - level[:, None])
        slopes = shares * (tl.dot(td, tl.trans(tv), input_precision=PRECISION) - inner[:, None])
        slopes = tl.where((i - j) * BT + index[:, None] >= index[None, :], slopes, 0.0)
        total += tl.dot(slopes.to(OPERAND), tk, input_precision=PRECISION)
    _store(dq, total * (scale * 0.6931471805599453), first, i, T, H, D, PD, BT)


@triton.jit
def keys_kernel(
    q, k, v, do, lse, along, dk, dv, T, scale, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv."""
    j, first, numbers = _place(T, H, D, BT)
    index = tl.arange(0, BT)
    tk = _load(k, first, j, T, H, D, PD, BT).to(OPERAND)
    tv = _load(v, first, j, T, H, D, PD, BT).to(OPERAND)
    keys, values = tl.zeros([BT, PD], tl.float32), tl.zeros([BT, PD], tl.float32)
    for i in range(j, tl.cdiv(T, BT)):
        t = i * BT + index
        level = tl.load(lse + numbers + t, mask=t < T, other=0.0)
        inner = tl.load(along + numbers + t, mask=t < T, other=0.0)
        tq = _load(q, first, i, T, H, D, PD, BT).to(OPERAND)
        td = _load(do, first, i, T, H, D, PD, BT).to(OPERAND)
        shares = tl.exp2(tl.dot(tk, tl.trans(tq), input_precision=PRECISION) * scale - level[None, :])
        shares = tl.where((i - j) * BT + index[None, :] >= index[:, None], shares, 0.0)
        values += tl.dot(shares.to(OPERAND), td, input_precision=PRECISION)
        slopes = shares * (tl.dot(tv, tl.trans(td), input_precision=PRECISION) - inner[None, :])
        keys += tl.dot(slopes.to(OPERAND), tq, input_precision=PRECISION)
    _store(dk, keys * (scale * 0.6931471805599453), first, j, T, H, D, PD, BT)
    _store(dv, values, first, j, T, H, D, PD, BT)
