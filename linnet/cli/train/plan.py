"""`linnet train --plan`: what a training will need, before anything starts."""

from typing import TYPE_CHECKING

from linnet.options import echo_json, make_table

if TYPE_CHECKING:
    from rich.console import Console

    from linnet.train import TrainConfig
    from linnet.train.costs.plan import Plan


SMALL = 1024  # the width below which the speed that `--plan` assumes is too high
SPEEDS = "compute_seconds step_seconds tokens_per_second tokens_per_second_per_gpu efficiency seconds".split()


def show_plan(settings: "TrainConfig", devices: int, gpu: str, memory: float | None, json_: bool) -> None:
    """Prints memory, traffic and time of a training and which data are missing; raises ConfigError if it does not fit.

    Args:
        devices: number of GPUs. gpu: name of `linnet.train.costs.plan.GPUS`, or auto.
        memory: GiB of one GPU, in place of the known number.
    """

    from rich.console import Console
    from rich.markup import escape

    from linnet.config import ConfigError
    from linnet.data.problems import missing_text
    from linnet.train import passes
    from linnet.train.costs.plan import find_gpu, plan, refuse
    from linnet.train.preflight import length_problems

    if settings.objective not in ("text", "chat"):
        problem = (
            f"--plan: counts trainings of text and chat only, not objective: {settings.objective}; train a few steps "
            "instead"
        )
        raise ConfigError([problem], "command line")
    if problems := length_problems(settings):
        raise ConfigError(problems, "train")
    found, missing = plan(settings, devices, find_gpu(gpu, memory)), missing_text(settings.data)
    sources = []
    if getattr(settings.data, "mixture", None):
        sizes = [passes.estimate(settings.data, source.source) for source in settings.data.mixture]
        tokens = settings.batch_sizes.first(settings.total_steps) * settings.seq_len
        sources = passes.gives(settings.data.mixture, sizes, tokens)
    if json_:
        values = found.as_dict() | (dict.fromkeys(SPEEDS) if settings.model.d_model < SMALL else {})
        echo_json({**values, "missing": missing, "sources": sources})
    else:
        console = Console(soft_wrap=True, highlight=False)
        _print(found, settings, console)
        for text, warning in passes.lines(sources, about=True):
            console.print(f"[yellow]warning[/] {escape(text)}" if warning else escape(text))
        print_missing(missing, console)
    refuse(found, settings)


def print_missing(problems: list[str], console: "Console") -> None:
    """Prints which data of a plan are not there: the plan needs none, but what it prices does."""
    from rich.markup import escape

    for line in problems:
        console.print(f"[yellow]missing[/] {escape(line)}; this plan needs no data", highlight=False, soft_wrap=True)


def _print(found: "Plan", settings: "TrainConfig", console: "Console") -> None:
    from rich.markup import escape

    from linnet.report import units
    from linnet.train.costs.plan import GIB
    from linnet.train.optimizer import warning

    gpu, degrees = found.gpu, found.degrees
    console.print(
        f"[bold]{escape(settings.name or settings.architecture)}[/]: {units.count(found.parameters)} parameters, "
        f"{found.devices} x {escape(gpu.name)}, {degrees.written()}"
    )
    console.print(
        f"batch {settings.written_batch} x {settings.seq_len:,} tokens; each GPU: {found.parts} x {found.rows} rows of "
        f"{settings.seq_len // degrees.sp:,} tokens, recompute {found.recompute}"
    )
    title = {"title": f"memory per GPU at the peak: {found.moment}", "title_justify": "left"}
    table = make_table("part", "#GiB", style=title)
    for name, size in found.memory.items():
        table.add_row(name, f"{size / GIB:.1f}" if size > GIB / 20 else f"{size / GIB:.2g}")
    table.add_row("[bold]total[/]", f"[bold]{found.total / GIB:.1f}[/] of {gpu.memory:.0f}")
    console.print(table)
    table = make_table("what", "#GB received", "#ms", "", style=title | {"title": "traffic per GPU and step"})
    for transfer in found.transfers:
        beside = "beside the compute" if transfer.hidden else "[bold]waits[/]"
        received, waited = units.significant(transfer.received / 1e9), units.significant(transfer.seconds * 1e3)
        table.add_row(transfer.name, received, waited, beside)
    if found.transfers:
        console.print(table)
    tokens, seconds = found.tokens_per_step / found.step_seconds, found.step_seconds
    if settings.model.d_model < SMALL:
        console.print(
            f"time: no tokens/s for a model narrower than {SMALL:,}, whose kernels are too short for the "
            f"{gpu.speed:.0f} TFLOP/s of a large one; train some steps to measure it"
        )
    else:
        console.print(
            f"time: {found.compute_seconds:.3g} s of compute per step at {gpu.speed:.0f} TFLOP/s, {seconds:.3g} s with "
            f"communication (efficiency {found.compute_seconds / seconds:.2f}); {tokens:,.0f} tokens/s, "
            f"{tokens / found.devices:,.0f} per GPU; {found.steps:,} steps take {_duration(found.batches * seconds)}"
        )
    if text := warning(settings.schedule, found.steps):
        console.print(f"[yellow]warning: {escape(text)}[/]")


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
