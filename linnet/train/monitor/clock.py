"""Wall time of a run, and its share spent on training."""

import time
from contextlib import contextmanager


class Clock:
    """Counts the seconds of a run over all its calls; pauses (validations, checkpoints) do not count as training."""

    def __init__(self):
        self._before = self._pauses = self._lap = 0.0
        self.start()

    def start(self) -> None:
        self._began = time.perf_counter()

    def total(self) -> float:
        return self._before + time.perf_counter() - self._began

    def training(self) -> float:
        return self.total() - self._pauses

    def lap(self) -> float:
        """Returns the training seconds since the last lap."""
        before, self._lap = self._lap, self.training()
        return max(self._lap - before, 1e-9)

    @contextmanager
    def paused(self):
        before = time.perf_counter()
        yield
        self._pauses += time.perf_counter() - before

    def state(self) -> list[float]:
        return [self.total(), self._pauses, self._lap]

    def load(self, state: list[float]) -> None:
        self._before, self._pauses, self._lap = state
        self.start()
