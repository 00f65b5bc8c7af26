"""What every synthetic task is: a configuration that knows its tokens and draws its samples.

A task is a class in a file of its own. It says what its token ids mean (`kinds`), how long its inputs are, and how a
block of samples is drawn (`draw`); `generate` makes the splits from that. Sources: paper 004 (MAD), section 3.1 and
appendix B.1, and the reference implementation that its authors published, mad-lab.

`spec="paper"` follows the paper. `spec="mad-lab"` draws from the distributions of the published implementation, with
those of its peculiarities that move scores, so that published numbers can be compared with.
"""

from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from linnet.config import Config
from linnet.data.synthetic.draws import Draws

IGNORE = -100  # the target of a position that is not scored
LARGEST = 2**16  # of a vocabulary and of a length, so that a block of samples fits into memory
Split = Literal["train", "validation", "test"]


class Samples(NamedTuple):
    """Token ids and what to predict at each position: int64 [N, T] both, `IGNORE` where nothing is asked.

    Nothing needs to be shifted: `targets[n, t]` is the answer to read at position t, after the model saw inputs 0..t.
    """

    inputs: np.ndarray
    targets: np.ndarray


class Kind(NamedTuple):
    """A range of token ids that play one part, such as keys. `label` names them: k0, k1, ...; or a single [b]."""

    name: str
    label: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class Task(Config):
    """A synthetic task with its difficulty.

    Attributes:
        spec: "paper": as paper 004 describes the task; "mad-lab": the distributions of its published code.
        vocab_size: in the paper's sense: keys and values, or data tokens. Special tokens and noise come on top. Under
            `mad-lab` it includes them. `num_tokens` is the number of ids, and so of embeddings and of classes.
        seq_len: tokens of an input (one less for the recall tasks of `mad-lab`: `input_length`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    # The model is to be an auto-encoder: all targets are read from its output at the last position.
    autoencoder: ClassVar[bool] = False
    # No sample of one split may occur in another. Not so where all splits ask for the same facts.
    separate_splits: ClassVar[bool] = True

    spec: Literal["paper", "mad-lab"] = "paper"
    vocab_size: int = Field(16, ge=1, le=LARGEST)
    seq_len: int = Field(128, ge=1, le=LARGEST)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The parts that token ids play; together all ids from 0, in order."""
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        return self.kinds[-1].stop

    @property
    def input_length(self) -> int:
        return self.seq_len

    @property
    def questions(self) -> int | None:
        """Targets per row, where every row has the same few, so that only their logits are computed; else None."""
        return None

    def draw(self, draws: Draws, rows: int, training: bool) -> Samples:
        """Draws independent samples; `training` where those of the training split are of another form."""
        raise NotImplementedError


def lay_out(*parts: tuple[str, str, int]) -> tuple[Kind, ...]:
    """Gives consecutive ranges of ids to (name, label, size), leaving out what has size 0."""
    kinds, start = [], 0
    for name, label, size in parts:
        if size:
            kinds.append(Kind(name, label, start, size))
            start += size
    return tuple(kinds)


def check_pairs(seq_len: int) -> None:
    """Raises ValueError where a sequence cannot be made of pairs of a key and a value."""
    if seq_len < 4:
        raise ValueError(f"{seq_len} leaves no room for a pair and a question about it; use at least 4")
    if seq_len % 2:
        raise ValueError(f"{seq_len} is odd, and a sequence is made of pairs; use {seq_len - 1} or {seq_len + 1}")


def check_halves(spec: str | None, vocab_size: int, special: int = 0, least: int = 4) -> None:
    """Raises ValueError where the vocabulary cannot be split into keys and values.

    Args:
        special: ids that `vocab_size` has to hold besides.
        least: ids of keys and values that the task needs.
    """
    if vocab_size - special < least:
        beside = f" beside {special} special" if special else ""
        raise ValueError(f"{vocab_size} is too few for keys and values{beside}; use at least {special + least}")
    if spec == "paper" and vocab_size % 2:
        raise ValueError(
            f"{vocab_size} does not split equally into keys and values; use {vocab_size - 1} or {vocab_size + 1}"
        )
