"""Training objectives: one file per value of the configuration key `objective`.

text.py        the next token of a text (`objective: text`, the default)
synthetic.py   the tasks of MAD, which ensembles train (`linnet.study.mad`); not a value of the key
"""

from linnet.train.config import TrainConfig
from linnet.train.objective import RunObjective
from linnet.train.objectives.text import TextObjective

OBJECTIVES: dict[str, type[RunObjective]] = {kind.name: kind for kind in (TextObjective,)}


def find_objective(config: TrainConfig) -> type[RunObjective]:
    """Returns the objective class that a configuration names."""
    return OBJECTIVES[config.objective]


__all__ = ["OBJECTIVES", "TextObjective", "find_objective"]
