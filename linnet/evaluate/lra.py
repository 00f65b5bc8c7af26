"""Accuracy on the tasks of the Long Range Arena, and the average of its six numbers as paper 002, Table 7, prints it.

The printed average divides by six, and a task that is missing or failed counts as 0: so the Transformer's row without
Path-X comes out to the digit. The mean of the tasks that were run is another number, and both are reported.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet.data.lra import LraSplit
from linnet.evaluate.mode import evaluating

SCORES = ("listops", "text", "retrieval", "image", "pathfinder", "path-x")
"""The six columns of Table 7."""
SCORED = 1 << 17  # tokens per forward pass: scoring stores nothing for gradients


class HeldOut(Sequence[tuple[Tensor, ...]]):
    """The rows of a split in batches of similar length, always the same.

    Attributes:
        order: int64 [n], the rows of the split in the order of the batches.
    """

    def __init__(self, split: LraSplit):
        longest = split.lengths if split.lengths.ndim == 1 else split.lengths.max(1)
        whole = int(split.lengths.reshape(len(split), -1).sum(1).max(initial=1))
        self._split, self._rows = split, max(1, SCORED // whole)
        self.order = np.argsort(-longest, kind="stable")

    def __len__(self) -> int:
        return -(-len(self.order) // self._rows)

    def __getitem__(self, number: Any) -> tuple[Tensor, ...]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return tuple(self._split.rows(self.order[number * self._rows : (number + 1) * self._rows]))


def logits_of(model: nn.Module, pixels: bool, inputs: Tensor, lengths: Tensor) -> Tensor:
    """Returns the logits of a batch, [b, classes], at least float32.

    Args:
        model: a `SequenceClassifier`. pixels: whether the rows are images, which all have one length.
    """
    logits = model(inputs, None if pixels else lengths)
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def predict(model: nn.Module, split: LraSplit, progress: Callable[[int], object] = lambda more: None) -> np.ndarray:
    """Returns the most likely class of each row of a split, int64 [n].

    Args:
        progress: called with the number of rows of each forward pass.
    """
    device, batches = next(model.parameters()).device, HeldOut(split)
    found: list[Tensor] = []
    with evaluating(model):
        for inputs, lengths, _ in batches:
            logits = logits_of(model, split.task.kind == "pixels", inputs.to(device), lengths.to(device))
            found.append(logits.argmax(-1).cpu())
            progress(len(inputs))
    classes = np.empty(len(split), dtype=np.int64)
    classes[batches.order] = torch.cat(found).numpy()
    return classes


def column(task: str) -> str:
    """Returns the column of Table 7 of a task: the published Image is colour, and stands where LRA's grey one does."""
    return "image" if task == "image-as-published" else task


def averages(scores: Mapping[str, float | None]) -> tuple[float, float]:
    """Returns the printed average, of six numbers with 0 for a missing one, and the mean of those that are there.

    Args:
        scores: numbers by the names of `SCORES`; None or NaN is missing.

    Raises:
        ValueError: a name is not one of these.
    """
    if unknown := sorted(set(scores) - set(SCORES)):
        raise ValueError(f"scores {', '.join(unknown)} are not of the Long Range Arena; use {', '.join(SCORES)}")
    numbers = [number for number in scores.values() if number is not None and not math.isnan(number)]
    total = math.fsum(numbers)
    return total / len(SCORES), total / len(numbers) if numbers else math.nan


def table(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the mean accuracies of runs in per cent by architecture, and their averages.

    Args:
        runs: `architecture`, `task`, `last` and `best` (test accuracy of the last and of the best epoch, or None).

    Returns:
        {architecture: {"last": {column: per cent}, "best": ..., "runs": {column: number}, "average": the printed one of
        `last`, "mean": of what was run, "best_average", "best_mean"}}.
    """
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        row = found.setdefault(str(run["architecture"]), {"last": {}, "best": {}})
        for which in ("last", "best"):
            if run[which] is not None:
                row[which].setdefault(column(run["task"]), []).append(100.0 * run[which])
    for row in found.values():
        row["runs"] = {name: len(numbers) for name, numbers in row["last"].items()}
        for which in ("last", "best"):
            row[which] = {name: math.fsum(numbers) / len(numbers) for name, numbers in row[which].items()}
        row["average"], row["mean"] = averages(row["last"])
        row["best_average"], row["best_mean"] = averages(row["best"])
    return found
