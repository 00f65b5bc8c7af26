"""Objectives for synthetic tasks (`linnet.data.synthetic`), which the ensembles of MAD train.

A task determines its model: a causal language model if targets can be at any position; the same model with only the
logits of the targets if each row has few; an auto-encoder if the last position must reproduce the whole input.
"""

from functools import lru_cache
from typing import get_args

import torch
from torch import nn

from linnet.data.synthetic import Samples, Split, Task, generate
from linnet.models import AutoEncoder, CausalLM, ModelConfig
from linnet.models.causal_lm import draw_weights, empty
from linnet.models.costs import model_flops
from linnet.models.synthetic import RecallLM
from linnet.train.objective import Objective


class SyntheticObjective(Objective):
    """Solves a task with a causal language model; the loss is in nats per target.

    Attributes:
        task: the task. model: configuration whose vocabulary has at least the tokens of the task.
    """

    def __init__(self, task: Task, model: ModelConfig):
        self.task, self.model = task, model

    def module(self) -> nn.Module:
        """Returns the model with uninitialised weights."""
        return CausalLM(self.model)

    def build(self, seed: int, device: torch.device | str | None = None) -> nn.Module:
        return draw_weights(self.module, self.model, seed, device)

    def samples(self, split: Split, count: int, seed: int) -> Samples:
        """Returns inputs and targets of a split, int64 [count, T] each."""
        return _samples(self.task, split, count, seed)

    def flops(self) -> float:
        """Returns the training FLOPs of one sequence, of backbone and head."""
        return model_flops(empty(self.module, "meta"), self.task.input_length)


class RecallObjective(SyntheticObjective):
    """Solves a task with targets at `task.questions` positions of each row."""

    def module(self) -> RecallLM:
        return RecallLM(self.model, self.task.questions)


class ReconstructionObjective(SyntheticObjective):
    """Reconstructs the input of a task from the output at its last position.

    Attributes:
        published: whether the decoder is that of the published implementation of MAD.
    """

    def __init__(self, task: Task, model: ModelConfig, published: bool = False):
        super().__init__(task, model)
        self.published = published

    def module(self) -> AutoEncoder:
        return AutoEncoder(self.model, self.task.input_length, self.published)


@lru_cache(maxsize=len(get_args(Split)))
def _samples(task: Task, split: Split, count: int, seed: int) -> Samples:
    """Caches the last samples: the next bundle often uses the same ones for another architecture."""
    return generate(task, split, count, seed=seed, threads=torch.get_num_threads())


def synthetic_objective(task: Task, model: ModelConfig, published: bool = False) -> SyntheticObjective:
    """Returns the objective for a task.

    Args:
        published: whether an auto-encoder has the decoder of the published implementation of MAD.
    """
    if task.autoencoder:
        return ReconstructionObjective(task, model, published)
    return (SyntheticObjective if task.questions is None else RecallObjective)(task, model)
