"""The modal convolution on a GPU: all modes of a channel in the registers of a thread, token by token.

A token costs a channel 2 E multiply-adds forward and 7 E backward, in float32 outside the tensor cores; that and the
wait for tokens, read one warp and 64 bytes at a time, is what takes the time, not the bandwidth of memory. In return
every state is exact, nothing but the results is written and documents need no padding.

Sequences are cut into segments where they and the channels are few: a launch before the sweep sums the segments up, and
a segment starts from the sums before it. The backward is the sweep in reverse, and one that goes forward again with the
derivative of every mode by its decay (a mode of the modes), which gives the gradients of log_decay and weight for each
segment, to be added up in a fixed order.

float64, more than 64 modes and more than 65,535 sequences run in the chunked form.
"""

import torch
import triton
from torch import Tensor

from linnet.ops import backend
from linnet.ops.documents import count_states, documents
from linnet.ops.launching import count_processors
from linnet.ops.modal import chunked
from linnet.ops.modal.kernels import BD, UNIT, learn_kernel, summarise_kernel, sweep_kernel

MOST_MODES = 64
# What CUDA allows in the second axis of a grid; segments are many only where sequences are few.
MOST_SEQUENCES = 65_535
# Modes of a program that learns, and so has five numbers a mode.
LEARNT = 32


def modal_forward(
    x: Tensor, log_decay: Tensor, weight: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the final modes; arguments as in `modal_convolution`."""
    if not _supports(x, log_decay, weight, cu_seqlens):
        return chunked.modal_forward(x, log_decay, weight, initial_state, cu_seqlens)
    x, log_decay, weight = x.contiguous(), log_decay.contiguous(), weight.contiguous()
    y, final = torch.empty_like(x), _empty_state(x, log_decay, cu_seqlens)
    with torch.cuda.device_of(x):
        call = Call(x, log_decay, weight, cu_seqlens)
        sums, _ = call.summarise(x, reverse=False)
        call.sweep(x, y, initial_state, final, sums, reverse=False)
    return y, final


def modal_backward(
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to x, log_decay, weight and the initial state."""
    if not _supports(x, log_decay, weight, cu_seqlens):
        return chunked.modal_backward(x, log_decay, weight, initial_state, cu_seqlens, dy, dfinal)
    x, log_decay, weight, dy = x.contiguous(), log_decay.contiguous(), weight.contiguous(), dy.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    dx, dinitial = torch.empty_like(x), _empty_state(x, log_decay, cu_seqlens)
    with torch.cuda.device_of(x):
        call = Call(x, log_decay, weight, cu_seqlens)
        sums, _ = call.summarise(dy, reverse=True)
        call.sweep(dy, dx, dfinal, dinitial, sums, reverse=True)
        dlog_decay, dweight = call.learn(x, dy, initial_state, dfinal)
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

    def summarise(self, x: Tensor, *, reverse: bool, slopes: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """What enters the segment after each one if zero entered it, and its slope."""
        if self.segments == 1:
            return None, None
        sums = self._empty(x)
        more = self._empty(x) if slopes else None
        most = LEARNT if slopes else MOST_MODES
        summarise_kernel[self._grid(most)](
            x, self.log_decay, self.weight, sums, more, self.cu_seqlens, *self.sizes, *self._vectors(most), reverse,
            slopes, self.cu_seqlens is not None, num_warps=1,
        )  # fmt: skip
        return sums, more

    def sweep(self, x, y, entry: Tensor | None, leave: Tensor, sums: Tensor | None, *, reverse: bool) -> None:
        """Fills y and what leaves the sequences."""
        sweep_kernel[self._grid(MOST_MODES)](
            x, y, self.log_decay, self.weight, None if entry is None else entry.contiguous(), leave, sums,
            self.cu_seqlens, *self.sizes, *self._vectors(MOST_MODES), reverse, self.segments > 1, entry is not None,
            self.cu_seqlens is not None, num_warps=1,
        )  # fmt: skip

    def learn(self, x, dy, entry: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gradients of log_decay and weight in float32."""
        sums, slopes = self.summarise(x, reverse=False, slopes=True)
        dlog_decay, dweight = self._empty(x), self._empty(x)
        learn_kernel[self._grid(LEARNT)](
            x, dy, self.log_decay, self.weight, None if entry is None else entry.contiguous(), dfinal, sums, slopes,
            dlog_decay, dweight, self.cu_seqlens, *self.sizes, *self._vectors(LEARNT), self.segments > 1,
            entry is not None, dfinal is not None, self.cu_seqlens is not None, num_warps=1,
        )  # fmt: skip
        return dlog_decay.sum((0, 1)), dweight.sum((0, 1))

    def _empty(self, x: Tensor) -> Tensor:
        return x.new_empty(self.segments, self.states, *self.log_decay.shape, dtype=torch.float32)

    def _vectors(self, most: int) -> tuple[int, int]:
        """Vectors of modes a thread, and tokens it reads ahead: fewer where a token takes longer."""
        vectors = triton.cdiv(min(self.sizes[-1], most), 4)
        return vectors, 8 if vectors > 8 else 16

    def _grid(self, most: int) -> tuple[int, int, int]:
        return self.blocks, self.states * self.segments, triton.cdiv(self.sizes[-1], most)


def count_segments(states: int, tokens: int, channels: int, modes: int, device: torch.device) -> int:
    """As many as fill the GPU within its registers, of at least 64 tokens on average. Documents are cut alike."""
    places = count_processors(device, interpreted=1) * (8 if modes > 32 else 16)
    return max(1, min(places // (states * triton.cdiv(channels, BD.value)), tokens // states // (2 * UNIT.value)))


def _supports(x: Tensor, log_decay: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> bool:
    fits = log_decay.shape[1] <= MOST_MODES and count_states(cu_seqlens, x.shape[0]) <= MOST_SEQUENCES
    return fits and all(y.dtype != torch.float64 for y in (x, log_decay, weight))


def _empty_state(x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty((count_states(cu_seqlens, x.shape[0]), *log_decay.shape), dtype=torch.float32)
