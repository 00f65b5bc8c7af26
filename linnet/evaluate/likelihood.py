"""Log-likelihoods of continuations; tokens that several requests begin with are read once.

A harness that scores whole rows reads a question with four answers four times. Here requests form a tree of their
common beginnings: questions that start with the same examples, answers to one question, answers that differ only at
their end. The model reads a common beginning once and copies its state (or its cache, for attention) for every branch.

Only the scored tokens get logits, and in the last block only they pass the channel mixer. Requests of similar length
are read together: a batch ends when its padding costs more than another call of the model.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from linnet.config import ConfigError
from linnet.data.labelled import HeldOut
from linnet.models import CausalLM
from linnet.models.backbone import ModelState
from linnet.parallel.mesh import divided, is_dividing

WIDE = 8  # a beginning that saves so many times its tokens is read on every device, and what follows is divided
SHARED = 16  # a common beginning of fewer further tokens is read again for each branch
STATES = 2**30  # upper bound of bytes of states kept at once, and copied for one call
LOGITS = 2**26  # upper bound of logits at once


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and restores its former mode at the end, also after an error."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class Likelihood(NamedTuple):
    """Score of one continuation.

    Attributes:
        nats: sum of its tokens' log-probabilities, in nats.
        greedy: whether each of its tokens is the likeliest one.
    """

    nats: float
    greedy: bool


class _Cost(NamedTuple):
    """What batches aim at on a device.

    Attributes:
        call: one call of the model takes about as long as this many tokens.
        tokens: upper bound of tokens per call, padding included.
        states: upper bound of states that are kept at once, for the requests that continue them.
    """

    call: int
    tokens: int
    states: int


_CPU = _Cost(32, 2**11, 64)  # the activations of a call stay in the cache
_GPU = _Cost(2**12, 2**15, 1024)


@dataclass
class _Row:
    """Different requests with the same tokens and the same start of the continuation are one row.

    Attributes:
        tokens: context and continuation, int64 [n].
        known: number of tokens of the context.
        places: positions in the list of requests.
        nats, wrong: score so far; `wrong` counts tokens that are not the likeliest.
    """

    tokens: np.ndarray
    known: int
    places: list[int]
    nats: float = 0.0
    wrong: int = 0


class _Node(NamedTuple):
    """Sorted rows that share their tokens up to `end`, or a single row whose last input is the token before `end`.

    Attributes:
        begin: the first token that is not read yet.
        states: states after the tokens before `begin`; None at the start of the tokens.
        line: the line of `states` that belongs to these rows.
    """

    rows: list[_Row]
    begin: int
    end: int
    states: ModelState | None
    line: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@torch.no_grad()
def log_likelihoods(
    model: CausalLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    progress: Callable[[int], None] | None = None,
) -> list[Likelihood]:
    """Returns the log-likelihood of each continuation after its context, in the order of the requests.

    Args:
        requests: pairs (context, continuation) of token ids, each with at least one token.
        progress: called after each batch with the number of requests that it answered.

    Raises:
        ConfigError: the model gives likelihoods that are not finite.
        ValueError: a context or a continuation has no token.
    """
    rows = _rows(requests)
    reader = _Reader(model, progress or (lambda count: None))

    def finish(job: list[_Node]) -> list[tuple[list[int], Likelihood]]:
        pending, ended = [job], []
        while pending:
            pending += reader.do(job := pending.pop())
            if len(job[0].rows) == 1:
                ended += [(row.places, Likelihood(row.nats, row.wrong == 0)) for node in job for row in node.rows]
        return ended

    with evaluating(model):
        jobs, whole = reader.jobs(_split(rows, 0, None, 0)), []
        while jobs:
            shared, below = _tokens(job := jobs.pop())
            if is_dividing() and below > WIDE * shared > 0:
                jobs += reader.do(job)
            else:
                whole.append(job)
        ended = divided(whole, finish, lambda job: sum(_tokens(job)))
    likelihoods: list[Likelihood | None] = [None] * len(requests)
    for places, likelihood in itertools.chain(*ended):
        for place in places:
            likelihoods[place] = likelihood
    if bad := sum(not math.isfinite(likelihood.nats) for likelihood in likelihoods):
        what = f"{bad} of {len(likelihoods)} requests have no finite likelihood"
        problem = f"{what}; the model's logits are NaN or infinite"
        raise ConfigError([problem], "model")
    return likelihoods


def _rows(requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[_Row]:
    """Returns the rows of requests, sorted by their tokens, so that rows with a common beginning are neighbours."""
    rows: dict[tuple[bytes, int], _Row] = {}
    for place, (context, continuation) in enumerate(requests):
        if not len(context) or not len(continuation):
            what = f"request {place}: {len(context)} tokens of context and {len(continuation)} to score"
            fix = "give at least one of each; if there is no context, use the end-of-document token"
            raise ValueError(f"{what}; {fix}")
        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in (context, continuation)])
        key = (tokens.astype(">i8").tobytes(), len(context))
        rows.setdefault(key, _Row(tokens, len(context), [])).places.append(place)
    return [rows[key] for key in sorted(rows)]


def _common(first: _Row, second: _Row) -> int:
    """Returns how many tokens two rows have in common at their beginning."""
    n = min(len(first.tokens), len(second.tokens))
    apart = np.flatnonzero(first.tokens[:n] != second.tokens[:n])
    return int(apart[0]) if len(apart) else n


def _split(rows: list[_Row], begin: int, states: ModelState | None, line: int) -> list[_Node]:
    """Returns the nodes of sorted rows whose tokens before `begin` are read.

    Rows whose next SHARED tokens agree are one node. Its input ends one token before the rows part, since the output at
    that token is compared with a different target in each row.
    """
    common = [_common(*pair) - 1 for pair in zip(rows, rows[1:], strict=False)]
    nodes, first = [], 0
    for last in range(len(rows)):
        if last < len(common) and common[last] >= begin + SHARED:
            continue
        end = min(common[first:last], default=len(rows[first].tokens) - 1)
        nodes.append(_Node(rows[first : last + 1], begin, end, states, line))
        first = last + 1
    return nodes


def _tokens(job: list[_Node]) -> tuple[int, int]:
    """Returns the tokens that a group reads for all rows of a node, and how many the rows have after them.

    A batch of single rows has 0, and its tokens.
    """
    if len(job[0].rows) == 1:
        return 0, sum(node.size for node in job)
    return sum(node.size for node in job), sum(len(row.tokens) - node.end for node in job for row in node.rows)


class _Reader:
    """Reads nodes with a model and adds the scores to their rows.

    A job is a batch of single rows, whose scores it ends, or a group of nodes with several rows, which leads to further
    jobs. Jobs do not depend on each other.
    """

    def __init__(self, model: CausalLM, answered: Callable[[int], None]):
        self.model, self.answered = model, answered
        self.device = next(model.parameters()).device
        self.cost = _CPU if self.device.type == "cpu" else _GPU

    def jobs(self, nodes: list[_Node]) -> list[list[_Node]]:
        """Returns the groups and the batches of nodes."""
        shared, single = [], []
        for node in nodes:
            (shared if len(node.rows) > 1 else single).append(node)
        shared.sort(key=lambda node: node.end)  # caches in a group have similar sizes; the longest group comes first
        most = min(self.cost.states, self._most_states(max((node.end for node in shared), default=1)))
        groups: list[list[_Node]] = []
        tokens = 0
        for node in shared:  # small groups, so that several devices have work
            if not groups or len(groups[-1]) == most or tokens + node.size > self.cost.tokens:
                groups.append([])
                tokens = 0
            groups[-1].append(node)
            tokens += node.size
        return groups + [*self._batches(sorted(single, key=lambda node: -node.size))][::-1]  # the last is done first

    def do(self, nodes: list[_Node]) -> list[list[_Node]]:
        """Scores a batch, or reads what the rows of each node of a group share, and returns the jobs that follow."""
        below: list[_Node] = []
        if len(nodes[0].rows) == 1:
            if nodes[0].size:
                self._forward(nodes, nodes[0].size, self._take(nodes, nodes[0].size))
            self.answered(sum(len(node.rows[0].places) for node in nodes))
            return []
        for batch in self._cuts(sorted(nodes, key=lambda node: -node.size)):
            size = batch[-1].size
            states = self._forward(batch, size, self._take(batch, size) or self._start(len(batch), size))
            for line, node in enumerate(batch):
                below += _split(node.rows, node.begin + size, states, line)
        return self.jobs(below)

    def _batches(self, nodes: list[_Node]) -> Iterator[list[_Node]]:
        """Yields single rows that are read together: padding is at most what another call costs."""
        batch: list[_Node] = []
        waste = longest = 0
        for node in nodes:
            longest = max(longest, node.end)
            padding = batch[0].size - node.size if batch else 0
            full = (len(batch) + 1) * (batch[0].size if batch else 0) > self.cost.tokens
            full = full or (node.states is not None and len(batch) >= self._most_states(longest))
            if batch and (
                full or waste + padding > self.cost.call or (node.states is None) != (batch[0].states is None)
            ):
                yield batch
                batch, waste, padding, longest = [], 0, 0, node.end
            batch.append(node)
            waste += padding
        if batch:
            yield batch

    def _cuts(self, nodes: list[_Node]) -> Iterator[list[_Node]]:
        """Yields nodes that are read together, as many tokens as the shortest one has.

        Each branch of the others reads their remaining tokens again, which costs at most another call.
        """
        batch: list[_Node] = []
        waste = branches = 0
        for node in nodes:
            again = (batch[-1].size - node.size) * branches if batch else 0
            full = (len(batch) + 1) * (batch[0].size if batch else 0) > self.cost.tokens
            if batch and (full or waste + again > self.cost.call):
                yield batch
                batch, waste, branches, again = [], 0, 0, 0
            batch.append(node)
            waste, branches = waste + again, branches + len(node.rows) - 1
        if batch:
            yield batch

    def _start(self, lines: int, room: int) -> ModelState:
        return self.model.init_state(lines, room, self.device)

    def _most_states(self, room: int) -> int:
        """Returns how many states of `room` tokens are kept at once."""
        return max(1, STATES // max(1, self.model.backbone.state_bytes(room)))

    def _take(self, nodes: list[_Node], size: int) -> ModelState | None:
        """Returns copies of the states of nodes, with caches that hold `size` further tokens; None for None."""
        if nodes[0].states is None:
            return None
        taken = self._start(len(nodes), max(node.begin for node in nodes) + size)
        sources = {id(node.states): node.states for node in nodes}
        for key, states in sources.items():
            places = [i for i, node in enumerate(nodes) if id(node.states) == key]
            lines = torch.tensor([nodes[i].line for i in places], device=self.device)
            place = torch.tensor(places, device=self.device)
            for layer, state in states.items():
                for name, x in state.items():
                    # The state for a shorter context is the leading corner of that for a longer one.
                    target, part = taken[layer][name], x[lines]
                    corner = tuple(slice(min(n, m)) for n, m in zip(target.shape[1:], part.shape[1:], strict=True))
                    target[(slice(None), *corner)].index_copy_(0, place, part[(slice(None), *corner)].to(target.dtype))
        return taken

    def _forward(self, nodes: list[_Node], size: int, states: ModelState | None) -> ModelState | None:
        """Reads `size` tokens or fewer of each node, adds the scores to all rows, and returns the new states."""
        inputs = np.zeros((len(nodes), size), dtype=np.int64)
        lines, columns, targets, spans = [], [], [], []
        for i, node in enumerate(nodes):
            tokens, end = node.rows[0].tokens, min(node.end, node.begin + size)
            inputs[i, : end - node.begin] = tokens[node.begin : end]
            first = min(max(node.begin, min(row.known for row in node.rows) - 1), end)
            spans.append((first, end))
            lines.append(np.full(end - first, i))
            columns.append(np.arange(first, end) - node.begin)
            targets.append(tokens[first + 1 : end + 1])
        line, column, target = (self._join(parts) for parts in (lines, columns, targets))
        if not len(line):  # no layer sees an empty tensor
            line = column = torch.zeros(1, dtype=torch.int64, device=self.device)
        embedded = self.model.embed(torch.from_numpy(inputs).to(self.device))
        x, states = self.model.backbone(embedded, states, keep=(line, column))
        if not len(target):
            return states
        nats, hits = self._compare(x, target)
        start = 0
        for node, (first, end) in zip(nodes, spans, strict=True):
            for row in node.rows:
                span = slice(start + min(max(row.known - 1, first), end) - first, start + end - first)
                row.nats += float(nats[span].sum())
                row.wrong += int((~hits[span]).sum())
            start += end - first
        return states

    def _join(self, parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(self.device)

    def _compare(self, x: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Returns log-probabilities of targets, float64 [n], and whether each is the likeliest token, bool [n]."""
        nats, hits = [], []
        size = max(1, LOGITS // self.model.config.vocab_size)
        for features, target in zip(x.split(size), targets.split(size), strict=True):
            logits = self.model.logits(features)
            logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            nats.append(logs.gather(-1, target[:, None])[:, 0].double())
            hits.append(logs.argmax(-1) == target)
        return torch.cat(nats).cpu().numpy(), torch.cat(hits).cpu().numpy()


# The outputs of a model for labelled rows, whatever these are.


@torch.no_grad()
def outputs_of(
    model: nn.Module,
    held_out: HeldOut,
    forward: Callable[..., Tensor],
    autocast: contextlib.AbstractContextManager | None = None,
    progress: Callable[[int], object] = lambda more: None,
) -> np.ndarray:
    """Returns the outputs for each row, at least float32 [n, outputs], in the order of the split.

    Args:
        held_out: all rows of a split, in any order.
        forward: tensors of a batch without its labels, on the device of the model -> outputs of the model.
        progress: called with the number of rows of each forward pass.
    """
    device = next(model.parameters()).device

    def compute(number: int) -> np.ndarray:
        *inputs, labels = held_out[number]
        with autocast or contextlib.nullcontext():
            outputs = forward(*(tensor.to(device) for tensor in inputs))
        progress(len(labels))
        return (outputs if outputs.dtype == torch.float64 else outputs.float()).cpu().numpy()

    with evaluating(model):
        joined = np.concatenate(divided(range(len(held_out)), compute))
    result = np.empty_like(joined)
    result[held_out.order] = joined
    return result
