"""Reports problems of images together with the other problems of the training that names them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linnet.data.images import corpus
from linnet.data.images.config import ImageDataConfig
from linnet.data.problems import problems_of


def source_problems(values: Any, cache_dir: str | Path, told: Sequence[str] = ()) -> list[str]:
    """Returns the problems of the images named by the plain values of a `data` key.

    Args:
        values: values of an `ImageDataConfig`. told: as in `problems_of`.
        cache_dir: folder of corpora.
    """

    def check(config: ImageDataConfig) -> None:
        corpus.check_images(config, cache_dir, corpus.DECODED)

    return problems_of(ImageDataConfig, values, check, told)
