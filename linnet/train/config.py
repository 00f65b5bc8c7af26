"""The configuration of one training: the keys that its result depends on, and under `run` how it is executed.

`TrainingConfig` has the keys that every objective has; `TrainConfig` is that of text. The other objectives define
theirs beside the objective (`linnet.train.objectives`).
"""

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from linnet import trust
from linnet.config import Config, Factor, Problem, SeveralKeys, gather, in_full, shown
from linnet.data import DataConfig, given_vocabulary
from linnet.data.sizes import BatchSizes, steps_of
from linnet.layers.base import load_plugin
from linnet.models import KINDS, ModelConfig, upgrade
from linnet.models.stack import StackConfig
from linnet.parallel.config import ParallelConfig
from linnet.runs import RunFolder
from linnet.runs.folder import STATED
from linnet.runs.model import TEXT, TOKENIZER, read_kind
from linnet.train.device import DeviceName
from linnet.train.monitor import GuardConfig, LoggerName
from linnet.train.optimizer import AverageConfig, OptimizerConfig, ScheduleConfig
from linnet.train.recompute import Recompute
from linnet.train.suites import Evaluation, LanguageEvaluation, label

DEFAULT_STEPS = 1000

FLOAT8_MULTIPLE = 16
"""Widths and tokens of a product in float8 are multiples of this number."""

EVALUATIONS = (
    "further evaluations during training and at its end; each runs after a checkpoint of its step, which is written if "
    "none is due"
)
"""What the key `evaluations` means, for the objectives that have it."""

MOVED = {
    "device": "device",
    "compile": "compile",
    "recompute": "recompute",
    "sinks": "loggers",
    "log_every": "log_every",
    "checkpoint_every": "checkpoint_every",
    "keep_checkpoints": "keep_checkpoints",
    "evaluate_every": "evaluate_every",
    "peak_tflops": "peak_tflops",
}
"""Top-level keys in folders of 0.1.0 -> their names under `run`."""


class RunConfig(Config):
    """How a training is executed. These keys change the result by rounding at most."""

    device: DeviceName = Field("auto", description="`auto` uses the GPU if one is visible, else the CPU")
    compile: bool = Field(False, description="run the model through torch.compile")
    graph: bool = Field(
        False,
        description="on one GPU, launch the forward and backward pass of a step as one CUDA graph; faster where "
        "the GPU waits for the host: small models, busy hosts. Needs `accumulation: 1`; without a GPU it has no effect",
    )
    recompute: Recompute = Field(
        "none",
        description="activations that the backward pass computes again to save memory: `none`, `selective` or `block`",
    )
    loggers: list[LoggerName] = Field([], description="loggers besides metrics.jsonl: `tensorboard`, `wandb`")
    log_every: int = Field(10, ge=1, description="steps between training rows of metrics.jsonl")
    checkpoint_every: int = Field(1000, ge=0, description="steps between checkpoints; 0: only at the end")
    checkpoint_minutes: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="minutes after which a checkpoint is written even if `checkpoint_every` asks for none; null: never",
    )
    keep_checkpoints: int = Field(2, ge=1, description="number of newest checkpoints that are kept")
    async_save: bool = Field(
        False, description="write checkpoints in the background while training goes on, from a copy in memory"
    )
    evaluate_every: int = Field(
        0,
        ge=0,
        description="steps between validations, and between evaluations that have no `every`; 0: only at the end",
    )
    keep_best: bool = Field(
        False,
        exclude_if=lambda keep: not keep,
        description="also keep the checkpoint of the lowest validation loss, for `linnet evaluate blocks --best`",
    )
    peak_tflops: Factor | None = Field(
        None, description="peak of the device in TFLOP/s, for FLOP utilisation where Linnet does not know it"
    )

    @field_validator("keep_best")
    @classmethod
    def _validated_at_checkpoints(cls, keep_best: bool, info: ValidationInfo) -> bool:
        every, validated = info.data.get("checkpoint_every"), info.data.get("evaluate_every")
        if (
            keep_best
            and every is not None
            and validated is not None
            and (not every or not validated or validated % every)
        ):
            raise ValueError(
                f"true needs validations, each with a checkpoint, and evaluate_every: {validated} is not a multiple of "
                f"checkpoint_every: {every}; set both to the same number, such as 1000"
            )
        return keep_best


def _is_none(value: object) -> bool:
    return value is None


class TrainingConfig(Config):
    """What every objective needs: a model, data, and how steps are made. Subclasses add the keys of one objective.

    Two configurations are the same training if they differ only in `run`, `parallel`, `name`, or in notation
    (`linnet.train.identity`). `linnet.train.objectives.read_training` picks the class from the key `objective`.
    """

    ELSEWHERE: ClassVar = {old: f"write it as `run.{new}`" for old, new in MOVED.items()}
    ELSEWHERE |= {"lr": "write it as `optimizer.learning_rate`"}
    ROW: ClassVar = "images"  # what one row of a batch is, in messages

    objective: str = Field(description="the training objective")
    name: str = Field("", description="label of the run folder; default: the architecture")
    plugins: list[str] = Field(
        [], description="mixers outside the package, `path/to/file.py:Class`; the layout may name them"
    )
    plugin_digests: dict[str, str] = Field(
        {}, description="SHA-256 of each plugin file, filled in by Linnet; a changed file is another training"
    )
    data: Config = Field(description="the data to train on")
    model: StackConfig = Field(description="a recipe's name, a recipe with changes, or a layout")
    architecture: str = Field("", description="label in tables and figures; default: the names of the layout's mixers")
    batch_size: int = Field(16, ge=1, le=1 << 40, description="sequences per step, over all its `accumulation` parts")
    accumulation: int = Field(
        1,
        ge=1,
        description="parts of the batch that the model computes one after another to save memory; the gradient is "
        "that of the whole batch, with the same weight for each token",
    )
    batch_ramp: float | None = Field(
        None,
        ge=1e-6,
        le=1 << 40,
        exclude_if=_is_none,
        description="steps over which the batch grows to `batch_size`: linearly, in whole parts of `accumulation`, "
        "from a single one; below 1 a fraction of the steps, from 1 on a number; null: it is whole from the start",
    )
    steps: int | None = Field(None, ge=1, le=1 << 40, description="length of the training in steps; default: 1000")
    epochs: float | None = Field(
        None,
        ge=1e-9,
        le=1e9,
        exclude_if=_is_none,
        description="length of the training in passes over the data, in place of `steps`; rounded up to whole steps",
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of the weights and of the sample order")
    precision: Literal["float32", "bfloat16", "float8"] = Field(
        "float32",
        description="`bfloat16` is autocast: weights, optimizer and losses stay float32; `float8` is bfloat16, but for "
        "wide linear layers of blocks, whose products are in float8 (extra: float8)",
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW or Muon, and their settings")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="learning rate as a function of the step")
    average: AverageConfig | None = Field(
        None,
        exclude_if=_is_none,
        description="keeps a moving average of the weights, which is scored and loaded in their place; null: none",
    )
    curve_every: int | None = Field(
        None, ge=1, description="steps between the points of the training curve that fits read; null: no such points"
    )
    run: RunConfig = Field(RunConfig(), description="how the training is executed; not part of the run's identity")
    parallel: ParallelConfig = Field(
        ParallelConfig(),
        description="how the training is divided among devices; not part of the run's identity, which lets a run go on "
        "on another number of them",
    )
    guard: GuardConfig = Field(GuardConfig(), description="reaction to a loss that is not finite or that spikes")
    init_from: str | None = Field(None, description="run or model folder; the training starts from its last weights")

    @property
    def autocast_precision(self) -> Literal["float32", "bfloat16"]:
        """The number format of all products but those of the linear layers in float8."""
        return "bfloat16" if self.precision == "float8" else self.precision

    @property
    def parts(self) -> int:
        """Number of parts of the batch: `parallel.accumulation`, else `accumulation`."""
        return self.parallel.accumulation or self.accumulation

    @property
    def packs(self) -> bool:
        """Whether a row holds several documents, none of which may see another."""
        return getattr(self.data, "packing", "cross") == "reset"

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        for name in ("total_steps", "batch_sizes"):  # which were computed from the values before the update
            copied.__dict__.pop(name, None)
        return copied

    @functools.cached_property
    def total_steps(self) -> int:
        """Number of steps. Raises ValueError if the length is in epochs: `objectives.in_steps` counts them."""
        if self.epochs is not None:
            raise ValueError(f"epochs: {self.epochs:g} are not steps yet; call linnet.train.objectives.in_steps")
        return self.steps or DEFAULT_STEPS

    @functools.cached_property
    def batch_sizes(self) -> BatchSizes:
        """Rows of the batch at each position. Raises ValueError as `total_steps`."""
        if self.batch_ramp is None:
            return BatchSizes(self.batch_size)
        return BatchSizes.over(self.batch_size, self.accumulation, self.batch_ramp, self.total_steps)

    @property
    def smallest_batch(self) -> int:
        """Rows of the first batch."""
        return self.batch_size if self.batch_ramp is None else self.batch_size // self.accumulation

    @property
    def written_batch(self) -> str:
        """Rows of a batch as text: "16", or "2 to 16" if it grows."""
        return str(self.batch_size) if self.batch_ramp is None else f"{self.smallest_batch} to {self.batch_size}"

    def steps_of(self, rows: int) -> int:
        """Returns a number of steps that reads at least this many rows, and one step less does not."""
        return steps_of(rows, self.batch_size, self.accumulation, self.batch_ramp)

    def parts_at(self, position: int) -> int:
        """Returns the number of parts of the batch at a position: no part has more rows than one of a whole batch."""
        sizes = self.batch_sizes
        return -(-self.parts * sizes.count(position) // sizes.parts)

    @property
    def includes(self) -> list[str]:
        """Folders of Python files that the evaluations of this training run."""
        return [include for config in getattr(self, "evaluations", ()) if (include := getattr(config, "include", None))]

    def file_names(self) -> dict[str, Any]:
        """Returns the paths of the files that the training reads."""
        data = self.data.model_dump(mode="json")
        return {"source": data.get("source"), "validation": data.get("validation"), "init_from": self.init_from}

    @model_validator(mode="before")
    @classmethod
    def _accept_run_folder(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        of_first_format = values.keys() >= {*MOVED, "plugin_digests"}  # which 0.1.0 wrote, with every key
        if of_first_format or {"format", "digest"} <= values.keys():  # the config.yaml of a run folder
            trust.check_training(values, "the config.yaml of a run")
            values = {key: value for key, value in values.items() if key not in STATED}
        return present(values) if of_first_format else values

    # Fields are validated in the order above: plugins before the model that names them.

    @field_validator("plugins")
    @classmethod
    def _load_plugins(cls, plugins: list[str]) -> list[str]:
        problems: list[str] = []
        for plugin in plugins:
            with gather(problems):
                load_plugin(plugin)
        if problems:
            raise ValueError("; ".join(problems))
        return plugins

    @field_validator("plugin_digests")
    @classmethod
    def _same_plugins(cls, digests: dict[str, str]) -> dict[str, str]:
        changed = [plugin for plugin, digest in digests.items() if trust.plugin_digest(plugin) != digest]
        if changed:
            raise ValueError(f"{', '.join(changed)} changed since the run was made; restore the file, or train anew")
        return digests

    @field_validator("model", mode="before")
    @classmethod
    def _named_recipe(cls, model: Any) -> Any:
        return in_full("model", model)

    @field_validator("architecture")
    @classmethod
    def _name_architecture(cls, architecture: str, info: ValidationInfo) -> str:
        if architecture or "model" not in info.data:
            return architecture
        return "-".join(dict.fromkeys(block.mixer for block in info.data["model"].blocks if block.mixer))

    @field_validator("accumulation")
    @classmethod
    def _parts_of_batch(cls, accumulation: int, info: ValidationInfo) -> int:
        batch_size = info.data.get("batch_size", accumulation)
        if accumulation > batch_size:
            raise ValueError(f"{accumulation} parts for a batch of {batch_size} {cls.ROW}; use at most {batch_size}")
        return accumulation

    @field_validator("batch_ramp")
    @classmethod
    def _whole_parts(cls, batch_ramp: float | None, info: ValidationInfo) -> float | None:
        if batch_ramp is None or not {"accumulation", "batch_size"} <= info.data.keys():
            return batch_ramp
        batch_size, parts = info.data["batch_size"], info.data["accumulation"]
        if parts == 1:
            what = f"{batch_ramp:g} lets the batch grow by parts of `accumulation`, and accumulation is 1"
            fix = "set it to the number of sizes, such as 8"
            raise ValueError(f"{what}; {fix}")
        if batch_size % parts:
            raise ValueError(
                f"{batch_ramp:g} needs equal parts, and accumulation: {parts} does not divide batch_size: "
                f"{batch_size}; use batch_size {batch_size // parts * parts}"
            )
        return batch_ramp

    @field_validator("epochs")
    @classmethod
    def _steps_or_epochs(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        if epochs is not None and info.data.get("steps") is not None:
            raise ValueError(f"steps ({info.data['steps']}) and epochs ({epochs:g}) are both given; drop one")
        return epochs

    @field_validator("run")
    @classmethod
    def _whole_graph(cls, run: RunConfig, info: ValidationInfo) -> RunConfig:
        if run.graph and (accumulation := info.data.get("accumulation", 1)) > 1:
            raise ValueError(f"graph: true needs accumulation: 1 (given {accumulation}); set run.graph=false")
        return run

    @field_validator("parallel", mode="before")
    @classmethod
    def _nothing_given(cls, parallel: Any) -> Any:
        return {} if parallel is None else parallel

    @field_validator("guard")
    @classmethod
    def _checkpoints_of_rollback(cls, guard: GuardConfig, info: ValidationInfo) -> GuardConfig:
        if guard.policy == "rollback" and "run" in info.data and info.data["run"].keep_best:
            raise ValueError(
                "policy rollback returns to the newest checkpoints, and run.keep_best would leave an older one among "
                "them; set run.keep_best=false, or another guard.policy"
            )
        if guard.policy == "rollback" and "run" in info.data and info.data["run"].checkpoint_minutes is not None:
            raise ValueError(
                f"policy rollback returns to the last checkpoint, and run.checkpoint_minutes "
                f"({info.data['run'].checkpoint_minutes:g}) would make its step depend on the machine's speed; set "
                "run.checkpoint_minutes=null, or another guard.policy"
            )
        return guard

    @field_validator("evaluations", check_fields=False)  # a key of some objectives
    @classmethod
    def _distinct_evaluations(cls, evaluations: list[Evaluation], info: ValidationInfo) -> list[Evaluation]:
        trust.accept([trust.tasks_digest(include) for e in evaluations if (include := getattr(e, "include", None))])
        names = [label(evaluation) for evaluation in evaluations]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems = [f"{name!r} is the name of several evaluations; give each its own `name`" for name in twice]
        if "guard" in info.data and info.data["guard"].policy == "rollback" and "run" in info.data:
            # A checkpoint that is written only for an evaluation would change the target of a rollback, and the result.
            run: RunConfig = info.data["run"]
            steps = {name: e.every or run.evaluate_every for name, e in zip(names, evaluations, strict=True)}
            problems += [
                f"{name!r} is due every {every} steps, not a multiple of run.checkpoint_every "
                f"({run.checkpoint_every}), to which guard.policy rollback returns; use a multiple"
                for name, every in steps.items()
                if every and (not run.checkpoint_every or every % run.checkpoint_every)
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return evaluations

    @model_validator(mode="after")
    def _whole_batches_for_batchnorm(self) -> Self:
        """Refuses settings with which a batch norm would not see each whole batch exactly once."""
        if self.model.norm != "batchnorm":
            return self
        lines = []
        if self.accumulation > 1:
            lines.append(f"accumulation: {self.accumulation} would give each part statistics of its own; use 1")
        if (self.parallel.accumulation or 1) > 1:
            parts = self.parallel.accumulation
            lines.append(f"parallel.accumulation: {parts} would give each part statistics of its own; use null")
        if self.run.recompute != "none":
            lines.append(f"run.recompute: {self.run.recompute} would count each batch twice; use none")
        if self.guard.policy == "skip":
            lines.append("guard.policy: skip would leave the bad batch in the running statistics; use rollback or stop")
        if lines:
            raise SeveralKeys([f"{line} (with model.norm: batchnorm)" for line in lines], "train")
        return self

    @model_validator(mode="after")
    def _forms_of_float8(self) -> Self:
        """Refuses settings that products in float8 do not take, or with which they were not tried."""
        if self.precision != "float8":
            return self
        lines, length = [], getattr(self, "seq_len", FLOAT8_MULTIPLE)
        if self.objective not in ("text", "chat"):
            lines.append(f"precision: float8 is for objective: text and chat, not {self.objective}; use bfloat16")
        if length % FLOAT8_MULTIPLE:
            nearest = -(-length // FLOAT8_MULTIPLE) * FLOAT8_MULTIPLE
            lines.append(f"seq_len: {length} must be a multiple of {FLOAT8_MULTIPLE}; use {nearest}")
        if self.run.graph:
            lines.append("run.graph: true has no float8; use false, or precision: bfloat16")
        for key in ("tp", "sp"):
            if (degree := getattr(self.parallel, key)) > 1:
                lines.append(f"parallel.{key}: {degree} has no float8; use 1 with dp_shard, or precision: bfloat16")
        if lines:
            raise SeveralKeys([f"{line} (with precision: float8)" for line in lines], "train")
        return self

    @classmethod
    def of_start(cls, values: Any, kinds: Collection[str], fix: str = "name another folder") -> Any:
        """Returns plain values with the model and the plugins of the run or model folder `init_from` filled in.

        The key `model` needs only what differs, in `options` as beside a recipe: the options of a layer that it does
        not name stay. Values with a whole model stay as they are.

        Args:
            kinds: kinds of models from which such a training starts; the first one is what messages name.

        Raises:
            ValueError: the folder has no such model, or its plugins are not trusted.
        """
        model, start = values.get("model", {}), values.get("init_from")
        if not isinstance(model, Mapping) or not isinstance(start, str):
            return values  # the validation of the fields reports it
        if "recipe" in model or {"layout", "d_model"} <= model.keys():
            return values
        problems = [
            f"model.{key}: {shown(model[key])} is that of another model than init_from's; leave it out to start from "
            f"that model's weights, or describe a whole model, with {other} too"
            for key, other in (("layout", "d_model"), ("d_model", "layout"))
            if key in model
        ]
        with gather(problems, lambda line: Problem(f"init_from: {line}")):
            folder = RunFolder.open(start)
        if problems:
            raise ValueError("; ".join(problems))
        with gather(problems):
            if (kind := read_kind(folder)).name not in kinds:
                title = KINDS[next(iter(kinds))].config.TITLE
                problems.append(f"{start} contains {kind.config.TITLE}, but a fine-tuning starts from {title}; {fix}")
        with gather(problems):
            trust.check_plugins(config := folder.config, folder.path / "config.yaml")
        if not problems and not isinstance(config.get("model"), Mapping):
            problems.append(f"{start} contains no single model; {fix}")
        if problems:
            raise ValueError("; ".join(problems))
        began, changes = config["model"], model.get("options", {})
        model = {**began, **model}
        if isinstance(changes, Mapping):  # else the validation of the fields reports it
            model["options"] = dict(began.get("options") or {})
            for name, layer in changes.items():
                before = model["options"].get(name)
                both = isinstance(layer, Mapping) and isinstance(before, Mapping)
                model["options"][name] = {**before, **layer} if both else layer
        return {"plugins": config.get("plugins") or [], **values, "model": model}

    @field_validator("init_from")
    @classmethod
    def _is_run(cls, init_from: str | None) -> str | None:
        if init_from is not None and not (Path(init_from) / "config.yaml").is_file():
            raise ValueError(f"{init_from!r} is not a run folder (it has no config.yaml)")
        return init_from


class CorpusTraining(TrainingConfig):
    """A training on rows of tokens from a corpus of text: the keys of `objective: text` and `masked`."""

    ROW: ClassVar = "sequences"

    data: DataConfig = Field(DataConfig(), description="the text to train on and its tokenizer")
    seq_len: int = Field(512, ge=1, le=1 << 40, description="tokens per sequence")
    tokens: int | None = Field(
        None, ge=1, description="length of the training in tokens, in place of `steps`; rounded up to whole steps"
    )
    evaluate_tokens: int | None = Field(
        131_072, ge=1, description="tokens of the held-out split that a validation scores; null: all"
    )

    @functools.cached_property
    def total_steps(self) -> int:
        if self.tokens is not None:
            return self.steps_of(-(-self.tokens // self.seq_len))
        return super().total_steps

    def file_names(self) -> dict[str, Any]:
        names = super().file_names() | {"tokenizer": self.data.tokenizer.model_dump(mode="json").get("path")}
        if self.data.mixture:
            names["source"] = sorted([source.source, source.epochs, source.weight] for source in self.data.mixture)
        return names

    @field_validator("model", mode="before")
    @classmethod
    def _take_vocabulary(cls, model: Any, info: ValidationInfo) -> Any:
        model = in_full("model", model)
        if isinstance(model, dict) and "vocab_size" not in model and "data" in info.data:
            return {**model, "vocab_size": given_vocabulary(info.data["data"].tokenizer)}
        return model

    @field_validator("model")
    @classmethod
    def _check_vocabulary(cls, model: Any, info: ValidationInfo) -> Any:
        if "data" in info.data and isinstance(vocab_size := getattr(model, "vocab_size", None), int):
            check_vocabulary(vocab_size, given_vocabulary(info.data["data"].tokenizer))
        return model

    @field_validator("tokens")
    @classmethod
    def _one_length(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        for other in ("steps", "epochs"):
            if tokens is not None and (length := info.data.get(other)) is not None:
                raise ValueError(f"{other} ({length}) and tokens ({tokens}) are both given; drop one")
        return tokens


class TrainConfig(CorpusTraining):
    """The training of a causal language model on text: `objective: text`, the default."""

    objective: Literal["text"] = Field("text", description="the training objective: `text`, the next token of a text")
    model: ModelConfig = Field(
        description="a recipe's name, a recipe with changes, or a layout; `vocab_size` defaults to the tokenizer's"
    )
    evaluations: list[LanguageEvaluation] = Field([], description=EVALUATIONS)

    @model_validator(mode="before")
    @classmethod
    def _model_of_start(cls, values: Any) -> Any:
        """Fills in the model and the tokenizer of the folder from which training starts, unless there is a model."""
        if not isinstance(values, Mapping) or (started := cls.of_start(values, TEXT)) is values:
            return values
        file, data = Path(started["init_from"]) / TOKENIZER, started.get("data", {})
        if file.is_file() and isinstance(data, Mapping):
            started["data"] = {"tokenizer": str(file), **data}
        return started


Training = TypeVar("Training", bound=TrainingConfig)


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a training, as a run or study folder of any release has them, with today's keys."""
    moved = {new: values[old] for old, new in MOVED.items() if old in values}
    settings = {key: value for key, value in values.items() if key not in MOVED}
    if moved and isinstance(run := settings.get("run", {}), Mapping):
        settings["run"] = {**moved, **run}
    if isinstance(model := settings.get("model"), Mapping):
        settings["model"] = upgrade(model)
    return settings


def resolve(config: Training) -> Training:
    """Returns the configuration with the digests of its plugins filled in, as config.yaml stores it."""
    return config.model_copy(update={"plugin_digests": trust.digests(config.plugins)})


def check_vocabulary(model: int, tokenizer: int) -> None:
    """Raises ValueError if the model has fewer rows than the tokenizer has tokens. More rows are padding."""
    if model < tokenizer:
        what = f"vocab_size {model} is below the tokenizer's {tokenizer} tokens"
        raise ValueError(f"{what}; set model.vocab_size={tokenizer}")
