"""Checks before a training: resolves device, loggers, data and evaluations, and reports all problems at once."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from linnet.config import ConfigError, gather, refuse, shown
from linnet.models import count_parameters
from linnet.models.costs import meta_of
from linnet.models.stack import StackConfig, unused_options
from linnet.parallel.mesh import Mesh, device_problems, in_turns
from linnet.runs import RunFolder, checkpoint, slices
from linnet.runs.model import WEIGHTS, mismatches, read_vocabulary
from linnet.train import device as devices
from linnet.train import float8
from linnet.train.config import TrainingConfig
from linnet.train.evaluation import check_host
from linnet.train.monitor import check_loggers
from linnet.train.objective import Progress, RunObjective
from linnet.train.objectives import find_objective
from linnet.train.optimizer import too_long
from linnet.train.session import model_tensors


@dataclass(frozen=True)
class Preflight:
    """The resources of a training that its configuration names."""

    device: torch.device
    objective: RunObjective


def preflight(
    config: TrainingConfig, cache: str | Path, progress: Progress | None = None, mesh: Mesh | None = None
) -> Preflight:
    """Resolves the device and lets the objective prepare its data and evaluations.

    Args:
        cache: folder of prepared data.
        progress: is called with {"event": "data", "what", "done", "total"} while data are prepared.
        mesh: this rank among several, which all make this call; None if there is one process.

    Raises:
        ConfigError: lists every problem that can be found before the first step.
    """
    problems: list[str] = []
    device = objective = None
    with gather(problems):
        device = devices.choose(config.run.device) if mesh is None else mesh.device
        problems += float8.problems(config.model, device) if config.precision == "float8" else []
    kind, count = find_objective(config), 1 if mesh is None else mesh.world
    problems += kind.parallel_problems(config, count)
    tokens = -(-config.batch_size // config.parts) * kind.row_tokens(config) // count
    lower = "lower batch_size" + (" or seq_len" if hasattr(config, "seq_len") else "")
    with gather(problems):
        _check_memory(config.model, tokens, device or torch.device("cpu"), count, lower)
    if mesh is not None and mesh.main:
        with gather(problems):
            check_host(getattr(config, "evaluations", ()), count_parameters(config.model)[0])
    with gather(problems):
        check_loggers(config.run.loggers)
    with gather(problems), in_turns():  # of the ranks of a machine one prepares the data, and the others find them
        objective = kind.prepare(config, device or torch.device("cpu"), cache, progress)
    refuse(problems, "train")
    if config.precision == "float8" and progress is not None:
        text, warning = float8.summary(config.model, config.run.compile)
        progress({"event": "passes", "text": text, "warning": warning})
    return Preflight(device, objective)


def length_problems(config: TrainingConfig) -> list[str]:
    """Returns which phases of a training, whose length is in steps, are longer than the training.

    A run of a ladder (`curve_every` is set) may be shorter: all runs of a study have one schedule.
    """
    if config.curve_every is not None:
        return []
    steps = config.total_steps
    problems = [problem] if (problem := too_long(config.schedule, steps)) else []
    if config.batch_ramp is not None and config.batch_ramp > steps:
        problems.append(
            f"batch_ramp: {config.batch_ramp:g} steps are more than the {steps:,} steps of the training, whose batch "
            f"would not grow to batch_size: {config.batch_size}; use more steps, or a share, such as 0.6"
        )
    return problems


def unused_problems(config: TrainingConfig) -> list[str]:
    """Returns which keys are set, but not read with the values that other keys have.

    Defaults are no problem, since every saved configuration has them; nor is a run of a ladder (`curve_every` is set),
    whose study was checked (`linnet.study.ladder.plan`).
    """
    if config.curve_every is not None:
        return []
    problems = unread_settings(config)
    if config.init_from is None:  # else the options are those of that model
        problems += [f"model.{problem}" for problem in unused_options(config.model)]
    return problems


def unread_settings(config: TrainingConfig) -> list[str]:
    """Returns the problems of `unused_problems` beside those of the model, also for a run of a ladder."""
    optimizer, schedule, guard = config.optimizer.name, config.schedule.name, config.guard
    names, held = ("cosine", "linear", "wsd"), getattr(config.data, "validation", None)
    keys = [  # key, whether it is read, what keeps it from being read, what would read it
        ("optimizer.momentum", optimizer == "muon", f"name: {optimizer}", "use name: muon"),
        ("schedule.final", schedule in names, f"name: {schedule}", f"use name: {' or '.join(names)}"),
        ("schedule.decay", schedule == "wsd", f"name: {schedule}", "use name: wsd"),
        ("guard.margin", guard.spike is not None, "spike: null", "set spike"),
        ("guard.window", guard.spike is not None, "spike: null", "set spike"),
        ("guard.skip_batches", guard.policy == "rollback", f"policy: {guard.policy}", "use policy: rollback"),
        ("data.validation_fraction", not held, f"validation: {shown(held)}", "remove validation"),
    ]
    problems = []
    for key, is_read, why, fix in keys:
        part, field = key.split(".")
        settings = getattr(config, part)
        value, usual = getattr(settings, field, None), getattr(type(settings).model_fields.get(field), "default", None)
        if value != usual and not is_read:
            problems.append(f"{key}: {value:g} has no effect with {why}; leave it out ({key}={usual:g}), or {fix}")
    return problems


def check_devices(config: TrainingConfig, count: int, here: int | None = None) -> None:
    """Raises ConfigError with all reasons why a training cannot run on `count` devices.

    Needs no data, no process group and no memory on a device, so it can be called before any process is started.

    Args:
        here: how many of the devices are on this machine; None: all.
    """
    problems: list[str] = []
    with gather(problems):
        device = devices.choose(config.run.device)
        problems += device_problems(device, count if here is None else here)
        problems += float8.problems(config.model, device) if config.precision == "float8" else []
    problems += find_objective(config).parallel_problems(config, count)
    with gather(problems):
        check_loggers(config.run.loggers)
    refuse(problems, "train")


def _check_memory(model: StackConfig, tokens: int, device: torch.device, count: int, lower: str) -> None:
    """Raises ConfigError if `count` devices cannot hold even the weights or one activation of a training.

    Args:
        tokens: of one part of the batch on a device.
        lower: how to have fewer of them.
    """
    have = devices.capacity(device)
    if have is None:
        return
    parameters, _ = count_parameters(model)
    problems = []
    if (need := 16 * parameters // count) > have:  # float32 weights and gradients, and two moments of the optimizer
        what = f"model: {parameters:,} parameters need {need / 1e9:,.1f} GB with gradients and the optimizer's moments"
        problems.append(f"{what}; {device.type} has {have / 1e9:,.1f} GB; lower d_model or the number of layers")
    if (need := 4 * tokens * model.d_model) > have:
        what = f"batch_size: {tokens:,} tokens in one part of the batch need more than {need / 1e9:,.1f} GB"
        problems.append(f"{what}; {device.type} has {have / 1e9:,.1f} GB; {lower}")
    refuse(problems, "train")


def check_start(objective: RunObjective, run: str) -> None:
    """Raises ConfigError if the weights of `init_from` cannot fit, as far as records and headers of files show it.

    Needs no run folder. `start_from` reads the weights, and finds those that are damaged.
    """
    where, start = f"init_from {run}", RunFolder.open(run)
    problems: list[str] = []
    prefixes, chosen = objective.own_parts, None
    if (file := start.path / WEIGHTS).is_file():  # a model folder
        with gather(problems):
            chosen = start.path, header_shapes([file]), {"vocabulary": read_vocabulary(start)}
    else:
        for path in reversed(start.checkpoints()):  # the newest that may be good, as `checkpoint.latest_good`
            with gather(problems):
                state = checkpoint.read_state(path)
                files = [path / name for name in checkpoint.files_of(state, "model")]
                chosen = path, header_shapes(files), state["meta"]
                break
    if chosen is None:
        raise ConfigError(problems or [f"{run}: has no checkpoint"], where)
    path, stored, meta = chosen
    refuse(objective.start_problems(meta, path), where)
    own = {name: tuple(tensor.shape) for name, tensor in model_tensors(meta_of(objective.config.model)).items()}
    mine, theirs = (
        {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)} for shapes in (own, stored)
    )
    if problems := mismatches(mine, theirs):
        fix = "leave model out, and it is that of init_from, or name a folder that has this model"
        raise ConfigError([*problems, f"model: differs in these weights; {fix}"], where)


def header_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in safetensors files. Raises ConfigError if a header cannot be read."""
    try:
        return slices.Reader(files).shapes
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError([f"{files[0].parent}: is damaged ({error}); copy it again"], "checkpoint") from None
