"""One model, many steps.

config.py     TrainingConfig (of every objective), TrainConfig (of text)
identity.py   which configurations are the same training, and the run folder of each
extend.py     extend: continues a training to more steps, in the same folder
loop.py       train(config, root, cache): from configuration to a finished run folder, read top to bottom
bundle.py     train_together: runs that differ in seed or rates, in lockstep
session.py    the state that a step changes: model, optimizer, position; saved to and restored from checkpoints
objective.py  the interface between training and its objective    objectives/    one file each; read_training
optim.py      AdamW and Muon        schedule.py   learning rate as a function of the step
guards.py     losses that are not finite or spike
recompute.py  activations computed again to save memory
evaluation.py evaluations during training, without effect on it    suites.py      their kinds
prefetch.py   batches on the device    device.py   device, peak speed, memory    stop.py   Ctrl-C
preflight.py  device, corpus and evaluations, checked before the run folder is created
loggers.py    TensorBoard, Weights & Biases    progress.py   the line on the terminal
"""

from linnet.train.config import TrainConfig, TrainingConfig, resolve
from linnet.train.extend import extend
from linnet.train.identity import run_folder
from linnet.train.loop import train
from linnet.train.objectives import read_training

__all__ = ["TrainConfig", "TrainingConfig", "extend", "read_training", "resolve", "run_folder", "train"]
