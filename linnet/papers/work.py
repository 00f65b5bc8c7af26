"""What to do with items (`Request`), and an item that is checked for it (`Work`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from linnet.papers.item import Form
from linnet.papers.library import Entry
from linnet.papers.verbs import Cost, Job


@dataclass(frozen=True)
class Request:
    """What to do with items.

    Attributes:
        scale: reduced or full.
        only: names of steps; those that they follow are added. Empty: all.
        data: name -> folder.
        seeds: in place of those of the form.
        out: folder of reproductions.
        planning: nothing will run, so neither data nor devices need to be there.
        allow_plugins: run Python files that a user's items name, although no run was made with them here.
    """

    scale: str = "reduced"
    only: tuple[str, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    out: Path = Path("reproductions")
    planning: bool = False
    allow_plugins: bool = False


@dataclass(frozen=True)
class Work:
    """A checked item at one scale.

    Attributes:
        jobs: the steps that were asked for and can run, in order. every: all steps.
        skipped: step -> why it will not run. costs: step -> its cost.
        elsewhere: of a plan: step that it prices -> why a run on this machine would skip it.
        notes: what the user should know before the work, such as data with another content.
        missing: data that a plan needs and that are not given: name -> what they are.
    """

    entry: Entry
    scale: str
    form: Form
    folder: Path
    seeds: list[int]
    jobs: dict[str, Job]
    every: dict[str, Job]
    skipped: dict[str, str]
    costs: dict[str, Cost]
    notes: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
