"""Scalar decay in chunks of 64 tokens: a matrix of factors beside one product of queries and keys.

With the state S before a chunk, a the decays, M_rs = a_{s+1} ... a_r for r >= s, since_r = a_1 ... a_r and until_r =
a_{r+1} ... a_C:

    o = ((q k^T) * M) v + since (q S),    S <- a_1 ... a_C S + k^T (until v)

The factors come from halving the chunk (`linnet.ops.gated.chunked`), so that none exceeds 1 and any decay is safe, -inf
included. The value heads of one key share the product q k^T, and their values stand side by side in the products with
states, so that no key is repeated: what decays is v and not k.

The backward has lightning's form. The gradient of a log-decay is the sum of all that passes through its token, as in
gated linear attention. Source: Dao and Gu 2024 (arXiv:2405.21060), section 6.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops.chunks import (
    Segment,
    carry,
    count_pairs,
    cut_rows,
    cut_segments,
    fill_gradients,
    multiply_add,
    scatter,
    state_dtype,
    states_before,
)
from linnet.ops.documents import count_states
from linnet.ops.gated.chunked import block_decays, gather_padded, pair_decays

CHUNK = 64  # a power of two


def ssd_forward(
    q, k, x, log_decay, times, skip, initial_state, cu_seqlens, scale, return_final_state=True
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] and the final state [N, HV, K, V] or None; arguments as `ssd`, x its values."""
    v = weigh(x, times)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = _start(initial_state, q, k, v, cu_seqlens)
    for rows in cut_rows(q, v, cu_seqlens):
        entering, buffer, taken = state[rows.states], rows.buffer(o), _taken(*map(rows.take, (q, k, v, log_decay)))
        for segment in _segments(taken[0], taken[2]):
            chunks = _chunks(segment, entering.dtype, *taken)
            chunks.q.mul_(scale)
            out = _times(chunks.q, _carry(chunks, entering)).mul_(chunks.since)
            out += _by_heads(_scores(chunks) @ _by_heads(chunks.v))
            scatter(_beside(buffer, q), segment, out.flatten(-2))
        rows.put_state(state, entering)
        rows.put(o, buffer)
    if skip is not None:
        o = (o + skip[..., None] * x).to(o.dtype)
    return o, _joined(state) if return_final_state else None


def weigh(v: Tensor, factors: Tensor | None) -> Tensor:
    """v [B, T, HV, V] times factors [B, T, HV] in the wider of the two dtypes, rounded to that of v."""
    return v if factors is None else (factors[..., None] * v).to(v.dtype)


def ssd_backward(
    q, k, x, log_decay, times, skip, initial_state, cu_seqlens, scale, do, dfinal
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, x, log_decay, times and skip (None where not given) and of the initial state (given or not),
    from those of o and of the final state."""
    v = weigh(x, times)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, log_decay)]
    state, dstate = (_start(x, q, k, v, cu_seqlens) for x in (initial_state, dfinal))

    def fill(inputs, state, dstate, grads) -> None:
        *taken, do = inputs
        _backward_rows(*_taken(*taken), _beside(do, q), scale, state, dstate, _taken(*grads))

    fill_gradients(cut_rows(q, v, cu_seqlens), fill, (q, k, v, log_decay, do), state, dstate, grads)
    dq, dk, dv, dlog_decay = grads
    dtimes = None if times is None else _gradient_of_factors(times, dv, x)
    dv = weigh(dv, times)
    dskip = None if skip is None else _gradient_of_factors(skip, do, x)
    dv = dv if skip is None else dv + weigh(do, skip)
    return dq, dk, dv, dlog_decay, dtimes, dskip, _joined(dstate)


def _gradient_of_factors(factors: Tensor, grad: Tensor, v: Tensor) -> Tensor:
    """Of factors of v, from the gradient of the product [B, T, HV, V]."""
    dtype = torch.promote_types(factors.dtype, v.dtype)
    return (grad.to(dtype) * v).sum_to_size(*factors.shape, 1).squeeze(-1).to(factors.dtype)


def ssd_summary(q, k, log_decay, c, scale: float, reverse: bool) -> Tensor:
    """The final state [B, HV, K, V] from zero, with c = v; `reverse`: the gradient of the initial one, with c = do."""
    state, taken = _start(None, q, k, c, None), _taken(q, k, c, log_decay)
    cut = _segments(q, taken[2])
    for segment in reversed(cut) if reverse else cut:
        chunks = _chunks(segment, state.dtype, *taken)
        if reverse:
            _carry_back(chunks, chunks.v.mul_(scale), state)
        else:
            _carry(chunks, state)
    return _joined(state)


class _Chunks(NamedTuple):
    """Chunks of a segment in the dtype of states; G value heads of each of the H keys."""

    q: Tensor  # [n, B, H, C, K]
    k: Tensor
    v: Tensor  # [n, B, H, C, G, V]
    between: Tensor  # decays between tokens, [n, B, H, G, C, C]
    since: Tensor  # decays from the start of the chunk, [n, B, H, C, G, 1]
    until: Tensor  # decays to its end
    whole: Tensor  # decays of the chunk, [n, B, H, 1, G, 1]
    rest: Tensor  # what rounding took from them


def _chunks(segment: Segment, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> _Chunks:
    q, k, v, log_decay = gather_padded(segment, dtype, q, k, v, log_decay)
    decays, rest = block_decays(log_decay)
    heads = (q.shape[2], log_decay.shape[2] // q.shape[2])
    between, since, until = (x.unflatten(2, heads) for x in pair_decays(decays))
    over = (_by_heads(x.unflatten(2, heads)) for x in (decays[-1], rest))
    return _Chunks(q, k, v.unflatten(-1, (heads[1], -1)), between, _by_heads(since), _by_heads(until), *over)


def _by_heads(x: Tensor) -> Tensor:
    """Views values side by side [n, B, H, C, G, V] by heads [n, B, H, G, C, V], or back."""
    return x.transpose(-3, -2)


def _scores(chunks: _Chunks) -> Tensor:
    """[n, B, H, G, C, C]: products of queries and keys with the decays between them."""
    return (chunks.q @ chunks.k.mT).unsqueeze(3) * chunks.between


def _times(x: Tensor, states: Tensor) -> Tensor:
    """x [n, B, H, C, K] times states [n, B, H, K, G, V], [n, B, H, C, G, V]."""
    return (x @ states.flatten(-2)).unflatten(-1, states.shape[-2:])


def _carry(chunks: _Chunks, state: Tensor) -> Tensor:
    """Moves the state [B, H, K, G, V] in place to after the segment; returns that before each chunk."""
    return carry(_times(chunks.k.mT, chunks.v * chunks.until), chunks.whole, state, rest=chunks.rest)


def _carry_back(chunks: _Chunks, do: Tensor, dstate: Tensor) -> Tensor:
    """Moves the gradient of the state in place to before the segment; returns that after each chunk."""
    return carry(_times(chunks.q.mT, do * chunks.since), chunks.whole, dstate, reverse=True, rest=chunks.rest)


def _backward_rows(q, k, v, log_decay, do, scale: float, state, dstate, grads) -> None:
    """Fills the gradients of q, k, v and log_decay, and moves dstate in place from the final to the initial state."""
    cut, inputs = _segments(q, v), (q, k, v, log_decay)
    initials = states_before(cut, lambda segment: _carry(_chunks(segment, state.dtype, *inputs), state), state)
    for segment in reversed(cut):
        chunks = _chunks(segment, state.dtype, *inputs)
        (dout,) = gather_padded(segment, state.dtype, do)
        dout = dout.mul_(scale).view_as(chunks.v)

        scores, dscores = _scores(chunks), _by_heads(dout) @ _by_heads(chunks.v).mT
        dvalues = _by_heads(scores.mT @ _by_heads(dout))
        passing = scores.mul_(dscores).tril_(-1)  # through the decays between each pair
        dscores = dscores.mul_(chunks.between).sum(3)
        dq, dk = dscores @ chunks.k, dscores.mT @ chunks.q

        entering = _carry(chunks, initials.pop())
        leaving = _carry_back(chunks, dout, dstate)
        late_do, early_v = (dout * chunks.since).flatten(-2), (chunks.v * chunks.until).flatten(-2)
        multiply_add(dq, late_do, entering.flatten(-2).mT)
        multiply_add(dk, early_v, leaving.flatten(-2).mT)
        of_state = _times(chunks.k, leaving).mul_(chunks.until)

        # What passes through the decay of token t: pairs (r >= t, s < t) in the chunk, queries from t on that read the
        # state before it, keys before t that the state after it holds, and the one state as far as the other holds it.
        from_here = (_times(chunks.q, entering).mul_(late_do.view_as(dout))).sum(-1).mT
        from_here = passing.sum(-1).sub_(passing.sum(-2)).add_(from_here)
        before = (chunks.v * of_state).sum(-1).mT
        through = (entering * leaving).mul_(chunks.whole).sum((-3, -1))[..., None]
        ones = torch.ones_like(dscores[0, 0, 0])
        dlog_decay = from_here @ ones.tril() + before @ ones.triu(1) + through
        parts = dq, dk, of_state.add_(dvalues).flatten(-2), dlog_decay.flatten(2, 3)[..., None]
        for grad, x in zip(grads, parts, strict=True):
            scatter(grad, segment, x)


def _taken(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
    """Inputs or their gradients, the values of a key's heads side by side, log-decays [B, T, HV, 1]."""
    return q, k, _beside(v, q), log_decay[..., None]


def _beside(x: Tensor, q: Tensor) -> Tensor:
    """x [B, T, HV, V] as [B, T, H, G V], a view if x is contiguous in its last two axes."""
    return x.flatten(2).unflatten(2, (q.shape[2], -1))


def _start(state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A copy of states [N, HV, K, V] to carry along, or zeros, as [N, H, K, G, V]."""
    dtype, (H, K), (HV, V) = state_dtype(q, k, v), q.shape[2:], v.shape[2:]
    if state is not None:
        state = state.to(dtype).unflatten(1, (H, HV // H)).transpose(2, 3)
        return state.clone(memory_format=torch.contiguous_format)
    return torch.zeros(count_states(cu_seqlens, v.shape[0]), H, K, HV // H, V, dtype=dtype, device=v.device)


def _joined(state: Tensor) -> Tensor:
    """States [N, H, K, G, V] as [N, HV, K, V]."""
    return state.transpose(2, 3).flatten(1, 2).contiguous()


def _segments(q: Tensor, v: Tensor) -> list[Segment]:
    """Cuts rows of q [B, T, H, K] and values side by side [B, T, H, G V]."""
    return cut_segments(q.shape[1], CHUNK, q.shape[0] * q.shape[2] * max(q.shape[3], v.shape[3], CHUNK))


# FLOPs from shapes: 2 per multiply-add, in chunks of 64 whatever form runs, matrix products only; the masked half of a
# chunk's scores is computed, and so counted.


def forward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """2 C K per token and key; 2 C V + 4 K V per token and value head: scores with v, the state's update and use."""
    (B, T, H, K), (HV, V) = q_shape, v_shape[2:]
    return B * (count_pairs(T, CHUNK) * 2 * (H * K + HV * V) + HV * 4 * T * K * V)


def backward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """6 C K per token and key: scores, gradients of q and k; 4 C V + 10 K V per token and value head: gradients of
    scores and of v, and five products with states."""
    (B, T, H, K), (HV, V) = q_shape, v_shape[2:]
    return B * (count_pairs(T, CHUNK) * (6 * H * K + 4 * HV * V) + HV * 10 * T * K * V)
