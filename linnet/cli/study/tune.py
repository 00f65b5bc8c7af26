"""`linnet study tune`: the best learning rate of each architecture by width."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from linnet.options import WIDE, AllowPlugins, Count, echo_json, end_with_failed, make_table, options, working

if TYPE_CHECKING:
    from linnet.study.tune import Tuned


@options
def tune(
    config: Path,
    *,
    widths: str = "",
    rates: int = 5,
    seeds: Count = 2,
    target: float | None = None,
    architectures: str | None = None,
    set_: list[str] | None = None,
    workers: Count | None = None,
    out: Path = Path("studies"),
    plan: bool = False,
    allow_plugins: AllowPlugins = False,
    json_: bool = False,
) -> None:
    """Find the best learning rate of each architecture at several widths.

    The loss is fitted by a parabola in log2 of the rate, and the best rate
    by a power law of the width. A sweep whose optimum is at its edge gets two
    more rates there. NAME/tune/rates.yaml has the result: a study reads it by
    learning_rate: {from: studies/NAME/tune/rates.yaml}. Other architectures
    that the file has keep their rates. Stop at any time: the same command
    resumes. The exit code is 1 if a run failed, or if no law was found.

    [bold]linnet study tune configs/demo.yaml --widths 32,64,128[/]

    Args:
        config: A study file, such as [bold]configs/demo.yaml[/].
        widths: Widths with commas between: 64,128,256 (default: the three smallest of CONFIG's sizes).
        rates: Rates of a sweep, a factor 2 apart; odd, at least 5.
        seeds: Seeds of each rate.
        target: Training FLOPs (or tokens) of each run (default: the smallest of CONFIG's budgets or tokens).
        architectures: Only these, with commas between: tnl,hgrn2.
        set_ (KEY=VALUE): Change a setting: --set seq_len=128; may be given again.
        workers: Runs at the same time. Default: one per GPU, or one per CPU core.
        out: Folder of studies; the sweeps are in NAME/tune in it.
        plan: Show the runs of the first sweeps; train nothing.
        json_: Print the rates as JSON.
    """
    from functools import partial

    from linnet.cli.study import _settings
    from linnet.cli.study.page import print_plan
    from linnet.config import FITS, check_study, gather, refuse
    from linnet.study.executors import worker_slots
    from linnet.study.rates import TUNE
    from linnet.study.runner import CACHE
    from linnet.study.timing import estimate
    from linnet.study.tune import check_rates, make_sweeps, plan_sweeps
    from linnet.study.tune import tune as run

    console = Console(stderr=json_)
    problems: list[str] = []
    chosen: list[int] = []
    with gather(problems):
        check_rates(rates)
    try:
        chosen = [int(part) for part in widths.split(",") if part.strip()]
    except ValueError:
        problems.append(f"--widths {widths!r}: not whole numbers; write 64,128,256")
    with gather(problems):
        with working("checking the settings"):
            settings = _settings(config, None, architectures, None, workers, set_ or [], out / CACHE, allow_plugins)
        sweeps = make_sweeps(settings, chosen)
    if target is not None and not target > 0:
        problems.append(f"--target {target:g}: give a positive number of FLOPs (or tokens) of each run, such as 1e14")
    refuse(problems, "command line")
    check_study(FITS, "study tune")
    if plan:
        places = {
            (sweep.architecture.name, sweep.width): list(range(-(rates // 2), rates // 2 + 1)) for sweep in sweeps
        }
        with working("planning the sweeps") as progress:
            made = plan_sweeps(settings, sweeps, places, seeds, target, out / settings.name)
            seconds = estimate(made, progress)
        done = {path.parent.name for path in (out / settings.name / TUNE).glob("runs/*/result.json")}
        print_plan(made, seconds, worker_slots(settings.executor, settings.devices), done, console, settings.name)
        return
    options = {"widths": chosen or None, "rates": rates, "seeds": seeds, "target": target}
    tell = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    tuned = run(settings, out, **options, console=console, tell=tell)
    if json_:
        laws = {name: law.model_dump(mode="json") for name, law in tuned.laws.items()}
        echo_json({"architectures": laws, "refused": tuned.refused})
    else:
        print_rates(tuned, console)
    for line in _earlier(tuned):
        tell(line)
    end_with_failed(tuned.failed, console)
    if not tuned.laws:
        raise typer.Exit(1)


def _earlier(tuned: "Tuned") -> Iterator[str]:
    """Yields what became of the laws that rates.yaml had before: replaced by other ones, or kept."""
    from linnet.study.tune import RATES

    for name, law in tuned.before.items():
        widths = f"widths {', '.join(map(str, law.widths))}"
        if name not in tuned.laws:
            yield f"{RATES} keeps the law of {name} from before ({widths})"
        elif law != tuned.laws[name]:
            yield f"{name}: replaces the law from before, rate = {law.a:.3g} d^{law.b:.2f} ({widths})"


def print_rates(found: "Tuned", console: Console) -> None:
    """Prints the best rate of each architecture and width, and the law through them."""
    from rich.markup import escape

    from linnet.study.tune import RATES

    table = make_table("architecture", "#width", "#best rate", "#95 %", "#loss", no_wrap=True, style=WIDE)
    for name, vertices in found.vertices.items():
        for width, vertex in sorted(vertices.items()):
            tuned = found.laws[name].widths.get(width) if name in found.laws else None
            ends = "" if tuned is None else f"{tuned.low:.3g} to {tuned.high:.3g}"
            rate = "refused" if vertex.rate is None else f"{vertex.rate:.3g}"
            table.add_row(name, str(width), rate, ends, f"{vertex.loss:.4f}")
    console.print(table)
    for name, law in found.laws.items():
        note = "" if law.fits else "; the widths contradict a power law, so the interval is that of their scatter"
        ends = f"95 % {law.b_low:.2f} to {law.b_high:.2f}"
        console.print(f"{escape(name)}: rate = {law.a:.3g} d^{law.b:.2f} ({ends}){note}", highlight=False)
    for line in found.refused:
        console.print(f"[yellow]refused[/] {escape(line)}", highlight=False)
    if found.laws:
        path = found.folder / RATES
        console.print(f"use them in a study: [bold]learning_rate: {{from: {escape(str(path))}}}[/]", highlight=False)
