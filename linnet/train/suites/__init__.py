"""The kinds of evaluations during training. Each is a configuration whose `prepare` reads the data that it needs and
returns a function from a model to its results. Here are the parts that all kinds share (results, and the subject: what
an evaluation knows of the training), and those of causal language models: texts, needles, recall probes, tasks.
"""

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn

from linnet.config import Config, Problem, checking, not_installed
from linnet.data import Tokenizer
from linnet.data.sources import find_files
from linnet.evaluate.evaluators import Questions, TaskEvaluator
from linnet.evaluate.needle_scores import RIVALS, needle_scores
from linnet.evaluate.retrieval import NeedleConfig, Probe, RecallConfig
from linnet.evaluate.retrieval.needle import items, run_needle
from linnet.evaluate.retrieval.recall import cells, check_recall, run_recall
from linnet.evaluate.session import Session
from linnet.evaluate.texts import check_lengths, natural_method, read_texts, score_text, stride_problems
from linnet.install import install_command
from linnet.models import CausalLM, ModelConfig
from linnet.models.kinds import empty_of
from linnet.models.stack import StackConfig
from linnet.runs.model import assign_weights
from linnet.train.device import autocast

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
        return autocast(self.device, self.precision)

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


@dataclass(frozen=True)
class TextSubject(Subject):
    """A causal language model.

    Attributes:
        tokenizer: None if it is yet to be learned from the training text.
        seq_len: tokens per training sequence.
        sources: sources of the training text.
    """

    model: ModelConfig
    tokenizer: Tokenizer | None
    seq_len: int
    sources: Sequence[str] | str

    @property
    def complete(self) -> bool:
        return self.tokenizer is not None

    def session(self, model: CausalLM) -> Session:
        """Returns the model as evaluations outside of a training see it; an engine of it owns the model."""
        return Session(Path(), model, self.tokenizer, {}, self.seq_len, self.precision, superseded=False)


class TextEvaluation(Evaluation):
    """Perplexity of texts (docs/evaluation.md); figures show bits per byte.

    Attributes:
        kind: text: perplexity of texts.
        paths: files, folders, globs; none of them may be part of the training text.
        text_key: key (JSONL) or column (Parquet) of the text.
        most_bytes: score only this many bytes from the start, to save time; null: all.
        method: `carried`, `windowed`, or `auto`: windowed if the state grows with the context or positions are a
            learned table, else carried.
        window, stride: settings of windows, in tokens; default: the training length, and half a window.
    """

    kind: Literal["text"]
    paths: list[str] = Field(min_length=1)
    text_key: str = "text"
    most_bytes: int | None = Field(262_144, ge=1)
    method: Literal["auto", "carried", "windowed"] = "auto"
    window: int | None = Field(None, ge=2)
    stride: int | None = Field(None, ge=1)

    @field_validator("paths")
    @classmethod
    def _are_there(cls, paths: list[str]) -> list[str]:
        problems: list[str] = []
        find_files(paths, "text", problems, [])
        if problems:
            raise ValueError("; ".join(Problem(line).text for line in problems))
        return paths

    @field_validator("stride")
    @classmethod
    def _below_window(cls, stride: int | None, info: ValidationInfo) -> int | None:
        if problems := stride_problems(stride, info.data.get("window")):
            raise ValueError(Problem(problems[0]).text)
        return stride

    def check(self, subject: TextSubject) -> None:
        """Raises ConfigError for a text that is also trained on, or windows that do not overlap."""
        trained_on = {file.path.resolve() for file in find_files(subject.sources, "source", [], [])}
        mine = [file.path for file in find_files(self.paths, "text", [], [])]
        with checking() as problems:
            problems += [
                f"paths: {path} is trained on (data.source); use another text"
                for path in mine
                if path.resolve() in trained_on
            ]
            problems += stride_problems(self.stride, self._window(subject.seq_len))

    def _window(self, seq_len: int) -> int:
        return self.window or max(2, seq_len)

    def prepare(self, subject: TextSubject) -> Measure:
        """Raises ConfigError as `check` does, and for a text with nothing to score."""
        self.check(subject)
        window = self._window(subject.seq_len)
        documents = read_texts(self.paths, subject.tokenizer, self.text_key, self.most_bytes)
        method = natural_method(subject.model) if self.method == "auto" else self.method
        check_lengths(subject.model, documents, method, window)

        def measure(model: CausalLM) -> Found:
            ways = {"method": method, "window": window, "stride": self.stride}
            score = score_text(model, documents, **ways, autocast=subject.autocast())
            names = ("bits_per_byte", "loss", "perplexity", "word_perplexity")
            return Found({name: getattr(score, name) for name in names}, names[:1])

        return measure


class NeedleEvaluation(Evaluation, NeedleConfig):
    """Needles in haystacks (`linnet.evaluate.retrieval.needle.NeedleConfig`), with few and small samples by default;
    figures show the mean accuracy.

    Attributes:
        kind: needle: needles in haystacks.
    """

    kind: Literal["needle"]
    lengths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = [256, 512]
    depths: Annotated[list[Annotated[float, Field(ge=0.0, le=1.0)]], Field(min_length=1)] = [0.0, 0.25, 0.5, 0.75, 1.0]
    scoring: Literal["match", "choice"] = "choice"

    @field_validator("lengths")
    @classmethod
    def _ascend(cls, lengths: list[int]) -> list[int]:
        if lengths != sorted(set(lengths)):
            raise ValueError(f"{lengths} do not ascend; give each length once, the shortest first")
        return lengths

    def prepare(self, subject: TextSubject) -> Measure:
        """Raises ConfigError for lengths too short for needle and question, and a haystack that is not text."""
        longest = max(len(item.prompt) for _, _, item in items(self, subject.tokenizer))

        def measure(model: CausalLM) -> Found:
            grid = run_needle(subject.session(model).engine(longest + 128), self)
            scores = needle_scores(grid)
            metrics = {"accuracy": grid.mean().item(), "weighted": scores.weighted, "niah_score": scores.score}
            guessed = 1 / (RIVALS + 1) if self.scoring == "choice" else 0.0
            chance = dict.fromkeys(("accuracy", "weighted"), guessed)
            return Found(metrics, ("accuracy",), chance, grid.size * self.samples)

        return measure


class RecallEvaluation(Evaluation, RecallConfig):
    """Recall probes (`linnet.evaluate.retrieval.recall.RecallConfig`), few and short by default; figures show for
    each task the accuracy among the values of its sequence.

    Attributes:
        kind: recall: recall without training on the task.
    """

    kind: Literal["recall"]
    tasks: Annotated[list[Probe], Field(min_length=1)] = ["mqar", "in_context_recall"]
    lengths: Annotated[list[Annotated[int, Field(ge=8)]], Field(min_length=1)] = [64, 128]
    pairs: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] = [4, 8]

    def check(self, subject: TextSubject) -> None:
        """Raises ConfigError if no length has room for any of the numbers of pairs."""
        list(cells(self))

    def prepare(self, subject: TextSubject) -> Measure:
        """Raises ConfigError as `check` does, if the vocabulary is too small, or for lengths that the model lacks."""
        check_recall(self, subject.tokenizer, subject.model.vocab_size, subject.model.num_positions)

        def measure(model: CausalLM) -> Found:
            cells = run_recall(model, subject.tokenizer, self, autocast=subject.autocast())
            metrics, chance = {}, {}
            for task in dict.fromkeys(cell.task for cell in cells):
                group = [cell for cell in cells if cell.task == task]
                metrics[task] = sum(cell.choices.mean().item() for cell in group) / len(group)
                chance[task] = sum(cell.chance for cell in group) / len(group)
                metrics[f"{task}_of_all_tokens"] = sum(cell.accuracies.mean().item() for cell in group) / len(group)
            return Found(metrics, tuple(chance), chance, self.samples * len(cells) // len(chance))

        return measure


class TaskEvaluation(Evaluation):
    """Questions through lm-evaluation-harness (extra `eval`): a suite of the papers, or tasks by name, such as your own
    tasks in a folder. Figures show the average of a suite, or the first metric of each task.

    Attributes:
        kind: tasks: questions through lm-evaluation-harness.
        suite: a suite of the papers (`linnet.evaluate.tasks.suites`), in place of `tasks`.
        tasks: names of tasks, in place of `suite`.
        include: a folder with tasks of your own, which replace the harness's of the same names.
        shots: examples before each question; null: as the suite or the task says.
        limit: number of questions per task that are asked, from the start, to save time; null: all.
        too_long: reaction to a question longer than the training length, for a model whose state grows: `refuse` makes
            the evaluation fail, `cut` drops the beginning of the question.
    """

    kind: Literal["tasks"]
    suite: Literal["csr", "perplexity", "scrolls", "mmlu", "ceval"] | None = None
    tasks: list[str] = []
    include: str | None = None
    shots: int | None = Field(None, ge=0)
    limit: int | None = Field(100, ge=1)
    too_long: Literal["refuse", "cut"] = "refuse"

    @field_validator("kind")
    @classmethod
    def _can_ask(cls, kind: str) -> str:
        if not_installed(["lm_eval"]):
            raise ValueError(f"tasks need lm-evaluation-harness; install it: {install_command('eval')}")
        return kind

    @field_validator("include")
    @classmethod
    def _is_there(cls, include: str | None) -> str | None:
        if include is not None and not Path(include).is_dir():
            raise ValueError(f"{include!r} is not a folder; name one with the YAML files of tasks")
        return include

    @model_validator(mode="after")
    def _one_form(self):
        if (self.suite is None) == (not self.tasks):
            raise ValueError("give a `suite` or `tasks`, one of the two")
        return self

    def prepare(self, subject: TextSubject) -> Measure:
        """Raises ConfigError for tasks that are unknown, invalid questions, or data that cannot be loaded."""
        include = None if self.include is None else Path(self.include)
        too_long = "cut" if self.too_long == "cut" else None  # of suites that cut by themselves too
        questions = Questions(include=include, shots=self.shots, limit=self.limit, too_long=too_long)
        evaluator = TaskEvaluator(names=tuple(self.tasks), suite=self.suite, questions=questions)
        evaluator.check()

        def measure(model: CausalLM) -> Found:
            with contextlib.redirect_stderr(io.StringIO()):  # the harness writes a progress bar for each task there
                record = evaluator.run(subject.session(model))
            results, detail = record.results, record.detail
            guessed = {(task, metric): value for task, metric, value in detail["chance"]}
            alone = self.suite is None and len(detail["tasks"]) == 1
            names = {(r.task, r.metric): r.metric if alone or r.task == self.suite else f"{r.task}/{r.metric}"
                     for r in results}  # fmt: skip
            metrics = {names[r.task, r.metric]: r.value for r in results}
            chance = {names[place]: value for place, value in guessed.items()}
            by_name = {(r.task, r.metric): r for r in results}
            shown = [by_name[task, metric] for task, metric in detail["shown"]]
            averages = [r for r in shown if r.task == self.suite]
            first: dict[str, str] = {}
            for r in averages or shown:
                if r.better == "lower" or (r.task, r.metric) in guessed:  # other metrics have an unknown range
                    first.setdefault(r.task, names[r.task, r.metric])
            asked = {r.task: r.n for r in results if r.task in detail["tasks"]}.values()
            return Found(metrics, tuple(first.values()), chance, sum(asked) if averages else min(asked))

        return measure


LanguageEvaluation = Annotated[
    TextEvaluation | NeedleEvaluation | RecallEvaluation | TaskEvaluation, Field(discriminator="kind")
]
