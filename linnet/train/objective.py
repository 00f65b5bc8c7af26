"""The interface between training and its objective.

`Objective` is a model with its loss. `RunObjective` adds the other needs of a run of `linnet train`: data, validation,
the files of its run folder, and the conditions for resuming a checkpoint. Loop, session, guards, checkpoints, loggers
and studies use only these two classes and know neither texts nor tokenizers. The implementations are in
`linnet.train.objectives`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from linnet.config import ConfigError, Problem, Rename, gather, shown
from linnet.layers.base import auxiliary_layers
from linnet.models import OBJECTIVE_KINDS, build, count_parameters
from linnet.parallel.mesh import Mesh
from linnet.parallel.tensor import Cuts
from linnet.train import passes
from linnet.train.config import TrainingConfig
from linnet.train.evaluation import Evaluations, check_evaluations
from linnet.train.suites import Subject

Batch = tuple[Tensor, ...]  # the first dimension of each tensor counts the rows
Loss = Callable[..., tuple[Tensor, Tensor]]
Progress = Callable[[dict], None]
Show = Callable[[int, int], None]  # of units scored and in total
Preparing = Callable[[str, int, int], None]  # of the name of the work, the amount done and the total
Autocast = AbstractContextManager  # the precision of a forward pass


def preparing(progress: Progress | None) -> Preparing | None:
    """Returns what reports the preparation of data to `progress`."""
    if progress is None:
        return None
    return lambda what, done, total: progress({"event": "data", "what": what, "done": done, "total": total})


class BatchSource(Protocol):
    """Batches by position: the batch at a position is always the same, so that a run can resume at any position."""

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch: ...


class Data(Protocol):
    """Prepared data. Equal digests mean equal training data."""

    @property
    def digest(self) -> str: ...

    @property
    def train(self) -> Sized: ...


@dataclass(frozen=True)
class Costs:
    """The costs of a model and of one step.

    Attributes:
        parameters: number of all parameters. parameters_backbone: number outside embeddings and head.
        units: tokens (images, ...) per step with a whole batch.
        flops: training FLOPs of such a step, as `linnet.models.flops_exact` counts them.
    """

    parameters: int
    parameters_backbone: int
    units: int
    flops: float


class Objective(ABC):
    """A model and its loss, for the caller that makes the steps: `linnet.train.Session` or an ensemble."""

    @abstractmethod
    def build(self, seed: int, device: torch.device | str | None = None) -> nn.Module:
        """Returns the model with its initial weights, which depend only on the seed."""

    def loss(self, model: nn.Module) -> Loss:
        """Returns the loss function of a micro-batch: its tensors -> (sum in nats, number of targets), both scalars.

        The function is compiled if `run.compile` is set. The default is the model's own `loss`.
        """
        return model.loss


def training_loss(model: nn.Module, loss: Loss) -> Callable[..., tuple[Tensor, ...]]:
    """Returns `loss` with a third output if layers add auxiliary losses: their sum, to be added to the mean loss."""
    layers = auxiliary_layers(model)

    def with_auxiliary(*batch: Tensor) -> tuple[Tensor, ...]:
        total, count = loss(*batch)
        terms = [term for term in (layer.auxiliary_loss() for layer in layers) if term is not None]
        return (total, count, sum(terms[1:], terms[0])) if terms else (total, count)

    return with_auxiliary if layers else loss


class RunObjective(Objective):
    """The objective of `linnet train`.

    Attributes:
        Config: class of the trainings with this objective.
        name: value of the configuration key `objective`, a literal of the configuration's class.
        units: unit in which data are counted. Rows have the keys `<units>` and `<units>_per_second`.
        loss_unit: unit of the loss, for readers: "nats per token".
        SCORES: scores besides the loss, with the words for them: a validation row has `validation_<key>`, the result
            has `<key>`.
        in_data: gives a problem of `read` its key in a training.
        own_parts: prefixes of the names of weights that `init_from` neither loads nor expects, such as a new head.
        config: the training. data: its data.
        costs: costs of the model and of a step.
        evaluations: evaluations during training.
        targets_per_row: number of targets of every row of a batch; None if rows differ.
        row_length: tokens per row, for a loss that passes several rows to the model as one; 0 otherwise. Dropout masks
            are a function of row and position.
    """

    Config: ClassVar[type[TrainingConfig]]
    name: ClassVar[str]
    units: ClassVar[str]
    loss_unit: ClassVar[str]
    SCORES: ClassVar[dict[str, str]] = {}
    own_parts: ClassVar[tuple[str, ...]] = ()
    in_data: ClassVar[Rename] = Problem
    config: Any
    data: Any
    row_length: int = 0
    targets_per_row: int | None = None
    costs: Costs
    evaluations: Evaluations

    def __init__(self, config: Any, data: Any, device: torch.device):
        """
        Args:
            data: what `read` returns.
            device: device for evaluations.

        Raises:
            ConfigError: evaluations that cannot run.
        """
        self.config, self.data = config, data
        subject = self.subject(config, data, device)
        self.evaluations = Evaluations(config.evaluations if subject else [], subject, config.run.evaluate_every)
        self.costs = self.count_costs(config)

    def build(self, seed: int, device: torch.device | str | None = None) -> nn.Module:
        return build(OBJECTIVE_KINDS[self.name], self.config.model, seed, device)

    @classmethod
    @abstractmethod
    def read(cls, config: Any, cache: str | Path, show: Preparing | None = None) -> Data:
        """Prepares the data, or finds them in `cache`. Runs that differ only in their model share them.

        Args:
            show: called with (name of the work, amount done, total amount).

        Raises:
            ConfigError: lists all problems of the data.
        """

    @classmethod
    @abstractmethod
    def content(cls, config: Any, cache: str | Path | None = None) -> dict[str, str]:
        """Returns digests of the content of all source files of the data, which identify a training.

        Args:
            cache: folder of prepared data, which may store the digests of large files.

        Raises:
            ConfigError: a file is missing.
            OSError: a file cannot be read.
        """

    @classmethod
    def source_problems(cls, values: Mapping[str, Any], cache: str | Path, told: Sequence[str]) -> list[str]:
        """Returns the problems of the data that the plain values of an invalid training name; the default is none.

        Args:
            told: problems that are reported already and are not repeated.
        """
        return []

    @classmethod
    def size(cls, data: Data) -> int:
        """Returns the number of units in one pass over the training data."""
        return len(data.train)

    @classmethod
    def units_per_step(cls, config: Any) -> int:
        """Returns the number of units in one batch. The default counts rows."""
        return config.batch_size

    @classmethod
    @abstractmethod
    def row_tokens(cls, config: Any) -> int:
        """Returns the number of tokens that the layers see per row of a batch."""

    @classmethod
    @abstractmethod
    def step_flops(cls, config: Any) -> float:
        """Returns the training FLOPs of one step, as `linnet.models.flops_exact` counts them."""

    @classmethod
    def count_costs(cls, config: Any) -> Costs:
        """Returns the costs of a training's model and of one step, from its configuration alone."""
        total, outside = count_parameters(config.model)
        return Costs(total, outside, cls.units_per_step(config), cls.step_flops(config))

    @classmethod
    def describe_model(cls, config: Any) -> str:
        """Returns what the terminal shows of the model beside its layers and parameters; "" for nothing."""
        return ""

    @classmethod
    def parallel_problems(cls, config: Any, count: int) -> list[str]:
        """Returns why a training cannot be divided among `count` devices, each with its fix.

        The default divides rows among devices, and refuses to cut rows (sp) and layers (tp).
        """
        problems = [
            f"parallel.{key}: {degree} is not built for objective: {cls.name}, which divides {cls.units} among devices "
            f"but not a model or a row; use parallel.{key}: 1"
            for key in ("sp", "tp")
            if (degree := getattr(config.parallel, key)) > 1
        ]
        parallel = config.parallel.model_copy(update={"sp": 1, "tp": 1})
        batch = config.batch_size, config.accumulation, config.batch_ramp is not None
        return problems or parallel.problems(count, config.model, cls.row_tokens(config), *batch)

    @classmethod
    @abstractmethod
    def data_problems(cls, config: Any, data: Any) -> list[str]:
        """Returns why data do not fit a configuration: too few of them, another vocabulary."""

    @classmethod
    def subject(cls, config: Any, data: Any, device: torch.device) -> Subject | None:
        """Returns what evaluations during training know of it; None, the default, for an objective without any.

        Args:
            data: None before they are prepared.
            device: device for evaluations.
        """
        return None

    @classmethod
    def check_evaluations(cls, config: Any, data: Data | None = None) -> None:
        """Raises ConfigError for evaluations that cannot run, as far as this shows with or without the data."""
        subject = cls.subject(config, data, torch.device("cpu"))
        if subject is not None and subject.complete:
            Evaluations(config.evaluations, subject, config.run.evaluate_every)
        elif subject is not None:
            check_evaluations(config.evaluations, subject)

    @classmethod
    def evaluations_need_data(cls, config: Any) -> bool:
        """Returns whether `check_evaluations` finds more problems once the data are prepared."""
        subject = cls.subject(config, None, torch.device("cpu"))
        return subject is not None and not subject.complete

    @classmethod
    def prepare(cls, config: Any, device: torch.device, cache: str | Path, progress: Progress | None = None) -> Self:
        """Prepares everything that training needs; creates no run folder.

        Args:
            progress: called with {"event": "data", "what", "done", "total"} while data are prepared.

        Raises:
            ConfigError: lists all problems of data, model and evaluations.
        """

        problems: list[str] = []
        data = None
        with gather(problems, cls.in_data):
            data = cls.read(config, cache, preparing(progress))
        if data is not None:
            problems += cls.data_problems(config, data)
        objective = None
        with gather(problems):  # even if the data are unusable: all problems are reported at once
            if problems:
                cls.check_evaluations(config, data)
            else:
                objective = cls(config, data, device)
        if problems or objective is None:
            raise ConfigError(problems, "train")
        if progress is not None:
            objective.show_passes(progress)
        return objective

    def show_passes(self, progress: Progress) -> None:
        """Reports to `progress` how often a training reads its data."""
        config = self.config
        units = config.batch_sizes.first(config.total_steps) * self.costs.units // config.batch_size
        text, warning = passes.line([units], self.size(self.data), self.units)
        progress({"event": "passes", "text": text, "warning": warning})

    def augment(self, batch: Batch, position: int, rank: int = 0, world: int = 1) -> Batch:
        """Returns a batch with its random changes, on the device that has it. The default changes nothing.

        Random numbers are drawn for the batch of all ranks from the seed of the training and `position`, so that a run
        resumes exactly and on any number of ranks.

        Args:
            batch: the rows of rank `rank` of `world` at `position`, as `batches` returns them.
        """
        return batch

    def build_sharded(self, seed: int, mesh: Mesh, wrap: Callable[[nn.Module], None]) -> tuple[nn.Module, Cuts | None]:
        """Returns this rank's part of the model of `build`, as `linnet.parallel.build.build` does.

        The default divides the rows of a batch and the weights among ranks, but no row and no layer.

        Args:
            wrap: adds recomputation and compilation to a model before it is sharded.
        """
        from linnet.parallel.build import build_whole

        config = self.config
        options = {"precision": config.autocast_precision, "reshard": config.parallel.reshard, "wrap": wrap}
        return build_whole(lambda: self.build(seed), mesh, **options), None

    @abstractmethod
    def batches(self) -> BatchSource:
        """Returns the training batches."""

    @abstractmethod
    def count(self, *batch: Tensor) -> Tensor:
        """Returns the number of targets of a batch: the sum of the counts that `loss` returns for its micro-batches."""

    def loss_fields(self, loss: float) -> dict[str, float]:
        """Returns further fields of a training row that are computed from its mean loss."""
        return {}

    @abstractmethod
    def validate(
        self, model: nn.Module, autocast: Autocast, show: Show | None = None, mesh: Mesh | None = None
    ) -> dict[str, float]:
        """Scores held-out data; returns the fields of a validation row, `validation_loss` first.

        Args:
            mesh: the ranks that score together, each with its part of the model; all must call it.
            show: called with (scored units, total units) before each batch.
        """

    def pictures(self, model: nn.Module, autocast: Autocast, mesh: Mesh | None = None) -> dict[str, bytes]:
        """Returns pictures of what the model has learned: ending of a file's name -> its content. The default is none.

        Called after each validation, on all ranks; `pictures/step-00001000<ending>` of the run folder keeps them.
        """
        return {}

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of result.json that only this objective has.

        Args:
            rows: rows of all batches of the training.
            validation: the last validation row, {} if there is none.
        """
        return {key: validation.get(f"validation_{key}") for key in self.SCORES}

    def record_fields(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the fields of result.json that depend on all rows of the record, such as the best validation."""
        return {}

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        """Returns the names of the numbers that `result_fields` and `record_fields` may give."""
        return set(cls.SCORES)

    def files(self) -> dict[str, str]:
        """Returns the files (name -> text) that the run folder needs to contain a usable model."""
        return {}

    def meta(self) -> dict[str, Any]:
        """Returns plain values that describe data and model in a checkpoint."""
        return {"data": self.data.digest}

    def resume_problems(self, meta: dict[str, Any]) -> list[str]:
        """Returns why this run cannot resume from a checkpoint with this `meta`, such as other data."""
        if meta["data"] == self.data.digest:
            return []
        return [
            f"data: the {self.units} changed since this run's checkpoint (digest {shown(meta['data'])}, now "
            f"{self.data.digest!r}); restore them, or delete the run folder to train anew"
        ]

    def start_problems(self, meta: dict[str, Any], path: Path) -> list[str]:
        """Returns why a run cannot start from the weights of another run's checkpoint at `path` (`init_from`).

        Names and shapes of the weights are compared in any case.
        """
        return []
