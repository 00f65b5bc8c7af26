"""The exponential moving average of the weights, which is kept beside them and scored with them.

After update t (from 0) of the optimizer, a <- d a + (1 - d) w with d = decay, or with a warm-up
min(decay, (1 + t) / (10 + t)), so that the first weights are forgotten quickly. The average has the precision of the
weights (float32) and their layout: sharded weights have a sharded average. B. T. Polyak and A. B. Juditsky, SIAM J.
Control Optim. 30 (1992).
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from pydantic import Field
from torch import Tensor

from linnet.config import Config
from linnet.ops import compat_torch


class AverageConfig(Config):
    """A moving average of the weights."""

    decay: float = Field(0.9999, gt=0, lt=1, description="share of the average that an update keeps")
    warmup: bool = Field(True, description="keep at most (1 + t) / (10 + t) at update t, so that the average starts")


class Average:
    """The average of the weights of one model, on the device of the weights."""

    def __init__(self, config: AverageConfig, weights: Mapping[str, Tensor]):
        """Starts at the weights.

        Args:
            weights: parameters and buffers by name, which training changes in place; DTensors of a sharded model.
        """
        self.config = config
        self._weights = dict(weights)
        self._average = {name: tensor.detach().clone() for name, tensor in self._weights.items()}
        pairs = [(_local(self._average[name]), _local(own)) for name, own in self._weights.items()]
        moving = [pair for pair in pairs if pair[0].is_floating_point() and pair[0].numel()]
        self._moving = ([a for a, _ in moving], [own for _, own in moving])
        self._fixed = [pair for pair in pairs if not pair[0].is_floating_point()]

    def restart(self) -> None:
        """Sets the average to the weights."""
        for name, own in self._weights.items():
            _local(self._average[name]).copy_(_local(own))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average towards the weights after update `step` of the optimizer, counted from 0."""
        decay = self.config.decay
        if self.config.warmup:
            decay = min(decay, (1 + step) / (10 + step))
        compat_torch.foreach_lerp_(*self._moving, 1 - decay)
        for average, own in self._fixed:
            average.copy_(own)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the average by the names of the weights."""
        return self._average

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchanges weights and average, and exchanges them back at the end, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, own in zip(*self._moving, strict=True):
            kept = own.clone()
            own.copy_(average)
            average.copy_(kept)


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
