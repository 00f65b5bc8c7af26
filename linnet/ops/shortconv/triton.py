"""The short convolution on a GPU: everything is read once and written once.

A program is a warp that owns BD channels of a segment of SIZE tokens of one row [T, D], and reads L tokens at a time;
PER rows have the taps of one model. The backward walks from the last token to the first and keeps the last few
gradients before the activation in registers, so that each is computed once. A segment leaves partial sums for the
parameters, which are added up in a fixed order.

float64 and more than 8 taps run in the chunked form.
"""

from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import backend
from linnet.ops.device import LOG2_E, store_masked
from linnet.ops.launching import Launcher, align, align_rows, cdiv, next_power_of_2
from linnet.ops.shortconv import chunked

MOST_TAPS = 8
CHANNELS = 128  # of a program, 4 a thread
READ_AHEAD, READ_AHEAD_BACKWARD = 4, 8  # tokens read at a time
SEGMENT, LEAST_SEGMENT = 128, 16  # tokens of a program; the fewest, where longer segments keep a GPU idle
PROGRAMS = 1024  # fewer leave processors of a GPU idle


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None, silu: bool) -> Tensor:
    """y [R, T, D]; arguments as in the registered op."""
    if not _supports(x, weight):
        return chunked.forward(x, weight, bias, offset, silu)
    y = x.new_empty(x.shape)
    _prepare(forward_kernel, x, silu, weight, bias, offset)(y)
    return y


def backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None, silu: bool, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients to x, weight, bias and offset (or None)."""
    if not _supports(x, weight):
        return chunked.backward(x, weight, bias, offset, silu, dy)
    (models, channels, width), segments = weight.shape, cdiv(x.shape[1], _segment(x.shape))
    dx = x.new_empty(x.shape)
    sums = x.new_empty(models, x.shape[0] // models * segments, width + 2, channels, dtype=torch.float32)
    _prepare(backward_kernel, x, silu, weight, bias, offset)(align(dy), dx, sums)
    total = sums.sum(1).to(weight.dtype)
    dbias = None if bias is None else total[:, width].to(bias.dtype, copy=True)
    doffset = None if offset is None else total[:, width + 1].to(offset.dtype, copy=True)
    return dx, total[:, :width].mT.contiguous(), dbias, doffset


def _supports(x: Tensor, weight: Tensor) -> bool:
    if weight.shape[2] > MOST_TAPS:
        backend.warn_slow("short_convolution", f"{weight.shape[2]} taps", f"use at most {MOST_TAPS}")
        return False
    return not backend.is_wide("short_convolution", x, weight)


def _prepare(kernel, x: Tensor, silu: bool, *parameters: Tensor | None) -> partial:
    """Returns what starts a kernel on x [R, T, D], weight, bias and offset; it takes the kernel's further tensors.

    x may be columns of a wider tensor (`linnet.ops.projections.project`).
    """
    rows, hop = align_rows(x, x.shape[2:])
    inputs = rows, *map(align, parameters)
    dtypes = tuple(None if y is None else y.dtype for y in inputs)
    return partial(_plan(kernel, x.shape, hop, inputs[1].shape, dtypes, x.device, silu), *inputs)


def _block(channels: int) -> int:
    """Channels of a program."""
    return min(CHANNELS, max(32, next_power_of_2(channels)))


def _segment(shape: torch.Size) -> int:
    """Tokens of a program, of x [R, T, D]."""
    (rows, length, channels), size = shape, SEGMENT
    while size > LEAST_SEGMENT and rows * cdiv(length, size) * cdiv(channels, _block(channels)) < PROGRAMS:
        size //= 2
    return size


@lru_cache(1024)
def _plan(kernel, shape, hop: int, weight_shape, dtypes: tuple, device: torch.device, silu: bool) -> Launcher:
    (rows, length, channels), (models, _, width) = shape, weight_shape
    block, size = _block(channels), _segment(shape)
    segments = cdiv(length, size)
    ahead = READ_AHEAD if kernel is forward_kernel else READ_AHEAD_BACKWARD
    even = channels % block == 0 and length % ahead == 0
    flags = (y is not None for y in dtypes[2:])
    constants = (
        length, segments, rows // models, channels, hop, width, block, ahead, size, silu, *flags, not even,
    )  # fmt: skip
    return Launcher(kernel, rows * segments * cdiv(channels, block), constants, num_warps=1)


@triton.jit
def _place(T, G, PER, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr):
    """The channels and the model of a program; the number of its row's first token among the tokens of all rows; its
    first token in that row; and the number of its segment among those of all rows."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    segment = tl.program_id(0) // BLOCKS
    row = segment // G
    d = (tl.program_id(0) % BLOCKS) * BD + tl.arange(0, BD)
    return d, row // PER, row.to(tl.int64) * T, (segment % G) * SIZE, segment.to(tl.int64)


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
def _load_value(x, t, d, first, T, D: tl.constexpr, HOP: tl.constexpr, EDGE: tl.constexpr, HAS_OFFSET: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """x of a token with its offset; without one in the dtype of memory, which takes fewer registers until then."""
    value = _load(x, t, d, T, D, HOP, EDGE, MASKED)
    if HAS_OFFSET:
        value = value.to(tl.float32) + first
        if EDGE or MASKED:
            value = tl.where((t >= 0) & (t < T), value, 0.0)
    return value


@triton.jit
def _load(pointer, t, d, T, D: tl.constexpr, HOP: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr):
    """A token of a row, in the dtype of memory; HOP numbers lead to the next. EDGE where it may lie outside the row,
    which is 0."""
    at = pointer + t.to(tl.int64) * HOP + d
    if MASKED:
        return tl.load(at, mask=(d < D) & (t >= 0) & (t < T), other=0.0)
    elif EDGE:
        return tl.load(at, mask=(d >= 0) & (t >= 0) & (t < T), other=0.0)
    return tl.load(at)


@triton.jit
def _store(pointer, t, value, d, stop, D: tl.constexpr, MASKED: tl.constexpr):
    store_masked(pointer + t.to(tl.int64) * D, d, value, (d < D) & (t < stop), MASKED)


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp2(-z * LOG2_E))


@triton.jit
def forward_kernel(
    x, weight, bias, offset, y, T, G, PER, D: tl.constexpr, HOP: tl.constexpr, W: tl.constexpr, BD: tl.constexpr,
    L: tl.constexpr, SIZE: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OFFSET: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    d, model, base, begin, _ = _place(T, G, PER, D, BD, SIZE)
    x, y = x + base * HOP, y + base * D
    taps, last, first = _load_taps(weight, bias, offset, model, d, D, W, HAS_BIAS, HAS_OFFSET)
    stop = tl.minimum(begin + SIZE, T)
    for i in tl.range(0, tl.cdiv(stop - begin, L)):
        t = begin + i * L
        values = ()
        for k in tl.static_range(L + W - 1):
            values = values + (_load_value(x, t + k - (W - 1), d, first, T, D, HOP, k < W - 1, HAS_OFFSET, MASKED),)
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
    x, weight, bias, offset, dy, dx, sums, T, G, PER, D: tl.constexpr, HOP: tl.constexpr, W: tl.constexpr,
    BD: tl.constexpr, L: tl.constexpr, SIZE: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dx, and the sums of a segment for the taps, the bias and the offset: [segments of all rows, W + 2, D]."""
    d, model, base, begin, segment = _place(T, G, PER, D, BD, SIZE)
    x, dy, dx = x + base * HOP, dy + base * D, dx + base * D
    taps, last, first = _load_taps(weight, bias, offset, model, d, D, W, HAS_BIAS, HAS_OFFSET)
    stop = tl.minimum(begin + SIZE, T)

    # Of the W - 1 tokens after the segment, whose taps reach into it; the nearest is the first of `later`.
    later, edge = (), ()
    for k in tl.static_range(2 * W - 2):
        edge = edge + (_load_value(x, stop + k - (W - 1), d, first, T, D, HOP, True, HAS_OFFSET, MASKED),)
    for k in tl.static_range(W - 1):
        later = later + (_gradient(edge, taps, last, _load(dy, stop + k, d, T, D, D, True, MASKED), k, W, SILU),)
    totals = ()
    for _ in tl.static_range(W + 2):
        totals = totals + (tl.zeros_like(last),)

    chunks = tl.cdiv(stop - begin, L)
    for i in tl.range(0, chunks):
        t = begin + (chunks - 1 - i) * L
        values, gradients = (), ()
        for k in tl.static_range(L + W - 1):
            values = values + (_load_value(x, t + k - (W - 1), d, first, T, D, HOP, k < W - 1, HAS_OFFSET, MASKED),)
        for k in tl.static_range(L):
            gradients = gradients + (_load(dy, t + k, d, stop, D, D, False, MASKED),)
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
