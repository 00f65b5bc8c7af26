"""Evaluations while a model trains: cheap suites on held-out data every few steps, in the record of the run.

An evaluation runs after the checkpoint of its step is written, so a crash in it loses no training. It gets a copy of
the weights and its own random numbers, so that a run has the same losses and weights with and without evaluations, bit
for bit. Texts, prompts, tasks and images are read and checked before the first step; an evaluation that fails later is
recorded as an event, and training continues. The kinds are in the folder suites.
"""

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from linnet.config import ConfigError, gather, refuse
from linnet.runs.saver import free_memory
from linnet.train.suites import Evaluation, Measure, Subject, label


class Evaluations:
    """The evaluations of one run, with all of their data in memory."""

    def __init__(self, configs: Sequence[Evaluation], subject: Subject | None, validate_every: int):
        """Reads texts, prompts, tasks and images.

        Args:
            subject: the model; None without evaluations.
            validate_every: steps between validations; evaluations without `every` run with them. 0: only at the end.

        Raises:
            ConfigError: lists all problems with what the configurations name.
        """
        self._subject = subject
        self._every = {label(config): config.every or validate_every for config in configs}
        self._kinds = {label(config): config.kind for config in configs}
        self._measures: dict[str, Measure] = {}

        def read(config: Evaluation) -> None:
            self._measures[label(config)] = config.prepare(subject)

        _each(configs, read)

    def due(self, step: int, steps: int) -> list[str]:
        """Returns the names of the evaluations due after `step` of `steps` updates: all after the last, none at 0."""
        if step == steps:
            return list(self._every)
        return [name for name, every in self._every.items() if every and step and step % every == 0]

    def make(self, name: str, weights: dict[str, Tensor]) -> dict:
        """Evaluates a copy of the weights.

        Returns:
            `evaluation` and `kind`, and either the fields of `Found`, or an `event` with the `error`.
        """
        row = {"evaluation": name, "kind": self._kinds[name]}
        with collected():  # a reference cycle may contain the copy and would keep its memory
            try:
                with undisturbed(self._subject.device):
                    measurement = self._measures[name](self._copy(weights))
            except Exception as error:  # a failing evaluation must not end the training
                lines = str(error).strip().splitlines() or [type(error).__name__]
                lines = [line.strip() for line in lines if line.strip()]
                return row | {
                    "event": "evaluation_failed",
                    "error": f"{type(error).__name__}: {' '.join(lines)}"[:1000],
                }
        row |= {"metrics": measurement.metrics, "shown": list(measurement.shown), "chance": measurement.chance}
        return row | ({"questions": measurement.questions} if measurement.questions is not None else {})

    def _copy(self, weights: dict[str, Tensor]) -> nn.Module:
        return self._subject.copy(weights)


def check_evaluations(configs: Sequence[Evaluation], subject: Subject) -> None:
    """Raises ConfigError for all problems of evaluations that can be found before the data are prepared."""
    _each(configs, lambda config: config.check(subject))


def check_host(configs: Sequence[Evaluation], parameters: int) -> None:
    """Raises ConfigError if the weights of a sharded model, and an evaluation's copy, do not fit on the host of rank 0.

    Args:
        parameters: of the model.
    """
    need, free = 2 * 4 * parameters, free_memory()
    if configs and free is not None and need > free:
        needed = f"{need / 1e9:,.1f} GB on the machine of rank 0, which has {free / 1e9:,.1f} GB free"
        fix = "leave `evaluations` out, and run `linnet evaluate RUN` after training"
        raise ConfigError([f"evaluations: the whole weights and a copy need {needed}; {fix}"], "train")


def _each(configs: Sequence[Evaluation], do: Callable[[Evaluation], None]) -> None:
    problems = []
    for place, config in enumerate(configs):
        lines: list[str] = []
        with gather(lines):
            do(config)
        problems += [f"evaluations.{place} ({label(config)}): {line}" for line in lines]
    refuse(problems, "evaluations")


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Collects the reference cycles that the block leaves; skips older objects, which saves a fraction of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restores the random states of Python, NumPy and PyTorch afterwards."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def rows_kept(rows: Sequence[dict], checkpointed: int, step: int, validation: bool = False) -> int:
    """Returns how many rows of a record a run keeps when it resumes from the checkpoint of `step`.

    These are the `checkpointed` rows, which precede the checkpoint, and the evaluations of that step after them.

    Args:
        validation: keeps the validation of that step too. The last one of a run follows its checkpoint, and a longer
            run does not repeat it.
    """
    kept = checkpointed
    while kept < len(rows) and rows[kept].get("step") == step:
        if "evaluation" not in rows[kept] and not (validation and "validation_loss" in rows[kept]):
            break
        kept += 1
    return kept
