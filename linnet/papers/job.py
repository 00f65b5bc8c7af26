"""A step of an item, ready to be checked and run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnet.papers.item import Form, Step


@dataclass(frozen=True)
class Job:
    """One step of an item at one scale, ready to be checked and run.

    Attributes:
        where: item and step, for messages.
        values: the configuration, with its file read, `set` applied and the folders of data filled in.
        vary: the same for `vary`.
        seeds: seeds of the step.
        folder: folder of the item and scale.
        cache: folder of prepared data.
        planning: nothing will run, so data need not be there.
        before: jobs of the earlier steps.
        digest: of the step's configuration, in which `${NAME}` stands for data.
        notes: what the user should know about the data.
    """

    where: str
    step: Step
    form: Form
    values: dict[str, Any]
    vary: dict[str, dict[str, Any]]
    seeds: list[int]
    folder: Path
    cache: Path
    planning: bool = False
    before: Mapping[str, "Job"] = field(default_factory=dict)
    digest: str = ""
    notes: tuple[str, ...] = ()
