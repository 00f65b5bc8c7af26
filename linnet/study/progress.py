"""The display of a running study: a bar with the time left, or now and then a line; and a line per finished run."""

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from linnet.options import duration
from linnet.runs import RunFolder
from linnet.study.ladder import PlannedRun

POLL = 2.0  # seconds between two reads of the records of running runs
QUIET = 30.0  # seconds between two lines if the output is not a terminal


class StudyProgress:
    """Shows the progress of a study.

    Work is counted in predicted seconds, or in FLOPs without a prediction. The time left follows the observed pace.
    """

    def __init__(
        self, runs: list[PlannedRun], folder: Path, seconds: dict[str, float] | None, workers: int, console: Console
    ):
        self.runs = {run.run: run for run in runs}
        self.folder, self.console, self.workers = folder, console, workers
        self.weight = {run.run: seconds[run.run] if seconds else run.flops for run in runs}
        self.predicted = seconds is not None
        self.total = sum(self.weight.values())
        self.finished: set[str] = set()
        self.partial: dict[str, float] = {}
        self.started = self.polled = self.printed = time.monotonic()
        self.before = 0.0  # work of resumed runs that was done before the start
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=self.total, left="")

    def __enter__(self) -> "StudyProgress":
        self._look()
        self.started, self.before = time.monotonic(), self._done()
        self.bar.start()
        self._refresh()
        return self

    def __exit__(self, *exception) -> None:
        self.bar.stop()

    def line(self, name: str, text: str) -> None:
        """Records that a run ended: prints `text` with the number of finished runs and the time left."""
        self.finished.add(name)
        self.partial.pop(name, None)
        self._look()
        count = f"{len(self.finished)}/{len(self.runs)}"
        left = "" if self.console.is_terminal else self._left()
        self._print(f"{count:>7}  {text}", left)
        self._refresh()

    def tick(self) -> None:
        """Updates the bar; without a terminal, prints a line if none was printed for a while."""
        if self.console.is_terminal and time.monotonic() - self.polled > POLL:
            self._look()
            self._refresh()
        elif not self.console.is_terminal and time.monotonic() - self.printed >= QUIET:
            self._look()
            count, running = f"{len(self.finished)}/{len(self.runs)}", f"{len(self.partial)} running"
            self._print(f"{count:>7}  {running}, {self._done() / self.total:.0%} of the work", self._left())

    def _print(self, text: str, left: str) -> None:
        self.printed = time.monotonic()
        self.console.print(f"{text}  [dim]{left}[/]" if left else text, highlight=False, soft_wrap=True)

    def _look(self) -> None:
        """Reads the progress of the running runs from their records."""
        self.polled = time.monotonic()
        for name, run in self.runs.items():
            if name not in self.finished and (self.folder / name).is_dir():
                share = min(1.0, RunFolder(self.folder / name).flops_so_far() / run.flops)
                self.partial[name] = share * self.weight[name]

    def _done(self) -> float:
        return sum(self.weight[name] for name in self.finished) + sum(self.partial.values())

    def _left(self) -> str:
        elapsed, done = time.monotonic() - self.started, self._done()
        if done >= self.total:
            return ""
        if done - self.before > 0.02 * self.total:
            return f"about {duration(round(elapsed * (self.total - done) / (done - self.before)))} left"
        return f"about {duration(self.total / self.workers)} left" if self.predicted else ""

    def _refresh(self) -> None:
        running = len(self.partial)
        text = f"{len(self.finished)} of {len(self.runs)} runs" + (f", {running} running" if running else "")
        self.bar.update(self.task, completed=self._done(), description=text, left=self._left())


def count(number: float) -> str:
    """Formats a count in short form: `812`, `52.1k`, `3.2M`, `362B`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
