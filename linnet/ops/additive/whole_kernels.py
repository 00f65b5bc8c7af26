"""The Triton kernels of additive decay attention without causality: k = softmax_t(u), S = k^T v, o = q S.

Sums over the sequence are taken in segments (those of k^T v by the summaries of `kernels.values_kernel`), joined by
`combine_kernel`, and used in one more pass: `use_values_kernel` for o and dv, `use_keys_kernel` for dq and the gradient
of the logits. Names are those of `linnet.ops.additive.kernels`.
"""

import triton
import triton.language as tl

from linnet.ops.additive.kernels import LOG2_E, NOTHING, load_tile, span
from linnet.ops.device import cosine_sine


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
