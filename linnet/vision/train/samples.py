"""Evaluations of denoisers during training: distances of samples to real images."""

from typing import Literal

from pydantic import Field

from linnet.config import checking, gather
from linnet.train.suites import Evaluation, Found, Measure
from linnet.vision.data import prepare_images
from linnet.vision.evaluate.features import Network
from linnet.vision.evaluate.samples import LATENTS, find_networks, network_problems, open_networks, score_samples
from linnet.vision.latents import AutoencoderFolder, encoded_images, find_decoder
from linnet.vision.models.denoiser import Denoiser
from linnet.vision.sampler import ImageSampler, SampleConfig, spread
from linnet.vision.train.evaluations import ImageSubject


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
