"""The gated delta rule in chunks of 64 tokens: the corrections of a chunk solve one triangular system.

With the state S before a chunk, G the cumulative log-decay inside it and g = exp(G), for a query r and a key s:

    A_rs = sum_d e_rd k_rd k_sd exp(G_rd - G_sd)  (s < r)       P_rs = scale sum_d q_rd k_sd exp(G_rd - G_sd)  (s <= r)
    I_ = (1 + A)^-1,  U = I_ (w v),  W = I_ (e k g),  X = U - W S                             (X: the corrections)
    o = scale (q g) S + P X,    S <- diag(g_C) S + (k exp(G_C - G))^T X

One decay per head is a matrix of factors beside the products; decays per channel halve the chunk as gated linear
attention does (`linnet.ops.gated.chunked`), so that no factor exceeds 1 and any decay is safe, -inf included. The
inverse is substituted forward, token by token in blocks of 8 and by matrix products of blocks above: its entries are
bounded where e |k|^2 <= 2, but powers of A are not, so no series is used.

The backward runs the chunks again from the states before each segment. With D the gradient of the state after a chunk:

    dX = P^T do + (k exp(G_C - G)) D,  dR = I_^T dX,  dA = -dR X^T (s < r),  dP = do X^T (s <= r)
    D <- diag(g_C) D - W^T (k exp(G_C - G)) D + (scale q g - P W)^T do

The gradient of a log-decay is the sum of all that passes through its token, as in gated linear attention.
Source: Yang et al. 2024 (arXiv:2412.06464) for the chunk form with a gate, extended to gates per channel.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops.chunks import (
    Segment,
    count_pairs,
    cut_rows,
    cut_tokens,
    fill_gradients,
    multiply_add,
    scatter,
    start_states,
    state_dtype,
    states_before,
)
from linnet.ops.gated.chunked import (
    block_decays,
    diagonal_scores,
    early_halves,
    gather_padded,
    halvings,
    late_halves,
    pair_decays,
    scores_between,
)

CHUNK = 64  # a power of two
SUBSTITUTED = 8  # tokens of a block that is inverted token by token


def delta_forward(
    q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, return_final_state=True
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] and the final state [N, HV, K, V] or None; arguments as `gated_delta_rule`."""
    inputs = _inputs(q, k, v, log_decay, erase, write)
    o, state = forward_rows(_chunks, inputs, initial_state, cu_seqlens, scale)
    return o, state if return_final_state else None


def forward_rows(
    cut: Callable, inputs: list[Tensor], initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns o and the final state of a rule whose chunks, as `cut` makes them, are `_Chunks` of corrections.

    Args:
        cut: (segment, dtype, inputs, scale) -> chunks. inputs: q, k, v and gates, with four axes each.
    """
    q, k, v = inputs[:3]
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = start_states(initial_state, q, k, v, cu_seqlens)
    for rows in cut_rows(q, v, cu_seqlens):
        entering, buffer, taken = state[rows.states], rows.buffer(o), [rows.take(x) for x in inputs]
        for segment in cut_tokens(q, taken[2], CHUNK):
            chunks = cut(segment, entering.dtype, taken, scale)
            initials, corrections = carry_corrections(chunks, entering)
            out = chunks.scores @ corrections
            multiply_add(out, chunks.late_q, initials)
            scatter(buffer, segment, out)
        rows.put_state(state, entering)
        rows.put(o, buffer)
    return o, state


def delta_backward(
    q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, do, dfinal
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay, erase, write and the initial state (given or not)."""
    inputs = _inputs(q, k, v, log_decay, erase, write)
    grads, dstate = backward_rows(_fill, inputs, initial_state, cu_seqlens, scale, do, dfinal)
    dq, dk, dv, dlog_decay, derase, *dwrite = grads
    shaped = ((dlog_decay, log_decay), (derase, erase), (dwrite[0] if dwrite else None, write))
    return dq, dk, dv, *(None if like is None else grad.view(like.shape) for grad, like in shaped), dstate


def backward_rows(
    fill: Callable, inputs: list[Tensor], initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    do: Tensor, dfinal: Tensor | None,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Returns the gradients of the inputs and of the initial state; `fill` is as in `fill_gradients`, with a scale."""
    q, k, v = inputs[:3]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    state, dstate = (start_states(x, q, k, v, cu_seqlens) for x in (initial_state, dfinal))
    fill_gradients(cut_rows(q, v, cu_seqlens), partial(fill, scale), (*inputs, do), state, dstate, grads)
    return grads, dstate


class _Chunks(NamedTuple):
    """Chunks [n, B, HV, C, ...] of a segment in the dtype of states; `late` from the initial, `early` to the final."""

    q: Tensor  # with the scale
    k: Tensor
    v: Tensor
    erase: Tensor  # [..., C, 1 or K]
    write: Tensor | None  # [..., C, 1 or V]
    erased: Tensor  # erase k
    decays: list[Tensor]  # of blocks of 1, 2, ... C tokens, [..., C / size, 1 or K] each
    rest: Tensor  # of the decay of a chunk
    factors: Tensor | None  # decays between two tokens [..., C, C], 0 above the diagonal; None if per channel
    since: Tensor  # decays from the start of the chunk, [..., C, 1 or K]
    until: Tensor  # decays to its end
    late_q: Tensor
    late_erased: Tensor
    early_k: Tensor
    overlaps: Tensor  # A
    scores: Tensor  # P
    inverse: Tensor
    U: Tensor
    W: Tensor


def _chunks(segment: Segment, dtype: torch.dtype, inputs: list[Tensor], scale: float) -> _Chunks:
    q, k, v, log_decay, erase, *write = gather_padded(segment, dtype, *inputs)
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q.mul_(scale), k))
    erased, values = erase * k, v * (write[0] if write else erase)
    decays, rest = block_decays(log_decay)
    if log_decay.shape[-1] == 1:
        factors, since, until = pair_decays(decays)
        late_q, late_erased, early_k = q * since, erased * since, k * until
        overlaps = (erased @ k.mT).mul_(factors).tril_(-1)
        scores = (q @ k.mT).mul_(factors)
    else:
        since, until = decays[0].clone(), torch.ones_like(decays[0])
        factors, scores, overlaps = None, diagonal_scores(q, k), q.new_zeros(*q.shape[:-1], q.shape[-2])
        late_q, late_erased, early_k = q * since, erased * since, k.clone()
        for half in halvings(decays, [late_q, late_erased, since], [early_k, until]):
            keys = early_halves(early_k, half).mT
            scores_between(scores, half).copy_(late_halves(late_q, half) @ keys)
            scores_between(overlaps, half).copy_(late_halves(late_erased, half) @ keys)
    inverse = invert(overlaps)
    return _Chunks(
        q, k, v, erase, write[0] if write else None, erased, decays, rest, factors, since, until, late_q, late_erased,
        early_k, overlaps, scores, inverse, inverse @ values, inverse @ late_erased,
    )  # fmt: skip


def invert(overlaps: Tensor) -> Tensor:
    """Returns (1 + A)^-1 for strictly lower triangular A [..., C, C], C a power of two, by forward substitution."""
    size, inverse = min(SUBSTITUTED, overlaps.shape[-1]), torch.zeros_like(overlaps)
    A = _diagonal_blocks(overlaps, size).movedim((-2, -1), (0, 1)).contiguous()  # rows of all blocks side by side
    block = torch.zeros_like(A)
    block.diagonal().fill_(1.0)
    for r in range(1, size):
        for s in range(r):
            block[r, : s + 1].addcmul_(A[r, s], block[s, : s + 1], value=-1)
    _diagonal_blocks(inverse, size).copy_(block.movedim((0, 1), (-2, -1)))
    while size < overlaps.shape[-1]:
        first, second = _diagonal_blocks(inverse, size).unflatten(-3, (-1, 2)).unbind(-3)
        scores_between(inverse, size).copy_((second @ scores_between(overlaps, size) @ first).neg_())
        size *= 2
    return inverse


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal of x [..., C, C], as a view [..., C / size, size, size]."""
    blocks = x.unflatten(-2, (-1, size)).unflatten(-1, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def carry_corrections(chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the state [B, HV, K, V] in place to after the segment; returns the state before each chunk and X."""
    initials, corrections = chunks.U.new_empty(*chunks.U.shape[:3], *state.shape[2:]), torch.empty_like(chunks.U)
    for c, entering in enumerate(initials):
        entering.copy_(state)
        torch.sub(chunks.U[c], chunks.W[c] @ entering, out=corrections[c])
        state.copy_(_decayed(chunks, c, entering)).add_(chunks.early_k[c].mT @ corrections[c])
    return initials, corrections


def carry_back(chunks: _Chunks, do: Tensor, dstate: Tensor) -> Tensor:
    """Moves the gradient of the state in place to before the segment; returns that after each chunk."""
    added = (chunks.late_q - chunks.scores @ chunks.W).mT @ do
    finals = torch.empty_like(added)
    for c in reversed(range(len(finals))):
        finals[c] = dstate
        through = chunks.W[c].mT @ (chunks.early_k[c] @ finals[c])
        dstate.copy_(_decayed(chunks, c, finals[c])).sub_(through).add_(added[c])
    return finals


def _decayed(chunks: _Chunks, c: int, state: Tensor) -> Tensor:
    """A state after the decay of chunk c, with what the rounding of this decay took from it."""
    return (state * chunks.rest[c].mT).addcmul_(state, chunks.decays[-1][c].mT)


def walk_back(
    cut: Callable, scale: float, inputs: list[Tensor], state: Tensor, dstate: Tensor
) -> Iterator[tuple[Segment, "_Chunks", Tensor, Tensor, Tensor, Tensor]]:
    """Yields each segment from the last, its chunks, the gradient of o, the states before its chunks, the corrections
    and the gradients of the states after its chunks; moves dstate in place to before it.

    Args:
        cut: as in `forward_rows`. inputs: with the gradient of o behind them.
    """
    *inputs, do = inputs
    segments = cut_tokens(inputs[0], inputs[2], CHUNK)

    def chunks_of(segment: Segment) -> _Chunks:
        return cut(segment, state.dtype, inputs, scale)

    initials = states_before(segments, lambda segment: carry_corrections(chunks_of(segment), state), state)
    for segment in reversed(segments):
        chunks, (dout,) = chunks_of(segment), gather_padded(segment, state.dtype, do)
        entering, corrections = carry_corrections(chunks, initials.pop())
        yield segment, chunks, dout, entering, corrections, carry_back(chunks, dout, dstate)


def _fill(scale: float, inputs: list[Tensor], state: Tensor, dstate: Tensor, grads: list[Tensor]) -> None:
    """Fills the gradients of the inputs, and moves dstate in place from the final to the initial state."""
    group = inputs[2].shape[2] // inputs[0].shape[2]
    for segment, chunks, dout, entering, corrections, leaving in walk_back(_chunks, scale, inputs, state, dstate):
        dcorrections = chunks.scores.mT @ dout
        multiply_add(dcorrections, chunks.early_k, leaving)
        dvalues = chunks.inverse.mT @ dcorrections
        dscores, doverlaps = (dout @ corrections.mT).tril_(), (dvalues @ corrections.mT).neg_().tril_(-1)
        dlate_q, dlate_erased, dearly_k = dout @ entering.mT, (dvalues @ entering.mT).neg_(), corrections @ leaving.mT

        inside = _inside_per_head if chunks.factors is not None else _inside_per_channel
        dq, derased, dk, dlog_decay = inside(chunks, dscores, doverlaps)

        # What passes through the decay of a token between the chunk and its two states.
        from_here = dlate_q * chunks.late_q + dlate_erased * chunks.late_erased
        before = dearly_k * chunks.early_k
        through = (entering * leaving).sum(-1)[..., None, :] * chunks.decays[-1]
        if chunks.factors is not None:
            from_here, before, through = (x.sum(-1, keepdim=True) for x in (from_here, before, through))
        ones = torch.ones_like(chunks.scores[0, 0, 0])
        multiply_add(dlog_decay, ones.triu().expand_as(chunks.scores), from_here)
        multiply_add(dlog_decay, ones.tril(-1).expand_as(chunks.scores), before)
        dlog_decay += through

        dq.addcmul_(dlate_q, chunks.since)
        derased.addcmul_(dlate_erased, chunks.since)
        dk.addcmul_(dearly_k, chunks.until).addcmul_(derased, chunks.erase)
        derase, dwrite = derased.mul_(chunks.k), dvalues * chunks.v
        if chunks.erase.shape[-1] == 1:
            derase = derase.sum(-1, keepdim=True)
        if chunks.write is None or chunks.write.shape[-1] == 1:
            dwrite = dwrite.sum(-1, keepdim=True)
        dq, dk = (x.unflatten(2, (-1, group)).sum(3) for x in (dq.mul_(scale), dk))
        if chunks.write is None:
            parts = (dq, dk, dvalues * chunks.erase, dlog_decay, derase + dwrite)
        else:
            parts = (dq, dk, dvalues * chunks.write, dlog_decay, derase, dwrite)
        for grad, x in zip(grads, parts, strict=True):
            scatter(grad, segment, x)


def _inside_per_head(chunks: _Chunks, dscores: Tensor, doverlaps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, erase k, k and the log-decays [..., C, 1] from those of P and A, for one decay per head."""
    passing = (dscores * chunks.scores).addcmul_(doverlaps, chunks.overlaps)  # of each pair
    ones = torch.ones_like(passing[0, 0, 0])
    # The decay of token t lies between the pairs r >= t > s.
    dlog_decay = (ones.triu() @ passing).tril_(-1).sum(-1, keepdim=True)
    dscores, doverlaps = dscores.mul_(chunks.factors), doverlaps.mul_(chunks.factors)
    dk = dscores.mT @ chunks.q
    multiply_add(dk, doverlaps.mT.contiguous(), chunks.erased)
    return dscores @ chunks.k, doverlaps @ chunks.k, dk, dlog_decay


def _inside_per_channel(chunks: _Chunks, dscores: Tensor, doverlaps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_inside_per_head`, log-decays [..., C, K]."""
    q, erased, k = chunks.q, chunks.erased, chunks.k
    since, until = chunks.decays[0].clone(), torch.ones_like(k)
    late_q, late_erased, early_k = q * since, erased * since, k.clone()
    dq, derased, dk = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(q)
    for half in halvings(chunks.decays, [late_q, late_erased, since], [early_k, until]):
        keys, decayed = early_halves(early_k, half), late_halves(since, half)
        of_scores, of_overlaps = (scores_between(x, half).contiguous() for x in (dscores, doverlaps))
        late_halves(dq, half).addcmul_(of_scores @ keys, decayed)
        late_halves(derased, half).addcmul_(of_overlaps @ keys, decayed)
        of_keys = of_scores.mT @ late_halves(late_q, half) + of_overlaps.mT @ late_halves(late_erased, half)
        early_halves(dk, half).addcmul_(of_keys, early_halves(until, half))
    ones = torch.ones_like(dscores[0, 0, 0])
    dlog_decay = ones.triu() @ (dq * q).addcmul_(derased, erased).addcmul_(dk, k, value=-1)
    same = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return dq.addcmul_(same, k), derased, dk.addcmul_(same, q), dlog_decay


def _inputs(q, k, v, log_decay, erase, write) -> list[Tensor]:
    """The inputs with four axes; decays that are None become zeros, and a write that is None is left out."""
    if log_decay is None:
        log_decay = torch.zeros(v.shape[:3], dtype=state_dtype(q, k, v), device=v.device)
    gates = (log_decay, erase) if write is None else (log_decay, erase, write)
    return [q, k, v, *(x if x.ndim == 4 else x[..., None] for x in gates)]


# FLOPs from shapes: 2 per multiply-add, in chunks of 64 whatever form runs, matrix products only, the inverse among
# them. Decays per channel compute half of the scores by halving.


def forward_flops(q_shape, k_shape, v_shape, decay_shape, *_, **__) -> int:
    """C (4 K + 2/3 C + 2 (K + V) + 2 V) + 6 K V per token and value head: A and P, the inverse, W and U, P X, and three
    products with states."""
    (B, T, HV, V), K = v_shape, q_shape[-1]
    pairs, scores = count_pairs(T, CHUNK), _score_flops(K, decay_shape)
    return B * HV * (pairs * (scores + 2 * CHUNK // 3 + 2 * K + 4 * V) + 6 * T * K * V)


def backward_flops(q_shape, k_shape, v_shape, decay_shape, *_, **__) -> int:
    """The forward again without its outputs, then per token and value head C (2 K + 8 V) + 14 K V and twice the scores:
    P W, P^T do, dR, dP and dA, seven products with states, and the gradients of A and P."""
    (B, T, HV, V), K = v_shape, q_shape[-1]
    pairs, scores = count_pairs(T, CHUNK), _score_flops(K, decay_shape)
    again = pairs * (scores + 2 * CHUNK // 3 + 2 * K + 2 * V) + 4 * T * K * V
    return B * HV * (again + pairs * (2 * scores + 2 * K + 8 * V) + 14 * T * K * V)


def _score_flops(K: int, decay_shape) -> int:
    """Of A and P, per pair of tokens of a chunk."""
    return 2 * K if decay_shape is not None and len(decay_shape) == 4 else 4 * K
