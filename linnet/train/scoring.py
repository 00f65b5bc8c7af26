"""Sums over held-out rows, on one device or on ranks that score together."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from linnet.evaluate.likelihood import evaluating
from linnet.train.objective import Batch, Show

if TYPE_CHECKING:
    from linnet.parallel.mesh import Mesh


@torch.no_grad()
def sum_over_batches(
    model: nn.Module,
    batches: Sequence[Batch],
    rows: int,
    measure: Callable[..., Tensor],
    autocast: contextlib.AbstractContextManager,
    show: Show | None = None,
    mesh: "Mesh | None" = None,
) -> Tensor:
    """Returns the sum of what `measure` returns for each batch, in float64 on the device of the model.

    On several ranks batches are dealt to them in turn, and every rank makes the same number of forward passes, because
    each pass communicates: a rank without a batch repeats the last one, which then counts for nothing.

    Args:
        model: is in evaluation mode while `measure` runs.
        batches: the same on all ranks; each is read when it is needed.
        rows: number of rows of all batches together, for `show`.
        measure: tensors of a batch, on the device of the model -> numbers to sum, [K].
        autocast: precision of the forward pass.
        show: called with (rows scored, all rows) before each batch, as if batches had equal numbers of rows.
        mesh: the ranks that score together; all must call this function.
    """
    device = next(model.parameters()).device
    world, rank = (1, 0) if mesh is None else (mesh.dp, mesh.dp_rank)
    total: Tensor | None = None
    with evaluating(model):
        for first in range(0, len(batches), world):
            batch = batches[min(first + rank, len(batches) - 1)]
            if show is not None:
                show(rows * first // len(batches), rows)
            with autocast:
                found = measure(*(tensor.to(device) for tensor in batch)).double()
            found = found if first + rank < len(batches) else torch.zeros_like(found)
            total = found if total is None else total + found
    if total is None:
        raise ValueError("there is nothing to score: no held-out batch")
    if mesh is not None:
        from linnet.parallel.build import settle

        settle(model)
        torch.distributed.all_reduce(total, group=mesh.data_group)
    return total
