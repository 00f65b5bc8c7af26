"""Packed documents: `cu_seqlens` (int32 [N+1], B = 1) gives where each starts, and states reset there.

`check_documents` reads shapes only, so it is safe while tracing; `documents` reads the values, so it belongs inside an
op's implementation. An op loops over the result of `documents`, which without `cu_seqlens` is the whole batch:

    for rows, start, end in documents(cu_seqlens, batch, length):
        o[:, start:end], state[rows] = run(q[:, start:end], ..., initial_state[rows])

Recurrences on a CPU take many documents in the order of time: all first tokens, then all second tokens, and so on. The
tokens of all documents at one time are a wave. Documents are sorted by length, the longest first, so the documents
that have a token at time t are the first of those that have one at time t - 1. A recurrence then takes one operation
per time for all documents, on neighbouring tokens and without padding. Where documents are few and long, other orders
take fewer operations.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops import backend


def check_documents(cu_seqlens: Tensor | None, batch: int, length: int) -> None:
    """Raises ValueError unless `cu_seqlens` is None, or int32 [N+1] with N >= 1 and the batch is one sequence.

    In `linnet.ops.debug()` also reads the values: they must rise from 0 to `length`.
    """
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(
            f"cu_seqlens is a {type(cu_seqlens).__name__}; give a tensor: torch.tensor([...], dtype=torch.int32)"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; "
            "give int32 [N+1]: the start of each of N documents, then the total length"
        )
    if batch != 1:
        raise ValueError(
            f"cu_seqlens packs documents into one sequence, but the batch is {batch}; reshape it to [1, B*T, ...]"
        )
    if backend.debugging(cu_seqlens):
        documents(cu_seqlens, batch, length)


def count_states(cu_seqlens: Tensor | None, batch: int) -> int:
    """Returns N, the number of states of an op: one per document, or one per sequence."""
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1


def documents(cu_seqlens: Tensor | None, batch: int, length: int) -> list[tuple[slice, int, int]]:
    """Returns (slice of the state's first axis, first token, end token) of each range that has states of its own.

    Documents may be empty (start = end); their final state is their initial state.

    Raises:
        ValueError: if the boundaries do not rise from 0 to `length`; names the first wrong one.
    """
    if cu_seqlens is None:
        return [(slice(0, batch), 0, length)]
    offsets = cu_seqlens.tolist()
    pairs = list(zip(offsets, offsets[1:], strict=False))
    problem = ""
    if offsets[0] != 0:
        problem = f"cu_seqlens[0]: {offsets[0]} is not 0; start the first document at token 0"
    elif offsets[-1] != length:
        problem = f"cu_seqlens[{len(pairs)}]: {offsets[-1]} is not the sequence length {length}; end with {length}"
    elif falls := [i for i, (start, end) in enumerate(pairs, 1) if end < start]:
        i = falls[0]
        problem = (
            f"cu_seqlens[{i}]: {offsets[i]} is below the boundary before it, {offsets[i - 1]}; sort the boundaries "
            "(two equal ones mean an empty document)"
        )
    if problem:
        raise ValueError(problem)
    return [(slice(i, i + 1), start, end) for i, (start, end) in enumerate(pairs)]


def walk_tokens(
    step: Callable[[int, Tensor], tuple[Tensor, Tensor]], initial: Tensor | None, zero: Tensor,
    cu_seqlens: Tensor | None, batch: int, length: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the outputs [B, T, ...] and the final states of a recurrence that is taken token by token.

    Args:
        step: (t, states) -> the states after token t, and its outputs [B, ...].
        initial: the states before the first token [N, ...]; None for `zero` [...] in all.
    """
    if initial is None:
        initial = zero.expand(count_states(cu_seqlens, batch), *zero.shape)
    outputs, finals = [], []
    for rows, start, end in documents(cu_seqlens, batch, length):
        state = initial[rows]
        for t in range(start, end):
            state, output = step(t, state)
            outputs.append(output)
        finals.append(state)
    return torch.stack(outputs, 1), torch.cat(finals)


class Rows(NamedTuple):
    """Sequences that an op computes as rows of one batch.

    states: of the first axis of states.
    span: their tokens in the row where these are neighbours, so that nothing is copied; else None.
    tokens: int64 [n, L], the token at each place; int64 places beyond the end of a document, in n L; the places before
        it; all None with `span`.
    """

    states: slice | Tensor
    span: slice | None
    tokens: Tensor | None = None
    beyond: Tensor | None = None
    inside: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """Returns x [B, T, ...] as [n, L, ...], zeros beyond the ends of documents; a view if there is a span."""
        if self.span is not None:
            return x[:, self.span]
        tokens = x[0].index_select(0, self.tokens.flatten()).index_fill_(0, self.beyond, 0.0)
        return tokens.unflatten(0, self.tokens.shape)

    def buffer(self, out: Tensor) -> Tensor:
        """Returns a tensor [n, L, ...] for the outputs of these rows; a view of out [B, T, ...] if there is a span."""
        return out[:, self.span] if self.span is not None else out.new_empty(*self.tokens.shape, *out.shape[2:])

    def put(self, out: Tensor, buffer: Tensor) -> None:
        """Copies a filled `buffer` of these rows into out, unless it is a view of it."""
        if self.span is None:
            out[0].index_copy_(0, self.tokens.flatten()[self.inside], buffer.flatten(0, 1).index_select(0, self.inside))

    def put_state(self, states: Tensor, own: Tensor) -> None:
        """Copies own = states[self.states], changed in place, into the states [N, ...], if it is not a view of them."""
        if isinstance(self.states, Tensor):
            states[self.states] = own


# Numbers of padding for which a batch of documents still takes less time than two: the calls for another batch cost as
# much as these on a CPU.
_PADDING = 2**14


def batches(cu_seqlens: Tensor | None, batch: int, length: int, width: int, most: int) -> list[Rows]:
    """Returns what `documents` returns in few batches: documents of similar length are rows of one, padded at the end.

    Only for ops whose results do not depend on zeros after the end of a sequence.

    Args:
        width: numbers of a token.
        most: tokens of a batch.
    """
    spans = documents(cu_seqlens, batch, length)
    if cu_seqlens is None or len(spans) == 1:
        return [Rows(states, slice(start, end)) for states, start, end in spans]
    groups: list[list[tuple[slice, int, int]]] = []
    padding = 0
    for document in sorted(spans, key=lambda document: document[1] - document[2]):
        size = document[2] - document[1]
        if groups and size:
            longest = groups[-1][0][2] - groups[-1][0][1]
            tokens, padding = longest * (len(groups[-1]) + 1), padding + longest - size
            if tokens <= most and padding <= max(_PADDING // width, tokens // 8):
                groups[-1].append(document)
                continue
        groups.append([document])
        padding = 0
    return [_rows(group, cu_seqlens.device) for group in groups]


def _rows(group: list[tuple[slice, int, int]], device: torch.device) -> Rows:
    if len(group) == 1:
        ((states, start, end),) = group
        return Rows(states, slice(start, end))
    table = torch.tensor([(states.start, start, end) for states, start, end in group], device=device)
    states, starts, ends = table.unbind(1)
    steps = torch.arange(group[0][2] - group[0][1], device=device)
    tokens = starts[:, None] + steps
    is_beyond = (tokens >= ends[:, None]).flatten()
    tokens = torch.minimum(tokens, ends[:, None] - 1)
    return Rows(states, None, tokens, is_beyond.nonzero()[:, 0], (~is_beyond).nonzero()[:, 0])


def over_documents(
    form: Callable, tensors: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Runs a form of an op for a batch of equally long sequences on documents that are packed in one row.

    Documents whose lengths have the same next power of two are rows of one call, with zeros after their ends, so a call
    in T tokens makes at most log2 T + 2 calls of the form on at most 2 T + N tokens. Differentiable if the form is.

    Args:
        form: (tensors [n, L, ...], states [n, ...]) -> (outputs [n, L, ...], states [n, ...]), each a sequence. It is
            right for documents if tokens of zeros at the end change neither states nor earlier outputs. Give decays
            as logarithms: a logarithm of 0 keeps the state.
        tensors: [B, T, ...]. states: one per sequence or document, [N, ...] or None.
        cu_seqlens: int32 [N+1] with B = 1, or None: then the form gets the arguments as they are.

    Returns:
        The outputs [B, T, ...] and the states [N, ...].

    Raises:
        ValueError: as `documents`.
    """
    if cu_seqlens is None:
        return form(tensors, states)
    length, device = tensors[0].shape[1], cu_seqlens.device
    groups: dict[int, list[tuple[int, int, int]]] = {}
    for rows, start, end in documents(cu_seqlens, tensors[0].shape[0], length):
        groups.setdefault(max(end - start - 1, 0).bit_length(), []).append((rows.start, start, end))
    with_zero = [torch.cat([x[0], x.new_zeros(1, *x.shape[2:])]) for x in tensors]
    owners, tokens, results = [], [], []
    for group in groups.values():
        owner, start, end = torch.tensor(group, device=device).unbind(1)
        at = start[:, None] + torch.arange(max(1, *(last - first for _, first, last in group)), device=device)
        inside = at < end[:, None]
        of_rows = [x if x is None else x[owner] for x in states]
        group_outputs, after = form([x[at.where(inside, length)] for x in with_zero], of_rows)
        results.append(([x[inside] for x in group_outputs], after))
        owners.append(owner)
        tokens.append(at[inside])
    token, owner = torch.cat(tokens).argsort(), torch.cat(owners).argsort()
    outputs, finals = (zip(*parts, strict=True) for parts in zip(*results, strict=True))
    return [torch.cat(x)[token][None] for x in outputs], [torch.cat(x)[owner] for x in finals]


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

    def recur(self, decay: Tensor, x: Tensor, dim: int) -> None:
        """x_t += decay_t x_{t-1} in place, in the order of time along `dim`; `decay` broadcasts to x."""
        steps = x.split(self.sizes, dim)
        for now, earlier, decay_t in zip(steps[1:], steps, decay.split(self.sizes, dim)[1:], strict=False):
            now.addcmul_(decay_t, _first(earlier, now, dim))

    def recur_back(self, decay: Tensor, x: Tensor, dim: int, states: Tensor | None = None) -> None:
        """x_t += decay_{t+1} x_{t+1} in place, from the last time to the first.

        Args:
            states: y, like x; each y_t becomes x_t y_{t-1}, and those of the first time stay.
        """
        steps, decays = x.split(self.sizes, dim), decay.split(self.sizes, dim)
        of_states = None if states is None else states.split(self.sizes, dim)
        for t in range(len(self.sizes) - 1, 0, -1):
            now = steps[t]
            _first(steps[t - 1], now, dim).addcmul_(decays[t], now)
            if of_states is not None:
                torch.mul(now, _first(of_states[t - 1], now, dim), out=of_states[t])


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


def _first(x: Tensor, like: Tensor, dim: int) -> Tensor:
    """Returns as many of the documents of one time as another time has."""
    size = like.shape[dim]
    return x if x.shape[dim] == size else x.narrow(dim, 0, size)
