"""The Triton kernels of the selective scan; `linnet.ops.selective_scan.triton` says what they are for and starts them.

A program is one warp and walks a segment of one sequence for BD channels, L tokens read at a time. The N states of a
channel are spread over NG threads, NB in each: state g NB + j is element [., g] of the j-th of NB tensors [BD, NG].
There are S sequences or documents of G segments, PER of them with the parameters of one model. The states before every
R chunks of L tokens are kept for the backward.
"""

import triton
import triton.language as tl

from linnet.ops.device import LOG2_E


@triton.jit
def _segment(offsets, T, G, PER, D: tl.constexpr, BD: tl.constexpr, KEEP: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Of this program: its block of channels, segment, sequence and model, the tokens of its segment, and the first
    slot of the segment among the states that are kept, those before every KEEP tokens."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    block, segment = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS) % G
    n = tl.program_id(0) // (G * BLOCKS)
    model = n // PER
    if DOCUMENTS:
        first = tl.minimum(tl.maximum(tl.load(offsets + n % PER), 0), T)
        last = tl.maximum(tl.minimum(tl.load(offsets + n % PER + 1), T), first)
        slot = model * (T // KEEP + PER) + first // KEEP + n % PER
        start, end = model * T + first, model * T + last
    else:
        slot = n * tl.cdiv(T, KEEP)
        start, end = n * T, n * T + T
    size = tl.cdiv(tl.cdiv(end - start, G), KEEP) * KEEP
    begin = tl.minimum(start + segment * size, end)
    return block, segment, n, model, begin, tl.minimum(begin + size, end), slot + (begin - start) // KEEP


@triton.jit
def _channels(block, BD: tl.constexpr, NG: tl.constexpr):
    """[BD, NG]: the channel of each element; and [1, NG]: the group of states."""
    d = block * BD + tl.arange(0, BD)[:, None]
    return tl.broadcast_to(d, [BD, NG]), tl.arange(0, NG)[None, :]


@triton.jit
def _load(pointer, row, d, valid, D: tl.constexpr, MASKED: tl.constexpr):
    """[BD, NG] of one token, in the dtype of memory; 0 where there is none."""
    if MASKED:
        return tl.load(pointer + row * D + d, mask=(d < D) & valid, other=0.0)
    return tl.load(pointer + row * D + d)


@triton.jit
def _store(pointer, row, value, d, g, valid, D: tl.constexpr, NG: tl.constexpr, MASKED: tl.constexpr):
    """Writes a value that all groups of states have alike."""
    value = value.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + row * D + d, value, mask=(d < D) & valid & (g == 0))
    elif NG > 1:
        tl.store(pointer + row * D + d, value, mask=(d >= 0) & (g == 0))
    else:
        tl.store(pointer + row * D + d, value)


@triton.jit
def _halves(word, DTYPE: tl.constexpr):
    """The two numbers of 16 bits in one of 32, lower bits first, float32."""
    if DTYPE == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
    return low.to(DTYPE, bitcast=True).to(tl.float32), high.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _load_row(pointer, row, g, valid, N: tl.constexpr, NG: tl.constexpr, NB: tl.constexpr, MASKED: tl.constexpr):
    """NB of [1, NG] of a token's B or C, float32; 0 where there is none."""
    values = ()
    if NB % 2 == 0 and NG * NB == N and pointer.dtype.element_ty.primitive_bitwidth == 16:
        # Two or four in one load: single ones would be as many instructions as half of the arithmetic.
        EACH: tl.constexpr = 4 if NB % 4 == 0 else 2
        words = pointer.to(tl.pointer_type(tl.int64 if EACH == 4 else tl.int32), bitcast=True) + row * (N // EACH)
        for i in tl.static_range(NB // EACH):
            place = g * (NB // EACH) + i
            if MASKED:
                word = tl.load(words + place, mask=valid & (g < NG), other=0)
            else:
                word = tl.load(words + place)
            for j in tl.static_range(EACH // 2):
                values = values + _halves((word >> (32 * j)).to(tl.int32), pointer.dtype.element_ty)
    else:
        for j in tl.static_range(NB):
            n = g * NB + j
            if MASKED or NG * NB != N:
                value = tl.load(pointer + row * N + n, mask=(n < N) & valid, other=0.0)
            else:
                value = tl.load(pointer + row * N + n)
            values = values + (value.to(tl.float32),)
    return values


@triton.jit
def _load_states(pointer, base, d, g, STRIDE_D: tl.constexpr, STRIDE_N: tl.constexpr, D: tl.constexpr,
                 N: tl.constexpr, NB: tl.constexpr):  # fmt: skip
    """NB of [BD, NG], float32; 0 where there is no channel or state."""
    states = ()
    for j in tl.static_range(NB):
        n = g * NB + j
        value = tl.load(pointer + base + d * STRIDE_D + n * STRIDE_N, mask=(d < D) & (n < N), other=0.0)
        states = states + (value.to(tl.float32),)
    return states


@triton.jit
def _store_states(pointer, base, states, d, g, STRIDE_D: tl.constexpr, STRIDE_N: tl.constexpr, D: tl.constexpr,
                  N: tl.constexpr, NB: tl.constexpr):  # fmt: skip
    for j in tl.static_range(NB):
        n = g * NB + j
        tl.store(pointer + base + d * STRIDE_D + n * STRIDE_N, states[j], mask=(d < D) & (n < N))


@triton.jit
def _zeros(like, NB: tl.constexpr):
    states = ()
    for _ in tl.static_range(NB):
        states = states + (tl.zeros_like(like),)
    return states


@triton.jit
def _over_states(x, NG: tl.constexpr):
    """The sum over the groups of states, in all of them."""
    if NG > 1:
        return tl.broadcast_to(tl.sum(x, 1)[:, None], x.shape)
    return x


@triton.jit
def _enter(entry, sums, totals, rates, n, segment, G, d, g, D: tl.constexpr, N: tl.constexpr, NB: tl.constexpr,
           HAS_ENTRY: tl.constexpr, SPLIT: tl.constexpr, REVERSE: tl.constexpr):  # fmt: skip
    """What enters a segment: what enters the sequence, and what the segments passed made of it and added to it."""
    if HAS_ENTRY:
        state = _load_states(entry, n.to(tl.int64) * (D * N), d, g, N, 1, D, N, NB)
    else:
        state = _zeros(rates[0], NB)
    if SPLIT:
        passed = segment
        if REVERSE:
            passed = G - 1 - segment
        for i in tl.range(0, passed):
            k = i
            if REVERSE:
                k = G - 1 - i
            place = (n * G + k).to(tl.int64)
            total = tl.load(totals + place * D + d, mask=d < D, other=0.0) * LOG2_E
            ends = _load_states(sums, place * (D * N), d, g, 1, D, D, N, NB)
            new = ()
            for j in tl.static_range(NB):
                new = new + (tl.exp2(total * rates[j]) * state[j] + ends[j],)
            state = new
    return state


@triton.jit
def _run(x, delta, B, rates, state, t, stop, d, g, D: tl.constexpr, N: tl.constexpr, NG: tl.constexpr,
         NB: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The state after L tokens from t."""
    row = t.to(tl.int64)
    xs, deltas = (), ()
    for k in tl.static_range(L):
        xs = xs + (_load(x, row + k, d, t + k < stop, D, MASKED),)
        deltas = deltas + (_load(delta, row + k, d, t + k < stop, D, MASKED),)
    for k in tl.static_range(L):
        step = deltas[k].to(tl.float32)
        written = step * xs[k].to(tl.float32)
        b = _load_row(B, row + k, g, t + k < stop, N, NG, NB, MASKED)
        new = ()
        for j in tl.static_range(NB):
            new = new + (tl.exp2(step * LOG2_E * rates[j]) * state[j] + written * b[j],)
        state = new
    return state


@triton.jit
def summarise_kernel(
    x, delta, A, B, sums, totals, offsets, T, G, PER, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    NG: tl.constexpr, NB: tl.constexpr, L: tl.constexpr, R: tl.constexpr, REVERSE: tl.constexpr,
    DOCUMENTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What leaves a segment that zero enters, [S, G, N, D], and its sum of delta, [S, G, D].

    Forward x and B; in reverse, where gradients of states leave, dy and C in their places.
    """
    block, segment, seq, model, begin, stop, _ = _segment(offsets, T, G, PER, D, BD, L * R, DOCUMENTS)
    d, g = _channels(block, BD, NG)
    rates = _load_states(A, model.to(tl.int64) * (D * N), d, g, N, 1, D, N, NB)
    state, total = _zeros(rates[0], NB), tl.zeros_like(rates[0])
    for i in tl.range(0, tl.cdiv(stop - begin, L)):
        t = begin + i * L
        if REVERSE:
            t = begin + (tl.cdiv(stop - begin, L) - 1 - i) * L
        row = t.to(tl.int64)
        xs, deltas = (), ()
        for k in tl.static_range(L):
            xs = xs + (_load(x, row + k, d, t + k < stop, D, MASKED),)
            deltas = deltas + (_load(delta, row + k, d, t + k < stop, D, MASKED),)
        for m in tl.static_range(L - 1 if REVERSE else 0, -1 if REVERSE else L, -1 if REVERSE else 1):
            step = deltas[m].to(tl.float32)
            value = xs[m].to(tl.float32)
            total += step
            b = _load_row(B, row + m, g, t + m < stop, N, NG, NB, MASKED)
            new = ()
            for j in tl.static_range(NB):
                decay = tl.exp2(step * LOG2_E * rates[j])
                if REVERSE:
                    new = new + (decay * (b[j] * value + state[j]),)
                else:
                    new = new + (decay * state[j] + step * value * b[j],)
            state = new
    place = (seq * G + segment).to(tl.int64)
    _store_states(sums, place * (D * N), state, d, g, 1, D, D, N, NB)
    tl.store(totals + place * D + d, total, mask=(d < D) & (g == 0))


@triton.jit
def forward_kernel(
    x, delta, A, B, C, skip, y, entry, leave, starts, sums, totals, offsets, T, G, PER, D: tl.constexpr,
    N: tl.constexpr, BD: tl.constexpr, NG: tl.constexpr, NB: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    HAS_SKIP: tl.constexpr, HAS_ENTRY: tl.constexpr, SPLIT: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """y, the final states, and the states to keep."""
    block, segment, seq, model, begin, stop, slot = _segment(offsets, T, G, PER, D, BD, L * R, DOCUMENTS)
    d, g = _channels(block, BD, NG)
    rates = _load_states(A, model.to(tl.int64) * (D * N), d, g, N, 1, D, N, NB)
    weight = tl.zeros_like(rates[0])
    if HAS_SKIP:
        weight = tl.load(skip + model.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    state = _enter(entry, sums, totals, rates, seq, segment, G, d, g, D, N, NB, HAS_ENTRY, SPLIT, False)
    for i in tl.range(0, tl.cdiv(stop - begin, L)):
        t = begin + i * L
        row = t.to(tl.int64)
        if i % R == 0:
            _store_states(starts, (slot + i // R).to(tl.int64) * (D * N), state, d, g, 1, D, D, N, NB)
        xs, deltas = (), ()
        for k in tl.static_range(L):
            xs = xs + (_load(x, row + k, d, t + k < stop, D, MASKED),)
            deltas = deltas + (_load(delta, row + k, d, t + k < stop, D, MASKED),)
        for k in tl.static_range(L):
            step = deltas[k].to(tl.float32)
            value = xs[k].to(tl.float32)
            total = tl.zeros_like(step)
            b = _load_row(B, row + k, g, t + k < stop, N, NG, NB, MASKED)
            c = _load_row(C, row + k, g, t + k < stop, N, NG, NB, MASKED)
            new = ()
            for j in tl.static_range(NB):
                decay = tl.exp2(step * LOG2_E * rates[j])
                after = decay * state[j] + step * value * b[j]
                total += c[j] * after
                new = new + (after,)
            state = new
            out = _over_states(total, NG)
            if HAS_SKIP:
                out += weight * value
            _store(y, row + k, out, d, g, t + k < stop, D, NG, MASKED)
    if segment == G - 1:
        _store_states(leave, seq.to(tl.int64) * (D * N), state, d, g, N, 1, D, N, NB)


@triton.jit
def backward_kernel(
    x, delta, A, B, C, skip, dy, starts, entry, leave, dx, ddelta, dA, dB, dC, dskip, sums, totals, held, offsets,
    tokens, T, G, PER, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, NG: tl.constexpr, NB: tl.constexpr,
    L: tl.constexpr, R: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_ENTRY: tl.constexpr, SPLIT: tl.constexpr,
    DOCUMENTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """All gradients. `entry` is that of the final state, `leave` that of the initial one.

    Those of the parameters are sums of a program, dA [S, G, N, D] and dskip [S, G, D]; those of B and C sums of a block
    of channels, [blocks, tokens, N]. `held` is a program's own, [programs, R, N, BD].
    """
    block, segment, seq, model, begin, stop, slot = _segment(offsets, T, G, PER, D, BD, L * R, DOCUMENTS)
    d, g = _channels(block, BD, NG)
    rates = _load_states(A, model.to(tl.int64) * (D * N), d, g, N, 1, D, N, NB)
    weight, dweight = tl.zeros_like(rates[0]), tl.zeros_like(rates[0])
    if HAS_SKIP:
        weight = tl.load(skip + model.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    drates = _zeros(rates[0], NB)
    h = _enter(entry, sums, totals, rates, seq, segment, G, d, g, D, N, NB, HAS_ENTRY, SPLIT, True)
    chunks = tl.cdiv(stop - begin, L)
    held += tl.program_id(0).to(tl.int64) * (R * BD * N)
    for i in tl.range(0, chunks):
        c = chunks - 1 - i
        t = begin + c * L
        row = t.to(tl.int64)
        kept = (slot + c // R).to(tl.int64) * (D * N)
        if R > 1:
            if (i == 0) | (c % R == R - 1):
                # The states before each of the next R chunks, from those that were kept.
                state = _load_states(starts, kept, d, g, 1, D, D, N, NB)
                for r in tl.range(0, c % R + 1):
                    _store_states(held, r * (BD * N), state, d - block * BD, g, 1, BD, BD, N, NB)
                    first = begin + (c - c % R + r) * L
                    state = _run(x, delta, B, rates, state, first, stop, d, g, D, N, NG, NB, L, MASKED)
                tl.debug_barrier()
        xs, deltas, dys = (), (), ()
        for k in tl.static_range(L):
            xs = xs + (_load(x, row + k, d, t + k < stop, D, MASKED),)
            deltas = deltas + (_load(delta, row + k, d, t + k < stop, D, MASKED),)
            dys = dys + (_load(dy, row + k, d, t + k < stop, D, MASKED),)
        # The states again, kept with their decays: states[k NB + j] enters token k.
        if R > 1:
            states = _load_states(held, (c % R) * (BD * N), d - block * BD, g, 1, BD, BD, N, NB)
        else:
            states = _load_states(starts, kept, d, g, 1, D, D, N, NB)
        decays = ()
        for k in tl.static_range(L):
            step = deltas[k].to(tl.float32)
            written = step * xs[k].to(tl.float32)
            b = _load_row(B, row + k, g, t + k < stop, N, NG, NB, MASKED)
            for j in tl.static_range(NB):
                decay = tl.exp2(step * LOG2_E * rates[j])
                decays = decays + (decay,)
                states = states + (decay * states[k * NB + j] + written * b[j],)
        for m in tl.static_range(L - 1, -1, -1):
            step = deltas[m].to(tl.float32)
            value = xs[m].to(tl.float32)
            dout = dys[m].to(tl.float32)
            read, turned = tl.zeros_like(step), tl.zeros_like(step)
            place = block.to(tl.int64) * tokens + row + m
            b = _load_row(B, row + m, g, t + m < stop, N, NG, NB, MASKED)
            c_ = _load_row(C, row + m, g, t + m < stop, N, NG, NB, MASKED)
            new, new_rates = (), ()
            for j in tl.static_range(NB):
                n = g * NB + j
                gradient = c_[j] * dout + h[j]
                there = (n < N) & (t + m < stop)
                tl.store(dC + place * N + n, tl.sum(dout * states[(m + 1) * NB + j], 0)[None, :], mask=there)
                tl.store(dB + place * N + n, tl.sum(step * value * gradient, 0)[None, :], mask=there)
                read += b[j] * gradient
                before = decays[m * NB + j] * gradient
                found = before * states[m * NB + j]  # the gradient of delta A
                turned += rates[j] * found
                new_rates = new_rates + (drates[j] + step * found,)
                new = new + (before,)
            h, drates = new, new_rates
            read, turned = _over_states(read, NG), _over_states(turned, NG)
            dvalue = step * read
            if HAS_SKIP:
                dvalue += weight * dout
                dweight += value * dout
            _store(dx, row + m, dvalue, d, g, t + m < stop, D, NG, MASKED)
            _store(ddelta, row + m, value * read + turned, d, g, t + m < stop, D, NG, MASKED)
    if segment == 0:
        _store_states(leave, seq.to(tl.int64) * (D * N), h, d, g, N, 1, D, N, NB)
    place = (seq * G + segment).to(tl.int64)
    _store_states(dA, place * (D * N), drates, d, g, 1, D, D, N, NB)
    if HAS_SKIP:
        tl.store(dskip + place * D + d, dweight, mask=(d < D) & (g == 0))
