"""The diagonal recurrence on a GPU: one launch that reads everything once.

The sequences are cut into tiles of P x L tokens by BD channels. A program loads one into registers, finds the decay
over it and its end from zero, learns from the tiles before it what enters it, and walks it again, now from there, out
of registers. Tiles are handed out by a ticket, so whatever one waits for is already under way; what they tell each
other passes through the outer cache, about 1 % of the traffic. Tiles come in groups of G: inside a group all summaries
are published at once, so that only one step in G waits for the one before. Where channels times sequences fill the GPU
there is nothing to wait for and G is 1.

The backward is the same sweep from the last token, over w_t = conj(a_t) (dh_t + w_{t+1}), and takes h as the forward
left it: in 16 bits, so the gradient of the decay has the precision of its inputs. Documents are a mark at their first
and their last token, where the state that enters replaces what the token before left.

float64 runs in the chunked form.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from linnet.ops import backend
from linnet.ops.documents import count_states, documents
from linnet.ops.scan import chunked
from linnet.ops.scan.kernels import EMPTY, HEAD, backward_kernel, forward_kernel, mark_kernel


class Tiles(NamedTuple):
    """Rows a tile (one a warp), tokens a row, channels, and tiles a group."""

    rows: int
    length: int
    channels: int
    group: int


def choose_tiles(sequences: int, channels: int, is_complex: bool) -> Tiles:
    """On an H200 the fastest of those in docs/negative-results.md."""
    if sequences * triton.cdiv(channels, 64) >= 512:
        return Tiles(4, 8 if is_complex else 16, 64, 1)
    return Tiles(4, 8 if is_complex else 32, 64, 8)


def scan_forward(
    x: Tensor, log_decay: Tensor, theta: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h like x, and the final state; arguments as in `diagonal_scan`."""
    if torch.float64 in (x.dtype, log_decay.dtype):
        return chunked.scan_forward(x, log_decay, theta, initial_state, cu_seqlens)
    x, log_decay = x.contiguous(), log_decay.contiguous()
    h, final = torch.empty_like(x), _empty_state(x, cu_seqlens)
    with torch.cuda.device_of(x):
        sweep = Sweep(log_decay, theta, initial_state, cu_seqlens)
        marks = sweep.mark(cu_seqlens, initial_state, final)
        forward_kernel[sweep.grid](
            x, log_decay, theta, h, sweep.entry, final, sweep.make_slots(), *marks, *sweep.sizes, *sweep.tiles,
            theta is not None, initial_state is not None, cu_seqlens is not None, sweep.masked,
            num_warps=sweep.tiles.rows,
        )  # fmt: skip
    return h, final


def scan_backward(
    x: Tensor,
    log_decay: Tensor,
    theta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    h: Tensor,
    dh: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to x, log_decay, theta (empty without it) and the initial state; `h` is the forward's output."""
    if torch.float64 in (x.dtype, log_decay.dtype):
        return chunked.scan_backward(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal)
    log_decay, h, dh = log_decay.contiguous(), h.contiguous(), dh.contiguous()
    dx, dlog_decay, dinitial = torch.empty_like(h), torch.empty_like(log_decay), _empty_state(x, cu_seqlens)
    with torch.cuda.device_of(x):
        sweep = Sweep(log_decay, theta, initial_state, cu_seqlens)
        dfinal = None if dfinal is None else dfinal.contiguous()
        turns = None if theta is None else x.new_empty(sweep.count, *log_decay.shape[::2], dtype=torch.float32)
        marks = sweep.mark(cu_seqlens, dfinal, dinitial)
        backward_kernel[sweep.grid](
            log_decay, theta, h, dh, dx, dlog_decay, turns, sweep.entry, dfinal, dinitial, sweep.make_slots(), *marks,
            *sweep.sizes, *sweep.tiles, theta is not None, initial_state is not None, dfinal is not None,
            cu_seqlens is not None, sweep.masked, num_warps=sweep.tiles.rows,
        )  # fmt: skip
    dtheta = dinitial.new_empty(0) if theta is None else turns.sum((0, 1)).to(theta.dtype)
    return dx, dlog_decay, dtheta, dinitial


class Sweep:
    """How one launch is cut."""

    def __init__(self, log_decay: Tensor, theta: Tensor | None, entry: Tensor | None, cu_seqlens: Tensor | None):
        B, T, D = log_decay.shape
        if backend.debugging():
            documents(cu_seqlens, B, T)
        self.tiles = choose_tiles(B, D, theta is not None)
        per = self.tiles.rows * self.tiles.length
        self.count, blocks = triton.cdiv(T, per), triton.cdiv(D, self.tiles.channels)
        self.sizes, self.grid = (B, T, self.count, D), (self.count * blocks * B,)
        self.masked = T % per > 0 or D % self.tiles.channels > 0
        self.entry = None if entry is None else entry.contiguous()
        self.device, self.planes = log_decay.device, 1 if theta is None else 2

    def make_slots(self) -> Tensor:
        """Room for the summaries of tiles and the carries into groups."""
        B, _, count, D = self.sizes
        group = self.tiles.group
        words = (0 if group == 1 else count * self.planes) + triton.cdiv(count, group)
        return torch.full((HEAD.value + words * B * D,), EMPTY.value, dtype=torch.int64, device=self.device)

    def mark(self, cu_seqlens: Tensor | None, entry: Tensor | None, leave: Tensor) -> tuple[Tensor | None, ...]:
        """For each token the document that starts there, or -1, and the one that ends; settles those without tokens."""
        if cu_seqlens is None:
            return None, None
        T, width = self.sizes[1], leave[0].numel()
        marks = torch.full((2, T), -1, dtype=torch.int32, device=self.device)
        entry = None if entry is None else entry.contiguous()
        mark_kernel[(count_states(cu_seqlens, 1),)](
            cu_seqlens.contiguous(), marks, entry, leave, T, width, triton.next_power_of_2(min(width, 1024)),
            entry is not None, num_warps=1,
        )  # fmt: skip
        return marks[0], marks[1]


def _empty_state(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty((count_states(cu_seqlens, x.shape[0]), *x.shape[2:]), dtype=torch.float32)
