"""Evaluations while a model trains: cheap suites on held-out data every so many steps, in the record of the run.

They come after the checkpoint of their step is on the disk, so that no evaluation can cost training that was done, and
get a copy of the weights and their own random numbers, so that a run with evaluations has every loss and weight of the
one without, bit for bit. What one needs (texts, prompts, tasks) is read and checked before the first step; one that
fails later is an event in the record, and training goes on.

A kind of evaluation is a configuration with `prepare`, which gives the function from a model to what was found.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from linnet.config import Config, ConfigError
from linnet.data import Tokenizer
from linnet.data.sources import find_files
from linnet.evaluate.needle import RIVALS, NeedleConfig, items, run_needle
from linnet.evaluate.needle_scores import needle_scores
from linnet.evaluate.text import natural_method, read_texts, score_text
from linnet.inference import Engine
from linnet.models import CausalLM, ModelConfig
from linnet.runs.model import assign_weights, empty_model

NAME = r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$"


@dataclass(frozen=True)
class Found:
    """What one evaluation came to.

    Attributes:
        metrics: numbers by name; the first is the one that figures show.
        chance: of the metrics that are shares from 0 to 1, more of which is better: what guessing gives. Of others less
            is better.
        questions: how many a share is of, where it is one of answers.
    """

    metrics: dict[str, float]
    chance: dict[str, float] = field(default_factory=dict)
    questions: int | None = None


@dataclass(frozen=True)
class Subject:
    """What is evaluated: its tokenizer and configuration, and how it is trained.

    Attributes:
        seq_len: tokens of a sequence of training.
        sources: sources of the training text.
    """

    tokenizer: Tokenizer
    model: ModelConfig
    seq_len: int
    device: torch.device
    precision: Literal["float32", "bfloat16"]
    sources: Sequence[str] | str

    def autocast(self) -> contextlib.AbstractContextManager:
        """As in training."""
        if self.precision == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def engine(self, model: CausalLM, context_length: int) -> Engine:
        """To generate with; takes the model over."""
        dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        settings = {"context_length": context_length, "device": self.device.type, "dtype": dtype}
        return Engine(model, self.tokenizer, **settings)


Measure = Callable[[CausalLM], Found]


class TextEvaluation(Config):
    """Perplexity of texts (docs/evaluation.md); what is shown is bits per byte.

    Attributes:
        name: label in the record, distinct among a run's evaluations; default: the kind.
        every: steps between two; null: with each validation. All are done at the end too.
        paths: files, folders, globs: none that is trained on.
        text_key: key (JSONL) or column (Parquet) of the text.
        most_bytes: only the first so many are scored, to be cheap; null: all.
        method: `carried`, `windowed`, or `auto`: carried where the state does not grow.
        window, stride: of windows, in tokens; default: the length of training, and half a window.
    """

    kind: Literal["text"]
    name: str = Field("", pattern=NAME)
    every: int | None = Field(None, ge=1)
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
            raise ValueError("; ".join(line.removeprefix("text: ") for line in problems))
        return paths

    @field_validator("stride")
    @classmethod
    def _below_window(cls, stride: int | None, info: ValidationInfo) -> int | None:
        window = info.data.get("window")
        if stride is not None and window is not None and stride >= window:
            raise ValueError(f"{stride} tokens, but a window has {window}; give fewer")
        return stride

    def prepare(self, subject: Subject) -> Measure:
        """Raises ConfigError for a text that is trained on, or that holds nothing to score."""
        trained_on = {file.path.resolve() for file in find_files(subject.sources, "source", [], [])}
        mine = [file.path for file in find_files(self.paths, "text", [], [])]
        seen = [f"paths: {path} is trained on (data.source)" for path in mine if path.resolve() in trained_on]
        if seen:
            raise ConfigError([f"{line}; give text of its own" for line in seen])
        window = self.window or subject.seq_len
        if self.stride is not None and self.stride >= window:
            raise ConfigError([f"stride: {self.stride} tokens, but a window has {window}; give fewer"])
        documents = read_texts(self.paths, subject.tokenizer, self.text_key, self.most_bytes)
        method = natural_method(subject.model) if self.method == "auto" else self.method

        def measure(model: CausalLM) -> Found:
            ways = {"method": method, "window": window, "stride": self.stride}
            score = score_text(model, documents, **ways, autocast=subject.autocast())
            shown = ("bits_per_byte", "loss", "perplexity", "word_perplexity")
            return Found({name: getattr(score, name) for name in shown})

        return measure


class NeedleEvaluation(NeedleConfig):
    """Needles in haystacks (`linnet.evaluate.needle.NeedleConfig`), by default few and at small sizes; what is shown is
    the mean accuracy.

    Attributes:
        name, every: as those of texts.
    """

    kind: Literal["needle"]
    name: str = Field("", pattern=NAME)
    every: int | None = Field(None, ge=1)
    lengths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = [256, 512]
    depths: Annotated[list[Annotated[float, Field(ge=0.0, le=1.0)]], Field(min_length=1)] = [0.0, 0.25, 0.5, 0.75, 1.0]
    scoring: Literal["match", "choice"] = "choice"

    @field_validator("lengths")
    @classmethod
    def _ascend(cls, lengths: list[int]) -> list[int]:
        if lengths != sorted(set(lengths)):
            raise ValueError(f"{lengths} do not ascend; give each length once, the shortest first")
        return lengths

    @field_validator("haystack")
    @classmethod
    def _is_there(cls, haystack: str | None) -> str | None:
        if haystack is not None and not Path(haystack).is_file():
            raise ValueError(f"{haystack!r} is no file; give a text file, or null for text made up")
        return haystack

    def prepare(self, subject: Subject) -> Measure:
        """Raises ConfigError for lengths that do not hold needle and question, and a haystack that is not text."""
        longest = max(len(item.prompt) for _, _, item in items(self, subject.tokenizer))

        def measure(model: CausalLM) -> Found:
            grid = run_needle(subject.engine(model, longest + 128), self)
            scores = needle_scores(grid)
            metrics = {"accuracy": grid.mean().item(), "weighted": scores.weighted, "niah_score": scores.score}
            guessed = 1 / (RIVALS + 1) if self.scoring == "choice" else 0.0
            return Found(metrics, dict.fromkeys(("accuracy", "weighted"), guessed), grid.size * self.samples)

        return measure


Evaluation = Annotated[TextEvaluation | NeedleEvaluation, Field(discriminator="kind")]


def label(config: Evaluation) -> str:
    """What an evaluation is called in the record."""
    return config.name or config.kind


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
        problems = []
        for place, config in enumerate(configs):
            try:
                self._measures[label(config)] = config.prepare(subject)
            except ConfigError as error:
                problems += [f"evaluations.{place} ({label(config)}): {line}" for line in error.problems]
        if problems:
            raise ConfigError(problems, "evaluations")

    def due(self, step: int, steps: int) -> list[str]:
        """Those to be made after `step` of `steps` updates: all after the last, none before the first."""
        if step == steps:
            return list(self._every)
        return [name for name, every in self._every.items() if every and step and step % every == 0]

    def make(self, name: str, weights: dict[str, Tensor]) -> dict:
        """Evaluates a model of these weights, which stay as they are.

        Returns:
            `evaluation` and `kind`, and either `metrics`, `chance` and `questions` of what was `Found`, or an `event`
            with the `error` that kept it from being found.
        """
        row = {"evaluation": name, "kind": self._kinds[name]}
        try:
            with undisturbed(self._subject.device):
                found = self._measures[name](self._copy(weights))
        except Exception as error:  # whatever it is, training is worth more
            lines = str(error).strip().splitlines() or [type(error).__name__]
            lines = [line.strip() for line in lines if line.strip()]
            return row | {"event": "evaluation_failed", "error": f"{type(error).__name__}: {' '.join(lines)}"[:1000]}
        row |= {"metrics": found.metrics}
        row |= {"chance": found.chance} if found.chance else {}
        return row | ({"questions": found.questions} if found.questions is not None else {})

    def _copy(self, weights: dict[str, Tensor]) -> CausalLM:
        model = empty_model(self._subject.model)
        assign_weights(model, {name: tensor.detach().clone() for name, tensor in weights.items()}, "evaluations")
        return model.eval().to(self._subject.device)


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
