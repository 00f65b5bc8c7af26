"""Guards: detect a loss that is not finite or that spikes, and decide how to react."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from linnet.config import Config


class GuardConfig(Config):
    """Which batches count as bad, and the reaction to them.

    Attributes:
        policy: `stop` ends the run with status `diverged`; `skip` omits the update of the batch; `rollback` returns
            to the last checkpoint and omits the offending batches from then on.
        spike: a loss above `spike` times the running median of the last `window` losses is a spike; null: only a loss
            or a gradient that is not finite is bad.
        margin: a spike is also at least this many nats above the median, since a loss near zero may double harmlessly.
        window: losses in the running median; detection of spikes starts after half of them.
        skip_batches: batches that a rollback omits: the offending one and those right before it, because the update
            that broke the weights is often the one before the loss that shows it.
        limit: after this many rollbacks, or skipped batches in a row, the run stops as `diverged`.
    """

    policy: Literal["stop", "skip", "rollback"] = "stop"
    spike: float | None = Field(3.0, gt=1, le=1e6)
    margin: float = Field(1.0, ge=0, le=1e6)
    window: int = Field(64, ge=2)
    skip_batches: int = Field(2, ge=1)
    limit: int = Field(5, ge=1)


@dataclass(frozen=True)
class Trouble:
    """One bad batch: its loss and gradient norm, its position in the data, and the action that follows."""

    kind: Literal["non-finite", "spike"]
    action: Literal["stop", "skip", "rollback"]
    position: int
    loss: float
    grad_norm: float
    median: float | None


class Guard:
    """Watches losses in order. Its state consists of plain values, which a checkpoint stores as JSON.

    Attributes:
        skipped: positions in the data order that are omitted.
        events: rollbacks so far, or batches skipped in a row.
    """

    def __init__(self, config: GuardConfig):
        self.config = config
        self.skipped: set[int] = set()
        self.events = 0
        self._losses: deque[float] = deque(maxlen=config.window)

    def watch(self, loss: float, grad_norm: float, position: int) -> Trouble | None:
        """Returns the trouble of the batch at `position`, None if it is good. A good loss joins the running median.

        Args:
            loss: nats per target.
        """
        median, kind = None, None
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            kind = "non-finite"
        elif self.config.spike is not None and 2 * len(self._losses) >= self.config.window:
            median = sorted(self._losses)[len(self._losses) // 2]
            if loss > max(self.config.spike * median, median + self.config.margin):
                kind = "spike"
        if kind is None:
            self._losses.append(loss)
            if self.config.policy == "skip":
                self.events = 0
            return None
        self.events += 1
        action = self.config.policy if self.events <= self.config.limit else "stop"
        return Trouble(kind, action, position, loss, grad_norm, median)

    def leave_out(self, trouble: Trouble, since: int) -> list[int]:
        """Marks the positions to omit after a rollback to data position `since`, and returns them."""
        first = max(since, trouble.position - self.config.skip_batches + 1)
        positions = [p for p in range(first, trouble.position + 1) if p not in self.skipped]
        self.skipped.update(positions)
        return positions

    def state(self) -> dict:
        return {"skipped": sorted(self.skipped), "events": self.events, "losses": list(self._losses)}

    def load(self, state: dict, rollback: bool = False) -> None:
        """Restores a saved state. A rollback keeps the omitted positions and the events since that state."""
        self._losses = deque(state["losses"], maxlen=self.config.window)
        if not rollback:
            self.skipped, self.events = set(state["skipped"]), state["events"]
