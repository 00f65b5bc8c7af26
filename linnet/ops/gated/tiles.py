"""What the kernels of gated linear attention share: where a chunk is, its gate, sums of log-decays over tokens.

Tiles are [C, K] or [C, V], decays are exponents of 2. A chunk has a slot, the same in all scratch memory, where tiles
are contiguous: chunk c of sequence n has slot n ceil(T / C) + c; that of a document which begins at row b has slot
floor(b / C) + n + c, so that slots are known without a look at the other documents; some stay empty.
"""

import triton
import triton.language as tl

from linnet.ops.device import LOG2_E, load_masked

# 2 to it is 0 in float32: a decay to less is a decay to 0, and -inf becomes a number that can be summed.
FLOOR = tl.constexpr(-160.0)


@triton.jit
def locate(slot, offsets, T, N, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The row of [B*T] where the chunk of a slot begins, and its tokens (at most 0 for an empty slot)."""
    if DOCUMENTS:
        n, beyond = slot * 0, slot * 0 + N
        while beyond - n > 1:  # the last document whose first slot is not after this one
            middle = (n + beyond) // 2
            later = tl.load(offsets + middle) // C + middle > slot
            beyond = tl.where(later, middle, beyond)
            n = tl.where(later, n, middle)
        begin = tl.load(offsets + n)
        row = begin + (slot - begin // C - n) * C
        left = tl.minimum(tl.load(offsets + n + 1), T) - row
        if row < 0:
            left = left * 0
    else:
        chunks = tl.cdiv(T, C)
        n = slot // chunks
        row = slot % chunks * C
        left = T - row
        row = n.to(tl.int64) * T + row
    return row.to(tl.int64), left


@triton.jit
def any_strong(strong, begin, tiles, GROUP: tl.constexpr):
    """Whether one of GROUP chunks is strong."""
    at = begin + tl.arange(0, GROUP)
    return tl.max(tl.load(strong + at, mask=at < tiles, other=0)) > 0


@triton.jit
def to_operand(x, OPERAND: tl.constexpr):
    """x in the dtype of operands. To bfloat16 two numbers at a time: one by one it takes as long as exponentials."""
    if OPERAND == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return x.to(OPERAND)


@triton.jit
def sum_tokens(choice, x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """choice [C, C] of 0, 1 and -1 @ x [C, K]: sums over tokens, to 2^-17 of the largest term for bfloat16."""
    if OPERAND == tl.bfloat16:
        high = to_operand(x, OPERAND)
        low = to_operand(x - high.to(tl.float32), OPERAND)
        return tl.dot(choice.to(tl.bfloat16), low, tl.dot(choice.to(tl.bfloat16), high))
    return tl.dot(choice.to(tl.float32), x, input_precision=PRECISION)


@triton.jit
def sum_transposed(x, choice, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x [K, C] @ choice [C, C]: as `sum_tokens`, of a transposed tile with the choices transposed."""
    if OPERAND == tl.bfloat16:
        high = to_operand(x, OPERAND)
        low = to_operand(x - high.to(tl.float32), OPERAND)
        return tl.dot(high, choice.to(tl.bfloat16), tl.dot(low, choice.to(tl.bfloat16)))
    return tl.dot(x, choice.to(tl.float32), input_precision=PRECISION)


@triton.jit
def lay_out(x, one, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """A transposed tile [K, C] in float32, laid out as the results of products.

    A product with the identity, `one`, does what no function asks for: left to itself the compiler evaluates the gate
    anew in each of the layouts in which its parts are used.
    """
    if OPERAND == tl.bfloat16:
        if x.dtype == tl.bfloat16:
            return tl.dot(x, one)
        return sum_transposed(x.to(tl.float32), one, OPERAND, PRECISION)
    return x.to(tl.float32)


@triton.jit
def choose_from_halves(r, u, level):
    """For tokens r, chooses the tokens u between r and where the halves, of 2^level tokens, of its block meet."""
    same = r >> (level + 1) == u >> (level + 1)
    after = (r >> level & 1 == 1) & (u >> level & 1 == 1) & (u <= r)
    before = (r >> level & 1 == 0) & (u >> level & 1 == 0) & (u > r)
    return tl.where(same & (after | before), 1.0, 0.0)


@triton.jit
def choose_until(r, u):
    """For tokens r, chooses the tokens u up to r."""
    return tl.where(u <= r, 1.0, 0.0)


@triton.jit
def choose_after(r, u):
    """For tokens r, chooses the tokens u after r."""
    return tl.where(u > r, 1.0, 0.0)


@triton.jit
def is_between(late, early, level):
    """Whether tokens lie in the late and the early half, of 2^level tokens, of one block."""
    return (late >> (level + 1) == early >> (level + 1)) & (late >> level & 1 == 1) & (early >> level & 1 == 0)


@triton.jit
def exp2(x, OPERAND: tl.constexpr):
    """2^x. For bfloat16 in one instruction, which takes what is below 2^-126 for 0, as do the two below."""
    if OPERAND == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def log2(x, OPERAND: tl.constexpr):
    """The logarithm to base 2."""
    if OPERAND == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def invert(x, OPERAND: tl.constexpr):
    """1 / x."""
    if OPERAND == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1 / x


@triton.jit
def open_gate(x, lower, OPERAND: tl.constexpr):
    """u, 1 + lower u and 1 / (1 + u) with u = exp(-x): f = (1 + lower u) / (1 + u), 1 - f = (1 - lower) u / (1 + u)."""
    u = exp2(tl.minimum(-x * LOG2_E, 125.0), OPERAND)
    return u, 1 + lower * u, invert(1 + u, OPERAND)


@triton.jit
def read_gate(
    k, gate, lower, at, mask, FORGET: tl.constexpr, MASKED: tl.constexpr, one, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """k and the log-decay of a tile, in float32; with `one` as in `lay_out`, of a transposed tile."""
    x = load_masked(gate, at, mask, MASKED)
    if not FORGET:
        x = tl.maximum(x.to(tl.float32) * LOG2_E, FLOOR)
    if one is not None:
        x = lay_out(x, one, OPERAND, PRECISION)
    x = x.to(tl.float32)
    if FORGET:
        u, top, share = open_gate(x, lower, OPERAND)
        key = (1 - lower) * u * share
        decay = log2(top * share, OPERAND)
        if MASKED:
            key = tl.where(mask, key, 0.0)
            decay = tl.where(mask, decay, 0.0)
    else:
        key = load_masked(k, at, mask, MASKED)
        if one is not None:
            key = lay_out(key, one, OPERAND, PRECISION)
        key, decay = key.to(tl.float32), x
    return key, tl.maximum(decay, FLOOR)


@triton.jit
def load_bound(bound, h, i, K: tl.constexpr, BOUNDED: tl.constexpr):
    """The lower bounds of channels i as a row, or 0."""
    if BOUNDED:
        return tl.load(bound + h * K + i, mask=i < K, other=0.0).to(tl.float32)[None, :]
    else:
        return 0.0
