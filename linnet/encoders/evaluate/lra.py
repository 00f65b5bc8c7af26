"""Accuracy on the tasks of the Long Range Arena, and the average of its six numbers as paper 002, Table 7, prints it.

The printed average divides by six, and a task that is missing or failed counts as 0: so the Transformer's row without
Path-X comes out to the digit. The mean of the tasks that were run is another number, and both are reported.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from linnet.data.labelled import HeldOut, longest_first
from linnet.encoders.lra import LraSplit
from linnet.evaluate.likelihood import outputs_of

SCORES = ("listops", "text", "retrieval", "image", "pathfinder", "path-x")
"""The six columns of Table 7."""
SCORED = 1 << 17  # tokens per forward pass: scoring stores nothing for gradients


def held_out(split: LraSplit) -> HeldOut:
    """Returns the rows of a split in batches of similar length."""
    whole = int(split.lengths.reshape(len(split), -1).sum(1).max(initial=1))
    return HeldOut(split, max(1, SCORED // whole), longest_first(split.lengths))


def forward_of(model: nn.Module, split: LraSplit) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function (inputs, lengths) -> logits of a `SequenceClassifier`; images all have one length."""
    return (lambda images, lengths: model(images)) if split.task.kind == "pixels" else model


def predict(model: nn.Module, split: LraSplit, progress: Callable[[int], object] = lambda more: None) -> np.ndarray:
    """Returns the most likely class of each row of a split, int64 [n].

    Args:
        progress: called with the number of rows of each forward pass.
    """
    return outputs_of(model, held_out(split), forward_of(model, split), progress=progress).argmax(-1)


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
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        row = rows.setdefault(str(run["architecture"]), {"last": {}, "best": {}})
        for which in ("last", "best"):
            if run[which] is not None:
                row[which].setdefault(column(run["task"]), []).append(100.0 * run[which])
    for row in rows.values():
        row["runs"] = {name: len(numbers) for name, numbers in row["last"].items()}
        for which in ("last", "best"):
            row[which] = {name: math.fsum(numbers) / len(numbers) for name, numbers in row[which].items()}
        row["average"], row["mean"] = averages(row["last"])
        row["best_average"], row["best_mean"] = averages(row["best"])
    return rows
