"""The parts that all kinds of evaluations during training share: results, and their view of the training."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import Config
from linnet.models.kinds import empty_of
from linnet.models.stack import StackConfig
from linnet.runs.model import assign_weights

NAME = r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$"


@dataclass(frozen=True)
class Found:
    """The result of one evaluation.

    Attributes:
        metrics: numbers by name.
        shown: names of the metrics that figures show.
        chance: score of guessing for each shown metric that is a share from 0 to 1, for which higher is better. For
            shown metrics without an entry lower is better.
        questions: number of answers behind a share, if the metric is one.
    """

    metrics: dict[str, float]
    shown: tuple[str, ...] = ()
    chance: dict[str, float] = field(default_factory=dict)
    questions: int | None = None


Measure = Callable[[Any], Found]


@dataclass(frozen=True)
class Subject:
    """The evaluated model, and the settings of its training. Each objective with evaluations has a subclass."""

    model: StackConfig
    device: torch.device
    precision: Literal["float32", "bfloat16"]

    @property
    def complete(self) -> bool:
        """Whether evaluations can be prepared; before the data of the training are, they can only be checked."""
        return True

    def autocast(self) -> contextlib.AbstractContextManager:
        """As in training."""
        if self.precision == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def copy(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Returns a model in evaluation mode with copies of these weights."""
        model = empty_of(self.model)
        assign_weights(model, {name: tensor.detach().clone() for name, tensor in weights.items()}, "evaluations")
        return model.eval().to(self.device)


class Evaluation(Config):
    """The configuration of an evaluation.

    Attributes:
        kind: what is evaluated.
        name: label in the record, distinct among a run's evaluations; default: the kind.
        every: steps between two; null: with each validation. All run at the end too.
    """

    kind: str
    name: str = Field("", pattern=NAME)
    every: int | None = Field(None, ge=1)

    def check(self, subject: Any) -> None:
        """Raises ConfigError for all problems that can be found before the data of the training are prepared."""

    def prepare(self, subject: Any) -> Measure:
        """Reads what the evaluation needs, and returns a function from a model to its results.

        Raises:
            ConfigError: as `check` does, and for all problems of what was read.
        """
        raise NotImplementedError


def label(config: Evaluation) -> str:
    """Returns the name of an evaluation in the record."""
    return config.name or config.kind
