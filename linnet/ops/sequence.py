"""Sequence parallelism: the rows of a batch are cut in time into one contiguous span per rank.

A recurrence crosses from span to span through its state. Each rank sums its own span up (a state from zero, and the
decay over the span), `exchange` gives it the state that enters its span, and the op runs as usual from that state.
Nothing but these summaries moves between ranks. A gradient takes the same way back.

`sequence_parallel` says which ranks share a row, as `use_backend` says which form runs. It must be active in the
backward pass too, because recomputation runs a forward there. Ops ask `span`; layers need only the position of the
first token (`first_position`, `document_positions`), the last inputs of the rank before (`halo`) and, for softmax
attention over the whole row, `all_to_all`.

All collectives run on every rank of the group and in the same order, also where a rank needs no result: rank 0 reads no
state of others, but its backward must take part. So nothing in here depends on the rank but values.

With packed documents a rank has the rows flattened to [1, B T] and `cu_seqlens` of its span, in which every row starts
a document. `cut_documents` makes them, and records how much of each row's first document is on the ranks before.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from linnet.ops.chunks import exact
from linnet.ops.registration import empty_like, register

Method = Literal["auto", "gather", "scan", "ring"]
Decay = Literal["channels", "pairs", "matrices"]  # how a state decays; `exchange` says what they mean

# Ranks up to which summaries go by one all-gather; above, an exclusive scan in ceil(log2 P) rounds moves fewer bytes.
MOST_GATHERED = 16

# torch 2.13 renames it; a PyTorch without torch.distributed has neither.
all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

# Names of the registered ops that talk to other ranks, or make what they send: recomputation keeps their results. An
# all-to-all is repeated: it returns activations, which recomputation frees, and all ranks repeat it together.
KEPT_NAMES = ("linnet::exchange", "linnet::summary", "linnet::shift", "linnet::ring")
REPEATED_NAMES = ("linnet::all_to_all",)


class Span(NamedTuple):
    """The place of this rank in its row: spans before it, and the number of spans.

    Attributes:
        rank, size: this rank in the group, and the ranks of the group.
        name: of the process group; `group` is the group itself.
        method: how summaries travel, "gather" or "scan".
        ring: whether layers pass all states from rank to rank themselves (`linnet.layers.ring`).
    """

    rank: int
    size: int
    name: str
    method: str
    ring: bool = False

    @property
    def group(self) -> "dist.ProcessGroup":
        return group_of(self.name)


_groups: "dict[str, dist.ProcessGroup]" = {}
_span: Span | None = None
_before: Tensor | None = None
_documents: Tensor | None = None


@contextlib.contextmanager
def sequence_parallel(group: "dist.ProcessGroup | None", method: Method = "auto") -> Iterator[Span | None]:
    """Makes ops inside the `with` block treat their rows as spans of longer rows, one span per rank of `group`.

    The block must contain the backward pass. None, or a group of one rank, means that rows are whole.

    Args:
        group: ranks in the order of their spans.
        method: "gather" (one all-gather of summaries), "scan" (ceil(log2 P) rounds), or "auto": scan above 16 ranks.
            "ring" is "auto" in which layers pass the states of all mixers from rank to rank, unless documents are
            packed.

    Raises:
        ValueError: an unknown method.
    """
    global _span, _before, _documents
    if method not in ("auto", "gather", "scan", "ring"):
        raise ValueError(f"sequence_parallel: method {method!r} is unknown; use auto, gather, scan or ring")
    kept = _span, _before, _documents
    _span = _before = _documents = None
    if group is not None and (size := dist.get_world_size(group)) > 1:
        chosen = ("gather" if size <= MOST_GATHERED else "scan") if method in ("auto", "ring") else method
        _span = Span(dist.get_rank(group), size, keep_group(group), chosen, method == "ring")
    try:
        yield _span
    finally:
        _span, _before, _documents = kept


def span() -> Span | None:
    """Returns the place of this rank in its rows, or None if rows are whole."""
    return _span


def spans() -> int:
    """Returns the number of spans of a row: 1 if rows are whole."""
    return 1 if _span is None else _span.size


def keep_group(group: "dist.ProcessGroup") -> str:
    """Returns the name of a group, by which registered ops find it."""
    _groups[group.group_name] = group
    return group.group_name


def group_of(name: str) -> "dist.ProcessGroup":
    """Returns the group with a name, of those that `keep_group` knows."""
    return _groups[name]


def first_position(length: int) -> int:
    """Returns the position in the row of the first token of this rank, whose span has `length` tokens."""
    return 0 if _span is None else _span.rank * length


# What recomputation keeps. A checkpoint policy would keep results of registered ops too, but in a dispatch mode, where
# the fused element-wise kernels of a block do not run; a compiler needs the policy (`KEPT_NAMES`).


class Record:
    """Contexts for `torch.utils.checkpoint`: the exchanges of a forward, and the same results when it runs again."""

    def __init__(self) -> None:
        self.results: list[tuple[Tensor | None, ...]] = []
        self.place: int | None = None

    def contexts(self) -> tuple["_Enter", "_Enter"]:
        return _Enter(self, None), _Enter(self, 0)


class _Enter:
    def __init__(self, record: Record, place: int | None):
        self.record, self.place = record, place

    def __enter__(self) -> None:
        global _record
        self.before, _record = _record, self.record
        self.record.place = self.place

    def __exit__(self, *_: object) -> None:
        global _record
        _record = self.before


_record: Record | None = None


def once(compute: Callable[[], Sequence[Tensor | None]]) -> tuple[Tensor | None, ...]:
    """Returns what `compute` gives; where a recomputed forward asks again, what it gave the first time."""
    record = _record
    if record is None:
        return tuple(compute())
    if record.place is None:
        record.results.append(tuple(compute()))
        tensors = record.results[-1]
    else:
        tensors = record.results[record.place]
        record.place += 1
    return tuple(None if x is None else x.detach() for x in tensors)


# Packed documents.


def cut_documents(starts: Tensor, length: int) -> Tensor:
    """Returns the starts of documents in this rank's span, and remembers how its rows begin, until the next call.

    Call it for each micro-batch inside `sequence_parallel`. Without sequence parallelism it returns `starts`.

    Args:
        starts: int32 [B, N], of the whole rows, as `linnet.data.loader.mark_documents` returns them.
        length: tokens of the span.

    Returns:
        int32 [B, N]: the document that the first token belongs to starts at 0; documents that lie wholly before or
        after the span are empty.
    """
    global _before, _documents
    if _span is None:
        return starts
    first = _span.rank * length
    _before = _documents = None
    if starts.shape[1] > 1:
        _documents = starts
        _before = first - starts.where(starts <= first, 0).amax(1).to(torch.int64)
    return (starts - first).clamp(0, length)


def whole_documents(cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    """Returns the boundaries of documents in whole rows, int32 [B N + 1] over B T tokens, for those of this span."""
    if cu_seqlens is None or _span is None:
        return cu_seqlens
    rows_of(cu_seqlens, length)
    count, whole = _documents.shape[0], length * _span.size
    first = torch.arange(count, dtype=torch.int32, device=cu_seqlens.device)[:, None] * (whole // count)
    return torch.nn.functional.pad((_documents + first).flatten(), (0, 1), value=whole)


class Rows(NamedTuple):
    """How the rows of flattened documents meet the spans before and after.

    Attributes:
        first, last: int64 [B], the document that the first and the last token of each row belongs to.
        before: int64 [B], tokens of the first document on the ranks before; 0 if it starts here.
    """

    first: Tensor
    last: Tensor
    before: Tensor

    @property
    def continued(self) -> Tensor:
        """bool [B]: whether the first document of the row began on a rank before."""
        return self.before > 0

    @property
    def passing(self) -> Tensor:
        """bool [B]: whether one document covers the whole span, and began before it."""
        return self.continued & (self.first == self.last)

    def spread_first(self, states: Tensor, documents: int, fill: float = 0.0) -> Tensor:
        """States that enter rows [B, ...] -> of documents [N, ...]: `fill` for those that were not begun before."""
        kept = states.where(match(self.continued, states), fill)
        return states.new_full((documents, *states.shape[1:]), fill).index_copy(0, self.first, kept)

    def select_first(self, states: Tensor) -> Tensor:
        """The transpose of `spread_first`: of documents [N, ...] -> of rows [B, ...], 0 where none was begun before."""
        return states[self.first].where(match(self.continued, states), 0.0)

    def select_last(self, states: Tensor) -> Tensor:
        """States after documents [N, ...] -> after rows [B, ...]."""
        return states[self.last]

    def enter(self, states: Tensor, fresh: Tensor) -> Tensor:
        """States of documents [N, ...]: those of rows [B, ...] where a document is continued, else `fresh` [N, ...]."""
        kept = states.where(match(self.continued, states), fresh[self.first])
        return fresh.index_copy(0, self.first, kept)

    def spread_last(self, states: Tensor, documents: int) -> Tensor:
        """The transpose of `select_last`."""
        return states.new_zeros(documents, *states.shape[1:]).index_copy(0, self.last, states)


def rows_of(cu_seqlens: Tensor, length: int) -> Rows:
    """Returns how the rows of flattened documents of this span (`length` tokens over all rows) meet other spans.

    Raises:
        ValueError: if `cut_documents` was not called, so that it is unknown which documents go on.
    """
    if _before is None:
        raise ValueError(
            "cu_seqlens: packed documents under sequence parallelism need the rows' beginnings; "
            "call linnet.ops.sequence.cut_documents(starts, length) for each batch"
        )
    count = _before.shape[0]
    tokens = torch.arange(count, device=cu_seqlens.device) * (length // count)
    ends = cu_seqlens[1:].to(tokens.dtype)
    first, last = (torch.searchsorted(ends, at, right=True) for at in (tokens, tokens + length // count - 1))
    return Rows(first, last, _before)


def document_positions(cu_seqlens: Tensor, length: int) -> Tensor:
    """Returns int64 [N]: the position of each document's first token of this span (of `length` tokens in all)."""
    states = cu_seqlens.shape[0] - 1
    if _span is None:
        return torch.zeros(states, dtype=torch.int64, device=cu_seqlens.device)
    rows = rows_of(cu_seqlens, length)
    return rows.spread_first(rows.before, states, 0)


def positions(x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns the positions, int64 [B, T], of the tokens of x [B, T, ...] in their row, or in their document."""
    index = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return (index + first_position(x.shape[1])).expand(x.shape[:2])
    offsets = cu_seqlens.to(index.dtype)
    document = torch.searchsorted(offsets[1:], index, right=True)
    return (index - offsets[document] + document_positions(cu_seqlens, x.shape[1])[document])[None]


def match(x: Tensor, like: Tensor) -> Tensor:
    """Returns x [B] as [B, 1, ...] with the axes of `like`."""
    return x.view(-1, *[1] * (like.ndim - 1))


# Exchanges of summaries.


def exchange(state: Tensor, decay: Tensor | None = None, *, reverse: bool = False, kind: Decay = "channels") -> Tensor:
    """Returns the state that enters this rank's span: `state` <- decay_i `state` + state_i over the ranks i before it.

    It starts from 0, and adds in the order of the ranks, so that results repeat. One all-gather, or ceil(log2 P) rounds
    of a scan; the same again in the backward.

    Args:
        state: float32 or float64, of any shape, the same on all ranks: the state after the span, from zero.
        decay: with as many axes as `state`, each of the same size or 1: the decay over the span; None for no decay.
            Of "matrices", [..., K, K] for a state [..., K, V].
        reverse: from the last rank to the first, over the ranks after this one.
        kind: "channels": a number decays by itself. "pairs": the last axis is the real and the imaginary part of
            complex numbers, of size 2 in `decay` too. "matrices": the decay multiplies the state from the left.

    Returns:
        Shaped like `state`; zeros on the first rank (the last, if `reverse`). Gradients reach state and decay.

    Raises:
        RuntimeError: without sequence parallelism.
    """
    place = _require("exchange")
    return linear.call(state, decay, place.name, place.method, reverse, kind)


def _require(name: str) -> Span:
    if _span is None:
        raise RuntimeError(f"{name}: no ranks share a row here; call it inside linnet.ops.sequence.sequence_parallel")
    return _span


Summary = Sequence[Tensor | None]


def join(first: Summary, second: Summary) -> tuple[Tensor, Tensor | None]:
    """Returns (state, decay) of two spans as one: what the second makes of the state after the first."""
    (state1, decay1), (state2, decay2) = first, second
    if decay2 is None:
        return state1 + state2, None
    return torch.addcmul(state2, decay2, state1), None if decay1 is None else decay2 * decay1


def join_pairs(first: Summary, second: Summary) -> tuple[Tensor, Tensor | None]:
    """`join` for complex numbers as pairs of reals."""
    joined = join(*([None if x is None else torch.view_as_complex(x) for x in pair] for pair in (first, second)))
    return tuple(None if x is None else torch.view_as_real(x) for x in joined)


def join_matrices(first: Summary, second: Summary) -> tuple[Tensor, Tensor | None]:
    """`join` for decays [..., K, K] that multiply states [..., K, V] from the left."""
    (state1, decay1), (state2, decay2) = first, second
    with exact(state1):
        return state2 + decay2 @ state1, None if decay1 is None else decay2 @ decay1


JOINS = {"channels": join, "pairs": join_pairs, "matrices": join_matrices}


def adjoint(decay: Tensor | None, kind: Decay) -> Tensor | None:
    """Returns the decay of gradients, which pass a span from its end."""
    if kind == "matrices" and decay is not None:
        return decay.mT
    return decay * decay.new_tensor([1.0, -1.0]) if kind == "pairs" and decay is not None else decay


def join_normalised(first: Summary, second: Summary) -> tuple[Tensor, Tensor, Tensor | None]:
    """`join` for (state, log-sum, log-decay), where a state is divided by exp(log-sum), the sum of all weights so far.

        z = log(exp(z_1 + log_decay_2) + exp(z_2)),   S = exp(z_1 + log_decay_2 - z) S_1 + exp(z_2 - z) S_2

    S is [N, H, K or 2K, V], z [N, H, K], -inf where there is no weight; log_decay is a constant [N, 1, 1], 0, or -inf
    where a document starts in the span; None for 0. The op `normalised` exchanges them.
    """
    (state1, z1, log_decay1), (state2, z2, log_decay2) = first, second
    if log_decay2 is not None:
        z1 = z1 + log_decay2
    z = torch.logaddexp(z1, z2)
    state = widen(share(z1, z), state1) * state1 + widen(share(z2, z), state2) * state2
    return state, z, None if log_decay1 is None or log_decay2 is None else log_decay1 + log_decay2


def share(part: Tensor, whole: Tensor) -> Tensor:
    """Returns exp(part - whole), the share of one log-sum in another; 0 where there is none."""
    return (part - whole.masked_fill(whole == -torch.inf, 0.0)).exp()


def widen(x: Tensor, state: Tensor) -> Tensor:
    """Returns a factor per channel [N, H, K], made to multiply rows of a state [N, H, K or 2K, V]."""
    return (x if x.shape[-1] == state.shape[-2] else torch.cat([x, x], -1))[..., None]


def narrow(x: Tensor, channels: int) -> Tensor:
    """Returns the transpose of `widen`'s doubling: [N, H, K or 2K] -> [N, H, K]."""
    return x if x.shape[-1] == channels else x.unflatten(-1, (2, -1)).sum(-2)


def _fold(summary: Sequence[Tensor | None], join: Callable, name: str, method: str, reverse: bool):
    """The summaries of the ranks before this one (after it, if `reverse`), joined; None if there are none."""
    group = _groups[name]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensors = [x for x in summary if x is not None]
    dtype, sizes = tensors[0].dtype, [x.numel() for x in tensors]
    flat = torch.cat([x.to(dtype).reshape(-1) for x in tensors])

    def unpack(line: Tensor) -> list[Tensor | None]:
        parts = iter(x.view(y.shape) for x, y in zip(line.split(sizes), tensors, strict=True))
        return [None if x is None else next(parts) for x in summary]

    if method == "scan":
        prefix = _scan(flat, lambda x, y: _pack(join(unpack(x), unpack(y)), tensors), group, rank, size, reverse)
        return None if prefix is None else unpack(prefix)
    lines = flat.new_empty(size, flat.shape[0])
    all_gather(lines.view(-1), flat, group=group)
    total = None
    for i in range(size - 1, rank, -1) if reverse else range(rank):
        # Nothing enters the first span, so its decay, the last of a summary, joins nothing.
        total = [*unpack(lines[i])[:-1], None] if total is None else join(total, unpack(lines[i]))
    return total


def _pack(joined: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    tensors = [x for x in joined if x is not None]
    return torch.cat([x.expand(y.shape).reshape(-1) for x, y in zip(tensors, like, strict=True)])


def _scan(
    flat: Tensor, join: Callable, group: "dist.ProcessGroup", rank: int, size: int, reverse: bool
) -> Tensor | None:
    """An exclusive scan: in round d each rank sends what it knows of the 2^d ranks up to itself 2^d ranks on."""
    place = size - 1 - rank if reverse else rank  # in the order of the scan
    window, prefix, step = flat, None, 1
    while step < size:
        received, calls = torch.empty_like(flat), []
        for peer, operation, line in ((place + step, dist.isend, window), (place - step, dist.irecv, received)):
            if 0 <= peer < size:
                peer = dist.get_global_rank(group, size - 1 - peer if reverse else peer)
                calls.append(dist.P2POp(operation, line.contiguous(), peer, group))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        if place >= step:
            prefix = received if prefix is None else join(received, prefix)
            window = join(received, window)
        step *= 2
    return prefix


def _exchange(state, decay, name, method, reverse, kind):
    if decay is not None:
        decay = decay.to(state.dtype)

    def compute():
        summary = _fold([state, decay], JOINS[kind], name, method, reverse)
        return (torch.zeros_like(state) if summary is None else summary[0].clone(),)

    return once(compute)[0]


def _exchange_backward(state, decay, name, method, reverse, kind, entered, grad):
    """With A the gradient to the state after the span: that of `state`; the decay's is A times what entered."""
    dstate = _exchange(grad.to(state.dtype).contiguous(), adjoint(decay, kind), name, method, not reverse, kind)
    if decay is None:
        return dstate, None
    if kind == "matrices":
        product = dstate @ entered.mT
    elif kind == "pairs":
        product = torch.view_as_real(torch.view_as_complex(dstate) * torch.view_as_complex(entered).conj())
    else:
        product = dstate * entered
    return dstate, product.sum_to_size(decay.shape).to(decay.dtype)


def _exchange_normalised(state, log_sum, log_decay, name, method):
    def compute():
        summary = _fold([state, log_sum, log_decay], join_normalised, name, method, False)
        if summary is None:
            return torch.zeros_like(state), torch.full_like(log_sum, -torch.inf)
        return summary[0].clone(), summary[1].clone()

    return once(compute)


def _exchange_normalised_backward(state, log_sum, log_decay, name, method, before, before_z, grad, grad_z):
    entering_z = before_z if log_decay is None else before_z + log_decay
    after = torch.logaddexp(entering_z, log_sum)
    channels = log_sum.shape[-1]
    delta = dot(grad, before, channels)
    if grad_z is not None:
        delta = delta - grad_z
    D, delta = later_shares(grad, delta, share(entering_z, after), name, method)
    mine = share(log_sum, after)
    return widen(mine, state) * D, mine * (dot(D, state, channels) - delta)


def later_shares(D: Tensor, delta: Tensor, passed: Tensor, name: str, method: str) -> tuple[Tensor, Tensor]:
    """Returns what the spans of later ranks give to the gradient of a normalised state after this span.

    Gradients of (S, z) travel as D, the one to S with z held, and delta = sum_V D S - (the one to z), what the
    normalisation takes: then both decay as states do, and nothing cancels.

    Args:
        D, delta: of the state that enters this span, from this span alone.
        passed: [N, H, K], the share of the entering state in the state after this span.
    """
    channels = passed.shape[-1]
    # delta travels as one more column of the state, in its first K rows.
    rest = delta.new_zeros(*D.shape[:-2], D.shape[-2] - channels)
    line = torch.cat([D, torch.cat([delta, rest], -1)[..., None]], -1)
    line = linear.call(line, widen(passed, D), name, method, True, "channels")
    return line[..., :-1], line[..., :channels, -1]


def dot(x: Tensor, y: Tensor, channels: int) -> Tensor:
    """Returns [N, H, K]: of two states [N, H, K or 2K, V], the sums of their products by channel."""
    return narrow((x * y).sum(-1), channels)


linear = register(
    "exchange",
    "Tensor state, Tensor? decay, str group, str method, bool reverse, str kind",
    _exchange,
    _exchange_backward,
    learned=range(2),
    kept=(0,),
)

normalised = register(
    "exchange_normalised",
    "Tensor state, Tensor log_sum, Tensor? log_decay, str group, str method",
    _exchange_normalised,
    _exchange_normalised_backward,
    outputs=2,
    learned=range(2),
    kept=range(2),
    shapes=lambda state, log_sum, *_: (empty_like(state), empty_like(log_sum)),
)


# Moves of activations: the end of the span before, and the whole row of some channels.


def halo(x: Tensor, width: int, dim: int = 1) -> Tensor:
    """Returns the last `width` inputs of the rank before, along `dim`; zeros on the first rank.

    Args:
        x: the inputs of this span, at least `width` of them. With packed documents x is [1, B T, ...] and `dim` 1, and
            the result [B, width, ...] has zeros for tokens that belong to a document before the row's first one.
        width: tokens.

    Returns:
        x's shape with `width` in the place of `dim`. Gradients reach the x of the rank before.

    Raises:
        ValueError: a span shorter than `width`.
        RuntimeError: without sequence parallelism.
    """
    place = _require("halo")
    packed = _before is not None and dim == 1 and x.shape[0] == 1
    if packed:
        x = x.unflatten(1, (_before.shape[0], -1)).squeeze(0)
    if x.shape[dim] < width:
        raise ValueError(
            f"halo: a span of {x.shape[dim]} tokens is shorter than the {width} that the next one reads; use fewer "
            "ranks per row (parallel.sp), or longer rows"
        )
    tail = shift.call(x.narrow(dim, x.shape[dim] - width, width), place.name, False)
    if packed:
        age = torch.arange(width, 0, -1, device=x.device)  # tokens between each and the span
        tail = tail.where((age <= _before[:, None]).view(*tail.shape[:2], *[1] * (tail.ndim - 2)), 0.0)
    return tail


def _shift(x, name, reverse):
    return once(lambda: (_shift_now(x, name, reverse),))[0]


def _shift_now(x, name, reverse):
    group = _groups[name]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    step = -1 if reverse else 1
    received, calls = torch.zeros_like(x, memory_format=torch.contiguous_format), []
    for peer, operation, line in ((rank + step, dist.isend, x.contiguous()), (rank - step, dist.irecv, received)):
        if 0 <= peer < size:
            calls.append(dist.P2POp(operation, line, dist.get_global_rank(group, peer), group))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return received


shift = register(
    "shift",
    "Tensor x, str group, bool reverse",
    _shift,
    lambda x, name, reverse, grad: (_shift(grad, name, not reverse),),
    learned=range(1),
)


def all_to_all(x: Tensor, from_dim: int, to_dim: int) -> Tensor:
    """Returns x whole along `from_dim`, in which ranks had a span each, and cut along `to_dim`, which they had whole.

    Attention over a whole row: `all_to_all(x, 1, 2)` turns [B, T / P, H, D] into [B, T, H / P, D], the heads of this
    rank; `all_to_all(o, 2, 1)` goes back. With packed documents, where dimension 1 holds all rows, rows stay together.

    Raises:
        ValueError: P does not divide `to_dim`.
        RuntimeError: without sequence parallelism.
    """
    place = _require("all_to_all")
    rows = 1 if _before is None or 1 not in (from_dim, to_dim) else _before.shape[0]
    if x.shape[to_dim] % (place.size * (rows if to_dim == 1 else 1)):
        raise ValueError(f"all_to_all: {place.size} ranks do not divide dimension {to_dim} of {list(x.shape)}")
    if rows == 1:
        return swap.call(x, from_dim, to_dim, place.size, place.name)
    x = x.unflatten(1, (rows, -1)).movedim(1, 0)  # [rows, 1, T, ...]
    return swap.call(x, from_dim + 1, to_dim + 1, place.size, place.name).movedim(0, 1).flatten(1, 2)


def _swap(x, from_dim, to_dim, size, name):
    sent = torch.stack(x.chunk(size, to_dim)).contiguous()  # of strided parts, `stack` keeps the strides
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_groups[name])
    return torch.cat(received.unbind(0), from_dim)


def _swapped(x, from_dim, to_dim, size, name):
    shape = list(x.shape)
    shape[from_dim], shape[to_dim] = shape[from_dim] * size, shape[to_dim] // size
    return x.new_empty(shape)


swap = register(
    "all_to_all",
    "Tensor x, int from_dim, int to_dim, int size, str group",
    _swap,
    lambda x, from_dim, to_dim, size, name, grad: (_swap(grad, to_dim, from_dim, size, name),),
    learned=range(1),
    shapes=_swapped,
)
