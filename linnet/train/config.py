"""The configuration of one training."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from linnet.config import Config, ConfigError
from linnet.data import DataConfig, given_vocabulary
from linnet.layers.base import load_plugin, plugin_digest
from linnet.models import ModelConfig
from linnet.train.device import DeviceName
from linnet.train.guards import GuardConfig
from linnet.train.optim import OptimizerConfig
from linnet.train.recompute import Recompute
from linnet.train.schedule import ScheduleConfig
from linnet.train.sinks import SinkName
from linnet.train.suites import Evaluation, label

DEFAULT_STEPS = 1000


class TrainConfig(Config):
    """One model, many steps. Two runs with equal configurations are the same run.

    Attributes:
        name: label of the run folder; default: the architecture.
        architecture: label in tables and figures; default: the names of the layout's mixers.
        plugins: mixers outside the package, `path/to/file.py:Class`; the layout may name them.
        plugin_digests: SHA-256 of each plugin file, filled in by `resolve`, so that a changed file is another run.
        data: what to train on.
        model: a recipe's name, a recipe with changes, or a layout (see `ModelConfig`). A `vocab_size` that is not
            given is that of the tokenizer.
        seq_len: tokens of a sequence.
        batch_size: sequences of one step, over all its `accumulation` parts.
        accumulation: parts of the batch that go through the model one after the other, to save memory. The gradient
            is that of the whole batch, each token with the same weight.
        steps, tokens: length of the training, one of the two; tokens are rounded up to whole steps. Default 1000 steps.
        seed: of weights and sample order.
        device: `auto` is the GPU where there is one.
        precision: `bfloat16` is autocast: weights, optimizer and losses stay float32.
        compile: torch.compile.
        recompute: `none`, or what is computed again in the backward pass to save memory: `selective`, `block`.
        evaluate_every: steps between validations; 0: only at the end.
        evaluate_tokens: tokens of the held-out split that are scored; null: all.
        evaluations: what else is measured on the way, and at the end (`linnet.train.evaluation`). Each comes behind a
            checkpoint of its step, which is written for it where none is due.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        keep_checkpoints: how many are kept.
        log_every: steps between rows of metrics.jsonl.
        guard: what to do about a loss that is not finite or spikes.
        sinks: where rows go besides metrics.jsonl.
        peak_tflops: of the device, for FLOP utilisation where it is not known (every CPU).
        init_from: run folder whose last weights to start from.
    """

    name: str = ""
    plugins: list[str] = []
    plugin_digests: dict[str, str] = {}
    data: DataConfig = DataConfig()
    model: ModelConfig
    architecture: str = ""
    seq_len: int = Field(512, ge=1)
    batch_size: int = Field(16, ge=1)
    accumulation: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    tokens: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0, lt=1 << 63)
    device: DeviceName = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    recompute: Recompute = "none"
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluate_every: int = Field(0, ge=0)
    evaluate_tokens: int | None = Field(131_072, ge=1)
    checkpoint_every: int = Field(1000, ge=0)
    keep_checkpoints: int = Field(2, ge=1)
    log_every: int = Field(10, ge=1)
    guard: GuardConfig = GuardConfig()
    evaluations: list[Evaluation] = []
    sinks: list[SinkName] = []
    peak_tflops: float | None = Field(None, gt=0)
    init_from: str | None = None

    @property
    def total_steps(self) -> int:
        if self.tokens is not None:
            return -(-self.tokens // (self.batch_size * self.seq_len))
        return self.steps or DEFAULT_STEPS

    # Fields are validated in the order above: plugins before the model that names them, data before its vocabulary.

    @field_validator("plugins")
    @classmethod
    def _load_plugins(cls, plugins: list[str]) -> list[str]:
        problems = []
        for plugin in plugins:
            try:
                load_plugin(plugin)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ValueError("; ".join(problems))
        return plugins

    @field_validator("plugin_digests")
    @classmethod
    def _same_plugins(cls, digests: dict[str, str]) -> dict[str, str]:
        changed = [plugin for plugin, digest in digests.items() if plugin_digest(plugin) != digest]
        if changed:
            raise ValueError(f"{', '.join(changed)} changed since the run was made; restore the file, or train anew")
        return digests

    @field_validator("model", mode="before")
    @classmethod
    def _take_vocabulary(cls, model: Any, info: ValidationInfo) -> Any:
        if isinstance(model, str):
            model = {"recipe": model}
        if isinstance(model, dict) and "vocab_size" not in model and "data" in info.data:
            return {**model, "vocab_size": given_vocabulary(info.data["data"].tokenizer)}
        return model

    @field_validator("model")
    @classmethod
    def _check_vocabulary(cls, model: ModelConfig, info: ValidationInfo) -> ModelConfig:
        if "data" in info.data:
            check_vocabulary(model.vocab_size, given_vocabulary(info.data["data"].tokenizer))
        return model

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
            raise ValueError(f"{accumulation} parts of a batch of {batch_size} sequences; use at most {batch_size}")
        return accumulation

    @field_validator("tokens")
    @classmethod
    def _one_length(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        if tokens is not None and info.data.get("steps") is not None:
            raise ValueError(f"steps ({info.data['steps']}) and tokens ({tokens}) are both given; drop one")
        return tokens

    @field_validator("evaluations")
    @classmethod
    def _distinct_evaluations(cls, evaluations: list[Evaluation], info: ValidationInfo) -> list[Evaluation]:
        names = [label(evaluation) for evaluation in evaluations]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems = [f"{name!r} is the name of several; give each a `name` of its own" for name in twice]
        between = info.data.get("checkpoint_every", 0)
        if "guard" in info.data and info.data["guard"].policy == "rollback":
            # Checkpoints that only evaluations ask for would change where a rollback goes back to, and so the training.
            steps = {
                name: e.every or info.data.get("evaluate_every", 0) for name, e in zip(names, evaluations, strict=True)
            }
            problems += [
                f"{name!r} comes every {every} steps, no multiple of checkpoint_every ({between}), which guard.policy "
                "rollback goes back to; give a multiple, or other checkpoints"
                for name, every in steps.items()
                if every and (not between or every % between)
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return evaluations

    @field_validator("init_from")
    @classmethod
    def _is_run(cls, init_from: str | None) -> str | None:
        if init_from is not None and not (Path(init_from) / "config.yaml").is_file():
            raise ValueError(f"{init_from!r} is not a run folder (it has no config.yaml)")
        return init_from


def resolve(config: TrainConfig) -> TrainConfig:
    """The configuration with everything in it that makes the run what it is; its digest names the run folder."""
    return config.model_copy(update={"plugin_digests": {plugin: plugin_digest(plugin) for plugin in config.plugins}})


def check_vocabulary(model: int, tokenizer: int) -> None:
    """Raises ValueError where a model has no row for some tokens. More rows than tokens are padding, and fine."""
    if model < tokenizer:
        raise ValueError(
            f"vocab_size {model} is below the tokenizer's {tokenizer} tokens; set model.vocab_size={tokenizer}"
        )
