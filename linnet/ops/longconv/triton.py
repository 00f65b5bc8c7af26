"""Attention with a long filter on a GPU, where sequences are short: all pairs of tokens, in tiles on the chip.

Forward, dq, and dk with dv are each a walk along a row or column of tiles; the gradient of the filter sums the products
of scores and their gradients over the batch, tile by tile of one distance, and then along diagonals.
"""

import functools

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.launching import Launcher, align, choose_operands, count_processors, pad
from linnet.ops.longconv import whole
from linnet.ops.longconv.chunked import sum_diagonals
from linnet.ops.longconv.kernels import filter_kernel, forward_kernel, key_kernel

TILE = 64  # tokens


def attend_forward(q: Tensor, k: Tensor, v: Tensor, filters: Tensor) -> Tensor:
    """y like q; arguments as in the registered op."""
    if not _supports(q, k, v, filters):
        return whole.attend_forward(q, k, v, filters)
    q, k, v = (align(x) for x in (q, k, v))
    y = torch.empty_like(q)
    _plan(forward_kernel, *_key(q, filters))(q, k, v, _surround(filters), y)
    return y


def attend_backward(q: Tensor, k: Tensor, v: Tensor, filters: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients to q, k, v and the filters."""
    if not _supports(q, k, v, filters):
        return whole.attend_backward(q, k, v, filters, dy)
    q, k, v, dy, values = (align(x) for x in (q, k, v, dy, _surround(filters)))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    key = _key(q, filters)
    (models, heads, length), tiles, groups = filters.shape, triton.cdiv(q.shape[1], TILE), count_groups(*key)
    sums = q.new_empty(models * heads, groups, tiles, TILE, TILE, dtype=torch.float32)
    _plan(forward_kernel, *key)(dy, v, k, values, dq)
    _plan(key_kernel, *key)(q, k, v, dy, values, dk, dv)
    _plan(filter_kernel, *key)(q, k, v, dy, sums)
    sums = sums.sum(1).flatten(0, 1)
    lags = sum_diagonals(sums, torch.float32).view(-1, tiles, TILE)
    before = sum_diagonals(sums.mT, torch.float32).view(-1, tiles, TILE)
    lags[:, :-1, 1:] += before[:, 1:, 1:].flip(2)  # lags below those of a tile's diagonal
    return dq, dk, dv, lags.flatten(1)[:, :length].reshape(filters.shape).to(filters.dtype)


def _surround(filters: Tensor) -> Tensor:
    """With a tile of zeros before the values and zeros up to a whole tile after them."""
    return F.pad(filters, (TILE, -filters.shape[2] % TILE))


def _supports(q: Tensor, k: Tensor, v: Tensor, filters: Tensor) -> bool:
    return backend.takes_kernels("filtered_attention", (q.dtype, k.dtype, v.dtype)) and filters.dtype != torch.float64


def _key(q: Tensor, filters: Tensor) -> tuple:
    return q.shape, filters.shape[0], q.dtype, filters.dtype, q.device


@functools.lru_cache(1024)
def _plan(kernel, shape, models: int, dtype, filter_dtype, device: torch.device) -> Launcher:
    rows, length, heads, width = shape
    tiles, operands = triton.cdiv(length, TILE), choose_operands(dtype)
    constants = (heads, width, pad(width), TILE, *operands)
    if kernel is filter_kernel:
        groups = count_groups(shape, models, dtype, filter_dtype, device)
        programs, constants = models * heads * groups * tiles, (groups, *constants)
    else:
        programs = rows * heads * tiles
    # One stage: reading a filter ahead of the products costs more than it hides.
    return Launcher(kernel, programs, (length, rows // models, *constants), num_warps=4, num_stages=1)


def count_groups(shape, models: int, dtype, filter_dtype, device: torch.device) -> int:
    """Into how many the rows of a model are shared out, so that their sums fill the GPU a few times."""
    rows, length, heads, _ = shape
    programs = models * heads * triton.cdiv(length, TILE)
    return max(1, min(rows // models, 16 * count_processors(device, interpreted=1) // programs))
