"""Which pages one run alone has: those of image models."""

from collections.abc import Callable
from pathlib import Path

from linnet.config import ConfigError
from linnet.report.classifier import write_classifier
from linnet.runs import RunFolder

Writer = Callable[[Path, Path | None], Path]

WRITERS: dict[str, Writer] = {"images": write_classifier}  # by the objective of the run


def writer_of(path: Path) -> Writer | None:
    """Returns the function (run folder, page or None) -> page for a run whose objective has a page, else None."""
    if not (path / "config.yaml").is_file():
        return None
    try:
        return WRITERS.get(RunFolder.open(path).config.get("objective", "text"))
    except ConfigError:  # reading the folder as a study names the problem
        return None
