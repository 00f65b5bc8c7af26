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


@triton.jit
def keys_kernel(
    q, k, again, v, do, dq, out, entry, entry_z, end, leave, leave_z, sums, sums_z, edges, theta, dtheta, positions,
    offsets, scale, T, N, G, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PV: tl.constexpr,
    BC: tl.constexpr, REVERSE: tl.constexpr, TURN: tl.constexpr, PLACED: tl.constexpr,
    HAS_ENTRY: tl.constexpr, HAS_LEAVE: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """out = dq, with `entry` the initial state. A program has BC channels of one head.

    REVERSE: out is the gradient of k, `entry` and `entry_z` are the gradients of the final state `end`, and `leave` and
    `leave_z` those of the initial one, but for what the initial S itself gives to its z. `sums` are then those of
    reversed summaries.
    """
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

    t, i, j = tl.arange(0, C), block * BC + tl.arange(0, BC), tl.arange(0, PV)
    narrow, wide = i < K, j < V
    ROWS: tl.constexpr = 2 * K if TURN else K
    q += (begin * H + h) * K
    k += (begin * H + h) * K
    again += (begin * H + h) * K
    dq += (begin * H + h) * K
    out += (begin * H + h) * K
    v += (begin * H + h) * V
    do += (begin * H + h) * V
    keys = t[:, None] * (H * K) + i[None, :]
    values = t[:, None] * (H * V) + j[None, :]
    straight = i[None, :] * V + j[:, None]  # a state in memory, transposed
    both = wide[:, None] & narrow[None, :]
    entry += nh.to(tl.int64) * (ROWS * V)
    end += nh.to(tl.int64) * (ROWS * V)
    sums += nh.to(tl.int64) * (G * ROWS * V)
    sums_z += nh.to(tl.int64) * (G * K) + i
    edge = edges + ((begin // C + n * (1 + G)) * (2 * H) + 2 * h) * K + i
    if TURN:
        frequency = tl.load(theta + h * K + i, mask=narrow, other=0.0)[None, :]
        slopes = tl.zeros([BC], tl.float32)
        state2 = tl.zeros([PV, BC], tl.float32)

    state = tl.zeros([PV, BC], tl.float32)
    reference = tl.full([BC], NOTHING, tl.float32)
    mass = tl.zeros([BC], tl.float32)
    fall = tl.zeros([BC], tl.float32)
    if HAS_ENTRY:
        state += tl.load(entry + straight, mask=both, other=0.0)
        if TURN:
            state2 += tl.load(entry + K * V + straight, mask=both, other=0.0)
        if REVERSE:
            fall += tl.sum(state * tl.load(end + straight, mask=both, other=0.0), 0)
            if TURN:
                fall += tl.sum(state2 * tl.load(end + K * V + straight, mask=both, other=0.0), 0)
            fall -= tl.load(entry_z + nh.to(tl.int64) * K + i, mask=narrow, other=0.0)
        else:
            reference, mass = start(entry_z + nh.to(tl.int64) * K + i, narrow)
            state *= mass[None, :]
            if TURN:
                state2 *= mass[None, :]
    if REVERSE:
        if SPLIT:
            for later in tl.range(G - 1, g, -1):
                ratio = segment_ratio(
                    edge, tl.minimum(later * per, chunks) + later, tl.minimum((later + 1) * per, chunks) + later,
                    H, K, narrow,
                )  # fmt: skip
                summary = sums + later * (ROWS * V) + straight
                state = state * ratio[None, :] + tl.load(summary, mask=both, other=0.0)
                if TURN:
                    state2 = state2 * ratio[None, :] + tl.load(summary + K * V, mask=both, other=0.0)
                fall = fall * ratio + tl.load(sums_z + later * K, mask=narrow, other=0.0)
        reference = tl.load(edge + (last + g) * (2 * H * K), mask=narrow, other=0.0)
        mass = tl.load(edge + (last + g) * (2 * H * K) + K, mask=narrow, other=0.0)
        state *= invert(mass)[None, :]
        fall *= invert(mass)
        if TURN:
            state2 *= invert(mass)[None, :]
    elif SPLIT:
        for before in tl.range(0, g):
            reference, mass, keep, take = weigh(sums_z + before * K, reference, mass, narrow)
            summary = sums + before * (ROWS * V) + straight
            state = state * keep[None, :] + tl.load(summary, mask=both, other=0.0) * take[None, :]
            if TURN:
                state2 = state2 * keep[None, :]
                state2 += tl.load(summary + K * V, mask=both, other=0.0) * take[None, :]

    earlier = (t[:, None] >= t[None, :]).to(OPERAND)
    later = (t[:, None] <= t[None, :]).to(OPERAND)
    inside = (t[:, None] <= t[None, :]) if REVERSE else (t[:, None] >= t[None, :])
    for x in tl.range(first, last, num_stages=STAGES):
        if REVERSE:
            chunk = last - 1 - (x - first)
        else:
            chunk = x
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        at = edge + (chunk + g) * (2 * H * K)
        tk = load_tile(k + move * K, keys, t, i, left, -float("inf"), K, K % BC != 0, EVEN).to(tl.float32)
        tv = load_tile(v + move * V, values, t, j, left, 0.0, V, PV != V, EVEN).to(OPERAND)
        tdo = load_tile(do + move * V, values, t, j, left, 0.0, V, PV != V, EVEN).to(OPERAND)
        top = tl.load(at, mask=narrow, other=0.0)
        if REVERSE:
            keep = tl.exp2((top - reference) * LOG2_E)
        else:
            keep = tl.exp2((reference - top) * LOG2_E)
        mass = tl.load(at + K, mask=narrow, other=0.0)
        reference = top
        key = tl.exp2((tk - top[None, :]) * LOG2_E + SHIFT)
        tk = key.to(OPERAND)
        inverse = invert_tile(tl.dot(earlier, tk, input_precision=PRECISION) + mass[None, :], PRECISION != "tf32")
        if TURN:
            if PLACED:
                place = tl.load(positions + begin + chunk * C + t, mask=t < left, other=0).to(tl.float32)
            else:
                place = (chunk * C + t).to(tl.float32)
            cos, sin = cosine_sine(place[:, None], frequency, FAST)
        if REVERSE or TURN:
            query = load_tile(q + move * K, keys, t, i, left, 0.0, K, K % BC != 0, EVEN).to(tl.float32) * inverse
        state *= keep[None, :]
        if TURN:
            state2 *= keep[None, :]
        if REVERSE:
            slope = load_tile(dq + move * K, keys, t, i, left, 0.0, K, K % BC != 0, EVEN).to(tl.float32)
            slope *= query
            fall *= keep
            query *= scale
            scores = tl.dot(tv, tl.trans(tdo), input_precision=PRECISION)
            scores = tl.where(inside, scores, 0.0).to(OPERAND)
            if TURN:
                tx, tx2 = (query * cos).to(OPERAND), (query * sin).to(OPERAND)
            else:
                tx = query.to(OPERAND)
            grad = tl.dot(tv, state.to(OPERAND), input_precision=PRECISION)
            grad = tl.dot(scores, tx, grad, input_precision=PRECISION)
            state = tl.dot(tl.trans(tdo), tx, state, input_precision=PRECISION)
            if TURN:
                grad2 = tl.dot(tv, state2.to(OPERAND), input_precision=PRECISION)
                grad2 = tl.dot(scores, tx2, grad2, input_precision=PRECISION)
                state2 = tl.dot(tl.trans(tdo), tx2, state2, input_precision=PRECISION)
                slopes += tl.sum(key * (grad2 * cos - grad * sin) * place[:, None], 0)
                grad = grad * cos + grad2 * sin
            grad = tl.dot(later, (-slope).to(OPERAND), grad, input_precision=PRECISION)
            # `again` is k: the tile of one load would lie unswizzled in shared memory, for its two layouts.
            tk = load_tile(again + move * K, keys, t, i, left, -float("inf"), K, K % BC != 0, EVEN).to(tl.float32)
            key = tl.exp2((tk - top[None, :]) * LOG2_E + SHIFT)
            grad = key * (grad - fall[None, :])
            fall += tl.sum(slope, 0)
        else:
            scores = tl.dot(tdo, tl.trans(tv), input_precision=PRECISION)
            scores = tl.where(inside, scores, 0.0).to(OPERAND)
            if TURN:
                tx, tx2 = (key * cos).to(OPERAND), (key * sin).to(OPERAND)
            else:
                tx = tk
            grad = tl.dot(tdo, state.to(OPERAND), input_precision=PRECISION)
            grad = tl.dot(scores, tx, grad, input_precision=PRECISION)
            state = tl.dot(tl.trans(tv), tx, state, input_precision=PRECISION)
            if TURN:
                grad2 = tl.dot(tdo, state2.to(OPERAND), input_precision=PRECISION)
                grad2 = tl.dot(scores, tx2, grad2, input_precision=PRECISION)
                state2 = tl.dot(tl.trans(tv), tx2, state2, input_precision=PRECISION)
                slopes += tl.sum(query * (grad2 * cos - grad * sin) * (place[:, None] * scale), 0)
                grad = grad * cos + grad2 * sin
            grad = grad * inverse * scale
        to = out + move * K + keys
        grad = grad.to(out.dtype.element_ty)
        if EVEN and K % BC == 0:
            tl.store(to, grad)
        else:
            tl.store(to, grad, mask=(t < left)[:, None] & narrow[None, :])

    if TURN:
        tl.store(dtheta + (nh.to(tl.int64) * G + g) * K + i, slopes, mask=narrow)
    if REVERSE:
        if HAS_LEAVE and g == 0:
            mass = tl.load(edge + K, mask=narrow, other=0.0)
            to = leave + nh.to(tl.int64) * (ROWS * V) + straight
            tl.store(to, state * mass[None, :], mask=both)
            if TURN:
                tl.store(to + K * V, state2 * mass[None, :], mask=both)
            tl.store(leave_z + nh.to(tl.int64) * K + i, -fall * mass, mask=narrow)


@triton.jit
def sum_products_kernel(
    q, do, sums, theta, positions, offsets, scale, T, N, G, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, PK: tl.constexpr, BC: tl.constexpr, TURN: tl.constexpr, PLACED: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """sums [N, H, G, K or 2K, V] = scale q^T do of each segment, in BC columns of V a program."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + BC - 1) // BC
    block = pid % BLOCKS
    nh = (pid // BLOCKS) % (N * H)
    g = pid // (BLOCKS * N * H)
    n, h = nh // H, nh % H
    begin, length = span(offsets, n, T, DOCUMENTS)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    t, i, j = tl.arange(0, C), tl.arange(0, PK), block * BC + tl.arange(0, BC)
    ROWS: tl.constexpr = 2 * K if TURN else K
    q += (begin * H + h) * K
    do += (begin * H + h) * V
    state = tl.zeros([PK, BC], tl.float32)
    if TURN:
        state2 = tl.zeros([PK, BC], tl.float32)
        frequency = tl.load(theta + h * K + i, mask=i < K, other=0.0)[None, :]
    for chunk in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        tq = load_tile(q + move * K, t[:, None] * (H * K) + i[None, :], t, i, left, 0.0, K, PK != K, EVEN)
        tc = load_tile(do + move * V, t[:, None] * (H * V) + j[None, :], t, j, left, 0.0, V, V % BC != 0, EVEN)
        tc = tc.to(OPERAND)
        if TURN:
            if PLACED:
                place = tl.load(positions + begin + chunk * C + t, mask=t < left, other=0).to(tl.float32)
            else:
                place = (chunk * C + t).to(tl.float32)
            cos, sin = cosine_sine(place[:, None], frequency, FAST)
            query = tq.to(tl.float32)
            tq = query * cos
            state2 = tl.dot(tl.trans((query * sin).to(OPERAND)), tc, state2, input_precision=PRECISION)
        state = tl.dot(tl.trans(tq.to(OPERAND)), tc, state, input_precision=PRECISION)
    to = sums + (nh.to(tl.int64) * G + g) * (ROWS * V) + i[:, None] * V + j[None, :]
    mask = (i < K)[:, None] & (j < V)[None, :]
    tl.store(to, state * scale, mask=mask)
    if TURN:
        tl.store(to + K * V, state2 * scale, mask=mask)


@triton.jit
def combine_kernel(
    sums, sums_z, S, z, dS, dz, out, out_z, G, K: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, PV: tl.constexpr,
    TURN: tl.constexpr, BACKWARD: tl.constexpr, HAS_ENTRY: tl.constexpr,
):  # fmt: skip
    """From segments' sums the whole one, for BR channels a program.

    Forward: S and log-sum z of all, into out and out_z. BACKWARD: out is the gradient to S (dS and what o gives), out_z
    what the normalisation takes from the gradient of each logit.
    """
    BLOCKS: tl.constexpr = (K + BR - 1) // BR
    nh = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i, j = (tl.program_id(0) % BLOCKS) * BR + tl.arange(0, BR), tl.arange(0, PV)
    ROWS: tl.constexpr = 2 * K if TURN else K
    channel = i < K
    mask = channel[:, None] & (j < V)[None, :]
    place = i[:, None] * V + j[None, :]
    sums += nh * G * (ROWS * V)
    sums_z += nh * G * K
    total = tl.zeros([BR, PV], tl.float32)
    total2 = tl.zeros([BR, PV], tl.float32)
    peak = tl.full([BR], NOTHING, tl.float32)
    mass = tl.zeros([BR], tl.float32)
    if BACKWARD and HAS_ENTRY:
        total += tl.load(dS + nh * (ROWS * V) + place, mask=mask, other=0.0)
        if TURN:
            total2 += tl.load(dS + nh * (ROWS * V) + K * V + place, mask=mask, other=0.0)
    if not BACKWARD:
        for g in tl.range(0, G):
            peak = tl.maximum(peak, tl.load(sums_z + g * K + i, mask=channel, other=-float("inf")))
        for g in tl.range(0, G):
            mass += tl.exp2((tl.load(sums_z + g * K + i, mask=channel, other=-float("inf")) - peak) * LOG2_E)
    factor = tl.where(mass > 0, 1.0 / tl.where(mass > 0, mass, 1.0), 0.0)
    for g in tl.range(0, G):
        one = tl.load(sums + g * (ROWS * V) + place, mask=mask, other=0.0)
        if TURN:
            two = tl.load(sums + g * (ROWS * V) + K * V + place, mask=mask, other=0.0)
        if not BACKWARD:
            weight = tl.load(sums_z + g * K + i, mask=channel, other=-float("inf"))
            weight = tl.exp2((weight - peak) * LOG2_E) * factor
            one *= weight[:, None]
            if TURN:
                two *= weight[:, None]
        total += one
        if TURN:
            total2 += two
    tl.store(out + nh * (ROWS * V) + place, total, mask=mask)
    if TURN:
        tl.store(out + nh * (ROWS * V) + K * V + place, total2, mask=mask)
    if BACKWARD:
        value = tl.sum(total * tl.load(S + nh * (ROWS * V) + place, mask=mask, other=0.0), 1)
        if TURN:
            value += tl.sum(total2 * tl.load(S + nh * (ROWS * V) + K * V + place, mask=mask, other=0.0), 1)
        if HAS_ENTRY:
            value -= tl.load(dz + nh * K + i, mask=channel, other=0.0)
    else:
        value = tl.where(mass > 0, peak + tl.log(tl.where(mass > 0, mass, 1.0)), -float("inf"))
    tl.store(out_z + nh * K + i, value, mask=channel)


@triton.jit
def use_values_kernel(
    q, k, o, S, z, theta, positions, offsets, scale, T, N, G, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, PK: tl.constexpr, BC: tl.constexpr, SOFTMAX: tl.constexpr, TURN: tl.constexpr,
    PLACED: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """o = scale q S, or (SOFTMAX) dv = softmax(k) S with S the gradient to the state. BC columns of V a program."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + BC - 1) // BC
    block = pid % BLOCKS
    nh = (pid // BLOCKS) % (N * H)
    g = pid // (BLOCKS * N * H)
    n, h = nh // H, nh % H
    begin, length = span(offsets, n, T, DOCUMENTS)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    t, i, j = tl.arange(0, C), tl.arange(0, PK), block * BC + tl.arange(0, BC)
    ROWS: tl.constexpr = 2 * K if TURN else K
    x = (k if SOFTMAX else q) + (begin * H + h) * K
    o += (begin * H + h) * V
    mask = (i < K)[:, None] & (j < V)[None, :]
    S += nh.to(tl.int64) * (ROWS * V) + i[:, None] * V + j[None, :]
    state = tl.load(S, mask=mask, other=0.0).to(OPERAND)
    if TURN:
        state2 = tl.load(S + K * V, mask=mask, other=0.0).to(OPERAND)
        frequency = tl.load(theta + h * K + i, mask=i < K, other=0.0)[None, :]
    if SOFTMAX:
        shift = tl.maximum(tl.load(z + nh.to(tl.int64) * K + i, mask=i < K, other=0.0), NOTHING)
    for chunk in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        tx = load_tile(x + move * K, t[:, None] * (H * K) + i[None, :], t, i, left, -float("inf") if SOFTMAX else 0.0,
                       K, PK != K, EVEN)  # fmt: skip
        if SOFTMAX:
            tx = tl.exp2((tx.to(tl.float32) - shift[None, :]) * LOG2_E)
        if TURN:
            if PLACED:
                place = tl.load(positions + begin + chunk * C + t, mask=t < left, other=0).to(tl.float32)
            else:
                place = (chunk * C + t).to(tl.float32)
            cos, sin = cosine_sine(place[:, None], frequency, FAST)
            both = tx.to(tl.float32)
            out = tl.dot((both * cos).to(OPERAND), state, input_precision=PRECISION)
            out = tl.dot((both * sin).to(OPERAND), state2, out, input_precision=PRECISION)
        else:
            out = tl.dot(tx.to(OPERAND), state, input_precision=PRECISION)
        out = (out * scale).to(o.dtype.element_ty)
        to = o + move * V + t[:, None] * (H * V) + j[None, :]
        if EVEN and V % BC == 0:
            tl.store(to, out)
        else:
            tl.store(to, out, mask=(t < left)[:, None] & (j < V)[None, :])


@triton.jit
def use_keys_kernel(
    x, k, out, S, z, decline, theta, dtheta, positions, offsets, scale, T, N, G, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, PV: tl.constexpr, BC: tl.constexpr, SOFTMAX: tl.constexpr, TURN: tl.constexpr,
    PLACED: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dq = scale x S^T from x = do; or (SOFTMAX) the gradient of k from x = v, S the gradient to the state.

    BC columns of K a program. `k` is q where dq is wanted: the gradient to the angles needs it.
    """
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (K + BC - 1) // BC
    block = pid % BLOCKS
    nh = (pid // BLOCKS) % (N * H)
    g = pid // (BLOCKS * N * H)
    n, h = nh // H, nh % H
    begin, length = span(offsets, n, T, DOCUMENTS)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    t, i, j = tl.arange(0, C), block * BC + tl.arange(0, BC), tl.arange(0, PV)
    narrow, wide = i < K, j < V
    ROWS: tl.constexpr = 2 * K if TURN else K
    x += (begin * H + h) * V
    k += (begin * H + h) * K
    out += (begin * H + h) * K
    keys = t[:, None] * (H * K) + i[None, :]
    mask = narrow[:, None] & wide[None, :]
    S += nh.to(tl.int64) * (ROWS * V) + i[:, None] * V + j[None, :]
    state = tl.load(S, mask=mask, other=0.0).to(OPERAND)
    if TURN:
        state2 = tl.load(S + K * V, mask=mask, other=0.0).to(OPERAND)
        frequency = tl.load(theta + h * K + i, mask=narrow, other=0.0)[None, :]
        slopes = tl.zeros([BC], tl.float32)
    if SOFTMAX:
        shift = tl.maximum(tl.load(z + nh.to(tl.int64) * K + i, mask=narrow, other=0.0), NOTHING)
        fall = tl.load(decline + nh.to(tl.int64) * K + i, mask=narrow, other=0.0)
    for chunk in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        tx = load_tile(x + move * V, t[:, None] * (H * V) + j[None, :], t, j, left, 0.0, V, PV != V, EVEN).to(OPERAND)
        grad = tl.dot(tx, tl.trans(state), input_precision=PRECISION)
        if SOFTMAX or TURN:
            key = load_tile(k + move * K, keys, t, i, left, -float("inf") if SOFTMAX else 0.0, K, K % BC != 0, EVEN)
            key = key.to(tl.float32)
            if SOFTMAX:
                key = tl.exp2((key - shift[None, :]) * LOG2_E)
        if TURN:
            if PLACED:
                place = tl.load(positions + begin + chunk * C + t, mask=t < left, other=0).to(tl.float32)
            else:
                place = (chunk * C + t).to(tl.float32)
            cos, sin = cosine_sine(place[:, None], frequency, FAST)
            grad2 = tl.dot(tx, tl.trans(state2), input_precision=PRECISION)
            slopes += tl.sum(key * (grad2 * cos - grad * sin) * (place[:, None] * scale), 0)
            grad = grad * cos + grad2 * sin
        if SOFTMAX:
            grad = key * (grad - fall[None, :])
        else:
            grad *= scale
        to = out + move * K + keys
        grad = grad.to(out.dtype.element_ty)
        if EVEN and K % BC == 0:
            tl.store(to, grad)
        else:
            tl.store(to, grad, mask=(t < left)[:, None] & narrow[None, :])
    if TURN:
        tl.store(dtheta + (nh.to(tl.int64) * G + g) * K + i, slopes, mask=narrow)
