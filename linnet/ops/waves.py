"""Packed documents in time order, for recurrences on a CPU: all first tokens, then all second tokens, and so on.

The tokens of all documents at one time are a wave. Documents are sorted by length, the longest first, so the documents
that have a token at time t are the first of those that have one at time t - 1. A recurrence then takes one operation
per time for all documents, on neighbouring tokens and without padding. Where documents are few and long, other orders
take fewer operations.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops.documents import documents


class Waves(NamedTuple):
    """The order in time of T packed tokens.

    order: int64 [T], the token of the row at each place.
    places: int64 [T], the place of each token of the row.
    sizes: how many documents have a token at time 0, 1, ...; they fall and sum to T.
    states: int64 [sizes[0]], the documents that have tokens, in the order of their first tokens.
    last: int64 [sizes[0]], the places of their last tokens.
    """

    order: Tensor
    places: Tensor
    sizes: list[int]
    states: Tensor
    last: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Returns x [1, T, ...] as [T, ...] in the order of time."""
        return x[0].index_select(0, self.order)

    def put(self, x: Tensor) -> Tensor:
        """Returns x [T, ...], in the order of time, as [1, T, ...]."""
        return x.index_select(0, self.places)[None]


def longest(cu_seqlens: Tensor, length: int) -> int:
    """Returns how many tokens the longest document has, the number of waves."""
    return max(end - start for _, start, end in documents(cu_seqlens, 1, length))


def in_waves(cu_seqlens: Tensor, length: int) -> Waves:
    """Returns the order of packed documents, int32 [N+1]. Raises ValueError for boundaries that do not fit `length`."""
    starts, ends = torch.tensor([(start, end) for _, start, end in documents(cu_seqlens, 1, length)]).unbind(1)
    lengths, states = (ends - starts).sort(descending=True, stable=True)
    states = states[: int((lengths > 0).sum())]
    times = torch.arange(int(lengths[0]))[:, None]
    alive = times < lengths[: len(states)]
    order = (starts[states] + times)[alive]
    places = torch.empty_like(order)
    places[order] = torch.arange(length)
    return Waves(order, places, alive.sum(1).tolist(), states, places[ends[states] - 1])


def recur(decay: Tensor, x: Tensor, sizes: list[int], dim: int) -> None:
    """x_t += decay_t x_{t-1} in place, in the order of time along `dim`; `decay` broadcasts to x."""
    steps = x.split(sizes, dim)
    for now, earlier, decay_t in zip(steps[1:], steps, decay.split(sizes, dim)[1:], strict=False):
        now.addcmul_(decay_t, _first(earlier, now, dim))


def recur_back(decay: Tensor, x: Tensor, sizes: list[int], dim: int, states: Tensor | None = None) -> None:
    """x_t += decay_{t+1} x_{t+1} in place, from the last time to the first.

    Args:
        states: y, like x; each y_t becomes x_t y_{t-1}, and those of the first time stay.
    """
    steps, decays = x.split(sizes, dim), decay.split(sizes, dim)
    of_states = None if states is None else states.split(sizes, dim)
    for t in range(len(sizes) - 1, 0, -1):
        now = steps[t]
        _first(steps[t - 1], now, dim).addcmul_(decays[t], now)
        if of_states is not None:
            torch.mul(now, _first(of_states[t - 1], now, dim), out=of_states[t])


def _first(x: Tensor, like: Tensor, dim: int) -> Tensor:
    """Returns as many of the documents of one time as another time has."""
    size = like.shape[dim]
    return x if x.shape[dim] == size else x.narrow(dim, 0, size)
