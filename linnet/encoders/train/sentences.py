"""Classes or numbers of sentences: `objective: sentences`, the fine-tuning of a masked language model on GLUE.

The model is a `SentenceModel`; with `init_from` its layers, tokenizer and weights are those of another run, and the
head is new. Sentences of different lengths are packed into one row. The loss is the cross-entropy in nats per sentence,
or the squared error of a number. Validation reports the task's own metric in per cent.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn

from linnet.config import ConfigError, digest, gather
from linnet.data import Tokenizer, given_tokenizer, given_vocabulary
from linnet.data.problems import problems_of
from linnet.encoders.config import SentenceConfig
from linnet.encoders.evaluate.glue import ROWS, check_installed, output_losses, sentence_outputs, task_score
from linnet.encoders.glue import (
    TASKS,
    Examples,
    GlueConfig,
    GlueCorpus,
    Sentences,
    content,
    pack_rows,
    read_glue,
)
from linnet.layers.positions import length_problems
from linnet.models import KINDS, flops_exact
from linnet.runs import RunFolder
from linnet.runs.model import TOKENIZER, read_kind, read_tokenizer
from linnet.train.config import TrainingConfig, check_vocabulary
from linnet.train.monitor import GuardConfig
from linnet.train.objective import Costs, Loss, Show
from linnet.train.objectives.labelled import LabelledObjective

if TYPE_CHECKING:
    from linnet.encoders.models.sentence import SentenceModel
    from linnet.parallel.mesh import Mesh

STARTS = ("masked_lm", "sentence")  # kinds of models from which a fine-tuning starts


class SentenceGuardConfig(GuardConfig):
    """As for other trainings, but no loss counts as a spike.

    The mean over 16 sentences jumps by more than a nat once most of them are certain: a few that are certain and wrong
    are enough.
    """

    spike: float | None = Field(None, gt=1, le=1e6)


class SentenceTraining(TrainingConfig):
    """The training of a model of sentences: `objective: sentences`.

    With `init_from`, `model` needs only what differs from that run's model, for example {dropout: 0.1}; `outputs`
    follows from the task.
    """

    ROW: ClassVar = "sentences"

    objective: Literal["sentences"] = Field(
        "sentences", description="the training objective: `sentences`, their classes or numbers"
    )
    data: GlueConfig = Field(description="the folder of a task of GLUE")
    model: SentenceConfig = Field(
        description="what differs from the model of `init_from`; without it, a recipe, a recipe with changes, or a "
        "layout. `outputs` defaults to the task's"
    )
    batch_size: int = Field(16, ge=1, le=1 << 40, description="sentences per step, over all its `accumulation` parts")
    guard: SentenceGuardConfig = Field(
        SentenceGuardConfig(), description="reaction to a loss that is not finite or, with `spike`, that spikes"
    )

    @model_validator(mode="before")
    @classmethod
    def _model_of_start(cls, values: Any) -> Any:
        """Fills in the model and the plugins of the run from which training starts."""
        if not isinstance(values, Mapping):
            return values
        given = values.get("model", {})
        if not isinstance(given, Mapping) or {"recipe", "layout", "d_model"} & given.keys():
            return values
        if values.get("init_from") is None:
            raise ValueError(
                "init_from: is not given; name a run of `objective: masked` to start from its model, weights and "
                "tokenizer, or set model and data.tokenizer to train from new weights"
            )
        started = cls.of_start(values, STARTS, "name a run of `objective: masked`")
        if started is not values and "outputs" not in given:
            started["model"].pop("outputs", None)
        return started

    @field_validator("model", mode="before")
    @classmethod
    def _outputs_of_task(cls, model: Any, info: ValidationInfo) -> Any:
        if isinstance(model, str):
            model = {"recipe": model}
        if isinstance(model, Mapping) and "data" in info.data:
            data: GlueConfig = info.data["data"]
            model = {"outputs": TASKS[data.task].outputs, **model}
            if "recipe" in model and "vocab_size" not in model and data.tokenizer is not None:
                model["vocab_size"] = given_vocabulary(data.tokenizer)
        return model

    @field_validator("model")
    @classmethod
    def _fits_task(cls, model: SentenceConfig, info: ValidationInfo) -> SentenceConfig:
        if "data" in info.data and model.outputs != (needed := TASKS[info.data["data"].task].outputs):
            raise ValueError(
                f"outputs: {model.outputs}, but task {info.data['data'].task} needs {needed}; leave it out"
            )
        return model

    @field_validator("init_from")
    @classmethod
    def _has_tokenizer(cls, init_from: str | None, info: ValidationInfo) -> str | None:
        if init_from is None:
            if "data" in info.data and info.data["data"].tokenizer is None:
                raise ValueError(
                    "null, and data.tokenizer is null too; name a run of `objective: masked` to start from its weights "
                    "and tokenizer, or set data.tokenizer to train from new weights"
                )
            return None
        if (folder := RunFolder.open(init_from)) and read_kind(folder).name not in STARTS:
            raise ValueError(_not_a_start(folder))
        return init_from

    def file_names(self) -> dict[str, Any]:
        tokenizer = self.data.tokenizer
        return super().file_names() | {"tokenizer": None if tokenizer is None else getattr(tokenizer, "path", None)}

    def data_settings(self) -> dict[str, Any]:
        found = super().data_settings()
        if "tokenizer" in found:
            found["tokenizer"].pop("path", None)
            found["tokenizer"]["kind"] = getattr(self.data.tokenizer, "kind", None)
        return found


def _not_a_start(folder: RunFolder) -> str:
    return (
        f"{folder.path} contains {read_kind(folder).config.TITLE}, but a fine-tuning starts from "
        f"{KINDS['masked_lm'].config.TITLE}; name a run of `objective: masked`"
    )


@dataclass(frozen=True)
class SentenceData:
    """The sentences of a task with the tokenizer that encodes them.

    Attributes:
        digest: of the content of the files and of the tokenizer.
    """

    corpus: GlueCorpus
    tokenizer: Tokenizer
    digest: str

    @property
    def train(self) -> Examples:
        return self.corpus.train


class SentenceObjective(LabelledObjective):
    """Trains a model of sentences on a task of GLUE."""

    Config = SentenceTraining
    name, units, loss_unit = "sentences", "sentences", "per sentence"
    SCORES: ClassVar = {"score": "score of 100"}
    own_parts = ("pooler.", "head.")
    config: SentenceTraining
    data: SentenceData

    def __init__(self, config: SentenceTraining, data: SentenceData, device: torch.device):
        super().__init__(config, data, device)
        self.task, length = data.corpus.task, config.data.max_length
        self.sentences = Sentences(data.train, data.tokenizer, length)
        self.dev = {name: Sentences(examples, data.tokenizer, length) for name, examples in data.corpus.dev.items()}
        # The configuration alone gives a bound; now the lengths are known.
        flops = flops_exact(config.model, max(1, round(self.sentences.lengths.mean())), config.batch_size)
        self.costs = Costs(self.costs.parameters, self.costs.parameters_backbone, self.costs.units, flops)

    @classmethod
    def read(
        cls, config: SentenceTraining, cache: str | Path, show: Callable[[str, int, int], None] | None = None
    ) -> SentenceData:
        problems: list[str] = []
        corpus = tokenizer = None
        with gather(problems):
            check_installed()
        with gather(problems):
            corpus = read_glue(config.data)
        with gather(problems):
            tokenizer = tokenizer_of(config)
        if corpus is None or tokenizer is None or problems:
            keys = GlueConfig.model_fields
            lines = [f"data.{line}" if line.partition(":")[0] in keys else line for line in problems]
            raise ConfigError(lines, "data")
        return SentenceData(corpus, tokenizer, digest([corpus.digest, tokenizer.digest]))

    @classmethod
    def content(cls, config: SentenceTraining, cache: str | Path | None = None) -> dict[str, str]:
        return content(config.data) | {"tokenizer": tokenizer_of(config).digest}

    @classmethod
    def source_problems(cls, values: Mapping[str, Any], cache: str | Path, told: Sequence[str]) -> list[str]:
        return problems_of(GlueConfig, values.get("data", {}), read_glue, told=told)

    @classmethod
    def row_tokens(cls, config: SentenceTraining) -> int:
        return config.data.max_length

    @classmethod
    def step_flops(cls, config: SentenceTraining) -> float:
        """Returns the FLOPs of a step whose sentences all have `data.max_length` tokens, an upper bound."""
        return flops_exact(config.model, config.data.max_length, config.batch_size)

    @classmethod
    def describe_model(cls, config: SentenceTraining) -> str:
        task = TASKS[config.data.task]
        return f"{task.folder}: {task.outputs} classes" if task.labels else f"{task.folder}: a number"

    @classmethod
    def data_problems(cls, config: SentenceTraining, data: SentenceData) -> list[str]:
        """Returns why sentences do not fit the model: more tokens than it has, or longer than its positions."""
        longest, rows = config.data.max_length, config.model.num_positions
        problems = length_problems("data.max_length", longest, rows, "lower the first")
        try:
            check_vocabulary(config.model.vocab_size, data.tokenizer.vocab_size)
        except ValueError as error:
            problems.append(f"model: {error}")
        return problems

    def loss(self, model: "SentenceModel") -> Loss:
        def loss(tokens: Tensor, lengths: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            packed, cu_seqlens = pack_rows(tokens, lengths)
            return model.loss(packed, labels, cu_seqlens)

        return loss

    @property
    def train(self) -> Sentences:
        return self.sentences

    def validate(
        self,
        model: nn.Module,
        autocast: contextlib.AbstractContextManager,
        show: Show | None = None,
        mesh: "Mesh | None" = None,
    ) -> dict[str, float]:
        """Scores the dev sentences. On several ranks each scores all of them: they are few, and metrics need all."""
        total, done = sum(map(len, self.dev.values())), 0

        def progress(more: int) -> None:
            nonlocal done
            if show is not None:
                show(done, total)
            done += more

        fields, losses, scores = {}, [], []
        for name, sentences in self.dev.items():
            outputs = sentence_outputs(model, sentences, max(ROWS, self.config.batch_size), autocast, progress)
            losses.append(output_losses(outputs, sentences.labels))
            scores.append(task_score(self.task.metric, outputs, sentences.labels))
            fields[f"validation_{name}"] = scores[-1]
        if mesh is not None:
            from linnet.parallel.build import settle

            settle(model)
        mean = {"validation_loss": float(np.concatenate(losses).mean()), "validation_score": float(np.mean(scores))}
        return mean | (fields if len(fields) > 1 else {})

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        sets = {name: validation.get(f"validation_{name}") for name in self.dev} if len(self.dev) > 1 else {}
        about = {"task": self.task.name, "metric": self.task.metric}
        return super().result_fields(rows, validation) | sets | about

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        names = TASKS[config.data.task].scores
        return super().result_numbers(config) | (set(names) if len(names) > 1 else set())

    def files(self) -> dict[str, str]:
        return {TOKENIZER: self.data.tokenizer.to_json()}

    def meta(self) -> dict[str, Any]:
        return {**super().meta(), "vocabulary": self._vocabulary()}

    def start_problems(self, meta: dict[str, Any], path: Path) -> list[str]:
        mine, theirs = self._vocabulary(), meta.get("vocabulary", {})
        if theirs.get("model") == mine["model"] and theirs.get("tokens") == mine["tokens"]:
            return []
        return [
            f"the vocabulary differs: {path} has {theirs.get('model')} rows for {theirs.get('tokens')} tokens, this "
            f"configuration {mine['model']} rows for {mine['tokens']} tokens; leave data.tokenizer and "
            "model.vocab_size out, and they are those of init_from"
        ]

    def _vocabulary(self) -> dict[str, Any]:
        return {"model": self.config.model.vocab_size, "tokens": self.data.tokenizer.vocab_size}


def tokenizer_of(config: SentenceTraining) -> Tokenizer:
    """Returns the tokenizer of a training: `data.tokenizer`, or that of the run from which it starts."""
    if config.data.tokenizer is not None:
        found = given_tokenizer(config.data.tokenizer)
        assert found is not None  # none of these is learned from a corpus
        return found
    assert config.init_from is not None
    folder = RunFolder.open(config.init_from)
    if (found := read_tokenizer(folder)) is None:
        raise ConfigError([f"init_from: {folder.path} has no {TOKENIZER}; set data.tokenizer"], "train")
    return found
