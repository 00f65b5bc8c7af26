"""The selective scan on a GPU: the states of a channel in the registers of a few threads, token by token.

A token costs a state an exponential and 4 operations forward, an exponential and about 20 backward, outside the tensor
cores: with 4 states a channel (MAD) that is hidden behind the bandwidth of memory, with 16 it is what takes the time.
The forward also writes the states before every few tokens (`tokens_between`), from which the backward runs them again,
so that nothing of size [T, D, N] exists; sums over channels and sequences are partial sums, added up in a fixed order.

Sequences are cut into segments where they and the channels are few: a launch before the sweep finds what leaves each
segment if zero enters it, and its sum of delta, of which the decay over it is exp(A sum).

float64 and more than 64 states a channel run in the chunked form.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from linnet.ops import backend
from linnet.ops.documents import documents
from linnet.ops.launching import Launcher, align, count_processors
from linnet.ops.selective_scan import chunked
from linnet.ops.selective_scan.kernels import backward_kernel, forward_kernel, summarise_kernel
from linnet.ops.selective_scan.shapes import Shape, runs_in_kernels, tokens_between
from linnet.ops.selective_scan.steps import make_steps, pass_steps

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


# By states a channel, up to a power of two. Some channels a thread, so that they share sums over channels and reads of
# B and C, and up to 16 states; the backward holds those of a chunk with their decays, so many states mean short chunks.
FORWARD = {1: (128, 1, 1, 8), 2: (128, 1, 2, 8), 4: (128, 1, 4, 8)}
BACKWARD = {1: (128, 1, 1, 8), 2: (128, 1, 2, 8), 4: (64, 2, 2, 8)}


def choose_tile(states: int, backward: bool) -> Tile:
    padded = triton.next_power_of_2(states)
    tiles = BACKWARD if backward else FORWARD
    many = (512 // padded, padded // 4, 4, 4) if backward else (512 // padded, padded // 8, 8, 8)
    channels, groups, own, length = tiles.get(padded, many)
    return Tile(channels, groups, own, length, tokens_between(states) // length)


class Call:
    """One call's arguments as the kernels read them, and how its launches are cut."""

    def __init__(self, x, delta, A, B, C, D, initial_state, cu_seqlens, backward: bool):
        self.shape, self.backward = Shape.of(x, A, cu_seqlens), backward
        if backend.debugging():
            documents(cu_seqlens, 1, x.shape[1])
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
    blocks = triton.cdiv(s.channels, call.tile.channels)
    dx, ddelta = torch.empty_like(call.inputs[0]), torch.empty_like(call.inputs[1])
    dinitial = call.empty(s.sequences, s.channels, s.states)
    dA = call.empty(s.sequences * segments, s.states, s.channels)
    dB, dC = (call.empty(blocks, *B.shape) for _ in range(2))
    dskip = None if D is None else call.empty(s.sequences * segments, s.channels)
    held = call.empty(
        blocks * s.sequences * segments if call.tile.every > 1 else 0,
        call.tile.every,
        call.tile.channels * s.states,
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
    blocks = triton.cdiv(shape.channels, tile.channels)
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
    programs = shape.sequences * triton.cdiv(shape.channels, tile.channels)
    tokens = shape.rows * shape.length // shape.sequences
    return max(1, min(warps * count_processors(device, interpreted=1) // programs, tokens // SHORTEST))
