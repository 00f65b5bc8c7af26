"""Log-likelihoods of continuations, with a context that several of them share read once.

A question with four answers costs a harness that scores whole rows four readings of the question. Here the context is
read once, its state (or its cache, for attention) is copied for every answer, and only the answers are read four times.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from linnet.evaluate.mode import evaluating
from linnet.models import CausalLM
from linnet.models.causal_lm import IGNORE

TOKENS = 2**15  # most tokens, padding included, that are read at once
LOGITS = 2**26  # most logits at once


class Likelihood(NamedTuple):
    """Of one continuation: the sum of its tokens' log-probabilities in nats, and whether each is the likeliest."""

    nats: float
    greedy: bool


class _Group(NamedTuple):
    """Continuations (their places in the answer, and their tokens) of one context."""

    context: np.ndarray
    places: list[int]
    continuations: list[np.ndarray]


@torch.no_grad()
def log_likelihoods(
    model: CausalLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    autocast: contextlib.AbstractContextManager | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Likelihood]:
    """The log-likelihood of each continuation after its context, in the order of the requests.

    Args:
        requests: (context, continuation), token ids, each of at least one token.
        progress: called with the number of requests that a step has answered.

    Raises:
        ValueError: a context or continuation without a token.
    """
    groups: dict[bytes, _Group] = {}
    for place, (context, continuation) in enumerate(requests):
        context, continuation = (np.asarray(ids, dtype=np.int64) for ids in (context, continuation))
        if not len(context) or not len(continuation):
            raise ValueError(
                f"request {place}: {len(context)} tokens of context and {len(continuation)} to score; give at least "
                "one of each (the end-of-document token where there is no context)"
            )
        group = groups.setdefault(context.tobytes(), _Group(context, [], []))
        group.places.append(place)
        group.continuations.append(continuation)
    found: list[Likelihood | None] = [None] * len(requests)
    answered = progress or (lambda count: None)
    with evaluating(model), autocast or contextlib.nullcontext():
        for batch in _batches([group for group in groups.values() if len(group.places) == 1]):
            answered(_score(model, batch, _pad(batch, with_context=True), None, found))
        for batch in _batches([group for group in groups.values() if len(group.places) > 1], of_one_length=True):
            answered(_score(model, batch, _pad(batch, with_context=False), _read(model, batch), found))
    return found


def _batches(groups: list[_Group], of_one_length: bool = False) -> Iterator[list[_Group]]:
    """Groups that are read together, the longest first: contexts of one length where a state must be made of them."""
    groups = sorted(groups, key=lambda g: (-len(g.context), -max(map(len, g.continuations))))
    batch: list[_Group] = []
    rows = width = 0
    for group in groups:
        longest = len(group.context) + max(map(len, group.continuations))
        full = (rows + len(group.places)) * max(width, longest) > TOKENS
        if batch and (full or (of_one_length and len(group.context) != len(batch[0].context))):
            yield batch
            batch, rows, width = [], 0, 0
        batch.append(group)
        rows, width = rows + len(group.places), max(width, longest)
    if batch:
        yield batch


def _pad(batch: list[_Group], with_context: bool) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [rows, T] and targets [rows, T], int64, with -100 where nothing is scored; padding is on the right.

    Without the context, a row begins with its last token, which the state has not seen.
    """
    rows = []
    for group in batch:
        context = group.context if with_context else group.context[-1:]
        rows += [(np.concatenate([context, c]), len(context)) for c in group.continuations]
    width = max(len(row) for row, _ in rows) - 1
    inputs, targets = np.zeros((len(rows), width), dtype=np.int64), np.full((len(rows), width), IGNORE, dtype=np.int64)
    for i, (row, known) in enumerate(rows):
        inputs[i, : len(row) - 1] = row[:-1]
        targets[i, known - 1 : len(row) - 1] = row[known:]
    return inputs, targets


def _read(model: CausalLM, batch: list[_Group]) -> dict:
    """The states after the contexts but their last token, each as often as its context has continuations."""
    parameter = next(model.parameters())
    contexts = torch.from_numpy(np.stack([group.context for group in batch])).to(parameter.device)
    counts = torch.tensor([len(group.places) for group in batch], device=parameter.device)
    room = contexts.shape[1] + max(len(c) for group in batch for c in group.continuations)
    dtype = torch.float64 if parameter.dtype == torch.float64 else None
    states = model.init_state(len(batch), room, parameter.device, dtype)
    if contexts.shape[1] > 1:
        _, states = model.backbone(model.embed(contexts[:, :-1]), states)
    return {
        layer: {name: x.repeat_interleave(counts, dim=0) for name, x in state.items()}
        for layer, state in states.items()
    }


def _score(
    model: CausalLM,
    batch: list[_Group],
    padded: tuple[np.ndarray, np.ndarray],
    states: dict | None,
    found: list[Likelihood | None],
) -> int:
    """Fills in what the rows of `batch` come to, and counts them. Logits are made for the scored tokens alone."""
    device = next(model.parameters()).device
    inputs, targets = (torch.from_numpy(x).to(device) for x in padded)
    x, _ = model.backbone(model.embed(inputs), states)
    row, column = (targets != IGNORE).nonzero(as_tuple=True)
    nats = torch.zeros(len(targets), dtype=torch.float64, device=device)
    wrong = torch.zeros(len(targets), dtype=torch.int64, device=device)
    size = max(1, LOGITS // model.config.vocab_size)
    for r, c in zip(row.split(size), column.split(size), strict=True):
        told, likeliest = _compare(model.logits(x[r, c]), targets[r, c])
        nats.index_add_(0, r, told)
        wrong.index_add_(0, r, (~likeliest).long())
    places = [place for group in batch for place in group.places]
    for place, sum_, misses in zip(places, nats.tolist(), wrong.tolist(), strict=True):
        found[place] = Likelihood(sum_, misses == 0)
    return len(places)


def _compare(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets, float64 [n], and whether each is the likeliest token."""
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0].double(), logs.argmax(-1) == targets
