"""Collectives of tensor parallelism (Megatron-LM, arXiv:1909.08053; paper 001, appendix E), on ordinary tensors.

Inside a split layer each rank holds some heads or channels. A tensor that all ranks hold whole passes `enter` on its
way in: each rank then computes a part of its gradient, and the backward sums the parts. A product with rows of a weight
passes `leave` on its way out: the forward sums the parts. Every rank of the group must make the same calls in the same
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import compat_torch
from linnet.ops.chunks import exact, product_dtype
from linnet.ops.fast_path import make_fast_path
from linnet.ops.registration import flop_formula

__all__ = ["Split", "columns", "enter", "enter_columns", "gather", "leave", "own_part", "rowwise", "share", "sum_over"]

Products = list[tuple[int, Tensor, Tensor]]  # by backward: gradients of a product's rows, with the rows of its input
Entered = tuple[Tensor, Products]  # of a weight: its alias, and its products

MOST_WHOLE = 4096  # tokens from which a product is summed in two parts


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


def enter_columns(x: Tensor, weights: Sequence[Tensor], split: Split) -> tuple[Tensor, list[Entered]]:
    """Returns `enter(x)`, and what `columns` needs for each weight, so that the backward hides its all-reduce.

    The backward multiplies the gradients of these weights while the gradient of x is summed over the ranks. Eager only.
    """
    products: list[Products] = [[] for _ in weights]
    x, *aliases = _EnterColumns.apply(split.group, products, x, *weights)
    return x, list(zip(aliases, products, strict=True))


def columns(x: Tensor, bias: Tensor | None, entered: Entered) -> Tensor:
    """Returns F.linear(x, weight, bias) for a weight from `enter_columns`."""
    weight, products = entered
    return _Columns.apply(x.to(product_dtype(x, x.dtype)), weight, bias, products)


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


def share(x: Tensor, split: Split | None) -> Tensor:
    """Returns x; the backward gives 1 / size of the gradient, which `enter` then sums over the ranks.

    For a term that each rank of a split layer computes whole. x itself for `split` None.
    """
    return x if split is None else torch.lerp(x.detach(), x, 1 / split.size)


def rowwise(x: Tensor, weight: Tensor, split: Split) -> Tensor:
    """Returns x W^T summed over the ranks, each of which holds some columns of x and W; the gradient passes.

    As `leave(F.linear(x, weight))`. On a GPU the first half of the tokens is summed while the second is multiplied.

    Args:
        x: [..., K], this rank's inputs. weight: [D, K], this rank's columns.
    """
    if x.dtype != torch.float64 and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    return _fast_rowwise(x, weight, split.group)


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


@torch.library.custom_op("linnet::tensor_rowwise", mutates_args=())
def tensor_rowwise(x: Tensor, weight: Tensor, group: str) -> Tensor:
    """Multiplies x [..., K] by weight [D, K], and sums the product over the ranks of a group."""
    process_group, rows = compat_torch.group_of(group), x.reshape(-1, x.shape[-1])
    y = x.new_empty(rows.shape[0], weight.shape[0])
    parts = 2 if x.is_cuda and rows.shape[0] >= MOST_WHOLE else 1
    with exact(x):
        sums = []
        for part, product in zip(rows.tensor_split(parts), y.tensor_split(parts), strict=True):
            torch.mm(part, weight.T, out=product)
            sums.append(dist.all_reduce(product, group=process_group, async_op=True))
        for each in sums:
            each.wait()
    return y.view(*x.shape[:-1], -1)


@tensor_rowwise.register_fake
def _(x, weight, group):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _rowwise_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _rowwise_backward(ctx, dy):
    x, weight = ctx.saved_tensors
    dx = dy @ weight if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return dx, None, None
    return dx, dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1]), None


tensor_rowwise.register_autograd(_rowwise_backward, setup_context=_rowwise_context)
_fast_rowwise = make_fast_path(tensor_rowwise, _rowwise_context, _rowwise_backward)


@flop_formula(torch.ops.linnet.tensor_rowwise)
def rowwise_flops(x_shape, weight_shape, group, **_) -> int:
    """2 D K per token."""
    return 2 * prod(x_shape) * weight_shape[0]


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


class _EnterColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, products, x, *weights):
        ctx.group, ctx.products, ctx.dtypes = group, products, [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        return x.view_as(x), *(weight.view_as(weight) for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx, *_):
        if dx is not None:
            dx = dx.clone(memory_format=torch.contiguous_format)
            summed = dist.all_reduce(dx, group=compat_torch.group_of(ctx.group), async_op=True)
        totals = []
        for products, dtype in zip(ctx.products, ctx.dtypes, strict=True):
            total = None
            while products:
                backward, dy, x = products.pop()
                if backward != compat_torch.current_backward():  # of one that ended before it came here
                    continue
                product = (dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])).to(dtype)
                total = product if total is None else total + product
            totals.append(total)
        if dx is not None:
            summed.wait()
        return None, None, dx, *totals


class _Columns(torch.autograd.Function):
    """A linear layer that leaves the gradient of its weight to `_EnterColumns`, which follows in the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, products):
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.products, ctx.bias = products, None if bias is None else bias.dtype
        return F.linear(x, narrow, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.products.append((compat_torch.current_backward(), dy, x))
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        if ctx.bias is None or not ctx.needs_input_grad[2]:
            return dx, None, None, None
        return dx, None, dy.reshape(-1, dy.shape[-1]).sum(0).to(ctx.bias), None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, split):
        ctx.dim, ctx.split = dim, split
        return split.cut(x, dim).clone()

    @staticmethod
    def backward(ctx, dy):
        split = ctx.split
        return _fast_gather(dy, ctx.dim, split.group, split.rank, split.size), None, None
