"""The base class of synthetic tasks: a configuration that defines its tokens and draws its samples.

A task (`mad`, `mqar`) defines the meaning of its token ids (`kinds`), the length of its inputs, and how a block of
samples is drawn (`draw`); `generate` makes the splits from these. Sources: paper 004 (MAD), section 3.1 and appendix
B.1, and mad-lab, the reference implementation of its authors.

`spec="paper"` follows the paper. `spec="mad-lab"` draws from the distributions of the reference implementation,
including its deviations from the paper that change scores, so that results can be compared with published ones.
"""

import functools
import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
from pydantic import Field

from linnet.config import Config, ConfigError
from linnet.data.order import mix

# Random numbers that depend only on a key, and not on other calls, the worker, or NumPy's version.
#
# NumPy guarantees the raw bits of its bit generators, but may change how its distributions use them (NEP 19). So this
# module takes only the bits of Philox from NumPy (J. K. Salmon and others, "Parallel random numbers: as easy as 1, 2,
# 3", 2011), and implements the few distributions that the tasks need.

SORTED = 1024  # populations up to this size are permuted; from larger ones, duplicates are drawn again


class Draws:
    """A stream of random numbers, identified by a seed and a place.

    Args:
        seed: any integer.
        place: strings and integers that name the purpose of the stream; another place gives an unrelated stream.
    """

    def __init__(self, seed: int, *place: str | int):
        self.seed = seed
        key = hashlib.sha256("/".join(map(str, (seed, *place))).encode()).digest()
        self._bits = np.random.Philox(key=int.from_bytes(key[:16], "little"))

    def uniform(self, *shape: int) -> np.ndarray:
        """Returns float64 numbers in [0, 1) of the given shape."""
        bits = self._bits.random_raw(math.prod(shape))
        return ((bits >> np.uint64(11)) * 2.0**-53).reshape(shape)

    def integers(self, high: int | np.ndarray, *shape: int) -> np.ndarray:
        """Returns int64 numbers in [0, high) of the given shape; `high` may be an array that broadcasts to it."""
        return (self.uniform(*shape) * high).astype(np.int64)

    def permutations(self, rows: int, size: int) -> np.ndarray:
        """Returns int64 [rows, size]: an independent random permutation of 0 to size - 1 in each row."""
        return np.argsort(self.uniform(rows, size), axis=1)

    def subsets(self, rows: int, size: int, count: int) -> np.ndarray:
        """Returns bool [rows, size] with `count` True values in each row; all such rows are equally likely."""
        chosen = np.zeros((rows, size), dtype=bool)
        if count:
            smallest = np.argpartition(self.uniform(rows, size), count - 1, axis=1)[:, :count]
            np.put_along_axis(chosen, smallest, True, axis=1)
        return chosen

    def distinct(self, rows: int, count: int, population: int) -> np.ndarray:
        """Returns int64 [rows, count] in [0, population), all different within a row.

        If `count` exceeds `population`, the first `population` of a row are different and the others independent.
        """
        if population <= max(SORTED, 2 * count):
            chosen = self.permutations(rows, population)[:, :count]
            return np.concatenate([chosen, self.integers(population, rows, count - chosen.shape[1])], axis=1)
        chosen = self.integers(population, rows, count)
        while (again := first_places(chosen) != np.arange(count)).any():
            chosen[again] = self.integers(population, np.count_nonzero(again))
        return chosen


def first_places(values: np.ndarray) -> np.ndarray:
    """Returns for each element the first place of its value in its row; int64 [rows, n] -> int64 [rows, n]."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    starts = np.zeros(values.shape, dtype=np.int64)
    starts[:, 1:] = np.where(ordered[:, 1:] != ordered[:, :-1], np.arange(1, values.shape[1]), 0)
    first = np.empty_like(starts)
    np.put_along_axis(first, order, np.take_along_axis(order, np.maximum.accumulate(starts, axis=1), axis=1), axis=1)
    return first


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


# Splits of a task. Rows are a pure function of (task, seed, split, row), and no row is in two splits.
#
# Rows are drawn in blocks of `BLOCK`, each from its own stream, so any process can make any block. The content of a
# sample determines its split: a hash of the input assigns half of all possible samples to train and a quarter each to
# validation and test. A block draws again for samples that belong to another split. So splits never share a sample, for
# any sizes and seeds, and making one split does not require another.

BLOCK = 512
_TRIES = 100  # most draws of BLOCK samples per block; a half or a quarter of them are expected to be in the split
_QUARTERS = {"train": (0, 1), "validation": (2, 2), "test": (3, 3)}


def generate(task: Task, split: Split, count: int, *, seed: int = 0, start: int = 0, threads: int = 1) -> Samples:
    """Returns rows start, ..., start + count - 1 of a split.

    Args:
        split: "train", "validation" or "test"; training samples of some tasks have another form (see their modules).
        count: number of rows. The first rows of a larger split equal those of a smaller one.
        seed: seed of everything random in the task, including the facts to memorise.
        threads: number of blocks drawn at the same time; the result does not depend on it.

    Returns:
        inputs and targets, int64 [count, task.input_length].

    Raises:
        ConfigError: the task has so few different samples that a split cannot be filled.
        ValueError: an unknown split or a negative number of rows.
    """
    if split not in _QUARTERS:
        raise ValueError(f"split {split!r} is unknown; use one of {', '.join(get_args(Split))}")
    if count < 0 or start < 0:
        raise ValueError(f"start {start} and count {count} must not be negative")
    inputs = np.empty((count, task.input_length), dtype=np.int64)
    targets = np.empty_like(inputs)

    def fill(block: int) -> None:
        drawn = _block(task, split, seed, block)
        low, high = max(start, block * BLOCK), min(start + count, (block + 1) * BLOCK)
        from_block, to = slice(low - block * BLOCK, high - block * BLOCK), slice(low - start, high - start)
        inputs[to], targets[to] = drawn.inputs[from_block], drawn.targets[from_block]

    with ThreadPoolExecutor(threads) as pool:  # NumPy releases the GIL while it sorts and draws
        for _ in pool.map(fill, range(start // BLOCK, -(-(start + count) // BLOCK))):
            pass
    return Samples(inputs, targets)


def split_of(inputs: np.ndarray) -> np.ndarray:
    """Returns the quarter of sample space of each input: int64 [N, T] -> int64 [N]; 0 and 1 are train."""
    hashes = mix(((inputs.astype(np.uint64) + np.uint64(1)) * _multipliers(inputs.shape[1])).sum(axis=1))
    return (hashes >> np.uint64(62)).astype(np.int64)


def _block(task: Task, split: Split, seed: int, block: int) -> Samples:
    training, (low, high) = split == "train", _QUARTERS[split]
    kept: list[Samples] = []
    for attempt in range(_TRIES):
        drawn = task.draw(Draws(seed, task.name, split, block, attempt), BLOCK, training)
        if not task.separate_splits:
            return drawn
        quarter = split_of(drawn.inputs)
        mine = (low <= quarter) & (quarter <= high)
        kept.append(Samples(drawn.inputs[mine], drawn.targets[mine]))
        if sum(len(part.inputs) for part in kept) >= BLOCK:
            return Samples(*(np.concatenate(parts)[:BLOCK] for parts in zip(*kept, strict=True)))
    raise ConfigError(
        [
            f"vocab_size, seq_len: {task.vocab_size} and {task.seq_len} allow too few different samples for separate "
            "train, validation and test splits; increase one of them"
        ],
        task.name,
    )


@functools.lru_cache(maxsize=64)
def _multipliers(length: int) -> np.ndarray:
    # Independent of the seed, so that no sample is in train with one seed and in test with another.
    return mix(np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
