"""Checks before a training: resolves device, loggers, data and evaluations, and reports all problems at once."""

from dataclasses import dataclass
from pathlib import Path

import torch

from linnet.config import ConfigError, gather
from linnet.models import count_parameters
from linnet.train import device as devices
from linnet.train.config import TrainConfig
from linnet.train.loggers import check_loggers
from linnet.train.objective import Progress, RunObjective
from linnet.train.objectives import find_objective


@dataclass(frozen=True)
class Preflight:
    """The resources of a training that its configuration names."""

    device: torch.device
    objective: RunObjective


def preflight(config: TrainConfig, cache: str | Path, progress: Progress | None = None) -> Preflight:
    """Resolves the device and lets the objective prepare its data and evaluations.

    Args:
        cache: folder of prepared data.
        progress: is called with {"event": "data", "what", "done", "total"} while data are prepared.

    Raises:
        ConfigError: lists every problem that can be found before the first step.
    """
    problems: list[str] = []
    device = objective = None
    with gather(problems):
        device = devices.choose(config.run.device)
    with gather(problems):
        _check_memory(config, device or torch.device("cpu"))
    with gather(problems):
        check_loggers(config.run.loggers)
    with gather(problems):
        objective = find_objective(config).prepare(config, device or torch.device("cpu"), cache, progress)
    if problems:
        raise ConfigError(problems, "train")
    return Preflight(device, objective)


def _check_memory(config: TrainConfig, device: torch.device) -> None:
    """Raises ConfigError if the device cannot hold even the weights or one activation of a training."""
    have = devices.capacity(device)
    if have is None:
        return
    parameters, _ = count_parameters(config.model)
    tokens = -(-config.batch_size // config.accumulation) * config.seq_len
    problems = []
    if (need := 16 * parameters) > have:  # float32 weights and gradients, and two moments of the optimizer
        what = f"model: {parameters:,} parameters need {need / 1e9:,.1f} GB with gradients and the optimizer's moments"
        problems.append(f"{what}; {device.type} has {have / 1e9:,.1f} GB; lower d_model or the number of layers")
    if (need := 4 * tokens * config.model.d_model) > have:
        what = f"batch_size: {tokens:,} tokens in one part of the batch need more than {need / 1e9:,.1f} GB"
        problems.append(f"{what}; {device.type} has {have / 1e9:,.1f} GB; lower batch_size or seq_len")
    if problems:
        raise ConfigError(problems, "train")
