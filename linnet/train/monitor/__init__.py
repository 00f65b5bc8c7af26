"""What watches a run: losses that spike, Ctrl-C, other loggers, and the line on the terminal.

Guards detect a loss that is not finite or that spikes, and decide how to react. Loggers are other destinations for the
rows of metrics.jsonl; a logger's package is imported only if it is used. Ctrl-C and SIGTERM are a request to stop
between two steps.
"""

import contextlib
import ctypes
import math
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from linnet.config import Config, refuse
from linnet.evaluate.results import shown_score
from linnet.options import duration, working
from linnet.runs.record import ROWS_LOST
from linnet.signals import Terminated


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


LoggerName = Literal["tensorboard", "wandb"]


def check_loggers(names: list[LoggerName]) -> None:
    """Raises `ConfigError` that names each logger whose package is missing."""
    refuse([message for name in names if (message := _missing(name))])


def open_loggers(names: list[LoggerName], folder: Path, config: dict, step: int) -> list["TensorBoard | Wandb"]:
    """Opens the loggers of a run that starts, or continues, at `step`."""
    kinds = {"tensorboard": TensorBoard, "wandb": Wandb}
    return [kinds[name](folder, config, step) for name in names]


class TensorBoard:
    """Writes events to `<run>/tensorboard`."""

    def __init__(self, folder: Path, config: dict, step: int):
        from torch.utils.tensorboard import SummaryWriter

        # After a kill some steps run again; purge_step hides their earlier points.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, row: dict) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        if "event" in row:
            self._writer.add_text("event", str(row), row["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Logs to Weights & Biases. The id is the name of the run folder, so a resumed run continues the same record.

    Project, entity and mode come from the environment (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE).
    """

    def __init__(self, folder: Path, config: dict, step: int):
        import wandb

        self._run = wandb.init(id=folder.name, name=folder.name, dir=str(folder), config=config, resume="allow")

    def write(self, row: dict) -> None:
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def _numbers(row: dict) -> dict[str, float]:
    if "evaluation" in row:  # its tokens, FLOPs and seconds do not belong to training
        row = {f"{row['evaluation']}/{name}": value for name, value in row.get("metrics", {}).items()}
    return {k: v for k, v in row.items() if k != "step" and isinstance(v, (int, float)) and not isinstance(v, bool)}


def _missing(name: LoggerName) -> str | None:
    try:
        if name == "tensorboard":
            import torch.utils.tensorboard  # noqa: F401
        else:
            import wandb  # noqa: F401
    except ImportError as error:
        return f"run.loggers: {name!r} needs a package that is not installed ({error}); pip install {name}, or drop it"
    return None


def stop_with_parent() -> None:
    """Asks Linux to send this process SIGTERM when the process that started it dies; elsewhere does nothing."""
    if sys.platform == "linux":
        set_signal_at_death_of_parent = 1  # PR_SET_PDEATHSIG of prctl(2)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_signal_at_death_of_parent, signal.SIGTERM)


class Stop:
    """Records whether a signal requested a stop.

    Attributes:
        signal: number of the signal, None before one arrives.
    """

    signal: int | None = None

    def end(self) -> None:
        """Raises KeyboardInterrupt for SIGINT, `Terminated` for SIGTERM."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated


@contextlib.contextmanager
def graceful_stop() -> Iterator[Stop]:
    """Yields a `Stop` that the first SIGINT or SIGTERM sets; the second acts at once. Only in the main thread."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def note(number, frame) -> None:
        stop.signal = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()


# Terminal output while a run trains: a progress bar with the time left, or occasional lines without a terminal.

QUIET = 30.0  # seconds between two lines if the output is not a terminal
SLOW = 2.0  # seconds of scoring after which a line reports it if the output is not a terminal

_EVENTS = {"spike": "loss spike", "non-finite": "loss or gradient not finite"}


def measured(score: float | None, unit: str) -> str:
    """Returns a score of held-out data with its unit, or why there is none."""
    if score is None or not math.isfinite(score):
        return f"no {unit} (the held-out data are too few, or a score is not finite)"
    return f"{score:.4f} {unit}"


class TerminalProgress:
    """Progress callback of `train` for each row of the record; a context manager around the call."""

    def __init__(
        self,
        console: Console,
        units: str = "tokens",
        scores: Mapping[str, str] | None = None,
        before: Callable[[int], None] | None = None,
        summary: bool = False,
    ):
        """
        Args:
            units, scores: `units` and `SCORES` of the objective (`linnet.train.objective.RunObjective`).
            before: is called with the number of steps before the first one, when all checks have passed.
            summary: the caller shows the result, so the held-out loss of the last step is left to it.
        """
        self._before, self._summary = before, summary
        self._console, self._units, self._scores = console, units, scores or {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("data", total=None, state="")
        self._steps, self._printed = 0, time.monotonic()
        self._total: int | None = None  # units of the whole training; None if all steps read the same number
        self._scoring, self._told = 0.0, False  # start time of scoring, and whether a line reported it
        self._waiting = contextlib.ExitStack()  # until the first step, says what takes long if there is no bar
        self._tell: Callable[[str], None] = lambda place: None

    @property
    def started(self) -> bool:
        """Whether training started; it does not for a run that was already done."""
        return self._steps > 0

    def __enter__(self) -> "TerminalProgress":
        self._bar.start()
        if not self._console.is_terminal:
            self._tell = self._waiting.enter_context(working("preparing the run", self._console))
        return self

    def __exit__(self, *exception) -> None:
        self._waiting.close()
        self._bar.stop()

    def __call__(self, row: dict) -> None:
        if row.get("event") == "data":
            self._bar.update(self._task, description=row["what"], completed=row["done"], total=row["total"])
            of = "" if row["total"] is None else f" of {row['total']:,}"
            self._tell(f"{row['what']}, {row['done']:,}{of}")
        elif row.get("event") == "start":
            self._start(row)
        elif row.get("event") == "passes":
            self._say(f"[yellow]warning: {escape(row['text'])}[/]" if row["warning"] else escape(row["text"]))
        elif row.get("event") == "unfinished":
            self._say(f"[yellow]note: {escape(row['text'])}[/]")
        elif row.get("event") == "scoring":
            self._score(row)
        elif "event" in row:
            self._say(f"[yellow]{self._event(row)}[/]")
        elif "evaluation" in row:
            shown = row["shown"] or list(row["metrics"])[:1]
            measures = ((shown_score(row["metrics"][name]), name.replace("_", " ")) for name in shown)
            results = ", ".join(f"[bold]{score}[/] {escape(name)}" for score, name in measures)
            self._say(f"step {row['step']:>7,}  {row['evaluation']} {results}  ({row['seconds']:.1f} s)")
        elif "validation_loss" in row:
            scores = [
                f"  {measured(row[f'validation_{key}'], words.replace(' per ', '/'))}"
                for key, words in self._scores.items()
            ]
            loss = f"[bold]{row['validation_loss']:.4f}[/]"
            if not self._summary or row["step"] != self._steps:
                self._say(f"step {row['step']:>7,}  held-out loss {loss}{''.join(scores)}")
            self._bar.update(
                self._task, description="training", completed=row["step"], total=self._steps or None, state=""
            )
        else:
            self._training(row)

    def _start(self, row: dict) -> None:
        if self._before is not None:
            self._tell("counting FLOPs")
            self._before(row["steps"])
        self._waiting.close()
        self._steps, self._total = row["steps"], row.get("units")
        self._bar.update(self._task, description="training", completed=row["step"], total=row["steps"], state="")
        if row["step"]:
            self._say(f"continuing from step {row['step']:,} of {row['steps']:,}")

    def _score(self, row: dict) -> None:
        if row["done"] == 0:
            self._scoring, self._told = time.monotonic(), False
        seconds, state = time.monotonic() - self._scoring, ""
        if row["done"]:
            state = f"{duration(round(seconds * (row['total'] / row['done'] - 1)))} left"
        self._bar.update(
            self._task,
            description=f"scoring held-out {'text' if self._units == 'tokens' else self._units}",
            completed=row["done"],
            total=row["total"],
            state=state,
        )
        if not self._console.is_terminal and state and seconds >= SLOW and not self._told:
            self._told = True
            self._say(f"step {row['step']:>7,}  scoring {row['total']:,} held-out {self._units}, {state}")

    def _training(self, row: dict) -> None:
        if "loss" not in row:  # a point of the curve between two rows
            return
        speed = row[f"{self._units}_per_second"]
        total = self._total or self._steps * row[self._units] / row["step"]
        left = max(0.0, total - row[self._units]) / speed
        state = f"loss {row['loss']:.4f}  {speed:,.0f} {self._units}/s  {duration(round(left))} left"
        if row["flop_utilisation"] is not None:
            state += f"  {row['flop_utilisation']:.1%} of peak"
        self._bar.update(self._task, completed=row["step"], state=state)
        if not self._console.is_terminal and time.monotonic() - self._printed >= QUIET:
            self._printed = time.monotonic()
            self._say(f"step {row['step']:,} of {self._steps:,}  {state}")

    def _event(self, row: dict) -> str:
        if row["event"] == "damaged_checkpoint":
            aside = f"damaged checkpoint set aside: {'; '.join(row['problems'])}"
            return escape(f"{aside}; continuing from step {row['step']}")
        if row["event"] == ROWS_LOST:
            return escape("; ".join(row["problems"]))
        if row["event"] == "evaluation_failed":
            return escape(f"step {row['step']:,}: evaluation {row['evaluation']} failed ({row['error']}); continuing")
        if row["event"] == "extended":
            return f"step {row['step']:,}: extended from {row['from_steps']:,} steps to {row['steps']:,}"
        if row["event"] == "execution_changed":
            changed = ", ".join(f"{key} {before} -> {after}" for key, (before, after) in row["changed"].items())
            return escape(f"from step {row['step']:,} on: execution changed ({changed}); losses agree up to rounding")
        numbers = f"loss {row['loss']:.4g}, gradient {row['grad_norm']:.4g}"
        what = f"step {row['step']:,}: {_EVENTS[row['event']]} ({numbers})"
        if row["action"] == "rollback":
            return f"{what}; back to step {row['to_step']:,}, {len(row['left_out'])} batches left out"
        return f"{what}; {'batch skipped' if row['action'] == 'skip' else 'stopped'}"

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
