"""The modal convolution on a GPU: all modes of a channel in the registers of a thread, token by token.

A token costs a channel 2 E multiply-adds forward and 7 E backward, in float32 outside the tensor cores. These and the
latency of reading tokens, one warp and 64 bytes at a time, take the time, not the bandwidth of memory. In return every
state is exact, only results are written, and documents need no padding.

Where sequences and channels are few, sequences are cut into segments: a launch before the sweep sums the segments up,
and a segment starts from the sums before it. The backward is the sweep in reverse, and a second sweep forward with the
derivative of every mode by its decay, which gives the gradients of log_decay and weight for each segment, added up in a
fixed order.

A program is one warp: a thread owns a channel with all its modes, as K vectors of 4, and walks a segment, reading
UNROLL tokens ahead. There are N sequences or documents of G segments, and programs for each block of channels and, if
one program cannot hold all modes, for each part of the modes.

float64 and more than 64 modes run in the chunked form.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import backend
from linnet.ops.device import KEEP_NAN, load_masked, span, store_masked
from linnet.ops.documents import count_states
from linnet.ops.launching import Launch, align, cdiv, count_processors, launch, launch_all, next_power_of_2
from linnet.ops.modal import chunked

MOST_MODES = 64
# Modes of a program that learns, and so has five numbers a mode.
LEARNT = 32


def modal_forward(x, log_decay, weight, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the final modes; arguments as in `modal_convolution`."""
    if not _supports(x, log_decay, weight):
        return chunked.modal_forward(x, log_decay, weight, initial_state, cu_seqlens)
    x, log_decay, weight = align(x), align(log_decay), align(weight)
    y, final = torch.empty_like(x), _empty_state(x, log_decay, cu_seqlens)
    call = Call(x, log_decay, weight, cu_seqlens)
    launch_all(call.sweep(x, y, initial_state, final, reverse=False))
    return y, final


def modal_backward(x, log_decay, weight, initial_state, cu_seqlens, dy, dfinal) -> tuple[Tensor, ...]:
    """Gradients to x, log_decay, weight and the initial state."""
    if not _supports(x, log_decay, weight):
        return chunked.modal_backward(x, log_decay, weight, initial_state, cu_seqlens, dy, dfinal)
    x, log_decay, weight, dy, dfinal = (align(y) for y in (x, log_decay, weight, dy, dfinal))
    dx, dinitial = torch.empty_like(x), _empty_state(x, log_decay, cu_seqlens)
    call = Call(x, log_decay, weight, cu_seqlens)
    launches, dlog_decay, dweight = call.learn(x, dy, initial_state, dfinal)
    launch_all([*call.sweep(dy, dx, dfinal, dinitial, reverse=True), *launches])
    dlog_decay, dweight = dlog_decay.sum((0, 1)), dweight.sum((0, 1))
    return dx, dlog_decay.to(log_decay.dtype), dweight.to(weight.dtype), dinitial


class Call:
    """One call's parameters and how its launches are cut."""

    def __init__(self, x: Tensor, log_decay: Tensor, weight: Tensor, cu_seqlens: Tensor | None):
        B, T, D = x.shape
        self.log_decay, self.weight, self.cu_seqlens = log_decay, weight, align(cu_seqlens)
        self.states, self.blocks = count_states(cu_seqlens, B), cdiv(D, BD.value)
        self.segments = count_segments(self.states, B * T, D, log_decay.shape[1], x.device)
        self.sizes = (T, self.states, self.segments, D, log_decay.shape[1])

    def summarise(self, x: Tensor, *, reverse: bool, slopes: bool = False) -> tuple[list[Launch], tuple]:
        """What enters the segment after each one if zero entered it, and its slope, or None; and what finds them."""
        if self.segments == 1:
            return [], (None, None)
        sums = self._empty(x)
        more = self._empty(x) if slopes else None
        tensors = (x, self.log_decay, self.weight, sums, more, self.cu_seqlens)
        flags = (reverse, slopes, self.cu_seqlens is not None)
        return [self._launch(summarise_kernel, LEARNT if slopes else MOST_MODES, tensors, flags)], (sums, more)

    def sweep(self, x, y, initial: Tensor | None, final: Tensor, *, reverse: bool) -> list[Launch]:
        """What fills y and what leaves the sequences."""
        launches, (sums, _) = self.summarise(x, reverse=reverse)
        initial = align(initial)
        tensors = (x, y, self.log_decay, self.weight, initial, final, sums, self.cu_seqlens)
        flags = (reverse, sums is not None, initial is not None, self.cu_seqlens is not None)
        return [*launches, self._launch(sweep_kernel, MOST_MODES, tensors, flags)]

    def learn(self, x, dy, initial: Tensor | None, dfinal: Tensor | None) -> tuple[list[Launch], Tensor, Tensor]:
        """What finds the gradients of log_decay and weight [G, N, D, E] in float32, to be summed over segments."""
        launches, (sums, slopes) = self.summarise(x, reverse=False, slopes=True)
        initial = align(initial)
        grads = (self._empty(x), self._empty(x))
        read = (x, dy, self.log_decay, self.weight, initial, dfinal, sums, slopes)
        flags = (sums is not None, initial is not None, dfinal is not None, self.cu_seqlens is not None)
        return [*launches, self._launch(learn_kernel, LEARNT, (*read, *grads, self.cu_seqlens), flags)], *grads

    def _launch(self, kernel, most: int, tensors: tuple, flags: tuple) -> Launch:
        """A kernel whose programs have `most` modes at most."""
        programs = self.blocks * self.states * self.segments * cdiv(self.sizes[-1], most)
        return Launch(kernel, programs, tensors, (), (*self.sizes, *self._vectors(most), *flags), {"num_warps": 1})

    def _vectors(self, most: int) -> tuple[int, int]:
        """Vectors of modes a thread, and tokens it reads ahead: fewer where a token takes longer."""
        vectors = cdiv(min(self.sizes[-1], most), 4)
        return vectors, 8 if vectors * MOST_MODES > 8 * most else 16

    def _empty(self, x: Tensor) -> Tensor:
        return x.new_empty(self.segments, self.states, *self.log_decay.shape, dtype=torch.float32)


def count_segments(states: int, tokens: int, channels: int, modes: int, device: torch.device) -> int:
    """As many as fill the GPU within its registers, of at least 64 tokens on average. Documents are cut alike."""
    places = count_processors(device, interpreted=1) * (8 if modes > 32 else 16)
    return max(1, min(places // (states * cdiv(channels, BD.value)), tokens // states // (2 * UNIT.value)))


def _supports(x: Tensor, log_decay: Tensor, weight: Tensor) -> bool:
    if log_decay.shape[1] > MOST_MODES:
        backend.warn_slow("modal_convolution", f"{log_decay.shape[1]} modes per channel", f"use at most {MOST_MODES}")
        return False
    return not backend.is_wide("modal_convolution", x, log_decay, weight)


def _empty_state(x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty((count_states(cu_seqlens, x.shape[0]), *log_decay.shape), dtype=torch.float32)


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
    begin, length = span(offsets, n, T, DOCUMENTS)
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
        rate = tl.maximum(found[k], -1e30, KEEP_NAN)
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
def _load_initial(initial, sums, rates, base, stride, g, size, d, D: tl.constexpr, E: tl.constexpr, FIRST,
           K: tl.constexpr, HAS_INITIAL: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """The state before segment g: the first one and the sums of the segments before, decayed."""
    state = _load_modes(initial, base, d, D, E, FIRST, K, 0.0) if HAS_INITIAL else _fill(rates[0], K)
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
    x, y, log_decay, weight, initial, final, sums, offsets, T, N, G, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    UNROLL: tl.constexpr, REVERSE: tl.constexpr, SPLIT: tl.constexpr, HAS_INITIAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """y and the last state from x; in reverse the gradient of x (y) and of the first state from that of y (x)."""
    d, _, n, g = _place(N, G, D, K)
    row, length, begin, end, size = _segment(offsets, T, n, g, G, DOCUMENTS)
    rates, decays = _load_rates(log_decay, d, D, E, 0, K)
    weights = _load_modes(weight, 0, d, D, E, 0, K, 0.0)
    base, stride = n.to(tl.int64) * (D * E), (n * 0 + N).to(tl.int64) * (D * E)
    state = _load_initial(initial, sums, rates, base, stride, g, size, d, D, E, 0, K, HAS_INITIAL, SPLIT)
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
        _store_modes(final, base, state, d, D, E, 0, K)


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
    x, dy, log_decay, weight, initial, dfinal, sums, slopes, dlog_decay, dweight, offsets, T, N, G,
    D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, UNROLL: tl.constexpr, SPLIT: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_DFINAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """What each segment adds to the gradients of log_decay and weight, [G, N, D, E], for 4 K modes a program."""
    d, FIRST, n, g = _place(N, G, D, K)
    row, length, begin, end, size = _segment(offsets, T, n, g, G, DOCUMENTS)
    rates, decays = _load_rates(log_decay, d, D, E, FIRST, K)
    base, stride = n.to(tl.int64) * (D * E), (n * 0 + N).to(tl.int64) * (D * E)
    # The slope of a state is its derivative by the log-decay over the decay: slope_t = decay slope_{t-1} + u_{t-1}.
    slope = _fill(rates[0], K)
    state = _load_initial(initial, sums, rates, base, stride, g, size, d, D, E, FIRST, K, HAS_INITIAL, False)
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


def step(x: Tensor, log_decay: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """As `modal_step`: x [B, D], log_decay and weight [D, E], the state [B, D, E] float32, contiguous."""
    B, D, E = state.shape
    x, log_decay, weight = x.contiguous(), log_decay.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    padded = next_power_of_2(E)
    channels = max(1, 1024 // padded)
    constants = D, E, padded, channels, padded == E and D % channels == 0
    launch(step_kernel, B * cdiv(D, channels), (x, log_decay, weight, state, y), (), constants, num_warps=4)
    return y


@triton.jit
def step_kernel(
    x, log_decay, weight, state, y, D: tl.constexpr, E: tl.constexpr,
    MODES: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    block, b = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    d, e = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, MODES)
    at = d[:, None] * E + e[None, :]
    inside, states = (d < D)[:, None] & (e < E)[None, :], state + b * (D * E)
    u = load_masked(states, at, inside, not EVEN)
    decay = load_masked(log_decay, at, inside, not EVEN).to(tl.float32)
    read = load_masked(weight, at, inside, not EVEN).to(tl.float32)
    entering = load_masked(x + b * D, d, d < D, not EVEN).to(tl.float32)
    u = u * tl.exp(decay) + entering[:, None]
    store_masked(states, at, u, inside, not EVEN)
    store_masked(y + b * D, d, tl.sum(u * read, 1), d < D, not EVEN)
