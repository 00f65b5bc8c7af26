"""`linnet mad`: the synthetic tasks of MAD, and the scores made from them."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linnet.mad.cli.agreement import agreement, waterfall
from linnet.mad.cli.report import correlate, report
from linnet.mad.cli.run import run
from linnet.options import RULED, AsJson, echo_json, make_table, options

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Score an architecture by its skills: six synthetic tasks (paper 004, MAD), and MQAR.",
)
app.command("run")(run)
app.command("report")(report)
app.command("correlate")(correlate)
app.command("agreement")(agreement)
app.command("waterfall")(waterfall)


@app.command()
@options
def data(
    task: str,
    *,
    set_: list[str] | None = None,
    n: Annotated[int, typer.Option("--n", min=1)] = 1000,
    split: str = "train",
    spec: str = "paper",
    seed: int = 0,
    show: Annotated[int, typer.Option(min=0)] = 2,
    out: Path | None = None,
) -> None:
    """Draw samples of a task and print some, or write them.

    The name of an input token shows its kind: k3 is a key, v7 a value, n1
    noise, d5 data, \\[b] a blank. The line below shows the targets; a dot is a
    position without a target.

    Example: [bold]linnet mad data noisy_recall --set vocab_size=32 --set seq_len=32[/]

    Args:
        task: One of the six in [bold]linnet mad list[/], such as in_context_recall, or mqar.
        set_ (KEY=VALUE): A variable of the task: vocab_size=32; may be given again.
        n: Samples to draw.
        split (train|validation|test): Split that the samples are of; no sample is in two.
        spec (paper|mad-lab): [bold]paper[/], or [bold]mad-lab[/]: the distributions of the published implementation.
        seed: The same seed gives the same bytes, on any machine.
        show: Samples to print.
        out: Write all samples: arrays inputs and targets (.npz), or an object per line (.jsonl).
    """
    from linnet.config import ConfigError, override, parse, refuse
    from linnet.data.synthetic import IGNORE, find_task, generate

    kind = find_task(task)
    problems = []
    if split not in ("train", "validation", "test"):
        problems.append(f"--split {split!r} is unknown; use train, validation or test")
    if out is not None and out.suffix not in (".npz", ".jsonl"):
        problems.append(f"--out {str(out)!r}: unknown format; use a name that ends in .npz or .jsonl")
    if out is not None and not out.absolute().parent.is_dir():
        problems.append(
            f"--out {str(out)!r}: the folder {str(out.absolute().parent)!r} does not exist; create it first"
        )
    refuse(problems, "command line")
    config = parse(kind, override({"spec": spec}, set_ or []), kind.name)
    inputs, targets = generate(config, split, n, seed=seed)
    if out is not None:
        about = {"task": kind.name, "options": config.model_dump(mode="json"), "split": split, "seed": seed}
        try:
            _write(out, inputs, targets, about | {"ignore": IGNORE, "num_tokens": config.num_tokens})
        except OSError as error:
            problem = f"--out {str(out)!r}: cannot be written ({error.strerror}); choose another place"
            raise ConfigError([problem], "command line") from None
        typer.echo(f"{n:,} samples of {inputs.shape[1]:,} tokens in {out}")
        return
    _print_samples(config, inputs, targets, split, show)


@app.command("list")
@options
def list_settings(
    *,
    budget: str = "full",
    tasks: str = "",
    settings: str = "",
    spec: str | None = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks, their settings, and the runs that one architecture needs.

    With --json, the settings and runs of all other budgets are included.

    Example: [bold]linnet mad list --budget full --tasks fuzzy_recall --settings seq_len[/]

    Args:
        budget (NAME): smoke, core, screen, full, published, mqar or mqar-short.
        tasks (TASK,...): Only these tasks, with commas between (default: all).
        settings (SETTING,...): Only these settings: a name, its second half, or the variable (seq_len) (default: all).
        spec (paper|mad-lab): [bold]paper[/], or [bold]mad-lab[/]: the distributions of the published implementation
            (default: paper; published: mad-lab).
        as_json: Print one JSON object.
    """
    from linnet.mad.settings import BUDGETS, listing, plan

    names = [[name.strip() for name in text.split(",") if name.strip()] for text in (tasks, settings)]
    runs = plan(budget, tasks=names[0], settings=names[1], spec=spec)
    spec = spec or BUDGETS[budget].spec or "paper"
    if as_json:
        about = {name: {"summary": other.summary, "comparable": other.comparable} for name, other in BUDGETS.items()}
        every = {name: summary | listing(_whole(name, spec)) for name, summary in about.items()}
        echo_json({"spec": spec, "budget": budget, **listing(runs), "budgets": every})
    else:
        _print_settings(runs, budget, spec)


def _write(path: Path, inputs, targets, about: dict) -> None:
    import numpy as np

    from linnet.data.parts import whole_file

    with whole_file(path) as file:
        if path.suffix == ".npz":
            np.savez_compressed(file, inputs=inputs, targets=targets, about=json.dumps(about))
            return
        for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
            file.write(json.dumps({"inputs": row, "targets": answers}).encode() + b"\n")


def _print_samples(config, inputs, targets, split: str, show: int) -> None:
    from linnet.data.synthetic import IGNORE
    from linnet.data.synthetic.base import aligned

    console = Console(soft_wrap=True, highlight=False)
    asked = (targets != IGNORE).sum(axis=1)
    console.print(f"{config.name}: {config.summary}", markup=False)
    options = " ".join(f"{key}={value}" for key, value in config.model_dump(mode="json").items())
    console.print(options, markup=False)
    parts = ", ".join(
        f"{kind.name} {kind.start}" + (f" to {kind.stop - 1}" if kind.size > 1 else "") for kind in config.kinds
    )
    console.print(f"{config.num_tokens:,} ids: {parts}", markup=False)
    console.print(
        f"{len(inputs):,} {split} samples of {inputs.shape[1]:,} tokens, {asked.mean():.2f} targets in each on average"
        + (f"; {show} are shown (--show)" if show < len(inputs) else "")
    )
    width = max(20, console.width if console.is_terminal else 100)
    for number in range(min(show, len(inputs))):
        console.print(f"-- {split} {number}", style="dim")
        for above, below in aligned(config, inputs[number], targets[number], width):
            console.print(above, markup=False)
            console.print(below, markup=False, style="bold green")


def _whole(budget: str, spec: str):
    """Returns all runs of a budget; MQAR and `published` have one form only, whatever the spec."""
    from linnet.mad.settings import BUDGETS, plan

    fixed = BUDGETS[budget].mqar or BUDGETS[budget].spec
    return plan(budget, spec=None if fixed else spec)


def _print_settings(runs, budget: str, spec: str) -> None:
    from linnet.mad.settings import BUDGETS

    columns = ("setting", "#tokens", "#length", "#samples", "#batch", "#runs", "#steps")
    table = make_table(*columns, no_wrap=True, style=RULED)
    settings = list(dict.fromkeys(run.setting for run in runs))
    task = None
    for setting in settings:
        group = [run for run in runs if run.setting == setting]
        if task != setting.task.name:
            table.add_section()
            task = setting.task.name
            table.add_row(f"[bold]{task}[/]")
        table.add_row(
            f"  {setting.short_name}",
            f"{setting.task.num_tokens:,}",
            f"{setting.task.input_length:,}",
            f"{setting.train_samples:,}",
            str(group[0].batch_size),
            str(len(group)),
            f"{sum(run.steps for run in group):,}",
        )
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    points = len(BUDGETS[budget].grid)
    steps = sum(run.steps for run in runs)
    console.print(
        f"{budget}: {len(settings)} settings x {points} (learning rate, weight decay) = {len(runs)} runs "
        f"of {runs[0].epochs} epochs, {steps:,} steps per architecture; spec {spec}"
    )
    for name, other in BUDGETS.items():
        every = _whole(name, spec)
        settings = len({run.setting.name for run in every})
        console.print(f"  --budget {name:<10} {settings:>3} settings, {len(every):>3} runs: {other.summary}")
