"""The Triton kernels of the modal convolution; `linnet.ops.modal.triton` says what they compute and launches them.

A program is one warp: a thread owns a channel with all its modes, as K vectors of 4, and walks a segment of a sequence
in registers, UNROLL tokens read ahead at a time. There are N sequences or documents of G segments, and programs for
each block of channels and, where one has not all modes, each part of the modes.
"""

import triton
import triton.language as tl

BD = tl.constexpr(32)  # channels a program
UNIT = tl.constexpr(32)  # tokens of a segment are a multiple, but for the last one


@triton.jit
def _place(N, G, D: tl.constexpr, K: tl.constexpr):
    """Of this program: the channels, the first mode, the sequence and the segment."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    d = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    segment = tl.program_id(0) // BLOCKS
    part = segment // (N * G)
    segment -= part * (N * G)
    return d, part * (4 * K), segment // G, segment % G


@triton.jit
def _segment(offsets, T, n, g, G, DOCUMENTS: tl.constexpr):
    """The row of [B*T] where sequence n begins, its length, the first and last token of its segment g and the length of
    a segment."""
    begin, end = n.to(tl.int64) * T, n.to(tl.int64) * T + T
    if DOCUMENTS:
        begin = tl.minimum(tl.maximum(tl.load(offsets + n), 0), T).to(tl.int64)
        end = tl.maximum(tl.minimum(tl.load(offsets + n + 1), T), begin).to(tl.int64)
    length = (end - begin).to(tl.int32)
    size = tl.cdiv(tl.cdiv(length, G), UNIT) * UNIT
    return begin, length, tl.minimum(g * size, length), tl.minimum((g + 1) * size, length), size


@triton.jit
def _load_modes(pointer, base, d, D: tl.constexpr, E: tl.constexpr, FIRST, K: tl.constexpr, OTHER):
    """Modes FIRST to FIRST + 4 K of [D, E] at `base`, as K of [BD, 4]; OTHER where there is none."""
    modes = ()
    for k in tl.static_range(K):
        m = FIRST + 4 * k + tl.arange(0, 4)[None, :]
        value = tl.load(pointer + base + d[:, None] * E + m, mask=(d[:, None] < D) & (m < E), other=OTHER)
        modes = modes + (value.to(tl.float32),)
    return modes


@triton.jit
def _store_modes(pointer, base, modes, d, D: tl.constexpr, E: tl.constexpr, FIRST, K: tl.constexpr):
    for k in tl.static_range(K):
        m = FIRST + 4 * k + tl.arange(0, 4)[None, :]
        tl.store(pointer + base + d[:, None] * E + m, modes[k], mask=(d[:, None] < D) & (m < E))


@triton.jit
def _fill(like, K: tl.constexpr):
    modes = ()
    for _ in tl.static_range(K):
        modes = modes + (tl.zeros_like(like),)
    return modes


@triton.jit
def _load_rates(log_decay, d, D: tl.constexpr, E: tl.constexpr, FIRST, K: tl.constexpr):
    """log_decay, bounded so that 0 times it is 0, and the decay. A mode that is not there is -1e30."""
    rates, decays = (), ()
    found = _load_modes(log_decay, 0, d, D, E, FIRST, K, -1e30)
    for k in tl.static_range(K):
        rate = tl.maximum(found[k], -1e30)
        rates = rates + (rate,)
        decays = decays + (tl.exp(rate),)
    return rates, decays


@triton.jit
def _read(pointer, d, D: tl.constexpr):
    return tl.load(pointer + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, value, d, D: tl.constexpr):
    tl.store(pointer + d, value.to(pointer.dtype.element_ty), mask=d < D)


@triton.jit
def _enter(entry, sums, rates, base, stride, g, size, d, D: tl.constexpr, E: tl.constexpr, FIRST,
           K: tl.constexpr, HAS_ENTRY: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """The state before segment g: the first one and the sums of the segments before, decayed."""
    if HAS_ENTRY:
        state = _load_modes(entry, base, d, D, E, FIRST, K, 0.0)
    else:
        state = _fill(rates[0], K)
    if SPLIT:
        for before in tl.range(0, g):
            ends = _load_modes(sums, base + before * stride, d, D, E, FIRST, K, 0.0)
            new = ()
            for k in tl.static_range(K):
                new = new + (state[k] * tl.exp(rates[k] * size) + ends[k],)
            state = new
    return state


@triton.jit
def _walk(x, begin, row, length, D: tl.constexpr, REVERSE: tl.constexpr):
    """Where token `begin` of a sweep lies in [B*T, D], and the step to the next."""
    if REVERSE:
        return x + (row + length - 1 - begin) * D, row * 0 - D
    return x + (row + begin) * D, row * 0 + D


@triton.jit
def summarise_kernel(
    x, log_decay, weight, sums, slopes, offsets, T, N, G, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    UNROLL: tl.constexpr, REVERSE: tl.constexpr, SLOPES: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """What enters the segment after each one if zero entered it, [G, N, D, E]; with SLOPES also its derivative by the
    log-decay over the decay."""
    d, FIRST, n, g = _place(N, G, D, K)
    row, length, begin, end, _ = _segment(offsets, T, n, g, G, DOCUMENTS)
    rates, decays = _load_rates(log_decay, d, D, E, FIRST, K)
    state, slope = _fill(rates[0], K), _fill(rates[0], K)
    if REVERSE:
        weights = _load_modes(weight, 0, d, D, E, FIRST, K, 0.0)
    x, hop = _walk(x, begin, row, length, D, REVERSE)
    # Only segments that another follows are read, and they are whole.
    for t in tl.range(0, (end - begin) // UNROLL * UNROLL, UNROLL):
        values = ()
        for j in tl.static_range(UNROLL):
            values = values + (_read(x + (t + j) * hop, d, D),)
        for j in tl.static_range(UNROLL):
            value = values[j][:, None]
            new, new_slope = (), ()
            for k in tl.static_range(K):
                if SLOPES:
                    new_slope = new_slope + (decays[k] * slope[k] + state[k],)
                if REVERSE:
                    new = new + (decays[k] * (weights[k] * value + state[k]),)
                else:
                    new = new + (decays[k] * state[k] + value,)
            state = new
            if SLOPES:
                slope = new_slope
    base = (g * N + n).to(tl.int64) * (D * E)
    _store_modes(sums, base, state, d, D, E, FIRST, K)
    if SLOPES:
        _store_modes(slopes, base, slope, d, D, E, FIRST, K)


@triton.jit
def _respond(value, state, decays, weights, K: tl.constexpr, REVERSE: tl.constexpr):
    """One token: y_t and u_t from u_{t-1}; in reverse dx_t and the gradient of u_{t-1} from that of u_t."""
    value = value[:, None]
    total = tl.zeros_like(state[0])
    new = ()
    for k in tl.static_range(K):
        if REVERSE:
            gradient = weights[k] * value + state[k]
            total += gradient
            new = new + (decays[k] * gradient,)
        else:
            mode = decays[k] * state[k] + value
            total += weights[k] * mode
            new = new + (mode,)
    return tl.sum(total, 1), new


@triton.jit
def sweep_kernel(
    x, y, log_decay, weight, entry, leave, sums, offsets, T, N, G, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    UNROLL: tl.constexpr, REVERSE: tl.constexpr, SPLIT: tl.constexpr, HAS_ENTRY: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """y and the last state from x; in reverse the gradient of x (y) and of the first state from that of y (x)."""
    d, _, n, g = _place(N, G, D, K)
    row, length, begin, end, size = _segment(offsets, T, n, g, G, DOCUMENTS)
    rates, decays = _load_rates(log_decay, d, D, E, 0, K)
    weights = _load_modes(weight, 0, d, D, E, 0, K, 0.0)
    base, stride = n.to(tl.int64) * (D * E), (n * 0 + N).to(tl.int64) * (D * E)
    state = _enter(entry, sums, rates, base, stride, g, size, d, D, E, 0, K, HAS_ENTRY, SPLIT)
    x, hop = _walk(x, begin, row, length, D, REVERSE)
    y, _ = _walk(y, begin, row, length, D, REVERSE)
    whole = (end - begin) // UNROLL * UNROLL
    for t in tl.range(0, whole, UNROLL):
        values = ()
        for j in tl.static_range(UNROLL):
            values = values + (_read(x + (t + j) * hop, d, D),)
        for j in tl.static_range(UNROLL):
            total, state = _respond(values[j], state, decays, weights, K, REVERSE)
            _write(y + (t + j) * hop, total, d, D)
    for t in tl.range(whole, end - begin):
        total, state = _respond(_read(x + t * hop, d, D), state, decays, weights, K, REVERSE)
        _write(y + t * hop, total, d, D)
    # By the program of the last token; for an empty document by the first.
    if (end == length) & ((begin < end) | (g == 0)):
        _store_modes(leave, base, state, d, D, E, 0, K)


@triton.jit
def _learn(value, gradient, state, slope, dweight, ddecay, decays, K: tl.constexpr):
    """One token: u_t and its slope, and what they add to the gradients of weight and decay."""
    value, gradient = value[:, None], gradient[:, None]
    states, slopes, dweights, ddecays = (), (), (), ()
    for k in tl.static_range(K):
        new_slope = decays[k] * slope[k] + state[k]
        new = decays[k] * state[k] + value
        states, slopes = states + (new,), slopes + (new_slope,)
        dweights = dweights + (dweight[k] + gradient * new,)
        ddecays = ddecays + (ddecay[k] + gradient * new_slope,)
    return states, slopes, dweights, ddecays


@triton.jit
def learn_kernel(
    x, dy, log_decay, weight, entry, dfinal, sums, slopes, dlog_decay, dweight, offsets, T, N, G,
    D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, UNROLL: tl.constexpr, SPLIT: tl.constexpr,
    HAS_ENTRY: tl.constexpr, HAS_DFINAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """What each segment adds to the gradients of log_decay and weight, [G, N, D, E], for 4 K modes a program."""
    d, FIRST, n, g = _place(N, G, D, K)
    row, length, begin, end, size = _segment(offsets, T, n, g, G, DOCUMENTS)
    rates, decays = _load_rates(log_decay, d, D, E, FIRST, K)
    base, stride = n.to(tl.int64) * (D * E), (n * 0 + N).to(tl.int64) * (D * E)
    # The slope of a state is its derivative by the log-decay over the decay: slope_t = decay slope_{t-1} + u_{t-1}.
    slope = _fill(rates[0], K)
    state = _fill(rates[0], K)
    if HAS_ENTRY:
        state = _load_modes(entry, base, d, D, E, FIRST, K, 0.0)
    if SPLIT:
        for before in tl.range(0, g):
            ends = _load_modes(sums, base + before * stride, d, D, E, FIRST, K, 0.0)
            grown = _load_modes(slopes, base + before * stride, d, D, E, FIRST, K, 0.0)
            states, new_slopes = (), ()
            for k in tl.static_range(K):
                over = tl.exp(rates[k] * size)
                lag = tl.exp(rates[k] * tl.maximum(size - 1, 0)) * size
                states = states + (state[k] * over + ends[k],)
                new_slopes = new_slopes + (slope[k] * over + state[k] * lag + grown[k],)
            state, slope = states, new_slopes
    tokens, hop = _walk(x, begin, row, length, D, False)
    gradients, _ = _walk(dy, begin, row, length, D, False)
    dw, dd = _fill(rates[0], K), _fill(rates[0], K)
    whole = (end - begin) // UNROLL * UNROLL
    for t in tl.range(0, whole, UNROLL):
        values, grads = (), ()
        for j in tl.static_range(UNROLL):
            values = values + (_read(tokens + (t + j) * hop, d, D),)
            grads = grads + (_read(gradients + (t + j) * hop, d, D),)
        for j in tl.static_range(UNROLL):
            state, slope, dw, dd = _learn(values[j], grads[j], state, slope, dw, dd, decays, K)
    for t in tl.range(whole, end - begin):
        value, gradient = _read(tokens + t * hop, d, D), _read(gradients + t * hop, d, D)
        state, slope, dw, dd = _learn(value, gradient, state, slope, dw, dd, decays, K)

    weights = _load_modes(weight, 0, d, D, E, FIRST, K, 0.0)
    scaled = ()
    for k in tl.static_range(K):
        scaled = scaled + (dd[k] * weights[k],)
    if HAS_DFINAL:
        if end == length:
            if begin < end:
                last = _load_modes(dfinal, base, d, D, E, FIRST, K, 0.0)
                more = ()
                for k in tl.static_range(K):
                    more = more + (scaled[k] + last[k] * slope[k],)
                scaled = more
    found = ()
    for k in tl.static_range(K):
        found = found + (scaled[k] * decays[k],)
    to = base + g * stride
    _store_modes(dlog_decay, to, found, d, D, E, FIRST, K)
    _store_modes(dweight, to, dw, d, D, E, FIRST, K)
