"""Evaluations of image classifiers during training: accuracy on further images with labels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from linnet.config import ConfigError, checking, gather
from linnet.data.images.config import Sources
from linnet.data.images.sources import ImageSource
from linnet.train.suites import Evaluation, Found, Measure, Subject
from linnet.vision.data import ImageCorpus, ImageDataConfig, prepare_images, read_sources
from linnet.vision.evaluate.data import further_images, further_problems, misfits, prepare_further
from linnet.vision.evaluate.features import Network
from linnet.vision.evaluate.images import score_images
from linnet.vision.evaluate.samples import LATENTS, find_networks, network_problems, open_networks, score_samples
from linnet.vision.latents import AutoencoderFolder, encoded_images, find_decoder
from linnet.vision.models.classifier import ImageClassifier
from linnet.vision.models.denoiser import Denoiser
from linnet.vision.sampler import ImageSampler, SampleConfig, spread


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
            corpus = prepare_further(data, subject.cache)
        except ConfigError as error:
            raise ConfigError(further_problems(error)) from None
        with checking() as problems:
            problems += [f"source: {line}" for line in misfits(corpus, subject.model, names)]

        def measure(model: ImageClassifier) -> Found:
            with subject.autocast():
                score = score_images(model, corpus.validation, names, mistakes=0, most=self.most_images)
            values = {one.metric: one.value for one in score.results()}
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
                f"source: {one.path}{f' ({one.part})' if one.part else ''} is trained on (data.source); use other "
                "images, or another split"
                for one in read_sources(data, whole=True)
                if any(one.shares(other) for other in trained)
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
    autoencoder: str | None = Field(None, exclude_if=lambda given: given is None)

    def check(self, subject: ImageSubject) -> None:
        """Raises ConfigError for settings that the model does not have, latents, and networks that do not fit."""
        self._find(subject)

    def prepare(self, subject: ImageSubject) -> Measure:
        """Raises ConfigError as `check` does, and where there are too few real images."""
        corpus, cache = subject.prepared, subject.cache
        found, decoder = self._find(subject)
        with checking() as problems:
            if decoder is not None:
                corpus = prepare_images(encoded_images(subject.data), cache)
            problems += [
                f"data: {split.name} has {len(split)} images; distances need at least 2"
                for split in (corpus.train, corpus.validation)
                if len(split) < 2
            ]
            networks = open_networks(found, subject.model, subject.device)
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
