"""The Triton kernels of scalar decay; `linnet.ops.ssd.triton` says how they work together."""

import triton
import triton.language as tl

from linnet.ops.device import KEEP_NAN, LOG2_E, identify, load_tile, span
from linnet.ops.gated.kernels import locate

# Of a log-decay in base 2: 2^LEAST is 0 in float32. Multiples of 1 / GRAIN sum up exactly over a chunk.
LEAST = tl.constexpr(-150.0)
GRAIN = tl.constexpr(256.0)


@triton.jit
def decays_kernel(g, times, skip, decays, offsets, T, N, HV: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
                  HEADS: tl.constexpr, SKIP: tl.constexpr, HAS_TIMES: tl.constexpr,
                  DOCUMENTS: tl.constexpr):  # fmt: skip
    """What the others read of the tokens of a chunk, [chunks, HV, 8, C]: the sums of log-decays up to each in base 2,
    as an exact part and a small rest, the decay from the chunk's start over each, that from there to its end, and, if
    given, the factors `times` and `skip`. A program has HEADS heads of a chunk; a token behind the end decays nothing.

    The difference of two sums loses nothing, however strong the decays between them and the chunk's start.
    """
    chunk = tl.program_id(0)
    row, length = locate(chunk // R, offsets, T, N, R * C, DOCUMENTS)
    left = length - chunk % R * C
    if left > 0:
        r, h = tl.arange(0, C), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        mask, known = (r < left)[:, None] & (h < HV)[None, :], (h < HV)[:, None]
        at = (row + chunk % R * C) * HV + r[:, None] * HV + h[None, :]
        x = tl.load(g + at, mask=mask, other=0.0).to(tl.float32) * LOG2_E
        x = tl.maximum(x, LEAST, KEEP_NAN)
        exact = tl.trans(tl.floor(x * GRAIN + 0.5) / GRAIN)
        rest = tl.trans(x) - exact
        coarse, fine = tl.cumsum(exact, 1), tl.cumsum(rest, 1)
        until = tl.exp2((tl.sum(exact, 1)[:, None] - coarse) + (tl.sum(rest, 1)[:, None] - fine))
        to = decays + (chunk.to(tl.int64) * HV + h[:, None]) * (8 * C) + r[None, :]
        tl.store(to, coarse, mask=known)
        tl.store(to + C, fine, mask=known)
        tl.store(to + 2 * C, tl.exp2(coarse + fine), mask=known)
        tl.store(to + 3 * C, until, mask=known)
        if HAS_TIMES:
            tl.store(to + 4 * C, tl.trans(tl.load(times + at, mask=mask, other=0.0).to(tl.float32)), mask=known)
        if SKIP >= 0:
            at = (row + chunk % R * C) * SKIP + r[:, None] * SKIP + h[None, :]
            tl.store(to + 5 * C, tl.trans(tl.load(skip + at, mask=mask, other=0.0).to(tl.float32)), mask=known)


@triton.jit
def load_decays(decays, chunk, h, r, HV: tl.constexpr, C: tl.constexpr):
    """What `decays_kernel` has of the tokens r of a chunk, and the sum over the chunk."""
    at = decays + (chunk.to(tl.int64) * HV + h) * (8 * C)
    coarse, fine, since, until = tl.load(at + r), tl.load(at + C + r), tl.load(at + 2 * C + r), tl.load(at + 3 * C + r)
    return coarse, fine, since, until, tl.load(at + C - 1) + tl.load(at + 2 * C - 1)


@triton.jit
def passing_kernel(parts, through, decays, dg, dtimes, dskip, offsets, T, N, CHUNKS, HV: tl.constexpr, C: tl.constexpr,
                   R: tl.constexpr, HEADS: tl.constexpr, LATER: tl.constexpr, BEFORE: tl.constexpr,
                   THROUGH: tl.constexpr, HAS_TIMES: tl.constexpr, HAS_SKIP: tl.constexpr,
                   DOCUMENTS: tl.constexpr):  # fmt: skip
    """The gradient of log-decays, of LATER + BEFORE parts [chunks, HV, C] by token and `through` [chunks, HV, THROUGH].
    A decay passes what later tokens and pairs around it have (in LATER parts) and what earlier keys have (in BEFORE);
    the state before the chunk goes `through` all of them. After these, two parts each of the gradients of `times` and
    `skip`, if they have any [B * T, HV]."""
    chunk = tl.program_id(0)
    row, length = locate(chunk // R, offsets, T, N, R * C, DOCUMENTS)
    left = length - chunk % R * C
    if left > 0:
        r, h = tl.arange(0, C), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        number, known = chunk.to(tl.int64) * HV + h, h < HV
        at = parts + number[:, None] * C + r[None, :]
        hop = (chunk.to(tl.int64) * 0 + CHUNKS) * (HV * C)  # an integer of 1 is a constant, which has no dtype
        inside = known[:, None] & (r < left)[None, :]
        later, before = tl.zeros([HEADS, C], tl.float32), tl.zeros([HEADS, C], tl.float32)
        for part in tl.static_range(LATER):
            later += tl.load(at + part * hop, mask=inside, other=0.0)
        for part in tl.static_range(LATER, LATER + BEFORE):
            before += tl.load(at + part * hop, mask=inside, other=0.0)
        at_through = through + number[:, None] * THROUGH + tl.arange(0, THROUGH)[None, :]
        whole = tl.sum(tl.load(at_through, mask=known[:, None], other=0.0), 1)
        whole *= tl.load(decays + number * (8 * C) + (3 * C - 1), mask=known, other=0.0)
        x = tl.cumsum(later, 1, reverse=True) + (tl.cumsum(before, 1) - before) + whole[:, None]
        to, mask = (row + chunk % R * C) * HV + r[:, None] * HV + h[None, :], (r < left)[:, None] & known[None, :]
        tl.store(dg + to, tl.trans(x).to(dg.dtype.element_ty), mask=mask)
        if HAS_TIMES:
            store_both(at + (LATER + BEFORE) * hop, hop, inside, dtimes + to, mask)
        if HAS_SKIP:
            store_both(at + (LATER + BEFORE + 2) * hop, hop, inside, dskip + to, mask)


@triton.jit
def store_both(at, hop, inside, to, mask):
    """The sum of two parts [heads, tokens], as [tokens, heads]."""
    x = tl.load(at, mask=inside, other=0.0) + tl.load(at + hop, mask=inside, other=0.0)
    tl.store(to, tl.trans(x), mask=mask)


@triton.jit
def load_factors(decays, chunk, h, r, HV: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr, HAS: tl.constexpr):
    """Factors [C] of the tokens of a chunk, `times` in row 4 and `skip` in row 5 of `decays_kernel`; 1 without them."""
    if HAS:
        x = tl.load(decays + (chunk.to(tl.int64) * HV + h) * (8 * C) + ROW * C + r)
    else:
        x = tl.full(r.shape, 1.0, tl.float32)
    return x


@triton.jit
def weigh_kernel(x, times, y, ROWS, V: tl.constexpr, R: tl.constexpr, PV: tl.constexpr):
    """y = x [ROWS, V] times the factors of its rows."""
    rows, j = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, PV)
    at, inside = rows[:, None] * V + j[None, :], (rows < ROWS)[:, None] & (j < V)[None, :]
    factors = tl.load(times + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
    y_tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factors[:, None]
    tl.store(y + at, y_tile.to(y.dtype.element_ty), mask=inside)


@triton.jit
def factors_kernel(
    x, times, skip, do, dx, dtimes, dskip, ROWS, HV: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PV: tl.constexpr,
    SKIP: tl.constexpr, HAS_TIMES: tl.constexpr,
):  # fmt: skip
    """The gradients of times and skip, by row of x [ROWS, V]; dx, of x times times, becomes that of x."""
    rows, j = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, PV)
    at, inside = rows[:, None] * V + j[None, :], (rows < ROWS)[:, None] & (j < V)[None, :]
    tx = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tdx = tl.load(dx + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_TIMES:
        tl.store(dtimes + rows, tl.sum(tdx * tx, 1), mask=rows < ROWS)
        tdx *= tl.load(times + rows, mask=rows < ROWS, other=0.0).to(tl.float32)[:, None]
    if SKIP >= 0:
        tdo = tl.load(do + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dskip + rows, tl.sum(tdo * tx, 1), mask=rows < ROWS)
        # Rows are heads of tokens; the stride of a skip is HV, or 0 where all tokens share it.
        place = rows // HV * SKIP + rows % HV
        tdx += tdo * tl.load(skip + place, mask=rows < ROWS, other=0.0).to(tl.float32)[:, None]
    tl.store(dx + at, tdx.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def decays_between(coarse, fine, r):
    """[C, C]: the decay from a key (columns) to a query (rows), 0 for later keys."""
    apart = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.exp2(tl.where(r[:, None] >= r[None, :], apart, LEAST))


@triton.jit
def less_one(x):
    """2^x - 1 for x <= 0, to the last bit where it is small: float32 has no decay between 1 and 1 - 6e-8."""
    y = x * 0.6931471805599453
    series = y * (1.0 + y * (0.5 + y * (1.0 / 6 + y * (1.0 / 24))))
    return tl.where(y > -0.05, series, tl.exp2(x) - 1.0)


@triton.jit
def move(state, a, c, factors, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The state [K, V] after a chunk of keys a and values c times `factors`; or its gradient before one of queries a
    and c = do. `total` is the chunk's log-decay in base 2.

    What a chunk changes is added in one piece, so that weak decays do not round a state in one direction.
    """
    c = (c * factors[:, None]).to(OPERAND)
    return state + tl.dot(tl.trans(a), c, state * less_one(total), input_precision=PRECISION)


@triton.jit
def enter(state, initial, sums, totals, nh, s, i, j, K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr,
          HAS_INITIAL: tl.constexpr, SEGMENTS: tl.constexpr):  # fmt: skip
    """The state [K, V] that enters segment s: what the segments before it leave (REVERSE: those after it)."""
    at, mask = i[:, None] * V + j[None, :], (i < K)[:, None] & (j < V)[None, :]
    if HAS_INITIAL:
        state = tl.load(initial + nh.to(tl.int64) * (K * V) + at, mask=mask, other=0.0)
    if SEGMENTS > 1:
        for step in tl.range(0, SEGMENTS - 1 - s if REVERSE else s):
            before = SEGMENTS - 1 - step if REVERSE else step
            slot = nh.to(tl.int64) * SEGMENTS + before
            state = state * tl.exp2(tl.load(totals + slot)) + tl.load(sums + slot * (K * V) + at, mask=mask, other=0.0)
    return state


@triton.jit
def first_chunk(row, n, T, C: tl.constexpr, R: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The number of the first chunk of a sequence or document, which begins a block of R."""
    slot = row // (R * C) + n if DOCUMENTS else n.to(tl.int64) * tl.cdiv(T, R * C)
    return slot * R


@triton.jit
def forward_kernel(
    q, k, v, decays, o, initial, final, sums, totals, offsets, scale, T, N, SEGMENTS: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    PK: tl.constexpr, BV: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_TIMES: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o and the final state: a program has BV columns of one value head, in one segment of a sequence.

    `times` and `skip` act on products of tokens and on other factors: a tile of values that was multiplied would no
    longer go from shared memory to the tensor cores as it came.
    """
    block, _, nh, n, h, s = identify(tl.program_id(0), N, HV, V, BV, 1)
    row, length = span(offsets, n, T, DOCUMENTS)
    r, i, j = tl.arange(0, C), tl.arange(0, PK), block * BV + tl.arange(0, BV)
    q += (row * H + h // (HV // H)) * K
    k += (row * H + h // (HV // H)) * K
    v += (row * HV + h) * V
    o += (row * HV + h) * V
    slot = first_chunk(row, n, T, C, R, DOCUMENTS)
    keys = r[:, None] * (H * K) + i[None, :]
    values = r[:, None] * (HV * V) + j[None, :]
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, SEGMENTS)
    hop = row * 0 + C
    state = tl.zeros([PK, BV], tl.float32)
    state = enter(state, initial, sums, totals, nh, s, i, j, K, V, False, HAS_INITIAL, SEGMENTS)
    for x in tl.range(s * per, tl.minimum((s + 1) * per, chunks), num_stages=STAGES):
        left = length - x * C
        tq = load_tile(q + x * hop * (H * K), keys, r, i, left, 0.0, K, PK != K, EVEN).to(OPERAND)
        tk = load_tile(k + x * hop * (H * K), keys, r, i, left, 0.0, K, PK != K, EVEN).to(OPERAND)
        tv = load_tile(v + x * hop * (HV * V), values, r, j, left, 0.0, V, V % BV != 0, EVEN)
        weights = load_factors(decays, slot + x, h, r, HV, C, 4, HAS_TIMES)
        coarse, fine, since, until, total = load_decays(decays, slot + x, h, r, HV, C)
        scores = tl.dot(tq, tl.trans(tk), input_precision=PRECISION) * decays_between(coarse, fine, r)
        scores *= (weights * scale)[None, :]
        if HAS_SKIP:
            skips = load_factors(decays, slot + x, h, r, HV, C, 5, True)
            scores += tl.where(r[:, None] == r[None, :], skips[:, None], 0.0)
        out = tl.dot(tq, state.to(OPERAND), input_precision=PRECISION) * (since * scale)[:, None]
        out = tl.dot(scores.to(OPERAND), tv.to(OPERAND), out, input_precision=PRECISION)
        state = move(state, tk, tv, until * weights, total, OPERAND, PRECISION)
        mask = (r < left)[:, None] & (j < V)[None, :]
        tl.store(o + x * hop * (HV * V) + values, out.to(o.dtype.element_ty), mask=mask)
    if HAS_FINAL:
        # By the program of the last chunk; for an empty document by the first.
        if ((s + 1) * per >= chunks) & ((s * per < chunks) | (s == 0)):
            mask = (i < K)[:, None] & (j < V)[None, :]
            tl.store(final + nh.to(tl.int64) * (K * V) + i[:, None] * V + j[None, :], state, mask=mask)


@triton.jit
def states_kernel(
    a, c, decays, initial, final, stored, sums, totals, offsets, scale, T, N, SEGMENTS: tl.constexpr, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, REVERSE: tl.constexpr, LOCAL: tl.constexpr, HAS_TIMES: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The states that enter blocks of R chunks of keys a and values c, and the final one; REVERSE: the gradients of
    those that leave them, of queries a and c = do. LOCAL: the state of each segment from zero and its log-decay alone.

    A program has BK x BV numbers of the state of one value head, in one segment of a sequence.
    """
    COLUMNS: tl.constexpr = (V + BV - 1) // BV
    block, _, nh, n, h, s = identify(tl.program_id(0), N, HV, COLUMNS * ((K + BK - 1) // BK), 1, 1)
    row, length = span(offsets, n, T, DOCUMENTS)
    slot = first_chunk(row, n, T, C, R, DOCUMENTS)
    r = tl.arange(0, C)
    i, j = block // COLUMNS * BK + tl.arange(0, BK), block % COLUMNS * BV + tl.arange(0, BV)
    at, mask = i[:, None] * V + j[None, :], (i < K)[:, None] & (j < V)[None, :]
    a += (row * H + h // (HV // H)) * K
    c += (row * HV + h) * V
    keys = r[:, None] * (H * K) + i[None, :]
    values = r[:, None] * (HV * V) + j[None, :]
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, SEGMENTS)
    hop = row * 0 + C
    first, end = s * per, tl.minimum((s + 1) * per, chunks)
    state, total = tl.zeros([BK, BV], tl.float32), tl.zeros([1], tl.float32)
    if not LOCAL:
        state = enter(state, initial, sums, totals, nh, s, i, j, K, V, REVERSE, HAS_INITIAL, SEGMENTS)
    for y in tl.range(first, end, num_stages=STAGES):
        x = first + end - 1 - y if REVERSE else y
        if not LOCAL:
            edge = (x % R == R - 1) | (x == chunks - 1) if REVERSE else x % R == 0
            to = stored + ((slot + x) // R * HV + h) * (K * V) + at
            tl.store(to, state.to(stored.dtype.element_ty), mask=mask & edge)
        left = length - x * C
        ta = load_tile(a + x * hop * (H * K), keys, r, i, left, 0.0, K, K % BK != 0, EVEN).to(OPERAND)
        tc = load_tile(c + x * hop * (HV * V), values, r, j, left, 0.0, V, V % BV != 0, EVEN)
        coarse, fine, since, until, change = load_decays(decays, slot + x, h, r, HV, C)
        factors = since * scale if REVERSE else until * load_factors(decays, slot + x, h, r, HV, C, 4, HAS_TIMES)
        state = move(state, ta, tc, factors, change, OPERAND, PRECISION)
        total += change
    if LOCAL:
        to = nh.to(tl.int64) * SEGMENTS + s
        tl.store(sums + to * (K * V) + at, state, mask=mask)
        if block == 0:
            tl.store(totals + to + tl.arange(0, 1), total)
    if HAS_FINAL:
        last = s == 0 if REVERSE else ((s + 1) * per >= chunks) & ((s * per < chunks) | (s == 0))
        if last:
            tl.store(final + nh.to(tl.int64) * (K * V) + at, state, mask=mask)


@triton.jit
def edge(stored, slot, h, a, c, decays, row, length, sub, chunks, scale, H: tl.constexpr, HV: tl.constexpr,
         K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr,
         REVERSE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state [K, V] that enters chunk `sub` of a block, from the one that enters the block; REVERSE: the gradient of
    the state that leaves the chunk, from that of the one that leaves the block."""
    i, j, r = tl.arange(0, PK), tl.arange(0, PV), tl.arange(0, C)
    at, inside = i[:, None] * V + j[None, :], (i < K)[:, None] & (j < V)[None, :]
    state = tl.load(stored + (slot.to(tl.int64) * HV + h) * (K * V) + at, mask=inside, other=0.0)
    if R > 1:
        state = state.to(tl.float32)
        for step in tl.range(0, chunks - 1 - sub if REVERSE else sub):
            x = chunks - 1 - step if REVERSE else step
            left = length - x * C
            first = row + x * C
            keys = r[:, None] * (H * K) + i[None, :]
            values = r[:, None] * (HV * V) + j[None, :]
            ta = load_tile(a + (first * H + h // (HV // H)) * K, keys, r, i, left, 0.0, K, PK != K, False).to(OPERAND)
            tc = load_tile(c + (first * HV + h) * V, values, r, j, left, 0.0, V, PV != V, False)
            coarse, fine, since, until, change = load_decays(decays, slot * R + x, h, r, HV, C)
            state = move(state, ta, tc, since * scale if REVERSE else until, change, OPERAND, PRECISION)
    return state.to(OPERAND)


@triton.jit
def gradients_kernel(
    q, k, v, decays, do, entering, leaving, dq, dk, dv, parts, through, offsets, scale, T, N, ROWS, CHUNKS,
    SLICES: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, DOCUMENTS: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, or dk and dv, and their parts of the gradient of log-decays of one chunk (`passing_kernel`): a program has
    one of the two, one key and a slice of its value heads. dq and dk are [SLICES, ROWS, H, K].

    The two programs of a chunk run side by side, so that what both read comes from the cache.
    """
    pid = tl.program_id(0)
    of_keys, key, part = pid % 2, (pid // 2) % H, (pid // (2 * H)) % SLICES
    sub, slot = (pid // (2 * H * SLICES)) % R, pid // (2 * H * SLICES * R)
    row, length = locate(slot, offsets, T, N, R * C, DOCUMENTS)
    left = length - sub * C
    if left > 0:
        GROUP: tl.constexpr = HV // H // SLICES
        r, i, j = tl.arange(0, C), tl.arange(0, PK), tl.arange(0, PV)
        keys = r[:, None] * (H * K) + i[None, :]
        values = r[:, None] * (HV * V) + j[None, :]
        key_mask = (r < left)[:, None] & (i < K)[None, :]
        value_mask = (r < left)[:, None] & (j < V)[None, :]
        chunks = tl.minimum(tl.cdiv(length, C), R)
        first = row + sub * C
        at_key, head = (first * H + key) * K + keys, (key * SLICES + part) * GROUP
        tq = tl.load(q + at_key, mask=key_mask, other=0.0).to(OPERAND)
        tk = tl.load(k + at_key, mask=key_mask, other=0.0).to(OPERAND)
        pairs, total = tl.zeros([C, C], tl.float32), tl.zeros([C, PK], tl.float32)
        to = part.to(tl.int64) * ROWS * (H * K) + at_key
        chunk = slot * R + sub
        at_part, hop = parts + chunk.to(tl.int64) * (HV * C) + r, (chunk.to(tl.int64) * 0 + CHUNKS) * (HV * C)
        if of_keys > 0:
            # Scores are [keys, queries], as the product that gives dv takes them from registers.
            raw = tl.dot(tk, tl.trans(tq), input_precision=PRECISION) * scale
            for h in tl.range(head, head + GROUP):
                at_value = (first * HV + h) * V + values
                tv = tl.load(v + at_value, mask=value_mask, other=0.0)
                tdo = tl.load(do + at_value, mask=value_mask, other=0.0).to(OPERAND)
                coarse, fine, since, until, change = load_decays(decays, chunk, h, r, HV, C)
                between = tl.trans(decays_between(coarse, fine, r))
                dscores = tl.dot(tv.to(OPERAND), tl.trans(tdo), input_precision=PRECISION) * between
                pairs += dscores
                passing = tl.where(r[:, None] < r[None, :], dscores * raw, 0.0)
                passing = tl.sum(passing, 0) - tl.sum(passing, 1)
                tdv = tl.dot((raw * between).to(OPERAND), tdo, input_precision=PRECISION)
                D = edge(leaving, slot, h, q, do, decays, row, length, sub, chunks, scale, H, HV, K, V, C, R, PK, PV,
                         True, OPERAND, PRECISION)  # fmt: skip
                of_state = tl.dot(tk, D, input_precision=PRECISION) * until[:, None]
                tl.store(at_part + hop + h * C, passing)
                tl.store(at_part + 2 * hop + h * C, tl.sum(of_state * tv, 1))
                tl.store(dv + at_value, (tdv + of_state).to(dv.dtype.element_ty), mask=value_mask)
                early = (tv * until[:, None]).to(OPERAND)
                total = tl.dot(early, tl.trans(D), total, input_precision=PRECISION)
            total = tl.dot((pairs * scale).to(OPERAND), tq, total, input_precision=PRECISION)
            tl.store(dk + to, total.to(dk.dtype.element_ty), mask=key_mask)
        else:
            known = tl.zeros([C], tl.float32)
            for h in tl.range(head, head + GROUP):
                at_value = (first * HV + h) * V + values
                tv = tl.load(v + at_value, mask=value_mask, other=0.0).to(OPERAND)
                tdo = tl.load(do + at_value, mask=value_mask, other=0.0)
                coarse, fine, since, until, change = load_decays(decays, chunk, h, r, HV, C)
                dscores = tl.dot(tdo.to(OPERAND), tl.trans(tv), input_precision=PRECISION)
                pairs += dscores * decays_between(coarse, fine, r)
                S = edge(entering, slot, h, k, v, decays, row, length, sub, chunks, scale, H, HV, K, V, C, R, PK, PV,
                         False, OPERAND, PRECISION)  # fmt: skip
                D = edge(leaving, slot, h, q, do, decays, row, length, sub, chunks, scale, H, HV, K, V, C, R, PK, PV,
                         True, OPERAND, PRECISION)  # fmt: skip
                tl.store(through + chunk * HV + h, tl.sum(tl.sum(S.to(tl.float32) * D.to(tl.float32), 1), 0))
                late = (tdo * (since * scale)[:, None]).to(OPERAND)
                total = tl.dot(late, tl.trans(S), total, input_precision=PRECISION)
                with_q = tl.sum(total * tq, 1)
                tl.store(at_part + h * C, with_q - known)
                known = with_q
            total = tl.dot((pairs * scale).to(OPERAND), tk, total, input_precision=PRECISION)
            tl.store(dq + to, total.to(dq.dtype.element_ty), mask=key_mask)
