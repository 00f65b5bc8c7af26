"""Splits of a task: rows that are a pure function of (task, seed, split, row), and never in two splits.

Rows are drawn in blocks of `BLOCK`, each from a stream of its own, so any process can make any block. Which split a
sample belongs to is decided by its content: a hash of the input puts half of all possible samples into train and a
quarter each into validation and test, and what a block draws for another split is drawn again. So the splits cannot
share a sample, however many are drawn of each, under any seeds, and none has to be drawn to make another.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np

from linnet.config import ConfigError
from linnet.data.order import mix
from linnet.data.synthetic.base import Samples, Split, Task
from linnet.data.synthetic.draws import Draws

BLOCK = 512
_TRIES = 100  # times BLOCK samples drawn for a block, of which one in two to four is expected to belong to the split
_QUARTERS = {"train": (0, 1), "validation": (2, 2), "test": (3, 3)}


def generate(task: Task, split: Split, count: int, *, seed: int = 0, start: int = 0, threads: int = 1) -> Samples:
    """Rows start, ..., start + count - 1 of a split.

    Args:
        split: "train", "validation" or "test"; training samples of the recall tasks are of another form (see there).
        count: rows wanted. The first rows of a larger split are a smaller one.
        seed: of everything random in the task, the facts to memorise included.
        threads: blocks drawn at the same time; the bytes are the same.

    Returns:
        inputs and targets, int64 [count, task.input_length].

    Raises:
        ConfigError: the task has so few different samples that a split cannot be filled.
        ValueError: an unknown split or a negative number of rows.
    """
    if split not in _QUARTERS:
        raise ValueError(f"split {split!r} is unknown; use one of {', '.join(get_args(Split))}")
    if count < 0 or start < 0:
        raise ValueError(f"rows from {start}, {count} of them: neither can be negative")
    inputs = np.empty((count, task.input_length), dtype=np.int64)
    targets = np.empty_like(inputs)

    def fill(block: int) -> None:
        drawn = _block(task, split, seed, block)
        low, high = max(start, block * BLOCK), min(start + count, (block + 1) * BLOCK)
        from_block, to = slice(low - block * BLOCK, high - block * BLOCK), slice(low - start, high - start)
        inputs[to], targets[to] = drawn.inputs[from_block], drawn.targets[from_block]

    with ThreadPoolExecutor(threads) as pool:  # sorting and drawing leave the interpreter to other threads
        for _ in pool.map(fill, range(start // BLOCK, -(-(start + count) // BLOCK))):
            pass
    return Samples(inputs, targets)


def split_of(inputs: np.ndarray) -> np.ndarray:
    """The quarter of sample space that each input lies in: int64 [N, T] -> int64 [N]; train has 0 and 1."""
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
            f"vocab_size, seq_len: {task.vocab_size} and {task.seq_len} allow too few different samples to keep "
            "train, validation and test apart; raise one of them"
        ],
        task.name,
    )


@functools.lru_cache(maxsize=64)
def _multipliers(length: int) -> np.ndarray:
    # The same for every seed, so that no sample is in train under one seed and in test under another.
    return mix(np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
