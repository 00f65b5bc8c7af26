"""Prints the plan of a study before it starts, and its laws when it is done."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from linnet.config import count_of, grouped
from linnet.options import WIDE, duration, make_table
from linnet.study.ladder import Plan, PlannedRun, find_units
from linnet.study.progress import count
from linnet.study.sensitivity import FACTORS, FIX, UNKNOWN, Sensitivities, doubts, sentences, shown_loss, shown_value
from linnet.study.timing import wall_seconds

if TYPE_CHECKING:
    from linnet.laws.fit import StudyFit

LONG = 120.0  # seconds of all workers from which a plan says what takes them
MOST = 0.6  # share of the time from which one architecture is named


def print_plan(
    plan: Plan,
    seconds: dict[str, float] | None,
    workers: int,
    done: Container[str],
    console: Console,
    tuned: str = "",
) -> None:
    """Prints a row per architecture and budget: sizes, steps, tokens (or FLOPs) and time; then the remaining cost.

    Args:
        tuned: the name of the study, if these are the runs that sweep its learning rates, from which no law is fitted.
    """
    by_tokens, units = bool(plan.config.tokens), find_units(plan.config)
    title = f"study {tuned}: learning rates" if tuned else f"study {plan.config.name}"
    console.print(title, highlight=False, markup=False, style="bold")
    first, last = (units, "FLOPs") if by_tokens else ("FLOPs", units)
    columns = ("architecture", f"#{first}", "#runs", "#parameters", "#steps", f"#{last}", "#time")
    table = make_table(*columns, no_wrap=True, style=WIDE)
    groups = grouped(((run.architecture, run.tokens if by_tokens else run.budget), run) for run in plan.runs)
    order = {architecture.name: i for i, architecture in enumerate(plan.config.architectures)}
    for (name, target), runs in sorted(groups.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        table.add_row(
            name,
            count(target) if by_tokens else f"{target:.3g}",
            str(len(runs)),
            _range(run.params_non_embedding for run in runs),
            _range(run.steps for run in runs),
            _range((run.flops for run in runs), "{:.2g}".format) if by_tokens else _range(run.tokens for run in runs),
            duration(sum(seconds[run.run] for run in runs)) if seconds else "?",
        )
    console.print(table)
    if plan.sensitivity:
        _print_rate_runs(plan, seconds, console)
    which = f" ({len(plan.runs)} for the fits, {len(plan.sensitivity)} at other rates)" if plan.sensitivity else ""
    total = f"{count_of(len(plan.all_runs), 'run')}{which}, {plan.flops:.3g} training FLOPs"
    missing = [run for run in plan.all_runs if run.run not in done]
    if len(missing) < len(plan.all_runs):
        total += f", {sum(run.flops for run in missing):.3g} of them still to do"
    if seconds:
        wall = wall_seconds([seconds[run.run] for run in missing], workers)
        total += f": about {duration(wall)} with {workers} worker{'s' * (workers > 1)}"
    else:
        total += "; too large to time here (set executor.throughput, FLOP/s of a worker, for an estimate)"
    console.print(total, highlight=False, soft_wrap=True)
    notes = [] if tuned else plan.notes()
    for note in notes + costly(plan, seconds or {}, missing):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def costly(plan: Plan, seconds: Mapping[str, float], missing: Sequence[PlannedRun]) -> list[str]:
    """Returns a line about an architecture that takes most of the time of a long plan, with the keys that lower it."""
    times: dict[str, float] = {}
    for run in missing:
        times[run.architecture] = times.get(run.architecture, 0.0) + seconds.get(run.run, 0.0)
    total = sum(times.values())
    if len(times) < 2 or total < LONG or max(times.values()) < MOST * total:
        return []
    name = max(times, key=lambda name: times[name])
    key = "tokens" if plan.config.tokens else "budgets"
    return [
        f"{name} takes {times[name] / total:.0%} of the time; smaller or fewer `{key}`, or fewer `sizes` of {name}, "
        "make the study shorter"
    ]


def _print_rate_runs(plan: Plan, seconds: dict[str, float] | None, console: Console) -> None:
    """Prints a row per architecture: the size and budget of its runs at other learning rates, and their cost."""
    console.print("rate sensitivity: the same run at other learning rates, in no fit", highlight=False)
    columns = ("architecture", "#size", "#FLOPs", "#learning rates", "#steps", "#time")
    table = make_table(*columns, no_wrap=True, style=WIDE)
    for architecture in plan.config.architectures:
        runs = [run for run in plan.sensitivity if run.architecture == architecture.name]
        runs.sort(key=lambda run: run.factor)
        if runs:
            table.add_row(
                architecture.name,
                runs[0].size,
                f"{runs[0].budget:.3g}",
                ", ".join(f"{run.learning_rate:.3g}" for run in runs),
                count(runs[0].steps),
                duration(sum(seconds[run.run] for run in runs)) if seconds else "?",
            )
    console.print(table)


def print_sensitivities(found: Sensitivities, architectures: int, console: Console) -> None:
    """Prints the loss of each architecture at three learning rates, and the pairs that differ by less.

    Args:
        architectures: how many the study compares; without further runs, a comparison says so.
    """
    if not found:
        if architectures > 1:
            console.print(f"{UNKNOWN} ({FIX})", highlight=False, soft_wrap=True)
        return
    columns = ("architecture", "size", "#FLOPs", "#rate", "#loss at 1/2", "#at 1", "#at 2 x", "#sensitivity")
    table = make_table(*columns, style={"header_style": "bold"})
    for row in found.values():
        numbers = [shown_loss(row, factor) for factor in (FACTORS[0], 1.0, FACTORS[1])]
        table.add_row(row.architecture, row.size, f"{row.budget:.3g}", f"{row.rate:.3g}", *numbers, shown_value(row))
    console.print("loss at half, one and two times the learning rate, and the largest difference:", highlight=False)
    console.print(table)
    for text in sentences(doubts(found)):
        told = f"{text}: the learning rate may decide which is better"
        console.print(told, highlight=False, markup=False, soft_wrap=True)


def print_laws(study: "StudyFit", console: Console) -> None:
    """Prints the laws of each architecture with their intervals, in the words of `linnet fit`."""
    from linnet.cli.fit.page import show_summary

    console.print("\n[bold]scaling laws[/]")
    show_summary(console, study)


def _range(values: Iterable[float], shown: Callable[[float], str] = count) -> str:
    values = sorted(values)
    low, high = shown(values[0]), shown(values[-1])
    return low if low == high else f"{low}-{high}"
