"""Log-likelihoods of continuations; a context that several continuations share is read once.

A harness that scores whole rows reads a question with four answers four times. Here the model reads the context once,
copies its state (or its cache, for attention) for every answer, and then reads only the answers.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from linnet.config import ConfigError
from linnet.evaluate.mode import evaluating
from linnet.models import CausalLM
from linnet.models.causal_lm import IGNORE

TOKENS = 2**15  # upper bound of tokens per batch, padding included
LOGITS = 2**26  # upper bound of logits at once


class Likelihood(NamedTuple):
    """Score of one continuation.

    Attributes:
        nats: sum of its tokens' log-probabilities, in nats.
        greedy: whether each of its tokens is the likeliest one.
    """

    nats: float
    greedy: bool


class _Group(NamedTuple):
    """Continuations of one context: their tokens, and their positions in the list of requests."""

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
    """Returns the log-likelihood of each continuation after its context, in the order of the requests.

    Args:
        requests: pairs (context, continuation) of token ids, each with at least one token.
        autocast: precision of the forward pass; None is that of the parameters.
        progress: called after each batch with the number of requests that it answered.

    Raises:
        ConfigError: the model gives likelihoods that are not finite.
        ValueError: a context or a continuation has no token.
    """
    groups: dict[bytes, _Group] = {}
    for place, (context, continuation) in enumerate(requests):
        context, continuation = (np.asarray(ids, dtype=np.int64) for ids in (context, continuation))
        if not len(context) or not len(continuation):
            raise ValueError(
                f"request {place}: {len(context)} tokens of context and {len(continuation)} to score; give at least "
                "one of each; if there is no context, use the end-of-document token"
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
    if bad := sum(not math.isfinite(one.nats) for one in found):
        problem = f"{bad} of {len(found)} requests have no finite likelihood; the model's logits are NaN or infinite"
        raise ConfigError([problem], "model")
    return found


def _batches(groups: list[_Group], of_one_length: bool = False) -> Iterator[list[_Group]]:
    """Yields groups that are read together, the longest first; with `of_one_length`, their contexts have one length."""
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
    """Returns inputs and targets, int64 [rows, T], padded on the right; targets that are not scored are -100.

    If `with_context` is False, a row begins with the last token of the context, which the state has not read.
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
    """Returns the states after all but the last token of each context, one copy per continuation of the context."""
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
    """Writes the scores of the rows of `batch` into `found` and returns their number.

    Only the scored tokens get logits.
    """
    device = next(model.parameters()).device
    inputs, targets = (torch.from_numpy(x).to(device) for x in padded)
    x, _ = model.backbone(model.embed(inputs), states)
    row, column = (targets != IGNORE).nonzero(as_tuple=True)
    nats = torch.zeros(len(targets), dtype=torch.float64, device=device)
    wrong = torch.zeros(len(targets), dtype=torch.int64, device=device)
    size = max(1, LOGITS // model.config.vocab_size)
    for r, c in zip(row.split(size), column.split(size), strict=True):
        logs, likeliest = _compare(model.logits(x[r, c]), targets[r, c])
        nats.index_add_(0, r, logs)
        wrong.index_add_(0, r, (~likeliest).long())
    places = [place for group in batch for place in group.places]
    for place, sum_, misses in zip(places, nats.tolist(), wrong.tolist(), strict=True):
        found[place] = Likelihood(sum_, misses == 0)
    return len(places)


def _compare(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of targets, float64 [n], and whether each is the likeliest token, bool [n]."""
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0].double(), logs.argmax(-1) == targets
