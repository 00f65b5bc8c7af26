"""The diagonal-plus-low-rank rule in chunks of 64 tokens: what the tokens of a chunk read solves a triangular system.

With the state S before a chunk, G the cumulative log-decay inside it and g = exp(G), for a query r and a key s:

    P_rs(q, k) = sum_d q_rd k_sd exp(G_rd - G_sd)  (s <= r)

A token reads before its own decay, so b_t is a query of token t - 1, and b_0 reads S. With A_t(k) = P_{t-1}(b, k) and
A_0 = 0, the reads u_t = b_t S_{t-1}, and R_t = b_t exp(G_{t-1}):

    u = (1 - A(a))^-1 (A(k) v + R S)
    o = P(q, k) v + P(q, a) u + (q g) S,    S <- diag(g_C) S + (k exp(G_C - G))^T v + (a exp(G_C - G))^T u

So u and v together are corrections of the delta rule with keys a and k, and the walk through the chunks is the delta
rule's. Chunks are halved as there, so that no factor exceeds 1 and any decay is safe, -inf included. The backward runs
the chunks again from the states before each segment.
Source: Peng et al. 2025 (arXiv:2503.14456) for the recurrence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops.chunks import Segment, count_pairs, multiply_add, scatter
from linnet.ops.delta.chunked import CHUNK, backward_rows, forward_rows, invert, walk_back
from linnet.ops.gated.chunked import (
    block_decays,
    early_halves,
    gather_padded,
    halvings,
    late_halves,
    scores_between,
)


def dplr_forward(
    q, k, v, log_decay, a, b, initial_state, cu_seqlens, scale, return_final_state=True
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, H, V] and the final state [N, H, K, V] or None; arguments as `dplr_rule`."""
    o, state = forward_rows(_chunks, [q, k, v, log_decay, a, b], initial_state, cu_seqlens, scale)
    return o, state if return_final_state else None


def dplr_backward(q, k, v, log_decay, a, b, initial_state, cu_seqlens, scale, do, dfinal) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay, a, b and the initial state (given or not)."""
    inputs = [q, k, v, log_decay, a, b]
    grads, dstate = backward_rows(_fill, inputs, initial_state, cu_seqlens, scale, do, dfinal)
    return *grads, dstate


class _Chunks(NamedTuple):
    """Chunks [n, B, H, C, ...] of a segment in the dtype of states; `late` from the initial, `early` to the final.

    `scores`, `early_k`, `U` and `W` are those of the delta rule, of 2 C corrections per chunk: u, then v.
    """

    queries: Tensor  # q with the scale, and b of the next token, [2, n, B, H, C, K]
    keys: Tensor  # a and k, [2, n, B, H, C, K]
    v: Tensor
    decays: list[Tensor]  # of blocks of 1, 2, ... C tokens, [..., C / size, K] each
    rest: Tensor  # of the decay of a chunk
    since: Tensor  # decays from the start of the chunk, [..., C, K]
    until: Tensor  # decays to its end
    late_q: Tensor
    late_b: Tensor  # R
    early_k: Tensor  # a, then k, [..., 2 C, K]
    scores: Tensor  # P(q, a), then P(q, k), [..., C, 2 C]
    A: Tensor  # A(k)
    inverse: Tensor
    U: Tensor
    W: Tensor


def _chunks(segment: Segment, dtype: torch.dtype, inputs: list[Tensor], scale: float) -> _Chunks:
    q, k, v, log_decay, a, b = gather_padded(segment, dtype, *inputs)
    queries, keys = torch.stack([q.mul_(scale), _up(b)]), torch.stack([a, k])
    decays, rest = block_decays(log_decay)
    since, until = decays[0].clone(), torch.ones_like(k)
    late, early = queries * since, keys.clone()
    scores = queries.new_zeros(2, *keys.shape[:-1], keys.shape[-2])
    scores.diagonal(dim1=-2, dim2=-1).copy_((queries[:, None] * keys).sum(-1))
    for half in halvings(decays, [late, since], [early, until]):
        scores_between(scores, half).copy_(late_halves(late, half)[:, None] @ early_halves(early, half).mT)
    (A_a, A_k), late_b = _down(scores[1]), _down(late[1], b[..., :1, :])
    inverse, zeros = invert(-A_a), torch.zeros_like(late_b)
    return _Chunks(
        queries, keys, v, decays, rest, since, until, late[0], late_b, torch.cat(tuple(early), -2),
        torch.cat(tuple(scores[0]), -1), A_k, inverse, torch.cat([inverse @ (A_k @ v), v], -2),
        torch.cat([-inverse @ late_b, zeros], -2),
    )  # fmt: skip


def _down(x: Tensor, first: Tensor | None = None) -> Tensor:
    """Moves x [..., C, D] by one token to the next ones, behind `first` [..., 1, D] or zeros."""
    return torch.cat([torch.zeros_like(x[..., :1, :]) if first is None else first, x[..., :-1, :]], -2)


def _up(x: Tensor) -> Tensor:
    """Moves x [..., C, D] by one token to the ones before, with zeros at the end."""
    return torch.cat([x[..., 1:, :], torch.zeros_like(x[..., :1, :])], -2)


def _fill(scale: float, inputs: list[Tensor], state: Tensor, dstate: Tensor, grads: list[Tensor]) -> None:
    """Fills the gradients of the inputs, and moves dstate in place from the final to the initial state."""
    for segment, chunks, dout, entering, corrections, leaving in walk_back(_chunks, scale, inputs, state, dstate):
        dcorrections = chunks.scores.mT @ dout
        multiply_add(dcorrections, chunks.early_k, leaving)
        du, dv = dcorrections.chunk(2, -2)
        dread = chunks.inverse.mT @ du  # of A(k) v + R S
        # Of the scores of q and b with a and k.
        dscores, dA = (torch.stack((x @ corrections.mT).chunk(2, -1)) for x in (dout, dread))
        dinside = torch.stack([dscores.tril_(), _up(dA.tril_(-1))])
        dlate_q, dlate_b = dout @ entering.mT, dread @ entering.mT
        dlate = torch.stack([dlate_q, _up(dlate_b)])
        dearly = torch.stack((corrections @ leaving.mT).chunk(2, -2))

        dqueries, dkeys, dlog_decay = _inside(chunks, dinside)
        # What passes through the decay of a token between the chunk and its two states.
        dlate.mul_(chunks.since)
        dearly.mul_(chunks.until)
        ones = torch.ones_like(chunks.A[0, 0, 0])
        dlog_decay += ones.triu() @ (dlate * chunks.queries).sum(0)
        dlog_decay += ones.tril(-1) @ (dearly * chunks.keys).sum(0)
        dlog_decay += (entering * leaving).sum(-1)[..., None, :] * chunks.decays[-1]

        (dq, db), (da, dk) = dqueries.add_(dlate), dkeys.add_(dearly)
        dv = dv + chunks.A.mT @ dread
        parts = (dq.mul_(scale), dk, dv, dlog_decay, da, _down(db, dlate_b[..., :1, :]))
        for grad, x in zip(grads, parts, strict=True):
            scatter(grad, segment, x)


def _inside(chunks: _Chunks, dscores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, the keys and the log-decays from those of the scores, [2, 2, ..., C, C]."""
    queries, keys = chunks.queries, chunks.keys
    since, until = chunks.decays[0].clone(), torch.ones_like(chunks.until)
    late, early = queries * since, keys.clone()
    dqueries, dkeys = torch.zeros_like(queries), torch.zeros_like(keys)
    for half in halvings(chunks.decays, [late, since], [early, until]):
        between = scores_between(dscores, half).contiguous()
        of_queries = (between @ early_halves(early, half)).sum(1)
        of_keys = (between.mT @ late_halves(late, half)[:, None]).sum(0)
        late_halves(dqueries, half).addcmul_(of_queries, late_halves(since, half))
        early_halves(dkeys, half).addcmul_(of_keys, early_halves(until, half))
    passing = (dqueries * queries).sub_(dkeys * keys).sum(0)
    dlog_decay = torch.ones_like(chunks.A[0, 0, 0]).triu() @ passing
    same = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # no decay is between a token and itself
    dqueries.add_((same * keys).sum(1))
    return dqueries, dkeys.add_((same * queries[:, None]).sum(0)), dlog_decay


# FLOPs from shapes: 2 per multiply-add, in chunks of 64 whatever form runs, matrix products only, the inverse among
# them. Halving computes half of the scores.


def forward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """C (6 K + 2/3 C + 8 V) + 8 K V per token and head: the scores of two queries with two keys, W, the inverse, U, the
    scores with u and v, and four products with states."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * H * (count_pairs(T, CHUNK) * (6 * K + 2 * CHUNK // 3 + 8 * V) + 8 * T * K * V)


def backward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """The forward again without its outputs, then per token and head C (10 K + 16 V) + 20 K V: the gradients of scores
    and from them of queries and keys, scores with W, gradients of u and v, and ten products with states."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    again = count_pairs(T, CHUNK) * (6 * K + 2 * CHUNK // 3 + 4 * V) + 6 * T * K * V
    return B * H * (again + count_pairs(T, CHUNK) * (10 * K + 16 * V) + 20 * T * K * V)
