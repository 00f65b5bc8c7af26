"""Work that needs torch, as trainings do, for tests of what executes it."""

import torch

from linnet.study.executors import Job


def count(job: Job) -> str:
    return f"{torch.get_num_threads()} threads"
