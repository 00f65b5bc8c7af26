"""The steps around every evaluation: check all settings, load the model once, evaluate, save the record.

evaluators = [TextEvaluator(paths=["books/*.txt"]), NeedleEvaluator(lengths=[1024, 2048])]
session = prepare("runs/tnl-10m-1a2b3c4d5e6f", evaluators)
for evaluator in evaluators:
    evaluator.run(session).save(session.path)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from linnet.config import ConfigError, gather, refuse
from linnet.evaluate.results import Evaluation, describe_model
from linnet.runs import RunFolder

if TYPE_CHECKING:  # options are checked without torch, which takes seconds to import
    import torch

    from linnet.data import Tokenizer
    from linnet.inference import Engine
    from linnet.models import StackConfig


@dataclass(frozen=True)
class Session:
    """A loaded model.

    Attributes:
        path: the run or model folder.
        model: of one of the kinds that the evaluators score.
        about: the output of `linnet.evaluate.results.describe_model`.
        training_length: tokens per training sequence; None if the folder does not hold it.
        precision: number format of weights and products: float32, bfloat16 or float64.
        superseded: whether the folder has newer checkpoints that are damaged.
    """

    path: Path
    model: Any
    tokenizer: "Tokenizer | None"
    about: dict[str, Any]
    training_length: int | None
    precision: str
    superseded: bool

    def engine(self, context_length: int, slots: int = 8) -> "Engine":
        """Returns an engine of the model, in its precision and on its device."""
        import torch

        from linnet.inference import Engine

        return Engine(
            self.model,
            self.tokenizer,
            slots=slots,
            context_length=context_length,
            device=str(self.model.embedding.weight.device),
            dtype=getattr(torch, self.precision),
        )


class Meter(Protocol):
    """Counts finished items."""

    def __call__(self, more: int) -> None:
        """Counts `more` items as done."""

    def reach(self, done: int, total: int) -> None:
        """Sets the number of finished items and the number of all items."""


class Progress(Protocol):
    """Shows the progress of an evaluation."""

    def __call__(self, unit: str, total: int | None) -> AbstractContextManager[Meter]:
        """Opens a meter for `total` units such as "tokens"; None if the total is not known yet."""


class _NoMeter(Meter):
    """Counts nothing."""


def no_progress(unit: str, total: int | None) -> AbstractContextManager[Meter]:
    """A `Progress` that shows nothing."""
    return nullcontext(_NoMeter())


class Evaluator(ABC):
    """One kind of evaluation with its settings."""

    needs_text: ClassVar[bool] = True  # whether the evaluation requires a tokenizer
    kinds: ClassVar[tuple[str, ...]] = ("causal_lm",)  # the kinds of models that it scores (`linnet.models.KINDS`)
    divides: ClassVar[bool] = False  # whether several devices share its items (`linnet.parallel.mesh.divided`)

    @property
    @abstractmethod
    def kind(self) -> str:
        """`kind` of the record: text, needle, recall, tasks, or the name of a suite."""

    def check(self) -> None:
        """Raises ConfigError with all problems that can be found without the model."""
        return None

    def check_config(self, folder: RunFolder, model: "StackConfig") -> None:
        """Raises ConfigError with all settings that do not fit the model, as far as its configuration says it."""
        return None

    def check_model(self, session: Session) -> None:
        """Raises ConfigError with all settings that do not fit the model."""
        return None

    def measures(self) -> set[str] | None:
        """Returns `TASK.METRIC` of the results that `run` may give; None if only the run can tell."""
        return None

    @abstractmethod
    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        """Evaluates the model and returns the record; does not write it."""


def prepare(
    path: str | Path,
    evaluators: Sequence[Evaluator],
    device: "torch.device | str | None" = None,
    precision: str = "float32",
    problems: Sequence[str] = (),
    *,
    allow_plugins: bool = False,
    best: bool = False,
) -> Session:
    """Checks all evaluators, loads the model, and checks the evaluators against it.

    Args:
        path: the run or model folder.
        evaluators: the evaluations to run.
        device: device of the model; None is the CPU.
        precision: number format of weights and products.
        problems: problems that the caller found; they are reported with the others.
        allow_plugins: as in `linnet.runs.load_model`.
        best: score the checkpoint of the lowest validation loss and not the last one.

    Raises:
        ConfigError: all problems of the run folder and the evaluators that need no weights; if there are none, all
            problems that need the model.
    """
    problems = [*problems, *find_problems(path, evaluators, allow_plugins=allow_plugins)]
    if problems:  # several suites may report the same line about the source of data; only its last occurrence stays
        raise ConfigError(list(dict.fromkeys(reversed(problems)))[::-1], "evaluate")
    needs_text = any(evaluator.needs_text for evaluator in evaluators)
    kinds = _kinds(evaluators)
    session = open_session(path, device, precision, needs_text, kinds, allow_plugins=allow_plugins, best=best)
    for evaluator in evaluators:
        with gather(problems):
            evaluator.check_model(session)
    refuse(problems, "evaluate")
    return session


def find_problems(path: str | Path, evaluators: Sequence[Evaluator], *, allow_plugins: bool = False) -> list[str]:
    """Returns all problems of a run folder and of evaluators that need no weights; see `prepare`."""
    from linnet.runs.model import read_config

    problems: list[str] = []
    folder, model = None, None
    with gather(problems):
        folder = RunFolder.open(path)
        model = read_config(folder, allow_plugins, _kinds(evaluators))
    for evaluator in evaluators:
        with gather(problems):
            evaluator.check()
        if folder is not None and model is not None:
            with gather(problems):
                evaluator.check_config(folder, model)
    return problems


def _kinds(evaluators: Sequence[Evaluator]) -> list[str]:
    """Returns the kinds of models that all evaluators score."""
    from linnet.models import KINDS

    return [kind for kind in KINDS if all(kind in evaluator.kinds for evaluator in evaluators)]


def open_session(
    path: str | Path,
    device: "torch.device | str | None" = None,
    precision: str = "float32",
    needs_text: bool = True,
    kinds: Sequence[str] = ("causal_lm",),
    *,
    allow_plugins: bool = False,
    best: bool = False,
) -> Session:
    """Loads the model of a run or model folder.

    Args:
        path: the folder.
        device: device of the model; None is the CPU.
        precision: number format of weights and products.
        needs_text: whether a tokenizer is required.
        kinds: the kinds of models that the caller can use, as in `linnet.runs.model.load_model`.
        allow_plugins: as in `linnet.runs.load_model`.
        best: as in `prepare`.

    Raises:
        ConfigError: the folder holds no model or one of another kind, or it has no tokenizer although `needs_text` is
            True.
    """
    import torch

    from linnet.runs import checkpoint
    from linnet.runs.model import load_checkpoint

    folder = RunFolder.open(path)
    dtype = getattr(torch, precision)
    loaded = load_checkpoint(path, device, dtype, allow_plugins=allow_plugins, kinds=kinds, best=best)
    if loaded.tokenizer is None and needs_text:
        message = f"{path}: has no tokenizer.json, which texts and prompts need; put one into the folder"
        raise ConfigError([message], "evaluate")
    newest = max(map(checkpoint.step_of, folder.checkpoints()), default=0)
    return Session(
        folder.path,
        loaded.model,
        loaded.tokenizer,
        describe_model(folder, loaded),
        folder.config.get("seq_len"),
        precision,
        superseded=not best and loaded.step is not None and newest > loaded.step,
    )
