"""Scalar decay on a GPU: a sweep that keeps the state in registers, and a backward of all chunks at once.

A first launch sums the log-decays of each chunk up. In the forward a program walks the chunks of one value head with
its state. The decays between tokens are exponentials of differences of sums, in two parts so that nothing is lost
beside strong decays; the factors of values and states are at most 1. Where heads are few, a sequence is cut into
segments: one launch computes each segment's state from zero and its decay, and the sweep of a segment starts from the
decayed sum of the states before it.

The backward first walks forward for the states that enter blocks of a few chunks, and backward for the gradients of
those that leave them, both stored in the dtype of products. Then two programs for each chunk and key, one for dq, one
for dk and dv, make the states at the edges of their chunk and sum over the value heads that share the key, in
registers; queries and keys are multiplied once for all of these heads. Where chunks and keys are few, the heads are
shared out. On Hopper `linnet.ops.ssd.hopper` has both in one program for the usual shapes. A last launch sums up the
gradient of log-decays from what they have by token.

Factors of values and a skip are applied in the forward's kernel, and on Hopper in that of the gradients. In the other
one they spilled registers (docs/negative-results.md): there values are multiplied before, and the gradients of both are
made after it.

A block has a slot in scratch memory, as the chunks of `linnet.ops.gated.triton` have.

float64, mixed dtypes, and widths that are above 128 or not multiples of 8 run in the chunked form.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_zeros

from linnet.ops import backend
from linnet.ops.documents import count_states
from linnet.ops.launching import align, cdiv, choose_operands, count_processors, is_hopper, launch, pad
from linnet.ops.registration import empty_state
from linnet.ops.ssd import chunked
from linnet.ops.ssd.kernels import (
    decays_kernel,
    factors_kernel,
    forward_kernel,
    gradients_kernel,
    passing_kernel,
    states_kernel,
    weigh_kernel,
)

WIDEST = 128
RESIDENT = 2  # programs of a sweep that a multiprocessor holds at a time
ROWS = 32  # heads of tokens that a program multiplies by their factors
HEADS = 32  # of a chunk whose log-decays a program sums up
# Of the gradient of log-decays, how many parts `passing_kernel` sums up: two groups of warps halve the columns of a
# product, and four share out the rows; of a state, a thread has what lies 32 rows apart.
HOPPER_PARTS = 6, 2, 32


class Tiles(NamedTuple):
    """Tokens of a chunk; chunks of a block; columns of the state, warps and chunks in flight of a sweep; warps and
    heads in flight of the gradients."""

    chunk: int
    block: int
    columns: int
    warps: int
    stages: int
    gradient_warps: int
    gradient_stages: int


def choose_tiles(K: int, V: int, dtype: torch.dtype) -> Tiles:
    """Tiles for padded widths: of two programs, the shared memory of a Hopper GPU holds the chunks in flight."""
    if dtype != torch.bfloat16:
        return Tiles(16, 4, min(V, 32), 4, 1, 4, 1)
    return Tiles(64, 1, min(V, 64), 4, 3 if K <= 64 else 2, 4, 2)


def ssd_forward(
    q, k, v, log_decay, times, skip, initial_state, cu_seqlens, scale, return_final_state=True
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] and the final state [N, HV, K, V], None if not requested; arguments as `ssd`."""
    if not supports(q, k, v):
        factors = times, skip
        return chunked.ssd_forward(q, k, v, log_decay, *factors, initial_state, cu_seqlens, scale, return_final_state)
    call = Call(q, k, v, log_decay, times, skip, cu_seqlens, scale)
    o = torch.empty_like(call.v)
    final = empty_state(q, k, v, cu_seqlens) if return_final_state else None
    columns = call.tiles.columns
    programs = call.states * call.HV * cdiv(call.V, columns)
    segments = _count_segments(call, programs)
    states = initial_state is not None, final is not None
    sums = call.sum_up(call.k, call.v, segments, False)
    tensors = call.q, call.k, call.v, call.decays, o, align(initial_state), final, *sums
    if _suits_hopper_forward(call):
        _start_hopper_forward(call, tensors, programs, segments, states)
        return o, final
    constants = (
        call.T, call.states, segments, *call.sizes, call.tiles.chunk, call.tiles.block, pad(call.K), columns,
        skip is not None, times is not None, *states, *call.flags, call.tiles.stages,
    )  # fmt: skip
    tensors = *tensors, call.cu_seqlens
    launch(forward_kernel, programs * segments, tensors, (call.scale,), constants, num_warps=call.tiles.warps)
    return o, final


def ssd_backward(
    q, k, v, log_decay, times, skip, initial_state, cu_seqlens, scale, do, dfinal
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay, times, skip and the initial state, where there is one, from those of o and of
    the final state."""
    if not supports(q, k, v, do):
        factors = times, skip
        return chunked.ssd_backward(q, k, v, log_decay, *factors, initial_state, cu_seqlens, scale, do, dfinal)
    v, do = align(v), align(do)
    call = Call(q, k, v, log_decay, times, skip, cu_seqlens, scale)
    hopper = _suits_hopper(call)
    if not hopper:
        call = Call(q, k, weigh(v, times), log_decay, None, None, cu_seqlens, scale)
    dinitial = None if initial_state is None else empty_state(q, k, v, cu_seqlens)
    entering = call.walk(call.k, call.v, initial_state, None, False)
    leaving = call.walk(call.q, do, dfinal, dinitial, True)
    dv, dg = torch.empty_like(call.v), torch.empty_like(call.g)
    later, before, partial = counts = HOPPER_PARTS if hopper else (2, 1, 1)
    parts = call.decays.new_empty(later + before + 4 * hopper, call.chunks, call.HV, call.tiles.chunk)
    through = call.decays.new_empty(call.chunks, call.HV, partial)
    slices = _count_slices(call, (1 if hopper else 2) * call.chunks * call.H)
    shape, dtype = (slices, *call.q.shape), call.q.dtype if slices == 1 else torch.float32
    dq, dk = (call.q.new_empty(shape, dtype=dtype) for _ in range(2))
    tensors = call.q, call.k, call.v, call.decays, do, entering, leaving, dq, dk, dv, parts, through
    (_start_hopper if hopper else _start_gradients)(call, tensors, slices)
    dtimes, dskip = (None if x is None else call.g.new_empty(call.g.shape, dtype=torch.float32) for x in call.factors)
    flags = dtimes is not None, dskip is not None
    call.start_chunks(
        passing_kernel, (parts, through, call.decays, dg, dtimes, dskip), (call.chunks,), (*counts, *flags)
    )
    dq, dk = (x[0] if slices == 1 else x.sum(0).to(q.dtype) for x in (dq, dk))
    if not hopper:
        dtimes, dskip = factor_gradients(v, times, skip, do, dv)
    dtimes = None if times is None else dtimes.to(times.dtype)
    return dq, dk, dv, dg, dtimes, None if skip is None else dskip.sum_to_size(skip.shape).to(skip.dtype), dinitial


def _suits_hopper_forward(call: "Call") -> bool:
    """Whether the sweep may run in the kernel for Hopper."""
    even = call.cu_seqlens is None and call.T % call.tiles.chunk == 0
    widths = call.K in (64, 128) and call.V in (64, 128)
    return even and widths and call.q.dtype == torch.bfloat16 and is_hopper(call.q.device)


def _start_hopper_forward(call: "Call", tensors: tuple, programs: int, segments: int, states: tuple) -> None:
    from linnet.ops.ssd.hopper import forward_hopper_kernel  # Gluon may be missing from a release of Triton

    flags = [x is not None for x in call.factors]
    constants = (
        call.B * call.T, call.T, call.B, segments, *call.sizes, call.tiles.chunk, call.tiles.columns, *flags, *states, 2
    )  # fmt: skip
    launch(forward_hopper_kernel, programs * segments, tensors, (call.scale,), constants, num_warps=4, scratch=True)


def _suits_hopper(call: "Call") -> bool:
    """Whether the gradients run in the kernel for Hopper: with a key for each value head it gains nothing."""
    return _suits_hopper_forward(call) and call.V == call.tiles.chunk and call.HV > call.H


def _start_hopper(call: "Call", tensors: tuple, slices: int) -> None:
    from linnet.ops.ssd.hopper import gradients_hopper_kernel  # Gluon may be missing from a release of Triton

    units = call.chunks * call.H * slices
    flags = [x is not None for x in call.factors]
    constants = call.B * call.T, call.chunks, slices, *call.sizes, call.tiles.chunk, *flags, 3, 24
    programs = min(units, count_processors(call.q.device))
    options = {"num_warps": 8, "scratch": True, "maxnreg": 168}
    launch(gradients_hopper_kernel, programs, tensors, (call.scale,), constants, **options)


def _start_gradients(call: "Call", tensors: tuple, slices: int) -> None:
    tiles, programs = call.tiles, 2 * call.chunks * call.H * slices
    constants = (
        call.T, call.states, call.B * call.T, call.chunks, slices, *call.sizes, tiles.chunk, tiles.block, pad(call.K),
        pad(call.V), call.cu_seqlens is not None, *call.arithmetic,
    )  # fmt: skip
    options = {"num_warps": tiles.gradient_warps, "num_stages": tiles.gradient_stages}
    launch(gradients_kernel, programs, (*tensors, call.cu_seqlens), (call.scale,), constants, **options)


def weigh(v: Tensor, times: Tensor | None) -> Tensor:
    """v [B, T, HV, V] times `times` [B, T, HV]: inside the gradients' kernel that takes longer than two more passes."""
    if times is None:
        return v
    y, rows = torch.empty_like(v), times.numel()
    launch(weigh_kernel, cdiv(rows, ROWS), (v, align(times), y), (), (rows, v.shape[-1], ROWS, pad(v.shape[-1])))
    return y


def factor_gradients(v, times, skip, do, dv) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of times and skip. dv, of v times `times`, becomes that of v."""
    if times is None and skip is None:
        return None, None
    dtimes, dskip = (None if x is None else v.new_empty(v.shape[:3], dtype=torch.float32) for x in (times, skip))
    rows, (HV, V) = dv[..., 0].numel(), v.shape[2:]
    tensors = v, align(times), align(skip), do, dv, dtimes, dskip
    constants = rows, HV, V, ROWS, pad(V), stride_of(skip), times is not None
    launch(factors_kernel, cdiv(rows, ROWS), tensors, (), constants)
    return dtimes, dskip


def stride_of(skip: Tensor | None) -> int:
    """From a token's factors to the next one's: 0 where all tokens share them, -1 without any."""
    return -1 if skip is None else 0 if skip.shape[:2] == (1, 1) else skip.shape[2]


def ssd_summary(q, k, log_decay, c, scale: float, reverse: bool) -> Tensor:
    """The final state [B, HV, K, V] from zero, with c = v; `reverse`: the gradient of the initial one, with c = do."""
    if not supports(q, k, c):
        return chunked.ssd_summary(q, k, log_decay, c, scale, reverse)
    call = Call(q, k, c, log_decay, None, None, None, scale)
    segments = _count_segments(call, call.walkers)
    sums, totals = call.sum_up(call.q if reverse else call.k, call.v, segments, reverse, True)
    # Each segment's state decays over those that follow it, in the order of the sweep.
    totals = totals if reverse else totals.flip(2)
    later = pad_zeros(totals[:, :, :-1], (1, 0)).cumsum(2)
    return (sums * (later if reverse else later.flip(2)).exp2()[..., None, None]).sum(2)


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels take tensors, the first of the width of keys and the last of that of values."""
    widths = tensors[0].shape[-1], tensors[-1].shape[-1]
    return backend.takes_kernels("ssd", tuple(x.dtype for x in tensors), widths, WIDEST)


class Call:
    """The arguments of a call, contiguous, and its sizes."""

    def __init__(self, q, k, v, log_decay, times, skip, cu_seqlens, scale: float):
        self.q, self.k, self.v, self.g = align(q), align(k), align(v), align(log_decay)
        self.factors = align(times), align(skip)
        self.cu_seqlens, self.scale = align(cu_seqlens), scale
        (self.B, self.T, self.H, self.K), (self.HV, self.V) = q.shape, v.shape[2:]
        self.sizes = self.H, self.HV, self.K, self.V
        self.states = count_states(cu_seqlens, self.B)
        self.tiles = choose_tiles(pad(self.K), pad(self.V), q.dtype)
        block = self.tiles.chunk * self.tiles.block
        self.slots = self.B * cdiv(self.T, block) if cu_seqlens is None else self.T // block + self.states
        self.arithmetic = choose_operands(q.dtype)
        even = cu_seqlens is None and self.T % self.tiles.chunk == 0
        self.flags = cu_seqlens is not None, even, *self.arithmetic
        self.parts = min(pad(self.K), 64), min(pad(self.V), 64)  # of a state, in sweeps for the states alone
        count = cdiv(self.K, self.parts[0]) * cdiv(self.V, self.parts[1])
        self.walkers = self.states * self.HV * count
        self.chunks = self.slots * self.tiles.block

    @functools.cached_property
    def decays(self) -> Tensor:
        """[chunks, HV, 8, tokens of a chunk]: sums of log-decays, decays and factors (`decays_kernel`)."""
        decays = self.g.new_empty(self.chunks, self.HV, 8, self.tiles.chunk, dtype=torch.float32)
        times, skip = self.factors
        self.start_chunks(decays_kernel, (self.g, times, skip, decays), (), (stride_of(skip), times is not None))
        return decays

    def start_chunks(self, kernel, tensors: tuple, sizes: tuple, counts: tuple) -> None:
        """Starts a kernel with a program for each chunk and some heads."""
        heads = min(pad(self.HV), HEADS)
        constants = (
            self.T, self.states, *sizes, self.HV, self.tiles.chunk, self.tiles.block, heads, *counts,
            self.cu_seqlens is not None,
        )  # fmt: skip
        launch(kernel, (self.chunks, cdiv(self.HV, heads)), (*tensors, self.cu_seqlens), (), constants)

    def sum_up(
        self, a: Tensor, c: Tensor, segments: int, reverse: bool, alone: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """The states of segments from zero [N, HV, segments, K, V] and their log-decays in base 2; None for one
        segment, unless they are wanted `alone`."""
        if segments == 1 and not alone:
            return None, None
        shape = self.states, self.HV, segments
        sums = a.new_empty(*shape, self.K, self.V, dtype=torch.float32)
        totals = a.new_empty(shape, dtype=torch.float32)
        self._start(a, c, None, None, None, (sums, totals), segments, reverse, True)
        return sums, totals

    def walk(self, a: Tensor, c: Tensor, initial: Tensor | None, final: Tensor | None, reverse: bool) -> Tensor:
        """The states that enter blocks [slots, HV, K, V], in the dtype of products; `reverse`: the gradients of those
        that leave them. Fills `final`."""
        segments = _count_segments(self, self.walkers)
        sums = self.sum_up(a, c, segments, reverse)
        dtype = torch.bfloat16 if a.dtype == torch.bfloat16 else torch.float32
        stored = a.new_empty(self.slots, self.HV, self.K, self.V, dtype=dtype)
        self._start(a, c, align(initial), final, stored, sums, segments, reverse, False)
        return stored

    def _start(self, a, c, initial, final, stored, sums, segments: int, reverse: bool, local: bool) -> None:
        constants = (
            self.T, self.states, segments, *self.sizes, self.tiles.chunk, self.tiles.block, *self.parts, reverse, local,
            self.factors[0] is not None, initial is not None, final is not None, *self.flags, self.tiles.stages,
        )  # fmt: skip
        tensors = a, c, self.decays, initial, final, stored, *sums, self.cu_seqlens
        programs = self.walkers * segments
        launch(states_kernel, programs, tensors, (self.scale,), constants, num_warps=self.tiles.warps)


def _count_segments(call: Call, programs: int) -> int:
    """As many as let a sweep fill the GPU, but of at least 16 chunks on average. Documents are cut alike."""
    processors = count_processors(call.q.device)
    if programs >= 0.9 * processors:
        return 1
    chunks = call.B * call.T // (call.tiles.chunk * call.states)
    return max(1, min(RESIDENT * processors // programs, chunks // 16))


def _count_slices(call: Call, programs: int) -> int:
    """In how many the value heads of a key are shared out, so that the gradients fill the GPU."""
    group, slices = call.HV // call.H, 1
    while programs * slices < RESIDENT * count_processors(call.q.device) and group % (2 * slices) == 0:
        slices *= 2
    return slices
