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

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from linnet.ops import backend
from linnet.ops.documents import count_states, documents
from linnet.ops.launching import Launcher, align, launch
from linnet.ops.scan import chunked
from linnet.ops.scan.kernels import EMPTY, HEAD, backward_kernel, forward_kernel, mark_kernel


class Tiles(NamedTuple):
    """Rows a tile (one a warp), tokens a row, channels, and tiles a group."""

    rows: int
    length: int
    channels: int
    group: int


def choose_tiles(sequences: int, channels: int, is_complex: bool, backward: bool) -> Tiles:
    """On an H200 the fastest of those in docs/negative-results.md."""
    chains = sequences * triton.cdiv(channels, 64)
    group = 1 if chains >= 512 else 8
    if is_complex:
        return Tiles(4, 8, 64, group)
    if chains >= 512 or (backward and chains >= 64):
        return Tiles(4, 16, 64, group)
    return Tiles(8, 16, 64, group) if backward else Tiles(4, 32, 64, group)


def scan_forward(x, log_decay, theta, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """h like x, and the final state; arguments as in `diagonal_scan`."""
    if not _supports(x, log_decay):
        return chunked.scan_forward(x, log_decay, theta, initial_state, cu_seqlens)
    _check_offsets(log_decay, cu_seqlens)
    x, log_decay, theta, initial_state = (align(y) for y in (x, log_decay, theta, initial_state))
    h, final = torch.empty_like(x), _empty_state(x, cu_seqlens)
    plan = _plan(False, x.dtype, *_describe(log_decay, theta, cu_seqlens), (initial_state is not None,))
    marks = _mark(log_decay, initial_state, final, cu_seqlens)
    plan.launch(x, log_decay, theta, h, initial_state, final, _make_slots(x, plan), *marks)
    return h, final


def scan_backward(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal) -> tuple[Tensor, ...]:
    """Gradients to x, log_decay, theta (empty without it) and the initial state; `h` is the forward's output."""
    if not _supports(x, log_decay):
        return chunked.scan_backward(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal)
    log_decay, theta, initial_state = (align(y) for y in (log_decay, theta, initial_state))
    h, dh, dfinal = (align(y) for y in (h, dh, dfinal))
    dx, dlog_decay, dinitial = torch.empty_like(h), torch.empty_like(log_decay), _empty_state(x, cu_seqlens)
    given = initial_state is not None, dfinal is not None
    plan = _plan(True, x.dtype, *_describe(log_decay, theta, cu_seqlens), given)
    marks = _mark(log_decay, dfinal, dinitial, cu_seqlens)
    turns = None if theta is None else x.new_empty(plan.tiles, *log_decay.shape[::2], dtype=torch.float32)
    plan.launch(
        log_decay, theta, h, dh, dx, dlog_decay, turns, initial_state, dfinal, dinitial, _make_slots(x, plan),
        *marks,
    )  # fmt: skip
    dtheta = dinitial.new_empty(0) if theta is None else turns.sum((0, 1)).to(theta.dtype)
    return dx, dlog_decay, dtheta, dinitial


def _supports(x: Tensor, log_decay: Tensor) -> bool:
    return not backend.is_wide("diagonal_scan", x, log_decay)


class Plan(NamedTuple):
    """A launch, its tiles a sequence, and the words they need to tell each other about themselves."""

    launch: Launcher
    tiles: int
    words: int


@functools.lru_cache(1024)
def _plan(backward, dtype, shape, decay_dtype, theta_dtype, has_documents, device, given) -> Plan:
    B, T, D = shape
    is_complex = theta_dtype is not None
    tiles = choose_tiles(B, D, is_complex, backward)
    size = tiles.rows * tiles.length
    count, blocks = triton.cdiv(T, size), triton.cdiv(D, tiles.channels)
    masked = T % size > 0 or D % tiles.channels > 0
    constants = (B, T, count, D, *tiles, is_complex, *given, has_documents, masked)
    kernel = backward_kernel if backward else forward_kernel
    summaries = 0 if tiles.group == 1 else count * (1 + is_complex)
    return Plan(
        Launcher(kernel, count * blocks * B, constants, num_warps=tiles.rows),
        count,
        HEAD.value + (summaries + triton.cdiv(count, tiles.group)) * B * D,
    )


def _describe(log_decay: Tensor, theta: Tensor | None, cu_seqlens: Tensor | None) -> tuple:
    theta_dtype = None if theta is None else theta.dtype
    return log_decay.shape, log_decay.dtype, theta_dtype, cu_seqlens is not None, log_decay.device


def _make_slots(x: Tensor, plan: Plan) -> Tensor:
    return torch.full((plan.words,), EMPTY.value, dtype=torch.int64, device=x.device)


def _mark(
    log_decay: Tensor, entry: Tensor | None, leave: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """For each token the document that starts there, or -1, and the one that ends; settles those without tokens."""
    if cu_seqlens is None:
        return None, None
    T, width = log_decay.shape[1], leave[0].numel()
    marks = torch.full((2, T), -1, dtype=torch.int32, device=log_decay.device)
    constants = T, width, triton.next_power_of_2(min(width, 1024)), entry is not None
    launch(mark_kernel, leave.shape[0], (cu_seqlens.contiguous(), marks, entry, leave), (), constants, num_warps=1)
    return marks[0], marks[1]


def _check_offsets(log_decay: Tensor, cu_seqlens: Tensor | None) -> None:
    if backend.debugging():
        documents(cu_seqlens, *log_decay.shape[:2])


def _empty_state(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty((count_states(cu_seqlens, x.shape[0]), *x.shape[2:]), dtype=torch.float32)
