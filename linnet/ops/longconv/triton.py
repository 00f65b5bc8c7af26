"""The kernels of the long convolution: attention with a long filter where sequences are short, and a transposition.

The attention takes all pairs of tokens, in tiles on the chip. Forward, dq, and dk with dv each walk along a row or
column of tiles; the gradient of the filter sums the products of scores and their gradients over the batch, for tiles
of one distance, and then along diagonals.

PER rows [T, H, D] of q, k and v share the filters [H, T] of one model; tiles are of BT tokens, PD is the power of two
that holds D. The matrix of a filter is never stored: a tile of it is read from the filter's values, which have zeros
before and after them, so that a lag from -BT to the last of the last tile may be read.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.launching import Launcher, align, cdiv, choose_operands, count_processors, pad
from linnet.ops.longconv import chunked
from linnet.ops.longconv.chunked import sum_diagonals

TILE = 64  # tokens of the attention; rows and columns of the transposition


def attend_forward(q: Tensor, k: Tensor, v: Tensor, filters: Tensor) -> Tensor:
    """y like q; arguments as in the registered op."""
    if not _supports(q, k, v, filters):
        return chunked.attend_forward(q, k, v, filters)
    q, k, v = (align(x) for x in (q, k, v))
    y = torch.empty_like(q)
    _plan(forward_kernel, *_key(q, filters))(q, k, v, _surround(filters), y)
    return y


def attend_backward(q: Tensor, k: Tensor, v: Tensor, filters: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients to q, k, v and the filters."""
    if not _supports(q, k, v, filters):
        return chunked.attend_backward(q, k, v, filters, dy)
    q, k, v, dy, values = (align(x) for x in (q, k, v, dy, _surround(filters)))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    key = _key(q, filters)
    (models, heads, length), tiles, groups = filters.shape, cdiv(q.shape[1], TILE), count_groups(*key)
    sums = q.new_empty(models * heads, groups, tiles, TILE, TILE, dtype=torch.float32)
    _plan(forward_kernel, *key)(dy, v, k, values, dq)
    _plan(key_kernel, *key)(q, k, v, dy, values, dk, dv)
    _plan(filter_kernel, *key)(q, k, v, dy, sums)
    sums = sums.sum(1).flatten(0, 1)
    lags = sum_diagonals(sums, torch.float32).view(-1, tiles, TILE)
    before = sum_diagonals(sums.mT, torch.float32).view(-1, tiles, TILE)
    lags[:, :-1, 1:] += before[:, 1:, 1:].flip(2)  # lags below those of a tile's diagonal
    return dq, dk, dv, lags.flatten(1)[:, :length].reshape(filters.shape).to(filters.dtype)


def _surround(filters: Tensor) -> Tensor:
    """With a tile of zeros before the values and zeros up to a whole tile after them."""
    return F.pad(filters, (TILE, -filters.shape[2] % TILE))


def _supports(q: Tensor, k: Tensor, v: Tensor, filters: Tensor) -> bool:
    return backend.takes_kernels("filtered_attention", (q.dtype, k.dtype, v.dtype)) and filters.dtype != torch.float64


def _key(q: Tensor, filters: Tensor) -> tuple:
    return q.shape, filters.shape[0], q.dtype, filters.dtype, q.device


@functools.lru_cache(1024)
def _plan(kernel, shape, models: int, dtype, filter_dtype, device: torch.device) -> Launcher:
    rows, length, heads, width = shape
    tiles, operands = cdiv(length, TILE), choose_operands(dtype)
    constants = (heads, width, pad(width), TILE, *operands)
    if kernel is filter_kernel:
        groups = count_groups(shape, models, dtype, filter_dtype, device)
        programs, constants = models * heads * groups * tiles, (groups, *constants)
    else:
        programs = rows * heads * tiles
    # One stage: reading a filter ahead of the products costs more than it hides.
    return Launcher(kernel, programs, (length, rows // models, *constants), num_warps=4, num_stages=1)


def count_groups(shape, models: int, dtype, filter_dtype, device: torch.device) -> int:
    """Into how many the rows of a model are shared out, so that their sums fill the GPU a few times."""
    rows, length, heads, _ = shape
    programs = models * heads * cdiv(length, TILE)
    return max(1, min(rows // models, 16 * count_processors(device, interpreted=1) // programs))


@triton.jit
def _load(pointer, row, head, first, T, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr,
          OPERAND: tl.constexpr):  # fmt: skip
    """[BT, PD] from token `first`, 0 beyond the ends."""
    t, d = first + tl.arange(0, BT)[:, None], tl.arange(0, PD)[None, :]
    at = (row * T + t) * (H * D) + head * D + d
    return tl.load(pointer + at, mask=(t < T) & (d < D), other=0.0).to(OPERAND)


@triton.jit
def _store(pointer, value, row, head, first, T, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr):
    t, d = first + tl.arange(0, BT)[:, None], tl.arange(0, PD)[None, :]
    at = (row * T + t) * (H * D) + head * D + d
    tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=(t < T) & (d < D))


@triton.jit
def _place(T, PER, filters, H: tl.constexpr, BT: tl.constexpr):
    """The tile, the head, the row and, of this program's filter, the value at lag 0."""
    tiles = tl.cdiv(T, BT)
    i, head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles) % H
    row = tl.program_id(0) // (tiles * H)
    return i, head, row.to(tl.int64), filters + ((row // PER) * H + head).to(tl.int64) * ((tiles + 1) * BT) + BT


@triton.jit
def forward_kernel(
    q, k, v, filters, y, T, PER, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y; of dy, v and k in the places of q, k and v: dq."""
    i, head, row, values = _place(T, PER, filters, H, BT)
    q_ = _load(q, row, head, i * BT, T, H, D, PD, BT, OPERAND)
    total = tl.zeros([BT, PD], tl.float32)
    lags = tl.arange(0, BT)[:, None] - tl.arange(0, BT)[None, :]
    for j in tl.range(0, i + 1):
        k_ = _load(k, row, head, j * BT, T, H, D, PD, BT, OPERAND)
        v_ = _load(v, row, head, j * BT, T, H, D, PD, BT, OPERAND)
        scores = tl.dot(q_, tl.trans(k_), input_precision=PRECISION) * tl.load(values + (i - j) * BT + lags).to(
            tl.float32
        )
        total = tl.dot(scores.to(OPERAND), v_, total, input_precision=PRECISION)
    _store(y, total, row, head, i * BT, T, H, D, PD, BT)


@triton.jit
def key_kernel(
    q, k, v, dy, filters, dk, dv, T, PER, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    j, head, row, values = _place(T, PER, filters, H, BT)
    k_ = _load(k, row, head, j * BT, T, H, D, PD, BT, OPERAND)
    v_ = _load(v, row, head, j * BT, T, H, D, PD, BT, OPERAND)
    keys, gradients = tl.zeros([BT, PD], tl.float32), tl.zeros([BT, PD], tl.float32)
    lags = tl.arange(0, BT)[None, :] - tl.arange(0, BT)[:, None]
    for i in tl.range(j, tl.cdiv(T, BT)):
        q_ = _load(q, row, head, i * BT, T, H, D, PD, BT, OPERAND)
        dy_ = _load(dy, row, head, i * BT, T, H, D, PD, BT, OPERAND)
        weights = tl.load(values + (i - j) * BT + lags).to(tl.float32)
        scores = tl.dot(k_, tl.trans(q_), input_precision=PRECISION) * weights
        gradients = tl.dot(scores.to(OPERAND), dy_, gradients, input_precision=PRECISION)
        scores = tl.dot(v_, tl.trans(dy_), input_precision=PRECISION) * weights
        keys = tl.dot(scores.to(OPERAND), q_, keys, input_precision=PRECISION)
    _store(dk, keys, row, head, j * BT, T, H, D, PD, BT)
    _store(dv, gradients, row, head, j * BT, T, H, D, PD, BT)


@triton.jit
def filter_kernel(
    q, k, v, dy, sums, T, PER, G, H: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of tiles that are `away` tiles apart, the sum of (q k) (dy v) over a G-th of a model's rows: element by element,
    [models, H, G, tiles, BT, BT]."""
    tiles = tl.cdiv(T, BT)
    away, g = tl.program_id(0) % tiles, (tl.program_id(0) // tiles) % G
    head, model = (tl.program_id(0) // (tiles * G)) % H, tl.program_id(0) // (tiles * G * H)
    size = tl.cdiv(PER, G)
    total = tl.zeros([BT, BT], tl.float32)
    for n in tl.range(g * size, tl.minimum(g * size + size, PER)):
        row = (model * PER + n).to(tl.int64)
        for i in tl.range(away, tiles):
            q_ = _load(q, row, head, i * BT, T, H, D, PD, BT, OPERAND)
            dy_ = _load(dy, row, head, i * BT, T, H, D, PD, BT, OPERAND)
            k_ = _load(k, row, head, (i - away) * BT, T, H, D, PD, BT, OPERAND)
            v_ = _load(v, row, head, (i - away) * BT, T, H, D, PD, BT, OPERAND)
            scores = tl.dot(q_, tl.trans(k_), input_precision=PRECISION)
            total += scores * tl.dot(dy_, tl.trans(v_), input_precision=PRECISION)
    at = tl.arange(0, BT)[:, None] * BT + tl.arange(0, BT)[None, :]
    tl.store(sums + tl.program_id(0).to(tl.int64) * (BT * BT) + at, total)


def transpose(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, A, C] -> [M, C, A] in `dtype`."""
    x = align(x)
    y = torch.empty(x.shape[0], x.shape[2], x.shape[1], dtype=dtype, device=x.device)
    _plan_transpose(x.shape, x.dtype, dtype, x.device)(x, y)
    return y


@functools.lru_cache(1024)
def _plan_transpose(shape: torch.Size, dtype: torch.dtype, to: torch.dtype, device: torch.device) -> Launcher:
    models, rows, columns = shape
    even = rows % TILE == 0 and columns % TILE == 0
    programs = models * cdiv(rows, TILE) * cdiv(columns, TILE)
    return Launcher(transpose_kernel, programs, (rows, columns, TILE, even), num_warps=4)


@triton.jit
def transpose_kernel(x, y, A, C, TILE: tl.constexpr, EVEN: tl.constexpr):
    rows, columns = tl.cdiv(A, TILE), tl.cdiv(C, TILE)
    column, row = tl.program_id(0) % columns, (tl.program_id(0) // columns) % rows
    base = (tl.program_id(0) // (columns * rows)).to(tl.int64) * A * C
    a, c = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    source = x + base + a[:, None].to(tl.int64) * C + c[None, :]
    target = y + base + c[:, None].to(tl.int64) * A + a[None, :]
    if EVEN:
        tl.store(target, tl.trans(tl.load(source)).to(y.dtype.element_ty))
    else:
        value = tl.load(source, mask=(a[:, None] < A) & (c[None, :] < C), other=0.0)
        tl.store(target, tl.trans(value).to(y.dtype.element_ty), mask=(c[:, None] < C) & (a[None, :] < A))
