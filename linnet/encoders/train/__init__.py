"""Objectives on masked text, sentences and long sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn

from linnet.config import ConfigError, SeveralKeys, checking, digest, gather, in_full, shown
from linnet.data import Corpus, Tokenizer, flatten_documents, given_tokenizer, given_vocabulary
from linnet.data.corpus import mixture_of
from linnet.data.problems import in_data, problems_of
from linnet.data.sizes import BatchSizes
from linnet.data.synthetic.base import Draws
from linnet.encoders.config import MaskedConfig, SentenceConfig, SequenceConfig
from linnet.encoders.evaluate.lra import forward_of, held_out
from linnet.encoders.glue import (
    ROWS,
    TASKS,
    Examples,
    GlueConfig,
    GlueCorpus,
    Sentences,
    check_installed,
    content,
    output_losses,
    pack_rows,
    read_glue,
    sentence_outputs,
    task_score,
)
from linnet.encoders.lra import LraCorpus, LraDataConfig, LraTask, check_lra, lra_content, lra_task, prepare_lra
from linnet.encoders.masking import MaskedBatches, MaskedValidation, MaskingConfig
from linnet.evaluate import score
from linnet.layers.positions import length_problems
from linnet.models import KINDS, flops_exact
from linnet.runs import RunFolder
from linnet.runs.model import TOKENIZER, read_kind, read_tokenizer
from linnet.train.config import CorpusTraining, TrainingConfig, check_vocabulary
from linnet.train.monitor import GuardConfig
from linnet.train.objective import Autocast, Costs, Loss, Preparing, Show
from linnet.train.objectives.labelled import LabelledObjective
from linnet.train.objectives.text import CorpusObjective, Shown, mixture_problems, scored_rows, source_fields

if TYPE_CHECKING:
    from linnet.encoders.models import MaskedLM, SentenceModel, SequenceClassifier
    from linnet.parallel.mesh import Mesh


# Masked tokens of a text: `objective: masked`.
#
# The model is a `MaskedLM` with the vocabulary of the corpus. Rows are `seq_len` tokens of packed documents, without
# padding, and each has exactly round(rate x seq_len) targets. The loss is the mean negative log-likelihood over these,
# in nats per masked token; validation reports its exponential, the masked perplexity.


class MaskedTraining(CorpusTraining):
    """The training of a masked language model: `objective: masked`."""

    objective: Literal["masked"] = Field("masked", description="the training objective: `masked`, hidden tokens")
    model: MaskedConfig = Field(
        description="a recipe's name (bert-crammed, lightnet-bert), a recipe with changes, or a layout; `vocab_size` "
        "defaults to the tokenizer's"
    )
    seq_len: int = Field(128, ge=1, le=1 << 40, description="tokens per sequence")
    masking: MaskingConfig = Field(MaskingConfig(), description="which tokens are predicted")

    @model_validator(mode="after")
    def _rows_can_be_masked(self) -> Self:
        problems = self.masking.problems(self.seq_len)
        problems += length_problems("seq_len", self.seq_len, self.model.num_positions, "raise the second")
        if problems:
            raise SeveralKeys(problems, "train")
        return self


class MaskedObjective(CorpusObjective):
    """Trains a masked language model on a corpus."""

    Config = MaskedTraining
    name, loss_unit = "masked", "nats per masked token"
    SCORES: ClassVar = {"masked_perplexity": "masked perplexity"}

    @cached_property
    def targets_per_row(self) -> int:  # type: ignore[override]
        return self.config.masking.count(self.config.seq_len)

    @classmethod
    def read(cls, config: CorpusTraining, cache: str | Path, show: Preparing | None = None) -> Corpus:
        with checking("data", in_data):
            return super().read(config, cache, show)

    @classmethod
    def step_flops(cls, config: MaskedTraining) -> float:
        model, rows = config.model, config.batch_size
        unseen = config.seq_len - config.masking.count(config.seq_len)  # places without logits
        head = 3.0 * 2.0 * unseen * model.d_model * model.vocab_size
        return flops_exact(model, config.seq_len, rows) - rows * head

    @classmethod
    def describe_model(cls, config: MaskedTraining) -> str:
        return f"vocabulary {config.model.vocab_size:,} and the mask token"

    @classmethod
    def data_problems(cls, config: MaskedTraining, data: Corpus) -> list[str]:
        """Returns why a corpus does not fit: too short for a row, or more tokens than the model has."""
        problems: list[str] = []
        with gather(problems):
            problems += mixture_problems(config, _batches(config, data, BatchSizes(config.batch_size)).order)
        with gather(problems):
            _validation(config, data)
        try:
            check_vocabulary(config.model.vocab_size, data.vocab_size)
        except ValueError as error:
            problems.append(f"model: {error}")
        return problems

    def loss(self, model: "MaskedLM") -> Loss:
        answers = self.config.masking.count(self.config.seq_len)
        if self.config.data.packing == "cross":
            return partial(model.loss, answers=answers)

        def loss(tokens: Tensor, targets: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
            if starts.shape[1] == 1:  # one document per row: use the rows as an ordinary batch
                return model.loss(tokens, targets, answers=answers)
            flat, wanted, cu_seqlens = flatten_documents(tokens, targets, starts)
            return model.loss(flat, wanted, cu_seqlens, answers * len(tokens))

        return loss

    def batches(self) -> MaskedBatches:
        return _batches(self.config, self.data, self.config.batch_sizes)

    def count(self, tokens: Tensor, targets: Tensor, *_: Tensor) -> Tensor:
        return torch.full((), targets.shape[0] * self.targets_per_row, device=targets.device)

    def validate(
        self, model: nn.Module, autocast: Autocast, show: Show | None = None, mesh: "Mesh | None" = None
    ) -> dict[str, float]:
        batches = _validation(self.config, self.data, 1 if mesh is None else mesh.dp)
        result = score(model, Shown(batches, show), 1.0, autocast, self.loss(model), mesh)
        return {"validation_loss": result.loss, "validation_masked_perplexity": result.perplexity}

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        fields = super().result_fields(rows, validation)
        fields |= {"seq_len": self.config.seq_len, "unique_tokens": len(self.data.train)}
        return fields | source_fields(self.config, self.data, rows)

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        return super().result_numbers(config) | {"seq_len", "unique_tokens"}


def _batches(config: MaskedTraining, corpus: Corpus, sizes: BatchSizes) -> MaskedBatches:
    return MaskedBatches(
        corpus.train,
        config.seq_len,
        sizes,
        config.seed,
        config.masking,
        config.model.vocab_size,
        config.data.packing,
        mixture_of(config.data, corpus),
    )


def _validation(config: MaskedTraining, corpus: Corpus, ranks: int = 1) -> MaskedValidation:
    return MaskedValidation(
        corpus.validation,
        config.seq_len,
        scored_rows(config, ranks),
        config.masking,
        config.model.vocab_size,
        config.evaluate_tokens,
        config.data.packing,
    )


# Classes or numbers of sentences: `objective: sentences`, the fine-tuning of a masked language model on GLUE.
#
# The model is a `SentenceModel`; with `init_from` its layers, tokenizer and weights are those of another run, and the
# head is new. Sentences of different lengths are packed into one row. The loss is the cross-entropy in nats per
# sentence, or the squared error of a number. Validation reports the task's own metric in per cent.


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

    @property
    def packs(self) -> bool:
        return True

    @model_validator(mode="before")
    @classmethod
    def _model_of_start(cls, values: Any) -> Any:
        """Fills in the model and the plugins of the run from which training starts."""
        if not isinstance(values, Mapping):
            return values
        model = values.get("model", {})
        if not isinstance(model, Mapping) or {"recipe", "layout", "d_model"} & model.keys():
            return values
        if values.get("init_from") is None:
            raise ValueError(
                "init_from: is not given; name a run of `objective: masked` to start from its model, weights and "
                "tokenizer, or set model and data.tokenizer to train from new weights"
            )
        started = cls.of_start(values, STARTS, "name a run of `objective: masked`")
        if started is not values and "outputs" not in model:
            started["model"].pop("outputs", None)
        return started

    @field_validator("model", mode="before")
    @classmethod
    def _outputs_of_task(cls, model: Any, info: ValidationInfo) -> Any:
        model = in_full("model", model)
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
            raise ValueError(
                f"{folder.path} contains {read_kind(folder).config.TITLE}, but a fine-tuning starts from "
                f"{KINDS['masked_lm'].config.TITLE}; name a run of `objective: masked`"
            )
        return init_from

    def file_names(self) -> dict[str, Any]:
        tokenizer = self.data.tokenizer
        return super().file_names() | {"tokenizer": None if tokenizer is None else getattr(tokenizer, "path", None)}


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
    def read(cls, config: SentenceTraining, cache: str | Path, show: Preparing | None = None) -> SentenceData:
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
        self, model: nn.Module, autocast: Autocast, show: Show | None = None, mesh: "Mesh | None" = None
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
        mine = self._vocabulary()
        theirs = vocabulary if isinstance(vocabulary := meta.get("vocabulary"), dict) else {}
        if theirs.get("model") == mine["model"] and theirs.get("tokens") == mine["tokens"]:
            return []
        return [
            f"the vocabulary differs: {path} has {shown(theirs.get('model'))} rows for {shown(theirs.get('tokens'))} "
            f"tokens, this configuration {mine['model']} rows for {mine['tokens']} tokens; leave data.tokenizer and "
            "model.vocab_size out, and they are those of init_from"
        ]

    def _vocabulary(self) -> dict[str, Any]:
        return {"model": self.config.model.vocab_size, "tokens": self.data.tokenizer.vocab_size}


def tokenizer_of(config: SentenceTraining) -> Tokenizer:
    """Returns the tokenizer of a training: `data.tokenizer`, or that of the run from which it starts."""
    if config.data.tokenizer is not None:
        tokenizer = given_tokenizer(config.data.tokenizer)
        assert tokenizer is not None  # none of these is learned from a corpus
        return tokenizer
    assert config.init_from is not None
    folder = RunFolder.open(config.init_from)
    if (tokenizer := read_tokenizer(folder)) is None:
        raise ConfigError([f"init_from: {folder.path} has no {TOKENIZER}; set data.tokenizer"], "train")
    return tokenizer


# The published augmentation of the Image task: images are mirrored, and cut out of images with a mirrored border.


PADDING = 4


def augment_lra(
    images: Tensor, *, seed: int, position: int, padding: int = PADDING, first: int = 0, rows: int | None = None
) -> Tensor:
    """Mirrors half of the images, and shifts each by up to `padding` pixels; the border is mirrored, edge included.

    As the scripts of HGRN and HGRN2 do for their colour images (a random crop with symmetric padding, a random flip).

    Args:
        images: [b, C, H, W]. seed: of the training. position: of the global batch in its order.
        first, rows: the number of the first row in the global batch, and the rows of that; None if this is all of it.
    """
    rows = len(images) if rows is None else rows
    draws = Draws(seed, "augment_lra", position)
    shifts = draws.integers(2 * padding + 1, 2, rows)
    mirrored = draws.uniform(rows) < 0.5
    part = slice(first, first + len(images))
    device, (height, width) = images.device, images.shape[-2:]
    down, right = torch.from_numpy(shifts[:, part]).to(device)
    flipped = torch.from_numpy(mirrored[part]).to(device)[:, None]
    lines = _mirrored(torch.arange(height, device=device) + down[:, None] - padding, height)
    columns = _mirrored(torch.arange(width, device=device) + right[:, None] - padding, width)
    columns = torch.where(flipped, width - 1 - columns, columns)
    place = (lines[:, :, None] * width + columns[:, None, :]).flatten(1)
    return images.flatten(2).gather(2, place[:, None].expand(-1, images.shape[1], -1)).view(images.shape)


def _mirrored(place: Tensor, size: int) -> Tensor:
    """Returns places inside of 0..size - 1: -1 becomes 0, and size becomes size - 1."""
    place = torch.where(place < 0, -1 - place, place)
    return torch.where(place >= size, 2 * size - 1 - place, place)


# Classes of long sequences: `objective: sequences`, the tasks of the Long Range Arena (paper 002, Table 7).
#
# The model is a `SequenceClassifier`; its vocabulary, images, classes and head follow from the task. The loss is the
# cross-entropy in nats per sequence. Each validation scores the split that selects the epoch and the test split, so
# the result has the test accuracy of the last epoch and of the best one.


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
        model = in_full("model", model)
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
    def read(cls, config: SequenceTraining, cache: str | Path, show: Preparing | None = None) -> LraCorpus:
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
        self, model: nn.Module, autocast: Autocast, show: Show | None = None, mesh: "Mesh | None" = None
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
