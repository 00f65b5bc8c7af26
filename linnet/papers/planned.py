"""What calls set out to do: one file for each step and seed, written before the work.

    <item and scale>/planned/<step>.<seed>.json

The table of an item is collected from these files and the runs that they name, so it holds the work of every call: of
other steps, of other seeds, at the same time on another machine. A file whose step has another configuration today is
ignored; one whose data had another content is removed when a call begins with the new data.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from linnet.papers.item import Form, Step
from linnet.runs import RunFolder, folder
from linnet.runs.files import write_atomic


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


T = TypeVar("T")

PLANNED = "planned"


@dataclass(frozen=True)
class Planned:
    """What some call set out to do of one step for one seed.

    Attributes:
        seed: None if the step does not depend on seeds.
        work: digest of all that determines the numbers, except the seed.
        about: what the verb needs to find the results.
        notes: what the user should know about the data.
    """

    seed: int | None
    work: str
    about: dict[str, Any]
    notes: tuple[str, ...] = ()


def read_planned(job: Job) -> list[Planned]:
    """Returns what was planned of a step in its present configuration, by seed."""
    found = []
    for path in (job.folder / PLANNED).glob(f"{job.step.name}.*.json"):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["step"] == job.digest and path == _path(job, values["seed"]):
                found.append(Planned(values["seed"], values["work"], values["about"], tuple(values["notes"])))
        except (OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or damaged: the step writes it again
            continue
    return sorted(found, key=lambda one: -1 if one.seed is None else one.seed)


def write_planned(job: Job, seed: int | None, work: str, about: dict[str, Any], console: Console) -> None:
    """Records what a call sets out to do, or how far it came.

    Args:
        work: as in `Planned`. Seeds that were planned with another one leave the table, which the console shows.
    """
    (job.folder / PLANNED).mkdir(parents=True, exist_ok=True)
    for other in read_planned(job):
        if other.work != work:
            _path(job, other.seed).unlink(missing_ok=True)
            if other.seed != seed:
                text = f"seed {other.seed} was made with other data and leaves the table; run it again with these"
                console.print(f"{job.where}: {text}", markup=False)
    if _step_of(_path(job, seed)) not in (None, job.digest):
        which = "it" if seed is None else f"seed {seed}"
        console.print(f"{job.where}: {which} was made with another configuration and leaves the table", markup=False)
    values = {"step": job.digest, "seed": seed, "work": work, "about": about, "notes": list(job.notes)}
    write_atomic(_path(job, seed), json.dumps(values, indent=1) + "\n")


def _step_of(path: Path) -> str | None:
    """Returns the digest of the step that a file was written for; None if there is none, or it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(job: Job, seed: int | None) -> Path:
    return job.folder / PLANNED / f"{job.step.name}.{'all' if seed is None else seed}.json"


def patiently(work: Callable[[], T], console: Console) -> T:
    """Calls `work` until no other process holds the lock that it needs."""
    return folder.patiently(work, partial(console.print, markup=False))


@contextlib.contextmanager
def alone(root: Path, console: Console) -> Iterator[None]:
    """Holds the lock of a folder; waits for it."""
    with contextlib.ExitStack() as stack:
        patiently(lambda: stack.enter_context(RunFolder(root).lock()), console)
        yield
