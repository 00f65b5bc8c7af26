"""Scores of masked language models: masked perplexity, and pseudo-log-likelihoods of sentences.

Masked perplexity is the exponential of the mean loss at masked tokens, with the masking of the training. A document is
read in rows of the training length; each has the same masks for every model with the same tokenizer.

The pseudo-log-likelihood of a sentence is the sum over its tokens of log p(token | all others): each is masked in turn
(Salazar et al. 2020, arXiv:1910.14659). The ends of document around the sentence are read and not scored. How well it
tells acceptable sentences of CoLA from others, as the area under the ROC curve, needs no fine-tuning.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linnet.config import ConfigError
from linnet.data import Tokenizer
from linnet.data.loader import IGNORED
from linnet.encoders.masking import SHORTEST, MaskingConfig, mask_rows
from linnet.encoders.models import MaskedLM
from linnet.evaluate.likelihood import evaluating
from linnet.evaluate.results import Item, Result
from linnet.evaluate.texts import Document
from linnet.layers.positions import length_problems
from linnet.parallel.mesh import divided

TOKENS = 8192  # tokens per forward pass
AT_ONCE = 64  # forward passes that several devices share at a time
NAMED = 5  # most sentences that a message names
LONGEST = 512  # tokens of a sentence that is scored; the work grows with the square of the length

Row = tuple[int, np.ndarray, np.ndarray]  # number of the document, inputs and targets int64 [T]


@dataclass(frozen=True)
class Scored:
    """What the model says of documents or sentences.

    Attributes:
        names: of those that were scored.
        sums: float64 [n], sums of log-likelihoods in nats. counts: int64 [n], numbers of scored tokens.
        skipped: number of those that are too short or too long to be scored.
    """

    names: tuple[str, ...]
    sums: np.ndarray
    counts: np.ndarray
    skipped: int = 0

    def perplexity(self, task: str, metric: str) -> Result:
        """Returns exp(-mean log-likelihood of a token); its items are the losses of the documents."""
        items = (
            Item(name, -total / count, float(count))
            for name, total, count in zip(self.names, self.sums, self.counts, strict=True)
        )
        return Result.of_items(task, metric, items, "lower", "exp")

    def likelihood(self, task: str) -> Result:
        """Returns the mean pseudo-log-likelihood of a sentence, in nats; its items are the sentences."""
        items = (Item(name, float(total)) for name, total in zip(self.names, self.sums, strict=True))
        return Result.of_items(task, "pseudo_log_likelihood", items)


def score_masked(
    model: MaskedLM,
    documents: Sequence[Document],
    masking: MaskingConfig,
    row: int,
    progress: Callable[[int], object] = lambda more: None,
) -> Scored:
    """Scores the masked tokens of documents.

    Args:
        row: tokens per row; the rest of a document is a shorter row, with as many masked tokens in proportion.
        progress: called with the number of read tokens.

    Raises:
        ConfigError: no document has a token to mask.
    """

    def rows() -> Iterator[Row]:
        for number, document in enumerate(documents):
            for start in range(0, len(document.tokens), row):
                part = document.tokens[start : start + row]
                if len(part) >= SHORTEST and 0 < masking.count(len(part)) < len(part):
                    key = f"evaluation {document.digest}"
                    samples = np.array([start], dtype=np.int64)
                    inputs, targets = mask_rows(part[None], samples, key, masking, model.mask_token)
                    yield number, inputs[0], targets[0]
                progress(len(part))

    return _scored(model, [document.name for document in documents], rows())


def score_sentences(
    model: MaskedLM,
    tokenizer: Tokenizer,
    sentences: Sequence[tuple[str, str]],
    longest: int = LONGEST,
    progress: Callable[[int], object] = lambda more: None,
) -> Scored:
    """Returns pseudo-log-likelihoods.

    Args:
        sentences: (name, text) of each.
        longest: sentences with more tokens are skipped.
        progress: called with 1 for each sentence.

    Raises:
        ConfigError: no sentence can be scored.
    """
    end = np.array([tokenizer.end_of_document])

    def rows() -> Iterator[Row]:
        for number, (_, text) in enumerate(sentences):
            inside = tokenizer.encode(text)
            progress(1)
            if not 0 < len(inside) <= longest:
                continue
            tokens = np.concatenate([end, inside, end])
            for place in range(1, len(tokens) - 1):
                inputs, targets = tokens.copy(), np.full_like(tokens, IGNORED)
                inputs[place], targets[place] = model.mask_token, tokens[place]
                yield number, inputs, targets

    return _scored(model, [name for name, _ in sentences], rows())


def sentence_problems(lengths: Sequence[tuple[str, int]], num_positions: int | None, longest: int) -> list[str]:
    """Returns why `score_sentences` cannot score sentences: none has a fitting length, or a table of positions ends.

    Args:
        lengths: (file and line, number of tokens) of each sentence.
        num_positions: rows of the model's learned table of positions; None without one.
        longest: as in `score_sentences`.
    """
    read = [(name, length) for name, length in lengths if 0 < length <= longest]
    if not read:
        shortest = min(length for _, length in lengths)
        return [f"longest: {longest} skips every sentence; give at least {shortest}, or other sentences"]
    ends, problems = 2, []
    for name, length in read:
        fix = f"shorten it, or skip it with --longest {(num_positions or 0) - ends}"
        problems += length_problems(f"{name}: tokens with both ends", length + ends, num_positions, fix)
    more = len(problems) - NAMED
    return problems if more <= 0 else [*problems[:NAMED], f"and {more} more such sentences"]


def area_under_curve(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the share of (acceptable, unacceptable) pairs in which the first has the higher score, ties as half."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


@torch.no_grad()
def _scored(model: MaskedLM, names: Sequence[str], rows: Iterator[Row]) -> Scored:
    sums, counts = np.zeros(len(names)), np.zeros(len(names), dtype=np.int64)
    device = model.embedding.weight.device

    def score(batch: list[Row]) -> tuple[np.ndarray, np.ndarray]:
        lengths = torch.tensor([0, *(len(inputs) for _, inputs, _ in batch)])
        nats = model.log_likelihoods(
            _joined([inputs for _, inputs, _ in batch]).to(device),
            _joined([targets for _, _, targets in batch]).to(device),
            lengths.cumsum(0).to(torch.int32).to(device),
        )
        owners = np.concatenate([np.full((targets != IGNORED).sum(), number) for number, _, targets in batch])
        return owners, nats.double().cpu().numpy()

    with evaluating(model):
        packed = _packed(rows)
        while batches := list(itertools.islice(packed, AT_ONCE)):
            for owners, nats in divided(batches, score):
                np.add.at(sums, owners, nats)
                np.add.at(counts, owners, 1)
    kept = np.flatnonzero(counts)
    if not len(kept):
        raise ConfigError(["there is nothing to score: every text is too short or too long; give others"], "evaluate")
    return Scored(tuple(names[number] for number in kept), sums[kept], counts[kept], len(names) - len(kept))


def _packed(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        if batch and size + len(row[1]) > TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += len(row[1])
    if batch:
        yield batch


def _joined(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))[None]
