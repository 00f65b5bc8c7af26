"""The selective scan on a GPU: the states of a channel in the registers of a few threads, token by token.

A token costs a state an exponential and 4 operations forward, an exponential and about 20 backward, outside the tensor
cores: with 4 states per channel (MAD) memory bandwidth hides them, with 16 they take the time.
The forward also writes the states before every few tokens (`tokens_between`), from which the backward runs them again,
so that nothing of size [T, D, N] exists; sums over channels and sequences are partial sums, added up in a fixed order.

Where sequences and channels are few, sequences are cut into segments: a launch before the sweep computes the final
state of each segment from a zero state, and its sum of delta; the decay over the segment is exp(A sum).

A program is one warp and walks a segment of one sequence for BD channels, reading L tokens at a time. The N states of a
channel are spread over NG threads, NB in each: state g NB + j is element [., g] of the j-th of NB tensors [BD, NG].
There are S sequences or documents of G segments; PER of them share the parameters of one model. The states before every
R chunks of L tokens are kept for the backward.

float64 and more than 64 states per channel run in the chunked form.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import LOG2_E, load_masked
from linnet.ops.launching import Launcher, align, cdiv, count_processors, launch, next_power_of_2
from linnet.ops.selective_scan import chunked
from linnet.ops.selective_scan.chunked import Shape, runs_in_kernels, tokens_between

WARPS = {False: 20, True: 16}  # of a multiprocessor, until which sequences are cut into segments; True for the backward
SHORTEST = 64  # tokens of a segment, on average


class Tile(NamedTuple):
    """Channels of a program, threads that share a channel, states in each, tokens of a chunk, and chunks between the
    states that are kept."""

    channels: int
    groups: int
    states: int
    length: int
    every: int


# By states per channel, rounded up to a power of two. A thread has several channels, which share sums over channels and
# reads of B and C, and up to 16 states; the backward holds the states of a chunk and their decays, so many states need
# short chunks.
FORWARD = {1: (128, 1, 1, 8), 2: (128, 1, 2, 8), 4: (128, 1, 4, 8)}
BACKWARD = {1: (128, 1, 1, 8), 2: (128, 1, 2, 8), 4: (64, 2, 2, 8)}


def choose_tile(states: int, backward: bool) -> Tile:
    padded = next_power_of_2(states)
    tiles = BACKWARD if backward else FORWARD
    many = (512 // padded, padded // 4, 4, 4) if backward else (512 // padded, padded // 8, 8, 8)
    channels, groups, per_thread, length = tiles.get(padded, many)
    return Tile(channels, groups, per_thread, length, tokens_between(states) // length)


class Call:
    """One call's arguments as the kernels read them, and how its launches are cut."""

    def __init__(self, x, delta, A, B, C, D, initial_state, cu_seqlens, backward: bool):
        self.shape, self.backward = Shape.of(x, A, cu_seqlens), backward
        self.inputs = tuple(align(y) for y in (x, delta, A, B, C))
        self.skip, self.initial_state, self.cu_seqlens = align(D), align(initial_state), align(cu_seqlens)
        dtypes = tuple(None if y is None else y.dtype for y in (*self.inputs, D))
        self.key = self.shape, dtypes, x.device
        self.tile = choose_tile(self.shape.states, backward)
        self.segments = count_segments(self.shape, self.tile, WARPS[backward], x.device)

    def empty(self, *shape: int) -> Tensor:
        return self.inputs[0].new_empty(shape, dtype=torch.float32)

    def plan(self, kind: str, flag: bool) -> Launcher:
        return _plan(kind, flag, self.segments, self.tile, *self.key)

    def summarise(self, x: Tensor, B: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What leaves each segment if zero enters it, and its sum of delta."""
        if self.segments == 1:
            return None, None
        s = self.shape
        sums = self.empty(s.sequences, self.segments, s.states, s.channels)
        totals = self.empty(s.sequences, self.segments, s.channels)
        _, delta, A, _, _ = self.inputs
        self.plan("summarise", self.backward)(x, delta, A, B, sums, totals, self.cu_seqlens)
        return sums, totals


def selective_forward(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final states and those before every few tokens; arguments as in the registered op."""
    if not runs_in_kernels(x, delta, A, B, C):
        return chunked.selective_forward(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens)
    if delta_bias is not None:
        delta = make_steps(delta, delta_bias)
    call = Call(x, delta, A, B, C, D, initial_state, cu_seqlens, backward=False)
    shape = call.shape
    y, final = torch.empty_like(call.inputs[0]), call.empty(shape.sequences, shape.channels, shape.states)
    starts = call.empty(*shape.starts())
    sums = call.summarise(call.inputs[0], call.inputs[3])
    call.plan("forward", initial_state is not None)(
        *call.inputs, call.skip, y, call.initial_state, final, starts, *sums, call.cu_seqlens
    )
    return y, final, starts


def selective_backward(
    x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens, starts, dy, dfinal
) -> tuple[Tensor, ...]:
    """Gradients to x, delta, A, B, C, D and delta_bias (empty without them) and the initial states."""
    # Without states to start from, the forward was in the chunked form: another one was chosen since.
    if starts.numel() == 0 or not runs_in_kernels(x, delta, A, B, C):
        return chunked.selective_backward(
            x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens, starts, dy, dfinal
        )
    steps = delta if delta_bias is None else make_steps(delta, delta_bias)
    call = Call(x, steps, A, B, C, D, None, cu_seqlens, backward=True)
    s, segments, dy, dfinal = call.shape, call.segments, align(dy), align(dfinal)
    blocks = cdiv(s.channels, call.tile.channels)
    dx, ddelta = torch.empty_like(call.inputs[0]), torch.empty_like(call.inputs[1])
    dinitial = call.empty(s.sequences, s.channels, s.states)
    dA = call.empty(s.sequences * segments, s.states, s.channels)
    dB, dC = (call.empty(blocks, *B.shape) for _ in range(2))
    dskip = None if D is None else call.empty(s.sequences * segments, s.channels)
    held = call.empty(
        blocks * s.sequences * segments if call.tile.every > 1 else 0, call.tile.every, call.tile.channels * s.states
    )
    sums = call.summarise(dy, call.inputs[4])
    call.plan("backward", dfinal is not None)(
        *call.inputs, call.skip, dy, align(starts), dfinal, dinitial, dx, ddelta, dA, dB, dC, dskip, *sums, held,
        call.cu_seqlens,
    )  # fmt: skip
    of_model = (A.shape[0], -1)
    dA = dA.unflatten(0, of_model).sum(1).mT.to(A.dtype).contiguous()
    dB, dC = (parts.sum(0).to(y.dtype) for parts, y in ((dB, B), (dC, C)))
    dD = dinitial.new_empty(0) if D is None else dskip.unflatten(0, of_model).sum(1).to(D.dtype)
    dbias = dinitial.new_empty(0)
    if delta_bias is not None:
        ddelta, dbias = pass_steps(delta, delta_bias, ddelta)
    return dx, ddelta, dA, dB, dC, dD, dbias, dinitial


@functools.lru_cache(1024)
def _plan(
    kind: str, flag: bool, segments: int, tile: Tile, shape: Shape, dtypes: tuple, device: torch.device
) -> Launcher:
    """A launch; `flag` is whether it goes in reverse (summarise) or a state enters (forward, backward)."""
    blocks = cdiv(shape.channels, tile.channels)
    sizes = (shape.length, segments, shape.sequences // shape.models, shape.channels, shape.states, *tile)
    has_documents = shape.documents > 0
    masked = has_documents or shape.length % tile.length > 0 or shape.channels % tile.channels > 0
    if kind == "summarise":
        kernel, constants = summarise_kernel, (*sizes, flag, has_documents, masked)
    else:
        kernel, flags = forward_kernel, (dtypes[-1] is not None, flag, segments > 1, has_documents, masked)
        constants = (*sizes, *flags)
        if kind == "backward":
            kernel, constants = backward_kernel, (shape.rows * shape.length, *constants)
    return Launcher(kernel, blocks * segments * shape.sequences, constants, num_warps=1)


@functools.lru_cache(1024)
def count_segments(shape: Shape, tile: Tile, warps: int, device: torch.device) -> int:
    """As many as give every multiprocessor `warps`; documents are cut alike."""
    programs = shape.sequences * cdiv(shape.channels, tile.channels)
    tokens = shape.rows * shape.length // shape.sequences
    return max(1, min(warps * count_processors(device, interpreted=1) // programs, tokens // SHORTEST))


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
    return load_masked(pointer + row * D, d, (d < D) & valid, MASKED)


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
            word = tl.load(words + place, mask=valid & (g < NG), other=0) if MASKED else tl.load(words + place)
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
def _load_initial(initial, sums, totals, rates, n, segment, G, d, g, D: tl.constexpr, N: tl.constexpr, NB: tl.constexpr,
           HAS_INITIAL: tl.constexpr, SPLIT: tl.constexpr, REVERSE: tl.constexpr):  # fmt: skip
    """What enters a segment: what enters the sequence, and what the segments passed made of it and added to it."""
    if HAS_INITIAL:
        state = _load_states(initial, n.to(tl.int64) * (D * N), d, g, N, 1, D, N, NB)
    else:
        state = _zeros(rates[0], NB)
    if SPLIT:
        for i in tl.range(0, G - 1 - segment if REVERSE else segment):
            k = G - 1 - i if REVERSE else i
            place = (n * G + k).to(tl.int64)
            total = tl.load(totals + place * D + d, mask=d < D, other=0.0) * LOG2_E
            ends = _load_states(sums, place * (D * N), d, g, 1, D, D, N, NB)
            new = ()
            for j in tl.static_range(NB):
                new = new + (tl.exp2(total * rates[j]) * state[j] + ends[j],)
            state = new
    return state


@triton.jit
def _load_tokens(x, delta, row, d, t, stop, D: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """x and delta of L tokens from t, which is in `row`."""
    xs, deltas = (), ()
    for k in tl.static_range(L):
        xs = xs + (_load(x, row + k, d, t + k < stop, D, MASKED),)
        deltas = deltas + (_load(delta, row + k, d, t + k < stop, D, MASKED),)
    return xs, deltas


@triton.jit
def _run(x, delta, B, rates, state, t, stop, d, g, D: tl.constexpr, N: tl.constexpr, NG: tl.constexpr,
         NB: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The state after L tokens from t."""
    row = t.to(tl.int64)
    xs, deltas = _load_tokens(x, delta, row, d, t, stop, D, L, MASKED)
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

    Forward x and B; in reverse, where gradients of states final, dy and C in their places.
    """
    block, segment, seq, model, begin, stop, _ = _segment(offsets, T, G, PER, D, BD, L * R, DOCUMENTS)
    d, g = _channels(block, BD, NG)
    rates = _load_states(A, model.to(tl.int64) * (D * N), d, g, N, 1, D, N, NB)
    state, total = _zeros(rates[0], NB), tl.zeros_like(rates[0])
    for i in tl.range(0, tl.cdiv(stop - begin, L)):
        t = begin + (tl.cdiv(stop - begin, L) - 1 - i if REVERSE else i) * L
        row = t.to(tl.int64)
        xs, deltas = _load_tokens(x, delta, row, d, t, stop, D, L, MASKED)
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
    x, delta, A, B, C, skip, y, initial, final, starts, sums, totals, offsets, T, G, PER, D: tl.constexpr,
    N: tl.constexpr, BD: tl.constexpr, NG: tl.constexpr, NB: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    HAS_SKIP: tl.constexpr, HAS_INITIAL: tl.constexpr, SPLIT: tl.constexpr, DOCUMENTS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """y, the final states, and the states to keep."""
    block, segment, seq, model, begin, stop, slot = _segment(offsets, T, G, PER, D, BD, L * R, DOCUMENTS)
    d, g = _channels(block, BD, NG)
    rates = _load_states(A, model.to(tl.int64) * (D * N), d, g, N, 1, D, N, NB)
    weight = tl.zeros_like(rates[0])
    if HAS_SKIP:
        weight = tl.load(skip + model.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    state = _load_initial(initial, sums, totals, rates, seq, segment, G, d, g, D, N, NB, HAS_INITIAL, SPLIT, False)
    for i in tl.range(0, tl.cdiv(stop - begin, L)):
        t = begin + i * L
        row = t.to(tl.int64)
        if i % R == 0:
            _store_states(starts, (slot + i // R).to(tl.int64) * (D * N), state, d, g, 1, D, D, N, NB)
        xs, deltas = _load_tokens(x, delta, row, d, t, stop, D, L, MASKED)
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
        _store_states(final, seq.to(tl.int64) * (D * N), state, d, g, N, 1, D, N, NB)


@triton.jit
def backward_kernel(
    x, delta, A, B, C, skip, dy, starts, initial, final, dx, ddelta, dA, dB, dC, dskip, sums, totals, held, offsets,
    tokens, T, G, PER, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, NG: tl.constexpr, NB: tl.constexpr,
    L: tl.constexpr, R: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_INITIAL: tl.constexpr, SPLIT: tl.constexpr,
    DOCUMENTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """All gradients. `initial` is that of the final state, `final` that of the initial one.

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
    h = _load_initial(initial, sums, totals, rates, seq, segment, G, d, g, D, N, NB, HAS_INITIAL, SPLIT, True)
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
        _store_states(final, seq.to(tl.int64) * (D * N), h, d, g, N, 1, D, N, NB)
    place = (seq * G + segment).to(tl.int64)
    _store_states(dA, place * (D * N), drates, d, g, 1, D, D, N, NB)
    if HAS_SKIP:
        tl.store(dskip + place * D + d, dweight, mask=(d < D) & (g == 0))


ROWS, CHANNELS = 64, 128  # of a program


def make_steps(delta: Tensor, bias: Tensor) -> Tensor:
    """softplus(delta + bias) of [R, T, D] in float32, with bias [M, D] for R / M rows each."""
    delta, bias = align(delta), align(bias)
    steps = torch.empty_like(delta, dtype=torch.float32)
    _plan_steps(steps_kernel, delta.shape, *_dtypes_of(delta, bias))(delta, bias, steps)
    return steps


def pass_steps(delta: Tensor, bias: Tensor, dsteps: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients to delta and bias from that of the steps."""
    delta, bias = align(delta), align(bias)
    models, channels = bias.shape
    ddelta = torch.empty_like(delta)
    blocks = cdiv(delta.numel() // bias.numel(), ROWS)
    sums = delta.new_empty(models, blocks, channels, dtype=torch.float32)
    _plan_steps(gradients_kernel, delta.shape, *_dtypes_of(delta, bias))(delta, bias, dsteps, ddelta, sums)
    return ddelta, sums.sum(1).to(bias.dtype)


def _dtypes_of(delta: Tensor, bias: Tensor) -> tuple:
    return bias.shape[0], delta.dtype, bias.dtype, delta.device


@functools.lru_cache(1024)
def _plan_steps(kernel, shape: torch.Size, models: int, dtype, bias_dtype, device: torch.device) -> Launcher:
    tokens, channels = shape[0] // models * shape[1], shape[2]
    programs = models * cdiv(tokens, ROWS) * cdiv(channels, CHANNELS)
    return Launcher(kernel, programs, (tokens, channels, ROWS, CHANNELS), num_warps=8)


@triton.jit
def _place_steps(tokens, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The model, the block of its tokens, where its elements are, which are there, and the channels [1, CHANNELS]."""
    BLOCKS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    d = (tl.program_id(0) % BLOCKS) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    blocks = tl.cdiv(tokens, ROWS)
    block, model = (tl.program_id(0) // BLOCKS) % blocks, tl.program_id(0) // (BLOCKS * blocks)
    t = block * ROWS + tl.arange(0, ROWS)[:, None]
    at = (model.to(tl.int64) * tokens + t) * D + d
    return model, block, at, (t < tokens) & (d < D), d


@triton.jit
def _shifted(delta, bias, model, at, there, d, D: tl.constexpr):
    """delta + bias, and exp(-|.|) of it."""
    z = tl.load(delta + at, mask=there, other=0.0).to(tl.float32)
    z += tl.load(bias + model.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    return z, tl.exp2(-tl.abs(z) * LOG2_E)


@triton.jit
def steps_kernel(delta, bias, steps, tokens, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    model, _, at, there, d = _place_steps(tokens, D, ROWS, CHANNELS)
    z, t = _shifted(delta, bias, model, at, there, d, D)
    # ln(1 + t) = 2 artanh(t / (2 + t)), so that a small step keeps its digits.
    r = t / (2.0 + t)
    q = r * r
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13))))))
    tl.store(steps + at, tl.maximum(z, 0.0) + 2.0 * r * series, mask=there)


@triton.jit
def gradients_kernel(
    delta, bias, dsteps, ddelta, sums, tokens, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    model, block, at, there, d = _place_steps(tokens, D, ROWS, CHANNELS)
    z, t = _shifted(delta, bias, model, at, there, d, D)
    gradient = tl.load(dsteps + at, mask=there, other=0.0) * tl.where(z >= 0, 1.0, t) / (1.0 + t)
    tl.store(ddelta + at, gradient.to(ddelta.dtype.element_ty), mask=there)
    place = (model * tl.cdiv(tokens, ROWS) + block).to(tl.int64)
    tl.store(sums + place * D + d, tl.sum(gradient, 0)[None, :], mask=d < D)


def step(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor) -> Tensor:
    """As `selective_step`: the state [Bt, D, N] float32, contiguous."""
    batch, channels, states = state.shape
    x, delta, A, D = x.contiguous(), delta.contiguous(), A.contiguous(), None if D is None else D.contiguous()
    # A slice of a wider row, as a projection to several things gives, is read where it is.
    B, C = (y if y.stride(1) == 1 else y.contiguous() for y in (B, C))
    y = torch.empty_like(x)
    padded = next_power_of_2(states)
    width = min(next_power_of_2(channels), max(1, 512 // padded))
    constants = B.stride(0), C.stride(0), channels, states, padded, width, D is not None
    programs = batch * cdiv(channels, width)
    launch(step_kernel, programs, (x, delta, A, B, C, D, state, y), (), constants, num_warps=2)
    return y


@triton.jit
def step_kernel(
    x, delta, A, B, C, skip, state, y, stride_b, stride_c, D: tl.constexpr, N: tl.constexpr, STATES: tl.constexpr,
    WIDTH: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (D + WIDTH - 1) // WIDTH
    block, b = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    d, n = block * WIDTH + tl.arange(0, WIDTH), tl.arange(0, STATES)
    at, inside = d[:, None] * N + n[None, :], (d < D)[:, None] & (n < N)[None, :]
    held = tl.load(state + b * (D * N) + at, mask=inside, other=0.0)
    rate = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
    time = tl.load(delta + b * D + d, mask=d < D, other=0.0).to(tl.float32)
    value = tl.load(x + b * D + d, mask=d < D, other=0.0).to(tl.float32)
    write = tl.load(B + b * stride_b + n, mask=n < N, other=0.0).to(tl.float32)
    read = tl.load(C + b * stride_c + n, mask=n < N, other=0.0).to(tl.float32)
    held = tl.exp(time[:, None] * rate) * held + (time * value)[:, None] * write[None, :]
    out = tl.sum(held * read[None, :], 1)
    if HAS_SKIP:
        out += tl.load(skip + d, mask=d < D, other=0.0).to(tl.float32) * value
    tl.store(state + b * (D * N) + at, held, mask=inside)
    tl.store(y + b * D + d, out.to(y.dtype.element_ty), mask=d < D)
