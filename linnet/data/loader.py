"""Batches of tokens: a pure function of (seed, step), so there is no loader state to save.

An epoch cuts the training tokens into windows of seq_len + 1 tokens that start seq_len apart (neighbours share one
token: the last target of one is the first input of the next) and visits each once, in the order of `linnet.data.order`.
Sample g = step * batch_size + row, and in batches that grow (`linnet.data.sizes`) all rows before the step + row. Each
rank computes its own rows of the same global batch, so a run resumes exactly on any number of ranks.

A mixture cuts each of its sources into windows, and visits those of each source in an order of its own; `Turns` says
which source gives a sample. The first samples therefore hold each source in its share, and no window is read more than
ceil(passes) times.

With packing "cross" a batch is (tokens, targets) and a row reads over the ends of documents. With "reset" a batch also
has the starts of the documents in each row, and the first token of a document is not a target (`flatten_documents`).
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from linnet.config import ConfigError, refuse
from linnet.data.corpus import Portion
from linnet.data.order import Turns, shuffled, source_seed
from linnet.data.shards import TokenShards
from linnet.data.sizes import BatchSizes, batch_sizes

IGNORED = -100  # the target of a position that does not count in the loss
ORDERED = 4096  # samples whose order is computed at a time
Packing = Literal["cross", "reset"]


class Batches:
    """The training batches of a run.

    Args:
        shards: the tokens, usually `corpus.train`.
        seq_len: tokens per row.
        batch_size: rows per step, over all ranks; or those of each step.
        seed: seed of the order.
        packing: `DataConfig.packing`.
        mixture: what each source gives, as `mixture_of` returns it; empty: all tokens are one source.

    Attributes:
        windows: number of windows per epoch.
        per_source: number of windows of each source.
        limit: samples after which the first source has given its epochs; None without epochs.

    Raises:
        ValueError: a size is below 1.
        ConfigError: the tokens, or those of a source, do not fill one window; or the epochs of a source are less than
            one window.
    """

    def __init__(
        self,
        shards: TokenShards,
        seq_len: int,
        batch_size: int | BatchSizes,
        seed: int,
        packing: Packing = "cross",
        mixture: Sequence[Portion] = (),
    ):
        if seq_len < 1 or (isinstance(batch_size, int) and batch_size < 1):
            raise ValueError(f"seq_len {seq_len} and batch_size {batch_size} must be at least 1")
        if len(shards) < seq_len + 1:
            have = f"the {shards.split} split has {len(shards)} tokens"
            fix = f"use at most {len(shards) - 1}, or more text"
            raise ConfigError([f"seq_len: {seq_len} is too long: {have}; {fix}"], "data")
        self.shards, self.seq_len, self.sizes, self.seed = shards, seq_len, batch_sizes(batch_size), seed
        self.packing = packing
        self._windows = np.lib.stride_tricks.sliding_window_view(shards.tokens, seq_len + 1)
        sources = mixture or [Portion("", "", 0, len(shards), shards.bytes, weight=1.0)]
        self.per_source = [max(0, source.end - source.start - 1) // seq_len for source in sources]
        self.windows = sum(self.per_source)
        self._starts = np.array([source.start for source in sources])
        self._sources, alone = sources, len(sources) == 1
        self._seeds = [seed if alone else source_seed(seed, source.digest) for source in sources]
        self._parts, self.limit = shares(sources, self.per_source)
        self._turns = None if alone else Turns(self._parts)
        self._block = (0, np.empty(0, dtype=np.int64))  # number of a sample, and the windows from it on

    def batch(self, step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, ...]:
        """Returns the rows of one rank in one step.

        Args:
            step: number of the step, from 0; the global batch depends only on it and on the seed.
            rank, world: number of this rank, and number of ranks. The rows of ranks 0 ... world - 1, in this order,
                are the global batch. `world` need not divide its rows; with more ranks than rows, some get none.

        Returns:
            Tokens and targets, int64 [rows, seq_len] each; targets[:, t] follows tokens[:, t]. With packing "reset"
            also the starts of documents, int32 [rows, N] as `mark_documents` returns them.
        """
        start, end = self.sizes.share(step, rank, world)
        windows = self._windows[self._ordered(self.sizes.first(step), self.sizes.rows(step))[start:end]]
        tokens, targets = _tensor(windows[:, :-1]), _tensor(windows[:, 1:])
        if self.packing == "cross":
            return tokens, targets
        return mark_documents(tokens, targets, self.shards.end_of_document)

    def epoch(self, step: int) -> float:
        """Returns how many times the training tokens have been read before this step."""
        return self.sizes.first(step) / self.windows

    def source_rows(self, rows: int) -> list[int]:
        """Returns how many of the first rows of a training each source gives."""
        return [rows] if self._turns is None else self._turns.counts(rows)

    def bytes_per_token(self) -> float:
        """Returns the bytes of text per token of the rows: the mean of the sources, weighted by their shares."""
        each = [source.bytes / max(1, source.end - source.start) for source in self._sources]
        return sum(part * mean for part, mean in zip(self._parts, each, strict=True)) / sum(self._parts)

    def documents(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Calls `pack_documents` with this corpus's end of document."""
        return pack_documents(tokens, self.shards.end_of_document)

    def _ordered(self, first: int, rows: int) -> np.ndarray:
        """Returns the first token of the windows of samples first, first + 1, ..."""
        # Computing the order of several steps takes as long as that of one step, so it is computed in blocks. The
        # blocks do not change the order.
        begin, windows = self._block
        if not begin <= first <= begin + len(windows) - rows:
            samples = np.arange(first, first + max(rows, ORDERED // rows * rows), dtype=np.int64)
            begin, windows = self._block = (first, self._first_tokens(samples))
        return windows[first - begin : first - begin + rows]

    def _first_tokens(self, samples: np.ndarray) -> np.ndarray:
        if self._turns is None:
            return self._starts[0] + shuffled(samples, self.windows, self._seeds[0]) * self.seq_len
        sources, uses = self._turns.at(samples)
        starts = self._starts[sources]
        for number in np.unique(sources):
            chosen = sources == number
            order = shuffled(uses[chosen], self.per_source[number], self._seeds[number])
            starts[chosen] += order * self.seq_len
        return starts


def shares(sources: Sequence[Portion], windows: Sequence[float]) -> tuple[list[int], int | None]:
    """Returns the share of each source of a mixture as integers, and the windows of all epochs, None without epochs.

    Args:
        windows: number of windows of each source.

    Raises:
        ConfigError: a source does not fill one window, or its epochs are less than one.
    """
    problems, parts = [], []
    for source, count in zip(sources, windows, strict=True):
        if count < 1 and source.weight != 0:
            have = f"{source.name!r} has {source.end - source.start:,} tokens to train on, less than one row"
            problems.append(f"data.mixture: {have}; use a shorter seq_len, more text, or other text in validation")
        elif source.epochs is not None and not round(source.epochs * count):
            least = f"at least {1 / count:.2g}"
            problems.append(
                f"data.mixture: epochs {source.epochs:g} of {source.name!r} are less than one row; use {least}"
            )
        parts.append(Fraction(str(source.weight)) if source.epochs is None else Fraction(round(source.epochs * count)))
    refuse(problems, "data")
    whole = math.lcm(*(part.denominator for part in parts))
    integers = [int(part * whole) for part in parts]
    return integers, None if sources[0].epochs is None else sum(integers)


class ValidationBatches(Sequence):
    """A fixed sequence of batches that `validation_batches` returns; indexing reads a batch from the shards."""

    def __init__(
        self,
        shards: TokenShards,
        seq_len: int,
        batch_size: int,
        max_tokens: int | None = None,
        packing: Packing = "cross",
        span: tuple[int, int] | None = None,
    ):
        if seq_len < 1 or batch_size < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(
                f"seq_len {seq_len}, batch_size {batch_size} and max_tokens {max_tokens} must be at least 1"
            )
        if len(shards) < 2:
            raise ConfigError([f"{shards.split}: has {len(shards)} tokens; at least 2 are needed to score one"], "data")
        self._shards, self._seq_len, self._packing = shards, seq_len, packing
        total = -(-(len(shards) - 1) // seq_len)
        count = total if max_tokens is None else min(total, max(1, max_tokens // seq_len))
        self._starts = np.arange(count, dtype=np.int64) * total // count * seq_len
        self._span = span or (0, len(shards))
        ends = np.minimum(self._starts + seq_len + 1, min(self._span[1], len(shards)))
        scored = np.maximum(0, ends - np.maximum(self._starts + 1, self._span[0]))
        self._starts, self.tokens = self._starts[scored > 0], int(scored.sum())
        self._rows = min(batch_size, len(self._starts))

    def __len__(self) -> int:
        return -(-len(self._starts) // self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        index %= len(self)
        tokens = torch.full((self._rows, self._seq_len), self._shards.end_of_document, dtype=torch.int64)
        targets = torch.full((self._rows, self._seq_len), IGNORED, dtype=torch.int64)
        outside = torch.zeros_like(targets, dtype=torch.bool)
        for row, start in enumerate(self._starts[index * self._rows : (index + 1) * self._rows].tolist()):
            window = _tensor(self._shards[start : start + self._seq_len + 1])
            tokens[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
            outside[row, : max(0, self._span[0] - start - 1)] = True
            outside[row, max(0, self._span[1] - start - 1) :] = True
        if self._packing == "cross":
            return tokens, targets.masked_fill(outside, IGNORED)
        # Afterwards, because no document starts where there is no target.
        tokens, targets, starts = mark_documents(tokens, targets, self._shards.end_of_document)
        return tokens, targets.masked_fill(outside, IGNORED), starts


def validation_batches(
    shards: TokenShards,
    seq_len: int,
    batch_size: int,
    max_tokens: int | None = None,
    packing: Packing = "cross",
    span: tuple[int, int] | None = None,
) -> ValidationBatches:
    """Returns the batches on which a model is scored; they are always the same.

    Args:
        shards: the tokens, usually `corpus.validation`; they may be shorter than `seq_len`.
        seq_len: tokens per row.
        batch_size: rows per batch; fewer if there are fewer windows in total.
        max_tokens: scores about this many tokens (at least one window), in windows spread evenly over the split. None
            scores every token but the first exactly once.
        packing: `DataConfig.packing`. With "reset" the first token of a document is not scored.
        span: scores the tokens [start, end) of the split alone, in the windows of the whole split.

    Returns:
        A sequence with len() of batches as `Batches.batch` returns them. All have the same shape [rows, seq_len]:
        unused places are filled with ends of documents whose targets are -100. `.tokens` is the number of targets that
        count with packing "cross".
    """
    return ValidationBatches(shards, seq_len, batch_size, max_tokens, packing, span)


def mark_documents(tokens: Tensor, targets: Tensor, end_of_document: int) -> tuple[Tensor, Tensor, Tensor]:
    """Marks where documents start in each row, so that rows of a batch can be split before they are flattened.

    A document starts at the first token of a row and after each end of document. The filler of a row (ends of
    documents whose targets are -100) starts no document.

    Args:
        tokens, targets: int64 [B, T].

    Returns:
        tokens; targets, in which the first token of each document is replaced by -100; and starts, int32 [B, N]:
        ascending from 0 in each row, and padded with T if a row has fewer than N documents. N is a power of two, so
        that few shapes occur.
    """
    rows, length = tokens.shape
    ends = tokens == end_of_document
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, 1:] = ends[:, :-1] & (targets[:, :-1] != IGNORED)
    row, place = starts.nonzero(as_tuple=True)
    number = starts.cumsum(1)[row, place]
    most = int(number.max()) if len(number) else 0
    marked = torch.full((rows, 1 << most.bit_length()), length, dtype=torch.int32)
    marked[:, 0] = 0
    marked[row, number] = place.to(torch.int32)
    return tokens, targets.masked_fill(ends, IGNORED), marked


def flatten_documents(tokens: Tensor, targets: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenates the rows of a batch, for layers that reset at documents. Does not synchronize with the device.

    Args:
        tokens, targets, starts: as `mark_documents` returns them; any rows of a batch.

    Returns:
        tokens and targets [1, B*T], and `cu_seqlens` int32 [B*N + 1]. Unused places of `starts` are empty documents.
    """
    rows, length = tokens.shape
    first = torch.arange(rows, dtype=starts.dtype, device=starts.device)[:, None] * length
    boundaries = torch.nn.functional.pad((starts + first).flatten(), (0, 1), value=rows * length)
    return tokens.reshape(1, -1), targets.reshape(1, -1), boundaries


def pack_documents(tokens: Tensor, end_of_document: int) -> tuple[Tensor, Tensor]:
    """Concatenates the rows of a batch and returns where documents start, for layers that reset there.

    Args:
        tokens: int64 [B, T].
        end_of_document: the id after each document.

    Returns:
        Tokens [1, B*T], and `cu_seqlens` int32 [N + 1]: 0, each start of a row, each place after an end of document,
        and B*T. Reshape the targets in the same way. With tokens on a GPU, the call synchronizes with the device; call
        it before you move the tokens there.
    """
    rows, length = tokens.shape
    starts = torch.zeros(rows, length + 1, dtype=torch.bool, device=tokens.device)
    starts[:, 0] = True
    starts[:, 1:] = tokens == end_of_document
    flat = starts[:, :length].reshape(-1)
    offsets = torch.cat([flat.nonzero().squeeze(1), torch.tensor([rows * length], device=tokens.device)])
    return tokens.reshape(1, -1), offsets.to(torch.int32)


def _tensor(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))
