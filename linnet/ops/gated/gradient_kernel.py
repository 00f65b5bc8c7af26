"""The gradients of q, k and the decays of gated linear attention, for all chunks at once.

Tiles are transposed, [channels, tokens]: then what a product of one warp gives is an operand of the next as it is.
"""

import triton
import triton.language as tl

from linnet.ops.device import load_masked, store_masked
from linnet.ops.gated.tiles import (
    any_strong,
    choose_after,
    choose_from_halves,
    exp2,
    invert,
    is_between,
    lay_out,
    locate,
    open_gate,
    read_gate,
    sum_transposed,
    to_operand,
)


@triton.jit
def pairs_kernel(
    do, v, dscores, same, offsets, T, N, H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's scores: of queries [C] with the keys before them [C], and with their own [C]."""
    pid = tl.program_id(0)
    slot, h = pid // H, pid % H
    row, left = locate(slot, offsets, T, N, C, DOCUMENTS)
    if left <= 0:
        return
    do += (row * H + h) * V
    v += (row * H + h) * V
    r = tl.arange(0, C)
    pairs = tl.zeros([C, C], tl.float32)
    for block in tl.range(0, V, BV):
        j = block + tl.arange(0, BV)
        mask = (r < left)[:, None] & (j < V)[None, :]
        at = r[:, None] * (H * V) + j[None, :]
        tv = load_masked(v, at, mask, not EVEN or V % BV != 0).to(OPERAND)
        tdo = load_masked(do, at, mask, not EVEN or V % BV != 0).to(OPERAND)
        pairs = tl.dot(tdo, tl.trans(tv), pairs, input_precision=PRECISION)
    tile = pid.to(tl.int64)
    tl.store(same + tile * C + r, tl.sum(tl.where(r[:, None] == r[None, :], pairs, 0.0), 1))
    pairs = tl.where(r[:, None] > r[None, :], pairs, 0.0)
    tl.store(dscores + tile * (C * C) + r[:, None] * C + r[None, :], pairs.to(OPERAND))


@triton.jit
def gradients_kernel(
    q, k, gate, bound, v, do, entries, exits, dscores, same, strong, choices, dq, dk, dgate, dbound, offsets, scale,
    T, N, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FORGET: tl.constexpr, BOUNDED: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    tile = pid // BLOCKS
    slot, h = tile // H, tile % H
    row, left = locate(slot, offsets, T, N, C, DOCUMENTS)
    tile = tile.to(tl.int64)
    first = pid % BLOCKS * BK
    if left <= 0:
        if BOUNDED:
            i = first + tl.arange(0, BK)
            tl.store(dbound + tile * K + i, tl.zeros([BK], tl.float32), mask=i < K)
        return
    if tl.load(strong + tile) > 0:
        return
    _gradients(
        q, k, gate, bound, v, do, entries, exits, dscores, same, choices, dq, dk, dgate, dbound, scale, row, left, h,
        tile, first, H, K, V, C, BK, BV, FORGET, BOUNDED, EVEN, OPERAND, PRECISION, STAGES, False,
    )  # fmt: skip


@triton.jit
def gradients_strong_kernel(
    q, k, gate, bound, v, do, entries, exits, dscores, same, strong, choices, dq, dk, dgate, dbound, offsets, scale,
    T, N, tiles, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, B: tl.constexpr, BV: tl.constexpr,
    FORGET: tl.constexpr, BOUNDED: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * GROUP
    if any_strong(strong, begin, tiles, GROUP):
        for step in tl.range(0, GROUP):
            tile = begin + step
            if tl.load(strong + tile, mask=tile < tiles, other=0) > 0:
                slot, h = tile // H, tile % H
                row, left = locate(slot, offsets, T, N, C, DOCUMENTS)
                for start in tl.range(0, K, B):
                    _gradients(
                        q, k, gate, bound, v, do, entries, exits, dscores, same, choices, dq, dk, dgate, dbound, scale,
                        row, left, h, tile.to(tl.int64), start, H, K, V, C, B, BV, FORGET, BOUNDED, EVEN, OPERAND,
                        PRECISION, 1, True,
                    )  # fmt: skip


@triton.jit
def _gradients(
    q, k, gate, bound, v, do, entries, exits, dscores, same, choices, dq, dk, dgate, dbound, scale, row, left, h, tile,
    start, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FORGET: tl.constexpr, BOUNDED: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of BK channels from `start` of a chunk."""
    base = (row * H + h) * K
    q += base
    gate += base
    dq += base
    dgate += base
    if not FORGET:
        k += base
        dk += base
    v += (row * H + h) * V
    do += (row * H + h) * V
    entries += tile * (K * V)
    exits += tile * (K * V)
    dscores += tile * (C * C)
    r, i = tl.arange(0, C), start + tl.arange(0, BK)
    from_entry = tl.zeros([BK, C], tl.float32)
    to_exit = tl.zeros([BK, C], tl.float32)
    through = tl.zeros([BK], tl.float32)
    for block in tl.range(0, V, BV, num_stages=STAGES):
        j = block + tl.arange(0, BV)
        value_mask = (r < left)[:, None] & (j < V)[None, :]
        value_at = r[:, None] * (H * V) + j[None, :]
        tv = load_masked(v, value_at, value_mask, not EVEN or V % BV != 0).to(OPERAND)
        tdo = load_masked(do, value_at, value_mask, not EVEN or V % BV != 0).to(OPERAND)
        state_mask = (j < V)[:, None] & (i < K)[None, :]
        entered = load_masked(entries, j[:, None] * K + i[None, :], state_mask, V % BV != 0 or K % BK != 0)
        left_over = load_masked(exits, j[:, None] * K + i[None, :], state_mask, V % BV != 0 or K % BK != 0)
        from_entry = tl.dot(tl.trans(entered), tl.trans(tdo), from_entry, input_precision=PRECISION)
        to_exit = tl.dot(tl.trans(left_over), tl.trans(tv), to_exit, input_precision=PRECISION)
        through += tl.sum(entered.to(tl.float32) * left_over.to(tl.float32), 0)

    MASKED: tl.constexpr = not EVEN or K % BK != 0
    mask = (i < K)[:, None] & (r < left)[None, :]
    at = i[:, None] + r[None, :] * (H * K)
    rows, columns = r[:, None], r[None, :]
    choices += rows * C + columns
    one = tl.load(choices)
    lower = 0.0
    if BOUNDED:
        lower = tl.load(bound + h * K + i, mask=i < K, other=0.0).to(tl.float32)[:, None]
    tq = lay_out(load_masked(q, at, mask, MASKED), one, OPERAND, PRECISION) * scale
    tk, decay = read_gate(k, gate, lower, at, mask, FORGET, MASKED, one, OPERAND, PRECISION)
    first = tl.sum(tl.where((r < C // 2)[None, :], decay, 0.0), 1)
    second = tl.sum(tl.where((r < C // 2)[None, :], 0.0, decay), 1)
    through *= exp2(first + second, OPERAND)

    # The gradients of the scores, [query, key] and [key, query].
    dpairs = tl.load(dscores + r[:, None] * C + r[None, :])
    transposed = tl.load(dscores + r[None, :] * C + r[:, None])
    # `inside` are the terms q dq - k dk of the pairs in the chunk. Both gradients of a pair are products of the same
    # rounded factors, so that what cancels in their sums cancels in full; q_t k_t, which no decay touches, is left out.
    if EXACT:
        from_entry *= exp2(sum_transposed(decay, tl.load(choices + C * C), OPERAND, PRECISION), OPERAND)
        to_exit *= exp2(sum_transposed(decay, choose_after(columns, rows), OPERAND, PRECISION), OPERAND)
        gq = tl.zeros([BK, C], tl.float32)
        gk = tl.zeros([BK, C], tl.float32)
        inside = tl.zeros([BK, C], tl.float32)
        LEVELS: tl.constexpr = C.bit_length() - 1
        for level in tl.range(0, LEVELS + tl.minimum(left, 0)):
            halves = choose_from_halves(columns, rows, level)
            apart = exp2(sum_transposed(decay, halves, OPERAND, PRECISION), OPERAND)
            half_q, half_k = to_operand(tq * apart, OPERAND), to_operand(tk * apart, OPERAND)
            late = tl.where(is_between(columns, rows, level), transposed, 0.0).to(OPERAND)
            early = tl.where(is_between(rows, columns, level), dpairs, 0.0).to(OPERAND)
            late_q = tl.dot(half_k, late, input_precision=PRECISION)
            early_k = tl.dot(half_q, early, input_precision=PRECISION)
            inside += half_q.to(tl.float32) * late_q - half_k.to(tl.float32) * early_k
            gq += late_q * apart
            gk += early_k * apart
    else:
        around = sum_transposed(decay, tl.load(choices + C * C), OPERAND, PRECISION) - first[:, None]
        ahead, behind = exp2(around, OPERAND), exp2(-around, OPERAND)
        mid_q, mid_k = to_operand(tq * ahead, OPERAND), to_operand(tk * behind, OPERAND)
        gq = tl.dot(mid_k, transposed, input_precision=PRECISION)
        gk = tl.dot(mid_q, dpairs, input_precision=PRECISION)
        inside = mid_q.to(tl.float32) * gq - mid_k.to(tl.float32) * gk
        gq *= ahead
        gk *= behind
        from_entry *= ahead * exp2(first, OPERAND)[:, None]
        to_exit *= behind * exp2(second, OPERAND)[:, None]

    # Through step t pass: pairs in the chunk, queries from t on that read the entry state, keys before t that the exit
    # state holds, and the entry state as far as the exit state holds it. None is the difference of larger terms.
    ddecay = sum_transposed(inside + tq * from_entry, tl.load(choices + 2 * C * C), OPERAND, PRECISION)
    ddecay += sum_transposed(tk * to_exit, tl.load(choices + 3 * C * C), OPERAND, PRECISION)
    ddecay += through[:, None]
    own = tl.load(same + tile * C + r)[None, :]
    gq = (gq + from_entry + own * tk) * scale
    gk += to_exit + own * tq
    store_masked(dq, at, gq, mask, MASKED)
    if FORGET:
        # The gate anew, rather than in registers all the way.
        u, top, share = open_gate(lay_out(load_masked(gate, at, mask, MASKED), one, OPERAND, PRECISION), lower, OPERAND)
        ddecay *= invert(top, OPERAND)
        if BOUNDED:
            part = tl.sum(tl.where(mask, u * (ddecay - gk * share), 0.0), 1)
            tl.store(dbound + tile * K + i, part, mask=i < K)
        ddecay = tk * (ddecay - gk * share)
    else:
        store_masked(dk, at, gk, mask, MASKED)
    store_masked(dgate, at, ddecay, mask, MASKED)
