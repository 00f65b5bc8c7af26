"""Scores the samples of a denoiser: distances to real images, the share of the asked class, and memorised images."""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from linnet.config import ConfigError, gather, unwritable
from linnet.data.images.png import check_png, encode_png, picture_grid
from linnet.evaluate.results import Evaluation, Item, Result, digest_of
from linnet.evaluate.session import Evaluator, Progress, Session, no_progress
from linnet.evaluate.vision.classification import wilson
from linnet.evaluate.vision.data import open_training_images
from linnet.evaluate.vision.features import Extractor, Network, features_of, find_extractor
from linnet.evaluate.vision.frechet import frechet_distance, kernel_distance, memorised_share, statistics
from linnet.inference.sampler import ImageSampler, SampleConfig, latent_scale, spread
from linnet.models.vision.denoiser import Denoiser
from linnet.runs import RunFolder

TASK = "samples"
SHOWN = 64  # samples of which a record keeps a picture


@dataclass
class SampleEvaluator(Evaluator):
    """Draws images from a denoiser and compares them with the images that it was trained on.

    Attributes:
        extractor: see `linnet.evaluate.vision.features.find_extractor`.
        count: images to draw; classes take turns.
        settings: how they are drawn.
        classifier: run of a classifier that says which class a sample has; None takes the extractor, if it can.
        batch: images per forward pass of the denoiser.
        cache: folder of prepared images.
    """

    kind: ClassVar[str] = "samples"
    kinds: ClassVar[tuple[str, ...]] = ("denoiser",)
    needs_text: ClassVar[bool] = False

    extractor: str
    count: int = 1000
    settings: SampleConfig = field(default_factory=SampleConfig)
    classifier: str | None = None
    batch: int = 64
    cache: Path = Path("runs/cache")
    allow_plugins: bool = False
    _networks: dict[str, Network] = field(default_factory=dict, init=False, repr=False)
    _extractor: Any = field(default=None, init=False, repr=False)
    _classifier: Any = field(default=None, init=False, repr=False)
    _corpus: Any = field(default=None, init=False, repr=False)

    def check(self) -> None:
        problems = [] if self.count >= 2 else [f"samples: {self.count} have no covariance; use at least 2"]
        for key in ("extractor", "classifier"):
            if (given := getattr(self, key)) is not None:
                with gather(problems):
                    self._networks[key] = find_extractor(given, allow_plugins=self.allow_plugins, key=key)
        if problems:
            raise ConfigError(problems, "evaluate")

    def check_config(self, folder: RunFolder, model: Any) -> None:
        problems = self.settings.check(model, range(model.classes))
        values = folder.config.get("data") or {}
        if latent_scale(folder.config) is not None:
            problems.append(
                f"{folder.path}: its samples are latents, and extractors read images; decode the latents.npz of "
                "linnet sample with their encoder, and measure the images with torch-fidelity"
            )
        if not values:
            problems.append(f"{folder.path}: does not say what it was trained on; use the run, not a converted folder")
        for key, network in self._networks.items():
            problems += [f"{key}: {line}" for line in network.problems(model.channels, model.image_size)]
        classifier = self._networks.get("classifier")
        if classifier is not None and classifier.classes != model.classes:
            problems.append(
                f"classifier: {self.classifier} does not have the {model.classes} classes of the denoiser; use the run "
                "of a classifier of the same images"
            )
        if model.channels in (1, 3):  # then a record has a picture
            with gather(problems):
                check_png()
        if not self.cache.is_dir() and (reason := unwritable(self.cache)):  # one that has the images may be read-only
            problems.append(f"cache: {self.cache} {reason}; choose another folder")
        if problems:
            raise ConfigError(problems, "evaluate")

    def check_model(self, session: Session) -> None:
        folder, device = RunFolder.open(session.path), next(session.model.parameters()).device
        opened: dict[str, Extractor] = {}
        problems: list[str] = []
        for key, network in self._networks.items():
            with gather(problems):
                opened[key] = network.open(device)
        if not problems:
            with gather(problems):
                self._corpus = open_training_images(folder, self.cache)
        if problems:
            raise ConfigError(problems, "evaluate")
        own = self._extractor = opened["extractor"]
        fits = own.classify is not None and own.classes == session.model.config.classes
        self._classifier = opened.get("classifier", own if fits else None)

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        corpus, extractor = self._corpus, self._extractor
        with progress("real images", len(corpus.train) + len(corpus.validation)) as meter:
            train, held_out = (
                features_of(extractor, split, corpus.digest, self.cache, meter)
                for split in (corpus.train, corpus.validation)
            )
        with progress("samples", self.count) as meter:
            drawn = draw(session.model, self.settings, self.count, extractor, self._classifier, self.batch, meter)
        own = statistics([drawn.features])
        kernel = kernel_distance(drawn.features, train.features)
        floor = frechet_distance(held_out.statistics, train.statistics)
        results = [
            Result(TASK, extractor.distance, frechet_distance(own, train.statistics), better="lower", n=self.count),
            Result(TASK, extractor.kernel, kernel.value, better="lower", n=self.count),
        ]
        if drawn.right is not None:
            items = (Item(str(i), float(right)) for i, right in enumerate(drawn.right.tolist()))
            results.append(Result.of_items(TASK, "asked_class", items))
        share = memorised_share(drawn.features, held_out.features, train.features)
        results.append(Result(TASK, "memorised", share, better="lower", n=self.count))
        about = self._classifier
        asked = self.settings.model_dump() | {
            "steps": self.settings.number_of_steps,
            "samples": self.count,
            "extractor": extractor.name,
            "classifier": None if about is None else about.name,
            "precision": session.precision,
        }
        detail = {
            "corpus": corpus.digest,
            "extractor_digest": extractor.digest,
            "real": {"images": len(corpus.train), "held_out": len(corpus.validation), extractor.distance: floor},
            "kernel_error": kernel.error,
            "wilson": None if drawn.right is None else list(wilson(int(drawn.right.sum()), self.count)),
            "classes": corpus.classes,
            "samples_per_second": self.count / drawn.seconds,
            "png": base64.b64encode(encode_png(drawn.picture)).decode() if len(drawn.picture) in (1, 3) else None,
            "shown": [[TASK, result.metric] for result in results],
            "chance": [[TASK, "asked_class", 1 / len(corpus.classes)]] if drawn.right is not None else [],
        }
        classifier = "" if about is None else about.digest
        scored = digest_of([corpus.digest, extractor.digest, classifier])
        return Evaluation(self.kind, session.about, asked, tuple(results), detail, scored)


@dataclass(frozen=True)
class Drawn:
    """Samples, as far as they are kept.

    Attributes:
        features: [n, D]. right: whether the classifier gives each the asked class, bool [n], or None.
        picture: the first of them, uint8 [C, ...]. seconds: spent on drawing.
    """

    features: Tensor
    right: Tensor | None
    picture: np.ndarray
    seconds: float


def draw(
    model: Denoiser,
    settings: SampleConfig,
    count: int,
    extractor: Extractor,
    classifier: Extractor | None,
    batch: int,
    meter: Callable[[int], object],
) -> Drawn:
    """Draws samples of all classes in turn, and keeps their features."""
    classes = spread(range(model.config.classes), count)
    features, right, shown, seconds = [], [], [], 0.0
    began = time.perf_counter()
    for images in ImageSampler(model).draw(classes, settings, batch=batch):
        seconds += time.perf_counter() - began
        asked = torch.tensor(classes[len(features) * batch :][: len(images)], device=images.device)
        features.append(extractor.features(images).cpu())
        if classifier is not None:
            right.append((classifier.classify(images).argmax(-1) == asked).cpu())
        if len(shown) * batch < SHOWN:
            shown.append(images.cpu())
        meter(len(images))
        began = time.perf_counter()
    first = torch.cat(shown)[:SHOWN]
    picture = picture_grid(first.numpy(), max(1, round(sqrt(len(first)))))
    return Drawn(torch.cat(features), torch.cat(right) if right else None, picture, seconds)
