"""Learning-rate schedules: pure functions of the step, so that resuming needs no saved state."""

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from linnet.config import Config


class ScheduleConfig(Config):
    """The learning rate over a run, as a fraction of its peak.

    Schedules: `constant`; `cosine` (half a cosine from the peak to `final`); `linear` (a straight line to `final`);
    `wsd` (warm-up, stable, decay: constant, then a straight line to `final` over the last `decay` of the steps);
    `inverse_sqrt` (peak / sqrt(step / warm-up), "Attention Is All You Need", section 5.3); `triangle` (from a quarter
    of the peak straight up to it at 75 % of the steps, then to 0, without a warm-up; "Cramming", arXiv:2212.14034,
    over steps in place of hours).
    """

    name: Literal["constant", "cosine", "wsd", "inverse_sqrt", "linear", "triangle"] = Field(
        "cosine", description="shape of the schedule after the warm-up"
    )
    warmup: float = Field(
        0.02,
        ge=0,
        le=1 << 40,
        description="a straight line from 0 to the peak; below 1 a fraction of the steps, from 1 on a number of steps; "
        "triangle has none",
    )
    start: float | None = Field(
        None,
        ge=0,
        lt=1,
        exclude_if=lambda given: given is None,
        description="learning rate of the first update, as a fraction of the peak, which the update after the warm-up "
        "reaches, as in fairseq; null: the warm-up of w steps begins with 1/w of the peak and ends with all of it",
    )
    final: float = Field(
        0.1, ge=0, le=1, description="learning rate at the end, as a fraction of the peak (cosine, linear, wsd)"
    )
    decay: float = Field(
        0.2,
        ge=1e-6,
        le=1 << 40,
        description="length of the last phase of wsd; below 1 a fraction of the steps, else a number",
    )
    length: int | None = Field(
        None,
        ge=1,
        exclude_if=lambda given: given is None,
        description="steps of the whole cosine, warm-up included, where the training has another number of them: a "
        "shorter training ends before the rate is at `final`, and a longer one raises it again; null: the training's",
    )

    @model_validator(mode="after")
    def _triangle_has_its_own_warmup(self) -> Self:
        usual = type(self).model_fields["warmup"].default  # which every saved configuration has
        if self.name == "triangle" and self.warmup != usual:
            raise ValueError(f"warmup: {self.warmup:g} has no effect, name: triangle has its own rise; leave it out")
        return self

    @model_validator(mode="after")
    def _start_of_warmup(self) -> Self:
        if self.start is not None and (self.name == "triangle" or not self.warmup):
            why = "name: triangle has its own" if self.name == "triangle" else "warmup is 0"
            raise ValueError(f"start: {self.start:g} is of the warm-up, and {why}; leave it out")
        return self

    @model_validator(mode="after")
    def _length_of_cosine(self) -> Self:
        if self.length is not None and self.name != "cosine":
            raise ValueError(
                f"length: {self.length} is of the cosine, and name is {self.name}, which has none; leave it out"
            )
        if self.length is not None and (warmup := length(self.warmup, self.length)) > self.length - 2:
            raise ValueError(
                f"length: {self.length} has no room for a cosine after {warmup} steps of warm-up; use at least "
                f"{warmup + 2}, or a shorter warmup"
            )
        return self


def factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Returns the learning rate of update `step` (0 is the first) of `steps`, as a fraction of the peak.

    The first update of a warm-up of w steps has 1/w of the peak, the w-th the whole peak; the last update of a decaying
    schedule has `final`. With `schedule.start` the first update has that fraction, and the one after the warm-up the
    peak. With `schedule.length` this is the rate of a training of so many steps, and the cosine goes on past them.
    """
    if schedule.name == "triangle":
        return min(0.25 + step / steps, 4.0 - 4.0 * step / steps)
    steps = schedule.length or steps
    warmup = length(schedule.warmup, steps)
    if step < warmup:
        return (step + 1) / warmup if schedule.start is None else schedule.start + (1 - schedule.start) * step / warmup
    if schedule.name == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1 if schedule.start is None else max(step, 1)))
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        warmup = decay_start(schedule, steps) - 1
    # done is 0 at the last step with the peak and 1 at the last step of all.
    done = max(0.0, (step - warmup) / max(1, steps - 1 - warmup))
    if schedule.length is None:
        done = min(1.0, done)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if schedule.name == "cosine" else 1 - done
    return schedule.final + (1 - schedule.final) * shape


def too_long(schedule: ScheduleConfig, steps: int) -> str | None:
    """Returns why the warm-up, with the decay of wsd, has no room in a training of so many steps; None if it has.

    `factor` cuts it at the last step: the rate never reaches its peak, or falls to `final` in fewer steps.
    """
    if schedule.name == "triangle" or schedule.length is not None:
        return None
    phases = {"warmup": schedule.warmup} | ({"decay": schedule.decay} if schedule.name == "wsd" else {})
    needed = {key: value * steps if value < 1 else value for key, value in phases.items()}
    if sum(needed.values()) < steps + 0.5:
        return None
    given = " and ".join(f"{key}: {phases[key]:g} ({count:,.0f} steps)" for key, count in needed.items())
    key = max(needed, key=needed.__getitem__)
    return f"schedule.{given}: more than the {steps:,} steps of the training; use more steps, or a share: {key}: 0.1"


def short_plan(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a training of a demo with a warm-up of at most its `steps`: plans may be made short."""
    schedule = values.get("schedule", {})
    warmup = min(schedule.get("warmup", 0), values.get("steps", math.inf))
    return values | {"schedule": {**schedule, "warmup": warmup}} if "warmup" in schedule else values


def warning(schedule: ScheduleConfig, steps: int) -> str | None:
    """Returns what a training of so many steps does not see of its schedule; None if it sees all."""
    whole = schedule.length
    if whole is None or whole == steps:
        return too_long(schedule, steps)
    warmup, last = length(schedule.warmup, whole), factor(schedule, steps - 1, steps)
    if steps <= warmup:
        what = f"training ends at step {steps:,}, inside the warm-up of {warmup:,} steps"
    elif steps > whole:
        what = f"training has {steps:,} steps, and the cosine rises again after {whole:,}"
    else:
        what = f"training ends at step {steps:,}, before the end of the cosine at {whole:,}"
    return f"schedule.length: {what}; its last learning rate is {last:.2g} of the peak"


def decay_start(schedule: ScheduleConfig, steps: int) -> int:
    """Returns the number of updates of wsd before its decay begins."""
    return max(length(schedule.warmup, steps), steps - length(schedule.decay, steps))


def length(value: float, steps: int) -> int:
    """Returns a warm-up or decay in steps: a value below 1 is a fraction of `steps`, other values are steps."""
    return min(steps, round(value * steps) if value < 1 else round(value))
