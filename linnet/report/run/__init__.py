"""The pages that one run alone has, those of the kinds of models for which a room has one; and their figures."""

from collections.abc import Callable, Mapping
from pathlib import Path

from linnet.companions import Offer
from linnet.config import ConfigError
from linnet.runs import RunFolder
from linnet.study.collect import TABLE

Writer = Callable[[Path, Path | None], Path]

WRITERS: Mapping[str, Writer] = Offer("pages")  # by the kind of the model


def writer_of(path: Path) -> Writer | None:
    """Returns the function (folder, page or None) -> page for a folder whose kind of model has a page, else None.

    Raises:
        ConfigError: the folder is that of a run, and its configuration cannot be read.
    """
    if not (path / "config.yaml").is_file():
        return None
    from linnet.runs.model import read_kind

    try:
        return WRITERS.get(read_kind(RunFolder.open(path)).name)
    except ConfigError:
        if (path / TABLE).is_file():  # a study; reading it as one names the problem
            return None
        raise
