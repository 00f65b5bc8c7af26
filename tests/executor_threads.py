"""Work that needs torch, as trainings do, for tests of what executes it."""

import torch

from linnet.study.executors import Job
from linnet.train.device import threads


def in_training(job: Job) -> str:
    """The threads of a training of 256 tokens in a model of width 16, which gains nothing from a second one."""
    with threads(torch.device("cpu"), 16, 256):
        return count(job)


def count(job: Job) -> str:
    return f"{torch.get_num_threads()} threads"
