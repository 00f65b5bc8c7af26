"""Gated linear attention in two kernels, chunks alone and then chunk after chunk; see `linnet.ops.gated.triton`."""

import triton
import triton.language as tl

from linnet.ops.device import load_masked, span, store_masked
from linnet.ops.gated.tiles import (
    any_strong,
    choose_after,
    choose_from_halves,
    choose_until,
    exp2,
    is_between,
    load_bound,
    locate,
    read_gate,
    sum_tokens,
)


@triton.jit
def prepare_kernel(
    q, k, gate, bound, offsets, since_q, until_k, scores, decays, strong, scale, T, N, H: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, B: tl.constexpr, FORGET: tl.constexpr, BOUNDED: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    slot, h = pid // H, pid % H
    row, left = locate(slot, offsets, T, N, C, DOCUMENTS)
    tile = pid.to(tl.int64)
    if left <= 0:
        tl.store(strong + tile, 0)
        return
    MASKED: tl.constexpr = not EVEN or K % B != 0
    PADDED: tl.constexpr = K % B != 0
    r = tl.arange(0, C)
    q += (row * H + h) * K
    gate += (row * H + h) * K
    if not FORGET:
        k += (row * H + h) * K
    since_q += tile * (C * K)
    until_k += tile * (C * K)
    pairs = tl.zeros([C, C], tl.float32)
    least = tl.zeros([B], tl.float32)
    for start in tl.range(0, K, B):
        i = start + tl.arange(0, B)
        mask = (r < left)[:, None] & (i < K)[None, :]
        at, to = r[:, None] * (H * K) + i[None, :], r[:, None] * K + i[None, :]
        tk, decay = read_gate(
            k, gate, load_bound(bound, h, i, K, BOUNDED), at, mask, FORGET, MASKED, None, OPERAND, PRECISION
        )
        first = tl.sum(tl.where((r < C // 2)[:, None], decay, 0.0), 0)
        second = tl.sum(tl.where((r < C // 2)[:, None], 0.0, decay), 0)
        store_masked(decays + tile * K, i, exp2(first + second, OPERAND), i < K, PADDED)
        least = tl.minimum(least, tl.minimum(first, second))
        # Around the middle of the chunk both factors of every decay fit into the exponents of the operands.
        tq = load_masked(q, at, mask, MASKED).to(tl.float32) * scale
        around = tl.cumsum(decay, 0) - first[None, :]
        mid_q = tq * exp2(around, OPERAND)
        mid_k = tk * exp2(-around, OPERAND)
        store_masked(since_q, to, mid_q * exp2(first, OPERAND)[None, :], (i < K)[None, :], PADDED)
        store_masked(until_k, to, mid_k * exp2(second, OPERAND)[None, :], (i < K)[None, :], PADDED)
        pairs = tl.dot(mid_q.to(OPERAND), tl.trans(mid_k.to(OPERAND)), pairs, input_precision=PRECISION)
    pairs = tl.where(r[:, None] >= r[None, :], pairs, 0.0)
    tl.store(scores + tile * (C * C) + r[:, None] * C + r[None, :], pairs.to(OPERAND))
    # What a strong chunk got so far is of no use, and is written anew.
    tl.store(strong + tile, (tl.min(least) < -LIMIT).to(tl.int32))


@triton.jit
def prepare_strong_kernel(
    q, k, gate, bound, offsets, since_q, until_k, scores, strong, scale, T, N, tiles, H: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, B: tl.constexpr, FORGET: tl.constexpr, BOUNDED: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * GROUP
    if any_strong(strong, begin, tiles, GROUP):
        for step in tl.range(0, GROUP):
            tile = begin + step
            if tl.load(strong + tile, mask=tile < tiles, other=0) > 0:
                slot, h = tile // H, tile % H
                row, left = locate(slot, offsets, T, N, C, DOCUMENTS)
                r = tl.arange(0, C)
                pairs = tl.zeros([C, C], tl.float32)
                for start in tl.range(0, K, B):
                    pairs += _prepare_strongly(
                        q, k, gate, bound, since_q, until_k, scale, row, left, h, tile.to(tl.int64),
                        start + tl.arange(0, B), H, K, C, B, FORGET, BOUNDED, EVEN, OPERAND, PRECISION,
                    )  # fmt: skip
                to = scores + tile.to(tl.int64) * (C * C) + r[:, None] * C + r[None, :]
                tl.store(to, pairs.to(OPERAND))


@triton.jit
def _prepare_strongly(
    q, k, gate, bound, since_q, until_k, scale, row, left, h, tile, i, H: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, B: tl.constexpr, FORGET: tl.constexpr, BOUNDED: tl.constexpr, EVEN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of a few channels in the scores of a chunk that is halved down to single tokens, as in the chunked form:
    all factors are at most 1."""
    MASKED: tl.constexpr = not EVEN or K % B != 0
    PADDED: tl.constexpr = K % B != 0
    r = tl.arange(0, C)
    mask = (r < left)[:, None] & (i < K)[None, :]
    at, to = r[:, None] * (H * K) + i[None, :], r[:, None] * K + i[None, :]
    base = (row * H + h) * K
    if not FORGET:
        k += base
    tq = load_masked(q + base, at, mask, MASKED).to(tl.float32) * scale
    tk, decay = read_gate(
        k, gate + base, load_bound(bound, h, i, K, BOUNDED), at, mask, FORGET, MASKED, None, OPERAND, PRECISION
    )
    later, earlier = r[:, None], r[None, :]
    late_q = tq * exp2(sum_tokens(choose_until(later, earlier), decay, OPERAND, PRECISION), OPERAND)
    early_k = tk * exp2(sum_tokens(choose_after(later, earlier), decay, OPERAND, PRECISION), OPERAND)
    store_masked(since_q + tile * (C * K), to, late_q, (i < K)[None, :], PADDED)
    store_masked(until_k + tile * (C * K), to, early_k, (i < K)[None, :], PADDED)
    pairs = tl.where(r[:, None] == r[None, :], tl.sum(tq * tk, 1)[:, None], 0.0)
    LEVELS: tl.constexpr = C.bit_length() - 1
    for level in tl.range(0, LEVELS):
        apart = exp2(sum_tokens(choose_from_halves(later, earlier, level), decay, OPERAND, PRECISION), OPERAND)
        half_q, half_k = (tq * apart).to(OPERAND), (tk * apart).to(OPERAND)
        between = tl.dot(half_q, tl.trans(half_k), input_precision=PRECISION)
        pairs += tl.where(is_between(r[:, None], r[None, :], level), between, 0.0)
    return pairs


@triton.jit
def sweep_kernel(
    since, until, scores, decays, c, out, entry, leave, keep, c2, entry2, keep2, sums, sum_decays, offsets, T, N, G,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr,
    BOTH: tl.constexpr, HAS_ENTRY: tl.constexpr, HAS_ENTRY2: tl.constexpr, HAS_LEAVE: tl.constexpr,
    SUMMARY: tl.constexpr, SPLIT: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A sweep with c; of BOTH, that one runs from the last chunk to the first, beside one with c2 that has no `out`."""
    pid = tl.program_id(0)
    if BOTH:
        half = tl.num_programs(0) // 2  # the longer sweeps first
        if pid < half:
            _sweep(
                pid, until, since, scores, decays, c, out, entry, leave, keep, sums, sum_decays, offsets, 1, T, N, G,
                H, K, V, C, PK, BV, True, HAS_ENTRY, HAS_LEAVE, not SUMMARY, not SUMMARY, SUMMARY, SPLIT, DOCUMENTS,
                EVEN, OPERAND, PRECISION, STAGES,
            )  # fmt: skip
        else:
            _sweep(
                pid - half, since, until, scores, decays, c2, None, entry2, None, keep2, sums, sum_decays, offsets, 0,
                T, N, G, H, K, V, C, PK, BV, False, HAS_ENTRY2, False, False, not SUMMARY, SUMMARY, SPLIT, DOCUMENTS,
                EVEN, OPERAND, PRECISION, STAGES,
            )  # fmt: skip
    else:
        _sweep(
            pid, since, until, scores, decays, c, out, entry, leave, keep, sums, sum_decays, offsets, 0, T, N, G,
            H, K, V, C, PK, BV, False, HAS_ENTRY, HAS_LEAVE, not SUMMARY, False, SUMMARY, SPLIT, DOCUMENTS,
            EVEN, OPERAND, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _sweep(
    pid, since, until, scores, decays, c, out, entry, leave, keep, sums, sum_decays, offsets, direction, T, N, G,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, HAS_ENTRY: tl.constexpr, HAS_LEAVE: tl.constexpr, OUT: tl.constexpr, KEEP: tl.constexpr,
    SUMMARY: tl.constexpr, SPLIT: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    nh = (pid // BLOCKS) % (N * H)
    g = pid // (BLOCKS * N * H)
    n, h = nh // H, nh % H
    r, i, j = tl.arange(0, C), tl.arange(0, PK), pid % BLOCKS * BV + tl.arange(0, BV)
    row, length = span(offsets, n, T, DOCUMENTS)
    if DOCUMENTS:
        slot = row // C + n
    else:
        slot = n.to(tl.int64) * tl.cdiv(T, C)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)

    # States are held and kept as [V, K], so that nothing of them passes through shared memory.
    state = tl.zeros([BV, PK], tl.float32)
    state_mask = (j < V)[:, None] & (i < K)[None, :]
    if HAS_ENTRY:
        straight = tl.load(entry + nh.to(tl.int64) * (K * V) + i[:, None] * V + j[None, :],
                           mask=(i < K)[:, None] & (j < V)[None, :], other=0.0)  # fmt: skip
        state += tl.trans(straight)
    if SPLIT:
        for before in tl.range(0, g):
            part = (direction * (N * H) + nh).to(tl.int64) * (G - 1) + before
            decay = tl.load(sum_decays + part * K + i, mask=i < K, other=1.0)
            summary = tl.load(sums + part * (K * V) + j[:, None] * K + i[None, :], mask=state_mask, other=0.0)
            state = state * decay[None, :] + summary

    PADDED: tl.constexpr = K != PK
    total = tl.full([PK], 1.0, tl.float32)
    tile_at = r[:, None] * K + i[None, :]
    value_at = r[:, None] * (H * V) + j[None, :]
    for x in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        chunk = x
        if REVERSE:
            chunk = chunks - 1 - x
        tile = (slot + chunk) * H + h
        first = row + chunk * C
        value_mask = (chunk * C + r < length)[:, None] & (j < V)[None, :]
        if EVEN and V % BV == 0:
            tc = tl.load(c + (first * H + h) * V + value_at).to(OPERAND)
        else:
            tc = tl.load(c + (first * H + h) * V + value_at, mask=value_mask, other=0.0).to(OPERAND)
        if PADDED:
            tu = tl.load(until + tile * (C * K) + tile_at, mask=(i < K)[None, :], other=0.0)
            decay = tl.load(decays + tile * K + i, mask=i < K, other=1.0)
        else:
            tu = tl.load(until + tile * (C * K) + tile_at)
            decay = tl.load(decays + tile * K + i)
        if KEEP:
            tl.store(keep + tile * (K * V) + j[:, None] * K + i[None, :], state.to(OPERAND), mask=state_mask)
        if OUT:
            if PADDED:
                ts = tl.load(since + tile * (C * K) + tile_at, mask=(i < K)[None, :], other=0.0)
            else:
                ts = tl.load(since + tile * (C * K) + tile_at)
            pairs = tl.load(scores + tile * (C * C) + r[:, None] * C + r[None, :])
            result = tl.dot(state.to(OPERAND), tl.trans(ts), input_precision=PRECISION)
            if REVERSE:
                result = tl.dot(tl.trans(tc), pairs, result, input_precision=PRECISION)
            else:
                result = tl.dot(tl.trans(tc), tl.trans(pairs), result, input_precision=PRECISION)
            result = tl.trans(result).to(out.dtype.element_ty)
            if EVEN and V % BV == 0:
                tl.store(out + (first * H + h) * V + value_at, result)
            else:
                tl.store(out + (first * H + h) * V + value_at, result, mask=value_mask)
        state = tl.dot(tl.trans(tc), tu, state * decay[None, :], input_precision=PRECISION)
        if SUMMARY:
            total *= decay

    if SUMMARY:
        part = (direction * (N * H) + nh).to(tl.int64) * (G - 1) + g
        if g < G - 1:
            tl.store(sums + part * (K * V) + j[:, None] * K + i[None, :], state, mask=state_mask)
            tl.store(sum_decays + part * K + i, total, mask=i < K)
    if HAS_LEAVE:
        # By the program of the last chunk; for an empty document by the first.
        if ((g + 1) * per >= chunks) & ((g * per < chunks) | (g == 0)):
            to = leave + nh.to(tl.int64) * (K * V) + i[None, :] * V + j[:, None]
            tl.store(to, state, mask=state_mask)
