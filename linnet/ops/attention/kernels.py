"""The Triton kernels of causal attention with narrow heads; `linnet.ops.attention.triton` says when they run.

Rows [T, H, D] of q, k, v; programs take a block of BT queries (or keys) of one head of one row and walk over the blocks
of the others. PD is the power of two that holds D. Scores are in base 2: `scale` has log2(e) in it.
"""

import triton
import triton.language as tl


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
    mass = tl.zeros([BT], tl.float32)
    total = tl.zeros([BT, PD], tl.float32)
    for j in range(0, i + 1):
        tk = _load(k, first, j, T, H, D, PD, BT).to(OPERAND)
        tv = _load(v, first, j, T, H, D, PD, BT).to(OPERAND)
        scores = tl.dot(tq, tl.trans(tk), input_precision=PRECISION) * scale
        scores = tl.where((i - j) * BT + index[:, None] >= index[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(top - higher)
        mass = mass * shrunk + tl.sum(shares, 1)
        total = total * shrunk[:, None] + tl.dot(shares.to(OPERAND), tv, input_precision=PRECISION)
        top = higher
    _store(o, total / mass[:, None], first, i, T, H, D, PD, BT)
    t = i * BT + index
    tl.store(lse + numbers + t, top + tl.log2(mass), mask=t < T)


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
