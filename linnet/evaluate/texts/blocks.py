"""Perplexities of a text by the convention of WikiText-103 at 44M (papers 001 to 003), and by two that compare.

The text is one stream of tokens in which a token ends every line (a tokenizer with `line_ends`) or every document.
It is cut into blocks of N tokens without memory: a block sees the token before it and its own tokens, from a zero
state, and all of its tokens are scored. From the same nats follow three numbers:

* `perplexity`: per token and line end. This is the number that the papers print. It depends on the tokenizer and is not
  a word perplexity: 24 here is not 24 of a word-level table.
* `word_perplexity`: per word between white space and line end, the unit of word-level tables.
* `bits_per_byte`: per byte of the text as it is in the file.

`carried` gives the same three numbers with a state that goes on from block to block, which a model can do whose state
does not grow.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from linnet.config import ConfigError
from linnet.data import Tokenizer
from linnet.evaluate.likelihood import evaluating
from linnet.evaluate.results import Item, Result
from linnet.evaluate.texts.text import carried_losses, windowed_losses
from linnet.models import CausalLM


@dataclass(frozen=True)
class Stream:
    """Texts as one stream of tokens.

    Attributes:
        tokens: int64 [n]; the first is context and is not scored.
        names: of the units of text whose nats are summed: lines if a token ends every line, else documents.
        unit: int64 [n - 1], the unit of each scored token.
        words: int64 [units], words between white space, and line ends. bytes: int64 [units].
        line_ends: whether units are lines.
    """

    tokens: np.ndarray
    names: tuple[str, ...]
    unit: np.ndarray
    words: np.ndarray
    bytes: np.ndarray
    line_ends: bool


def read_stream(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> Stream:
    """Returns the stream of (name, text). Raises ConfigError if no text has a line."""
    end, by_line = tokenizer.end_of_document, getattr(tokenizer, "line_ends", False)
    tokens, names, words, sizes = [np.array([end])], [], [], []
    units: list[np.ndarray] = []
    for name, text in texts:
        ids = np.append(tokenizer.encode(text), end)
        lines = text.removesuffix("\n").split("\n")
        if by_line:
            counts = np.concatenate([[0], (ids == end).cumsum()[:-1]])  # the end of a line belongs to it
            words += [len(line.split()) + 1 for line in lines]
            sizes += [len(line.encode()) + 1 for line in lines]
            sizes[-1] -= not text.endswith("\n")
        else:
            counts, lines = np.zeros(len(ids), dtype=np.int64), [""] * len(lines)
            words.append(len(text.split()) + len(lines))
            sizes.append(len(text.encode()))
        units.append(counts + len(names))
        names += [f"{name}:{number}" for number in range(1, len(lines) + 1)] if by_line else [name]
        tokens.append(ids)
    if not names:
        raise ConfigError(["blocks: there is no text to score; name files with some"], "evaluate")
    counted = (np.array(words), np.array(sizes))
    return Stream(np.concatenate(tokens), tuple(names), np.concatenate(units), *counted, by_line)


@dataclass(frozen=True)
class StreamScore:
    """Nats of a stream, float64 [units], and the tokens of each unit, int64 [units]."""

    stream: Stream
    nats: np.ndarray
    tokens: np.ndarray

    def results(self, task: str) -> tuple[Result, ...]:
        """Returns the three numbers, with an item per unit of text."""

        def over(metric: str, sizes: np.ndarray, unit: float = 1.0, exp: bool = True) -> Result:
            named = zip(self.stream.names, self.nats.tolist(), sizes.tolist(), strict=True)
            items = [Item(name, nats / unit / size, size) for name, nats, size in named if size]
            return Result.of_items(task, metric, items, "lower", "exp" if exp else "mean")

        return (
            over("perplexity", self.tokens),
            over("word_perplexity", self.stream.words),
            over("bits_per_byte", self.stream.bytes, math.log(2), exp=False),
        )


@torch.no_grad()
def score_stream(
    model: CausalLM, stream: Stream, block: int | None, progress: Callable[[int], None] | None = None
) -> StreamScore:
    """Scores a stream in blocks of `block` tokens without memory, or with a carried state if `block` is None.

    Raises:
        ConfigError: the model gives losses that are not finite.
    """
    told = progress or (lambda count: None)
    with evaluating(model):
        if block is None:
            losses = carried_losses(model, stream.tokens, 2048, told)
        else:
            losses = windowed_losses(model, [stream.tokens], block + 1, block, told)[0][0]
    if not np.isfinite(losses).all():
        bad = f"{np.count_nonzero(~np.isfinite(losses))} of {len(losses)} tokens have no finite loss"
        raise ConfigError([f"blocks: {bad}; the model's logits are NaN or infinite"], "model")
    count = len(stream.names)
    nats = np.bincount(stream.unit, losses, minlength=count)
    return StreamScore(stream, nats, np.bincount(stream.unit, minlength=count))
