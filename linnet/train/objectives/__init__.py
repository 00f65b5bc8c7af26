"""Training objectives: one file per value of the configuration key `objective`.

text.py        the next token of a text (`objective: text`, the default), and what masked text shares with it
chat.py        the assistant's turns of conversations (`objective: chat`)
labelled.py    what images, sentences and sequences share; rooms of `linnet.companions` have more objectives
synthetic.py   the tasks of MAD, which ensembles train (`linnet.mad`); not a value of the key
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linnet.companions import Offer
from linnet.config import ConfigError, checking, nearest, parse, shown
from linnet.train.config import Training, TrainingConfig
from linnet.train.objective import Progress, RunObjective, preparing
from linnet.train.objectives.chat import ChatObjective
from linnet.train.objectives.text import TextObjective

OBJECTIVES: Mapping[str, type[RunObjective]] = Offer("objectives", {"text": TextObjective, "chat": ChatObjective})


def find_objective(config: TrainingConfig) -> type[RunObjective]:
    """Returns the objective class that a configuration names."""
    return OBJECTIVES[config.objective]


def training_class(values: Mapping[str, Any]) -> type[TrainingConfig]:
    """Returns the class of the training that `values` describe; the key `objective` names it, without it text.

    Raises:
        ConfigError: no objective has this name.
    """
    name = values.get("objective", TextObjective.name)
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise ConfigError([f"objective: {shown(name)} is not known; {nearest(str(name), OBJECTIVES)}"], "train")
    return OBJECTIVES[name].Config


def read_training(values: Mapping[str, Any], where: str = "train") -> TrainingConfig:
    """Returns the training that plain values describe, in the class of its objective.

    Args:
        where: what the values are, for messages.

    Raises:
        ConfigError: lists all problems.
    """
    with checking(where):
        cls = training_class(values)
    return parse(cls, values, where)


def in_steps(config: Training, cache: str | Path, progress: Progress | None = None) -> Training:
    """Returns a training whose length is in steps; one in `epochs` prepares its data to know them.

    Args:
        cache: folder of prepared data.
        progress: called with {"event": "data", "what", "done", "total"} while data are prepared.

    Raises:
        ConfigError: lists all problems of the data.
    """
    if config.epochs is None:
        return config
    kind = find_objective(config)
    data = kind.read(config, cache, preparing(progress))
    units = config.epochs * kind.size(data)
    if config.batch_ramp is None:
        steps = max(1, math.ceil(units / kind.units_per_step(config)))
    else:
        steps = config.steps_of(max(1, math.ceil(units / (kind.units_per_step(config) // config.batch_size))))
    return config.model_copy(update={"steps": steps, "epochs": None})


__all__ = ["OBJECTIVES", "TextObjective", "find_objective", "in_steps", "read_training", "training_class"]
