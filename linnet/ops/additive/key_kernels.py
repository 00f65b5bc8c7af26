"""The Triton kernel of additive decay attention whose programs own key channels: dq, and the gradient of the logits.

Names are those of `linnet.ops.additive.kernels`; tiles of keys and queries are [channel, token] here.
"""

import triton
import triton.language as tl

from linnet.ops.additive.kernels import (
    LOG2_E,
    NOTHING,
    SHIFT,
    invert,
    invert_tile,
    load_tile,
    segment_ratio,
    span,
    start,
    weigh,
)
from linnet.ops.device import cosine_sine


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
