"""The modal convolution on a GPU: all modes of a channel in the registers of a thread, token by token.

A token costs a channel 2 E multiply-adds forward and 7 E backward, in float32 outside the tensor cores; that and the
wait for tokens, read one warp and 64 bytes at a time, is what takes the time, not the bandwidth of memory. In return
every state is exact, nothing but the results is written and documents need no padding.

Sequences are cut into segments where they and the channels are few: a launch before the sweep sums the segments up, and
a segment starts from the sums before it. The backward is the sweep in reverse, and one that goes forward again with the
derivative of every mode by its decay (a mode of the modes), which gives the gradients of log_decay and weight for each
segment, to be added up in a fixed order.

float64 and more than 64 modes run in the chunked form.
"""

import torch
import triton
from torch import Tensor

from linnet.ops import backend
from linnet.ops.documents import count_states, documents
from linnet.ops.launching import Launch, count_processors, launch_all
from linnet.ops.modal import chunked
from linnet.ops.modal.kernels import BD, UNIT, learn_kernel, summarise_kernel, sweep_kernel

MOST_MODES = 64
# Modes of a program that learns, and so has five numbers a mode.
LEARNT = 32


def modal_forward(x, log_decay, weight, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the final modes; arguments as in `modal_convolution`."""
    if not _supports(x, log_decay, weight):
        return chunked.modal_forward(x, log_decay, weight, initial_state, cu_seqlens)
    x, log_decay, weight = x.contiguous(), log_decay.contiguous(), weight.contiguous()
    y, final = torch.empty_like(x), _empty_state(x, log_decay, cu_seqlens)
    call = Call(x, log_decay, weight, cu_seqlens)
    launch_all(call.sweep(x, y, initial_state, final, reverse=False))
    return y, final


def modal_backward(x, log_decay, weight, initial_state, cu_seqlens, dy, dfinal) -> tuple[Tensor, ...]:
    """Gradients to x, log_decay, weight and the initial state."""
    if not _supports(x, log_decay, weight):
        return chunked.modal_backward(x, log_decay, weight, initial_state, cu_seqlens, dy, dfinal)
    x, log_decay, weight, dy = x.contiguous(), log_decay.contiguous(), weight.contiguous(), dy.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
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
        if backend.debugging():
            documents(cu_seqlens, B, T)
        self.log_decay, self.weight = log_decay, weight
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.states, self.blocks = count_states(cu_seqlens, B), triton.cdiv(D, BD.value)
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

    def sweep(self, x, y, entry: Tensor | None, leave: Tensor, *, reverse: bool) -> list[Launch]:
        """What fills y and what leaves the sequences."""
        launches, (sums, _) = self.summarise(x, reverse=reverse)
        entry = None if entry is None else entry.contiguous()
        tensors = (x, y, self.log_decay, self.weight, entry, leave, sums, self.cu_seqlens)
        flags = (reverse, sums is not None, entry is not None, self.cu_seqlens is not None)
        return [*launches, self._launch(sweep_kernel, MOST_MODES, tensors, flags)]

    def learn(self, x, dy, entry: Tensor | None, dfinal: Tensor | None) -> tuple[list[Launch], Tensor, Tensor]:
        """What finds the gradients of log_decay and weight [G, N, D, E] in float32, to be summed over segments."""
        launches, (sums, slopes) = self.summarise(x, reverse=False, slopes=True)
        entry = None if entry is None else entry.contiguous()
        found = (self._empty(x), self._empty(x))
        read = (x, dy, self.log_decay, self.weight, entry, dfinal, sums, slopes)
        flags = (sums is not None, entry is not None, dfinal is not None, self.cu_seqlens is not None)
        return [*launches, self._launch(learn_kernel, LEARNT, (*read, *found, self.cu_seqlens), flags)], *found

    def _launch(self, kernel, most: int, tensors: tuple, flags: tuple) -> Launch:
        """A kernel whose programs have `most` modes at most."""
        programs = self.blocks * self.states * self.segments * triton.cdiv(self.sizes[-1], most)
        return Launch(kernel, programs, tensors, (), (*self.sizes, *self._vectors(most), *flags), {"num_warps": 1})

    def _vectors(self, most: int) -> tuple[int, int]:
        """Vectors of modes a thread, and tokens it reads ahead: fewer where a token takes longer."""
        vectors = triton.cdiv(min(self.sizes[-1], most), 4)
        return vectors, 8 if vectors * MOST_MODES > 8 * most else 16

    def _empty(self, x: Tensor) -> Tensor:
        return x.new_empty(self.segments, self.states, *self.log_decay.shape, dtype=torch.float32)


def count_segments(states: int, tokens: int, channels: int, modes: int, device: torch.device) -> int:
    """As many as fill the GPU within its registers, of at least 64 tokens on average. Documents are cut alike."""
    places = count_processors(device, interpreted=1) * (8 if modes > 32 else 16)
    return max(1, min(places // (states * triton.cdiv(channels, BD.value)), tokens // states // (2 * UNIT.value)))


def _supports(x: Tensor, log_decay: Tensor, weight: Tensor) -> bool:
    if log_decay.shape[1] > MOST_MODES:
        backend.warn_slow("modal_convolution", f"{log_decay.shape[1]} modes per channel", f"use at most {MOST_MODES}")
        return False
    return not backend.is_wide("modal_convolution", x, log_decay, weight)


def _empty_state(x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty((count_states(cu_seqlens, x.shape[0]), *log_decay.shape), dtype=torch.float32)
