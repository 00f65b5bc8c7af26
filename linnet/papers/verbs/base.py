"""What every verb of an item takes and gives."""

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from linnet.config import load_json
from linnet.papers.item import Form, Step
from linnet.runs import RunFolder, folder
from linnet.runs.files import write_atomic

# What calls set out to do: one file for each step and seed, written before the work.
#
#     <item and scale>/planned/<step>.<seed>.json
#
# The table of an item is collected from these files and the runs that they name, so it holds the work of every call: of
# other steps, of other seeds, at the same time on another machine. A file whose step has another configuration today is
# ignored; one whose data had another content is removed when a call begins with the new data.


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
    plans = []
    for path in (job.folder / PLANNED).glob(f"{job.step.name}.*.json"):
        try:
            values = load_json(path)
            if values["step"] == job.digest and path == _path(job, values["seed"]):
                plans.append(Planned(values["seed"], values["work"], values["about"], tuple(values["notes"])))
        except (OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or damaged: the step writes it again
            continue
    return sorted(plans, key=lambda plan: -1 if plan.seed is None else plan.seed)


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
        return load_json(path)["step"]
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


CLUSTER = 3e14  # training FLOP/s of a device of a cluster: an H100 at 30 % of its peak
EXACT = frozenset(
    "params_total params_non_embedding params_active flops flops_paper flops_causal flops_forward tokens images "
    "state_bytes state_fixed state_dynamic state_size carried_bytes weight_bytes d_model num_layers glu_width seq_len "
    "batch_tokens attention_share unique_tokens steps budget".split()
)
"""Columns that do not depend on the seed; a comparison of them needs one run."""


@dataclass(frozen=True)
class Record:
    """What a step measured for one label and seed.

    Attributes:
        label: what `rows` of the step translates.
        seed: None: the numbers are exact, or have intervals.
        values: column -> number.
        intervals: column -> 95 % interval; None: the number is fitted, and its interval is not known.
        run: the run folder, for the steps that follow.
        failed: why there are no numbers.
    """

    label: str
    seed: int | None
    values: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    run: Path | None = None
    failed: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a step gave so far.

    Attributes:
        folder: of the step, if a later step may read it.
        seconds: as the runs recorded them.
        runs, flops: of the finished runs; None if the step has none, or they are not counted.
        unfinished: number of runs that some call planned and that have no result.
        failed: folders of runs that ended with an error. A run that diverged has a result.
    """

    records: list[Record]
    folder: Path | None = None
    seconds: float = 0.0
    runs: int | None = None
    flops: float | None = None
    unfinished: int = 0
    failed: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What a step will cost.

    Attributes:
        runs: trainings, evaluations or measurements; `None` if it depends on runs that do not exist yet.
        flops: of all of them; None if they are not counted.
        seconds: on one device, at a stated throughput; None if there is none.
        devices: that work at the same time.
        labels: of the records that will come, where they are known.
        columns: that these records may have; None if they are known only after the step has run.
        notes: what else a reader of the plan must know.
    """

    runs: int | None = None
    flops: float | None = None
    seconds: float | None = None
    devices: int = 1
    labels: tuple[str, ...] | None = None
    columns: frozenset[str] | None = None
    notes: tuple[str, ...] = ()


def seconds_of(form: Form, flops: float) -> float | None:
    """Returns the seconds of one device at the throughput of a form; `None` without one.

    A device of a cluster makes `CLUSTER` FLOP/s, if the form states nothing else.
    """
    throughput = form.throughput or (CLUSTER if form.device == "cluster" else None)
    return flops / throughput if throughput else None


class Verb(Protocol):
    """A verb: a module of this package has these three functions."""

    def check(self, job: Job) -> Cost:
        """Returns the cost. Does no work. Raises ConfigError with all problems."""

    def run(self, job: Job, earlier: Mapping[str, Outcome], console: Console) -> None:
        """Records with `write_planned` what the job asks for, then does what is missing of it."""

    def collect(self, job: Job, planned: Sequence[Planned], earlier: Mapping[str, Outcome]) -> Outcome:
        """Returns the records of all that any call has finished, by seed. Trains and scores nothing.

        The data of the job need not be there.
        """


def with_derived(names: Collection[str]) -> frozenset[str]:
    """Returns names of numbers, with those that `numbers` adds beside a loss."""
    return frozenset(names) | ({"loss_bits", "perplexity"} if "loss" in names else set())


def measurable(names: Collection[str]) -> str:
    """Returns the end of a message about a number that a step does not measure."""
    return f"use one of {', '.join(sorted(names))}"


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers among values, with loss_bits and perplexity beside a loss."""
    metrics = {key: float(value) for key, value in values.items() if isinstance(value, int | float) and key != "seed"}
    metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
    if "loss" in metrics:
        metrics.setdefault("loss_bits", metrics["loss"] / math.log(2))
        if metrics["loss"] < 700:
            metrics.setdefault("perplexity", math.exp(metrics["loss"]))
    return metrics
