"""The norms of rows on a GPU, root mean square or LayerNorm: one pass over the rows, forward and backward.

A program holds some whole rows, so that each is read once; of a wide one the forward reads parts, and reads them again
from a cache for the result, which is faster from 4,096 numbers on. The backward computes the norm again from the input,
so that nothing but inputs is kept for it. For the gradient of a gain a program walks over many rows and leaves one
partial sum, and a second launch adds up the partial sums: no atomics, so the same bits in every run.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import backend
from linnet.ops.device import activate, activate_and_differentiate, after_previous
from linnet.ops.launching import (
    Launcher,
    align,
    align_slices,
    cdiv,
    count_processors,
    count_shared_memory,
    next_power_of_2,
)
from linnet.ops.shares import sum_shares

WIDEST = 16_384  # of a row that a program holds
WHOLE, PART = 3072, 2048  # the widest row that a forward without more holds, and columns at a time of a wider one


def supports(x: Tensor, *more: Tensor | None) -> bool:
    """Whether the kernels take a call: rows of at most 16,384 in at most 32 bits a number, on one device."""
    tensors = [t for t in (x, *more) if t is not None]
    if backend.is_wide("rms_norm", *tensors):
        return False
    alike = all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) and t.device == x.device for t in tensors)
    return alike and 1 <= x.shape[-1] <= WIDEST and x.numel() > 0


def choose_tile(width: int, gain: bool = False) -> tuple[int, int, int]:
    """Columns (a power of two), rows and warps of a program: on an H200 the fastest of docs/negative-results.md.

    `gain`: for a backward with the gradient of a gain.
    """
    columns = next_power_of_2(width)
    rows = max(1, (1024 if columns <= 256 and not gain else 2048) // columns)
    return columns, rows, min(16, max(4, columns // (256 if gain else 1024)))


def choose_walk(elements: int, bytes_each: int, shared: int) -> tuple[int, int]:
    """For programs that walk over the rows in blocks of `elements`: how many a multiprocessor, and how many blocks each
    has in flight, where `shared` bytes hold those to come (`bytes_each` an element, all inputs)."""
    walkers = max(1, 8192 // elements)
    return walkers, max(1, min(3, 1 + shared // (walkers * elements * bytes_each)))


def norm_forward(
    x, weight, gate, residual, eps, gate_activation, dtype, bias=None, center=False, gate_first=False
) -> tuple[Tensor, Tensor]:
    """y in `dtype` and h = x + residual (x itself without one). A weight [G, D] has a gain for each of G equal
    parts of the rows. With `center` it is LayerNorm, which has a bias if it has a weight. With `gate_first` the gate
    multiplies x, before the norm."""
    x, weight, bias, residual = map(align, (x, weight, bias, residual))
    gate, *slices = align_slices(gate)
    h = x if residual is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = torch.empty_like(x, dtype=dtype)
    dtypes = _dtypes(x, residual, weight, gate, y)
    kind = gate_activation, gate_first, *slices
    launch = _plan_forward(x.shape[-1], x.numel(), *dtypes, *kind, x.device, _count_gains(weight), center)
    launch(x, residual, weight, bias, gate, y, h, _count_rows(x, weight), eps)
    return y, h


def norm_backward(
    h,
    weight,
    gate,
    dy,
    dh,
    eps,
    gate_activation,
    needs_weight=True,
    narrow=None,
    bias=None,
    center=False,
    gate_first=False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of h, weight and gate from those of y and (with a residual) of h as an output; and that of h in the
    dtype `narrow` as well, if it is another. With `center` that of the weight is [2, D], of weight and bias."""
    h, weight, bias, gate, dy, dh = map(align, (h, weight, bias, gate, dy, dh))
    dx = torch.empty_like(h)
    dgate = None if gate is None else torch.empty_like(gate)
    dnarrow = None if narrow in (None, h.dtype) else torch.empty_like(h, dtype=narrow)
    needs_weight = needs_weight and weight is not None
    width, dtypes, gains = h.shape[-1], _dtypes(h, weight, gate, dy, dh, dnarrow), _count_gains(weight)
    kind = gate_activation, gate_first
    launch, programs = _plan_backward(width, h.numel(), *dtypes, *kind, needs_weight, h.device, gains, center)
    partial = h.new_empty(programs, width * (2 if center else 1), dtype=torch.float32) if needs_weight else None
    launch(h, weight, bias, gate, dy, dh, dx, dnarrow, dgate, partial, _count_rows(h, weight), gains, eps)
    dweight = None
    if needs_weight:
        sums = sum_shares(partial.view(1, gains, -1, partial.shape[1]), weight.dtype)
        dweight = sums.view(2, width) if center else sums.view(weight.shape)
    return dx, dweight, dgate, dx if dnarrow is None else dnarrow


def _count_gains(weight: Tensor | None) -> int:
    return 1 if weight is None or weight.ndim == 1 else weight.shape[0]


def _count_rows(x: Tensor, weight: Tensor | None) -> int:
    """The rows that have one gain."""
    return x.numel() // x.shape[-1] // _count_gains(weight)


# Launches are planned once for each shape, with the dtypes (None for what is absent) that choose a compiled variant.


@functools.lru_cache(1024)
def _plan_forward(
    width, numel, x, residual, weight, gate, y, gate_activation, first, slice_width, slice_stride, device, gains, center
) -> Launcher:
    if width > WHOLE and residual is gate is None and not center:
        constants = (width, PART, weight is not None, gains > 1)
        return Launcher(forward_parts_kernel, numel // width, constants, num_warps=8 if width <= 4096 else 16)
    columns, rows, warps = choose_tile(width)
    kind = "absent" if gate is None else gate_activation
    constants = (
        width, columns, rows, residual is not None, weight is not None, kind, first, slice_width // width,
        slice_stride, gains > 1, center,
    )  # fmt: skip
    programs = gains * cdiv(numel // width // gains, rows)
    return Launcher(forward_kernel, programs, constants, num_warps=warps)


@functools.lru_cache(1024)
def _plan_backward(
    width, numel, h, weight, gate, dy, dh, dnarrow, gate_activation, first, needs_weight, device, gains, center
) -> tuple[Launcher, int]:
    columns, rows, warps = choose_tile(width, gain=needs_weight)
    part = numel // width // gains
    programs, stages = cdiv(part, rows), 1  # programs of a part
    if needs_weight:
        inputs = sum(t.itemsize for t in (h, gate, dy, dh) if t is not None)
        # 35 KiB are left to the sums: 192 KiB of an H200 hold blocks.
        walkers, stages = choose_walk(rows * columns, inputs, count_shared_memory(device) - 35 * 1024)
        programs = min(programs, cdiv(walkers * count_processors(device, interpreted=1), gains))
    kind = "absent" if gate is None else gate_activation
    flags = weight is not None, kind, first, dh is not None, dnarrow is not None
    constants = (width, columns, rows, *flags, needs_weight, stages, gains > 1, center)
    return Launcher(backward_kernel, gains * programs, constants, num_warps=warps), gains * programs


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if t is None else t.dtype for t in tensors)


@triton.jit
def forward_kernel(
    x, residual, weight, bias, gate, y, h, count, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, GATE: tl.constexpr, FIRST: tl.constexpr, SLICE: tl.constexpr, STRIDE: tl.constexpr,
    PARTS: tl.constexpr, CENTER: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y and h of some rows; with PARTS every `count` rows have a gain of their own. If SLICE, the gates of so many rows
    are in one piece, and STRIDE numbers behind those before them."""
    after_previous(OVERLAPS)
    block, before = tl.program_id(0), 0
    if PARTS:
        part = block // tl.cdiv(count, ROWS)
        block -= part * tl.cdiv(count, ROWS)
        before = part.to(tl.int64) * count
        weight += part * WIDTH
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    at = (row + before)[:, None] * WIDTH + column[None, :]
    th = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        th += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        rounded = th.to(h.dtype.element_ty)
        tl.store(h + at, rounded, mask=mask)
        th = rounded.to(tl.float32)  # what the backward will read
    if GATE != "absent":
        gate_at = at
        if SLICE:
            gate_at = ((row + before) // SLICE * STRIDE + (row + before) % SLICE * WIDTH)[:, None] + column[None, :]
        gates = activate(tl.load(gate + gate_at, mask=mask, other=0.0).to(tl.float32), GATE)
        if FIRST:
            th *= gates
    if CENTER:
        th = tl.where(mask, th - (tl.sum(th, 1) / WIDTH)[:, None], 0.0)
    ty = th * tl.rsqrt(tl.sum(th * th, 1) / WIDTH + eps)[:, None]
    if HAS_WEIGHT:
        ty *= tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        if CENTER:
            ty += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if GATE != "absent" and not FIRST:
        ty *= gates
    tl.store(y + at, ty.to(y.dtype.element_ty), mask=mask)


@triton.jit
def forward_parts_kernel(
    x, residual, weight, bias, gate, y, h, count, eps, WIDTH: tl.constexpr, PART: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """y of one row, without a residual and a gate; with PARTS every `count` rows have a gain of their own."""
    row = tl.program_id(0)
    if PARTS:
        weight += row // count * WIDTH
    x += row.to(tl.int64) * WIDTH
    y += row.to(tl.int64) * WIDTH
    squares = tl.zeros([PART], tl.float32)
    for first in tl.range(0, WIDTH, PART):
        column = first + tl.arange(0, PART)
        part = tl.load(x + column, mask=column < WIDTH, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += part * part
    inverse = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    for first in tl.range(0, WIDTH, PART):
        column = first + tl.arange(0, PART)
        mask = column < WIDTH
        part = tl.load(x + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * inverse
        if HAS_WEIGHT:
            part *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + column, part.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    h, weight, bias, gate, dy, dh, dx, dnarrow, dgate, partial, count, parts, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_WEIGHT: tl.constexpr, GATE: tl.constexpr,
    FIRST: tl.constexpr, HAS_DH: tl.constexpr, NARROW: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """Gradients; with PARTS there are `parts` of `count` rows, each with a gain of its own."""
    pid = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    walker, walkers, before = pid, tl.num_programs(0), 0
    if PARTS:  # the programs of a part walk over its rows
        walkers = tl.num_programs(0) // parts
        walker, before = pid % walkers, (pid // walkers).to(tl.int64) * count
        weight += pid // walkers * WIDTH
    if HAS_WEIGHT:
        tw = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        if CENTER and GATE != "absent":
            tb = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if NEEDS_WEIGHT:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        if CENTER:
            total_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(walker, tl.cdiv(count, ROWS), walkers, num_stages=STAGES):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < count)[:, None] & (column < WIDTH)[None, :]
        row += before
        at = row[:, None] * WIDTH + column[None, :]
        th = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
        td = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        if FIRST:
            tx = th
            tg, slope = activate_and_differentiate(tl.load(gate + at, mask=mask, other=0.0).to(tl.float32), GATE)
            th *= tg
        if CENTER:
            th = tl.where(mask, th - (tl.sum(th, 1) / WIDTH)[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(th * th, 1) / WIDTH + eps)[:, None]
        normed = th * inverse
        if GATE != "absent" and not FIRST:
            tg = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
            tg, slope = activate_and_differentiate(tg, GATE)
            if CENTER and HAS_WEIGHT:
                tdg = td * (normed * tw + tb) * slope
            else:
                tdg = td * normed * slope
                if HAS_WEIGHT:
                    tdg *= tw
            tl.store(dgate + at, tdg.to(dgate.dtype.element_ty), mask=mask)
            td *= tg
        if NEEDS_WEIGHT:
            total += td * normed
            if CENTER:
                total_bias += td
        if HAS_WEIGHT:
            td *= tw
        along = tl.sum(td * normed, 1) / WIDTH
        if CENTER:
            td -= (tl.sum(td, 1) / WIDTH)[:, None]
        tdx = (td - normed * along[:, None]) * inverse
        if FIRST:
            tl.store(dgate + at, (tdx * tx * slope).to(dgate.dtype.element_ty), mask=mask)
            tdx *= tg
        if HAS_DH:
            tdx += tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, tdx.to(dx.dtype.element_ty), mask=mask)
        if NARROW:
            tl.store(dnarrow + at, tdx.to(dnarrow.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        if CENTER:
            partial += pid * WIDTH
            tl.store(partial + (pid + 1) * WIDTH + column, tl.sum(total_bias, 0), mask=column < WIDTH)
        tl.store(partial + pid * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)
