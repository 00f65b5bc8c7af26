"""Scores of classifiers and of samples."""

import contextlib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PrivateAttr

from linnet.config import Config, ConfigError, checking, load_json, parse, refuse
from linnet.evaluate.evaluators import Names
from linnet.evaluate.results import Evaluation
from linnet.evaluate.session import Evaluator, Progress, Session, no_progress
from linnet.runs import RunFolder
from linnet.runs.folder import CLASSES

if TYPE_CHECKING:
    from linnet.vision.config import VisionConfig
    from linnet.vision.data import ImageCorpus, ImageDataConfig, ImageSplit


# The images that a classifier is scored on: those held out in its training, or others with the same classes.


class ImageEvaluator(Config, Evaluator):
    """Scores labelled images (`linnet.vision.evaluate.images`).

    Attributes:
        data: sources of images, as `data.source` of a training; empty for the held-out images of the run.
        split: the part of `data` to score, if it has parts: train, validation or test; None takes test, or else
            validation, where there is one.
        batch: images per forward pass.
        cache: folder of prepared images.
    """

    kind: ClassVar[str] = "images"
    divides: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("classifier",)
    needs_text: ClassVar[bool] = False

    data: Names = ()
    split: str | None = None
    batch: int = Field(256, ge=1)
    cache: Path = Path("runs/cache")
    _images: Any = PrivateAttr(None)

    def check(self) -> None:
        from linnet.data.images.decode import check_png

        with checking("evaluate") as problems:
            if self.split is not None and not self.data:
                problems.append(f"split: {self.split!r} is a part of --data; give --data too, or leave it out")
            check_png()  # for pictures of mistakes

    def check_model(self, session: Session) -> None:
        self._images = open_split(session, self.data, self.split, self.cache)

    def measures(self) -> set[str]:
        return {f"images.{metric}" for metric in ("accuracy", "top5_accuracy", "nll", "calibration_error")}

    def run(self, session: Session, progress: Progress = no_progress) -> Evaluation:
        from linnet.vision.evaluate.images import score_images

        split, classes = self._images
        with progress("images", len(split)) as meter:
            score = score_images(session.model, split, classes, self.batch, progress=meter)
        settings = {"data": list(self.data), "split": self.split, "precision": session.precision}
        return Evaluation(self.kind, session.about, settings, score.results(), score.detail(), score.digest)


PREFERRED = ("test", "validation", "train")  # parts of a source that are scored, the first that it has


def read_classes(folder: Path, count: int) -> list[str] | None:
    """Returns the names of a folder's classes; None if it does not have them.

    Raises:
        ConfigError: the file is damaged, or has another number of names.
    """
    path = folder / CLASSES
    if not path.is_file():
        return None
    try:
        names = load_json(path)
    except ValueError:
        names = None
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise ConfigError([f"{path}: is not a list of {count} names; copy it again, or delete it"], "evaluate")
    return names


def open_split(
    session: Session, data: tuple[str, ...], split: str | None, cache: Path
) -> "tuple[ImageSplit, list[str]]":
    """Prepares the images to score, and returns them with the names of their classes.

    Args:
        data: sources; empty for the held-out images of the run.
        split: part of the sources; None chooses.
        cache: folder of prepared images.

    Raises:
        ConfigError: the images cannot be read, or do not fit the model: channels, sides, classes.
    """
    folder, model = RunFolder.open(session.path), session.model.config
    values: dict[str, Any] = folder.config.get("data") or {}
    names = read_classes(folder.path, model.classes)
    if not data and not values:
        message = f"{session.path}: does not say what it was trained on; give --data SOURCE"
        raise ConfigError([message], "evaluate")
    if data:
        config = further_images(list(data), split, values, model, names)
        try:
            corpus = prepare_further(config, cache, None if values.get("classes") else CLASSES)
        except ConfigError as error:
            raise ConfigError([_of_option(line, cache) for line in further_problems(error)], "evaluate") from None
    else:
        corpus = open_training_images(folder, cache)
    if problems := misfits(corpus, model, names):
        raise ConfigError([f"data: {line}" for line in problems], "evaluate")
    return corpus.validation, names or corpus.classes


def further_images(
    source: list[str], split: str | None, data: Mapping[str, Any], model: "VisionConfig", names: list[str] | None
) -> "ImageDataConfig":
    """Returns the configuration of other images, which are read as a classifier read those of its training.

    Args:
        split: part of the sources; None chooses.
        data: the key `data` of the training; may be empty.
        names: the classes of the model, if they are known.

    Raises:
        ConfigError: the values contradict each other.
    """
    from linnet.vision.data import ImageDataConfig

    values: dict[str, Any] = {"source": source, "kind": data.get("kind", "images")}
    if values["kind"] == "images":
        values["size"] = data.get("size") or model.image_size
        values["convert"] = {1: "grey", 3: "rgb"}.get(model.channels)
        values |= {"crop": data["crop"]} if "crop" in data else {}
    values |= {"classes": data.get("classes") or names, "split": split or _part(source)}
    values |= {key: data.get(key) for key in ("image_key", "label_key")}
    return parse(ImageDataConfig, values, "evaluate")


def prepare_further(config: "ImageDataConfig", cache: Path, names_in: str | None = CLASSES) -> "ImageCorpus":
    """Prepares other images. Their columns have the names of the training's, or else the usual ones.

    Args:
        names_in: the file or key that can give the model's classes other names. None if the training gave their names
            itself, in place of those of its source: labels that have other names then count by number, with a warning.

    Raises:
        ConfigError: the images cannot be read, or a file names labels that are not classes of the model.
    """
    from linnet.vision.data import prepare_images

    try:
        corpus = prepare_images(config, cache, whole=True)
    except ConfigError:
        if config.image_key is None and config.label_key is None:
            raise
        usual = config.model_copy(update={"image_key": None, "label_key": None})
        with contextlib.suppress(ConfigError):
            return prepare_further(usual, cache, names_in)
        raise
    _check_names(config, names_in)
    return corpus


def _check_names(config: "ImageDataConfig", names_in: str | None) -> None:
    """Refuses or warns of files that name labels 0, 1, ... otherwise than the model, unless either has numbers only."""
    from linnet.data.images.sources import class_names
    from linnet.vision.data.corpus import read_sources

    names = config.classes or []
    numbers = {str(number) for number in range(len(names))}
    problems = []
    for source in read_sources(config, whole=True):
        labels = class_names(source, config) or []
        other = [label for label in labels if label not in names]
        if not names or not other or numbered(labels) or set(names) == numbers:
            continue
        stated, known = (f"{', '.join(words[:5])}{', ...' * (len(words) > 5)}" for words in (labels, names))
        what = f"{source.path} names its labels {stated}, and the classes of the model are {known}"
        if names_in is None:
            warnings.warn(f"{what}; labels count by their numbers", stacklevel=4)
        else:
            fix = f"give images of these classes; if they are the same in this order, write their names into {names_in}"
            problems.append(f"classes: {what}; {fix}")
    refuse(problems, "evaluate")


def further_problems(error: ConfigError) -> list[str]:
    """Returns the problems of preparing other images, without advice that only a training can follow."""
    lines = [re.sub(r", or (set \w+: \w+|give all names in classes)$", "", line) for line in error.problems]
    return [re.sub(r"; name one in (image|label)_key$", "; rename one of them", line) for line in lines]


def misfits(corpus: "ImageCorpus", model: "VisionConfig", names: list[str] | None) -> list[str]:
    """Returns why a classifier cannot be scored on a corpus: its channels, or its classes.

    Args:
        names: the classes of the model, if they are known.
    """
    problems = []
    if corpus.channels != model.channels:
        fix = "give images of those channels"
        problems.append(f"images have {corpus.channels} channels, but the model reads {model.channels}; {fix}")
    if len(corpus.classes) != model.classes:
        problems.append(
            f"has {len(corpus.classes)} classes, but the model was trained on {model.classes}; give images of the same "
            "classes"
        )
    elif names is not None and corpus.classes != names and not numbered(corpus.classes):
        classes, other = ", ".join(corpus.classes[:5]), ", ".join(names[:5])
        problems.append(
            f"its classes ({classes}) are not those of the model ({other}); give images of the same classes"
        )
    return problems


def open_training_images(folder: RunFolder, cache: Path) -> "ImageCorpus":
    """Returns the images of a training, or those of its latents, which are prepared if `cache` does not have them.

    Raises:
        ConfigError: the images cannot be read; a problem of a key names the run's configuration.
    """
    from linnet.data.problems import in_data
    from linnet.vision.data import ImageDataConfig, prepare_images

    where = f"{folder.path}/config.yaml"
    config = parse(ImageDataConfig, folder.config["data"], where)
    if config.kind == "latents":
        from linnet.vision.latents import encoded_images

        config = encoded_images(config)
    try:
        return prepare_images(config, cache)
    except ConfigError as error:
        lines = [_of_cache(line, cache) for line in error.problems]
        named = [(line, in_data(line, ImageDataConfig)) for line in lines]
        lines = [f"{where}: {key}" if key != line else line for line, key in named]
        raise ConfigError(lines, "evaluate") from None


def _of_option(problem: str, cache: Path) -> str:
    """Returns a problem of other images under the option that names them."""
    key, colon, rest = problem.partition(":")
    if key in ("source", "classes", "label_key"):
        problem = f"data{colon}{rest}"
    return _of_cache(problem, cache)


def _of_cache(problem: str, cache: Path) -> str:
    return f"cache: {problem}" if problem.startswith(f"{cache}: ") else problem


def numbered(names: list[str]) -> bool:
    """Whether classes have no names but their numbers."""
    return names == [str(i) for i in range(len(names))]


def _part(data: list[str]) -> str:
    """Returns the part of the sources to score; "train" if they have no parts, which then does not count."""
    from linnet.data.images.sources import find_sources

    parts = {source.part for source in find_sources(data, "data", [], [])}
    return next((part for part in PREFERRED if part in parts), "train")
