"""Learning-rate schedules: pure functions of the step, so that nothing has to be saved to resume one."""

import math
from typing import Literal

from pydantic import Field

from linnet.config import Config


class ScheduleConfig(Config):
    """How the learning rate goes over a run.

    Attributes:
        name: `constant`; `cosine` (half a cosine from the peak to `final`); `linear` (a straight line to `final`);
            `wsd` (warm-up, stable, decay: constant, then a straight line to `final` over the last `decay` of the
            steps); `inverse_sqrt` (peak / sqrt(step / warm-up), as of "Attention Is All You Need", section 5.3).
        warmup: straight line from 0 to the peak; below 1 a fraction of the steps, from 1 on a number of steps.
        final: learning rate at the end, as a fraction of the peak (cosine, linear, wsd).
        decay: length of the last phase of wsd; below 1 a fraction of the steps, from 1 on a number of steps.
    """

    name: Literal["constant", "cosine", "wsd", "inverse_sqrt", "linear"] = "cosine"
    warmup: float = Field(0.02, ge=0)
    final: float = Field(0.1, ge=0, le=1)
    decay: float = Field(0.2, gt=0)


def factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Learning rate of update `step` (0 is the first) of `steps`, as a fraction of the peak.

    The first update of a warm-up of w steps has 1/w of the peak, the w-th has all of it; the last update of a decaying
    schedule has `final`.
    """
    warmup = _length(schedule.warmup, steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        warmup = max(warmup, steps - _length(schedule.decay, steps)) - 1
    # From the last step at the peak (done = 0) to the last of all (done = 1).
    done = min(1.0, max(0.0, (step - warmup) / max(1, steps - 1 - warmup)))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if schedule.name == "cosine" else 1 - done
    return schedule.final + (1 - schedule.final) * shape


def _length(value: float, steps: int) -> int:
    return min(steps, round(value * steps) if value < 1 else round(value))
