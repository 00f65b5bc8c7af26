"""The class of an image: `objective: images`.

The model is an `ImageClassifier`. The loss is the cross-entropy in nats per image, with label smoothing if
`augment.smoothing` says so, and with mixed labels under MixUp and CutMix; validation reports the loss of the true label
and the share of images whose most likely class is right.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor, nn

from linnet.config import ConfigError
from linnet.data.labelled import HeldOut
from linnet.data.problems import in_data, problems_of
from linnet.models import flops_exact
from linnet.runs.folder import CLASSES
from linnet.train.config import EVALUATIONS, RunConfig, TrainingConfig
from linnet.train.objective import Batch, Loss, Show
from linnet.train.objectives.labelled import LabelledObjective
from linnet.vision.config import VisionConfig
from linnet.vision.data import (
    AugmentConfig,
    ImageBatches,
    ImageCorpus,
    ImageDataConfig,
    augment_batch,
    check_images,
    image_content,
    prepare_images,
)
from linnet.vision.data.batches import check_deit
from linnet.vision.data.corpus import DECODED
from linnet.vision.train.evaluations import ImageEvaluation, ImageSubject

if TYPE_CHECKING:
    from linnet.parallel.mesh import Mesh

SCORED = 256
"""Least number of held-out images per forward pass."""


class ImageRunConfig(RunConfig):
    """How a training on images is executed."""

    workers: int = Field(
        0, ge=0, description="processes that decode and augment images; 0: the training process. Batches are the same"
    )


def _kind(augment: Any) -> Any:
    return {"kind": augment} if isinstance(augment, str) else augment


def none_given(evaluations: list) -> bool:
    """Returns whether configurations are stored without `evaluations`, a key that not every release wrote."""
    return not evaluations


class ImageTraining(TrainingConfig):
    """The training of a model on images. Its subclasses and this class have one objective each."""

    objective: Literal["images"] = Field("images", description="the training objective: `images`, the class of each")
    data: ImageDataConfig = Field(ImageDataConfig(), description="the images and their labels")
    model: VisionConfig = Field(description="a recipe's name, a recipe with changes, or a layout with `image_size` ...")
    batch_size: int = Field(64, ge=1, le=1 << 40, description="images per step, over all its `accumulation` parts")
    run: ImageRunConfig = Field(
        ImageRunConfig(), description="how the training is executed; not part of the run's identity"
    )
    augment: Annotated[AugmentConfig, BeforeValidator(_kind, json_schema_input_type=AugmentConfig | str)] = Field(
        AugmentConfig(), description="random changes of training images; a name is short for {kind: name}"
    )
    evaluate_images: int | None = Field(
        None, ge=1, description="held-out images that a validation scores, spread evenly over them; null: all"
    )

    evaluations: list[ImageEvaluation] = Field([], exclude_if=none_given, description=EVALUATIONS)

    @field_validator("augment")
    @classmethod
    def _in_pairs(cls, augment: AugmentConfig, info: Any) -> AugmentConfig:
        if "batch_size" not in info.data:
            return augment
        size, accumulation = info.data["batch_size"], info.data.get("accumulation", 1)
        if problems := augment.problems(size):
            raise ValueError("; ".join(problems))
        if info.data.get("batch_ramp") is not None and augment.problems(size // accumulation):
            raise ValueError(
                f"the first batch of batch_ramp, batch_size / accumulation = {size // accumulation} images, cannot be "
                "mixed in pairs; use an accumulation with which it is even, or leave batch_ramp out"
            )
        return augment


class ImageObjective(LabelledObjective):
    """Trains an image classifier on a corpus of images with labels."""

    Config = ImageTraining
    name, units, loss_unit = "images", "images", "nats per image"
    config: ImageTraining
    data: ImageCorpus

    @classmethod
    def read(
        cls, config: ImageTraining, cache: str | Path, show: Callable[[str, int, int], None] | None = None
    ) -> ImageCorpus:
        problems, where = given_problems(config) + cls.missing(config), "train"
        try:
            if not problems:
                return prepare_images(config.data, cache, show)
            check_images(config.data, cache, DECODED)
        except ConfigError as error:
            problems, where = problems + [in_data(line, ImageDataConfig) for line in error.problems], error.where
        raise ConfigError(problems, where)

    @classmethod
    def subject(cls, config: ImageTraining, data: ImageCorpus | None, device: torch.device) -> ImageSubject:
        return ImageSubject(config.model, device, config.precision, config.data, data)

    @classmethod
    def missing(cls, config: ImageTraining) -> list[str]:
        """Returns what the training needs beside its images and is not installed."""
        return check_deit(config.model.channels) if config.augment.kind == "deit" else []

    @classmethod
    def content(cls, config: ImageTraining, cache: str | Path | None = None) -> dict[str, str]:
        return image_content(config.data, cache)

    @classmethod
    def source_problems(cls, values: Mapping[str, Any], cache: str | Path, told: Sequence[str]) -> list[str]:
        def check(config: ImageDataConfig) -> None:
            check_images(config, cache, DECODED)

        return problems_of(ImageDataConfig, values.get("data", {}), check, told)

    @classmethod
    def row_tokens(cls, config: ImageTraining) -> int:
        model = config.model
        return (model.image_size // model.patch) ** 2 + (model.pool == "cls")

    @classmethod
    def step_flops(cls, config: ImageTraining) -> float:
        return flops_exact(config.model, cls.row_tokens(config), config.batch_size)

    @classmethod
    def describe_model(cls, config: ImageTraining) -> str:
        model = config.model
        size = f"{model.image_size} x {model.image_size} x {model.channels}"
        return f"images {size} in {cls.row_tokens(config):,} tokens, {model.classes:,} classes"

    @classmethod
    def data_problems(cls, config: ImageTraining, data: ImageCorpus) -> list[str]:
        """Returns why images do not fit the model: their side, channels or classes; or none is there to score."""
        model, problems = config.model, image_problems(config.model, data)
        if model.classes != len(data.classes):
            problems.append(
                f"model.classes: {model.classes}, but the images have {len(data.classes)} classes; set "
                f"model.classes={len(data.classes)}"
            )
        if config.augment.kind == "deit":
            problems += check_deit(data.channels)
        if not len(data.validation):
            problems.append("data: has no held-out images; give data.validation or data.validation_fraction")
        return problems

    @classmethod
    def parallel_problems(cls, config: ImageTraining, count: int) -> list[str]:
        problems = super().parallel_problems(config, count)
        if problems:
            return problems
        ranks, augment = config.parallel.degrees(count).dp, config.augment
        return augment.problems(config.batch_size, ranks) or augment.problems(config.smallest_batch, ranks)

    def loss(self, model: nn.Module) -> Loss:
        smoothing = self.config.augment.smoothing

        def loss(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            # Labels that were mixed are smoothed already.
            return model.loss(images, labels, 0.0 if labels.is_floating_point() else smoothing)

        return loss

    def batches(self) -> ImageBatches:
        config = self.config
        return ImageBatches(
            self.data.train, config.batch_sizes, config.seed, config.augment, workers=config.run.workers
        )

    def augment(self, batch: Batch, position: int, rank: int = 0, world: int = 1) -> Batch:
        config = self.config
        return augment_batch(
            config.augment,
            (batch[0], batch[1]),
            classes=config.model.classes,
            seed=config.seed,
            position=position,
            rank=rank,
            world=world,
            batch_size=config.batch_sizes.rows(position),
        )

    def validate(
        self,
        model: nn.Module,
        autocast: contextlib.AbstractContextManager,
        show: Show | None = None,
        mesh: "Mesh | None" = None,
    ) -> dict[str, float]:
        loss, accuracy, count = self.score(model, model, self.held_out(mesh), autocast, show, mesh)
        return {"validation_loss": loss, "validation_accuracy": accuracy, "validation_images": count}

    def held_out(self, mesh: "Mesh | None" = None) -> HeldOut:
        """Returns the images that a validation scores, as many per forward pass as `scored_rows` says."""
        split, rows = self.data.validation, scored_rows(self.config, 1 if mesh is None else mesh.dp)
        return HeldOut(split, rows, split.spread(self.config.evaluate_images))

    def files(self) -> dict[str, str]:
        return {CLASSES: json.dumps(self.data.classes, ensure_ascii=False) + "\n"}

    def meta(self) -> dict[str, Any]:
        return {"data": self.data.digest, "classes": len(self.data.classes)}


def scored_rows(config: TrainingConfig, ranks: int = 1) -> int:
    """Returns the images per forward pass in validation: those of a micro-batch, but at least `SCORED`.

    Args:
        ranks: number of ranks that read different images.
    """
    return max(-(-config.batch_size // (config.parts * ranks)), SCORED)


def given_problems(config: ImageTraining) -> list[str]:
    """Returns what contradicts itself, whatever the images are: found before they are decoded."""
    model, data, problems = config.model, config.data, []
    if data.kind == "images" and data.size not in (None, model.image_size):
        problems.append(
            f"model.image_size: {model.image_size}, but data.size is {data.size}; set model.image_size={data.size}, or "
            f"data.size={model.image_size}"
        )
    channels = {"grey": 1, "rgb": 3}.get(data.convert or "")
    if data.kind == "images" and channels not in (None, model.channels):
        problems.append(
            f"model.channels: {model.channels}, but data.convert is {data.convert}; set model.channels={channels}, or "
            "another data.convert"
        )
    if data.classes is not None and len(data.classes) != model.classes:
        problems.append(
            f"model.classes: {model.classes}, but data.classes names {len(data.classes)}; set "
            f"model.classes={len(data.classes)}, or name others"
        )
    if config.augment.kind == "crop_flip" and config.augment.padding >= model.image_size:
        problems.append(
            f"augment.padding: {config.augment.padding} moves images of {model.image_size} pixels out of sight; use at "
            f"most {model.image_size - 1}"
        )
    return problems


def image_problems(model: Any, data: ImageCorpus) -> list[str]:
    """Returns why images cannot be the input of a model with `image_size` and `channels`."""
    problems = []
    fixed = data.metadata["kind"] == "latents"  # these are neither resized nor converted
    if model.image_size != data.side:
        resize = "" if fixed else f", or data.size={model.image_size} to resize them"
        problems.append(
            f"model.image_size: {model.image_size}, but the images are {data.side} x {data.side}; set "
            f"model.image_size={data.side}{resize}"
        )
    if model.channels != data.channels:
        fix = {1: "grey", 3: "rgb"}.get(model.channels)
        convert = f", or data.convert={fix}" if fix and not fixed else ""
        problems.append(
            f"model.channels: {model.channels}, but the images have {data.channels}; set "
            f"model.channels={data.channels}{convert}"
        )
    return problems
