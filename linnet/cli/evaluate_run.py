"""What every part of `linnet evaluate` begins and ends with: the model of a run, progress, and the kept record."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from linnet.config import ConfigError, unwritable


@dataclass(frozen=True)
class Opened:
    """A model to evaluate.

    Attributes:
        path: the run or model folder.
        about: what `linnet.evaluate.results.describe_model` says of it.
        training_length: tokens of a training sequence, None where the folder does not say.
        quiet: print nothing but JSON.
    """

    path: Path
    model: Any
    tokenizer: Any
    about: dict
    training_length: int | None
    precision: str
    quiet: bool

    def engine(self, context_length: int, slots: int = 8) -> Any:
        """For generation, in the model's precision."""
        from linnet.inference import Engine

        weight = self.model.embedding.weight
        return Engine(
            self.model,
            self.tokenizer,
            slots=slots,
            context_length=context_length,
            device=weight.device.type,
            dtype=weight.dtype,
        )


def open_run(path: Path, device: str, precision: str, quiet: bool, needs_text: bool = True) -> Opened:
    """Loads the model. Raises ConfigError where there is none, or `needs_text` and it has no tokenizer."""
    import torch

    from linnet.evaluate.results import describe_model
    from linnet.runs import RunFolder
    from linnet.runs.model import load_checkpoint
    from linnet.train import device as devices

    folder = RunFolder.open(path)
    loaded = load_checkpoint(path, devices.choose(device), getattr(torch, precision))
    if loaded.tokenizer is None and needs_text:
        message = f"{path}: has no tokenizer.json, so no text can be read; put one there"
        raise ConfigError([message], "evaluate")
    about, length = describe_model(folder, loaded), folder.config.get("seq_len")
    return Opened(folder.path, loaded.model, loaded.tokenizer, about, length, precision, quiet)


def warn_unkept(opened: Opened) -> None:
    """Says before anything is asked that its record cannot be kept; a model that may only be read can be asked."""
    from linnet.evaluate.results import FOLDER

    folder = opened.path / FOLDER
    if reason := unwritable(folder):
        told = escape(f"{folder} {reason}")
        message = f"[bold yellow]note[/] nothing will be kept: {told}; stop and copy the run to keep results"
        Console(stderr=True, soft_wrap=True).print(message, highlight=False)


def keep(opened: Opened, evaluation: Any) -> None:
    """Writes the record; a folder that cannot be written to is no reason to lose what was printed."""
    try:
        evaluation.save(opened.path)
    except OSError as error:
        message = f"[bold yellow]not kept[/] in {escape(str(opened.path))}: {error.strerror}"
        Console(stderr=True).print(message, highlight=False)


class Bar:
    """Progress on stderr. It is called with how many more are done; `reach` says how many of how many are."""

    def __init__(self, shown: Any, task: Any):
        self._shown, self._task = shown, task

    def __call__(self, more: int) -> None:
        self._shown.advance(self._task, more)

    def reach(self, done: int, total: int) -> None:
        self._shown.update(self._task, completed=done, total=total)


@contextmanager
def progress(opened: Opened, what: str, total: int | None) -> Iterator[Bar]:
    """A bar for `total` of `what`, None where that is not known yet."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=opened.quiet) as shown:
        yield Bar(shown, shown.add_task(what, total=total))


def print_json(found: dict[str, Any]) -> None:
    """All records as one object."""
    import typer

    typer.echo(json.dumps({kind: evaluation.to_dict() for kind, evaluation in found.items()}, indent=1))
