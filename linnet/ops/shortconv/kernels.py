"""The Triton kernels of the short convolution; `linnet.ops.shortconv.triton` launches them.

A program is BD channels of a segment of SIZE tokens, L of them read at a time, of one row [T, D]; PER rows have the
taps of one model.
"""

import triton
import triton.language as tl

from linnet.ops.device import LOG2_E


@triton.jit
def _place(T, G, PER, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr):
    """The channels, the model, the place of the row's first element, the first token, and the segment of all rows."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    segment = tl.program_id(0) // BLOCKS
    row = segment // G
    d = (tl.program_id(0) % BLOCKS) * BD + tl.arange(0, BD)
    return d, row // PER, row.to(tl.int64) * T * D, (segment % G) * SIZE, segment.to(tl.int64)


@triton.jit
def _load_taps(weight, bias, offset, model, d, D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr,
               HAS_OFFSET: tl.constexpr):  # fmt: skip
    """The taps, what is added after them and what before."""
    taps = ()
    at = model.to(tl.int64) * D + d
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + at * W + j, mask=d < D, other=0.0).to(tl.float32),)
    last, first = tl.zeros_like(taps[0]), tl.zeros_like(taps[0])
    if HAS_BIAS:
        last = tl.load(bias + at, mask=d < D, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        first = tl.load(offset + at, mask=d < D, other=0.0).to(tl.float32)
    return taps, last, first


@triton.jit
def _load_value(x, t, d, first, T, D: tl.constexpr, EDGE: tl.constexpr, HAS_OFFSET: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """x of a token with its offset; without one in the dtype of memory, which takes fewer registers until then."""
    value = _load(x, t, d, T, D, EDGE, MASKED)
    if HAS_OFFSET:
        value = value.to(tl.float32) + first
        if EDGE or MASKED:
            value = tl.where((t >= 0) & (t < T), value, 0.0)
    return value


@triton.jit
def _load(pointer, t, d, T, D: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr):
    """A token of a row, in the dtype of memory; EDGE where it may lie outside the row, which is 0."""
    at = pointer + t.to(tl.int64) * D + d
    if MASKED:
        return tl.load(at, mask=(d < D) & (t >= 0) & (t < T), other=0.0)
    elif EDGE:
        return tl.load(at, mask=(d >= 0) & (t >= 0) & (t < T), other=0.0)
    return tl.load(at)


@triton.jit
def _store(pointer, t, value, d, stop, D: tl.constexpr, MASKED: tl.constexpr):
    at, value = pointer + t.to(tl.int64) * D + d, value.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(at, value, mask=(d < D) & (t < stop))
    else:
        tl.store(at, value)


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp2(-z * LOG2_E))


@triton.jit
def forward_kernel(
    x, weight, bias, offset, y, T, G, PER, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, L: tl.constexpr,
    SIZE: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OFFSET: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    d, model, base, begin, _ = _place(T, G, PER, D, BD, SIZE)
    x, y = x + base, y + base
    taps, last, first = _load_taps(weight, bias, offset, model, d, D, W, HAS_BIAS, HAS_OFFSET)
    stop = tl.minimum(begin + SIZE, T)
    for i in tl.range(0, tl.cdiv(stop - begin, L)):
        t = begin + i * L
        values = ()
        for k in tl.static_range(L + W - 1):
            values = values + (_load_value(x, t + k - (W - 1), d, first, T, D, k < W - 1, HAS_OFFSET, MASKED),)
        for k in tl.static_range(L):
            z = last
            for j in tl.static_range(W):
                z += taps[j] * values[k + j].to(tl.float32)
            if SILU:
                z *= _sigmoid(z)
            _store(y, t + k, z, d, stop, D, MASKED)


@triton.jit
def _gradient(values, taps, last, dy, FIRST: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr):
    """The gradient before the activation, of the token whose first tap is on values[FIRST]."""
    gradient = dy.to(tl.float32)
    if SILU:
        z = last
        for j in tl.static_range(W):
            z += taps[j] * values[FIRST + j].to(tl.float32)
        gate = _sigmoid(z)
        gradient *= gate * (1.0 + z * (1.0 - gate))
    return gradient


@triton.jit
def backward_kernel(
    x, weight, bias, offset, dy, dx, sums, T, G, PER, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr,
    L: tl.constexpr, SIZE: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OFFSET: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dx, and the sums of a segment for the taps, the bias and the offset: [segments of all rows, W + 2, D]."""
    d, model, base, begin, segment = _place(T, G, PER, D, BD, SIZE)
    x, dy, dx = x + base, dy + base, dx + base
    taps, last, first = _load_taps(weight, bias, offset, model, d, D, W, HAS_BIAS, HAS_OFFSET)
    stop = tl.minimum(begin + SIZE, T)

    # Of the W - 1 tokens after the segment, whose taps reach into it; the nearest is the first of `later`.
    later, edge = (), ()
    for k in tl.static_range(2 * W - 2):
        edge = edge + (_load_value(x, stop + k - (W - 1), d, first, T, D, True, HAS_OFFSET, MASKED),)
    for k in tl.static_range(W - 1):
        later = later + (_gradient(edge, taps, last, _load(dy, stop + k, d, T, D, True, MASKED), k, W, SILU),)
    totals = ()
    for _ in tl.static_range(W + 2):
        totals = totals + (tl.zeros_like(last),)

    chunks = tl.cdiv(stop - begin, L)
    for i in tl.range(0, chunks):
        t = begin + (chunks - 1 - i) * L
        values, gradients = (), ()
        for k in tl.static_range(L + W - 1):
            values = values + (_load_value(x, t + k - (W - 1), d, first, T, D, k < W - 1, HAS_OFFSET, MASKED),)
        for k in tl.static_range(L):
            gradients = gradients + (_load(dy, t + k, d, stop, D, False, MASKED),)
        for k in tl.static_range(L - 1, -1, -1):
            own = _gradient(values, taps, last, gradients[k], k, W, SILU)
            near = (own,) + later  # of tokens t + k, t + k + 1, ...
            out = taps[W - 1] * own
            for j in tl.static_range(1, W):
                out += taps[W - 1 - j] * near[j]
            _store(dx, t + k, out, d, stop, D, MASKED)
            new = ()
            for j in tl.static_range(W):
                new = new + (totals[j] + own * values[k + j].to(tl.float32),)
            if MASKED:
                out = tl.where(t + k < stop, out, 0.0)
            totals = new + (totals[W] + own, totals[W + 1] + out)
            after = ()
            for j in tl.static_range(W - 1):
                after = after + (near[j],)
            later = after
    for j in tl.static_range(W + 2):
        tl.store(sums + (segment * (W + 2) + j) * D + d, totals[j], mask=d < D)
