"""Splits of a task. Rows are a pure function of (task, seed, split, row), and no row is in two splits.

Rows are drawn in blocks of `BLOCK`, each from its own stream, so any process can make any block. The content of a
sample determines its split: a hash of the input assigns half of all possible samples to train and a quarter each to
validation and test. A block draws again for samples that belong to another split. So splits never share a sample, for
any sizes and seeds, and making one split does not require another.
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
