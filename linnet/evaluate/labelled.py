"""The outputs of a model for labelled rows, whatever these are."""

import contextlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from linnet.data.labelled import HeldOut
from linnet.evaluate.likelihood import evaluating
from linnet.parallel.mesh import divided


@torch.no_grad()
def outputs_of(
    model: nn.Module,
    held_out: HeldOut,
    forward: Callable[..., Tensor],
    autocast: contextlib.AbstractContextManager | None = None,
    progress: Callable[[int], object] = lambda more: None,
) -> np.ndarray:
    """Returns the outputs for each row, at least float32 [n, outputs], in the order of the split.

    Args:
        held_out: all rows of a split, in any order.
        forward: tensors of a batch without its labels, on the device of the model -> outputs of the model.
        progress: called with the number of rows of each forward pass.
    """
    device = next(model.parameters()).device

    def compute(number: int) -> np.ndarray:
        *inputs, labels = held_out[number]
        with autocast or contextlib.nullcontext():
            outputs = forward(*(tensor.to(device) for tensor in inputs))
        progress(len(labels))
        return (outputs if outputs.dtype == torch.float64 else outputs.float()).cpu().numpy()

    with evaluating(model):
        joined = np.concatenate(divided(range(len(held_out)), compute))
    result = np.empty_like(joined)
    result[held_out.order] = joined
    return result
