"""Collectives of tensor parallelism (Megatron-LM, arXiv:1909.08053; paper 001, appendix E), on ordinary tensors.

Inside a split layer each rank holds some heads or channels. A tensor that all ranks hold whole passes `enter` on its
way in: each rank then computes a part of its gradient, and the backward sums the parts. A product with rows of a weight
passes `leave` on its way out: the forward sums the parts. Every rank of the group must make the same calls in the same
order.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from linnet.ops import compat_torch
from linnet.ops.fast_path import make_fast_path

__all__ = ["Split", "enter", "gather", "leave", "own_part", "sum_over"]


@dataclass(frozen=True)
class Split:
    """How tensors are split over a process group.

    Attributes:
        group: name of the process group.
        rank, size: this process's rank in the group, and the number of ranks.
    """

    group: str
    rank: int
    size: int

    @classmethod
    def over(cls, group: "dist.ProcessGroup") -> Self:
        """Returns the split over the ranks of a group."""
        return cls(group.group_name, group.rank(), group.size())

    def part(self, count: int) -> tuple[int, int]:
        """Returns the first index and the length of this rank's part of `count` elements, as `torch.chunk` cuts them.

        If the size does not divide `count`, the last parts are shorter.
        """
        step = -(-count // self.size)
        first = min(self.rank * step, count)
        return first, min(step, count - first)

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part of x along a dimension, as a view."""
        return x.narrow(dim, *self.part(x.shape[dim]))


def enter(x: Tensor, split: Split) -> Tensor:
    """Returns x; the backward sums the gradient over the ranks. For an x that all ranks hold, into a split layer."""
    return _Enter.apply(x, split.group)


def leave(x: Tensor, split: Split) -> Tensor:
    """Returns the sum of x over the ranks; the gradient passes. For the output of a split layer."""
    return _fast_sum(x, split.group, False)


def sum_over(x: Tensor, split: Split) -> Tensor:
    """Returns the sum of x over the ranks; the backward sums the gradient too. For a sum that a split layer reads."""
    return _fast_sum(x, split.group, True)


def own_part(x: Tensor, dim: int, split: Split | None) -> Tensor:
    """Returns this rank's part of x along a dimension; the backward joins the parts of the gradient.

    For a tensor that is computed whole on each rank, outside split layers, and read by channel inside one. x itself for
    `split` None. The ranks must divide the dimension.
    """
    return x if split is None else _OwnPart.apply(x, dim % x.ndim, split)


def gather(x: Tensor, dim: int, split: Split, count: int) -> Tensor:
    """Returns the tensor of `count` elements along `dim` whose parts (`Split.part`) the ranks hold.

    The backward gives each rank its part of the gradient, which must be the same on all ranks.
    """
    dim, step = dim % x.ndim, -(-count // split.size)
    if x.shape[dim] < step:  # a shorter last part
        shape = list(x.shape)
        shape[dim] = step - x.shape[dim]
        x = torch.cat([x, x.new_zeros(shape)], dim)
    return _fast_gather(x, dim, split.group, split.rank, split.size).narrow(dim, 0, count)


@torch.library.custom_op("linnet::tensor_sum", mutates_args=())
def tensor_sum(x: Tensor, group: str, both: bool) -> Tensor:
    """Sums x over the ranks of a group. `both`: the backward sums too."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=compat_torch.group_of(group))
    return total


@tensor_sum.register_fake
def _(x, group, both):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sum_context(ctx, inputs, output):
    _, ctx.group, ctx.both = inputs


def _sum_backward(ctx, dy):
    return (_fast_sum(dy, ctx.group, False) if ctx.both else dy), None, None


tensor_sum.register_autograd(_sum_backward, setup_context=_sum_context)
_fast_sum = make_fast_path(tensor_sum, _sum_context, _sum_backward)


@torch.library.custom_op("linnet::tensor_gather", mutates_args=())
def tensor_gather(x: Tensor, dim: int, group: str, rank: int, size: int) -> Tensor:
    """Joins the ranks' tensors, which have one shape, along a dimension in rank order."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=compat_torch.group_of(group))
    return torch.cat(parts, dim)


@tensor_gather.register_fake
def _(x, dim, group, rank, size):
    return torch.cat([x] * size, dim)


def _gather_context(ctx, inputs, output):
    x, ctx.dim, _, ctx.rank, _ = inputs
    ctx.length = x.shape[ctx.dim]


def _gather_backward(ctx, dy):
    return dy.narrow(ctx.dim, ctx.rank * ctx.length, ctx.length), None, None, None, None


tensor_gather.register_autograd(_gather_backward, setup_context=_gather_context)
_fast_gather = make_fast_path(tensor_gather, _gather_context, _gather_backward)


class _Enter(torch.autograd.Function):
    """A function and not an op, since an op would copy x."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _fast_sum(dy, ctx.group, False), None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, split):
        ctx.dim, ctx.split = dim, split
        return split.cut(x, dim).clone()

    @staticmethod
    def backward(ctx, dy):
        split = ctx.split
        return _fast_gather(dy, ctx.dim, split.group, split.rank, split.size), None, None
