"""The Triton kernels of the gated delta rule; `linnet.ops.delta.triton` says what they compute, and launches them."""

import triton
import triton.language as tl

from linnet.ops.device import LOG2_E, load_masked, span, store_masked
from linnet.ops.gated.kernels import FLOOR, locate, pack_decay


@triton.jit
def sum_between(decay, r, EXACT: tl.constexpr):
    """Sums of the log-decays [C] after token s up to token r, [C, C], 0 where s >= r.

    EXACT: without differences of the sums from the chunk's start, which lose digits after strong decays.
    """
    if EXACT:
        later = tl.where(r[:, None] > r[None, :], decay[:, None], 0.0)
        sums = tl.cumsum(later, 0)
    else:
        total = tl.cumsum(decay, 0)
        sums = total[:, None] - total[None, :]
    return tl.where(r[:, None] > r[None, :], sums, 0.0)


@triton.jit
def load_decay(log_decay, at, inside, HAS_DECAY: tl.constexpr):
    """The log-decays of tokens, as exponents of 2."""
    if HAS_DECAY:
        decay = tl.load(log_decay + at, mask=inside, other=0.0).to(tl.float32)
        return tl.maximum(decay * LOG2_E, FLOOR)
    else:
        return tl.where(inside, 0.0, 0.0)


@triton.jit
def join_blocks(first, C: tl.constexpr, SIZE: tl.constexpr):
    """Replaces the block of A below that of `first` and beside the next on the diagonal, both inverted, by its part in
    the inverse of the three."""
    i = tl.arange(0, SIZE)
    at = i[:, None] * C + i[None, :]
    lower = i[:, None] >= i[None, :]
    inverse = tl.load(first + at, mask=lower, other=0.0)
    below = tl.dot(tl.load(first + SIZE * C + at), inverse, input_precision="tf32x3")
    inverse = tl.load(first + SIZE * (C + 1) + at, mask=lower, other=0.0)
    below = tl.dot(inverse, below, input_precision="tf32x3")
    tl.debug_barrier()
    tl.store(first + SIZE * C + at, -below)


@triton.jit
def invert_kernel(overlaps, inverses, C: tl.constexpr, OPERAND: tl.constexpr):
    """(1 + A)^-1 of the overlaps [tiles, C, C], which it overwrites: by substitution in blocks of 16 on the diagonal,
    by products of blocks below them.

    Columns of an inverse do not depend on each other, so a thread substitutes in its columns and waits for no other.
    One warp a chunk: many chunks at a time hide what each waits for.
    """
    tile = tl.program_id(0).to(tl.int64) * (C * C)
    overlaps += tile
    c = tl.arange(0, C)
    block, column = overlaps + c // 16 * (16 * C + 16), c % 16
    rows = (tl.where(column == 0, 1.0, 0.0),)
    for row in tl.static_range(1, 16):
        value = tl.where(column == row, 1.0, 0.0)
        for before in tl.static_range(0, row):
            value -= tl.load(block + row * C + before) * rows[before]
        rows = rows + (value,)
    tl.debug_barrier()
    for row in tl.static_range(0, 16):
        tl.store(block + row * C + column, rows[row])
    tl.debug_barrier()
    for level in tl.static_range(0, (C // 16).bit_length() - 1):
        for pair in tl.static_range(0, C // (32 << level)):
            join_blocks(overlaps + pair * (32 << level) * (C + 1), C, 16 << level)
        tl.debug_barrier()
    at = c[:, None] * C + c[None, :]
    inverse = tl.load(overlaps + at, mask=c[:, None] >= c[None, :], other=0.0)
    tl.store(inverses + tile + at, inverse.to(OPERAND))


@triton.jit
def prepare_kernel(
    q, k, log_decay, erase, offsets, overlaps, scores, factors, rest, scale, T, N, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PK: tl.constexpr, HAS_DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Of the chunk of each slot and value head: A in blocks of 16 up to its diagonal, P, and decays since its start, to
    its end and over it."""
    pid = tl.program_id(0)
    slot, h = pid // HV, pid % HV
    row, left = locate(slot, offsets, T, N, C, DOCUMENTS)
    if left <= 0:
        return
    tile = pid.to(tl.int64)
    r, i = tl.arange(0, C), tl.arange(0, PK)
    inside = r < left
    mask = inside[:, None] & (i < K)[None, :]
    MASKED: tl.constexpr = not EVEN or K != PK
    at = (row + r)[:, None] * (H * K) + (h // (HV // H)) * K + i[None, :]
    tk = load_masked(k, at, mask, MASKED).to(OPERAND)
    tq = load_masked(q, at, mask, MASKED).to(OPERAND)
    decay = load_decay(log_decay, (row + r) * HV + h, inside, HAS_DECAY)
    strength = tl.load(erase + (row + r) * HV + h, mask=inside, other=0.0).to(tl.float32)
    between = tl.exp2(sum_between(decay, r, EXACT))
    blocks = tl.dot(tk, tl.trans(tk), input_precision=PRECISION) * between * strength[:, None]
    blocks = tl.where(r[:, None] > r[None, :], blocks, 0.0)
    pairs = tl.dot(tq, tl.trans(tk), input_precision=PRECISION) * between * scale
    pairs = tl.where(r[:, None] >= r[None, :], pairs, 0.0)
    to = tile * (C * C) + r[:, None] * C + r[None, :]
    tl.store(scores + to, pairs.to(OPERAND))
    tl.store(overlaps + to, blocks, mask=r[:, None] // 16 >= r[None, :] // 16)
    total = tl.cumsum(decay, 0)
    whole = tl.sum(decay, 0)
    at = factors + tile * (4 * C) + r
    tl.store(at, tl.exp2(total))
    tl.store(at + C, tl.exp2(tl.cumsum(decay, 0, reverse=True) - decay))
    tl.store(at + 2 * C, strength)
    tl.store(at + 3 * C, total)
    tl.store(rest + tile, pack_decay(whole, OPERAND))


@triton.jit
def load_state(pointer, nh, i, j, K: tl.constexpr, V: tl.constexpr):
    """A state [K, V] of memory, transposed."""
    mask = (i < K)[:, None] & (j < V)[None, :]
    return tl.trans(tl.load(pointer + nh.to(tl.int64) * (K * V) + i[:, None] * V + j[None, :], mask=mask, other=0.0))


@triton.jit
def store_state(pointer, nh, state, i, j, K: tl.constexpr, V: tl.constexpr):
    mask = (i < K)[:, None] & (j < V)[None, :]
    tl.store(pointer + nh.to(tl.int64) * (K * V) + i[:, None] * V + j[None, :], tl.trans(state), mask=mask)


@triton.jit
def decay_state(state, decay):
    """What an update is added to: a weak decay is packed as itself less 1 (`linnet.ops.gated.kernels.decayed`)."""
    return tl.where(decay < 0, state, 0.0) + state * decay


@triton.jit
def sweep_kernel(
    q, k, v, inverses, scores, factors, rest, initial, o, final, offsets, scale, T, N, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o and the final states."""
    sweep_forward(
        tl.program_id(0), q, k, v, inverses, scores, factors, rest, initial, o, final, None, None, offsets,
        scale, T, N, H, HV, K, V, C, PK, BV, HAS_INITIAL, HAS_FINAL, False, DOCUMENTS, EVEN, OPERAND, PRECISION,
        STAGES,
    )  # fmt: skip


@triton.jit
def both_sweeps_kernel(
    q, k, v, inverses, scores, factors, rest, initial, states, corrections, do, dfinal, dinitial, dstates,
    dvalues, offsets, scale, T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DFINAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The states before each chunk and the corrections; beside them the gradients of the states after each chunk, of
    the corrections before the inverse, and of the initial states."""
    pid = tl.program_id(0)
    half = tl.num_programs(0) // 2
    if pid < half:
        sweep_backward(
            pid, q, k, inverses, scores, factors, rest, do, dfinal, dinitial, dstates, dvalues, offsets,
            scale, T, N, H, HV, K, V, C, PK, BV, HAS_DFINAL, HAS_INITIAL, DOCUMENTS, EVEN, OPERAND, PRECISION, STAGES,
        )  # fmt: skip
    else:
        sweep_forward(
            pid - half, q, k, v, inverses, scores, factors, rest, initial, None, None, states, corrections,
            offsets, scale, T, N, H, HV, K, V, C, PK, BV, HAS_INITIAL, False, True, DOCUMENTS, EVEN, OPERAND,
            PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def sweep_forward(
    pid, q, k, v, inverses, scores, factors, rest, initial, o, final, states, corrections, offsets, scale,
    T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr,
    BV: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, KEEP: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    nh = pid // BLOCKS
    n, h = nh // HV, nh % HV
    r, i, j = tl.arange(0, C), tl.arange(0, PK), pid % BLOCKS * BV + tl.arange(0, BV)
    first, length = span(offsets, n, T, DOCUMENTS)
    slot = n.to(tl.int64) * tl.cdiv(T, C)
    if DOCUMENTS:
        slot = first // C + n
    MASKED: tl.constexpr = not EVEN or K != PK or V % BV != 0
    state = tl.zeros([BV, PK], tl.float32)
    if HAS_INITIAL:
        state += load_state(initial, nh, i, j, K, V)
    for chunk in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        tile, row = (slot + chunk) * HV + h, first + chunk * C
        inside = chunk * C + r < length
        key_at = (row + r)[:, None] * (H * K) + (h // (HV // H)) * K + i[None, :]
        key_mask = inside[:, None] & (i < K)[None, :]
        value_at = (row + r)[None, :] * (HV * V) + h * V + j[:, None]
        value_mask = inside[None, :] & (j < V)[:, None]
        pair_at = tile * (C * C) + r[:, None] * C + r[None, :]
        tk = load_masked(k, key_at, key_mask, MASKED).to(OPERAND)
        tv = load_masked(v, value_at, value_mask, MASKED).to(tl.float32)
        inverse = tl.load(inverses + pair_at)
        at = factors + tile * (4 * C) + r
        past, ahead, strength = tl.load(at), tl.load(at + C), tl.load(at + 2 * C)
        decay = tl.load(rest + tile)
        operand = state.to(OPERAND)
        if KEEP:
            at = tile * (K * V) + j[:, None] * K + i[None, :]
            store_masked(states, at, operand, (j < V)[:, None] & (i < K)[None, :], V % BV != 0 or K != PK)
        read = tl.dot(operand, tl.trans(tk), input_precision=PRECISION)
        read = ((tv - read * past[None, :]) * strength[None, :]).to(OPERAND)
        correction = tl.dot(read, tl.trans(inverse), input_precision=PRECISION)
        if KEEP:
            store_masked(corrections, value_at, correction, value_mask, MASKED)
        else:
            tq = load_masked(q, key_at, key_mask, MASKED).to(OPERAND)
            pairs = tl.load(scores + pair_at)
            out = tl.dot(operand, tl.trans(tq), input_precision=PRECISION) * (past * scale)[None, :]
            out = tl.dot(correction.to(OPERAND), tl.trans(pairs), out, input_precision=PRECISION)
            store_masked(o, value_at, out, value_mask, MASKED)
        update = (correction * ahead[None, :]).to(OPERAND)
        state = tl.dot(update, tk, decay_state(state, decay), input_precision=PRECISION)
    if HAS_FINAL:
        store_state(final, nh, state, i, j, K, V)


@triton.jit
def sweep_backward(
    pid, q, k, inverses, scores, factors, rest, do, dfinal, dinitial, dstates, dvalues, offsets, scale,
    T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr,
    BV: tl.constexpr, HAS_DFINAL: tl.constexpr, HAS_DINITIAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    nh = pid // BLOCKS
    n, h = nh // HV, nh % HV
    r, i, j = tl.arange(0, C), tl.arange(0, PK), pid % BLOCKS * BV + tl.arange(0, BV)
    first, length = span(offsets, n, T, DOCUMENTS)
    slot = n.to(tl.int64) * tl.cdiv(T, C)
    if DOCUMENTS:
        slot = first // C + n
    MASKED: tl.constexpr = not EVEN or K != PK or V % BV != 0
    dstate = tl.zeros([BV, PK], tl.float32)
    if HAS_DFINAL:
        dstate += load_state(dfinal, nh, i, j, K, V)
    chunks = tl.cdiv(length, C)
    for x in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - x
        tile, row = (slot + chunk) * HV + h, first + chunk * C
        inside = chunk * C + r < length
        key_at = (row + r)[:, None] * (H * K) + (h // (HV // H)) * K + i[None, :]
        key_mask = inside[:, None] & (i < K)[None, :]
        value_at = (row + r)[None, :] * (HV * V) + h * V + j[:, None]
        value_mask = inside[None, :] & (j < V)[:, None]
        pair_at = tile * (C * C) + r[:, None] * C + r[None, :]
        tk = load_masked(k, key_at, key_mask, MASKED).to(OPERAND)
        tq = load_masked(q, key_at, key_mask, MASKED).to(OPERAND)
        tdo = load_masked(do, value_at, value_mask, MASKED)
        inverse = tl.load(inverses + pair_at)
        pairs = tl.load(scores + pair_at)
        at = factors + tile * (4 * C) + r
        past, ahead, strength = tl.load(at), tl.load(at + C), tl.load(at + 2 * C)
        decay = tl.load(rest + tile)
        operand = dstate.to(OPERAND)
        at = tile * (K * V) + j[:, None] * K + i[None, :]
        store_masked(dstates, at, operand, (j < V)[:, None] & (i < K)[None, :], V % BV != 0 or K != PK)
        change = tl.dot(operand, tl.trans(tk), input_precision=PRECISION) * ahead[None, :]
        change = tl.dot(tdo.to(OPERAND), pairs, change, input_precision=PRECISION)
        dvalue = tl.dot(change.to(OPERAND), inverse, input_precision=PRECISION)
        store_masked(dvalues, value_at, dvalue, value_mask, MASKED)
        dstate = decay_state(dstate, decay)
        late = (tdo.to(tl.float32) * (past * scale)[None, :]).to(OPERAND)
        dstate = tl.dot(late, tq, dstate, input_precision=PRECISION)
        taken = (dvalue * (-past * strength)[None, :]).to(OPERAND)
        dstate = tl.dot(taken, tk, dstate, input_precision=PRECISION)
    if HAS_DINITIAL:
        store_state(dinitial, nh, dstate, i, j, K, V)


@triton.jit
def gradients_kernel(
    q, k, v, log_decay, do, states, dstates, corrections, dvalues, factors, offsets, dq, dk, dv, ddecay,
    derase, scale, T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PK: tl.constexpr, BV: tl.constexpr, HAS_DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv, and the gradients of log-decays and erase, of the chunk of each slot and head of keys.

    All that a log-decay scales after its token comes with a query or with what is erased, and all before with a key, so
    that its gradient is the sum over later tokens of q dq + (erase k) d(erase k) - k dk, and what leaves the chunk.
    """
    pid = tl.program_id(0)
    slot, kh = pid // H, pid % H
    row, left = locate(slot, offsets, T, N, C, DOCUMENTS)
    if left <= 0:
        return
    GROUP: tl.constexpr = HV // H
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    MASKED: tl.constexpr = not EVEN or K != PK
    r, i = tl.arange(0, C), tl.arange(0, PK)
    inside = r < left
    key_mask = inside[:, None] & (i < K)[None, :]
    key_at = (row + r)[:, None] * (H * K) + kh * K + i[None, :]
    tk = load_masked(k, key_at, key_mask, MASKED).to(OPERAND)
    tq = load_masked(q, key_at, key_mask, MASKED).to(OPERAND)
    sum_dq = tl.zeros([C, PK], tl.float32)
    sum_dk = tl.zeros([C, PK], tl.float32)
    queries = tl.zeros([C], tl.float32)  # the sums of q dq and k dk over the heads so far
    keys = tl.zeros([C], tl.float32)
    for member in tl.range(0, GROUP):
        h = kh * GROUP + member
        tile = slot.to(tl.int64) * HV + h
        decay = load_decay(log_decay, (row + r) * HV + h, inside, HAS_DECAY)
        vectors = factors + tile * (4 * C) + r
        past, ahead, strength = tl.load(vectors), tl.load(vectors + C), tl.load(vectors + 2 * C)
        dscores = tl.zeros([C, C], tl.float32)
        doverlaps = tl.zeros([C, C], tl.float32)
        derased = tl.zeros([C, PK], tl.float32)
        through = tl.zeros([PK], tl.float32)
        written = tl.zeros([C], tl.float32)
        for block in tl.range(0, BLOCKS, num_stages=STAGES):
            j = block * BV + tl.arange(0, BV)
            value_at = (row + r)[:, None] * (HV * V) + h * V + j[None, :]
            value_mask = inside[:, None] & (j < V)[None, :]
            at = tile * (K * V) + j[:, None] * K + i[None, :]
            state_mask = (j < V)[:, None] & (i < K)[None, :]
            PADDED: tl.constexpr = V % BV != 0 or K != PK
            tdo = load_masked(do, value_at, value_mask, not EVEN or V % BV != 0).to(OPERAND)
            tv = load_masked(v, value_at, value_mask, not EVEN or V % BV != 0)
            correction = load_masked(corrections, value_at, value_mask, not EVEN or V % BV != 0)
            dvalue = load_masked(dvalues, value_at, value_mask, not EVEN or V % BV != 0)
            state = load_masked(states, at, state_mask, PADDED)
            dstate = load_masked(dstates, at, state_mask, PADDED)
            dscores = tl.dot(tdo, tl.trans(correction), dscores, input_precision=PRECISION)
            doverlaps = tl.dot(dvalue, tl.trans(correction), doverlaps, input_precision=PRECISION)
            late = (tdo.to(tl.float32) * (past * scale)[:, None]).to(OPERAND)
            early = (correction.to(tl.float32) * ahead[:, None]).to(OPERAND)
            taken = (dvalue.to(tl.float32) * -past[:, None]).to(OPERAND)
            sum_dq = tl.dot(late, state, sum_dq, input_precision=PRECISION)
            derased = tl.dot(taken, state, derased, input_precision=PRECISION)
            sum_dk = tl.dot(early, dstate, sum_dk, input_precision=PRECISION)
            through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
            wide = dvalue.to(tl.float32)
            written += tl.sum(wide * tv.to(tl.float32), 1)
            store_masked(dv, value_at, wide * strength[:, None], value_mask, not EVEN or V % BV != 0)
        between = tl.exp2(sum_between(decay, r, EXACT))
        dscores = tl.where(r[:, None] >= r[None, :], dscores * between, 0.0)
        doverlaps = tl.where(r[:, None] > r[None, :], -doverlaps * between, 0.0)
        wide_k = tk.to(tl.float32)
        leaving = tl.sum(tl.sum(sum_dk * wide_k, 1) - keys, 0)  # through the decays of keys to the end of the chunk
        scaled = (dscores * scale).to(OPERAND)
        sum_dq = tl.dot(scaled, tk, sum_dq, input_precision=PRECISION)
        sum_dk = tl.dot(tl.trans(scaled), tq, sum_dk, input_precision=PRECISION)
        of_keys = (doverlaps * strength[:, None]).to(OPERAND)
        sum_dk = tl.dot(tl.trans(of_keys), tk, sum_dk, input_precision=PRECISION)
        derased = tl.dot(doverlaps.to(OPERAND), tk, derased, input_precision=PRECISION)
        erased = tl.sum(derased * wide_k, 1)
        store_masked(derase, (row + r) * HV + h, written + erased, inside, not EVEN)
        if HAS_DECAY:
            total = tl.sum(sum_dq * tq.to(tl.float32), 1) - queries
            total += erased * strength - (tl.sum(sum_dk * wide_k, 1) - keys)
            total = tl.cumsum(total, 0, reverse=True) + leaving + tl.sum(through, 0) * tl.exp2(tl.sum(decay, 0))
            store_masked(ddecay, (row + r) * HV + h, total, inside, not EVEN)
        sum_dk += derased * strength[:, None]
        queries, keys = tl.sum(sum_dq * tq.to(tl.float32), 1), tl.sum(sum_dk * wide_k, 1)
    store_masked(dq, key_at, sum_dq, key_mask, MASKED)
    store_masked(dk, key_at, sum_dk, key_mask, MASKED)
