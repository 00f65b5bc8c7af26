"""The Triton kernels of attention with a long filter; `linnet.ops.longconv.triton` says what they compute.

Rows [T, H, D] of q, k and v, of which PER share the filters [H, T] of one model; tiles are of BT tokens, PD the power
of two that holds D. The matrix of a filter is never stored: a tile of it is read from the filter's values, which have
zeros before them and after them, so that a lag from -BT to the last of the last tile may be read.
"""

import triton
import triton.language as tl


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
