"""Evaluation mode for a while."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode and back into the one it was in, whatever happens."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
