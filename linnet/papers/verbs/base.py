"""What every verb of an item takes and gives."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from linnet.papers.item import Form
from linnet.papers.planned import Job, Planned

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
    """

    records: list[Record]
    folder: Path | None = None
    seconds: float = 0.0
    runs: int | None = None
    flops: float | None = None
    unfinished: int = 0


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
    found = {key: float(value) for key, value in values.items() if isinstance(value, int | float) and key != "seed"}
    found = {key: value for key, value in found.items() if math.isfinite(value)}
    if "loss" in found:
        found.setdefault("loss_bits", found["loss"] / math.log(2))
        if found["loss"] < 700:
            found.setdefault("perplexity", math.exp(found["loss"]))
    return found
