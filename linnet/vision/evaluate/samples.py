"""Scores the samples of a denoiser: distances to real images, the share of the asked class, and memorised images."""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import PrivateAttr
from torch import Tensor

from linnet.config import Config, ConfigError, checking, gather, parse, refuse, unwritable
from linnet.data.images.decode import check_png, encode_png, picture_grid
from linnet.evaluate.classification import wilson
from linnet.evaluate.results import Evaluation, Item, Result, digest_of
from linnet.evaluate.session import Evaluator, Progress, Session, no_progress
from linnet.runs import RunFolder
from linnet.vision.config import DenoiserConfig
from linnet.vision.data import ImageCorpus, ImageDataConfig
from linnet.vision.evaluate import numbered, open_training_images
from linnet.vision.evaluate.features import (
    NEIGHBOUR,
    SPLITS,
    Coverage,
    Extractor,
    KernelDistance,
    Network,
    coverage,
    features_of,
    find_extractor,
    frechet_distance,
    inception_score,
    kernel_distance,
    memorised_share,
    statistics,
)
from linnet.vision.latents import Autoencoder, AutoencoderFolder, encoded_images, find_decoder, sources_of
from linnet.vision.sampler import ImageSampler, SampleConfig, latent_scale, spread

TASK = "samples"
LATENTS = "its samples are latents, and extractors read images; name the autoencoder that encoded them in autoencoder"
SHOWN = 64  # samples of which a record keeps a picture


class SampleEvaluator(Config, Evaluator):
    """Draws images from a denoiser and compares them with the images that it was trained on.

    Latents are decoded, and compared with the images from which `linnet data latents` made those of the training.

    Attributes:
        extractor: see `linnet.vision.evaluate.features.find_extractor`.
        count: images to draw; classes take turns.
        settings: how they are drawn.
        classifier: run of a classifier that says which class a sample has; None takes the extractor, if it can.
        batch: images per forward pass of the denoiser.
        cache: folder of prepared images.
        autoencoder: folder of the autoencoder of a denoiser of latents.
    """

    kind: ClassVar[str] = "samples"
    kinds: ClassVar[tuple[str, ...]] = ("denoiser",)
    needs_text: ClassVar[bool] = False

    extractor: str
    count: int = 1000
    settings: SampleConfig = SampleConfig()
    classifier: str | None = None
    batch: int = 64
    cache: Path = Path("runs/cache")
    allow_plugins: bool = False
    autoencoder: str | None = None
    _found: dict[str, Network] = PrivateAttr(default_factory=dict)
    _decoder: AutoencoderFolder | None = PrivateAttr(None)
    _opened: Autoencoder | None = PrivateAttr(None)
    _networks: Any = PrivateAttr(None)
    _corpus: Any = PrivateAttr(None)

    def check(self) -> None:
        problems = [] if self.count >= 2 else [f"samples: {self.count} have no covariance; use at least 2"]
        self._found = find_networks(self.extractor, self.classifier, problems, self.allow_plugins)
        refuse(problems, "evaluate")

    def check_config(self, folder: RunFolder, model: Any) -> None:
        problems = self.settings.problems(model, range(model.classes))
        values = folder.config.get("data") or {}
        latents = latent_scale(folder.config) is not None
        self._decoder = find_decoder(self.autoencoder, latents, model, problems)
        if latents and self.autoencoder is None:
            problems.append(f"{folder.path}: {LATENTS}")
        elif latents:
            with gather(problems):
                encoded_images(parse(ImageDataConfig, values, f"{folder.path}/config.yaml"))
        if not values:
            problems.append(f"{folder.path}: does not say what it was trained on; use the run, not a converted folder")
        problems += network_problems(self._found, model, self._decoder)
        if model.channels in (1, 3) or self._decoder is not None:  # then a record has a picture
            with gather(problems):
                check_png()
        if not self.cache.is_dir() and (reason := unwritable(self.cache)):  # one that has the images may be read-only
            problems.append(f"cache: {self.cache} {reason}; choose another folder")
        refuse(problems, "evaluate")

    def check_model(self, session: Session) -> None:
        with checking("evaluate"):
            device = next(session.model.parameters()).device
            folder = RunFolder.open(session.path)
            if self._decoder is not None:
                self._opened = self._decoder.open(device, sources_of(folder))
            self._corpus = open_training_images(folder, self.cache)
            self._networks = open_networks(self._found, self._corpus.classes, device)

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        corpus, networks, model = self._corpus, self._networks, session.model
        scale = latent_scale(RunFolder.open(session.path).config)
        extractor, about = networks.extractor, networks.classifier
        classes = spread(range(model.config.classes), self.count)
        score = score_samples(
            ImageSampler(model, scale, autoencoder=self._opened),
            self.settings,
            classes,
            networks,
            corpus,
            self.cache,
            self.batch,
            progress,
        )
        results = [
            Result(TASK, extractor.distance, score.distance, better="lower", n=self.count),
            Result(TASK, extractor.kernel, score.kernel.value, better="lower", n=self.count),
        ]
        if score.spatial is not None:
            results.append(Result(TASK, f"s{extractor.distance}", score.spatial, better="lower", n=self.count))
        if score.inception is not None:
            results.append(Result(TASK, "inception_score", score.inception, n=self.count))
        if score.right is not None:
            items = (Item(str(i), float(right)) for i, right in enumerate(score.right.tolist()))
            results.append(Result.of_items(TASK, "asked_class", items))
        results.append(Result(TASK, "memorised", score.memorised, better="lower", n=self.count))
        if score.coverage is not None:
            results += [Result(TASK, key, value, n=self.count) for key, value in score.coverage._asdict().items()]
        asked = self.settings.model_dump() | {
            "steps": self.settings.number_of_steps,
            "samples": self.count,
            "extractor": extractor.name,
            "classifier": None if about is None else about.name,
            "precision": session.precision,
        }
        asked |= {} if self._opened is None else {"autoencoder": self._opened.digest}
        detail = {
            "corpus": corpus.digest,
            "extractor_digest": extractor.digest,
            "real": {"images": len(corpus.train), "held_out": len(corpus.validation), extractor.distance: score.floor},
            "kernel_error": score.kernel.error,
            "wilson": None if score.right is None else list(wilson(int(score.right.sum()), self.count)),
            "classes": corpus.classes,
            "samples_per_second": self.count / score.seconds,
            "png": base64.b64encode(encode_png(score.picture)).decode() if len(score.picture) in (1, 3) else None,
            "shown": [[TASK, result.metric] for result in results],
            "chance": [[TASK, "asked_class", 1 / len(corpus.classes)]] if score.right is not None else [],
        }
        classifier = "" if about is None else about.digest
        scored = digest_of([corpus.digest, extractor.digest, classifier])
        return Evaluation(self.kind, session.about, asked, tuple(results), detail, scored)


@dataclass(frozen=True)
class Networks:
    """The networks that samples are scored with.

    Attributes:
        classifier: says which class a sample has; None if no network has the classes of the denoiser.
    """

    extractor: Extractor
    classifier: Extractor | None


def find_networks(
    extractor: str, classifier: str | None, problems: list[str], allow_plugins: bool = False
) -> dict[str, Network]:
    """Finds the networks that a user names for the samples of a denoiser, without loading their weights.

    Args:
        extractor: see `linnet.vision.evaluate.features.find_extractor`.
        classifier: run of a classifier; None takes the extractor, if it can.
        problems: receives why one cannot be found.

    Returns:
        Those that were found, by the names of the arguments.
    """
    networks = {}
    for key, source in (("extractor", extractor), ("classifier", classifier)):
        if source is not None:
            with gather(problems):
                networks[key] = find_extractor(source, allow_plugins=allow_plugins, key=key)
    return networks


def network_problems(
    networks: Mapping[str, Network], model: DenoiserConfig, decoder: AutoencoderFolder | None = None
) -> list[str]:
    """Returns why networks cannot score the (decoded) samples of a denoiser: channels, sides, classes."""
    channels, side = model.channels, model.image_size
    if decoder is not None:
        channels, side = decoder.images, side * decoder.factor
    problems = [f"{key}: {line}" for key, network in networks.items() for line in network.problems(channels, side)]
    classifier = networks.get("classifier")
    if classifier is not None and classifier.classes != model.classes:
        problems.append(
            f"classifier: {classifier.name} does not have the {model.classes} classes of the denoiser; use the run of "
            "a classifier of the same images"
        )
    return problems


def open_networks(networks: Mapping[str, Network], classes: list[str], device: torch.device) -> Networks:
    """Loads what `find_networks` found; the classifier gives logits in the order of the denoiser's classes.

    Args:
        classes: names of the classes of the denoiser.

    Raises:
        ConfigError: weights cannot be read, or a classifier that was named has other classes.
    """
    opened: dict[str, Extractor] = {}
    with checking("evaluate") as problems:
        for key, network in networks.items():
            with gather(problems):
                opened[key] = network.open(device)
    extractor = opened["extractor"]
    if "classifier" not in opened:
        return Networks(extractor, _in_order(extractor, classes))
    classifier = _in_order(opened["classifier"], classes)
    if classifier is None:
        stated, needed = (", ".join(names[:5]) for names in (opened["classifier"].names or [], classes))
        problem = f"classifier: {opened['classifier'].name} has the classes {stated}, and the denoiser {needed}"
        raise ConfigError([f"{problem}; use the run of a classifier of the same images"], "evaluate")
    return Networks(extractor, classifier)


def _in_order(network: Extractor, classes: list[str]) -> Extractor | None:
    """Returns a network whose logits are those of `classes`, in this order; None if it has other classes."""
    classify, names = network.classify, network.names
    if classify is None or network.classes != len(classes):
        return None
    if names is None or names == classes:
        return network
    if sorted(names) != sorted(classes):
        return network if numbered(names) or numbered(classes) else None
    order = [names.index(name) for name in classes]
    return replace(network, classify=lambda images: classify(images)[:, order], names=classes)


@dataclass(frozen=True)
class SampleScore:
    """Scores of samples.

    Attributes:
        distance: Fréchet distance to the training images. kernel: kernel distance to them.
        floor: Fréchet distance of the held-out images to the training images.
        right: whether the classifier gives each the asked class, bool [n], or None.
        memorised: share of pairs (sample, held-out image) in which the sample is nearer to a training image.
        coverage: precision and recall against as many training images, or None of fewer than four.
        picture: the first of them, uint8 [C, ...]. seconds: spent on drawing.
        spatial: Fréchet distance in features that keep their places (sFID); None of a network without them.
        inception: Inception Score; None of a network other than Inception, or of fewer samples than its parts.
    """

    distance: float
    kernel: KernelDistance
    floor: float
    right: Tensor | None
    memorised: float
    coverage: Coverage | None
    picture: np.ndarray
    seconds: float
    spatial: float | None = None
    inception: float | None = None


def score_samples(
    sampler: ImageSampler,
    settings: SampleConfig,
    classes: Sequence[int],
    networks: Networks,
    corpus: ImageCorpus,
    cache: Path,
    batch: int = 64,
    progress: Progress = no_progress,
) -> SampleScore:
    """Draws samples and compares them with the images of a corpus.

    Args:
        classes: one per sample.
        cache: folder of prepared images, which keeps the features of real images.
        batch: images per forward pass of the denoiser.

    Raises:
        ConfigError: settings that the model does not have, samples that are not finite, or fewer than two images.
    """
    extractor = networks.extractor
    with progress("real images", len(corpus.train) + len(corpus.validation)) as meter:
        train, held_out = (
            features_of(extractor, split, corpus.digest, cache, meter) for split in (corpus.train, corpus.validation)
        )
    places = None
    if extractor.spatial is not None:
        spatial = replace(extractor, features=extractor.spatial, digest=f"{extractor.digest}-spatial")
        places = features_of(spatial, corpus.train, corpus.digest, cache)
    with progress("samples", len(classes)) as meter:
        drawn = draw(sampler, settings, classes, networks, batch, meter)
    return SampleScore(
        frechet_distance(statistics([drawn.features]), train.statistics),
        kernel_distance(drawn.features, train.features),
        frechet_distance(held_out.statistics, train.statistics),
        drawn.right,
        memorised_share(drawn.features, held_out.features, train.features),
        _coverage(drawn.features, train.features),
        drawn.picture,
        drawn.seconds,
        None if places is None else frechet_distance(statistics([drawn.spatial]), places.statistics),
        None if drawn.logits is None or len(drawn.logits) < SPLITS else inception_score(drawn.logits),
    )


def _coverage(samples: Tensor, real: Tensor) -> Coverage | None:
    """Precision and recall of samples, or None of too few: both sets have equal numbers, spread over the larger one."""
    count = min(len(samples), len(real))
    if count <= NEIGHBOUR:
        return None
    return coverage(*(rows[torch.arange(count) * len(rows) // count] for rows in (samples, real)))


@dataclass(frozen=True)
class Drawn:
    """Samples, as far as they are kept.

    Attributes:
        features: [n, D]. right: whether the classifier gives each the asked class, bool [n], or None.
        picture: the first of them, uint8 [C, ...]. seconds: spent on drawing.
        spatial, logits: of the extractor, [n, ...]; None where it has none.
    """

    features: Tensor
    right: Tensor | None
    picture: np.ndarray
    seconds: float
    spatial: Tensor | None = None
    logits: Tensor | None = None


def draw(
    sampler: ImageSampler,
    settings: SampleConfig,
    classes: Sequence[int],
    networks: Networks,
    batch: int,
    meter: Callable[[int], object],
) -> Drawn:
    """Draws a sample of each of the `classes`, and keeps their features."""
    extractor, classifier = networks.extractor, networks.classifier
    features, right, shown, seconds = [], [], [], 0.0
    more: dict[str, list[Tensor]] = {"spatial": [], "logits": []}
    began = time.perf_counter()
    for images in sampler.draw(classes, settings, batch=batch):
        seconds += time.perf_counter() - began
        asked = torch.tensor(classes[len(features) * batch :][: len(images)], device=images.device)
        features.append(extractor.features(images).cpu())
        for key, measure in (("spatial", extractor.spatial), ("logits", extractor.logits)):
            if measure is not None:
                more[key].append(measure(images).cpu())
        if classifier is not None:
            right.append((classifier.classify(images).argmax(-1) == asked).cpu())
        if len(shown) * batch < SHOWN:
            shown.append(images.cpu())
        meter(len(images))
        began = time.perf_counter()
    first = torch.cat(shown)[:SHOWN]
    picture = picture_grid(first.numpy(), max(1, round(sqrt(len(first)))))
    rest = {key: torch.cat(parts) for key, parts in more.items() if parts}
    return Drawn(torch.cat(features), torch.cat(right) if right else None, picture, seconds, **rest)
