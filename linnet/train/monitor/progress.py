"""Terminal output while a run trains: a progress bar with the time left, or occasional lines without a terminal."""

import math
import time
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from linnet.evaluate.results import shown_score
from linnet.runs.record import ROWS_LOST

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

    def __init__(self, console: Console, units: str = "tokens", scores: Mapping[str, str] | None = None):
        """
        Args:
            units, scores: `units` and `SCORES` of the objective (`linnet.train.objective.RunObjective`).
        """
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
        self._scoring, self._told = 0.0, False  # start time of scoring, and whether a line reported it

    @property
    def started(self) -> bool:
        """Whether training started; it does not for a run that was already done."""
        return self._steps > 0

    def __enter__(self) -> "TerminalProgress":
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def __call__(self, row: dict) -> None:
        if row.get("event") == "data":
            self._bar.update(self._task, description=row["what"], completed=row["done"], total=row["total"])
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
            self._say(f"step {row['step']:>7,}  held-out loss {loss}{''.join(scores)}")
            self._bar.update(
                self._task, description="training", completed=row["step"], total=self._steps or None, state=""
            )
        else:
            self._training(row)

    def _start(self, row: dict) -> None:
        self._steps = row["steps"]
        self._bar.update(self._task, description="training", completed=row["step"], total=row["steps"], state="")
        if row["step"]:
            self._say(f"continuing from step {row['step']:,} of {row['steps']:,}")

    def _score(self, row: dict) -> None:
        if row["done"] == 0:
            self._scoring, self._told = time.monotonic(), False
        seconds, state = time.monotonic() - self._scoring, ""
        if row["done"]:
            state = f"{_duration(seconds * (row['total'] / row['done'] - 1))} left"
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
        left = (self._steps - row["step"]) * row[self._units] / row["step"] / speed
        state = f"loss {row['loss']:.4f}  {speed:,.0f} {self._units}/s  {_duration(left)} left"
        if row["flop_utilisation"] is not None:
            state += f"  {row['flop_utilisation']:.1%} of peak"
        self._bar.update(self._task, completed=row["step"], state=state)
        if not self._console.is_terminal and time.monotonic() - self._printed >= QUIET:
            self._printed = time.monotonic()
            self._say(f"step {row['step']:,} of {self._steps:,}  {state}")

    def _event(self, row: dict) -> str:
        if row["event"] == "damaged_checkpoint":
            return escape(
                f"damaged checkpoint set aside: {'; '.join(row['problems'])}; continuing from step {row['step']}"
            )
        if row["event"] == ROWS_LOST:
            return escape("; ".join(row["problems"]))
        if row["event"] == "evaluation_failed":
            return escape(f"step {row['step']:,}: evaluation {row['evaluation']} failed ({row['error']}); continuing")
        if row["event"] == "extended":
            return f"step {row['step']:,}: extended from {row['from_steps']:,} steps to {row['steps']:,}"
        if row["event"] == "execution_changed":
            changed = ", ".join(f"{key} {before} -> {after}" for key, (before, after) in row["changed"].items())
            return escape(f"from step {row['step']:,} on: execution changed ({changed}); losses agree up to rounding")
        what = (
            f"step {row['step']:,}: {_EVENTS[row['event']]} (loss {row['loss']:.4g}, gradient {row['grad_norm']:.4g})"
        )
        if row["action"] == "rollback":
            return f"{what}; back to step {row['to_step']:,}, {len(row['left_out'])} batches left out"
        return f"{what}; {'batch skipped' if row['action'] == 'skip' else 'stopped'}"

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
