"""A matrix times a vector on a GPU: each program reads some rows of the matrix, in one piece, and gives their sums."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import launch


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel takes a call: one row, one dtype of 16 or 32 bits, the matrix row by row."""
    given = (x, weight) if bias is None else (x, weight, bias)
    alike = all(t.dtype == x.dtype and t.device == x.device for t in given)
    plain = x.stride(1) == 1 and weight.is_contiguous() and weight.numel() > 0
    return alike and plain and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def choose_tile(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps: on an H200 the fastest, or nearly so, of thirteen."""
    if width <= 256:
        return 16, 256, 4
    return (2, 1024, 1) if width <= 1024 else (8, 1024, 4)


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, K] times weight [N, K] and bias [N]: [1, N]."""
    count, width = weight.shape
    rows, columns, warps = choose_tile(width)
    y = torch.empty(1, count, dtype=x.dtype, device=x.device)
    even = count % rows == 0 and width % columns == 0
    constants = count, width, rows, columns, even, bias is not None
    launch(matvec_kernel, triton.cdiv(count, rows), (x, weight, bias, y), (), constants, num_warps=warps)
    return y


@triton.jit
def matvec_kernel(
    x, weight, bias, y, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = row < count
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    at = weight + row.to(tl.int64)[:, None] * WIDTH
    for start in tl.static_range(0, WIDTH, COLUMNS):
        place = start + column
        if EVEN:
            tw, tx = tl.load(at + place[None, :]), tl.load(x + place)
        else:
            tw = tl.load(at + place[None, :], mask=inside[:, None] & (place < WIDTH)[None, :], other=0.0)
            tx = tl.load(x + place, mask=place < WIDTH, other=0.0)
        total += tw.to(tl.float32) * tx.to(tl.float32)[None, :]
    out = tl.sum(total, 1)
    if HAS_BIAS:
        out += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row, out.to(y.dtype.element_ty), mask=inside)
