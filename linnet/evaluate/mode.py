"""A context manager that puts a model into evaluation mode."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and restores its former mode at the end, also after an error."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
