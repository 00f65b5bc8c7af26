"""How an op obeys `torch.vmap`: the axis of models is folded into an axis the op already has, and the op runs once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import CustomOpDef

from linnet.ops.looping import each


def fold(x: Tensor | None, dim: int | None, size: int, axis: int) -> Tensor | None:
    """Merges the model axis of x into the axis that is `axis` for one model; the models come first in the merged axis.

    Args:
        x: a batched argument, or None.
        dim: where its model axis is; None when all models share it.
        size: number of models.
        axis: for one model, the axis to merge into (0 for the batch; 2 for the heads of [B, T, H, D]).
    """
    if x is None:
        return None
    x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:]) if dim is None else x.movedim(dim, axis)
    return x.flatten(axis, axis + 1)


def fold_all(
    tensors: Sequence[Tensor | None], dims: Sequence[int | None], size: int, axes: Sequence[int | None]
) -> list[Tensor | None]:
    """`fold` of each tensor into its own axis; one whose axis is None stays. `axes` may go on beyond the tensors."""
    pairs = zip(tensors, dims, axes, strict=False)
    return [x if axis is None else fold(x, dim, size, axis) for x, dim, axis in pairs]


def lead(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The model axis of x as the first one, a view; `dim` is where it is, or None when all models share x."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def unfold(x: Tensor, size: int, axis: int) -> Tensor:
    """The inverse of `fold` for a result: splits the merged axis, leaving the model axis at `axis` (its out-dim)."""
    return x.unflatten(axis, (size, x.shape[axis] // size))


def register_folding(
    op: CustomOpDef,
    backward: CustomOpDef,
    axes: Callable[[Sequence, Sequence], Sequence[int | None]],
    gradients: Sequence[int],
) -> None:
    """vmap for an op of (q, k, v, decays, initial state, cu_seqlens, scale, ...), and its backward of those 7 and of do
    and dfinal.

    Args:
        op: gives o and the final state.
        backward: gives the gradients of the arguments numbered `gradients`. What is empty is so for all models.
        axes: of the arguments and their in_dims, which axis the models fold into, for q, k, v, decays, initial state,
            cu_seqlens, do and dfinal. Where offsets differ by model, the op runs once a model.
    """

    def run(function, tensors, size, in_dims, arguments, outputs):
        if in_dims[5] is not None:
            return each(function, size, in_dims, arguments)
        into = axes(arguments, in_dims)
        folded = list(arguments)
        for i, axis in zip(tensors, into, strict=False):
            folded[i] = arguments[i] if axis is None else fold(arguments[i], in_dims[i], size, axis)
        results = function(*folded)
        outs = [None if x.numel() == 0 else into[i] for x, i in zip(results, outputs, strict=True)]
        pairs = zip(results, outs, strict=True)
        return tuple(x if axis is None else unfold(x, size, axis) for x, axis in pairs), tuple(outs)

    @op.register_vmap
    def _(info, in_dims, *arguments):
        return run(op, range(6), info.batch_size, in_dims, arguments, (2, 4))

    @backward.register_vmap
    def _(info, in_dims, *arguments):
        return run(backward, (*range(6), 7, 8), info.batch_size, in_dims, arguments, gradients)


def is_mapped(*tensors: Tensor | None) -> bool:
    """Whether a call is under one `torch.vmap` and nothing else looks on, so that `Mapped` can take it."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() != 1:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    return any(x is not None and torch._C._functorch.is_batchedtensor(x) for x in tensors)


class Mapped(torch.autograd.Function):
    """For a function of PyTorch's operations that has a kernel for plain tensors: how vmap comes to that kernel.

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
