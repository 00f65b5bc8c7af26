"""Objectives on images, and their evaluations during training."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator
from torch import Tensor, nn

from linnet.config import ConfigError, Factor, checking, gather, in_full
from linnet.data.images import Sources
from linnet.data.images.decode import check_png, encode_png, picture_grid
from linnet.data.images.sources import ImageSource
from linnet.data.labelled import HeldOut
from linnet.data.problems import in_data, problems_of
from linnet.evaluate.likelihood import evaluating
from linnet.models import flops_exact
from linnet.parallel.mesh import Mesh
from linnet.runs.folder import CLASSES
from linnet.train.config import EVALUATIONS, RunConfig, TrainingConfig
from linnet.train.objective import Autocast, Batch, Loss, Preparing, Show
from linnet.train.objectives.labelled import LabelledObjective, sum_over_batches
from linnet.train.optimizer import AverageConfig
from linnet.train.suites import Evaluation, Found, Measure, Subject
from linnet.vision.config import DenoiserConfig, VisionConfig
from linnet.vision.data import (
    AugmentConfig,
    ImageBatches,
    ImageCorpus,
    ImageDataConfig,
    augment_batch,
    check_images,
    image_content,
    prepare_images,
    read_sources,
)
from linnet.vision.data.batches import check_deit
from linnet.vision.data.corpus import DECODED
from linnet.vision.evaluate import further_images, further_problems, misfits, prepare_further
from linnet.vision.evaluate.features import Network
from linnet.vision.evaluate.images import score_images
from linnet.vision.evaluate.samples import LATENTS, find_networks, network_problems, open_networks, score_samples
from linnet.vision.latents import AutoencoderFolder, encoded_images, find_decoder, scale_problems
from linnet.vision.models import Denoiser, ImageClassifier
from linnet.vision.models.diffusion import STEPS, Diffusion, NoiseStream, from_pixels, seed_of
from linnet.vision.sampler import LATENT_SCALE, ImageSampler, SampleConfig, spread

# Evaluations of image classifiers during training: accuracy on further images with labels.


@dataclass(frozen=True)
class ImageSubject(Subject):
    """A model of images.

    Attributes:
        model: a VisionConfig or a DenoiserConfig.
        data: the configuration of the training images.
        corpus: these images; None before they are prepared.
        latent_scale: factor of latents; None for pixels.
    """

    model: Any
    data: ImageDataConfig
    corpus: ImageCorpus | None
    latent_scale: float | None = None

    @property
    def complete(self) -> bool:
        return self.corpus is not None

    @property
    def prepared(self) -> ImageCorpus:
        """The training images of a `complete` subject."""
        assert self.corpus is not None
        return self.corpus

    @property
    def cache(self) -> Path:
        """The folder of prepared images."""
        return self.prepared.folder.parent


class ImageEvaluation(Evaluation):
    """Accuracy on further images of the same classes (docs/vision.md); figures show the accuracy and the loss.

    Attributes:
        kind: images: accuracy on further images.
        source: as `data.source`; none of the images may be trained on. Default: `data.source` itself, if it has parts.
        split: the part of the source to score, if it has parts; null: test, or else validation.
        most_images: score only this many images, spread evenly, to save time; null: all.
    """

    kind: Literal["images"]
    source: Sources = []
    split: str | None = None
    most_images: int | None = Field(10_000, ge=1)

    def check(self, subject: ImageSubject) -> None:
        """Raises ConfigError for sources that are not there, or that are trained on."""
        self._data(subject)

    def prepare(self, subject: ImageSubject) -> Measure:
        """Raises ConfigError as `check` does, for images that cannot be read, and for other channels or classes."""
        data, names = self._data(subject), subject.prepared.classes
        try:
            corpus = prepare_further(data, subject.cache, None if subject.data.classes else "data.classes")
        except ConfigError as error:
            raise ConfigError(further_problems(error)) from None
        with checking() as problems:
            problems += [f"source: {line}" for line in misfits(corpus, subject.model, names)]

        def measure(model: ImageClassifier) -> Found:
            with subject.autocast():
                score = score_images(model, corpus.validation, names, mistakes=0, most=self.most_images)
            values = {result.metric: result.value for result in score.results()}
            chance = {name: value for _, name, value in score.detail()["chance"]}
            metrics = {name: values[name] for name in chance} | {"loss": values["nll"]}
            return Found(metrics, ("accuracy", "loss"), chance, score.images)

        return measure

    def _data(self, subject: ImageSubject) -> ImageDataConfig:
        names = None if subject.corpus is None else subject.corpus.classes
        values = subject.data.model_dump()
        data = further_images(self.source or subject.data.source, self.split, values, subject.model, names)
        trained: list[ImageSource] = []
        try:
            trained = read_sources(subject.data)
        except ConfigError:  # the objective reports the problems of its own data
            if not self.source:
                return data
        with checking() as problems:
            problems += [
                f"source: {source.path}{f' ({source.part})' if source.part else ''} is trained on (data.source); use "
                "other images, or another split"
                for source in read_sources(data, whole=True)
                if any(source.shares(other) for other in trained)
            ]
        return data


# Evaluations of denoisers during training: distances of samples to real images.


class SampleEvaluation(Evaluation, SampleConfig):
    """Distances of samples to the training images (docs/diffusion.md), in the features of a network; figures show the
    Fréchet and the kernel distance, and the share of samples of the asked class where a classifier can tell it.

    Attributes:
        kind: samples: distances of samples to real images.
        extractor: the network: the run of a classifier, `efficientnet-lite0`, or a file of weights.
        classifier: run of a classifier that says which class a sample has; null: the extractor, if it can.
        number: samples to draw. Distances fall with it, so compare equal numbers only.
        classes: classes of the samples, which take turns; null: all.
        batch: samples per forward pass.
        autoencoder: of latents: folder of the AutoencoderKL of diffusers that encoded them; samples are compared with
            the encoded images.
    """

    kind: Literal["samples"]
    extractor: str
    classifier: str | None = None
    number: int = Field(500, ge=2)
    classes: list[int] | None = Field(None, min_length=1)
    batch: int = Field(64, ge=1)
    autoencoder: str | None = Field(None, exclude_if=lambda path: path is None)

    def check(self, subject: ImageSubject) -> None:
        """Raises ConfigError for settings that the model does not have, latents, and networks that do not fit."""
        self._find(subject)

    def prepare(self, subject: ImageSubject) -> Measure:
        """Raises ConfigError as `check` does, and where there are too few real images."""
        corpus, cache = subject.prepared, subject.cache
        unopened, decoder = self._find(subject)
        with checking() as problems:
            if decoder is not None:
                corpus = prepare_images(encoded_images(subject.data), cache)
            problems += [
                f"data: {split.name} has {len(split)} images; distances need at least 2"
                for split in (corpus.train, corpus.validation)
                if len(split) < 2
            ]
            networks = open_networks(unopened, corpus.classes, subject.device)
            opened = None if decoder is None else decoder.open(subject.device, subject.data.source)

        def measure(model: Denoiser) -> Found:
            # No CUDA graph: the memory is the training's.
            sampler = ImageSampler(
                model, subject.latent_scale, precision=subject.precision, graphs=False, autoencoder=opened
            )
            classes = spread(self._classes(subject), self.number)
            score = score_samples(sampler, self, classes, networks, corpus, cache, self.batch)
            distance, kernel = networks.extractor.distance, networks.extractor.kernel
            metrics = {distance: score.distance, kernel: score.kernel.value, "memorised": score.memorised}
            metrics |= {} if score.coverage is None else score.coverage._asdict()
            if score.right is None:
                return Found(metrics, (distance, kernel))
            metrics["asked_class"] = score.right.double().mean().item()
            chance = {"asked_class": 1 / subject.model.classes}
            return Found(metrics, (distance, kernel, "asked_class"), chance, self.number)

        return measure

    def _classes(self, subject: ImageSubject) -> list[int]:
        return self.classes if self.classes is not None else list(range(subject.model.classes))

    def _find(self, subject: ImageSubject) -> tuple[dict[str, Network], AutoencoderFolder | None]:
        with checking() as problems:
            problems += self.problems(subject.model, self._classes(subject))
            latents = subject.data.kind == "latents"
            decoder = find_decoder(self.autoencoder, latents, subject.model, problems)
            if latents and self.autoencoder is None:
                problems.append(f"data.kind: latents: {LATENTS}")
            elif latents:
                with gather(problems):
                    encoded_images(subject.data)
            networks = find_networks(self.extractor, self.classifier, problems)
            problems += network_problems(networks, subject.model, decoder)
        return networks, decoder


# The class of an image: `objective: images`.
#
# The model is an `ImageClassifier`. The loss is the cross-entropy in nats per image, with label smoothing if
# `augment.smoothing` says so, and with mixed labels under MixUp and CutMix; validation reports the loss of the true
# label and the share of images whose most likely class is right.


SCORED = 256
"""Least number of held-out images per forward pass."""


class ImageRunConfig(RunConfig):
    """How a training on images is executed."""

    workers: int = Field(
        0, ge=0, description="processes that decode and augment images; 0: the training process. Batches are the same"
    )


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
    augment: Annotated[
        AugmentConfig, BeforeValidator(partial(in_full, "augment"), json_schema_input_type=AugmentConfig | str)
    ] = Field(AugmentConfig(), description="random changes of training images; a name is short for {kind: name}")
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
    def read(cls, config: ImageTraining, cache: str | Path, show: Preparing | None = None) -> ImageCorpus:
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
        return ImageSubject(config.model, device, config.autocast_precision, config.data, data)

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
        self, model: nn.Module, autocast: Autocast, show: Show | None = None, mesh: Mesh | None = None
    ) -> dict[str, float]:
        loss, accuracy, count = self.score(model, model, self.held_out(mesh), autocast, show, mesh)
        return {"validation_loss": loss, "validation_accuracy": accuracy, "validation_images": count}

    def held_out(self, mesh: Mesh | None = None) -> HeldOut:
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


# The noise in an image: `objective: diffusion`.
#
# The model is a `Denoiser`. Each image gets a random time step and random noise, and the loss is the mean squared
# error of the predicted noise plus, with `model.learn_sigma`, the variational bound of the variance in bits
# (`linnet.vision.models.diffusion.Diffusion.losses`). Held-out images get the same steps and the same noise in each
# validation of each run, so that small differences between models show after minutes.


BINS = 4
"""Ranges of time steps whose held-out loss is reported apart."""
PICTURED = 10
"""Most classes of which pictures show samples."""
GUIDANCE = 2.0
"""Guidance of these samples, if the model is trained for it."""
_GOLDEN = 0.6180339887498949  # fractional part of the golden ratio: its multiples cover time steps evenly


class DiffusionRunConfig(ImageRunConfig):
    """How the training of a denoiser is executed."""

    pictures: int = Field(
        8,
        ge=0,
        le=64,
        description=f"samples of each class (of at most {PICTURED}) that are drawn with each validation; 0: none",
    )


class DiffusionTraining(ImageTraining):
    """The training of a denoiser."""

    # Other types than in the base, which is the class of an objective of its own.
    objective: Literal["diffusion"] = Field(  # type: ignore[assignment]
        "diffusion", description="the training objective: `diffusion`, the noise in an image"
    )
    model: DenoiserConfig = Field(  # type: ignore[assignment]
        description="a recipe's name, a recipe with changes, or a layout with its images"
    )
    run: DiffusionRunConfig = Field(
        DiffusionRunConfig(), description="how the training is executed; not part of the run's identity"
    )
    average: AverageConfig | None = Field(
        AverageConfig(decay=0.9999, warmup=True),
        description="moving average of the weights, which is sampled from; null: none",
    )
    latent_scale: Factor = Field(
        LATENT_SCALE, description="factor of latents (data.kind: latents), to about unit variance"
    )
    evaluate_draws: int = Field(
        1, ge=1, le=1000, description="time steps and noises for each held-out image in a validation"
    )

    evaluations: list[SampleEvaluation] = Field(  # type: ignore[assignment]
        [], exclude_if=none_given, description=EVALUATIONS
    )

    @model_validator(mode="after")
    def _scale_of_latents(self) -> Self:
        if self.data.kind == "images" and self.latent_scale != LATENT_SCALE:  # the default, which is always saved
            raise ValueError(f"latent_scale: {self.latent_scale:g} has no effect with data.kind: images; leave it out")
        return self

    @field_validator("augment")
    @classmethod
    def _only_flips(cls, augment: AugmentConfig, info: Any) -> AugmentConfig:
        if augment.kind not in ("none", "flip") or augment.mixes or augment.smoothing:
            raise ValueError("a denoiser learns images as they are; use none or flip, without mixup, cutmix, smoothing")
        if augment.kind == "flip" and "data" in info.data and info.data["data"].kind == "latents":
            raise ValueError(
                "flip: mirrored latents are not the latents of mirrored images; encode the mirrored images too, and "
                "use augment: none"
            )
        return augment


class DiffusionObjective(ImageObjective):
    """Trains a denoiser on a corpus of images, or of latents, with classes."""

    Config = DiffusionTraining  # type: ignore[assignment]
    name, units, loss_unit = "diffusion", "images", "squared error + bits"
    SCORES: ClassVar = {"mse": "squared error of the noise"}
    config: DiffusionTraining

    @classmethod
    def row_tokens(cls, config: DiffusionTraining) -> int:  # type: ignore[override]
        model = config.model
        return (model.image_size // model.patch) ** 2 + (2 if model.conditioning == "tokens" else 0)

    @classmethod
    def missing(cls, config: DiffusionTraining) -> list[str]:  # type: ignore[override]
        problems: list[str] = []
        if config.data.kind == "latents":
            return scale_problems(config.data.source, config.latent_scale)
        if config.run.pictures:
            with gather(problems):
                check_png()
        return [f"{line}, or set run.pictures=0" for line in problems]

    @classmethod
    def subject(cls, config: DiffusionTraining, data: ImageCorpus | None, device: torch.device) -> ImageSubject:  # type: ignore[override]
        scale = config.latent_scale if config.data.kind == "latents" else None
        return dataclasses.replace(super().subject(config, data, device), latent_scale=scale)

    @property
    def latent_scale(self) -> float | None:
        """Factor of latents; None for pixels."""
        return self.config.latent_scale if self.config.data.kind == "latents" else None

    def loss(self, model: nn.Module) -> Loss:
        process = Diffusion()

        def loss(images: Tensor, t: Tensor, noise: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
            square, bound = _losses(model, process, images, t, noise, classes)
            return (square + bound).sum(), torch.full((), len(t), dtype=torch.int64, device=t.device)

        return loss

    def augment(self, batch: Batch, position: int, rank: int = 0, world: int = 1) -> Batch:
        """Returns images in [-1, 1] (or scaled latents), time steps, noise, and classes, some of them dropped.

        The numbers of the global batch come from one generator of (seed, position), which lies on the device: a GPU
        draws other numbers than a CPU.
        """
        config = self.config
        images, labels = super().augment(batch, position, rank, world)
        images = scaled(images, self.latent_scale)
        device, rows = images.device, config.batch_sizes.rows(position)
        share = slice(*config.batch_sizes.share(position, rank, world))
        generator = torch.Generator(device).manual_seed(seed_of(f"{config.seed}/diffusion/{position}"))
        t = torch.randint(STEPS, (rows,), generator=generator, device=device)
        dropped = torch.rand(rows, generator=generator, device=device) < config.model.class_drop
        noise = torch.randn(rows, *images.shape[1:], generator=generator, device=device)
        classes = torch.where(dropped[share], config.model.classes, labels)
        return images, t[share], noise[share], classes

    def validate(
        self, model: nn.Module, autocast: Autocast, show: Show | None = None, mesh: Mesh | None = None
    ) -> dict[str, float]:
        """Scores held-out images; the row has the loss of each quarter of time steps besides that of all.

        `validation_loss_t250` is the loss of steps 250 to 499, and so on.
        """
        process, width = Diffusion(), STEPS // BINS

        def measure(images: Tensor, labels: Tensor, t: Tensor, noise: Tensor) -> Tensor:
            images = scaled(images, self.latent_scale)
            square, bound = _losses(model, process, images, t, noise, labels)
            inside = torch.nn.functional.one_hot(t // width, BINS).to(square.dtype)
            losses = ((square + bound)[:, None] * inside).sum(0)  # no product of matrices: autocast would round it
            return torch.cat([square.sum()[None], losses, inside.sum(0)])

        draws = self.config.evaluate_draws
        batches = NoisyHeldOut(self.held_out(mesh), draws)
        square, *numbers = sum_over_batches(model, batches, batches.size, measure, autocast, show, mesh).tolist()
        losses, counts = numbers[:BINS], numbers[BINS:]
        return {
            "validation_loss": sum(losses) / sum(counts),
            "validation_mse": square / sum(counts),
            "validation_images": round(sum(counts)) // draws,
        } | {
            f"validation_loss_t{number * width}": loss / count
            for number, (loss, count) in enumerate(zip(losses, counts, strict=True))
            if count
        }

    def pictures(self, model: nn.Module, autocast: Autocast, mesh: Mesh | None = None) -> dict[str, bytes]:
        """Returns a grid of samples, one row per class, always from the same noise; none for latents."""
        config = self.config.model
        columns = self.config.run.pictures
        if not columns or self.latent_scale is not None or config.channels not in (1, 3):
            return {}
        count = min(PICTURED, config.classes)
        shown = [number * config.classes // count for number in range(count)]
        classes = [label for label in shown for _ in range(columns)]
        settings = SampleConfig(guidance=GUIDANCE if config.class_drop else 1.0)
        try:
            with evaluating(model), autocast:
                images = torch.cat(list(ImageSampler(model, graphs=False).draw(classes, settings)))
        except ConfigError:  # samples that are not finite: the validation's row shows it
            return {}
        finally:
            if mesh is not None:
                from linnet.parallel.build import settle

                settle(model)
        return {".png": encode_png(picture_grid(images.cpu().numpy(), columns))}

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        bins = {
            key.removeprefix("validation_"): value
            for key, value in validation.items()
            if key.startswith("validation_loss_t")
        }
        return {**super().result_fields(rows, validation), **bins}

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        return super().result_numbers(config) | {f"loss_t{number * STEPS // BINS}" for number in range(BINS)}


class NoisyHeldOut(Sequence[Batch]):
    """The held-out images with their classes, time steps and noise: always the same, in batches.

    Args:
        draws: how often each image is scored, each time at another step with other noise.

    Attributes:
        size: number of images, counted once for each draw.
    """

    def __init__(self, images: HeldOut, draws: int):
        self._images, self._draws = images, draws
        self.size = self._images.size * draws

    def __len__(self) -> int:
        return len(self._images) * self._draws

    def __getitem__(self, number: Any) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        draw, place = divmod(number, len(self._images))
        images, labels = self._images[place]
        samples = [(place * self._images.rows + row) * self._draws + draw for row in range(len(labels))]
        t = torch.tensor([int(STEPS * ((0.5 + sample * _GOLDEN) % 1)) for sample in samples])
        return images, labels, t, NoiseStream(0, samples, tuple(images.shape[1:])).next()


def scaled(images: Tensor, latent_scale: float | None) -> Tensor:
    """Returns the model's input of stored images: pixels in [-1, 1], or latents times a factor."""
    return from_pixels(images) if latent_scale is None else images.float() * latent_scale


def _losses(
    model: nn.Module, process: Diffusion, images: Tensor, t: Tensor, noise: Tensor, classes: Tensor
) -> tuple[Tensor, Tensor]:
    return process.losses(model(process.diffuse(images, t, noise), t, classes), images, t, noise)
