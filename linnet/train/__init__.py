"""One model, many steps.

config.py       TrainingConfig (of every objective), TrainConfig (of text)
identity.py     which configurations are the same training, and the run folder of each
extension.py    extend: continues a training to more steps, in the same folder
loop.py         train(config, root, cache): from configuration to a finished run folder, read top to bottom
session.py      the state that a step changes: model, optimizer, position; saved to and restored from checkpoints
objective.py    the interface between training and its objective
objectives/     one file for each objective; read_training
optimizer/      AdamW and Muon, the learning rate as a function of the step, the average of the weights
monitor/        losses that are not finite or spike, time, Ctrl-C, the line on the terminal, other loggers
recompute.py    activations computed again to save memory
coordinates.py  the coordinate check of a parametrisation
evaluation.py   evaluations during training, without effect on it; suites: their kinds
device.py       device, peak speed, memory; passes.py: how often data are read
preflight.py    device, corpus and evaluations, checked before the run folder is created
together/       train_together: runs that differ in seed or rates, in lockstep
processes/      one process per device, on this machine or a Ray cluster
costs/          memory, traffic and time of a training before it starts

The names of this package are imported at first use, so that commands that train nothing need not import training for
its devices and processes.
"""

from typing import TYPE_CHECKING

from linnet.deprecation import lazily

if TYPE_CHECKING:
    from linnet.train.config import TrainConfig, TrainingConfig, resolve
    from linnet.train.extension import extend
    from linnet.train.identity import run_folder
    from linnet.train.loop import train
    from linnet.train.objectives import read_training

__all__ = ["TrainConfig", "TrainingConfig", "extend", "read_training", "resolve", "run_folder", "train"]

_HOMES = {"extend": "extension", "read_training": "objectives", "run_folder": "identity", "train": "loop"}

__getattr__ = lazily(__name__, dict.fromkeys(__all__, "config") | _HOMES)
