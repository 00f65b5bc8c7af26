"""The Triton kernels of additive decay attention; `linnet.ops.additive.triton` says what they compute.

Causal: kernels walk chunks of C tokens. In a chunk the running softmax is a product of a factor of t and one of s,

    exp(u_s - z_t) = key_s / denominator_t,
    key_s = exp(u_s - r),   denominator_t = exp(z_t - r) = denominator before the chunk + sum_{s <= t} key_s

with one reference r per channel, the largest logit so far. All are scaled by 2^SHIFT, and denominators bounded by TINY,
so that a channel may grow by e^97 inside a chunk before a weight is lost, and nothing becomes infinite if it grows by
more. States are relative to r as well.

`boundaries_kernel` finds references and denominators first, in a pass over k alone: they would be two reductions over
tokens in every chunk of every sweep. `boundaries` [rows, H, 2, K] holds r and the denominator before each chunk, then
those at the end of a segment. `delta` is minus the gradient of the log-sum z: what the normalisation takes from the
gradient of each logit. `q_dq` are the products q dq that it sums.

Without causality: k = softmax_t(u), S = k^T v, o = q S. Sums over the sequence are taken in segments (those of k^T v by
the summaries of `values_kernel`), joined by `combine_kernel`, and used in one more pass: `use_values_kernel` for o and
dv, `use_keys_kernel` for dq and the gradient of the logits.

K and V are the widths, PK and PV these padded to powers of two, BC the columns of a program. ROTATE: LRPE doubles the
rows of the state; its second half, of sines, is `state2`. AXES: columns of `positions` [rows, AXES], 0 where tokens are
counted; SHARED: all sequences have the positions of the first.
"""

import triton
import triton.language as tl

from linnet.ops.device import KEEP_NAN, LOG2_E, cosine_sine, identify, load_tile, span, store_masked

LN_2 = tl.constexpr(0.6931471805599453)
SHIFT = tl.constexpr(60.0)
ONE = tl.constexpr(2.0**60)  # 2^SHIFT
TINY = tl.constexpr(2.0**-80)
NOTHING = tl.constexpr(-1e30)  # the reference before the first token


@triton.jit
def start(z, mask):
    """Reference and denominator of a state normalised by exp(-z)."""
    z = tl.load(z, mask=mask, other=-float("inf"))
    return tl.maximum(z, NOTHING, KEEP_NAN), tl.where(z > NOTHING, ONE, 0.0)


@triton.jit
def weigh(z, reference, denominator, mask):
    """Joins a summary of log-sum z to (reference, denominator): the new ones, and the factors of the two states."""
    z = tl.load(z, mask=mask, other=-float("inf"))
    top = tl.maximum(reference, z)
    decay = tl.exp2((reference - top) * LOG2_E)
    take = tl.exp2((z - top) * LOG2_E + SHIFT)
    return top, denominator * decay + take, decay, take


@triton.jit
def invert(denominator):
    """1 / denominator in the range of float32, 0 for none."""
    return tl.where(denominator == 0, 0.0, 1.0 / tl.where(denominator == 0, 1.0, denominator))


@triton.jit
def invert_tile(denominator, EXACT: tl.constexpr):
    denominator = tl.maximum(denominator, TINY, KEEP_NAN)
    if EXACT:
        return 1.0 / denominator
    root = tl.rsqrt(denominator)
    return root * root


@triton.jit
def log_sum(reference, denominator):
    return tl.where(
        denominator == 0,
        -float("inf"),
        reference + (tl.log2(tl.where(denominator == 0, 1.0, denominator)) - SHIFT) * LN_2,
    )


@triton.jit
def segment_ratio(boundary, first, last, H: tl.constexpr, K: tl.constexpr, mask):
    """exp(z before - z after) of a segment, from its first and last row of boundaries."""
    r0 = tl.load(boundary + first * (2 * H * K), mask=mask, other=0.0)
    m0 = tl.load(boundary + first * (2 * H * K) + K, mask=mask, other=0.0)
    r1 = tl.load(boundary + last * (2 * H * K), mask=mask, other=0.0)
    m1 = tl.load(boundary + last * (2 * H * K) + K, mask=mask, other=0.0)
    return m0 * invert(m1) * tl.exp2((r0 - r1) * LOG2_E)


@triton.jit
def locate(
    offsets, T, N, G, H: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, C: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Of a program, of which there are N H G for each block of columns: its block, sequence n and head h, alone and in
    one number, its segment; the first row and the length of the sequence, its chunks, and those of a segment."""
    block, _, nh, n, h, g = identify(tl.program_id(0), N, H, WIDTH, BC, 1)
    begin, length = span(offsets, n, T, DOCUMENTS)
    chunks = tl.cdiv(length, C)
    return block, n, h, nh, g, begin, length, chunks, tl.cdiv(chunks, G)


@triton.jit
def load_angles(
    positions, chunk, t, left, i, frequency, C: tl.constexpr, K: tl.constexpr, AXES: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Positions of a chunk's tokens, [C, 1] or on several axes [C, channels], and cosines and sines of their angles.

    The channels `i` fall into AXES groups. All coordinates of a token are loaded, and each channel selects its own.
    """
    at = chunk * C + t
    if AXES == 0:
        position = at.to(tl.float32)[:, None]
    else:
        position = tl.load(positions + at * AXES, mask=t < left, other=0).to(tl.float32)[:, None]
        if AXES > 1:
            axis = i // ((K + AXES - 1) // AXES)
            position = tl.broadcast_to(position, t.shape[0], i.shape[0])
            for a in tl.static_range(1, AXES):
                other = tl.load(positions + at * AXES + a, mask=t < left, other=0).to(tl.float32)
                position = tl.where((axis == a)[None, :], other[:, None], position)
    cos, sin = cosine_sine(position, frequency, FAST)
    return position, cos, sin


@triton.jit
def boundaries_kernel(
    k, boundaries, ends, initial_z, offsets, T, N, G, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, HAS_INITIAL: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Writes `boundaries`: of the whole sequence, or (SPLIT) of each segment from zero, with its log-sum in `ends`."""
    block, n, h, nh, g, begin, length, chunks, per = locate(offsets, T, N, G, H, K, BC, C, DOCUMENTS)
    first, last = tl.minimum(g * per, chunks), tl.minimum((g + 1) * per, chunks)
    t, i = tl.arange(0, C), block * BC + tl.arange(0, BC)
    k += (begin * H + h) * K
    keys = t[:, None] * (H * K) + i[None, :]
    boundary = boundaries + ((begin // C + n * (1 + G) + g) * (2 * H) + 2 * h) * K + i
    reference = tl.full([BC], NOTHING, tl.float32)
    denominator = tl.zeros([BC], tl.float32)
    if HAS_INITIAL and not SPLIT:
        reference, denominator = start(initial_z + nh.to(tl.int64) * K + i, i < K)
    for chunk in tl.range(first, last, num_stages=STAGES):
        move = begin * 0 + chunk * C * H
        tk = load_tile(k + move * K, keys, t, i, length - chunk * C, -float("inf"), K, K % BC != 0, EVEN).to(tl.float32)
        top = tl.maximum(reference, tl.max(tk, 0))
        denominator *= tl.exp2((reference - top) * LOG2_E)
        tl.store(boundary + chunk * (2 * H * K), top, mask=i < K)
        tl.store(boundary + chunk * (2 * H * K) + K, denominator, mask=i < K)
        denominator += tl.sum(tl.exp2((tk - top[None, :]) * LOG2_E + SHIFT), 0)
        reference = top
    tl.store(boundary + last * (2 * H * K), reference, mask=i < K)
    tl.store(boundary + last * (2 * H * K) + K, denominator, mask=i < K)
    if SPLIT:
        tl.store(ends + (nh.to(tl.int64) * G + g) * K + i, log_sum(reference, denominator), mask=i < K)


@triton.jit
def link_kernel(
    boundaries, ends, initial_z, offsets, T, N, G, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PK: tl.constexpr,
    R: tl.constexpr, HAS_INITIAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Adds what comes before a segment to its `boundaries`."""
    block, n, h, nh, g, begin, length, chunks, per = locate(offsets, T, N, G, H, 1, 1, C, DOCUMENTS)
    first, last = tl.minimum(g * per, chunks), tl.minimum((g + 1) * per, chunks)
    i = tl.arange(0, PK)
    reference = tl.full([PK], NOTHING, tl.float32)
    denominator = tl.zeros([PK], tl.float32)
    if HAS_INITIAL:
        reference, denominator = start(initial_z + nh.to(tl.int64) * K + i, i < K)
    for before in tl.range(0, g):
        reference, denominator, _, _ = weigh(
            ends + (nh.to(tl.int64) * G + before) * K + i, reference, denominator, i < K
        )
    boundary = boundaries + ((begin // C + n * (1 + G) + g) * (2 * H) + 2 * h) * K + i[None, :]
    for row in tl.range(first, last + 1, R):
        rows = row + tl.arange(0, R)
        mask = (rows <= last)[:, None] & (i < K)[None, :]
        at = boundary + rows[:, None] * (2 * H * K)
        old, old_denominator = tl.load(at, mask=mask, other=0.0), tl.load(at + K, mask=mask, other=0.0)
        top = tl.maximum(old, reference[None, :])
        mixed = old_denominator * tl.exp2((old - top) * LOG2_E) + denominator[None, :] * tl.exp2(
            (reference[None, :] - top) * LOG2_E
        )
        tl.store(at, top, mask=mask)
        tl.store(at + K, mixed, mask=mask)


@triton.jit
def values_kernel(
    q, k, c, o, dq, initial, initial_z, final, final_z, sums, sums_z, boundaries, theta, positions, offsets,
    scale, T, N, G, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PK: tl.constexpr,
    BC: tl.constexpr, REVERSE: tl.constexpr, SUMMARY: tl.constexpr, ROTATE: tl.constexpr, AXES: tl.constexpr,
    SHARED: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """o from c = v, or (REVERSE) dv from c = do. A program has BC columns of V of one head.

    SUMMARY: only the state of a segment from zero, for what follows in the order of the sweep.
    """
    block, n, h, nh, g, begin, length, chunks, per = locate(offsets, T, N, G, H, V, BC, C, DOCUMENTS)
    if SUMMARY and REVERSE:  # the last ones: mostly all but the first, before which nothing comes
        g += G - tl.num_programs(0) // (((V + BC - 1) // BC) * N * H)
    first, last = tl.minimum(g * per, chunks), tl.minimum((g + 1) * per, chunks)

    t, i, j = tl.arange(0, C), tl.arange(0, PK), block * BC + tl.arange(0, BC)
    wide, narrow = i < K, j < V
    ROWS: tl.constexpr = 2 * K if ROTATE else K
    q += (begin * H + h) * K
    k += (begin * H + h) * K
    dq += (begin * H + h) * K
    c += (begin * H + h) * V
    o += (begin * H + h) * V
    keys = t[:, None] * (H * K) + i[None, :]
    values = t[:, None] * (H * V) + j[None, :]
    straight = i[:, None] * V + j[None, :]  # a state in memory
    both = wide[:, None] & narrow[None, :]
    initial += nh.to(tl.int64) * (ROWS * V)
    sums += nh.to(tl.int64) * (G * ROWS * V)
    boundary = boundaries + ((begin // C + n * (1 + G)) * (2 * H) + 2 * h) * K + i
    if ROTATE:
        frequency = tl.load(theta + h * K + i, mask=wide, other=0.0)[None, :]
        if not SHARED:
            positions += begin * AXES

    state = tl.zeros([BC, PK], tl.float32)
    if ROTATE:
        state2 = tl.zeros([BC, PK], tl.float32)
    reference = tl.full([PK], NOTHING, tl.float32)
    denominator = tl.zeros([PK], tl.float32)
    deltas = tl.zeros([PK], tl.float32)
    if not SUMMARY:
        if HAS_INITIAL:
            state += tl.trans(tl.load(initial + straight, mask=both, other=0.0))
            if ROTATE:
                state2 += tl.trans(tl.load(initial + K * V + straight, mask=both, other=0.0))
    if REVERSE:
        if SPLIT and not SUMMARY:
            for later in tl.range(G - 1, g, -1):
                ratio = segment_ratio(
                    boundary, tl.minimum(later * per, chunks) + later, tl.minimum((later + 1) * per, chunks) + later,
                    H, K, wide,
                )  # fmt: skip
                summary = sums + later * (ROWS * V) + straight
                state = state * ratio[None, :] + tl.trans(tl.load(summary, mask=both, other=0.0))
                if ROTATE:
                    state2 = state2 * ratio[None, :] + tl.trans(tl.load(summary + K * V, mask=both, other=0.0))
        reference = tl.load(boundary + (last + g) * (2 * H * K), mask=wide, other=0.0)
        denominator = tl.load(boundary + (last + g) * (2 * H * K) + K, mask=wide, other=0.0)
        state *= invert(denominator)[None, :]
        if ROTATE:
            state2 *= invert(denominator)[None, :]
    else:
        if HAS_INITIAL and not SUMMARY:
            reference, denominator = start(initial_z + nh.to(tl.int64) * K + i, wide)
            state *= denominator[None, :]
            if ROTATE:
                state2 *= denominator[None, :]
        if SPLIT and not SUMMARY:
            for before in tl.range(0, g):
                at = sums_z + (nh.to(tl.int64) * G + before) * K + i
                reference, denominator, decay, take = weigh(at, reference, denominator, wide)
                summary = sums + before * (ROWS * V) + straight
                state = state * decay[None, :] + tl.trans(tl.load(summary, mask=both, other=0.0)) * take[None, :]
                if ROTATE:
                    state2 = state2 * decay[None, :]
                    state2 += tl.trans(tl.load(summary + K * V, mask=both, other=0.0)) * take[None, :]

    boundary_row = boundary + g * (2 * H * K)
    earlier = (t[None, :] <= t[:, None]).to(OPERAND)
    inside = t[:, None] >= t[None, :]
    for x in tl.range(first, last, num_stages=STAGES):
        chunk = last - 1 - (x - first) if REVERSE else x
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        tk = load_tile(k + move * K, keys, t, i, left, -float("inf"), K, PK != K, EVEN).to(tl.float32)
        tc = load_tile(c + move * V, values, t, j, left, 0.0, V, V % BC != 0, EVEN).to(OPERAND)
        top = tl.load(boundary_row + chunk * (2 * H * K), mask=wide, other=0.0)
        decay = tl.exp2((top - reference if REVERSE else reference - top) * LOG2_E)
        reference = top
        key = tl.exp2((tk - top[None, :]) * LOG2_E + SHIFT)
        tk = key.to(OPERAND)
        if ROTATE:
            position, cos, sin = load_angles(positions, chunk, t, left, i, frequency, C, K, AXES, FAST)
            tk1, tk2 = (key * cos).to(OPERAND), (key * sin).to(OPERAND)
        else:
            tk1 = tk
        state *= decay[None, :]
        if ROTATE:
            state2 *= decay[None, :]
        if REVERSE or not SUMMARY:
            tq = load_tile(q + move * K, keys, t, i, left, 0.0, K, PK != K, EVEN).to(tl.float32)
            denominator = tl.load(boundary_row + chunk * (2 * H * K) + K, mask=wide, other=0.0)
            denominators = tl.dot(earlier, tk, input_precision=PRECISION) + denominator[None, :]
            tq *= invert_tile(denominators, PRECISION != "tf32")
            if REVERSE:
                if SUMMARY:
                    q_dq = load_tile(dq + move * K, keys, t, i, left, 0.0, K, PK != K, EVEN).to(tl.float32)
                    deltas = deltas * decay + tl.sum(tq * q_dq, 0)
                tq *= scale
            if ROTATE:
                tq1, tq2 = (tq * cos).to(OPERAND), (tq * sin).to(OPERAND)
            else:
                tq1 = tq.to(OPERAND)
        if not SUMMARY:
            scores = tl.dot(tq1, tl.trans(tk1), input_precision=PRECISION)
            if ROTATE:
                scores = tl.dot(tq2, tl.trans(tk2), scores, input_precision=PRECISION)
            scores = tl.where(inside, scores, 0.0).to(OPERAND)
            if REVERSE:
                out = tl.dot(state.to(OPERAND), tl.trans(tk1), input_precision=PRECISION)
                if ROTATE:
                    out = tl.dot(state2.to(OPERAND), tl.trans(tk2), out, input_precision=PRECISION)
                out = tl.dot(tl.trans(tc), scores, out, input_precision=PRECISION)
                out = tl.trans(out)
            else:
                out = tl.dot(tq1, tl.trans(state.to(OPERAND)), input_precision=PRECISION)
                if ROTATE:
                    out = tl.dot(tq2, tl.trans(state2.to(OPERAND)), out, input_precision=PRECISION)
                out = tl.dot(scores, tc, out, input_precision=PRECISION) * scale
            store_masked(o + move * V, values, out, (t < left)[:, None] & narrow[None, :], not EVEN or V % BC != 0)
        state = tl.dot(tl.trans(tc), tq1 if REVERSE else tk1, state, input_precision=PRECISION)
        if ROTATE:
            state2 = tl.dot(tl.trans(tc), tq2 if REVERSE else tk2, state2, input_precision=PRECISION)

    if HAS_FINAL:
        # By the program of the last chunk; for an empty document by the first. A summary's goes to its segment.
        to = final + nh.to(tl.int64) * (ROWS * V)
        to_z = final_z + nh.to(tl.int64) * K
        mine = (last == chunks) & ((first < last) | (g == 0))
        if SUMMARY:
            to = sums + g * (ROWS * V)
            to_z = sums_z + (nh.to(tl.int64) * G + g) * K
            mine = g >= 0
        if mine:
            row = first if REVERSE else last
            reference = tl.load(boundary_row + row * (2 * H * K), mask=wide, other=0.0)
            denominator = tl.load(boundary_row + row * (2 * H * K) + K, mask=wide, other=0.0)
            if REVERSE:
                factor = denominator
                tl.store(to_z + i, deltas * factor, mask=wide & (block == 0))
            else:
                factor = invert(denominator)
                tl.store(to_z + i, log_sum(reference, denominator), mask=wide & (block == 0))
            tl.store(to + straight, tl.trans(state * factor[None, :]), mask=both)
            if ROTATE:
                tl.store(to + K * V + straight, tl.trans(state2 * factor[None, :]), mask=both)


@triton.jit
def keys_kernel(
    q, k, again, v, do, dq, out, initial, initial_z, end, final, final_z, sums, sums_z, boundaries, theta, dtheta,
    positions, offsets, scale, T, N, G, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PV: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr, ROTATE: tl.constexpr, AXES: tl.constexpr,
    SHARED: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """out = dq, with `initial` the initial state. A program has BC channels of one head; its state is transposed.

    REVERSE: out is the gradient of k. `initial` and `initial_z` are then the gradients of the final state `end`,
    `final` and `final_z` those of the initial one, without what the initial S itself adds to its z; `sums` are those of
    reversed summaries.
    """
    block, n, h, nh, g, begin, length, chunks, per = locate(offsets, T, N, G, H, K, BC, C, DOCUMENTS)
    first, last = tl.minimum(g * per, chunks), tl.minimum((g + 1) * per, chunks)

    t, i, j = tl.arange(0, C), block * BC + tl.arange(0, BC), tl.arange(0, PV)
    narrow, wide = i < K, j < V
    ROWS: tl.constexpr = 2 * K if ROTATE else K
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
    initial += nh.to(tl.int64) * (ROWS * V)
    end += nh.to(tl.int64) * (ROWS * V)
    sums += nh.to(tl.int64) * (G * ROWS * V)
    sums_z += nh.to(tl.int64) * (G * K) + i
    boundary = boundaries + ((begin // C + n * (1 + G)) * (2 * H) + 2 * h) * K + i
    if ROTATE:
        frequency = tl.load(theta + h * K + i, mask=narrow, other=0.0)[None, :]
        if not SHARED:
            positions += begin * AXES
        angle_sums = tl.zeros([BC], tl.float32)
        state2 = tl.zeros([PV, BC], tl.float32)

    state = tl.zeros([PV, BC], tl.float32)
    reference = tl.full([BC], NOTHING, tl.float32)
    denominator = tl.zeros([BC], tl.float32)
    delta = tl.zeros([BC], tl.float32)
    if HAS_INITIAL:
        state += tl.load(initial + straight, mask=both, other=0.0)
        if ROTATE:
            state2 += tl.load(initial + K * V + straight, mask=both, other=0.0)
        if REVERSE:
            delta += tl.sum(state * tl.load(end + straight, mask=both, other=0.0), 0)
            if ROTATE:
                delta += tl.sum(state2 * tl.load(end + K * V + straight, mask=both, other=0.0), 0)
            delta -= tl.load(initial_z + nh.to(tl.int64) * K + i, mask=narrow, other=0.0)
        else:
            reference, denominator = start(initial_z + nh.to(tl.int64) * K + i, narrow)
            state *= denominator[None, :]
            if ROTATE:
                state2 *= denominator[None, :]
    if REVERSE:
        if SPLIT:
            for later in tl.range(G - 1, g, -1):
                ratio = segment_ratio(
                    boundary, tl.minimum(later * per, chunks) + later, tl.minimum((later + 1) * per, chunks) + later,
                    H, K, narrow,
                )  # fmt: skip
                summary = sums + later * (ROWS * V) + straight
                state = state * ratio[None, :] + tl.load(summary, mask=both, other=0.0)
                if ROTATE:
                    state2 = state2 * ratio[None, :] + tl.load(summary + K * V, mask=both, other=0.0)
                delta = delta * ratio + tl.load(sums_z + later * K, mask=narrow, other=0.0)
        reference = tl.load(boundary + (last + g) * (2 * H * K), mask=narrow, other=0.0)
        denominator = tl.load(boundary + (last + g) * (2 * H * K) + K, mask=narrow, other=0.0)
        state *= invert(denominator)[None, :]
        delta *= invert(denominator)
        if ROTATE:
            state2 *= invert(denominator)[None, :]
    elif SPLIT:
        for before in tl.range(0, g):
            reference, denominator, decay, take = weigh(sums_z + before * K, reference, denominator, narrow)
            summary = sums + before * (ROWS * V) + straight
            state = state * decay[None, :] + tl.load(summary, mask=both, other=0.0) * take[None, :]
            if ROTATE:
                state2 = state2 * decay[None, :]
                state2 += tl.load(summary + K * V, mask=both, other=0.0) * take[None, :]

    earlier = (t[:, None] >= t[None, :]).to(OPERAND)
    later = (t[:, None] <= t[None, :]).to(OPERAND)
    inside = (t[:, None] <= t[None, :]) if REVERSE else (t[:, None] >= t[None, :])
    for x in tl.range(first, last, num_stages=STAGES):
        chunk = last - 1 - (x - first) if REVERSE else x
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        at = boundary + (chunk + g) * (2 * H * K)
        tk = load_tile(k + move * K, keys, t, i, left, -float("inf"), K, K % BC != 0, EVEN).to(tl.float32)
        tv = load_tile(v + move * V, values, t, j, left, 0.0, V, PV != V, EVEN).to(OPERAND)
        tdo = load_tile(do + move * V, values, t, j, left, 0.0, V, PV != V, EVEN).to(OPERAND)
        top = tl.load(at, mask=narrow, other=0.0)
        decay = tl.exp2((top - reference if REVERSE else reference - top) * LOG2_E)
        denominator = tl.load(at + K, mask=narrow, other=0.0)
        reference = top
        key = tl.exp2((tk - top[None, :]) * LOG2_E + SHIFT)
        tk = key.to(OPERAND)
        inverse = invert_tile(
            tl.dot(earlier, tk, input_precision=PRECISION) + denominator[None, :], PRECISION != "tf32"
        )
        if ROTATE:
            position, cos, sin = load_angles(positions, chunk, t, left, i, frequency, C, K, AXES, FAST)
        if REVERSE or ROTATE:
            query = load_tile(q + move * K, keys, t, i, left, 0.0, K, K % BC != 0, EVEN).to(tl.float32) * inverse
        state *= decay[None, :]
        if ROTATE:
            state2 *= decay[None, :]
        if REVERSE:
            q_dq = load_tile(dq + move * K, keys, t, i, left, 0.0, K, K % BC != 0, EVEN).to(tl.float32)
            q_dq *= query
            delta *= decay
            query *= scale
            ta, tb, factors = tv, tdo, query
        else:
            ta, tb, factors = tdo, tv, key
        scores = tl.dot(ta, tl.trans(tb), input_precision=PRECISION)
        scores = tl.where(inside, scores, 0.0).to(OPERAND)
        if ROTATE:
            tx, tx2 = (factors * cos).to(OPERAND), (factors * sin).to(OPERAND)
        else:
            tx = factors.to(OPERAND)
        grad = tl.dot(ta, state.to(OPERAND), input_precision=PRECISION)
        grad = tl.dot(scores, tx, grad, input_precision=PRECISION)
        state = tl.dot(tl.trans(tb), tx, state, input_precision=PRECISION)
        if ROTATE:
            grad2 = tl.dot(ta, state2.to(OPERAND), input_precision=PRECISION)
            grad2 = tl.dot(scores, tx2, grad2, input_precision=PRECISION)
            state2 = tl.dot(tl.trans(tb), tx2, state2, input_precision=PRECISION)
            turned = grad2 * cos - grad * sin
            if REVERSE:
                angle_sums += tl.sum(key * turned * position, 0)
            else:
                angle_sums += tl.sum(query * turned * (position * scale), 0)
            grad = grad * cos + grad2 * sin
        if REVERSE:
            grad = tl.dot(later, (-q_dq).to(OPERAND), grad, input_precision=PRECISION)
            # `again` is k: the tile of one load would lie unswizzled in shared memory, for its two layouts.
            tk = load_tile(again + move * K, keys, t, i, left, -float("inf"), K, K % BC != 0, EVEN).to(tl.float32)
            key = tl.exp2((tk - top[None, :]) * LOG2_E + SHIFT)
            grad = key * (grad - delta[None, :])
            delta += tl.sum(q_dq, 0)
        else:
            grad = grad * inverse * scale
        store_masked(out + move * K, keys, grad, (t < left)[:, None] & narrow[None, :], not EVEN or K % BC != 0)

    if ROTATE:
        tl.store(dtheta + (nh.to(tl.int64) * G + g) * K + i, angle_sums, mask=narrow)
    if REVERSE:
        if HAS_FINAL and g == 0:
            denominator = tl.load(boundary + K, mask=narrow, other=0.0)
            to = final + nh.to(tl.int64) * (ROWS * V) + straight
            tl.store(to, state * denominator[None, :], mask=both)
            if ROTATE:
                tl.store(to + K * V, state2 * denominator[None, :], mask=both)
            tl.store(final_z + nh.to(tl.int64) * K + i, -delta * denominator, mask=narrow)


@triton.jit
def sum_products_kernel(
    q, do, sums, theta, positions, offsets, scale, T, N, G, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, PK: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, ROTATE: tl.constexpr,
    AXES: tl.constexpr, SHARED: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """sums [N, H, G, K or 2K, V] = scale q^T do of each segment, in BC columns of V per program."""
    block, n, h, nh, g, begin, length, chunks, per = locate(offsets, T, N, G, H, V, BC, C, DOCUMENTS)
    t, i, j = tl.arange(0, C), tl.arange(0, PK), block * BC + tl.arange(0, BC)
    ROWS: tl.constexpr = 2 * K if ROTATE else K
    q += (begin * H + h) * K
    do += (begin * H + h) * V
    state = tl.zeros([PK, BC], tl.float32)
    if ROTATE:
        state2 = tl.zeros([PK, BC], tl.float32)
        frequency = tl.load(theta + h * K + i, mask=i < K, other=0.0)[None, :]
        if not SHARED:
            positions += begin * AXES
    for chunk in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        tq = load_tile(q + move * K, t[:, None] * (H * K) + i[None, :], t, i, left, 0.0, K, PK != K, EVEN)
        tc = load_tile(do + move * V, t[:, None] * (H * V) + j[None, :], t, j, left, 0.0, V, V % BC != 0, EVEN)
        tc = tc.to(OPERAND)
        if SILU:
            tq = tq.to(tl.float32)
            tq *= tl.sigmoid(tq)
        if ROTATE:
            position, cos, sin = load_angles(positions, chunk, t, left, i, frequency, C, K, AXES, FAST)
            query = tq.to(tl.float32)
            tq = query * cos
            state2 = tl.dot(tl.trans((query * sin).to(OPERAND)), tc, state2, input_precision=PRECISION)
        state = tl.dot(tl.trans(tq.to(OPERAND)), tc, state, input_precision=PRECISION)
    to = sums + (nh.to(tl.int64) * G + g) * (ROWS * V) + i[:, None] * V + j[None, :]
    mask = (i < K)[:, None] & (j < V)[None, :]
    tl.store(to, state * scale, mask=mask)
    if ROTATE:
        tl.store(to + K * V, state2 * scale, mask=mask)


@triton.jit
def combine_kernel(
    sums, sums_z, S, z, dS, dz, out, out_z, G, K: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, PV: tl.constexpr,
    ROTATE: tl.constexpr, BACKWARD: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """Joins the sums of segments, for BR channels per program.

    Forward: S and log-sum z of all, into out and out_z. BACKWARD: out is the gradient to S (dS and what o gives), out_z
    what the normalisation takes from the gradient of each logit.
    """
    BLOCKS: tl.constexpr = (K + BR - 1) // BR
    nh = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i, j = (tl.program_id(0) % BLOCKS) * BR + tl.arange(0, BR), tl.arange(0, PV)
    ROWS: tl.constexpr = 2 * K if ROTATE else K
    channel = i < K
    mask = channel[:, None] & (j < V)[None, :]
    position = i[:, None] * V + j[None, :]
    sums += nh * G * (ROWS * V)
    sums_z += nh * G * K
    total = tl.zeros([BR, PV], tl.float32)
    total2 = tl.zeros([BR, PV], tl.float32)
    peak = tl.full([BR], NOTHING, tl.float32)
    denominator = tl.zeros([BR], tl.float32)
    if BACKWARD and HAS_INITIAL:
        total += tl.load(dS + nh * (ROWS * V) + position, mask=mask, other=0.0)
        if ROTATE:
            total2 += tl.load(dS + nh * (ROWS * V) + K * V + position, mask=mask, other=0.0)
    if not BACKWARD:
        for g in tl.range(0, G):
            peak = tl.maximum(peak, tl.load(sums_z + g * K + i, mask=channel, other=-float("inf")))
        for g in tl.range(0, G):
            denominator += tl.exp2((tl.load(sums_z + g * K + i, mask=channel, other=-float("inf")) - peak) * LOG2_E)
    factor = invert(denominator)
    for g in tl.range(0, G):
        one = tl.load(sums + g * (ROWS * V) + position, mask=mask, other=0.0)
        if ROTATE:
            two = tl.load(sums + g * (ROWS * V) + K * V + position, mask=mask, other=0.0)
        if not BACKWARD:
            weight = tl.load(sums_z + g * K + i, mask=channel, other=-float("inf"))
            weight = tl.exp2((weight - peak) * LOG2_E) * factor
            one *= weight[:, None]
            if ROTATE:
                two *= weight[:, None]
        total += one
        if ROTATE:
            total2 += two
    tl.store(out + nh * (ROWS * V) + position, total, mask=mask)
    if ROTATE:
        tl.store(out + nh * (ROWS * V) + K * V + position, total2, mask=mask)
    if BACKWARD:
        value = tl.sum(total * tl.load(S + nh * (ROWS * V) + position, mask=mask, other=0.0), 1)
        if ROTATE:
            value += tl.sum(total2 * tl.load(S + nh * (ROWS * V) + K * V + position, mask=mask, other=0.0), 1)
        if HAS_INITIAL:
            value -= tl.load(dz + nh * K + i, mask=channel, other=0.0)
    else:
        value = tl.where(denominator == 0, -float("inf"), peak + tl.log(tl.where(denominator == 0, 1.0, denominator)))
    tl.store(out_z + nh * K + i, value, mask=channel)


@triton.jit
def use_values_kernel(
    q, k, o, S, z, theta, positions, offsets, scale, T, N, G, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, PK: tl.constexpr, BC: tl.constexpr, SOFTMAX: tl.constexpr, SILU: tl.constexpr,
    ROTATE: tl.constexpr, AXES: tl.constexpr, SHARED: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """o = scale q S, or (SOFTMAX) dv = softmax(k) S with S the gradient to the state. BC columns of V per program."""
    block, n, h, nh, g, begin, length, chunks, per = locate(offsets, T, N, G, H, V, BC, C, DOCUMENTS)
    t, i, j = tl.arange(0, C), tl.arange(0, PK), block * BC + tl.arange(0, BC)
    ROWS: tl.constexpr = 2 * K if ROTATE else K
    x = (k if SOFTMAX else q) + (begin * H + h) * K
    o += (begin * H + h) * V
    mask = (i < K)[:, None] & (j < V)[None, :]
    S += nh.to(tl.int64) * (ROWS * V) + i[:, None] * V + j[None, :]
    state = tl.load(S, mask=mask, other=0.0).to(OPERAND)
    if ROTATE:
        state2 = tl.load(S + K * V, mask=mask, other=0.0).to(OPERAND)
        frequency = tl.load(theta + h * K + i, mask=i < K, other=0.0)[None, :]
        if not SHARED:
            positions += begin * AXES
    if SOFTMAX:
        shift = tl.maximum(tl.load(z + nh.to(tl.int64) * K + i, mask=i < K, other=0.0), NOTHING)
    for chunk in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        tx = load_tile(x + move * K, t[:, None] * (H * K) + i[None, :], t, i, left, -float("inf") if SOFTMAX else 0.0,
                       K, PK != K, EVEN)  # fmt: skip
        if SOFTMAX:
            tx = tl.exp2((tx.to(tl.float32) - shift[None, :]) * LOG2_E)
        if SILU:
            tx = tx.to(tl.float32)
            tx *= tl.sigmoid(tx)
        if ROTATE:
            position, cos, sin = load_angles(positions, chunk, t, left, i, frequency, C, K, AXES, FAST)
            both = tx.to(tl.float32)
            out = tl.dot((both * cos).to(OPERAND), state, input_precision=PRECISION)
            out = tl.dot((both * sin).to(OPERAND), state2, out, input_precision=PRECISION)
        else:
            out = tl.dot(tx.to(OPERAND), state, input_precision=PRECISION)
        to = o + move * V + t[:, None] * (H * V)
        store_masked(to, j[None, :], out * scale, (t < left)[:, None] & (j < V)[None, :], not EVEN or V % BC != 0)


@triton.jit
def use_keys_kernel(
    x, k, out, S, z, delta, theta, dtheta, positions, offsets, scale, T, N, G, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, PV: tl.constexpr, BC: tl.constexpr, SOFTMAX: tl.constexpr, SILU: tl.constexpr,
    ROTATE: tl.constexpr, AXES: tl.constexpr, SHARED: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dq = scale x S^T from x = do; or (SOFTMAX) the gradient of k from x = v, S the gradient to the state.

    BC columns of K per program. For dq, `k` is q, which the gradient of the angles and of SILU needs.
    """
    block, n, h, nh, g, begin, length, chunks, per = locate(offsets, T, N, G, H, K, BC, C, DOCUMENTS)
    t, i, j = tl.arange(0, C), block * BC + tl.arange(0, BC), tl.arange(0, PV)
    narrow, wide = i < K, j < V
    ROWS: tl.constexpr = 2 * K if ROTATE else K
    x += (begin * H + h) * V
    k += (begin * H + h) * K
    out += (begin * H + h) * K
    keys = t[:, None] * (H * K) + i[None, :]
    mask = narrow[:, None] & wide[None, :]
    S += nh.to(tl.int64) * (ROWS * V) + i[:, None] * V + j[None, :]
    state = tl.load(S, mask=mask, other=0.0).to(OPERAND)
    if ROTATE:
        state2 = tl.load(S + K * V, mask=mask, other=0.0).to(OPERAND)
        frequency = tl.load(theta + h * K + i, mask=narrow, other=0.0)[None, :]
        if not SHARED:
            positions += begin * AXES
        angle_sums = tl.zeros([BC], tl.float32)
    if SOFTMAX:
        shift = tl.maximum(tl.load(z + nh.to(tl.int64) * K + i, mask=narrow, other=0.0), NOTHING)
        delta = tl.load(delta + nh.to(tl.int64) * K + i, mask=narrow, other=0.0)
    for chunk in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = begin * 0 + chunk * C * H
        left = length - chunk * C
        tx = load_tile(x + move * V, t[:, None] * (H * V) + j[None, :], t, j, left, 0.0, V, PV != V, EVEN).to(OPERAND)
        grad = tl.dot(tx, tl.trans(state), input_precision=PRECISION)
        if SOFTMAX or ROTATE or SILU:
            key = load_tile(k + move * K, keys, t, i, left, -float("inf") if SOFTMAX else 0.0, K, K % BC != 0, EVEN)
            key = key.to(tl.float32)
            if SOFTMAX:
                key = tl.exp2((key - shift[None, :]) * LOG2_E)
            if SILU:
                open_ = tl.sigmoid(key)
                slope = open_ * (1.0 + key * (1.0 - open_))
                key *= open_
        if ROTATE:
            position, cos, sin = load_angles(positions, chunk, t, left, i, frequency, C, K, AXES, FAST)
            grad2 = tl.dot(tx, tl.trans(state2), input_precision=PRECISION)
            angle_sums += tl.sum(key * (grad2 * cos - grad * sin) * position, 0)
            grad = grad * cos + grad2 * sin
        if SOFTMAX:
            grad = key * (grad - delta[None, :])
        elif SILU:
            grad *= slope * scale
        else:
            grad *= scale
        store_masked(out + move * K, keys, grad, (t < left)[:, None] & narrow[None, :], not EVEN or K % BC != 0)
    if ROTATE:
        tl.store(dtheta + (nh.to(tl.int64) * G + g) * K + i, angle_sums * scale, mask=narrow)
