"""Classes of long sequences: `objective: sequences`, the tasks of the Long Range Arena (paper 002, Table 7).

The model is a `SequenceClassifier`; its vocabulary, images, classes and head follow from the task. The loss is the
cross-entropy in nats per sequence. Each validation scores the split that selects the epoch and the test split, so the
result has the test accuracy of the last epoch and of the best one.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn

from linnet.config import ConfigError, checking
from linnet.data.problems import in_data, problems_of
from linnet.encoders.config import SequenceConfig
from linnet.encoders.evaluate.lra import forward_of, held_out
from linnet.encoders.lra import (
    LraCorpus,
    LraDataConfig,
    LraTask,
    check_lra,
    lra_content,
    lra_task,
    prepare_lra,
)
from linnet.encoders.lra.augment import augment_lra
from linnet.models import flops_exact
from linnet.train.config import TrainingConfig
from linnet.train.objective import Costs, Loss, Show
from linnet.train.objectives.labelled import LabelledObjective

if TYPE_CHECKING:
    from linnet.encoders.models.sequence import SequenceClassifier
    from linnet.parallel.mesh import Mesh

KNOWN: dict[str, dict[str, Any]] = {
    "text": {"classes": 2},
    "retrieval": {"classes": 2, "head": "retrieval"},
    "image": {"side": 32, "channels": 1, "classes": 10},
    "image-as-published": {"side": 32, "channels": 3, "classes": 10},
}
"""Keys of `SequenceConfig` that follow from a task even where its folder is missing."""

LONGEST = {"text": ("tokens", 4096), "retrieval": ("pairs", 4000)} | dict.fromkeys(
    ("image", "image-as-published"), ("pixels", 32 * 32)
)
"""Kind and greatest length of these tasks, for their costs where the folder is missing."""


class SequenceTraining(TrainingConfig):
    """The training of a classifier of sequences: `objective: sequences`."""

    ROW: ClassVar = "sequences"

    objective: Literal["sequences"] = Field(
        "sequences", description="the training objective: `sequences`, the class of each"
    )
    data: LraDataConfig = Field(description="a task of the Long Range Arena")
    model: SequenceConfig = Field(
        description="a recipe's name, a recipe with changes, or a layout; vocabulary, images, classes and head are "
        "those of the task"
    )
    batch_size: int = Field(32, ge=1, le=1 << 40, description="sequences per step; of pairs, pairs")

    @field_validator("model", mode="before")
    @classmethod
    def _model_of_task(cls, model: Any, info: ValidationInfo) -> Any:
        if isinstance(model, str):
            model = {"recipe": model}
        if not isinstance(model, Mapping) or "data" not in info.data:
            return model
        try:
            keys = task_keys(lra_task(info.data["data"]))
        except ConfigError:  # reported when the data are read
            keys = KNOWN.get(info.data["data"].task, {})
        return {**keys, **model}


class SequenceObjective(LabelledObjective):
    """Trains a classifier on a task of the Long Range Arena."""

    Config = SequenceTraining
    name, units, loss_unit = "sequences", "sequences", "nats per sequence"
    config: SequenceTraining
    data: LraCorpus

    def __init__(self, config: SequenceTraining, data: LraCorpus, device: torch.device):
        super().__init__(config, data, device)
        # The configuration alone gives a bound; now the lengths are known.
        flops = self._flops(config, data.task.kind, max(1, round(float(data.train.lengths.mean()))))
        self.costs = Costs(self.costs.parameters, self.costs.parameters_backbone, self.costs.units, flops)

    @classmethod
    def read(
        cls, config: SequenceTraining, cache: str | Path, show: Callable[[str, int, int], None] | None = None
    ) -> LraCorpus:
        with checking("data", _in_data):
            return prepare_lra(config.data, cache, progress=show)

    @classmethod
    def content(cls, config: SequenceTraining, cache: str | Path | None = None) -> dict[str, str]:
        with checking("data", _in_data):
            return lra_content(config.data, cache)

    @classmethod
    def source_problems(cls, values: Mapping[str, Any], cache: str | Path, told: Sequence[str]) -> list[str]:
        return problems_of(LraDataConfig, values.get("data", {}), lambda config: check_lra(config, cache), told)

    @classmethod
    def row_tokens(cls, config: SequenceTraining) -> int:
        task = _task_of(config)
        return task.max_length * (2 if task.kind == "pairs" else 1)

    @classmethod
    def step_flops(cls, config: SequenceTraining) -> float:
        """Returns the FLOPs of a step whose sequences all have the greatest length, an upper bound.

        The folder of a task need not be there: it is reported when the data are read.
        """
        known = LONGEST.get(config.data.task)
        if known is None:
            task = _task_of(config)
            known = task.kind, task.max_length
        return cls._flops(config, *known)

    @staticmethod
    def _flops(config: SequenceTraining, kind: str, length: int) -> float:
        rows = config.batch_size * (2 if kind == "pairs" else 1)
        return flops_exact(config.model, None if kind == "pixels" else length, rows)

    @classmethod
    def describe_model(cls, config: SequenceTraining) -> str:
        task = _task_of(config)
        of = {"tokens": "tokens", "pairs": "tokens in each of two texts", "pixels": "pixels"}[task.kind]
        return f"{task.name}: {task.classes} classes, at most {task.max_length:,} {of}"

    @classmethod
    def data_problems(cls, config: SequenceTraining, data: LraCorpus) -> list[str]:
        """Returns why a task does not fit the model: its symbols, images, classes, pairs or lengths."""
        model, task = config.model, data.task
        problems = [
            f"model.{key}: {getattr(model, key)}, but task {task.name} needs {needed}; leave it out"
            for key, needed in task_keys(task).items()
            if key not in ("vocab_size", "mean", "std") and getattr(model, key) != needed
        ]
        if task.kind == "pixels":
            return problems
        if model.side is not None:
            problems.append(f"model.side: {model.side}, but task {task.name} has no pixels; leave it out")
        if model.vocab_size < task.num_tokens:
            what = f"{model.vocab_size} is below the {task.num_tokens} tokens of task {task.name}"
            problems.append(f"model.vocab_size: {what}; leave it out")
        longest = max(int(split.lengths.max(initial=0)) for split in (data.train, data.validation, data.test))
        if model.num_positions is not None and model.num_positions < longest:
            problems.append(
                f"model.num_positions: {model.num_positions} is below the longest sequence of {longest} tokens; use "
                f"{longest}, or positions: sinusoidal"
            )
        return problems

    def loss(self, model: "SequenceClassifier") -> Loss:
        if self.data.task.kind == "pixels":
            return lambda images, lengths, labels: model.loss(images, None, labels)
        return model.loss

    def augment(self, batch: tuple[Tensor, ...], position: int, rank: int = 0, world: int = 1) -> tuple[Tensor, ...]:
        if self.data.task.augment == "none":
            return batch
        images, *rest = batch
        sizes, seed = self.config.batch_sizes, self.config.seed
        first, rows = sizes.share(position, rank, world)[0], sizes.rows(position)
        return augment_lra(images, seed=seed, position=position, first=first, rows=rows), *rest

    def validate(
        self,
        model: nn.Module,
        autocast: contextlib.AbstractContextManager,
        show: Show | None = None,
        mesh: "Mesh | None" = None,
    ) -> dict[str, float]:
        """Scores the split that selects the epoch, and the test split: `validation_accuracy` and `test_accuracy`."""
        fields: dict[str, float] = {}
        for name, split in (("validation", self.data.validation), ("test", self.data.test)):
            if name == "validation" or self.config.data.selection != "test":  # else it is the same split
                forward = forward_of(model, split)
                loss, accuracy, _ = self.score(model, forward, held_out(split), autocast, show, mesh)
            fields |= {f"{name}_loss": loss, f"{name}_accuracy": accuracy}
        return fields

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        about = {"task": self.data.task.name, "selection": self.config.data.selection}
        test = {key: validation.get(key) for key in ("test_loss", "test_accuracy")}
        return super().result_fields(rows, validation) | test | about

    def record_fields(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the validation with the best accuracy, the first of equal ones, and its test accuracy."""
        scored = [row for row in rows if row.get("validation_accuracy") is not None]
        best = max(scored, key=lambda row: row["validation_accuracy"], default={})
        return {
            "best_step": best.get("step"),
            "best_accuracy": best.get("validation_accuracy"),
            "best_test_accuracy": best.get("test_accuracy"),
        }

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        best = {"best_step", "best_accuracy", "best_test_accuracy"}
        return super().result_numbers(config) | {"test_loss", "test_accuracy"} | best


def _in_data(problem: str) -> str:
    return in_data(problem, LraDataConfig)


def _task_of(config: SequenceTraining) -> LraTask:
    with checking("data", _in_data):
        return lra_task(config.data)


def task_keys(task: LraTask) -> dict[str, Any]:
    """Returns the keys of `SequenceConfig` that follow from a task."""
    if task.kind != "pixels":
        head = "retrieval" if task.kind == "pairs" else "linear"
        return {"vocab_size": task.num_tokens, "classes": task.classes, "head": head}
    assert task.grid is not None
    return {
        "side": task.grid[0],
        "channels": task.channels,
        "classes": task.classes,
        "mean": list(task.mean),
        "std": list(task.std),
        "head": "linear",
    }
