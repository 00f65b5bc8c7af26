"""The Triton kernels of gated linear attention; `linnet.ops.gated.triton` says what they compute, and launches them."""

import triton
import triton.language as tl

from linnet.ops.device import KEEP_NAN, LOG2_E, identify, load_masked, span, store_masked

# 2 to it is 0 in float32: a decay to less is a decay to 0, and -inf becomes a number that can be summed.
FLOOR = tl.constexpr(-160.0)


# A packed decay of 1: negative, and too small to change a state.
NO_DECAY = tl.constexpr(-1.2e-38)


@triton.jit
def decayed(state, decay, update):
    """The state times the packed decay, plus the update. A weak decay's part and the update are added as one, so that
    rounding to the state's digits does not go the same way in every step."""
    return tl.where(decay < 0, state, 0.0) + (state * decay + update)


@triton.jit
def join_decays(first, second):
    """The product of packed decays, packed; as itself once it is no longer weak."""
    less = first + second + first * second
    product = tl.where(first < 0, 1 + first, first) * tl.where(second < 0, 1 + second, second)
    return tl.where((first < 0) & (second < 0) & (less > -0.5), less, product)


@triton.jit
def locate(slot, offsets, T, N, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The row of [B*T] where the chunk of a slot begins, and its tokens (at most 0 for an empty slot)."""
    if DOCUMENTS:
        n, beyond = slot * 0, slot * 0 + N
        while beyond - n > 1:  # the last document whose first slot is not after this one
            middle = (n + beyond) // 2
            later = tl.load(offsets + middle) // C + middle > slot
            beyond = tl.where(later, middle, beyond)
            n = tl.where(later, n, middle)
        begin = tl.load(offsets + n)
        row = begin + (slot - begin // C - n) * C
        left = tl.minimum(tl.load(offsets + n + 1), T) - row
        if row < 0:
            left = left * 0
    else:
        chunks = tl.cdiv(T, C)
        n = slot // chunks
        row = slot % chunks * C
        left = T - row
        row = n.to(tl.int64) * T + row
    return row.to(tl.int64), left


@triton.jit
def any_strong(strong, begin, tiles, GROUP: tl.constexpr):
    """Whether one of GROUP chunks is strong."""
    at = begin + tl.arange(0, GROUP)
    return tl.max(tl.load(strong + at, mask=at < tiles, other=0)) > 0


@triton.jit
def to_operand(x, OPERAND: tl.constexpr):
    """x in the dtype of operands. To bfloat16 two numbers at a time: one by one it takes as long as exponentials."""
    if OPERAND == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return x.to(OPERAND)


@triton.jit
def sum_tokens(choice, x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """choice [C, C] of 0, 1 and -1 @ x [C, K]: sums over tokens, to 2^-17 of the largest term for bfloat16."""
    if OPERAND == tl.bfloat16:
        high = to_operand(x, OPERAND)
        low = to_operand(x - high.to(tl.float32), OPERAND)
        return tl.dot(choice.to(tl.bfloat16), low, tl.dot(choice.to(tl.bfloat16), high))
    return tl.dot(choice.to(tl.float32), x, input_precision=PRECISION)


@triton.jit
def sum_transposed(x, choice, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x [K, C] @ choice [C, C]: as `sum_tokens`, of a transposed tile with the choices transposed."""
    if OPERAND == tl.bfloat16:
        high = to_operand(x, OPERAND)
        low = to_operand(x - high.to(tl.float32), OPERAND)
        return tl.dot(high, choice.to(tl.bfloat16), tl.dot(low, choice.to(tl.bfloat16)))
    return tl.dot(x, choice.to(tl.float32), input_precision=PRECISION)


@triton.jit
def lay_out(x, one, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """A transposed tile [K, C] in float32, laid out as the results of products.

    A product with the identity, `one`, does what no function asks for: left to itself the compiler evaluates the gate
    anew in each of the layouts in which its parts are used.
    """
    if OPERAND == tl.bfloat16:
        if x.dtype == tl.bfloat16:
            return tl.dot(x, one)
        return sum_transposed(x.to(tl.float32), one, OPERAND, PRECISION)
    return x.to(tl.float32)


@triton.jit
def choose_from_halves(r, u, level):
    """For tokens r, chooses the tokens u between r and where the halves, of 2^level tokens, of its block meet."""
    same = r >> (level + 1) == u >> (level + 1)
    after = (r >> level & 1 == 1) & (u >> level & 1 == 1) & (u <= r)
    before = (r >> level & 1 == 0) & (u >> level & 1 == 0) & (u > r)
    return tl.where(same & (after | before), 1.0, 0.0)


@triton.jit
def choose_until(r, u):
    """For tokens r, chooses the tokens u up to r."""
    return tl.where(u <= r, 1.0, 0.0)


@triton.jit
def choose_after(r, u):
    """For tokens r, chooses the tokens u after r."""
    return tl.where(u > r, 1.0, 0.0)


@triton.jit
def is_between(late, early, level):
    """Whether tokens lie in the late and the early half, of 2^level tokens, of one block."""
    return (late >> (level + 1) == early >> (level + 1)) & (late >> level & 1 == 1) & (early >> level & 1 == 0)


@triton.jit
def _approximate(instruction: tl.constexpr, x):
    """An instruction that takes one float32 number and gives another."""
    return tl.inline_asm_elementwise(instruction, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp2(x, OPERAND: tl.constexpr):
    """2^x. For bfloat16 in one instruction, which takes what is below 2^-126 for 0, as do the two below."""
    if OPERAND == tl.bfloat16:
        return _approximate("ex2.approx.ftz.f32 $0, $1;", x)
    return tl.exp2(x)


@triton.jit
def pack_decay(x, OPERAND: tl.constexpr):
    """The decay 2^x, x <= 0, as one number: a weak one less 1, which is negative, any other as it is.

    2^x - 1 is summed up to the third term of its series; the next is below 1e-8.
    """
    less = x * (0.69314718 + x * (0.24022651 + x * 0.05550411)) + NO_DECAY
    return tl.where(x > -0.03125, less, exp2(x, OPERAND))


@triton.jit
def is_weak(decay, OPERAND: tl.constexpr):
    """1 where a packed decay is weak, 0 elsewhere; for bfloat16 in one instruction."""
    if OPERAND == tl.bfloat16:
        return _approximate("set.lt.f32.f32 $0, $1, 0f00000000;", decay)
    return tl.where(decay < 0, 1.0, 0.0)


@triton.jit
def log2(x, OPERAND: tl.constexpr):
    """The logarithm to base 2."""
    if OPERAND == tl.bfloat16:
        return _approximate("lg2.approx.ftz.f32 $0, $1;", x)
    return tl.log2(x)


@triton.jit
def invert(x, OPERAND: tl.constexpr):
    """1 / x."""
    if OPERAND == tl.bfloat16:
        return _approximate("rcp.approx.ftz.f32 $0, $1;", x)
    return 1 / x


@triton.jit
def open_gate(x, lower, OPERAND: tl.constexpr):
    """u, 1 + lower u and 1 / (1 + u) with u = exp(-x): f = (1 + lower u) / (1 + u), 1 - f = (1 - lower) u / (1 + u)."""
    u = exp2(tl.minimum(-x * LOG2_E, 125.0, KEEP_NAN), OPERAND)
    return u, 1 + lower * u, invert(1 + u, OPERAND)


@triton.jit
def read_gate(
    k, gate, lower, at, mask, FORGET: tl.constexpr, MASKED: tl.constexpr, one, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """k and the log-decay of a tile, in float32; with `one` as in `lay_out`, of a transposed tile."""
    x = load_masked(gate, at, mask, MASKED)
    if not FORGET:
        x = tl.maximum(x.to(tl.float32) * LOG2_E, FLOOR, KEEP_NAN)
    if one is not None:
        x = lay_out(x, one, OPERAND, PRECISION)
    x = x.to(tl.float32)
    if FORGET:
        u, top, share = open_gate(x, lower, OPERAND)
        key = (1 - lower) * u * share
        decay = log2(top * share, OPERAND)
        if MASKED:
            key = tl.where(mask, key, 0.0)
            decay = tl.where(mask, decay, 0.0)
    else:
        key = load_masked(k, at, mask, MASKED)
        if one is not None:
            key = lay_out(key, one, OPERAND, PRECISION)
        key, decay = key.to(tl.float32), x
    return key, tl.maximum(decay, FLOOR, KEEP_NAN)


@triton.jit
def load_bound(bound, h, i, K: tl.constexpr, BOUNDED: tl.constexpr):
    """The lower bounds of channels i as a row, or 0."""
    if BOUNDED:
        return tl.load(bound + h * K + i, mask=i < K, other=0.0).to(tl.float32)[None, :]
    else:
        return 0.0


@triton.jit
def prepare_kernel(
    q, k, gate, bound, offsets, since_q, until_k, scores, decays, strong, scale, T, N, H: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, PK: tl.constexpr, B: tl.constexpr, FORGET: tl.constexpr, BOUNDED: tl.constexpr,
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
        store_masked(decays + tile * K, i, first + second, i < K, PADDED)
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
    # The result of a strong chunk so far is discarded and computed again.
    tl.store(strong + tile, (tl.min(least) < -LIMIT).to(tl.int32))
    # Packed here: in the loop each sum is in the registers of eight threads, which would all do the same work.
    tl.debug_barrier()
    i = tl.arange(0, PK)
    whole = load_masked(decays + tile * K, i, i < K, K != PK)
    store_masked(decays + tile * K, i, pack_decay(whole, OPERAND), i < K, K != PK)


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
    since, until, scores, decays, c, out, initial, final, keep, c2, initial2, keep2, sums, sum_decays, offsets, T, N, G,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr,
    BOTH: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_INITIAL2: tl.constexpr,
    HAS_FINAL: tl.constexpr, SUMMARY: tl.constexpr, SPLIT: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A sweep with c; of BOTH, that one runs from the last chunk to the first, beside one with c2 that has no `out`.

    REVERSE: a single sweep runs from the last chunk too; `since` and `until` are then exchanged by the caller.
    """
    pid = tl.program_id(0)
    if BOTH:
        half = tl.num_programs(0) // 2  # the longer sweeps first
        if pid < half:
            _sweep_states(
                pid, until, since, scores, decays, c, out, initial, final, keep, sums, sum_decays, offsets, 1, T, N, G,
                H, K, V, C, PK, BV, True, HAS_INITIAL, HAS_FINAL, not SUMMARY, not SUMMARY, SUMMARY, SPLIT, DOCUMENTS,
                EVEN, OPERAND, PRECISION, STAGES,
            )  # fmt: skip
        else:
            _sweep_states(
                pid - half, since, until, scores, decays, c2, None, initial2, None, keep2, sums, sum_decays, offsets, 0,
                T, N, G, H, K, V, C, PK, BV, False, HAS_INITIAL2, False, False, not SUMMARY, SUMMARY, SPLIT, DOCUMENTS,
                EVEN, OPERAND, PRECISION, STAGES,
            )  # fmt: skip
    else:
        _sweep_states(
            pid, since, until, scores, decays, c, out, initial, final, keep, sums, sum_decays, offsets, 0, T, N, G,
            H, K, V, C, PK, BV, REVERSE, HAS_INITIAL, HAS_FINAL, not SUMMARY, False, SUMMARY, SPLIT, DOCUMENTS,
            EVEN, OPERAND, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _sweep_states(
    pid, since, until, scores, decays, c, out, initial, final, keep, sums, sum_decays, offsets, direction, T, N, G,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, OUT: tl.constexpr, KEEP: tl.constexpr,
    SUMMARY: tl.constexpr, SPLIT: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block, _, nh, n, h, g = identify(pid, N, H, V, BV, 1)
    r, i, j = tl.arange(0, C), tl.arange(0, PK), block * BV + tl.arange(0, BV)
    row, length = span(offsets, n, T, DOCUMENTS)
    slot = row // C + n if DOCUMENTS else n.to(tl.int64) * tl.cdiv(T, C)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)

    # States are held and kept as [V, K], so that nothing of them passes through shared memory.
    state = tl.zeros([BV, PK], tl.float32)
    state_mask = (j < V)[:, None] & (i < K)[None, :]
    if HAS_INITIAL:
        straight = initial + nh.to(tl.int64) * (K * V) + i[:, None] * V + j[None, :]
        state += tl.trans(tl.load(straight, mask=(i < K)[:, None] & (j < V)[None, :], other=0.0))
    if SPLIT:
        for before in tl.range(0, g):
            part = (direction * (N * H) + nh).to(tl.int64) * G + before
            decay = tl.load(sum_decays + part * K + i, mask=i < K, other=0.0)
            summary = tl.load(sums + part * (K * V) + j[:, None] * K + i[None, :], mask=state_mask, other=0.0)
            state = decayed(state, decay[None, :], summary)

    PADDED: tl.constexpr = K != PK
    MASKED: tl.constexpr = not EVEN or V % BV != 0
    total = tl.full([PK], NO_DECAY, tl.float32)
    tile_at = r[:, None] * K + i[None, :]
    value_at = r[:, None] * (H * V) + j[None, :]
    for x in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        chunk = chunks - 1 - x if REVERSE else x
        tile = (slot + chunk) * H + h
        first = row + chunk * C
        value_mask = (chunk * C + r < length)[:, None] & (j < V)[None, :]
        tc = load_masked(c + (first * H + h) * V, value_at, value_mask, MASKED).to(OPERAND)
        tu = load_masked(until + tile * (C * K), tile_at, (i < K)[None, :], PADDED)
        decay = load_masked(decays + tile * K, i, i < K, PADDED)
        if KEEP:
            tl.store(keep + tile * (K * V) + j[:, None] * K + i[None, :], state.to(OPERAND), mask=state_mask)
        if OUT:
            ts = load_masked(since + tile * (C * K), tile_at, (i < K)[None, :], PADDED)
            pairs = tl.load(scores + tile * (C * C) + r[:, None] * C + r[None, :])
            result = tl.dot(state.to(OPERAND), tl.trans(ts), input_precision=PRECISION)
            pairs = pairs if REVERSE else tl.trans(pairs)
            result = tl.dot(tl.trans(tc), pairs, result, input_precision=PRECISION)
            store_masked(out + (first * H + h) * V, value_at, tl.trans(result), value_mask, MASKED)
        # As `decayed`; the accumulator of a product holds the change alone.
        change = tl.dot(tl.trans(tc), tu, state * decay[None, :], input_precision=PRECISION)
        state = state * is_weak(decay, OPERAND)[None, :] + change
        if SUMMARY:
            total = join_decays(total, decay)

    if SUMMARY:
        part = (direction * (N * H) + nh).to(tl.int64) * G + g
        tl.store(sums + part * (K * V) + j[:, None] * K + i[None, :], state, mask=state_mask)
        tl.store(sum_decays + part * K + i, total, mask=i < K)
    if HAS_FINAL:
        # By the program of the last chunk; for an empty document by the first.
        if ((g + 1) * per >= chunks) & ((g * per < chunks) | (g == 0)):
            to = final + nh.to(tl.int64) * (K * V) + i[None, :] * V + j[:, None]
            tl.store(to, state, mask=state_mask)


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
    q, k, gate, bound, v, do, initials, dfinals, dscores, same, strong, choices, dq, dk, dgate, dbound, offsets, scale,
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
    _chunk_gradients(
        q, k, gate, bound, v, do, initials, dfinals, dscores, same, choices, dq, dk, dgate, dbound, scale, row, left, h,
        tile, first, H, K, V, C, BK, BV, FORGET, BOUNDED, EVEN, OPERAND, PRECISION, STAGES, False,
    )  # fmt: skip


@triton.jit
def gradients_strong_kernel(
    q, k, gate, bound, v, do, initials, dfinals, dscores, same, strong, choices, dq, dk, dgate, dbound, offsets, scale,
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
                    _chunk_gradients(
                        q, k, gate, bound, v, do, initials, dfinals, dscores, same, choices, dq, dk, dgate, dbound,
                        scale, row, left, h, tile.to(tl.int64), start, H, K, V, C, B, BV, FORGET, BOUNDED, EVEN,
                        OPERAND, PRECISION, 1, True,
                    )  # fmt: skip


@triton.jit
def _chunk_gradients(
    q, k, gate, bound, v, do, initials, dfinals, dscores, same, choices, dq, dk, dgate, dbound, scale, row, left, h,
    tile, start, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
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
    initials += tile * (K * V)
    dfinals += tile * (K * V)
    dscores += tile * (C * C)
    r, i = tl.arange(0, C), start + tl.arange(0, BK)
    from_initial = tl.zeros([BK, C], tl.float32)
    to_final = tl.zeros([BK, C], tl.float32)
    through = tl.zeros([BK], tl.float32)
    for block in tl.range(0, V, BV, num_stages=STAGES):
        j = block + tl.arange(0, BV)
        value_mask = (r < left)[:, None] & (j < V)[None, :]
        value_at = r[:, None] * (H * V) + j[None, :]
        tv = load_masked(v, value_at, value_mask, not EVEN or V % BV != 0).to(OPERAND)
        tdo = load_masked(do, value_at, value_mask, not EVEN or V % BV != 0).to(OPERAND)
        state_mask = (j < V)[:, None] & (i < K)[None, :]
        tinitial = load_masked(initials, j[:, None] * K + i[None, :], state_mask, V % BV != 0 or K % BK != 0)
        tdfinal = load_masked(dfinals, j[:, None] * K + i[None, :], state_mask, V % BV != 0 or K % BK != 0)
        from_initial = tl.dot(tl.trans(tinitial), tl.trans(tdo), from_initial, input_precision=PRECISION)
        to_final = tl.dot(tl.trans(tdfinal), tl.trans(tv), to_final, input_precision=PRECISION)
        through += tl.sum(tinitial.to(tl.float32) * tdfinal.to(tl.float32), 0)

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
        from_initial *= exp2(sum_transposed(decay, tl.load(choices + C * C), OPERAND, PRECISION), OPERAND)
        to_final *= exp2(sum_transposed(decay, choose_after(columns, rows), OPERAND, PRECISION), OPERAND)
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
        from_initial *= ahead * exp2(first, OPERAND)[:, None]
        to_final *= behind * exp2(second, OPERAND)[:, None]

    # The gradient of a decay sums what passes through its step t: pairs in the chunk, queries from t on with the
    # initial state, keys before t with the final state, and the initial state with the final state.
    ddecay = sum_transposed(inside + tq * from_initial, tl.load(choices + 2 * C * C), OPERAND, PRECISION)
    ddecay += sum_transposed(tk * to_final, tl.load(choices + 3 * C * C), OPERAND, PRECISION)
    ddecay += through[:, None]
    own = tl.load(same + tile * C + r)[None, :]
    gq = (gq + from_initial + own * tk) * scale
    gk += to_final + own * tq
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
