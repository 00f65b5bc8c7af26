"""Reports problems of images together with the other problems of the training that names them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linnet.config import ConfigError, gather, parse
from linnet.data.images import corpus
from linnet.data.images.config import ImageDataConfig


def in_data(line: str) -> str:
    """Returns a problem of an `ImageDataConfig` with its key in a training: `data.` before keys of it."""
    key = line.partition(":")[0].partition(".")[0]
    return f"data.{line}" if key in ImageDataConfig.model_fields else line


def source_problems(values: Any, cache_dir: str | Path, told: Sequence[str] = ()) -> list[str]:
    """Returns the problems of the images named by the plain values of a `data` key.

    Args:
        values: values of an `ImageDataConfig`. If they are invalid, the result is empty, since the caller reports that.
        cache_dir: folder of corpora.
        told: problems that the caller already reports; they are not repeated.
    """
    if isinstance(values, dict):  # the caller reports unknown keys; the images can be checked without them
        values = {key: value for key, value in values.items() if key in ImageDataConfig.model_fields}
    try:
        config = parse(ImageDataConfig, values)
    except ConfigError:
        return []
    problems: list[str] = []
    with gather(problems):
        corpus.check_images(config, cache_dir, corpus.DECODED)
    return [in_data(line) for line in problems if not any(line in other for other in told)]
