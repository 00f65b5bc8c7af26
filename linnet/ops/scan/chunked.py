"""The diagonal recurrence in two levels, on any device, with a hand-written backward.

T tokens are n chunks of C, and every step works on all chunks at once: C steps bring each chunk's last value as if it
had started from zero, n steps carry the state from chunk to chunk, and C steps run every chunk again from its true
start. With C about sqrt(T / 2) that is 2 sqrt(2 T) steps. Decays are only ever multiplied, never divided or summed as
logarithms, so nothing overflows and a decay of exactly 0 is a reset. The complex form is the same code in complex
numbers.

Many packed documents on a CPU are taken in the order of time instead (`linnet.ops.documents.Waves`).

The backward is the same recurrence in reverse, g_t = dh_t + conj(a_{t+1}) g_{t+1}, and then

    dx_t = g_t,  d log_decay_t = Re(conj(w_t) h_{t-1}),  d theta = -sum_t Im(conj(w_t) h_{t-1}),  w_t = conj(a_t) g_t
"""

from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states, documents, in_waves, longest


def scan_forward(x, log_decay, theta, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """h like x, and the final state; arguments as in `diagonal_scan`."""
    dtype = state_dtype(x, log_decay)
    if _in_waves(cu_seqlens, x.shape[1]):
        return _forward_waves(x, log_decay, theta, initial_state, cu_seqlens, dtype)
    h, final = _run(x, _decay(log_decay, theta, dtype), initial_state, cu_seqlens, dtype, theta is not None)
    return _real(h).to(x.dtype), _real(final)


def scan_backward(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal) -> tuple[Tensor, ...]:
    """Gradients to x, log_decay, theta (empty without it) and the initial state; `h` is the forward's output."""
    dtype, is_complex = state_dtype(x, log_decay), theta is not None
    if _in_waves(cu_seqlens, x.shape[1]):
        return _backward_waves(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal, dtype)
    decay, spans = _decay(log_decay, theta, dtype), _spans(cu_seqlens, x.shape[1])
    if h.dtype == dtype:
        h = _values(h, dtype, is_complex)
    else:
        h = _run(x, decay, initial_state, cu_seqlens, dtype, is_complex)[0]

    g = _values(dh, dtype, is_complex).clone(memory_format=torch.contiguous_format)
    dinitial = g.new_zeros(count_states(cu_seqlens, x.shape[0]), g.shape[2])
    if dfinal is not None:
        dinitial += _values(dfinal, dtype, is_complex)
        g[:, spans.last] += spans.to_tokens(dinitial)
    reset = decay if cu_seqlens is None else decay.index_fill(1, spans.first, 0.0)
    recur(reset[:, 1:].conj().resolve_conj(), g[:, :-1], g[:, -1], g[:, :-1], reverse=True)

    w = decay.conj_physical_().mul_(g)
    spans.to_states(w[:, spans.first], dinitial)
    product = torch.empty_like(w)
    torch.mul(w[:, 1:].conj().resolve_conj(), h[:, :-1], out=product[:, 1:])
    if initial_state is None:
        product[:, spans.first] = 0.0
    else:
        product[:, spans.first] = w[:, spans.first].conj() * spans.to_tokens(_values(initial_state, dtype, is_complex))
    if theta is None:
        return g.to(x.dtype), product.to(log_decay.dtype), g.new_empty(0), dinitial
    dtheta = product.imag.sum((0, 1)).neg().to(theta.dtype)
    return _real(g).to(x.dtype), product.real.to(log_decay.dtype, copy=True), dtheta, _real(dinitial)


def _in_waves(cu_seqlens: Tensor | None, length: int) -> bool:
    """Whether the order of time takes fewer operations, or few enough more: each is on neighbouring numbers."""
    if cu_seqlens is None or cu_seqlens.is_cuda or not length:
        return False
    return longest(cu_seqlens, length) <= 4 * isqrt(2 * length)


def _forward_waves(x, log_decay, theta, initial_state, cu_seqlens, dtype) -> tuple[Tensor, Tensor]:
    order, is_complex = in_waves(cu_seqlens, x.shape[1]), theta is not None
    decay, h = order.take(_decay(log_decay, theta, dtype)), order.take(_values(x, dtype, is_complex))
    final = _first_state(h, initial_state, cu_seqlens, dtype)
    if initial_state is not None:
        first = order.sizes[0]
        h[:first].addcmul_(decay[:first], final[order.states])
    order.recur(decay, h, 0)
    final[order.states] = h[order.last]
    return _real(order.put(h)).to(x.dtype), _real(final)


def _backward_waves(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal, dtype) -> tuple[Tensor, ...]:
    order, is_complex = in_waves(cu_seqlens, x.shape[1]), theta is not None
    decay, g = order.take(_decay(log_decay, theta, dtype)), order.take(_values(dh, dtype, is_complex))
    if h.dtype != dtype:
        h, _ = _forward_waves(x.to(dtype), log_decay, theta, initial_state, cu_seqlens, dtype)
    h = order.take(_values(h, dtype, is_complex))
    dinitial = _first_state(g, dfinal, cu_seqlens, dtype)
    if dfinal is not None:
        g[order.last] += dinitial[order.states]
    decay = decay.conj_physical_()
    product, first = h, slice(0, order.sizes[0])  # conj(h_{t-1}) g_t
    order.recur_back(decay, g, 0, product.conj_physical_())
    product[first] = 0.0
    if initial_state is not None:
        product[first] = g[first] * _values(initial_state, dtype, is_complex)[order.states].conj()
    dinitial[order.states] = decay[first] * g[first]
    product = order.put(product.mul_(decay))  # the conjugate of conj(w_t) h_{t-1}
    dx = _real(order.put(g)).to(x.dtype)
    if theta is None:
        return dx, product.to(log_decay.dtype), g.new_empty(0), dinitial
    dtheta = product.imag.sum((0, 1)).to(theta.dtype)
    return dx, product.real.to(log_decay.dtype, copy=True), dtheta, _real(dinitial)


def _first_state(like, state, cu_seqlens, dtype) -> Tensor:
    """A copy of the states of documents [N, D], or zeros."""
    if state is None:
        return like.new_zeros(count_states(cu_seqlens, 1), like.shape[-1])
    return _values(state, dtype, like.is_complex()).clone(memory_format=torch.contiguous_format)


def recur(decay: Tensor, x: Tensor, start: Tensor, out: Tensor, reverse: bool = False) -> None:
    """out_t = decay_t out_{t-1} + x_t along dim 1 of [B, T, D], from out_{-1} = start [B, D]; `out` may be x itself.

    Reversed, out_t = decay_t out_{t+1} + x_t from out_T = start.
    """
    length = x.shape[1]
    chunk = max(1, isqrt(length // 2))
    count = length // chunk
    whole, tail = slice(0, count * chunk), range(count * chunk, length)
    chunks = [y[:, whole].unflatten(1, (count, chunk)) for y in (decay, x, out)]

    def in_tail(h):
        for t in reversed(tail) if reverse else tail:
            h = torch.addcmul(x[:, t], decay[:, t], h, out=out[:, t])
        return h

    h = in_tail(start) if reverse else start
    if count:
        starts = _chunk_starts(*chunks[:2], h, reverse)
        h = starts
        for c in reversed(range(chunk)) if reverse else range(chunk):
            decay_c, x_c, out_c = (y[:, :, c] for y in chunks)
            h = torch.addcmul(x_c, decay_c, h, out=out_c)
        h = h[:, 0 if reverse else -1]
    if not reverse:
        in_tail(h)


def _chunk_starts(decay, x, start, reverse):
    """What enters each chunk, [B, n, D]."""
    count, chunk = x.shape[1:3]
    order = list(reversed(range(chunk)) if reverse else range(chunk))
    ends = x[:, :, order[0]].clone()
    for c in order[1:]:
        torch.addcmul(x[:, :, c], decay[:, :, c], ends, out=ends)
    over = decay.prod(2)
    starts, h = torch.empty_like(ends), start
    for i in reversed(range(count)) if reverse else range(count):
        starts[:, i] = h
        h = torch.addcmul(ends[:, i], over[:, i], h)
    return starts


def _run(x, decay, initial_state, cu_seqlens, dtype, is_complex):
    values = _values(x, dtype, is_complex)
    if initial_state is None:
        first_state = values.new_zeros(count_states(cu_seqlens, x.shape[0]), values.shape[2])
    else:
        first_state = _values(initial_state, dtype, is_complex)
    h = torch.empty_like(values, memory_format=torch.contiguous_format)
    if cu_seqlens is None:
        recur(decay, values, first_state, h)
        return h, h[:, -1].clone()
    # A document starts where the decay is 0, with its own initial state added to its first token.
    spans = _spans(cu_seqlens, x.shape[1])
    if initial_state is not None:
        values = values.clone()
        values[:, spans.first] += decay[:, spans.first] * spans.to_tokens(first_state)
    recur(decay.index_fill(1, spans.first, 0.0), values, torch.zeros_like(h[:, 0]), h)
    final = first_state.clone(memory_format=torch.contiguous_format)
    spans.to_states(h[:, spans.last], final)
    return h, final


class _Spans(NamedTuple):
    """Where states enter and leave: index of the first and last token of each sequence or document that has tokens."""

    first: Tensor | slice
    last: Tensor | slice
    states: Tensor | None  # which documents have tokens; None for a plain batch

    def to_tokens(self, state: Tensor) -> Tensor:
        """Returns state [N, D] as [B, documents, D], the shape of x[:, first]."""
        return state[:, None] if self.states is None else state[self.states][None]

    def to_states(self, tokens: Tensor, state: Tensor) -> None:
        """The inverse: writes [B, documents, D] into [N, D]; empty documents keep what they have."""
        if self.states is None:
            state.copy_(tokens[:, 0])
        else:
            state[self.states] = tokens[0]


def _spans(cu_seqlens, length) -> _Spans:
    if cu_seqlens is None:
        return _Spans(slice(0, 1), slice(length - 1, length), None)
    full = [(start, end - 1, i) for i, (_, start, end) in enumerate(documents(cu_seqlens, 1, length)) if start < end]
    return _Spans(*(torch.tensor(column, device=cu_seqlens.device) for column in zip(*full, strict=True)))


def _decay(log_decay, theta, dtype):
    """exp(log_decay + i theta), a fresh tensor."""
    decay = log_decay.to(dtype).contiguous().exp()
    if theta is None:
        return decay
    return decay * torch.polar(torch.ones_like(theta, dtype=dtype), theta.to(dtype))


def _values(x, dtype, is_complex):
    x = x.to(dtype)
    return torch.view_as_complex(x.contiguous()) if is_complex else x


def _real(x):
    return torch.view_as_real(x) if x.is_complex() else x
