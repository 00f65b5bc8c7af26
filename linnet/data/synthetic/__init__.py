"""Synthetic tasks that test one skill each: the six tasks of MAD (paper 004), and MQAR (section 4.1 of paper 002).

task = TASKS["in_context_recall"](vocab_size=32)
inputs, targets = generate(task, "train", 12_800, seed=0)     # both int64 [12800, 128]; -100: position not scored
"""

from linnet.config import ConfigError, nearest
from linnet.data.synthetic.base import BLOCK, IGNORE, Kind, Samples, Split, Task, generate
from linnet.data.synthetic.mad import (
    Compression,
    FuzzyRecall,
    InContextRecall,
    Memorization,
    NoisyRecall,
    SelectiveCopying,
)
from linnet.data.synthetic.mqar import Mqar

_CLASSES = (InContextRecall, FuzzyRecall, NoisyRecall, SelectiveCopying, Compression, Memorization, Mqar)
TASKS: dict[str, type[Task]] = {task.name: task for task in _CLASSES}


def find_task(name: str) -> type[Task]:
    """Returns the task with a name; hyphens count as underscores. Raises `ConfigError` with the nearest valid name."""
    task = TASKS.get(name.replace("-", "_"))
    if task is None:
        raise ConfigError([f"task {name!r} is unknown; {nearest(name.replace('-', '_'), TASKS)}"], "tasks")
    return task


__all__ = [
    "BLOCK",
    "IGNORE",
    "Kind",
    "Samples",
    "Split",
    "TASKS",
    "Task",
    "find_task",
    "generate",
    "Compression",
    "FuzzyRecall",
    "InContextRecall",
    "Memorization",
    "Mqar",
    "NoisyRecall",
    "SelectiveCopying",
]
