"""Labelled examples, whatever they are: images, sentences and sequences give their rows, and this their batches.

batches = LabelledBatches(split, batch_size=32, seed=0)
*inputs, labels = batches.batch(0)
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from linnet.data.order import shuffled
from linnet.data.sizes import BatchSizes, batch_sizes


class Labelled(Protocol):
    """Labelled examples of one split, by their place in it."""

    def __len__(self) -> int: ...

    def rows(self, numbers: np.ndarray) -> tuple[Tensor, ...]:
        """Returns the tensors of a batch with these examples, int64 [b]; the last one holds the labels."""


class LabelledBatches:
    """The training batches: a pure function of (seed, position); each epoch has its own order.

    Args:
        split: the examples. batch_size: rows per step, over all ranks; or those of each step.
        seed: seed of the order.
    """

    def __init__(self, split: Labelled, batch_size: int | BatchSizes, seed: int):
        self.split, self.sizes, self.seed = split, batch_sizes(batch_size), seed

    def batch(self, position: int, rank: int = 0, world: int = 1) -> tuple[Tensor, ...]:
        """Returns the rows of one rank of the global batch at a position.

        Args:
            position: from 0; the global batch depends only on it and on the seed.
            rank, world: number of this rank, and number of ranks. The rows of ranks 0 ... world - 1, in this order,
                are the global batch.
        """
        samples = self.sizes.first(position) + np.arange(*self.sizes.share(position, rank, world))
        return self.split.rows(shuffled(samples, len(self.split), self.seed))


class HeldOut(Sequence[tuple[Tensor, ...]]):
    """The examples that a validation scores, always the same, in batches.

    Args:
        rows: examples per batch; the last may have fewer.

    Attributes:
        order: int64 [n], the examples in the order of the batches; by default all of them as they stand.
        size: number of examples.
    """

    def __init__(self, split: Labelled, rows: int, order: np.ndarray | None = None):
        self._split, self.rows = split, rows
        self.order = np.arange(len(split)) if order is None else order
        self.size = len(self.order)

    def __len__(self) -> int:
        return -(-self.size // self.rows)

    def __getitem__(self, number: Any) -> tuple[Tensor, ...]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return tuple(self._split.rows(self.order[number * self.rows : (number + 1) * self.rows]))


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Returns the order in which batches have rows of similar length, int64 [n]; of pairs [n, 2] the longer counts."""
    return np.argsort(-lengths.reshape(len(lengths), -1).max(1), kind="stable")
