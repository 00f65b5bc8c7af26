"""The images that a classifier is scored on: those held out in its training, or others with the same classes."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.config import ConfigError, parse
from linnet.runs import RunFolder
from linnet.runs.folder import CLASSES

if TYPE_CHECKING:
    from linnet.data.images import ImageCorpus, ImageSplit
    from linnet.evaluate.session import Session

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
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        names = None
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise ConfigError([f"{path}: is not a list of {count} names; copy it again, or delete it"], "evaluate")
    return names


def open_split(
    session: "Session", data: tuple[str, ...], split: str | None, cache: Path
) -> "tuple[ImageSplit, list[str]]":
    """Prepares the images to score, and returns them with the names of their classes.

    Args:
        data: sources; empty for the held-out images of the run.
        split: part of the sources; None chooses.
        cache: folder of prepared images.

    Raises:
        ConfigError: the images cannot be read, or do not fit the model: channels, sides, classes.
    """
    from linnet.data.images import ImageDataConfig, prepare_images

    folder, model = RunFolder.open(session.path), session.model.config
    values: dict[str, Any] = folder.config.get("data") or {}
    names = read_classes(folder.path, model.classes)
    if not data and not values:
        message = f"{session.path}: does not say what it was trained on; give --data SOURCE"
        raise ConfigError([message], "evaluate")
    if data:
        own = {"source": list(data), "kind": values.get("kind", "images")}
        if own["kind"] == "images":
            own["size"] = values.get("size") or model.image_size
            own["convert"] = "grey" if model.channels == 1 else "rgb" if model.channels == 3 else None
        own |= {"classes": values.get("classes") or names}
        own |= {key: values.get(key) for key in ("image_key", "label_key")}
        config = parse(ImageDataConfig, own | {"split": split or _part(list(data))}, "evaluate")
        try:
            corpus = prepare_images(config, cache, whole=True)
        except ConfigError as error:
            raise ConfigError([_of_option(line, cache) for line in error.problems], "evaluate") from None
    else:
        corpus = open_training_images(folder, cache)
    problems = []
    if corpus.channels != model.channels:
        fix = "give images of those channels"
        problems.append(f"data: images have {corpus.channels} channels, but the model reads {model.channels}; {fix}")
    if len(corpus.classes) != model.classes:
        problems.append(
            f"data: has {len(corpus.classes)} classes, but the model was trained on {model.classes}; give images of "
            "the same classes"
        )
    elif names is not None and corpus.classes != names and not _numbers(corpus.classes):
        given, other = ", ".join(corpus.classes[:5]), ", ".join(names[:5])
        problems.append(
            f"data: its classes ({given}) are not those of the model ({other}); give images of the same classes"
        )
    if problems:
        raise ConfigError(problems, "evaluate")
    return corpus.validation, names or corpus.classes


def open_training_images(folder: RunFolder, cache: Path) -> "ImageCorpus":
    """Returns the images of a training, which are prepared if `cache` does not have them.

    Raises:
        ConfigError: the images cannot be read; a problem of a key names the run's configuration.
    """
    from linnet.data.images import ImageDataConfig, prepare_images
    from linnet.data.images.problems import in_data

    where = f"{folder.path}/config.yaml"
    config = parse(ImageDataConfig, folder.config["data"], where)
    try:
        return prepare_images(config, cache)
    except ConfigError as error:
        lines = [_of_cache(line, cache) for line in error.problems]
        lines = [f"{where}: {in_data(line)}" if in_data(line) != line else line for line in lines]
        raise ConfigError(lines, "evaluate") from None


def _of_option(problem: str, cache: Path) -> str:
    """Returns a problem of other images under the option that names them, without fixes by keys of a training."""
    key, colon, rest = problem.partition(":")
    if key in ("source", "classes", "label_key"):
        problem = f"data{colon}{rest}"
    problem = re.sub(r", or (set \w+: \w+|give all names in classes)$", "", problem)
    return _of_cache(re.sub(r"; name one in (image|label)_key$", "; rename one of them", problem), cache)


def _of_cache(problem: str, cache: Path) -> str:
    return f"cache: {problem}" if problem.startswith(f"{cache}: ") else problem


def _numbers(names: list[str]) -> bool:
    """Whether classes have no names but their numbers."""
    return names == [str(i) for i in range(len(names))]


def _part(data: list[str]) -> str:
    """Returns the part of the sources to score; "train" if they have no parts, which then does not count."""
    from linnet.data.images.sources import find_sources

    parts = {source.part for source in find_sources(data, "data", [], [])}
    return next((part for part in PREFERRED if part in parts), "train")
