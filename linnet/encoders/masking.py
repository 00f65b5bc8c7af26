"""Masked tokens for bidirectional language models, as a pure function of (seed, sample).

A row of T tokens has exactly round(rate * T) targets. Each is replaced by the mask token, by a random token, or kept
(Devlin et al. 2018, arXiv:1810.04805, 3.1: 80, 10 and 10 %; Geiping and Goldstein 2022, arXiv:2212.14034: rate 0.25).
As in the published code of the second, special tokens such as the end of a document are chosen like all others.
The choice is a hash of seed, sample and position, so there is no state to save: a run resumes exactly, on any number
of ranks, and each epoch masks other tokens of a row.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from linnet.config import Config, ConfigError, refuse
from linnet.data.corpus import Portion
from linnet.data.loader import IGNORED, Batches, Packing, mark_documents
from linnet.data.order import hash64, mix, uniform
from linnet.data.shards import TokenShards
from linnet.data.sizes import BatchSizes

SHORTEST = 4  # tokens of a row; a shorter one says too little about a masked token
_STRIDE = np.uint64(0x9E3779B97F4A7C15)


class MaskingConfig(Config):
    """Which tokens of a row are predicted, and what the model sees in their places."""

    rate: float = Field(
        0.25,
        description="share of the tokens of a row that are predicted, between 0 and 1: exactly round(rate x seq_len)",
    )
    masked: float = Field(0.8, ge=0, le=1, description="share of these that are replaced by the mask token")
    random: float = Field(0.1, ge=0, le=1, description="share that is replaced by a random token; the others are kept")

    @field_validator("rate")
    @classmethod
    def _between(cls, rate: float) -> float:
        if not 0.0 < rate < 1.0:
            lacking = "nothing to predict" if rate <= 0.0 else "nothing to read"
            raise ValueError(f"{rate:g} leaves {lacking}; use a share between 0 and 1, such as 0.25")
        return rate

    @field_validator("random")
    @classmethod
    def _shares(cls, random: float, info: ValidationInfo) -> float:
        masked = info.data.get("masked", 0.0)
        if masked + random > 1.0 + 1e-9:
            raise ValueError(f"masked ({masked:g}) + random ({random:g}) is above 1; lower one of them")
        return random

    def count(self, length: int) -> int:
        """Returns the number of targets of a row of `length` tokens."""
        return round(self.rate * length)

    def problems(self, length: int) -> list[str]:
        """Returns why rows of `length` tokens cannot be masked, each as "key: what is wrong; the fix"."""
        if length < SHORTEST:
            return [f"seq_len: {length} is too short for masked tokens; use at least {SHORTEST}"]
        count = self.count(length)
        if count == 0:
            least = 0.5 / length
            return [f"masking.rate: {self.rate:g} masks no token of {length}; use more than {least:.3g}"]
        if count == length:
            return [f"masking.rate: {self.rate:g} masks all {length} tokens of a row; use 0.25"]
        return []


def mask_rows(
    tokens: np.ndarray, samples: np.ndarray, key: str, config: MaskingConfig, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows that a model sees, and the tokens that it predicts.

    Args:
        tokens: integers [B, T].
        samples: int64 [B], the number of each row; rows with the same number and key are masked in the same places.
        key: names an unrelated stream of choices, for example "train 0" with the seed.
        config: shares of masked, random and kept tokens.
        vocab_size: number of tokens. The mask token has this id, one above all others.

    Returns:
        inputs and targets, int64 [B, T] each; targets are -100 except at exactly `config.count(T)` places of each row.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    rows, length = tokens.shape
    # One hash for each (key, sample, position), then unrelated numbers from it for each purpose.
    row_keys = mix(np.asarray(samples, dtype=np.int64).astype(np.uint64) * _STRIDE ^ _stream(key))
    places = np.arange(1, length + 1, dtype=np.uint64) * _STRIDE
    hashes = mix((row_keys[:, None] + places[None]).ravel())
    order = np.argsort(hashes.reshape(rows, length), axis=1, kind="stable")
    chosen = np.zeros((rows, length), dtype=bool)
    np.put_along_axis(chosen, order[:, : config.count(length)], True, axis=1)

    chosen_hashes = hashes[chosen.ravel()]
    decision = uniform(chosen_hashes, 0, "decision")
    drawn = np.minimum((uniform(chosen_hashes, 0, "token") * vocab_size).astype(np.int64), vocab_size - 1)
    original = tokens[chosen]
    inputs, targets = tokens.copy(), np.full_like(tokens, IGNORED)
    random = np.where(decision < config.masked + config.random, drawn, original)
    inputs[chosen] = np.where(decision < config.masked, vocab_size, random)
    targets[chosen] = original
    return inputs, targets


class MaskedBatches:
    """The training batches of a masked language model: rows of seq_len tokens in the order of `Batches`.

    Args:
        shards: the tokens, usually `corpus.train`.
        seq_len: tokens per row.
        batch_size: rows per step, over all ranks; or those of each step.
        seed: seed of the order and of the masks.
        masking: which tokens are predicted.
        vocab_size: number of tokens of the tokenizer; the mask token has this id.
        packing: `DataConfig.packing`.
        mixture: as for `Batches`.

    Attributes:
        order: the rows before they are masked.
        windows: number of rows per epoch.

    Raises:
        ConfigError: the tokens do not fill one row, or rows cannot be masked.
    """

    def __init__(
        self,
        shards: TokenShards,
        seq_len: int,
        batch_size: int | BatchSizes,
        seed: int,
        masking: MaskingConfig,
        vocab_size: int,
        packing: Packing = "cross",
        mixture: Sequence[Portion] = (),
    ):
        refuse(masking.problems(seq_len), "data")
        self.order = Batches(shards, seq_len, batch_size, seed, packing, mixture)
        self._masking, self._vocab_size = masking, vocab_size
        self.windows = self.order.windows

    def batch(self, step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, ...]:
        """Returns the rows of one rank in one step.

        Returns:
            Inputs and targets of `mask_rows`, int64 [rows, seq_len] each. With packing "reset" also the starts of
            documents, int32 [rows, N] as `mark_documents` returns them.
        """
        tokens, _, *starts = self.order.batch(step, rank, world)
        sizes = self.order.sizes
        samples = sizes.first(step) + np.arange(*sizes.share(step, rank, world), dtype=np.int64)
        key = f"train {self.order.seed}"
        masked = mask_rows(tokens.numpy(), samples, key, self._masking, self._vocab_size)
        return (*(torch.from_numpy(array) for array in masked), *starts)


class MaskedValidation:
    """A fixed sequence of masked batches, on which every model is scored; indexing reads a batch from the shards.

    Args:
        shards: the tokens, usually `corpus.validation`.
        seq_len, masking, vocab_size, packing: as for `MaskedBatches`.
        batch_size: rows per batch.
        max_tokens: scores rows with about this many tokens, masked ones or not, spread evenly over the split; None
            scores every whole row.

    Attributes:
        tokens: number of tokens of the rows. targets: number of tokens that are predicted.

    Raises:
        ConfigError: the tokens do not fill one row, or rows cannot be masked.
    """

    def __init__(
        self,
        shards: TokenShards,
        seq_len: int,
        batch_size: int,
        masking: MaskingConfig,
        vocab_size: int,
        max_tokens: int | None = None,
        packing: Packing = "cross",
    ):
        refuse(masking.problems(seq_len), "data")
        total = len(shards) // seq_len
        if not total:
            have = f"the held-out text has {len(shards)} tokens"
            fix = f"use at most {len(shards)}, raise data.validation_fraction, or give more text"
            raise ConfigError([f"seq_len: {seq_len} is too long: {have}; {fix}"], "data")
        count = total if max_tokens is None else min(total, max(1, max_tokens // seq_len))
        self._numbers = np.arange(count, dtype=np.int64) * total // count
        self._shards, self._seq_len, self._rows = shards, seq_len, min(batch_size, count)
        self._masking, self._vocab_size, self._packing = masking, vocab_size, packing
        self.tokens = count * seq_len
        self.targets = count * masking.count(seq_len)

    def __len__(self) -> int:
        return -(-len(self._numbers) // self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        numbers = self._numbers[index * self._rows : (index + 1) * self._rows]
        length = self._seq_len
        rows = np.stack([self._shards[number * length : (number + 1) * length] for number in numbers])
        masked = mask_rows(rows, numbers, "validation", self._masking, self._vocab_size)
        inputs, targets = (torch.from_numpy(array) for array in masked)
        if self._packing == "cross":
            return inputs, targets
        tokens = torch.from_numpy(rows.astype(np.int64))
        return inputs, targets, mark_documents(tokens, tokens, self._shards.end_of_document)[2]


@functools.lru_cache(maxsize=64)
def _stream(key: str) -> np.uint64:
    return np.uint64(hash64(f"masks {key}".encode()))
