"""The base class of synthetic tasks: a configuration that defines its tokens and draws its samples.

Each task is a class in its own file. It defines the meaning of its token ids (`kinds`), the length of its inputs, and
how a block of samples is drawn (`draw`); `generate` makes the splits from these. Sources: paper 004 (MAD), section 3.1
and appendix B.1, and mad-lab, the reference implementation of its authors.

`spec="paper"` follows the paper. `spec="mad-lab"` draws from the distributions of the reference implementation,
including its deviations from the paper that change scores, so that results can be compared with published ones.
"""

from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from linnet.config import Config
from linnet.data.synthetic.draws import Draws

IGNORE = -100  # the target of a position that is not scored
LARGEST = 2**16  # largest vocabulary and length, so that a block of samples fits into memory
Split = Literal["train", "validation", "test"]


class Samples(NamedTuple):
    """Token ids and targets, both int64 [N, T]; the target is `IGNORE` at positions that are not scored.

    Targets need no shift: `targets[n, t]` is the prediction at position t, after the model has read inputs 0..t.
    """

    inputs: np.ndarray
    targets: np.ndarray


class Kind(NamedTuple):
    """A range of token ids with one role, such as keys. `label` gives their names: k0, k1, ..., or [b] for one id."""

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
        vocab_size: number of keys and values, or of data tokens, as in the paper. Special tokens and noise are extra;
            with `mad-lab` they are included. `num_tokens` is the number of all ids, so of embeddings and classes.
        seq_len: tokens per input (`input_length` is one less for the recall tasks of `mad-lab`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    # True if the model must be an auto-encoder: all targets are predicted from its output at the last position.
    autoencoder: ClassVar[bool] = False
    # True if no sample of one split may occur in another. False if all splits ask for the same facts.
    separate_splits: ClassVar[bool] = True

    spec: Literal["paper", "mad-lab"] = "paper"
    vocab_size: int = Field(16, ge=1, le=LARGEST)
    seq_len: int = Field(128, ge=1, le=LARGEST)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The roles of the token ids; together they cover all ids from 0, in order."""
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        return self.kinds[-1].stop

    @property
    def input_length(self) -> int:
        return self.seq_len

    @property
    def questions(self) -> int | None:
        """Targets per row if every row has the same small number, so that only their logits are computed; else None."""
        return None

    @property
    def chance(self) -> float:
        """The share of targets that a guess among the tokens of their kind (values, or data) gets right."""
        [answers] = [kind for kind in self.kinds if kind.name in ("values", "data")]
        return 1 / answers.size

    def draw(self, draws: Draws, rows: int, training: bool) -> Samples:
        """Draws `rows` independent samples; `training` tells tasks whose training samples have another form."""
        raise NotImplementedError


def lay_out(*parts: tuple[str, str, int]) -> tuple[Kind, ...]:
    """Assigns consecutive ranges of ids to parts (name, label, size); leaves out parts of size 0."""
    kinds, start = [], 0
    for name, label, size in parts:
        if size:
            kinds.append(Kind(name, label, start, size))
            start += size
    return tuple(kinds)


def check_pairs(seq_len: int) -> None:
    """Raises ValueError if a sequence of this length cannot consist of pairs of a key and a value."""
    if seq_len < 4:
        raise ValueError(f"{seq_len} leaves no room for a pair and a question about it; use at least 4")
    if seq_len % 2:
        raise ValueError(f"{seq_len} is odd, but a sequence consists of pairs; use {seq_len - 1} or {seq_len + 1}")


def check_halves(spec: str | None, vocab_size: int, special: int = 0, least: int = 4) -> None:
    """Raises ValueError if the vocabulary cannot be split into keys and values.

    Args:
        special: number of special ids that `vocab_size` includes.
        least: smallest number of keys and values that the task needs.
    """
    if vocab_size - special < least:
        beside = f" in addition to {special} special tokens" if special else ""
        raise ValueError(f"{vocab_size} is too few for keys and values{beside}; use at least {special + least}")
    if spec == "paper" and vocab_size % 2:
        raise ValueError(
            f"{vocab_size} does not split equally into keys and values; use {vocab_size - 1} or {vocab_size + 1}"
        )


SILENT = "."  # printed under an input whose position is not scored


def token_names(task: Task) -> list[str]:
    """Returns a name for each id: k0, k1, ... for keys, v0, ... for values, [b] for a blank; see `Task.kinds`."""
    names = []
    for kind in task.kinds:
        single = kind.label.startswith("[")
        names += [kind.label] if single else [f"{kind.label}{number}" for number in range(kind.size)]
    return names


def aligned(task: Task, inputs: np.ndarray, targets: np.ndarray, width: int = 100) -> list[tuple[str, str]]:
    """Returns one sample as pairs of lines, inputs above targets.

    Args:
        inputs, targets: int64 [T].
        width: most characters per line, unless a single token is longer.
    """
    names = token_names(task)
    above = [names[token] for token in inputs]
    below = [SILENT if token == IGNORE else names[token] for token in targets]
    cell = max(map(len, above + below)) + 1
    a_line = max(1, width // cell)
    starts = range(0, len(above), a_line)
    upper, lower = (
        ["".join(name.ljust(cell) for name in names[at : at + a_line]).rstrip() for at in starts]
        for names in (above, below)
    )
    return list(zip(upper, lower, strict=True))
