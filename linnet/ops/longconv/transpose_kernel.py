"""A batched transposition in one launch, in tiles that both sides read and write in whole lines."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import Launcher, align

TILE = 64


def transpose(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, A, C] -> [M, C, A] in `dtype`."""
    x = align(x)
    y = torch.empty(x.shape[0], x.shape[2], x.shape[1], dtype=dtype, device=x.device)
    _plan(x.shape, x.dtype, dtype, x.device)(x, y)
    return y


@functools.lru_cache(1024)
def _plan(shape: torch.Size, dtype: torch.dtype, to: torch.dtype, device: torch.device) -> Launcher:
    models, rows, columns = shape
    even = rows % TILE == 0 and columns % TILE == 0
    programs = models * triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    return Launcher(transpose_kernel, programs, (rows, columns, TILE, even), num_warps=4)


@triton.jit
def transpose_kernel(x, y, A, C, TILE: tl.constexpr, EVEN: tl.constexpr):
    rows, columns = tl.cdiv(A, TILE), tl.cdiv(C, TILE)
    column, row = tl.program_id(0) % columns, (tl.program_id(0) // columns) % rows
    base = (tl.program_id(0) // (columns * rows)).to(tl.int64) * A * C
    a, c = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    source = x + base + a[:, None].to(tl.int64) * C + c[None, :]
    target = y + base + c[:, None].to(tl.int64) * A + a[None, :]
    if EVEN:
        tl.store(target, tl.trans(tl.load(source)).to(y.dtype.element_ty))
    else:
        value = tl.load(source, mask=(a[:, None] < A) & (c[None, :] < C), other=0.0)
        tl.store(target, tl.trans(value).to(y.dtype.element_ty), mask=(c[:, None] < C) & (a[None, :] < A))
