"""Checks before a training: resolves device, loggers, data and evaluations, and reports all problems at once."""

from dataclasses import dataclass
from pathlib import Path

import torch

from linnet.config import ConfigError, gather
from linnet.train import device as devices
from linnet.train.config import TrainConfig
from linnet.train.objective import Progress, RunObjective
from linnet.train.objectives import find_objective
from linnet.train.sinks import check_sinks


@dataclass(frozen=True)
class Ready:
    """What was found for a configuration."""

    device: torch.device
    objective: RunObjective


def make_ready(config: TrainConfig, cache: str | Path, progress: Progress | None = None) -> Ready:
    """Finds the device and has the objective prepare its data and evaluations.

    Args:
        cache: folder of prepared data.
        progress: is called with {"event": "data", "what", "done", "total"} while data are prepared.

    Raises:
        ConfigError: all that is wrong with what the configuration names, as far as it shows before the first step.
    """
    problems: list[str] = []
    device = objective = None
    with gather(problems):
        device = devices.choose(config.device)
    with gather(problems):
        check_sinks(config.sinks)
    with gather(problems):
        objective = find_objective(config).prepare(config, device or torch.device("cpu"), cache, progress)
    if problems:
        raise ConfigError(problems, "train")
    return Ready(device, objective)
