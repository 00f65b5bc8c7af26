"""`linnet train`: one model, many steps."""

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linnet.config import ConfigError, Problem, gather, override, read_yaml, refuse
from linnet.options import AllowPlugins, echo_json, options, working

SHAPE = (256, 6)  # width and layers of a model with --mixer, the same as of tnl-10m


@options
def train(
    config: Path | None = None,
    *,
    model: str | None = None,
    mixer: str | None = None,
    from_: Path | None = None,
    data: list[str] | None = None,
    set_: list[str] | None = None,
    extend: Path | None = None,
    device: str | None = None,
    devices: Annotated[int | None, typer.Option("--devices", "--gpus", min=1)] = None,
    max_restarts: Annotated[int, typer.Option(min=0)] = 3,
    ray: str | None = None,
    workers: str | None = None,
    out: Path = Path("runs"),
    cache: Path = Path("runs/cache"),
    allow_plugins: AllowPlugins = False,
    plan: bool = False,
    gpu: str = "auto",
    memory: Annotated[float | None, typer.Option(min=1.0)] = None,
    coordinate_check: bool = False,
    json_: bool = False,
) -> None:
    """Train a model and score it on held-out data.

    A run is a folder named after its settings. The same command resumes a
    run that was stopped (Ctrl-C, a crash, a power cut), and shows the result
    again once it is done; other settings make another run. The folder holds
    config.yaml, metrics.jsonl, checkpoints and, at the end, result.json.

    [bold]linnet train --model tnl-10m[/]
    [bold]linnet train --model hgrn2-10m --data "books/*.txt" --set steps=2000[/]
    [bold]linnet train --mixer examples/my_mixer.py:MyMixer[/]
    [bold]linnet train my_run.yaml --set seed=1[/]
    [bold]linnet train configs/digits.yaml[/]
    [bold]linnet train --from MODEL --data chats.jsonl --set objective=chat[/]
    [bold]linnet train --extend runs/tnl-10m-0123456789ab --set steps=4000[/]
    [bold]linnet train my_7b.yaml --plan --devices 8[/]
    [bold]linnet train my_7b.yaml --devices 8[/]

    On a Ray cluster: [bold]linnet train my_run.yaml --ray auto --workers 4:8[/]
    On several machines: [bold]PYTHONSAFEPATH=1 torchrun ... -m linnet train my_run.yaml[/]
    (docs/distributed.md).

    Args:
        config: A training file (YAML); see docs/training.md.
        model (NAME): A recipe: [bold]linnet models[/] lists them.
        mixer (FILE.py:CLASS): A token mixer from a file of your own: six layers of it, unless CONFIG has a model.
        from_ (MODEL): A run or model folder whose weights, model and tokenizer the training continues; with
            [bold]--set objective=chat[/] also its chat template.
        data (PATH): Data to train on, of text: a file, folder, quoted glob or hf:NAME; may be given again. Default:
            CONFIG's, or the source text of Python's standard library.
        set_ (KEY=VALUE): Change a setting, such as optimizer.learning_rate=3e-3 or steps=500; may be given again.
        extend (RUN): Continue this run to more steps, in its folder: --extend RUN --set steps=N.
        device: auto (the GPU if there is one), cpu or cuda (default: auto).
        devices: Train on this many devices of this machine: GPUs, or processes with --device cpu.
        max_restarts: With --devices: how often to start again from the last checkpoint after a crash.
        ray (ADDRESS): Train on a Ray cluster: auto, ray://HOST:PORT, or local to start Ray here (extra: cluster).
        workers (N|MIN:MAX): With --ray: how many processes, or the least and the most (default: 1).
        out: Folder of runs; this one gets a folder in it.
        cache: Folder of prepared corpora.
        plan: Print memory, traffic and time on --devices GPUs, without a GPU, and stop.
        gpu: The GPU of --plan: b200, gb200, h200, h100, a100, a100-40, mi300x, rtx5090, rtx4090, or auto for the one
            here, and h200 if there is none; also with TFLOP/s and GB/s of yours: h200,speed=520, then link=272 or
            network=25.
        memory (GIB): GiB of one GPU, for --plan (default: by --gpu).
        coordinate_check: Train ten steps at widths 64 to 512, show whether activations keep their size, and stop.
        json_: Print the result as one JSON object.
    """
    from linnet.parallel import mesh
    from linnet.train.preflight import check_devices
    from linnet.train.processes import launch

    def described():
        with nullcontext() if mesh.rank() else working("checking the settings"):
            return settings_and_changes()

    def settings_and_changes():
        if extend is not None:
            others = (("CONFIG", config), ("--model", model), ("--mixer", mixer), ("--from", from_))
            if options := [name for name, value in others if value]:
                _no_other_settings(options)
            return _extended(extend, device, set_ or [], allow_plugins)
        return _settings(config, model, mixer, from_, data, device, set_ or [], cache, allow_plugins), None

    if plan:
        from linnet.cli.train.plan import show_plan

        return show_plan(described()[0], devices or 1, gpu, memory, json_)
    if coordinate_check:
        from linnet.cli.train.plan import show_coordinates

        return show_coordinates(described()[0], cache, json_)
    if ray is not None or workers is not None:
        _refuse_without_ray(ray, devices, extend)
        return _train_on_ray(described()[0], ray, workers or "1", max_restarts, out, cache, json_)
    if devices is not None and not is_worker(devices):
        settings, _ = described()
        if devices > 1:
            check_devices(settings, devices)
            return start_workers(devices, restarts=max_restarts)
    with launch.worker():
        with mesh.together():
            settings, changes = described()
        if extend is not None and changes is None:  # a restart: the run has its new length already
            extend, out = None, extend.parent
        if (again := launch.restarted()) and not mesh.rank():
            typer.echo(f"a rank failed or was lost; all ranks started again (restart {again})", err=True)

        from linnet.train import train as run
        from linnet.train.extension import extend as train_on

        def make(show=None):
            if extend is not None:
                return train_on(extend, cache, progress=show, allow_plugins=allow_plugins, **changes)
            return run(settings, out, cache, show)

        if mesh.rank():  # rank 0 shows the rows, and its exit code is the command's
            make()
        else:
            _show_training(settings, make, json_)


def _refuse_without_ray(ray: str | None, devices: int | None, extend: Path | None) -> None:

    problems = []
    if ray is None:
        problems.append("--workers: belongs to --ray ADDRESS; use --devices for the devices of this machine")
    elif devices is not None:
        problems.append("--devices: is for this machine; with --ray, give --workers")
    if extend is not None:
        problems.append("--extend: makes a run longer on this machine only; drop --ray")
    refuse(problems, "command line")


def _train_on_ray(settings, address: str, workers: str, restarts: int, out: Path, cache: Path, json_: bool) -> None:
    """Trains on a Ray cluster, and shows here what happens there."""
    from linnet.train.processes.cluster import train_on_ray, workers_of

    count = workers_of(workers)
    _show_training(settings, lambda show: train_on_ray(settings, out, cache, address, count, restarts, show), json_)


def is_worker(devices: int) -> bool:
    """Returns whether this process is one of those that `--devices` started. Refuses the option under torchrun."""
    from linnet.parallel import mesh
    from linnet.train.processes import launch

    if launch.started():
        return True
    if mesh.world() > 1:
        problem = f"--devices: {devices} were asked for, but torchrun started {mesh.world()} processes; drop --devices"
        raise ConfigError([problem], "command line")
    return False


def start_workers(devices: int, **how) -> None:
    """Starts a process per device with the same command line, waits for them, and ends with their exit code.

    Args:
        how: arguments of `linnet.train.processes.launch.launch`.

    Raises:
        KeyboardInterrupt: a process ended by Ctrl-C. None of them reports it: rank 0 may not have begun.
    """
    import sys

    from linnet.train.processes import launch

    outcome = launch.launch(sys.argv[1:], devices, **how)
    if outcome.message is not None:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[bold red]error[/] {escape(outcome.message)}")
    if outcome.code == 130:
        raise KeyboardInterrupt
    if outcome.code:
        raise typer.Exit(outcome.code)


def _show_training(settings, train, json_: bool) -> None:
    """Calls `train` with a function that shows its rows, then shows the result of the folder that it returns."""
    from linnet.train.monitor import TerminalProgress
    from linnet.train.objectives import find_objective

    console, objective = Console(stderr=json_, soft_wrap=True), find_objective(settings)
    show_plan = functools.partial(_show_plan, settings, objective, console)
    with TerminalProgress(console, objective.units, objective.SCORES, show_plan, summary=not json_) as progress:
        folder = train(progress)
    result = folder.result()
    shown = ("loss", *objective.SCORES, objective.units, "seconds", "steps")
    if wrong := [key for key in shown if not isinstance(result.get(key, ""), int | float | None)]:
        raise folder.damaged_result(f"{', '.join(wrong)} missing or not a number")
    if not progress.started:
        show_plan(result["steps"] if settings.epochs else settings.total_steps)
        console.print("this run is done already; another setting (--set seed=1) makes another run", highlight=False)
    if json_:
        echo_json({"path": str(folder.path), **result})
    else:
        _show_result(folder.path, result, objective, console)
    if result["status"] != "done":
        raise typer.Exit(1)


def _no_other_settings(options: list[str]) -> None:

    message = (
        f"--extend: cannot be combined with {' and '.join(options)}, since the run's settings are fixed; use --set only"
    )
    raise ConfigError([message], "command line")


def _length(config, changes: dict) -> int | None:
    """Returns the steps of a training with another `steps` or `tokens`."""
    lengths = {key: changes[key] for key in ("steps", "tokens") if key in type(config).model_fields}
    return config.model_copy(update=lengths).total_steps


def _extended(path: Path, device: str | None, assignments: list[str], allow_plugins: bool):
    """Returns the training that an extended run becomes, and the arguments of `linnet.train.extend`.

    The arguments are None in a process that was started again after the run was extended.
    """
    from linnet.runs import RunFolder
    from linnet.train.extension import extended
    from linnet.train.identity import read_config
    from linnet.train.processes import launch

    folder = RunFolder.open(path)
    changes = override({}, assignments)
    if device is not None:
        changes["run"] = {**changes.get("run", {}), "device": device}
    if other := [f"--set {key}: cannot change" for key in changes if key not in ("steps", "tokens", "run")]:
        problems = [f"{line} when a run is extended; only steps (or tokens) and run can" for line in other]
        raise ConfigError(problems, "command line")
    changes = {"steps": changes.get("steps"), "tokens": changes.get("tokens"), "run": changes.get("run")}
    old = read_config(folder, allow_plugins)
    if launch.restarted() and _length(old, changes) == old.total_steps:
        return old, None
    return extended(folder, old, **changes), changes


def _settings(
    config: Path | None,
    model: str | None,
    mixer: str | None,
    start: Path | None,
    data: list[str] | None,
    device: str | None,
    assignments: list[str],
    cache: Path,
    allow_plugins: bool = False,
):
    """Returns the training that the command line describes."""
    from linnet import trust
    from linnet.layers.base import load_plugin
    from linnet.layers.check import check_mixers
    from linnet.models import family
    from linnet.models.registry import kind_of_recipe
    from linnet.train import read_training
    from linnet.train.objectives import OBJECTIVES

    if config is None and model is None and mixer is None and start is None:
        some = "--model NAME (linnet models lists them), --mixer FILE.py:Class or --from MODEL"
        message = f"CONFIG: give a training file, {some}"
        raise ConfigError([message], "command line")
    if model is not None and mixer is not None:
        raise ConfigError([f"--mixer, --model: {model!r} has mixers of its own; give one of the two"], "command line")
    if config is not None and not config.exists() and kind_of_recipe(str(config)):
        raise ConfigError([f"CONFIG: no file {str(config)!r}; it is a recipe, use --model {config}"], "command line")
    values = read_yaml(config) if config is not None else {}
    if config is not None and config.name == "config.yaml":  # of a run or model folder, which may have been received
        values = trust.with_copies(values, config.parent)
        trust.check_training(values, config, allow_plugins)
    if model is None and "architectures" in values:
        raise ConfigError(
            [f"CONFIG: {config} is a study, not one training; run: linnet study {config}"], "command line"
        )
    if model is not None:
        values["model"] = model
        values.setdefault("name", model)
    if start is not None:
        values["init_from"] = str(start)
    if data:
        section = values.get("data")
        if values.get("objective") in ("sentences", "sequences"):  # of one folder
            if len(data) > 1:
                message = f"--data: {len(data)} given, but {values['objective']} are read from one folder; give one"
                raise ConfigError([message], "command line")
            source: str | list[str] = data[0]
        else:
            source = data
        values["data"] = {**(section if isinstance(section, dict) else {}), "source": source}
    if device is not None:
        run = values.get("run")
        values["run"] = {**(run if isinstance(run, dict) else {}), "device": device}
    problems: list[str] = []
    where, mixer_name, settings = str(config or "command line"), None, None
    if mixer is not None:
        new: str | dict = "tnl-10m"  # if the mixer does not load, so that other problems are reported too
        with gather(problems):
            mixer_name = load_plugin(mixer)
            new = family(mixer_name)(*SHAPE).model_dump(include={"d_model", "layout", "options"})
            plugins = values.get("plugins") or []
            plugins = plugins if isinstance(plugins, list) else [plugins]
            values["plugins"] = plugins if mixer in plugins else [*plugins, mixer]
        values.setdefault("model", new)
    with gather(problems):
        values = override(values, assignments)
    config_problems: list[str] = []
    with gather(config_problems):
        settings = read_training(values)
    lacking = mixer is not None and mixer_name is None  # then no model knows its name and options
    problems += [line for line in config_problems if not (lacking and Problem(line).key == "model")]
    if mixer_name and settings and not any(mixer_name in block for block in settings.model.blocks):
        problems.append(
            f"--mixer: the layout {settings.model.layout!r} has no {mixer_name!r}; write it into model.layout"
        )
    if settings:
        with gather(problems):
            model = settings.model
            check_mixers(
                settings.plugins, model.options, model.d_model, model.norm, model.causal, model.axes, settings.packs
            )
    if problems:
        if isinstance(name := values.get("objective", "text"), str) and name in OBJECTIVES:
            problems += OBJECTIVES[name].source_problems(values, cache, problems)
        raise ConfigError(problems, where)
    return settings


def _show_plan(settings, objective, console, steps: int) -> None:
    from linnet.train.optimizer import warning

    costs, more = objective.count_costs(settings), objective.describe_model(settings)
    outside = costs.parameters_backbone
    console.print(
        f"[bold]{escape(settings.name or settings.architecture)}[/]: "
        f"{escape(settings.model.layout)}, width {settings.model.d_model}, "
        f"{costs.parameters:,} parameters ({outside:,} without embeddings){', ' if more else ''}{more}",
        highlight=False,
    )
    batch = settings.written_batch
    batch += f" x {settings.seq_len}" if hasattr(settings, "seq_len") else ""
    batches = settings.batch_sizes.first(steps) / settings.batch_size
    console.print(
        f"{steps:,} steps of {batch} {objective.units} = {round(batches * costs.units):,} {objective.units}, "
        f"{batches * costs.flops:.3g} FLOPs",
        highlight=False,
    )
    if text := warning(settings.schedule, steps):
        console.print(f"[yellow]warning: {escape(text)}[/]", highlight=False)


def _show_result(path: Path, result: dict, objective, console) -> None:
    from linnet.train.monitor import measured

    if result["status"] == "done":
        # None if not finite: held-out text that is only the end of a document has no bytes.
        words = {"loss": objective.loss_unit, **objective.SCORES}
        scores = [f"[bold]{measured(result.get(key), unit)}[/]" for key, unit in words.items()]
        console.print(
            f"held-out loss {', '.join(scores)}, after {result[objective.units]:,} {objective.units} "
            f"in {result['seconds']:,.0f} s",
            highlight=False,
        )
    else:
        console.print(
            f"[bold red]diverged[/] at step {result['steps']:,}: the loss spiked or was not finite. Lower "
            "optimizer.learning_rate, or set guard.policy to rollback or skip; metrics.jsonl has the event",
            highlight=False,
        )
    console.print(f"in {escape(str(path))}", highlight=False)
