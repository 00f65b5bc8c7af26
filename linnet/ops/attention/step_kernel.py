"""One token of softmax attention over a cache of keys and values, in two launches: from projections to gated outputs.

The first norms and rotates queries and keys, writes the token's key and value into the cache, and attends to shares of
the tokens before it; the second merges the shares. Every slot of the cache is read once. How many shares there are
depends on the batch and the heads alone, so that a row does not depend on how long others are.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.attention import Cache, Turn
from linnet.ops.device import after_previous, cosine_sine
from linnet.ops.launching import (
    cdiv,
    choose_operands,
    count_processors,
    has_little_shared_memory,
    launch,
    next_power_of_2,
    pad,
)
from linnet.ops.stepping import as_heads

MOST_SHARES = 32
WIDEST = 256  # channels of a head
NONE, HEAD, CHANNEL = 0, 1, 2  # what a gate has a number for


def supports(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> bool:
    """Whether the kernels take a token: one dtype of at most 32 bits and one device, shapes that go together, heads of
    at most 256 whose queries a program holds, slots in one piece."""
    keys, values, places, position = cache
    (B, H, D), (_, G, _), (_, S) = q.shape, k.shape, places.shape
    token, slots, steps, dtype, index = (B, G, D), (B, S, G, D), (G * D, D, 1), q.dtype, q.get_device()
    if k.shape != token or v.shape != token or keys.shape != slots or values.shape != slots:
        return False
    if places.shape[0] != B or position.shape[0] != B or places.stride(1) != 1:
        return False
    if keys.stride()[1:] != steps or values.stride()[1:] != steps or not position.is_contiguous():
        return False  # the position shows rows that are copies of one, by `expand`, which cannot be written
    alike = k.dtype == v.dtype == keys.dtype == values.dtype == dtype
    here = keys.get_device() == values.get_device() == places.get_device() == position.get_device() == index
    return alike and here and _fits(H // G, D, dtype, q.device)


@functools.lru_cache(256)
def _fits(queries: int, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a program's shared memory holds the queries of a head of keys, beside tiles of keys and values.

    A program of 32 KiB of queries takes up to 129 KiB in all, one of 16 KiB up to 73 KiB.
    """
    known = dtype in (torch.float32, torch.bfloat16, torch.float16) and width <= WIDEST
    most = 16 if has_little_shared_memory(device) else 32
    return known and pad(queries) * max(64, pad(width)) * dtype.itemsize <= most * 1024


def attend_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    turn: Turn,
    gate: Tensor | None,
    scale: float,
    window: int,
    block: int,
) -> Tensor:
    """Returns act(gate) * attention of q [B, H, D] to the cache and to k, v [B, G, D], [B, H, D].

    Args:
        gate: [B, H] or [B, H D], before its sigmoid; None for none.
        scale: of q k.
        window, block: as the options of `linnet.layers.mixers.softmax.attention`; 0 for none.
    """
    q, k, v = as_heads(q), as_heads(k), as_heads(v)
    (B, H, D), G, slots = q.shape, k.shape[1], cache.places.shape[1]
    gate = gate if gate is None or gate.stride(1) == 1 else gate.contiguous()
    processors = count_processors(q.device, interpreted=2)
    shares = min(MOST_SHARES, next_power_of_2(cdiv(2 * processors, B * G)))
    dtype, precision = choose_operands(q.dtype)
    # Slots at a time: every dtype fits into the 99 KiB of shared memory that most cards have (float32 takes 66).
    width, tile = pad(D), 64 >> ((D > 128) + (q.dtype != torch.bfloat16))
    partial = torch.empty(B, H, shares, D, dtype=torch.float32, device=q.device)
    sums = torch.empty(B, H, 2, shares, dtype=torch.float32, device=q.device)
    o = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
    index = tl.int32 if (slots + tile) * G * D < 2**31 else tl.int64  # of the numbers of a row of the cache
    pairs = 0 if turn.theta is None else turn.theta.shape[-1]
    caches = cache.keys, cache.values, cache.places
    tensors = q, k, v, *caches, cache.position, turn.q_gain, turn.k_gain, turn.theta, partial, sums
    numbers = scale * math.log2(math.e), float(turn.amplitude), float(turn.eps)
    constants = (
        *(x.stride(0) for x in (q, k, v, *caches)), slots, H, G, D, pairs, window, block, shares, tile, pad(H // G),
        width, turn.q_gain is not None, q.is_cuda, dtype, precision, index,
    )  # fmt: skip
    launch(step_kernel, B * G * shares, tensors, numbers, constants, num_warps=4)
    kind = NONE if gate is None else HEAD if gate.shape[1] == H else CHANNEL
    gating = 0 if gate is None else gate.stride(0), H, D, shares, width, kind
    launch(merge_kernel, B * H, (partial, sums, gate, cache.position, o), (), gating, num_warps=4)
    return o


@triton.jit(do_not_specialize=["S", "places_stride"])  # one variant for all lengths of a cache
def step_kernel(
    q, k, v, keys, values, places, position, q_gain, k_gain, theta, partial, sums, scale, amplitude, eps,
    q_stride, k_stride, v_stride, keys_stride, values_stride, places_stride, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, F: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    SHARES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr,
    FAST: tl.constexpr, OPERANDS: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program has the queries that share a head of keys, ROWS of them, and one share of the slots."""
    after_previous(OVERLAPS)
    share, head = tl.program_id(0) % SHARES, tl.program_id(0) // SHARES
    b, g = (head // G).to(tl.int64), head % G
    R: tl.constexpr = H // G
    row, i = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    place = tl.load(position + b)
    slot = place % S
    query = _turned(q + b * q_stride + g * R * D, row[:, None], q_gain, theta, place, amplitude, eps, R, D, F, NORMED,
                    FAST, WIDTH)  # fmt: skip
    # The first share has the token itself, whose slot all others leave out.
    first = share == 0
    only = tl.arange(0, 1)[:, None]
    newest = _turned(k + b * k_stride + g * D, only, k_gain, theta, place, amplitude, eps, 1, D, F, NORMED, FAST, WIDTH)
    its_value = tl.load(v + b * v_stride + g * D + only * D + i, mask=i < D, other=0.0)
    to = slot * (G * D) + g * D + only * D + i
    tl.store(keys + b * keys_stride + to, newest.to(keys.dtype.element_ty), mask=(i < D) & first)
    tl.store(values + b * values_stride + to, its_value.to(values.dtype.element_ty), mask=(i < D) & first)
    tl.store(places + b * places_stride + slot, place + 1, mask=first & (g == 0))
    most = tl.where(first, tl.sum(query * newest, 1) * scale, float("-inf"))
    total = tl.where(first, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    out = tl.where(first, its_value.to(tl.float32), 0.0) + tl.zeros([ROWS, WIDTH], tl.float32)
    asked = query.to(OPERANDS)

    held = tl.minimum(place + 1, S).to(tl.int32)
    tiles = (held + TILE - 1) // TILE
    each = (tiles + SHARES - 1) // SHARES
    for tile in range(share * each, tl.minimum((share + 1) * each, tiles)):
        s = tl.cast(tile, INDEX) * TILE + tl.arange(0, TILE)
        there = (s < held) & (s != slot)
        seen = tl.load(places + b * places_stride + s, mask=there, other=0) - 1
        there = there & (seen >= 0) & (seen <= place)
        if WINDOW > 0:
            there = there & (place - seen < WINDOW)
        if BLOCK > 0:
            there = there & (seen // BLOCK == place // BLOCK)
        at = s[:, None] * (G * D) + g * D + i
        inside = there[:, None] & (i < D)
        key = tl.load(keys + b * keys_stride + at, mask=inside, other=0.0).to(OPERANDS)
        value = tl.load(values + b * values_stride + at, mask=inside, other=0.0).to(OPERANDS)
        scores = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # no token of this share is seen yet
        weights, kept = tl.exp2(scores - base[:, None]), tl.exp2(most - base)
        total = total * kept + tl.sum(weights, 1)
        out = tl.dot(weights.to(OPERANDS), value, out * kept[:, None], input_precision=PRECISION)
        most = highest

    h = b * H + g * R + row
    tl.store(partial + (h * SHARES + share)[:, None] * D + i, out, mask=(row < R)[:, None] & (i < D))
    tl.store(sums + h * 2 * SHARES + share, most, mask=row < R)
    tl.store(sums + (h * 2 + 1) * SHARES + share, total, mask=row < R)


@triton.jit
def merge_kernel(
    partial, sums, gate, position, o, gate_stride: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SHARES: tl.constexpr,
    WIDTH: tl.constexpr, GATE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    share, i = tl.arange(0, SHARES), tl.arange(0, WIDTH)
    most = tl.load(sums + head * 2 * SHARES + share)
    weights = tl.exp2(most - tl.max(most, 0))
    total = tl.sum(weights * tl.load(sums + (head * 2 + 1) * SHARES + share), 0)
    at = (head * SHARES + share)[:, None] * D + i[None, :]
    parts = tl.load(partial + at, mask=(i < D)[None, :], other=0.0)
    out = (tl.sum(parts * weights[:, None], 0) / total).to(o.dtype.element_ty)
    if GATE > 0:
        at = gate + b * gate_stride + (h if GATE == 1 else h * D + i)
        logit = tl.load(at).to(tl.float32) if GATE == 1 else tl.load(at, mask=i < D, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) / (1.0 + tl.exp(-logit))).to(o.dtype.element_ty)
    tl.store(o + head * D + i, out, mask=i < D)
    if h == 0:
        tl.store(position + b, tl.load(position + b) + 1)


@triton.jit
def _turned(
    x, row, gain, theta, place, amplitude, eps, COUNT: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    NORMED: tl.constexpr, FAST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of x [COUNT, D], normed and rotated, in float32, rounded to the dtype of x as by the layers before."""
    i = tl.arange(0, WIDTH)[None, :]
    inside = (row < COUNT) & (i < D)
    y = tl.load(x + row * D + i, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        inverse = 1.0 / tl.sqrt(tl.sum(y * y, 1)[:, None] / D + eps)
        y = (y * inverse * tl.load(gain + i, mask=i < D, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        y = y.to(tl.float32)
    if F > 0:
        # A channel loads its partner too, since one thread does not see what another has.
        other = tl.where(i < F, i + F, i - F)
        turned = inside & (i < 2 * F)
        z = tl.load(x + row * D + other, mask=turned, other=0.0).to(tl.float32)
        if NORMED:
            z = (z * inverse * tl.load(gain + other, mask=i < 2 * F, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
            z = z.to(tl.float32)
        frequency = tl.load(theta + i % F, mask=i < 2 * F, other=0.0).to(tl.float32)
        cos, sin = cosine_sine(tl.zeros([1, 1], tl.float32) + place.to(tl.float32), frequency, FAST)
        sin = tl.where(i < F, -sin, sin)
        rotated = ((y * cos + z * sin).to(x.dtype.element_ty).to(tl.float32) * amplitude).to(x.dtype.element_ty)
        y = tl.where(i < 2 * F, rotated.to(tl.float32), y)
    return y
