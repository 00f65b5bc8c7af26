"""How the chunked forms of the matrix-state ops walk a sequence: in segments of a few chunks that stay in the cache.

A segment is `count` chunks of `size` tokens, laid out [count, B, H, size, D] so that one batched matrix product serves
all chunks and heads, and the state can be carried from chunk to chunk through contiguous slices. A sequence is
segments of full chunks, then one chunk with the ragged tail.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops.documents import Rows, batches, count_states

# Elements of one gathered tensor: at 2**18 (1 MiB of float32) the dozen tensors of a segment in the backward stay in
# the outer cache of a CPU, and the cost of calling an operation is still small compared with its work.
SEGMENT_ELEMENTS = 2**18


class Segment(NamedTuple):
    """`count` chunks of `size` tokens from token `start`."""

    start: int
    count: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.size


def cut_segments(length: int, chunk: int, elements_per_token: int) -> list[Segment]:
    """Cuts `length` tokens into segments of at most SEGMENT_ELEMENTS, but at least one chunk, each."""
    most = max(1, SEGMENT_ELEMENTS // (chunk * elements_per_token))
    full, tail = divmod(length, chunk)
    cut = [Segment(first * chunk, min(most, full - first), chunk) for first in range(0, full, most)]
    return cut + [Segment(full * chunk, 1, tail)] if tail else cut


def cut_rows(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> list[Rows]:
    """Returns the sequences of q [B, T, H, K] and v [B, T, HV, V], for ops without an effect of zeros after it."""
    width = v.shape[2] * max(q.shape[3], v.shape[3])
    return batches(cu_seqlens, *q.shape[:2], width, SEGMENT_ELEMENTS // width)


def cut_tokens(q: Tensor, v: Tensor, chunk: int) -> list[Segment]:
    """Cuts the tokens of q [B, T, H, K] and v [B, T, HV, V] into segments."""
    return cut_segments(v.shape[1], chunk, v.shape[0] * v.shape[2] * max(q.shape[3], v.shape[3]))


def states_before(cut: list[Segment], advance: Callable[[Segment], object], state: Tensor) -> list[Tensor]:
    """Returns copies of a state before each segment; `advance` moves the state in place to after one."""
    initials = [state.clone()]
    for segment in cut[:-1]:
        advance(segment)
        initials.append(state.clone())
    return initials


def fill_gradients(
    sequences: list[Rows], fill: Callable, inputs: Sequence[Tensor], state: Tensor, dstate: Tensor,
    grads: Sequence[Tensor],
) -> None:  # fmt: skip
    """Runs a backward sequence by sequence.

    Args:
        fill: (inputs, state, dstate, grads) of some sequences; fills their `grads`, and moves `dstate` in place from
            the final to the initial state.
        inputs: [B, T, ...] each. state, dstate: [N, ...]. grads: of the inputs, to fill.
    """
    for rows in sequences:
        dstate_rows, buffers = dstate[rows.states], [rows.buffer(x) for x in grads]
        fill([rows.take(x) for x in inputs], state[rows.states], dstate_rows, buffers)
        rows.put_state(dstate, dstate_rows)
        for grad, buffer in zip(grads, buffers, strict=True):
            rows.put(grad, buffer)


def count_pairs(length: int, chunk: int) -> int:
    """Pairs of tokens that share a chunk: the scores of one head, computed or masked."""
    full, tail = divmod(length, chunk)
    return full * chunk**2 + tail**2


def gather(x: Tensor, segment: Segment, dtype: torch.dtype) -> Tensor:
    """The segment of x [B, T, H, D] as a fresh contiguous [count, B, H, size, D], which the caller may overwrite."""
    view = x[:, segment.start : segment.end].unflatten(1, (segment.count, segment.size)).permute(1, 0, 3, 2, 4)
    return view.to(dtype, copy=True, memory_format=torch.contiguous_format)


def scatter(out: Tensor, segment: Segment, value: Tensor) -> None:
    """Writes value [count, B, H, size or more, D] to its place in out [B, T, H, D], without padding."""
    out[:, segment.start : segment.end].unflatten(1, (segment.count, segment.size)).permute(1, 0, 3, 2, 4).copy_(
        value[..., : segment.size, :]
    )


def multiply_add(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total += x @ y in place, for contiguous [count, B, H, ., .]."""
    total.flatten(0, 2).baddbmm_(x.flatten(0, 2), y.flatten(0, 2))


def decay_rest(log_decay: Tensor, decay: Tensor) -> Tensor:
    """Returns exp(log_decay) - decay, where `decay` is exp(log_decay) rounded: at most 6e-8 in float32.

    A state that decays by 1 - 1e-8 in each of many steps needs this rest, because rounding adds up in one direction. It
    is exact from a decay of 1/2 on, where decay - 1 is, and 0 below, where the rounding of one factor is forgotten.
    """
    return torch.where(decay >= 0.5, torch.expm1(log_decay) - (decay - 1), 0.0)


def carry(
    update: Tensor, decay: Tensor | None, state: Tensor, reverse: bool = False, rest: Tensor | None = None
) -> Tensor:
    """Passes a state from chunk to chunk: state <- decay state + update[c] in place, for c = 0, 1, ... or from the end.

    Args:
        update: [count, B, H, K, V].
        decay: factor of the state over a chunk, [count, ...] or the same for all chunks (broadcast to the state); None
            for no decay.
        state: [B, H, K, V].
        reverse: from the last chunk to the first, as gradients go.
        rest: what rounding took from `decay` (`decay_rest`), in its shape; None to leave it out.

    Returns:
        [count, B, H, K, V]: the initial state of each chunk.
    """
    states = torch.empty_like(update)
    count, varies = update.shape[0], decay is not None and decay.ndim == update.ndim
    # Views of all chunks at once: one by one they take as long as the arithmetic, where states are small.
    initials, updates = states.unbind(), update.unbind()
    decays = decay.unbind() if varies else [decay] * count
    rests = [None] * count if rest is None else rest.unbind()
    chunks = range(count - 1, -1, -1) if reverse else range(count)
    initials[chunks[0]].copy_(state)
    for c, following in zip(chunks, [*(initials[c] for c in chunks[1:]), state], strict=True):
        if decay is None:
            torch.add(initials[c], updates[c], out=following)
        else:
            added = updates[c] if rest is None else torch.addcmul(updates[c], initials[c], rests[c])
            torch.addcmul(added, initials[c], decays[c], out=following)
    return states


def start_states(initial: Tensor | None, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A copy of the initial states [N, HV, K, V] to carry along, or zeros."""
    dtype = state_dtype(q, k, v)
    if initial is not None:
        return initial.to(dtype, copy=True, memory_format=torch.contiguous_format)
    B, _, HV, V = v.shape
    return torch.zeros(count_states(cu_seqlens, B), HV, q.shape[-1], V, dtype=dtype, device=q.device)


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x in float32, or as it is if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def state_dtype(*inputs: Tensor) -> torch.dtype:
    """The dtype of states and of arithmetic: float64 if an input is float64, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


_AS_IT_IS = nullcontext()


def product_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns autocast's dtype if it is on for x, else `dtype`, as float64 always."""
    if dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return dtype
    return torch.get_autocast_dtype(x.device.type)


def exact(x: Tensor) -> AbstractContextManager:
    """Turns autocast off: an op chooses its own precision, and autocast would reach the matrix products inside it."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return _AS_IT_IS
    return torch.autocast(x.device.type, enabled=False)
