"""The Triton kernels of the gated delta rule; `linnet.ops.delta.triton` says what they compute, and launches them."""

import triton
import triton.language as tl

from linnet.ops.device import KEEP_NAN, LOG2_E, load_masked, span, store_masked
from linnet.ops.gated.kernels import FLOOR, exp2, locate, pack_decay


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
        return tl.maximum(decay * LOG2_E, FLOOR, KEEP_NAN)
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
def sum_from(sums, decay, r, middle, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Of the log-decays [C, BK]: their sums after a token `middle` up to token r; less those after r up to `middle`.

    `sums` are those since the start of the chunk. Their differences lose digits after strong decays, and so are exact
    enough for bfloat16 alone.
    """
    if OPERAND == tl.bfloat16:
        return sums - tl.sum(tl.where((r == middle)[:, None], sums, 0.0), 0)[None, :]
    upto, token = r[:, None], r[None, :]
    choice = tl.where((token > middle) & (token <= upto), 1.0, 0.0)
    choice -= tl.where((token > upto) & (token <= middle), 1.0, 0.0)
    return tl.dot(choice, decay, input_precision=PRECISION)


@triton.jit
def cut_blocks(sums, decay, r, C: tl.constexpr, LIMIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The largest size of blocks of a chunk whose decays, taken from the middle of a block, fit into the exponents of
    operands; and the sums of decays [C, BK] from the middle of its block to each token. Of blocks of 1 they are 0."""
    size = tl.program_id(0) * 0 + C
    around = sum_from(sums, decay, r, (C - 1) // 2, OPERAND, PRECISION)
    while tl.max(tl.abs(around)) > LIMIT:
        size = size // 2
        for block in tl.range(0, C // size):
            apart = sum_from(sums, decay, r, block * size + (size - 1) // 2, OPERAND, PRECISION)
            around = tl.where((r // size == block)[:, None], apart, around)
    return size, around


@triton.jit
def until_middle(around, sums, decay, r, block, size, C: tl.constexpr, LIMIT: tl.constexpr, OPERAND: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """The sums of decays from each key to the middle of a block; of keys after the block at most LIMIT."""
    if size < C:
        around = sum_from(sums, decay, r, block * size + (size - 1) // 2, OPERAND, PRECISION)
    return tl.minimum(-around, LIMIT, KEEP_NAN)


@triton.jit
def prepare_channels_kernel(
    q, k, log_decay, erase, offsets, overlaps, scores, factors, rest, late_q, late_k, early_k, scale, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LIMIT: tl.constexpr,
    APART: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `prepare_kernel` for a decay per channel, which cannot be taken out of products: q and k decayed since the
    start of the chunk and k to its end, with factors of 1 in their place.

    Scores are the products of rows of a block with all keys, each decayed from or to the middle of the block. Keys
    before the block have factors below 1; those of later blocks are multiplied by zeros.

    APART: erase [tokens, HV, K] is apart from what is written, and comes into the keys that read; strengths are 1.
    """
    pid = tl.program_id(0)
    slot, h = pid // HV, pid % HV
    row, left = locate(slot, offsets, T, N, C, DOCUMENTS)
    if left <= 0:
        return
    tile = pid.to(tl.int64)
    r = tl.arange(0, C)
    inside = r < left
    MASKED: tl.constexpr = not EVEN or K % BK != 0
    base, base_to = (row * H + h // (HV // H)) * K, (row * HV + h) * K
    blocks = tl.zeros([C, C], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    for start in tl.range(0, K, BK):
        i = start + tl.arange(0, BK)
        mask = inside[:, None] & (i < K)[None, :]
        at, to = r[:, None] * (H * K) + i[None, :], r[:, None] * (HV * K) + i[None, :]
        tk = load_masked(k + base, at, mask, MASKED).to(tl.float32)
        tq = load_masked(q + base, at, mask, MASKED).to(tl.float32)
        decay = load_decay(log_decay + base_to, to, mask, True)
        sums = tl.cumsum(decay, 0)
        past = exp2(sums, OPERAND)
        reading = tk
        if APART:
            reading *= load_masked(erase + base_to, to, mask, MASKED).to(tl.float32)
        store_masked(late_q + base_to, to, tq * past, mask, MASKED)
        store_masked(late_k + base_to, to, reading * past, mask, MASKED)
        ahead = exp2(-sum_from(sums, decay, r, C - 1, OPERAND, PRECISION), OPERAND)
        store_masked(early_k + base_to, to, tk * ahead, mask, MASKED)
        tl.store(rest + tile * K + i, pack_decay(tl.sum(decay, 0), OPERAND), mask=i < K)
        size, around = cut_blocks(sums, decay, r, C, LIMIT, OPERAND, PRECISION)
        after = exp2(around, OPERAND)
        for block in tl.range(0, C // size):
            before = exp2(until_middle(around, sums, decay, r, block, size, C, LIMIT, OPERAND, PRECISION), OPERAND)
            keys = (tk * before).to(OPERAND)
            rows = (r // size == block)[:, None]
            erased = tl.where(rows, reading * after, 0.0).to(OPERAND)
            blocks = tl.dot(erased, tl.trans(keys), blocks, input_precision=PRECISION)
            queries = tl.where(rows, tq * after, 0.0).to(OPERAND)
            pairs = tl.dot(queries, tl.trans(keys), pairs, input_precision=PRECISION)
    strength = tl.where(inside, 1.0, 0.0)
    if not APART:
        strength = tl.load(erase + (row + r) * HV + h, mask=inside, other=0.0).to(tl.float32)
    blocks = tl.where(r[:, None] > r[None, :], blocks * strength[:, None], 0.0)
    pairs = tl.where(r[:, None] >= r[None, :], pairs * scale, 0.0)
    to = r[:, None] * C + r[None, :]
    tl.store(scores + tile * (C * C) + to, pairs.to(OPERAND))
    tl.store(overlaps + tile * (C * C) + to, blocks, mask=r[:, None] // 16 >= r[None, :] // 16)
    at = factors + tile * (4 * C) + r
    tl.store(at, tl.where(inside, 1.0, 1.0))
    tl.store(at + C, tl.where(inside, 1.0, 1.0))
    tl.store(at + 2 * C, strength)


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
def load_to_end(tk, early, rest, tile, at, mask, i, K: tl.constexpr, PK: tl.constexpr, MASKED: tl.constexpr,
                CHANNELS: tl.constexpr):  # fmt: skip
    """The keys of a chunk for the state after it, and its packed decay: of the head, or a row of channels."""
    if CHANNELS:
        return load_masked(early, at, mask, MASKED), load_masked(rest + tile * K, i, i < K, K != PK)[None, :]
    else:
        return tk, tl.load(rest + tile)


@triton.jit
def sweep_kernel(
    q, k, v, inverses, scores, factors, rest, initial, o, final, early, offsets, scale, T, N, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, CHANNELS: tl.constexpr, DOCUMENTS: tl.constexpr,
    EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o and the final states. CHANNELS: q and k are decayed since the start of the chunk, `early` is k decayed to its
    end, and `rest` has the decay of each channel."""
    sweep_forward(
        tl.program_id(0), q, k, v, inverses, scores, factors, rest, initial, o, final, None, None, early, offsets,
        scale, T, N, H, HV, K, V, C, PK, BV, HAS_INITIAL, HAS_FINAL, False, CHANNELS, DOCUMENTS, EVEN, OPERAND,
        PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def both_sweeps_kernel(
    q, k, v, inverses, scores, factors, rest, initial, states, corrections, do, dfinal, dinitial, dstates,
    dvalues, early, offsets, scale, T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DFINAL: tl.constexpr,
    CHANNELS: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The states before each chunk and the corrections; beside them the gradients of the states after each chunk, of
    the corrections before the inverse, and of the initial states."""
    pid = tl.program_id(0)
    half = tl.num_programs(0) // 2
    if pid < half:
        sweep_backward(
            pid, q, k, inverses, scores, factors, rest, do, dfinal, dinitial, dstates, dvalues, early, offsets,
            scale, T, N, H, HV, K, V, C, PK, BV, HAS_DFINAL, HAS_INITIAL, CHANNELS, DOCUMENTS, EVEN, OPERAND,
            PRECISION, STAGES,
        )  # fmt: skip
    else:
        sweep_forward(
            pid - half, q, k, v, inverses, scores, factors, rest, initial, None, None, states, corrections,
            early, offsets, scale, T, N, H, HV, K, V, C, PK, BV, HAS_INITIAL, False, True, CHANNELS, DOCUMENTS, EVEN,
            OPERAND, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def sweep_forward(
    pid, q, k, v, inverses, scores, factors, rest, initial, o, final, states, corrections, early, offsets,
    scale, T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr,
    BV: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, KEEP: tl.constexpr,
    CHANNELS: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
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
        tearly, decay = load_to_end(tk, early, rest, tile, key_at, key_mask, i, K, PK, MASKED, CHANNELS)
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
        state = tl.dot(update, tearly, decay_state(state, decay), input_precision=PRECISION)
    if HAS_FINAL:
        store_state(final, nh, state, i, j, K, V)


@triton.jit
def sweep_backward(
    pid, q, k, inverses, scores, factors, rest, do, dfinal, dinitial, dstates, dvalues, early, offsets, scale,
    T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr,
    BV: tl.constexpr, HAS_DFINAL: tl.constexpr, HAS_DINITIAL: tl.constexpr, CHANNELS: tl.constexpr,
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
        tearly, decay = load_to_end(tk, early, rest, tile, key_at, key_mask, i, K, PK, MASKED, CHANNELS)
        operand = dstate.to(OPERAND)
        at = tile * (K * V) + j[:, None] * K + i[None, :]
        store_masked(dstates, at, operand, (j < V)[:, None] & (i < K)[None, :], V % BV != 0 or K != PK)
        change = tl.dot(operand, tl.trans(tearly), input_precision=PRECISION) * ahead[None, :]
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
    derase, of_erased, of_scores, of_overlaps, of_decay, scale, T, N, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr, HAS_DECAY: tl.constexpr,
    CHANNELS: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv, and the gradients of log-decays and erase, of the chunk of each slot and head of keys.

    All that a log-decay scales after its token comes with a query or with what is erased, and all before with a key, so
    that its gradient is the sum over later tokens of q dq + (erase k) d(erase k) - k dk, and what leaves the chunk.

    CHANNELS: what `gradients_channels_kernel` goes on with, for each head of values: the gradients of q, erased and k
    with the decays that the sweeps took, of P and A below the diagonal, of P on it (in `factors`), of erase through the
    values, and of the decay over the chunk.
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
    if not CHANNELS:
        tk = load_masked(k, key_at, key_mask, MASKED).to(OPERAND)
        tq = load_masked(q, key_at, key_mask, MASKED).to(OPERAND)
    sum_dq = tl.zeros([C, PK], tl.float32)
    sum_dk = tl.zeros([C, PK], tl.float32)
    queries = tl.zeros([C], tl.float32)  # the sums of q dq and k dk over the heads so far
    keys = tl.zeros([C], tl.float32)
    with_itself = tl.zeros([C], tl.float32)
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
        if CHANNELS:
            store_masked(of_erased, key_at, derased, key_mask, MASKED)
            at, later, earlier = tile * (C * C) + r[:, None] * C + r[None, :], r[:, None], r[None, :]
            tl.store(of_scores + at, tl.where(later > earlier, dscores * scale, 0.0).to(OPERAND))
            tl.store(of_overlaps + at, tl.where(later > earlier, -doverlaps, 0.0).to(OPERAND))
            tl.store(vectors + 3 * C, tl.sum(tl.where(later == earlier, dscores * scale, 0.0), 1))
            store_masked(of_decay + tile * K, i, through, i < K, K != PK)
            store_masked(derase, (row + r) * HV + h, written, inside, not EVEN)
        else:
            between = tl.exp2(sum_between(decay, r, EXACT))
            # A query with its own key, which no decay touches, comes to the sums for log-decays as nothing.
            with_itself += tl.sum(tl.where(r[:, None] == r[None, :], dscores * scale, 0.0), 1)
            dscores = tl.where(r[:, None] > r[None, :], dscores * between, 0.0)
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
    if not CHANNELS:
        sum_dq += with_itself[:, None] * tk.to(tl.float32)
        sum_dk += with_itself[:, None] * tq.to(tl.float32)
    store_masked(dq, key_at, sum_dq, key_mask, MASKED)
    store_masked(dk, key_at, sum_dk, key_mask, MASKED)


@triton.jit
def gradients_channels_kernel(
    q, k, log_decay, erase, factors, of_q, of_erased, of_k, of_scores, of_overlaps, of_decay, offsets, dq, dk, ddecay,
    derase, T, N, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    LIMIT: tl.constexpr, APART: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of BK channels of a chunk: dq and dk for each head of values, those of log-decays, parts of those of erase (of
    APART, those of its channels).

    Both gradients of a pair of tokens are products of the same rounded factors, so that in the sums for log-decays what
    cancels cancels in full. A query with its own key, which no decay touches, is left out of them.
    """
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    pid, part = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    slot, h = pid // HV, pid % HV
    row, left = locate(slot, offsets, T, N, C, DOCUMENTS)
    if left <= 0:
        return
    tile = pid.to(tl.int64)
    MASKED: tl.constexpr = not EVEN or K % BK != 0
    r, i = tl.arange(0, C), part * BK + tl.arange(0, BK)
    inside = r < left
    mask = inside[:, None] & (i < K)[None, :]
    at, to = r[:, None] * (H * K) + i[None, :], r[:, None] * (HV * K) + i[None, :]
    base, base_to = (row * H + h // (HV // H)) * K, (row * HV + h) * K
    tk = load_masked(k + base, at, mask, MASKED).to(tl.float32)
    tq = load_masked(q + base, at, mask, MASKED).to(tl.float32)
    decay = load_decay(log_decay + base_to, to, mask, True)
    if APART:
        strength = load_masked(erase + base_to, to, mask, MASKED).to(tl.float32)
    else:
        strength = tl.load(factors + tile * (4 * C) + 2 * C + r)[:, None]
    erased = tk * strength
    sums = tl.cumsum(decay, 0)
    past = exp2(sums, OPERAND)
    sum_q = load_masked(of_q + base_to, to, mask, MASKED).to(tl.float32) * past
    sum_erased = load_masked(of_erased + base_to, to, mask, MASKED).to(tl.float32) * past
    ahead = exp2(-sum_from(sums, decay, r, C - 1, OPERAND, PRECISION), OPERAND)
    sum_k = load_masked(of_k + base_to, to, mask, MASKED).to(tl.float32) * ahead
    through = tl.load(of_decay + tile * K + i, mask=i < K, other=0.0) * exp2(tl.sum(decay, 0), OPERAND)
    leaving = tl.where((r < left - 1)[:, None], tk * sum_k, 0.0)  # that of the last token passes through no decay
    change = tl.cumsum(leaving, 0) - leaving + through[None, :]
    passing = tq * sum_q + erased * sum_erased

    size, around = cut_blocks(sums, decay, r, C, LIMIT, OPERAND, PRECISION)
    after = exp2(around, OPERAND)
    queries, late = (tq * after).to(OPERAND), (erased * after).to(OPERAND)
    pair_at = r[:, None] * C + r[None, :]
    for block in tl.range(0, C // size):
        before = exp2(until_middle(around, sums, decay, r, block, size, C, LIMIT, OPERAND, PRECISION), OPERAND)
        keys = (tk * before).to(OPERAND)
        rows = (r // size == block)[:, None]
        pairs = tl.where(rows, tl.load(of_scores + tile * (C * C) + pair_at), 0.0).to(OPERAND)
        from_q = tl.dot(pairs, keys, input_precision=PRECISION)
        from_k = tl.dot(tl.trans(pairs), queries, input_precision=PRECISION)
        pairs = tl.where(rows, tl.load(of_overlaps + tile * (C * C) + pair_at), 0.0).to(OPERAND)
        from_erased = tl.dot(pairs, keys, input_precision=PRECISION)
        from_k = tl.dot(tl.trans(pairs), late, from_k, input_precision=PRECISION)
        passing += queries.to(tl.float32) * from_q + late.to(tl.float32) * from_erased
        passing -= keys.to(tl.float32) * from_k
        sum_q += from_q * after
        sum_erased += from_erased * after
        sum_k += from_k * before
    store_masked(ddecay + base_to, to, change + tl.cumsum(passing, 0, reverse=True), mask, MASKED)
    own = tl.load(factors + tile * (4 * C) + 3 * C + r)[:, None]
    store_masked(dq + base_to, to, sum_q + own * tk, mask, MASKED)
    store_masked(dk + base_to, to, sum_k + own * tq + sum_erased * strength, mask, MASKED)
    if APART:
        store_masked(derase + base_to, to, sum_erased * tk, mask, MASKED)
    else:
        store_masked(derase, ((row + r) * HV + h) * BLOCKS + part, tl.sum(sum_erased * tk, 1), inside, not EVEN)
