"""The product form of MD-TPE on small grids, on a GPU: both axes in one launch, without a copy in another order.

A channel's product is too small for the matrix units, and PyTorch's batched product reads channels first, so that x is
copied there and back. Here a program computes a tile of rows, columns and channels, one multiply-add after another in
float32, and reads x in its own order. The work grows with the side: 32 tokens and 25 million elements take as many
operations as a GPU does while it reads x four times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import align, count_processors, launch
from linnet.ops.shares import sum_shares

CHANNELS = 32  # of a program
RESIDENT = 4  # programs of a multiprocessor


def product(x: Tensor, rows: Tensor, columns: Tensor, transposed: bool = False) -> Tensor:
    """y[b, s, t] = sum_u rows[s, u] x[b, u, t] + sum_v columns[t, v] x[b, s, v], channel by channel.

    Args:
        x: [B, S1, S2, D]. rows: float32 [S1, S1, D]. columns: float32 [S2, S2, D].
        transposed: take rows[u, s] and columns[v, t].
    """
    x, rows, columns = align(x), align(rows), align(columns)
    B, S1, S2, D = x.shape
    y, tiles = torch.empty_like(x), (_tile(S1), _tile(S2))
    programs = triton.cdiv(D, CHANNELS) * triton.cdiv(S1, tiles[0]) * triton.cdiv(S2, tiles[1]) * B
    launch(product_kernel, programs, (x, rows, columns, y), (), (S1, S2, D, *tiles, CHANNELS, transposed))
    return y


def gradients(x: Tensor, rows: Tensor, columns: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to x, rows and columns."""
    x, dy = align(x), align(dy)
    return product(dy, rows, columns, transposed=True), _learn(x, dy, 0), _learn(x, dy, 1)


def _learn(x: Tensor, dy: Tensor, axis: int) -> Tensor:
    """[S, S, D]: sums over lines along an axis of dy[s] x[u]."""
    B, S1, S2, D = x.shape
    side, other, step, apart = (S1, S2, S2 * D, D) if axis == 0 else (S2, S1, D, S2 * D)
    tile, lines = _tile(side), B * other
    blocks = triton.cdiv(D, CHANNELS) * triton.cdiv(side, tile) ** 2
    shares = max(1, min(lines, RESIDENT * count_processors(x.device, interpreted=2) // blocks))
    sums = x.new_empty(shares, 1, 1, side * side * D, dtype=torch.float32)
    sizes = (lines, other, S1 * S2 * D, shares)
    launch(learn_kernel, blocks * shares, (x, dy, sums), (), (*sizes, side, D, step, apart, tile, CHANNELS))
    return sum_shares(sums, torch.float32).view(side, side, D)


def _tile(side: int) -> int:
    return min(16, triton.next_power_of_2(side))


@triton.jit
def product_kernel(
    x, rows, columns, y, S1: tl.constexpr, S2: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    CHANNELS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    TILES1: tl.constexpr = (S1 + R1 - 1) // R1
    TILES2: tl.constexpr = (S2 + R2 - 1) // R2
    channel = pid % BLOCKS * CHANNELS + tl.arange(0, CHANNELS)
    t = pid // BLOCKS % TILES2 * R2 + tl.arange(0, R2)
    s = pid // (BLOCKS * TILES2) % TILES1 * R1 + tl.arange(0, R1)
    image = (pid // (BLOCKS * TILES2 * TILES1)).to(tl.int64) * (S1 * S2 * D)
    x, y = x + image, y + image
    at_s, at_t = (s < S1)[:, None] & (channel < D)[None, :], (t < S2)[:, None] & (channel < D)[None, :]
    # Between tokens of one matrix and the next: those of a row of the matrix, or of a column.
    OWN1: tl.constexpr = D if TRANSPOSED else S1 * D
    NEXT1: tl.constexpr = S1 * D if TRANSPOSED else D
    OWN2: tl.constexpr = D if TRANSPOSED else S2 * D
    NEXT2: tl.constexpr = S2 * D if TRANSPOSED else D
    total = tl.zeros([R1, R2, CHANNELS], tl.float32)
    for u in tl.range(0, S1, loop_unroll_factor=4):
        weight = tl.load(rows + u * NEXT1 + s[:, None] * OWN1 + channel[None, :], mask=at_s, other=0.0)
        line = tl.load(x + u * (S2 * D) + t[:, None] * D + channel[None, :], mask=at_t, other=0.0).to(tl.float32)
        total += weight[:, None, :] * line[None, :, :]
    for v in tl.range(0, S2, loop_unroll_factor=4):
        weight = tl.load(columns + v * NEXT2 + t[:, None] * OWN2 + channel[None, :], mask=at_t, other=0.0)
        line = tl.load(x + v * D + s[:, None] * (S2 * D) + channel[None, :], mask=at_s, other=0.0).to(tl.float32)
        total += line[:, None, :] * weight[None, :, :]
    at = s[:, None, None] * (S2 * D) + t[None, :, None] * D + channel[None, None, :]
    mask = (s < S1)[:, None, None] & (t < S2)[None, :, None] & (channel < D)[None, None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def learn_kernel(
    x, dy, found, lines, other, image, shares, S: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
    APART: tl.constexpr, R: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A share of the lines: STEP lies between the tokens of a line, APART between the `other` lines of an image."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    TILES: tl.constexpr = (S + R - 1) // R
    channel = pid % BLOCKS * CHANNELS + tl.arange(0, CHANNELS)
    u = pid // BLOCKS % TILES * R + tl.arange(0, R)
    s = pid // (BLOCKS * TILES) % TILES * R + tl.arange(0, R)
    share = pid // (BLOCKS * TILES * TILES)
    at_s, at_u = (s < S)[:, None] & (channel < D)[None, :], (u < S)[:, None] & (channel < D)[None, :]
    total = tl.zeros([R, R, CHANNELS], tl.float32)
    for line in tl.range(share, lines, shares, loop_unroll_factor=4):
        start = (line // other).to(tl.int64) * image + line % other * APART
        left = tl.load(dy + start + s[:, None] * STEP + channel[None, :], mask=at_s, other=0.0).to(tl.float32)
        right = tl.load(x + start + u[:, None] * STEP + channel[None, :], mask=at_u, other=0.0).to(tl.float32)
        total += left[:, None, :] * right[None, :, :]
    found += share.to(tl.int64) * (S * S * D)
    at = (s[:, None, None] * S + u[None, :, None]) * D + channel[None, None, :]
    mask = (s < S)[:, None, None] & (u < S)[None, :, None] & (channel < D)[None, None, :]
    tl.store(found + at, total, mask=mask)
