"""Evaluations while a model trains: cheap suites on held-out data every so many steps, in the record of the run.

They come after the checkpoint of their step is on the disk, so that no evaluation can cost training that was done, and
get a copy of the weights and their own random numbers, so that a run with evaluations has every loss and weight of the
one without, bit for bit. What one needs (texts, prompts, tasks) is read and checked before the first step; one that
fails later is an event in the record, and training goes on. Their kinds are in suites.py.
"""

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from linnet.config import ConfigError, gather
from linnet.models import CausalLM, empty_model
from linnet.runs.model import assign_weights
from linnet.train.suites import Evaluation, Measure, Subject, label


class Evaluations:
    """The evaluations of one run, ready to be made."""

    def __init__(self, configs: Sequence[Evaluation], subject: Subject, validate_every: int):
        """Reads all that they need.

        Args:
            validate_every: steps between validations, at which those are due that have no `every`; 0: the end alone.

        Raises:
            ConfigError: all that is wrong with what the configurations name.
        """
        self._subject = subject
        self._every = {label(config): config.every or validate_every for config in configs}
        self._kinds = {label(config): config.kind for config in configs}
        self._measures: dict[str, Measure] = {}

        def read(config: Evaluation) -> None:
            self._measures[label(config)] = config.prepare(subject)

        _each(configs, read)

    def due(self, step: int, steps: int) -> list[str]:
        """Those to be made after `step` of `steps` updates: all after the last, none before the first."""
        if step == steps:
            return list(self._every)
        return [name for name, every in self._every.items() if every and step and step % every == 0]

    def make(self, name: str, weights: dict[str, Tensor]) -> dict:
        """Evaluates a model of these weights, which stay as they are.

        Returns:
            `evaluation` and `kind`, and either what was `Found`, or an `event` with the `error` that kept it from
            being found.
        """
        row = {"evaluation": name, "kind": self._kinds[name]}
        with collected():  # the copy may be part of a cycle, and would keep its memory from training
            try:
                with undisturbed(self._subject.device):
                    found = self._measures[name](self._copy(weights))
            except Exception as error:  # whatever it is, training is worth more
                lines = str(error).strip().splitlines() or [type(error).__name__]
                lines = [line.strip() for line in lines if line.strip()]
                return row | {
                    "event": "evaluation_failed",
                    "error": f"{type(error).__name__}: {' '.join(lines)}"[:1000],
                }
        row |= {"metrics": found.metrics, "shown": list(found.shown), "chance": found.chance}
        return row | ({"questions": found.questions} if found.questions is not None else {})

    def _copy(self, weights: dict[str, Tensor]) -> CausalLM:
        model = empty_model(self._subject.model)
        assign_weights(model, {name: tensor.detach().clone() for name, tensor in weights.items()}, "evaluations")
        return model.eval().to(self._subject.device)


def check_evaluations(configs: Sequence[Evaluation], seq_len: int, sources: Sequence[str] | str) -> None:
    """Raises ConfigError for all that is wrong with evaluations, as far as it shows before there is a tokenizer.

    Args:
        seq_len, sources: as in `Subject`.
    """
    _each(configs, lambda config: config.check(seq_len, sources))


def _each(configs: Sequence[Evaluation], do: Callable[[Evaluation], None]) -> None:
    problems = []
    for place, config in enumerate(configs):
        found: list[str] = []
        with gather(found):
            do(config)
        problems += [f"evaluations.{place} ({label(config)}): {line}" for line in found]
    if problems:
        raise ConfigError(problems, "evaluations")


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Collects what the block leaves in cycles, and looks at nothing older, which would take a fraction of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Puts the random numbers of Python, NumPy and PyTorch back to where they were."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def rows_kept(rows: Sequence[dict], checkpointed: int, step: int) -> int:
    """How many rows of a record stay when a run goes on from the checkpoint of `step`, written behind `checkpointed`
    rows: these, and the evaluations of that step right behind them."""
    kept = checkpointed
    while kept < len(rows) and "evaluation" in rows[kept] and rows[kept]["step"] == step:
        kept += 1
    return kept
