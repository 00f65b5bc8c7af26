"""Rotation by position times frequency on a GPU: one pass, with angles, cosines and sines made on the way.

A program holds some tokens and a block of the columns (head, frequency). For the gradient of the frequencies it walks
over many tokens and leaves one partial sum, and a second launch adds those up: no atomics, so the same bits each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.additive.angles import cosine_sine

WALKERS = 8  # programs that walk over the tokens, a multiprocessor


def supports(x: Tensor, positions: Tensor, theta: Tensor) -> bool:
    """Whether the kernels take a call: at most 32 bits a number, all on one device."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    alike = x.dtype in dtypes and theta.dtype in dtypes and not positions.is_floating_point()
    return alike and x.device == positions.device == theta.device and x.numel() > 0


def choose_tile(columns: int) -> tuple[int, int, int]:
    """Columns (a power of two), tokens and warps of a program: on an H200 the fastest of docs/negative-results.md."""
    columns = min(triton.next_power_of_2(columns), 512)
    return columns, max(1, 1024 // columns), 4


def rotate_forward(x: Tensor, positions: Tensor, theta: Tensor, doubling: bool, activation: str) -> Tensor:
    """Arguments as `rotate`."""
    x = x.contiguous()
    heads, width = x.shape[-2:]
    y = x.new_empty(*x.shape[:-1], 2 * width) if doubling else torch.empty_like(x)
    frequencies = theta.shape[-1]
    count, tokens, strides = _rows(x, positions)
    columns, rows, warps = choose_tile(heads * frequencies)
    with torch.cuda.device_of(x):
        forward_kernel[(triton.cdiv(count, rows), triton.cdiv(heads * frequencies, columns))](
            x, positions, theta.contiguous(), y, count, tokens, *strides, heads, frequencies, theta.shape[0] == 1,
            doubling, activation == "silu", x.is_cuda, columns, rows, num_warps=warps,
        )  # fmt: skip
    return y


def rotate_backward(
    x: Tensor | None,
    positions: Tensor,
    theta: Tensor,
    dy: Tensor,
    doubling: bool,
    activation: str,
    needs_theta: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and theta from that of the result. x may be None without an activation or `needs_theta`."""
    dy = dy.contiguous()
    heads, width = dy.shape[-2:]
    frequencies = theta.shape[-1]
    dx = dy.new_empty(*dy.shape[:-1], width // 2) if doubling else torch.empty_like(dy)
    count, tokens, strides = _rows(dy, positions)
    columns, rows, warps = choose_tile(heads * frequencies)
    programs, blocks = triton.cdiv(count, rows), triton.cdiv(heads * frequencies, columns)
    partial = None
    if needs_theta:
        programs = min(programs, triton.cdiv(WALKERS * _count_processors(dy.device), blocks))
        partial = dy.new_empty(programs, heads, frequencies, dtype=torch.float32)
    with torch.cuda.device_of(dy):
        backward_kernel[(programs, blocks)](
            None if x is None else x.contiguous(), positions, theta.contiguous(), dy, dx, partial, count, tokens,
            *strides, heads, frequencies, theta.shape[0] == 1, doubling, activation == "silu", needs_theta, dy.is_cuda,
            columns, rows, num_warps=warps,
        )  # fmt: skip
    if partial is None:
        return dx, None
    dtheta = partial.sum((0, 1))[None] if theta.shape[0] == 1 else partial.sum(0)
    return dx, dtheta.to(theta.dtype)


def _rows(x: Tensor, positions: Tensor) -> tuple[int, int, tuple[int, int]]:
    """Tokens in all and in a row of the batch, and the strides of positions [B, T] or [B]."""
    strides = (*positions.stride(), 0)[:2]
    return positions.numel(), positions.shape[1] if positions.ndim == 2 else 1, strides


def _count_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _angles(positions, row, count, tokens, stride_row, stride_token, frequency, FAST: tl.constexpr):
    at = (row // tokens) * stride_row + (row % tokens) * stride_token
    place = tl.load(positions + at, mask=row < count, other=0).to(tl.float32)
    cos, sin = cosine_sine(place[:, None], frequency[None, :], FAST)
    return cos, sin, place


@triton.jit
def forward_kernel(
    x, positions, theta, y, count, tokens, stride_row, stride_token, HEADS: tl.constexpr, F: tl.constexpr,
    SHARED: tl.constexpr, DOUBLING: tl.constexpr, SILU: tl.constexpr, FAST: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HEADS * F
    first = (column // F) * 2 * F + column % F
    frequency = tl.load(theta + (column % F if SHARED else column), mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < count)[:, None] & inside[None, :]
    cos, sin, _ = _angles(positions, row, count, tokens, stride_row, stride_token, frequency, FAST)
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
    x, positions, theta, dy, dx, partial, count, tokens, stride_row, stride_token, HEADS: tl.constexpr,
    F: tl.constexpr, SHARED: tl.constexpr, DOUBLING: tl.constexpr, SILU: tl.constexpr, NEEDS_THETA: tl.constexpr,
    FAST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HEADS * F
    first = (column // F) * 2 * F + column % F
    frequency = tl.load(theta + (column % F if SHARED else column), mask=inside, other=0.0).to(tl.float32)
    if NEEDS_THETA:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < count)[:, None] & inside[None, :]
        cos, sin, place = _angles(positions, row, count, tokens, stride_row, stride_token, frequency, FAST)
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
                total += turned * place[:, None]
        if DOUBLING:
            tl.store(dx + narrow, ga.to(dx.dtype.element_ty), mask=mask)
        else:
            tl.store(dx + wide, ga.to(dx.dtype.element_ty), mask=mask)
            tl.store(dx + wide + F, gb.to(dx.dtype.element_ty), mask=mask)
    if NEEDS_THETA:
        tl.store(partial + tl.program_id(0) * (HEADS * F) + column, tl.sum(total, 0), mask=inside)
