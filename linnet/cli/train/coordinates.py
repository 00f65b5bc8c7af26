"""`linnet train --coordinate-check`: do activations stay the same size at every width?"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from linnet.options import echo_json, make_table

if TYPE_CHECKING:
    from linnet.train import TrainConfig
    from linnet.train.coordinates import Check


def show_coordinates(settings: "TrainConfig", cache: Path, json_: bool) -> None:
    """Trains the model of a training for a few steps at several widths and prints how its activations compare.

    Ends with exit code 1 if muP does not pass, or if `standard`, which must fail, passes.
    """
    from functools import partial

    from rich.console import Console

    from linnet.train.coordinates import check_coordinates

    console = Console(stderr=json_, soft_wrap=True, highlight=False)
    checks = check_coordinates(settings, cache, tell=partial(console.print, "coordinate check,"))
    own, control = checks[0], checks[-1]
    if json_:
        echo_json([_record(check) for check in checks])
    else:
        _print(checks, console)
    if control.passed:
        console.print("[yellow]standard passes and should fail, so this says nothing: raise optimizer.learning_rate[/]")
        raise typer.Exit(1)
    place = f"{own.worst.module} at step {own.worst.step} {'grows' if own.worst.grows else 'falls'} with the width"
    if own is control:
        fix = "to keep one learning rate at every width, set model.parametrisation=mup and model.base_width"
        console.print(f"standard fails, as it should: {place}; {fix}")
        return
    if not own.passed:
        console.print(f"[red]{own.parametrisation} does not pass:[/] {place} (docs/mixers.md lists the mixers that do)")
        raise typer.Exit(1)
    console.print(f"{own.parametrisation} passes, and standard fails the same check, as it should")


def _record(check: "Check") -> dict:
    return {
        "parametrisation": check.parametrisation,
        "passed": check.passed,
        "widths": list(check.widths),
        "worst": check.worst.ratio,
        "coordinates": [
            {"module": one.module, "step": one.step, "values": list(one.values), "ratio": one.ratio}
            for one in check.coordinates
        ],
    }


def _print(checks: "list[Check]", console) -> None:
    from rich.markup import escape

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
        for one in check.coordinates:  # the worst block of each kind of module
            row = rows.setdefault(re.sub(r"^blocks\.\d+", "block", one.module), {})
            row[one.step] = max(one, row.get(one.step, one), key=lambda one: one.ratio)
        for name, found in rows.items():
            worst = [found[step] for step in STEPS]
            colours = ["red" if one.counts and one.ratio > LIMIT else "default" for one in worst]
            cells = [f"[{colour}]{one.ratio:.2f}[/]" for one, colour in zip(worst, colours, strict=True)]
            table.add_row(escape(name), *cells)
        console.print(table)
