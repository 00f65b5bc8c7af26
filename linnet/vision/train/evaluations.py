"""Evaluations of image classifiers during training: accuracy on further images with labels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from linnet.config import ConfigError, checking
from linnet.data.images.config import Sources
from linnet.data.images.sources import ImageSource
from linnet.train.suites import Evaluation, Found, Measure, Subject
from linnet.vision.data import ImageCorpus, ImageDataConfig, read_sources
from linnet.vision.evaluate.data import further_images, further_problems, misfits, prepare_further
from linnet.vision.evaluate.images import score_images
from linnet.vision.models.classifier import ImageClassifier


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
