"""Causal attention of one span of a longer row, with the other spans on other ranks (`linnet.ops.sequence`).

A window reads the last `window - 1` keys and values of the span before (a halo). Without a window, or with one that is
longer than a span, every rank takes some of the heads over the whole row: an all-to-all from spans to heads, the same
attention as on one rank, and an all-to-all back. Both are exact, keep spans contiguous and give every rank equal work.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import sequence


def attend_span(
    here: sequence.Span,
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Returns what `causal_attention` returns for the tokens of this rank's span.

    Args:
        here: the place of the span. attend: causal attention of whole rows.
        q: [B, L, H, D]. k, v: [B, L, G, D]. All of this rank's span of L tokens.
        cu_seqlens: the documents of this span of one row, int32 [N+1], B = 1.

    Raises:
        ValueError: neither the window nor the number of heads allows a cut.
    """
    if window and window - 1 <= q.shape[1]:
        return _beside(here, attend, q, k, v, window, cu_seqlens)
    return _by_heads(here, attend, q, k, v, window, cu_seqlens)


def span_problems(heads: int, groups: int, window: int, span: int, ranks: int) -> list[str]:
    """Returns why attention cannot be cut into spans: a list with one problem, or an empty one.

    Args:
        heads: of the queries. groups: heads of keys and values.
        span: tokens of a span. ranks: number of spans.
    """
    if window and window - 1 <= span:
        return []
    if groups and heads % (groups * _repeats(groups, ranks)) == 0:
        return []
    of_keys = "" if heads == groups else f" ({groups} of keys and values)"
    if not window:
        return [f"num_heads: {heads}{of_keys} cannot be shared by the {ranks} ranks of a row; use a divisor for sp"]
    return [
        f"window: {window} reads {window - 1} tokens back, but a span has {span}, and {ranks} ranks of a row cannot "
        f"share num_heads: {heads}{of_keys} instead; lower sp or window"
    ]


def _repeats(groups: int, ranks: int) -> int:
    """Returns how many copies of each head of keys make their number a multiple of the ranks."""
    return ranks // math.gcd(groups, ranks)


def _by_heads(
    here: sequence.Span, attend: Callable, q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None
) -> Tensor:
    if problems := span_problems(q.shape[2], k.shape[2], window, q.shape[1], here.size):
        raise ValueError(f"causal_attention: {problems[0]}")
    documents = sequence.whole_documents(cu_seqlens, q.shape[1])
    if (copies := _repeats(k.shape[2], here.size)) > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    q, k, v = (sequence.all_to_all(x, 1, 2) for x in (q, k, v))  # [B, T, H / ranks, D]
    return sequence.all_to_all(attend(q, k, v, window, documents), 2, 1)


def _beside(
    here: sequence.Span, attend: Callable, q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None
) -> Tensor:
    if window == 1:
        return attend(q, k, v, 1, None)
    length, before = q.shape[1], window - 1
    halo = sequence.halo(torch.cat([x.narrow(1, length - before, before) for x in (k, v)], -1), before, 1)
    k, v = (torch.cat([past, x], 1) for past, x in zip(halo.chunk(2, -1), (k, v), strict=True))
    documents = sequence.whole_documents(cu_seqlens, length)
    if documents is not None:
        first = here.rank * length - (before if here.rank else 0)
        documents = (documents - first).clamp(0, (here.rank + 1) * length - first)
    if here.rank == 0:  # nothing is before the row; the halo stays in the graph, since its backward is a collective
        return attend(q, k[:, before:], v[:, before:], window, documents)
    return attend(F.pad(q, (0, 0, 0, 0, before, 0)), k, v, window, documents)[:, before:]
