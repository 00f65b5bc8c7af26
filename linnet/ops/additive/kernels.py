"""The Triton kernels of causal additive decay attention; `linnet.ops.additive.triton` says what they compute.

Every kernel walks chunks of C tokens. In a chunk the running softmax is a product of something of t and something of s,

    exp(u_s - z_t) = key_s / mass_t,   key_s = exp(u_s - r),   mass_t = exp(z_t - r) = mass before + sum_{s <= t} key_s

with one reference r a channel, the largest logit so far. All are scaled by 2^SHIFT, and masses bounded by TINY, so that
a channel may grow by e^97 inside a chunk before a weight is lost, and nothing becomes infinite if it grows by more.
States are relative to r as well.

`edges_kernel` finds references and masses first, in a pass over k alone: they would be two reductions over tokens in
every chunk of every sweep. `edges` [rows, H, 2, K] holds r and the mass before of each chunk, then of a segment's end.

K and V are the widths, PK and PV these padded to powers of two, BC the columns of a program.
"""

import triton
import triton.language as tl

from linnet.ops.device import cosine_sine

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SHIFT = tl.constexpr(60.0)
ONE = tl.constexpr(2.0**60)  # 2^SHIFT
TINY = tl.constexpr(2.0**-80)
NOTHING = tl.constexpr(-1e30)  # the reference before the first token


@triton.jit
def span(offsets, n, T, DOCUMENTS: tl.constexpr):
    """First row of [B*T] and length of a sequence or document."""
    if DOCUMENTS:
        begin = tl.minimum(tl.maximum(tl.load(offsets + n), 0), T).to(tl.int64)
        end = tl.maximum(tl.minimum(tl.load(offsets + n + 1), T), begin).to(tl.int64)
    else:
        begin = n.to(tl.int64) * T
        end = begin + T
    return begin, (end - begin).to(tl.int32)


@triton.jit
def load_tile(pointer, offsets, rows, columns, left, other, WIDTH: tl.constexpr, PADDED: tl.constexpr,
              EVEN: tl.constexpr):  # fmt: skip
    if EVEN:
        if PADDED:
            tile = tl.load(pointer + offsets, mask=(columns < WIDTH)[None, :], other=other)
        else:
            tile = tl.load(pointer + offsets)
    else:
        if PADDED:
            tile = tl.load(pointer + offsets, mask=(rows < left)[:, None] & (columns < WIDTH)[None, :], other=other)
        else:
            tile = tl.load(pointer + offsets, mask=(rows < left)[:, None], other=other)
    return tile


@triton.jit
def start(z, mask):
    """Reference and mass of a state normalised by exp(-z)."""
    z = tl.load(z, mask=mask, other=-float("inf"))
    return tl.maximum(z, NOTHING), tl.where(z > NOTHING, ONE, 0.0)


@triton.jit
def weigh(z, reference, mass, mask):
    """(reference, mass) with a summary of log-sum z beside it: the new ones, and the factors of the two states."""
    z = tl.load(z, mask=mask, other=-float("inf"))
    top = tl.maximum(reference, z)
    keep = tl.exp2((reference - top) * LOG2_E)
    take = tl.exp2((z - top) * LOG2_E + SHIFT)
    return top, mass * keep + take, keep, take


@triton.jit
def invert(mass):
    """1 / mass in the range of float32, 0 for none."""
    return tl.where(mass > 0, 1.0 / tl.where(mass > 0, mass, 1.0), 0.0)


@triton.jit
def invert_tile(mass, EXACT: tl.constexpr):
    mass = tl.maximum(mass, TINY)
    if EXACT:
        return 1.0 / mass
    root = tl.rsqrt(mass)
    return root * root


@triton.jit
def log_sum(reference, mass):
    return tl.where(mass > 0, reference + (tl.log2(tl.where(mass > 0, mass, 1.0)) - SHIFT) * LN_2, -float("inf"))


@triton.jit
def segment_ratio(edge, first, last, H: tl.constexpr, K: tl.constexpr, mask):
    """exp(z before - z after) of a segment, from its first and last row of edges."""
    r0, m0 = (
        tl.load(edge + first * (2 * H * K), mask=mask, other=0.0),
        tl.load(edge + first * (2 * H * K) + K, mask=mask, other=0.0),
    )
    r1, m1 = (
        tl.load(edge + last * (2 * H * K), mask=mask, other=0.0),
        tl.load(edge + last * (2 * H * K) + K, mask=mask, other=0.0),
    )
    return m0 * invert(m1) * tl.exp2((r0 - r1) * LOG2_E)


@triton.jit
def edges_kernel(
    k, edges, ends, entry_z, offsets, T, N, G, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    HAS_ENTRY: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes `edges`: of the whole sequence, or (SPLIT) of each segment from zero, with its log-sum in `ends`."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (K + BC - 1) // BC
    block = pid % BLOCKS
    nh = (pid // BLOCKS) % (N * H)
    g = pid // (BLOCKS * N * H)
    n, h = nh // H, nh % H
    begin, length = span(offsets, n, T, DOCUMENTS)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    first, last = tl.minimum(g * per, chunks), tl.minimum((g + 1) * per, chunks)
    t, i = tl.arange(0, C), block * BC + tl.arange(0, BC)
    k += (begin * H + h) * K
    keys = t[:, None] * (H * K) + i[None, :]
    edge = edges + ((begin // C + n * (1 + G) + g) * (2 * H) + 2 * h) * K + i
    reference = tl.full([BC], NOTHING, tl.float32)
    mass = tl.zeros([BC], tl.float32)
    if HAS_ENTRY and not SPLIT:
        reference, mass = start(entry_z + nh.to(tl.int64) * K + i, i < K)
    for chunk in tl.range(first, last, num_stages=STAGES):
        move = begin * 0 + chunk * C * H
        tk = load_tile(k + move * K, keys, t, i, length - chunk * C, -float("inf"), K, K % BC != 0, EVEN).to(tl.float32)
        top = tl.maximum(reference, tl.max(tk, 0))
        mass *= tl.exp2((reference - top) * LOG2_E)
        tl.store(edge + chunk * (2 * H * K), top, mask=i < K)
        tl.store(edge + chunk * (2 * H * K) + K, mass, mask=i < K)
        mass += tl.sum(tl.exp2((tk - top[None, :]) * LOG2_E + SHIFT), 0)
        reference = top
    tl.store(edge + last * (2 * H * K), reference, mask=i < K)
    tl.store(edge + last * (2 * H * K) + K, mass, mask=i < K)
    if SPLIT:
        tl.store(ends + (nh.to(tl.int64) * G + g) * K + i, log_sum(reference, mass), mask=i < K)


@triton.jit
def link_kernel(
    edges, ends, entry_z, offsets, T, N, G, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PK: tl.constexpr,
    R: tl.constexpr, HAS_ENTRY: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Adds what comes before a segment to its `edges`."""
    nh = tl.program_id(0) % (N * H)
    g = tl.program_id(0) // (N * H)
    n, h = nh // H, nh % H
    begin, length = span(offsets, n, T, DOCUMENTS)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    first, last = tl.minimum(g * per, chunks), tl.minimum((g + 1) * per, chunks)
    i = tl.arange(0, PK)
    reference = tl.full([PK], NOTHING, tl.float32)
    mass = tl.zeros([PK], tl.float32)
    if HAS_ENTRY:
        reference, mass = start(entry_z + nh.to(tl.int64) * K + i, i < K)
    for before in tl.range(0, g):
        reference, mass, _, _ = weigh(ends + (nh.to(tl.int64) * G + before) * K + i, reference, mass, i < K)
    edge = edges + ((begin // C + n * (1 + G) + g) * (2 * H) + 2 * h) * K + i[None, :]
    for row in tl.range(first, last + 1, R):
        rows = row + tl.arange(0, R)
        mask = (rows <= last)[:, None] & (i < K)[None, :]
        at = edge + rows[:, None] * (2 * H * K)
        old, old_mass = tl.load(at, mask=mask, other=0.0), tl.load(at + K, mask=mask, other=0.0)
        top = tl.maximum(old, reference[None, :])
        mixed = old_mass * tl.exp2((old - top) * LOG2_E) + mass[None, :] * tl.exp2((reference[None, :] - top) * LOG2_E)
        tl.store(at, top, mask=mask)
        tl.store(at + K, mixed, mask=mask)


@triton.jit
def values_kernel(
    q, k, c, o, dq, entry, entry_z, leave, leave_z, sums, sums_z, edges, theta, positions, offsets,
    scale, T, N, G, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr,
    BC: tl.constexpr, REVERSE: tl.constexpr, SUMMARY: tl.constexpr, TURN: tl.constexpr, PLACED: tl.constexpr,
    HAS_ENTRY: tl.constexpr, HAS_LEAVE: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """o from c = v, or (REVERSE) dv from c = do. A program has BC columns of V of one head.

    SUMMARY: only the state of a segment from zero, for what follows in the order of the sweep.
    """
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + BC - 1) // BC
    block = pid % BLOCKS
    nh = (pid // BLOCKS) % (N * H)
    g = pid // (BLOCKS * N * H)
    if SUMMARY and REVERSE:
        g += 1  # nothing comes before the first segment
    n, h = nh // H, nh % H
    begin, length = span(offsets, n, T, DOCUMENTS)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    first, last = tl.minimum(g * per, chunks), tl.minimum((g + 1) * per, chunks)

    t, i, j = tl.arange(0, C), tl.arange(0, PK), block * BC + tl.arange(0, BC)
    wide, narrow = i < K, j < V
    ROWS: tl.constexpr = 2 * K if TURN else K
    q += (begin * H + h) * K
    k += (begin * H + h) * K
    dq += (begin * H + h) * K
    c += (begin * H + h) * V
    o += (begin * H + h) * V
    keys = t[:, None] * (H * K) + i[None, :]
    values = t[:, None] * (H * V) + j[None, :]
    straight = i[:, None] * V + j[None, :]  # a state in memory
    both = wide[:, None] & narrow[None, :]
    entry += nh.to(tl.int64) * (ROWS * V)
    sums += nh.to(tl.int64) * (G * ROWS * V)
    edge = edges + ((begin // C + n * (1 + G)) * (2 * H) + 2 * h) * K + i
    if TURN:
        frequency = tl.load(theta + h * K + i, mask=wide, other=0.0)[None, :]

    state = tl.zeros([BC, PK], tl.float32)
    if TURN:
        state2 = tl.zeros([BC, PK], tl.float32)
    reference = tl.full([PK], NOTHING, tl.float32)
    mass = tl.zeros([PK], tl.float32)
    falls = tl.zeros([PK], tl.float32)
    if not SUMMARY:
        if HAS_ENTRY:
            state += tl.trans(tl.load(entry + straight, mask=both, other=0.0))
            if TURN:
                state2 += tl.trans(tl.load(entry + K * V + straight, mask=both, other=0.0))
    if REVERSE:
        if SPLIT and not SUMMARY:
            for later in tl.range(G - 1, g, -1):
                ratio = segment_ratio(
                    edge, tl.minimum(later * per, chunks) + later, tl.minimum((later + 1) * per, chunks) + later,
                    H, K, wide,
                )  # fmt: skip
                summary = sums + later * (ROWS * V) + straight
                state = state * ratio[None, :] + tl.trans(tl.load(summary, mask=both, other=0.0))
                if TURN:
                    state2 = state2 * ratio[None, :] + tl.trans(tl.load(summary + K * V, mask=both, other=0.0))
        reference = tl.load(edge + (last + g) * (2 * H * K), mask=wide, other=0.0)
        mass = tl.load(edge + (last + g) * (2 * H * K) + K, mask=wide, other=0.0)
        state *= invert(mass)[None, :]
        if TURN:
            state2 *= invert(mass)[None, :]
    else:
        if HAS_ENTRY and not SUMMARY:
            reference, mass = start(entry_z + nh.to(tl.int64) * K + i, wide)
            state *= mass[None, :]
            if TURN:
                state2 *= mass[None, :]
        if SPLIT and not SUMMARY:
            for before in tl.range(0, g):
                at = sums_z + (nh.to(tl.int64) * G + before) * K + i
                reference, mass, keep, take = weigh(at, reference, mass, wide)
                summary = sums + before * (ROWS * V) + straight
                state = state * keep[None, :] + tl.trans(tl.load(summary, mask=both, other=0.0)) * take[None, :]
                if TURN:
                    state2 = state2 * keep[None, :]
                    state2 += tl.trans(tl.load(summary + K * V, mask=both, other=0.0)) * take[None, :]

    edge_row = edge + g * (2 * H * K)
    earlier = (t[None, :] <= t[:, None]).to(OPERAND)
    inside = t[:, None] >= t[None, :]
    for x in tl.range(first, last, num_stages=STAGES):
        if REVERSE:
            chunk = last - 1 - (x - first)
        else:
            chunk = x
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        tk = load_tile(k + move * K, keys, t, i, left, -float("inf"), K, PK != K, EVEN).to(tl.float32)
        tc = load_tile(c + move * V, values, t, j, left, 0.0, V, V % BC != 0, EVEN).to(OPERAND)
        top = tl.load(edge_row + chunk * (2 * H * K), mask=wide, other=0.0)
        if REVERSE:
            keep = tl.exp2((top - reference) * LOG2_E)
        else:
            keep = tl.exp2((reference - top) * LOG2_E)
        reference = top
        key = tl.exp2((tk - top[None, :]) * LOG2_E + SHIFT)
        tk = key.to(OPERAND)
        if TURN:
            if PLACED:
                place = tl.load(positions + begin + chunk * C + t, mask=t < left, other=0).to(tl.float32)
            else:
                place = (chunk * C + t).to(tl.float32)
            cos, sin = cosine_sine(place[:, None], frequency, FAST)
            tk1, tk2 = (key * cos).to(OPERAND), (key * sin).to(OPERAND)
        else:
            tk1 = tk
        state *= keep[None, :]
        if TURN:
            state2 *= keep[None, :]
        if REVERSE or not SUMMARY:
            tq = load_tile(q + move * K, keys, t, i, left, 0.0, K, PK != K, EVEN).to(tl.float32)
            mass = tl.load(edge_row + chunk * (2 * H * K) + K, mask=wide, other=0.0)
            masses = tl.dot(earlier, tk, input_precision=PRECISION) + mass[None, :]
            tq *= invert_tile(masses, PRECISION != "tf32")
            if REVERSE:
                if SUMMARY:
                    slope = load_tile(dq + move * K, keys, t, i, left, 0.0, K, PK != K, EVEN).to(tl.float32)
                    falls = falls * keep + tl.sum(tq * slope, 0)
                tq *= scale
            if TURN:
                tq1, tq2 = (tq * cos).to(OPERAND), (tq * sin).to(OPERAND)
            else:
                tq1 = tq.to(OPERAND)
        if not SUMMARY:
            scores = tl.dot(tq1, tl.trans(tk1), input_precision=PRECISION)
            if TURN:
                scores = tl.dot(tq2, tl.trans(tk2), scores, input_precision=PRECISION)
            scores = tl.where(inside, scores, 0.0).to(OPERAND)
            if REVERSE:
                out = tl.dot(state.to(OPERAND), tl.trans(tk1), input_precision=PRECISION)
                if TURN:
                    out = tl.dot(state2.to(OPERAND), tl.trans(tk2), out, input_precision=PRECISION)
                out = tl.dot(tl.trans(tc), scores, out, input_precision=PRECISION)
                out = tl.trans(out)
            else:
                out = tl.dot(tq1, tl.trans(state.to(OPERAND)), input_precision=PRECISION)
                if TURN:
                    out = tl.dot(tq2, tl.trans(state2.to(OPERAND)), out, input_precision=PRECISION)
                out = tl.dot(scores, tc, out, input_precision=PRECISION) * scale
            to = o + move * V + values
            out = out.to(o.dtype.element_ty)
            if EVEN and V % BC == 0:
                tl.store(to, out)
            else:
                tl.store(to, out, mask=(t < left)[:, None] & narrow[None, :])
        if REVERSE:
            state = tl.dot(tl.trans(tc), tq1, state, input_precision=PRECISION)
            if TURN:
                state2 = tl.dot(tl.trans(tc), tq2, state2, input_precision=PRECISION)
        else:
            state = tl.dot(tl.trans(tc), tk1, state, input_precision=PRECISION)
            if TURN:
                state2 = tl.dot(tl.trans(tc), tk2, state2, input_precision=PRECISION)

    if HAS_LEAVE:
        # By the program of the last chunk; for an empty document by the first. A summary's goes to its segment.
        to = leave + nh.to(tl.int64) * (ROWS * V)
        to_z = leave_z + nh.to(tl.int64) * K
        mine = (last == chunks) & ((first < last) | (g == 0))
        if SUMMARY:
            to = sums + g * (ROWS * V)
            to_z = sums_z + (nh.to(tl.int64) * G + g) * K
            mine = g >= 0
        if mine:
            row = first if REVERSE else last
            reference = tl.load(edge_row + row * (2 * H * K), mask=wide, other=0.0)
            mass = tl.load(edge_row + row * (2 * H * K) + K, mask=wide, other=0.0)
            if REVERSE:
                factor = mass
                tl.store(to_z + i, falls * factor, mask=wide & (block == 0))
            else:
                factor = invert(mass)
                tl.store(to_z + i, log_sum(reference, mass), mask=wide & (block == 0))
            tl.store(to + straight, tl.trans(state * factor[None, :]), mask=both)
            if TURN:
                tl.store(to + K * V + straight, tl.trans(state2 * factor[None, :]), mask=both)
