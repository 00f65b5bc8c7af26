"""Rotation by position times frequency on a GPU: one pass, with angles, cosines and sines made on the way.

A program holds some tokens and a block of the columns (head, frequency). On several axes it loads all coordinates of a
token and selects one per column, because the axis of a frequency is known when the kernel is compiled. For the gradient
of the frequencies it walks over many tokens and leaves one partial sum, and a second launch adds those up: no atomics,
so the same bits each time.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import backend
from linnet.ops.device import cosine_sine
from linnet.ops.launching import Launcher, align, cdiv, count_processors, next_power_of_2

WALKERS = 8  # programs that walk over the tokens, a multiprocessor


def supports(x: Tensor, positions: Tensor, theta: Tensor) -> bool:
    """Whether the kernels take a call: at most 32 bits a number, all on one device."""
    if backend.is_wide("rotate", x, theta):
        return False
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    alike = x.dtype in dtypes and theta.dtype in dtypes and not positions.is_floating_point()
    return alike and x.device == positions.device == theta.device and x.numel() > 0


def choose_tile(columns: int) -> tuple[int, int, int]:
    """Columns (a power of two), tokens and warps of a program: on an H200 the fastest of docs/negative-results.md."""
    columns = min(next_power_of_2(columns), 512)
    return columns, max(1, 1024 // columns), 4


def rotate_forward(x: Tensor, positions: Tensor, theta: Tensor, doubling: bool, activation: str) -> Tensor:
    """Arguments as `rotate`."""
    x, positions, theta = align(x), _align_places(positions), align(theta)
    y = x.new_empty(*x.shape[:-1], 2 * x.shape[-1]) if doubling else torch.empty_like(x)
    layout = _layout(positions)
    axes = positions.shape[2] if positions.ndim == 3 else 1
    key = (x.shape, theta.shape, layout, axes, x.dtype, theta.dtype, positions.dtype, doubling, activation, x.device)
    launch, _ = _plan(forward_kernel, *key, False)
    launch(x, positions, theta, y, *layout)
    return y


def rotate_backward(x, positions, theta, dy, doubling, activation, needs_theta) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and theta from that of the result. x may be None without an activation or `needs_theta`."""
    dy, positions, theta = align(dy), _align_places(positions), align(theta)
    heads, width = dy.shape[-2:]
    dx = dy.new_empty(*dy.shape[:-1], width // 2) if doubling else torch.empty_like(dy)
    layout = _layout(positions)
    axes = positions.shape[2] if positions.ndim == 3 else 1
    key = (dx.shape, theta.shape, layout, axes, dy.dtype, theta.dtype, positions.dtype, doubling, activation, dy.device)
    launch, walkers = _plan(backward_kernel, *key, needs_theta)
    partial = dy.new_empty(walkers, heads, theta.shape[1], dtype=torch.float32) if needs_theta else None
    launch(align(x), positions, theta, dy, dx, partial, *layout)
    if partial is None:
        return dx, None
    dtheta = partial.sum((0, 1))[None] if theta.shape[0] == 1 else partial.sum(0)
    return dx, dtheta.to(theta.dtype)


def _align_places(positions: Tensor) -> Tensor:
    return positions.clone() if positions.data_ptr() % 16 else positions  # a row expanded to a batch stays one


def _layout(positions: Tensor) -> tuple[int, int, int, int, int]:
    """Of positions [B, T, A], [B, T] or [B]: how many tokens in all and in a row, and the strides."""
    tokens = positions.shape[1] if positions.ndim > 1 else 1
    return positions.shape[0] * tokens, tokens, *(*positions.stride(), 0, 0)[:3]


@functools.lru_cache(1024)  # a launch is planned once for each shape, and the dtypes that choose a compiled variant
def _plan(
    kernel, shape, theta_shape, layout, axes, dtype, theta_dtype, place_dtype, doubling, activation, device, needs_theta
) -> tuple[Launcher, int]:
    (heads, _), frequencies = shape[-2:], theta_shape[1]
    columns, rows, warps = choose_tile(heads * frequencies)
    walkers, blocks = cdiv(layout[0], rows), cdiv(heads * frequencies, columns)
    if needs_theta:
        walkers = min(walkers, cdiv(WALKERS * count_processors(device, interpreted=1), blocks))
    backward = (needs_theta,) if kernel is backward_kernel else ()
    constants = (
        *(heads, frequencies, theta_shape[0] == 1, doubling, activation == "silu", *backward),
        *(axes, device.type == "cuda", columns, rows),
    )
    return Launcher(kernel, walkers * blocks, constants, num_warps=warps), walkers


@triton.jit
def _angles(
    positions, row, count, tokens, stride_row, stride_token, stride_axis, column, frequency, F: tl.constexpr,
    AXES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Cosines and sines [ROWS, COLUMNS], and the coordinate of each, [ROWS, 1] with one axis."""
    at = (row // tokens) * stride_row + (row % tokens) * stride_token
    place = tl.load(positions + at, mask=row < count, other=0).to(tl.float32)[:, None]
    if AXES > 1:
        axis = (column % F) // ((F + AXES - 1) // AXES)
        place = tl.broadcast_to(place, row.shape[0], column.shape[0])
        for a in tl.static_range(1, AXES):
            other = tl.load(positions + at + a * stride_axis, mask=row < count, other=0).to(tl.float32)
            place = tl.where((axis == a)[None, :], other[:, None], place)
    cos, sin = cosine_sine(place, frequency[None, :], FAST)
    return cos, sin, place


@triton.jit
def forward_kernel(
    x, positions, theta, y, count, tokens, stride_row, stride_token, stride_axis, HEADS: tl.constexpr,
    F: tl.constexpr, SHARED: tl.constexpr, DOUBLING: tl.constexpr, SILU: tl.constexpr, AXES: tl.constexpr,
    FAST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (HEADS * F + COLUMNS - 1) // COLUMNS
    walker = tl.program_id(0) // BLOCKS
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HEADS * F
    first = (column // F) * 2 * F + column % F
    frequency = tl.load(theta + (column % F if SHARED else column), mask=inside, other=0.0).to(tl.float32)
    row = walker.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < count)[:, None] & inside[None, :]
    cos, sin, _ = _angles(
        positions, row, count, tokens, stride_row, stride_token, stride_axis, column, frequency, F, AXES, FAST
    )
    to = row[:, None] * (2 * HEADS * F) + first[None, :]
    if DOUBLING:
        a = tl.load(x + row[:, None] * (HEADS * F) + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if SILU:
            a *= tl.sigmoid(a)
        ya, yb = a * cos, a * sin
    else:
        a = tl.load(x + to, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + to + F, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            a *= tl.sigmoid(a)
            b *= tl.sigmoid(b)
        ya, yb = a * cos - b * sin, a * sin + b * cos
    tl.store(y + to, ya.to(y.dtype.element_ty), mask=mask)
    tl.store(y + to + F, yb.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    x, positions, theta, dy, dx, partial, count, tokens, stride_row, stride_token, stride_axis, HEADS: tl.constexpr,
    F: tl.constexpr, SHARED: tl.constexpr, DOUBLING: tl.constexpr, SILU: tl.constexpr, NEEDS_THETA: tl.constexpr,
    AXES: tl.constexpr, FAST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (HEADS * F + COLUMNS - 1) // COLUMNS
    walker = tl.program_id(0) // BLOCKS
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HEADS * F
    first = (column // F) * 2 * F + column % F
    frequency = tl.load(theta + (column % F if SHARED else column), mask=inside, other=0.0).to(tl.float32)
    if NEEDS_THETA:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(walker, tl.cdiv(count, ROWS), tl.num_programs(0) // BLOCKS):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < count)[:, None] & inside[None, :]
        cos, sin, place = _angles(
            positions, row, count, tokens, stride_row, stride_token, stride_axis, column, frequency, F, AXES, FAST
        )
        wide = row[:, None] * (2 * HEADS * F) + first[None, :]
        narrow = row[:, None] * (HEADS * F) + column[None, :]
        da = tl.load(dy + wide, mask=mask, other=0.0).to(tl.float32)
        db = tl.load(dy + wide + F, mask=mask, other=0.0).to(tl.float32)
        ga, gb = da * cos + db * sin, db * cos - da * sin
        if NEEDS_THETA or SILU:
            # The gradient of an angle is db ya - da yb, which is a gb (- b ga for pairs).
            if DOUBLING:
                a = tl.load(x + narrow, mask=mask, other=0.0).to(tl.float32)
                if SILU:
                    share = tl.sigmoid(a)
                    ga *= share * (1.0 + a * (1.0 - share))
                    a *= share
                turned = a * gb
            else:
                a = tl.load(x + wide, mask=mask, other=0.0).to(tl.float32)
                b = tl.load(x + wide + F, mask=mask, other=0.0).to(tl.float32)
                if SILU:
                    share, other = tl.sigmoid(a), tl.sigmoid(b)
                    turned = a * share * gb - b * other * ga
                    ga *= share * (1.0 + a * (1.0 - share))
                    gb *= other * (1.0 + b * (1.0 - other))
                else:
                    turned = a * gb - b * ga
            if NEEDS_THETA:
                total += turned * place
        if DOUBLING:
            tl.store(dx + narrow, ga.to(dx.dtype.element_ty), mask=mask)
        else:
            tl.store(dx + wide, ga.to(dx.dtype.element_ty), mask=mask)
            tl.store(dx + wide + F, gb.to(dx.dtype.element_ty), mask=mask)
    if NEEDS_THETA:
        tl.store(partial + walker * (HEADS * F) + column, tl.sum(total, 0), mask=inside)
