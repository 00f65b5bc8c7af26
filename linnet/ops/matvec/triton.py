"""A matrix times one row, or a few rows, on a GPU: the products of a decoding step, bound by reading the matrix.

For one row, a program reads some rows of the matrix and writes their sums. For a few rows (at most 64), a program takes
all of them, some columns of the result, and a part of the sum; if a sum has several parts, the program that comes last
adds them up in their order, so the result does not depend on which program that was.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import after_previous, load_masked
from linnet.ops.launching import cdiv, launch, next_power_of_2
from linnet.ops.matvec import ACTIVATIONS, DeferredNorm


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel takes a call: one row, one dtype of 16 or 32 bits, the matrix row by row."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    alike = all(t.dtype == x.dtype and t.device == x.device for t in tensors)
    plain = x.stride(1) == 1 and weight.is_contiguous() and weight.numel() > 0
    return alike and plain and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def choose_tile(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps: on an H200 the fastest, or nearly so, of twenty."""
    return (16, 256, 4) if width <= 256 else (2, 1024, 4)


def matvec(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, norm: DeferredNorm | None = None,
    early: bool = False,
) -> Tensor:  # fmt: skip
    """x [1, K] times weight [N, K] and bias [N]: [1, N]. With an activation as `few_rows`: [1, N / 2].

    With a norm, whose x this is, the product is that of its result, and x + residual is written to `norm.h`; a gate of
    the norm multiplies x before.
    If `early`, the first weights may be read before the kernel before has ended.
    """
    gated = activation is not None
    count, width = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    rows, columns, warps = choose_tile(width)
    y = torch.empty(1, count, dtype=x.dtype, device=x.device)
    even = count % rows == 0 and width % columns == 0
    _, residual, gain, h, eps, gate, of_gate = norm or (x, None, None, None, 0.0, None, "none")
    constants = (
        count, width, rows, columns, even, bias is not None, gated, ACTIVATIONS.index(activation or "none"),
        norm is not None, residual is not None, gain is not None, gate is not None, ACTIVATIONS.index(of_gate), early,
    )  # fmt: skip
    tensors = x, residual, gain, gate, weight, bias, y, h
    launch(matvec_kernel, cdiv(count, rows), tensors, (eps,), constants, num_warps=warps)
    return y


@triton.jit
def matvec_kernel(
    x, residual, gain, gate, weight, bias, y, h, eps, count, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_GATE: tl.constexpr,
    GATE: tl.constexpr, EARLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, column = program * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = row < count
    at = weight + row.to(tl.int64)[:, None] * WIDTH
    up = at + tl.cast(count, tl.int64) * WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    if not EARLY:
        after_previous(OVERLAPS)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    first = load_masked(at, column[None, :], mask, not EVEN)
    if GATED:
        first_up = load_masked(up, column[None, :], mask, not EVEN)
    if EARLY:
        after_previous(OVERLAPS)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        place = start + column
        mask = inside[:, None] & (place < WIDTH)[None, :]
        tw = first if start == 0 else load_masked(at, place[None, :], mask, not EVEN)
        tx = load_masked(x, place, place < WIDTH, not EVEN).to(tl.float32)
        if HAS_RESIDUAL:
            tx += load_masked(residual, place, place < WIDTH, not EVEN).to(tl.float32)
            rounded = tx.to(h.dtype.element_ty)
            if program == 0:
                tl.store(h + place, rounded, mask=place < WIDTH)
            tx = rounded.to(tl.float32)
        if HAS_GATE:
            tx *= _activated(load_masked(gate, place, place < WIDTH, not EVEN).to(tl.float32), GATE)
        if NORM:
            squares += tx * tx
        if HAS_GAIN:
            tx *= load_masked(gain, place, place < WIDTH, not EVEN).to(tl.float32)
        total += tw.to(tl.float32) * tx[None, :]
        if GATED:
            tw = first_up if start == 0 else load_masked(up, place[None, :], mask, not EVEN)
            other += tw.to(tl.float32) * tx[None, :]
    out, gated = tl.sum(total, 1), tl.sum(other, 1)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / WIDTH + eps)
        out *= scale
        gated *= scale
    if HAS_BIAS:
        out += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        out = _activated(out, ACTIVATION) * gated
    tl.store(y + row, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        x *= tl.sigmoid(x)
    elif ACTIVATION == 2:
        x = tl.sigmoid(x)
    return x


MOST_ROWS = 64
# Larger matrices keep a library's product busy (docs/negative-results.md times shapes of a 7B model).
MOST_WEIGHTS = 1 << 24


def supports_rows(x: Tensor, weight: Tensor, sizes: list[int], activation: str | None) -> bool:
    """Whether the kernel takes a call: few rows of 16 bits, equal sizes but for a smaller last one."""
    alike = x.dtype == weight.dtype and x.device == weight.device and x.dtype in (torch.bfloat16, torch.float16)
    plain = x.is_contiguous() and weight.is_contiguous() and weight.numel() > 0
    even = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0] and all(size % 16 == 0 for size in sizes)
    gated = activation is None or (activation in ACTIVATIONS and len(sizes) == 2 and sizes[0] == sizes[1])
    small = 1 <= x.shape[0] <= MOST_ROWS and weight.numel() <= MOST_WEIGHTS
    return alike and plain and even and gated and small and x.shape[1] % 16 == 0


def choose_rows_tile(rows: int, count: int, width: int, size: int, gated: bool) -> tuple[int, int, int, int]:
    """Columns of a program, its steps along the sum, parts of the sum, stages of its pipeline.

    On an H200 the fastest, or nearly so, of thirty for the products of a 410M model, with 8 and with 64 rows.
    """
    small = rows > 32 and count * width <= 1 << 20
    columns = 32 if size % 32 == 0 and not small else 16
    programs = count // columns // (2 if gated else 1)
    parts = 1
    while not small and programs * parts * 2 <= 160 and width // (parts * 2) >= 256:
        parts *= 2
    return columns, 128 if width % 128 == 0 else 64, parts, 4


def few_rows(
    x: Tensor, weight: Tensor, sizes: list[int], counters: Tensor, activation: str | None = None,
    tile: tuple[int, int, int, int] | None = None,
) -> list[Tensor]:  # fmt: skip
    """x [M, K] times the rows of weight [sum(sizes), K]: a contiguous tensor [M, size] each.

    With an activation the two sizes are a gate and what it gates, and the result is one tensor, act(gate) * x.
    """
    rows, width = x.shape
    gated = activation is not None
    size, count = sizes[0], sum(sizes)
    columns, step, parts, stages = tile or choose_rows_tile(rows, count, width, size, gated)
    blocks = cdiv(size if gated else count, columns)
    parts = parts if blocks <= counters.numel() else 1
    padded = max(16, next_power_of_2(rows))
    y = torch.empty(rows * (size if gated else count), dtype=x.dtype, device=x.device)
    shape = (parts, blocks, 2 if gated else 1, padded, columns)
    partial = torch.empty(shape if parts > 1 else 1, dtype=torch.float32, device=x.device)
    constants = (
        rows, count, width, size, padded, columns, step, parts, gated, ACTIVATIONS.index(activation or "none"), stages,
    )  # fmt: skip
    tensors = x, weight, y, partial, counters
    launch(few_rows_kernel, (blocks, parts), tensors, (), constants, num_warps=4)
    if gated:
        return [y.view(rows, size)]
    return [part.view(rows, -1) for part in y.split([rows * size for size in sizes])]


@triton.jit
def few_rows_kernel(
    x, weight, y, partial, counters, rows, COUNT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    row, column, place = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    LIMIT: tl.constexpr = SIZE if GATED else COUNT
    STEPS: tl.constexpr = (WIDTH + STEP * PARTS - 1) // (STEP * PARTS)
    inside, there = row < rows, column < LIMIT
    at_x = x + row[:, None] * WIDTH + place[None, :]
    at_w = weight + column.to(tl.int64)[None, :] * WIDTH + place[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    after_previous(OVERLAPS)
    for index in tl.range(0, STEPS, num_stages=STAGES):
        start = (part * STEPS + index) * STEP
        left = place < WIDTH - start
        tx = tl.load(at_x + start, mask=inside[:, None] & left[None, :], other=0.0)
        tw = tl.load(at_w + start, mask=there[None, :] & left[:, None], other=0.0)
        total = tl.dot(tx, tw, total)
        if GATED:
            tw = tl.load(at_w + SIZE * WIDTH + start, mask=there[None, :] & left[:, None], other=0.0)
            other = tl.dot(tx, tw, other)
    last = part == 0
    if PARTS > 1:
        BLOCK: tl.constexpr = ROWS * COLUMNS * (2 if GATED else 1)
        inner = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        stride = tl.num_programs(0).to(tl.int64) * BLOCK
        at = partial + block * BLOCK + inner
        tl.store(at + part * stride, total)
        if GATED:
            tl.store(at + part * stride + ROWS * COLUMNS, other)
        tl.debug_barrier()  # all of the program's sums are written before it says so
        last = tl.atomic_add(counters + block, 1, sem="acq_rel") == PARTS - 1
        if last:
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            other = tl.zeros([ROWS, COLUMNS], tl.float32)
            for earlier in tl.static_range(PARTS):
                total += tl.load(at + earlier * stride, cache_modifier=".cg")
                if GATED:
                    other += tl.load(at + earlier * stride + ROWS * COLUMNS, cache_modifier=".cg")
            tl.store(counters + block, 0)
    if last:
        if GATED:
            out = _activated(total, ACTIVATION) * other
            at_y = row[:, None] * SIZE + column[None, :]
        else:
            out = total
            first = column // SIZE * SIZE  # of the tensor that the column is in
            wide = tl.minimum(SIZE, COUNT - first)
            at_y = (first * rows + column - first)[None, :] + row[:, None] * wide[None, :]
        tl.store(y + at_y, out.to(y.dtype.element_ty), mask=inside[:, None] & there[None, :])
