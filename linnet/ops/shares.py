"""The sum of what programs of a kernel left, for gradients of weights: a launch of its own, in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import cdiv, launch, next_power_of_2

MOST = 1024  # shares that a program loads at a time: all of them where possible, since a load takes longer than a sum
NUMBERS = 16_384  # that it loads at a time, at most


def sum_shares(shares: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sums [H, W] over N and G of float32 shares [N, H, G, W], contiguous."""
    N, H, G, W = shares.shape
    sums = shares.new_empty(H, W, dtype=dtype)
    rows = min(MOST, next_power_of_2(N * G))
    columns = min(MOST, NUMBERS // rows, next_power_of_2(W))
    programs, warps = (cdiv(W, columns), H), max(1, min(16, rows * columns // 512))
    launch(sum_kernel, programs, (shares, sums), (), (N * G, G, W, rows, columns), num_warps=warps)
    return sums


@triton.jit
def sum_kernel(shares, sums, count, G, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of the sum of one h."""
    h, H = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        at = ((row // G * H + h) * G + row % G) * WIDTH
        mask = (row < count)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(shares + at[:, None] + column[None, :], mask=mask, other=0.0)
    tl.store(sums + h * WIDTH + column, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column < WIDTH)
