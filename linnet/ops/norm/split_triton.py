"""The kernels of a root-mean-square norm whose width is split over ranks: each rank reads its own channels once.

Between the launches the ranks exchange one number per row: the sum of squares before the forward, and the
sum of td * normed (with td the gradient of the normed row) between the two launches of the backward.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import activate, activate_and_differentiate
from linnet.ops.launching import Launcher, align, cdiv, count_processors, count_shared_memory
from linnet.ops.norm.triton import _dtypes, choose_tile, choose_walk
from linnet.ops.shares import sum_shares


def scale(x, weight, gate, inverse, gate_activation, dtype) -> Tensor:
    """Returns x * inverse * weight * act(gate) in `dtype`, for x [..., D] and one `inverse` per row, float32."""
    x, weight, gate, inverse = map(align, (x, weight, gate, inverse))
    y = torch.empty_like(x, dtype=dtype)
    launch = _plan(scale_kernel, x.shape[-1], x.numel(), *_dtypes(x, weight, gate, y), gate_activation, x.device)
    launch(x, weight, gate, inverse, y, x.numel() // x.shape[-1])
    return y


def gradients_along(x, weight, gate, inverse, dy, gate_activation, needs_weight) -> tuple[Tensor, ...]:
    """Returns this rank's sums of td * normed, float32 [...], and the gradients of weight and gate."""
    x, weight, gate, inverse, dy = map(align, (x, weight, gate, inverse, dy))
    along, dgate = torch.empty_like(inverse), None if gate is None else torch.empty_like(gate)
    needs_weight = needs_weight and weight is not None
    width, dtypes = x.shape[-1], _dtypes(x, weight, gate, dy)
    launch, programs = _plan_along(width, x.numel(), *dtypes, gate_activation, needs_weight, x.device)
    partial = x.new_empty(programs, width, dtype=torch.float32) if needs_weight else None
    launch(x, weight, gate, inverse, dy, along, dgate, partial, x.numel() // width)
    return along, sum_shares(partial[None, None], weight.dtype)[0] if needs_weight else None, dgate


def gradient(x, weight, gate, inverse, dy, along, gate_activation, dtype) -> Tensor:
    """Returns (td - normed * along) * inverse in `dtype`; `along` is the mean of td * normed over the whole row."""
    x, weight, gate, inverse, dy, along = map(align, (x, weight, gate, inverse, dy, along))
    dx = torch.empty_like(x, dtype=dtype)
    dtypes = _dtypes(x, weight, gate, dy, dx)
    launch = _plan(gradient_kernel, x.shape[-1], x.numel(), *dtypes, gate_activation, x.device)
    launch(x, weight, gate, inverse, dy, along, dx, x.numel() // x.shape[-1])
    return dx


@functools.lru_cache(1024)
def _plan(kernel, width, numel, x, weight, gate, *more) -> Launcher:
    *_, gate_activation, _ = more  # after the other dtypes, and before the device
    columns, rows, warps = choose_tile(width)
    constants = (width, columns, rows, weight is not None, "absent" if gate is None else gate_activation)
    return Launcher(kernel, cdiv(numel // width, rows), constants, num_warps=warps)


@functools.lru_cache(1024)
def _plan_along(width, numel, x, weight, gate, dy, gate_activation, needs_weight, device) -> tuple[Launcher, int]:
    columns, rows, warps = choose_tile(width, gain=needs_weight)
    programs, stages = cdiv(numel // width, rows), 1
    if needs_weight:
        inputs = sum(t.itemsize for t in (x, gate, dy) if t is not None)
        walkers, stages = choose_walk(rows * columns, inputs, count_shared_memory(device) - 35 * 1024)
        programs = min(programs, walkers * count_processors(device, interpreted=1))
    flags = weight is not None, "absent" if gate is None else gate_activation
    constants = (width, columns, rows, *flags, needs_weight, stages)
    return Launcher(along_kernel, programs, constants, num_warps=warps), programs


@triton.jit
def scale_kernel(
    x, weight, gate, inverse, y, count,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_WEIGHT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    ty = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    ty *= tl.load(inverse + row, mask=row < count, other=0.0)[:, None]
    if HAS_WEIGHT:
        ty *= tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if GATE != "absent":
        ty *= activate(tl.load(gate + at, mask=mask, other=0.0).to(tl.float32), GATE)
    tl.store(y + at, ty.to(y.dtype.element_ty), mask=mask)


@triton.jit
def along_kernel(
    x, weight, gate, inverse, dy, along, dgate, partial, count,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_WEIGHT: tl.constexpr, GATE: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program walks over the rows, and leaves one partial sum of the gradient of the gain."""
    pid = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    if HAS_WEIGHT:
        tw = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if NEEDS_WEIGHT:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(pid, tl.cdiv(count, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < count)[:, None] & (column < WIDTH)[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        normed = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        normed *= tl.load(inverse + row, mask=row < count, other=0.0)[:, None]
        td = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        if GATE != "absent":
            tg, slope = activate_and_differentiate(tl.load(gate + at, mask=mask, other=0.0).to(tl.float32), GATE)
            tdg = td * normed * slope
            if HAS_WEIGHT:
                tdg *= tw
            tl.store(dgate + at, tdg.to(dgate.dtype.element_ty), mask=mask)
            td *= tg
        if NEEDS_WEIGHT:
            total += td * normed
        if HAS_WEIGHT:
            td *= tw
        tl.store(along + row, tl.sum(td * normed, 1), mask=row < count)
    if NEEDS_WEIGHT:
        tl.store(partial + pid * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@triton.jit
def gradient_kernel(
    x, weight, gate, inverse, dy, along, dx, count,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_WEIGHT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    factor = tl.load(inverse + row, mask=row < count, other=0.0)[:, None]
    mean = tl.load(along + row, mask=row < count, other=0.0)[:, None]
    td = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if GATE != "absent":
        td *= activate(tl.load(gate + at, mask=mask, other=0.0).to(tl.float32), GATE)
    if HAS_WEIGHT:
        td *= tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    tx = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + at, ((td - tx * factor * mean) * factor).to(dx.dtype.element_ty), mask=mask)
