"""Checks before a training: resolves device, loggers, data and evaluations, and reports all problems at once."""

from dataclasses import dataclass
from pathlib import Path

import torch

from linnet.config import ConfigError, gather
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
        check_loggers(config.run.loggers)
    with gather(problems):
        objective = find_objective(config).prepare(config, device or torch.device("cpu"), cache, progress)
    if problems:
        raise ConfigError(problems, "train")
    return Preflight(device, objective)
