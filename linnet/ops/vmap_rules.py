"""How ops obey `torch.vmap`: the axis of models is folded into an axis that the op has, and the op runs once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linnet.ops import compat_torch


def fold(x: Tensor | None, dim: int | None, size: int, axis: int) -> Tensor | None:
    """Merges the model axis of x into the axis that is `axis` for one model; the models come first in the merged axis.

    Args:
        x: a batched argument, or None.
        dim: the place of its model axis; None if all models share it.
        size: number of models.
        axis: for one model, the axis to merge into (0 for the batch; 2 for the heads of [B, T, H, D]).
    """
    if x is None:
        return None
    x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:]) if dim is None else x.movedim(dim, axis)
    return x.flatten(axis, axis + 1)


def lead(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Returns a view of x with the model axis first; `dim` is its place, or None if all models share x."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def unfold(x: Tensor, size: int, axis: int) -> Tensor:
    """The inverse of `fold` for a result: splits the merged axis, leaving the model axis at `axis` (its out-dim)."""
    return x.unflatten(axis, (size, x.shape[axis] // size))


def run_folded(
    op: Callable,
    size: int,
    in_dims: Sequence[int | None],
    arguments: Sequence,
    into: Sequence[int | None],
    outputs: Sequence[int | None],
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Runs `op` once for all models: (outputs, out_dims) as a vmap rule returns them.

    Args:
        into: the axis that each argument's models fold into; None for an argument that stays as it is.
        outputs: the axis that the models of each output are folded into. An empty output is shared by all models.
    """
    folded = [
        x if axis is None else fold(x, dim, size, axis) for x, dim, axis in zip(arguments, in_dims, into, strict=True)
    ]
    results = op(*folded)
    results = (results,) if isinstance(results, Tensor) else results
    axes = tuple(None if x.numel() == 0 else axis for x, axis in zip(results, outputs, strict=True))
    return tuple(x if axis is None else unfold(x, size, axis) for x, axis in zip(results, axes, strict=True)), axes


def run_each(
    op: Callable, size: int, in_dims: Sequence[int | None], arguments: Sequence
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The last resort: runs `op` for every model and stacks the results, where folding cannot express a call."""
    calls = []
    for i in range(size):
        outputs = op(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
        calls.append((outputs,) if isinstance(outputs, Tensor) else outputs)
    outputs = tuple(torch.stack(models) for models in zip(*calls, strict=True))
    return outputs, (0,) * len(outputs)


def is_mapped(*tensors: Tensor | None) -> bool:
    """Whether a call is under one `torch.vmap` and no other transform or mode, so that `Mapped` can take it."""
    return not torch.compiler.is_compiling() and compat_torch.in_one_vmap(tensors)


class Mapped(torch.autograd.Function):
    """Brings vmap to the kernel of a function that is otherwise a composition of PyTorch's operations.

    `Mapped.apply(rule, *arguments)`, where `is_mapped`, gives what `rule(size, dims, *arguments)` gives for all models
    at once: outputs and their dims. The rule calls plain functions, which have gradients of their own.
    """

    @staticmethod
    def forward(rule, *arguments):
        raise RuntimeError("Mapped is for arguments under vmap")

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, rule, *arguments):
        return rule(info.batch_size, in_dims[1:], *arguments)
