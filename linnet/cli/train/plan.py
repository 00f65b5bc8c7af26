"""`linnet train --plan`: what a training will need, before anything starts."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from linnet.options import echo_json, make_table, working

if TYPE_CHECKING:
    from linnet.train import TrainConfig
    from linnet.train.coordinates import Check
    from linnet.train.costs import Plan


SMALL = 1024  # the width below which the speed that `--plan` assumes is too high
SPEEDS = "compute_seconds step_seconds tokens_per_second tokens_per_second_per_gpu efficiency seconds".split()


def show_plan(settings: "TrainConfig", devices: int, gpu: str, memory: float | None, json_: bool) -> None:
    """Prints memory, traffic and time of a training and which data are missing; raises ConfigError if it does not fit.

    Args:
        devices: number of GPUs. gpu: name of `linnet.train.costs.GPUS`, or auto.
        memory: GiB of one GPU, in place of the known number.
    """
    import torch

    from linnet.config import ConfigError
    from linnet.data.problems import missing_text
    from linnet.train import float8, passes
    from linnet.train.costs import find_gpu, plan_training, refuse
    from linnet.train.preflight import length_problems

    if settings.objective not in ("text", "chat"):
        problem = (
            f"--plan: counts trainings of text and chat only, not objective: {settings.objective}; train a few steps "
            "instead"
        )
        raise ConfigError([problem], "command line")
    narrow = settings.precision == "float8"
    if problems := length_problems(settings) + (float8.model_problems(settings.model) if narrow else []):
        raise ConfigError(problems, "train")
    notes = [float8.summary(settings.model, settings.run.compile)] if narrow else []
    with working("planning the training"):
        costs, missing = plan_training(settings, devices, find_gpu(gpu, memory)), missing_text(settings.data)
    sources = []
    if getattr(settings.data, "mixture", None):
        sizes = [passes.estimate(settings.data, source.source) for source in settings.data.mixture]
        tokens = settings.batch_sizes.first(settings.total_steps) * settings.seq_len
        sources = passes.gives(settings.data.mixture, sizes, tokens)
    if json_:
        values = costs.as_dict() | (dict.fromkeys(SPEEDS) if settings.model.d_model < SMALL else {})
        if narrow:
            values["float8"] = notes[0][0]
        echo_json({**values, "missing": missing, "sources": sources})
    else:
        console = Console(soft_wrap=True, highlight=False)
        if gpu.partition(",")[0].strip().lower() == "auto" and not torch.cuda.is_available():
            console.print(f"no GPU is visible, so this plan assumes {costs.gpu.name}; choose another with --gpu NAME")
        _print(costs, settings, console)
        for text, warning in notes + passes.lines(sources, about=True):
            console.print(f"[yellow]warning[/] {escape(text)}" if warning else escape(text))
        print_missing(missing, console)
    refuse(costs, settings)


def print_missing(problems: list[str], console: Console) -> None:
    """Prints which data of a plan are not there: the plan needs none, but what it prices does."""

    for line in problems:
        console.print(f"[yellow]missing[/] {escape(line)}; this plan needs no data", highlight=False, soft_wrap=True)


def _print(plan: "Plan", settings: "TrainConfig", console: Console) -> None:
    from linnet.report import units
    from linnet.train.costs import GIB
    from linnet.train.optimizer import warning

    gpu, degrees = plan.gpu, plan.degrees
    console.print(
        f"[bold]{escape(settings.name or settings.architecture)}[/]: {units.count(plan.parameters)} parameters, "
        f"{plan.devices} x {escape(gpu.name)}, {degrees.written()}"
    )
    console.print(
        f"batch {settings.written_batch} x {settings.seq_len:,} tokens; each GPU: {plan.parts} x {plan.rows} rows of "
        f"{settings.seq_len // degrees.sp:,} tokens, recompute {plan.recompute}"
    )
    title = {"title": f"memory per GPU at the peak: {plan.moment}", "title_justify": "left"}
    table = make_table("part", "#GiB", style=title)
    for name, size in plan.memory.items():
        table.add_row(name, f"{size / GIB:.1f}" if size > GIB / 20 else f"{size / GIB:.2g}")
    table.add_row("[bold]total[/]", f"[bold]{plan.total / GIB:.1f}[/] of {gpu.memory:.0f}")
    console.print(table)
    table = make_table("what", "#GB received", "#ms", "", style=title | {"title": "traffic per GPU and step"})
    for transfer in plan.transfers:
        beside = "beside the compute" if transfer.hidden else "[bold]waits[/]"
        received, waited = units.significant(transfer.received / 1e9), units.significant(transfer.seconds * 1e3)
        table.add_row(transfer.name, received, waited, beside)
    if plan.transfers:
        console.print(table)
    tokens, seconds = plan.tokens_per_step / plan.step_seconds, plan.step_seconds
    if settings.model.d_model < SMALL:
        console.print(
            f"time: not estimated for models narrower than {SMALL:,}, which do not reach the {gpu.speed:.0f} TFLOP/s "
            "that a plan assumes; train a few steps to measure it"
        )
    else:
        console.print(
            f"time: {plan.compute_seconds:.3g} s of compute per step at {gpu.speed:.0f} TFLOP/s, {seconds:.3g} s with "
            f"communication (efficiency {plan.compute_seconds / seconds:.2f}); {tokens:,.0f} tokens/s, "
            f"{tokens / plan.devices:,.0f} per GPU; {plan.steps:,} steps take {units.duration(plan.batches * seconds)}"
        )
    if text := warning(settings.schedule, plan.steps):
        console.print(f"[yellow]warning: {escape(text)}[/]")


# `linnet train --coordinate-check`: do activations stay the same size at every width?


def show_coordinates(settings: "TrainConfig", cache: Path, json_: bool) -> None:
    """Trains the model of a training for a few steps at several widths and prints how its activations compare.

    Ends with exit code 1 if muP does not pass, or if `standard`, which must fail, passes.
    """
    from functools import partial

    from linnet.train.coordinates import check_coordinates

    console = Console(stderr=json_, soft_wrap=True, highlight=False)
    checks = check_coordinates(settings, cache, tell=partial(console.print, "coordinate check,"))
    check, control = checks[0], checks[-1]
    if json_:
        echo_json([_record(check) for check in checks])
    else:
        _print_checks(checks, console)
    if control.passed:
        console.print("[yellow]standard passes and should fail, so this says nothing: raise optimizer.learning_rate[/]")
        raise typer.Exit(1)
    place = (
        f"{check.worst.module} at step {check.worst.step} {'grows' if check.worst.grows else 'falls'} with the width"
    )
    if check is control:
        fix = "to keep one learning rate at every width, set model.parametrisation=mup and model.base_width"
        console.print(f"standard fails, as it should: {place}; {fix}")
        return
    if not check.passed:
        console.print(
            f"[red]{check.parametrisation} does not pass:[/] {place} (docs/mixers.md lists the mixers that do)"
        )
        raise typer.Exit(1)
    console.print(f"{check.parametrisation} passes, and standard fails the same check, as it should")


def _record(check: "Check") -> dict:
    return {
        "parametrisation": check.parametrisation,
        "passed": check.passed,
        "widths": list(check.widths),
        "worst": check.worst.ratio,
        "coordinates": [
            {
                "module": coordinate.module,
                "step": coordinate.step,
                "values": list(coordinate.values),
                "ratio": coordinate.ratio,
            }
            for coordinate in check.coordinates
        ],
    }


def _print_checks(checks: "list[Check]", console) -> None:
    from linnet.train.coordinates import LIMIT, STEPS, Coordinate

    for check in checks:
        if check.parametrisation == "standard":
            words = "[yellow]passes, and should fail[/]" if check.passed else "fails, as it should"
        else:
            words = "[green]passes[/]" if check.passed else "[red]does not pass[/]"
        title = (
            f"parametrisation: {check.parametrisation} {words} (largest ratio {check.worst.ratio:.3g}, allowed "
            f"{LIMIT:g}; widths {check.widths[0]} to {check.widths[-1]})"
        )
        style = {"title": title, "title_justify": "left", "pad_edge": False}
        table = make_table("module", *(f"#step {step}" for step in STEPS), style=style)
        rows: dict[str, dict[int, Coordinate]] = {}
        for coordinate in check.coordinates:  # the worst block of each kind of module
            row = rows.setdefault(re.sub(r"^blocks\.\d+", "block", coordinate.module), {})
            row[coordinate.step] = max(
                coordinate, row.get(coordinate.step, coordinate), key=lambda candidate: candidate.ratio
            )
        for name, by_step in rows.items():
            worst = [by_step[step] for step in STEPS]
            colours = ["red" if coordinate.counts and coordinate.ratio > LIMIT else "default" for coordinate in worst]
            cells = [f"[{colour}]{coordinate.ratio:.2f}[/]" for coordinate, colour in zip(worst, colours, strict=True)]
            table.add_row(escape(name), *cells)
        console.print(table)
