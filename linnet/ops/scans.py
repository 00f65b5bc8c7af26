"""Scans of rows in several orders, for layers whose tokens see each other in both directions.

A recurrence reads a row in one order. Without causality it runs once per order, and its outputs are brought back into
the order of the row. All orders of a call are extra rows of one batch, because short rows do not fill a GPU.

The tokens of a row are those of a grid, row-major, after `prefix` other tokens, which stay in front in every order: the
grid sees them, and they see only each other. One axis is a sequence. Orders are views, flips and copies and no index
tensors, whose gradient would be a scatter.
"""

from collections.abc import Callable
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from linnet.ops.documents import check_documents

Scan = Literal["forward", "both", "cross"]


class Order(NamedTuple):
    """The order in which a scan visits a grid: row-major or column-major (the first axis fastest), from either end."""

    by_columns: bool
    backwards: bool


FORWARD = (Order(False, False),)
BOTH = (Order(False, False), Order(False, True))
ORDERS: dict[Scan, tuple[Order, ...]] = {
    "forward": FORWARD,
    "both": BOTH,
    "cross": (*BOTH, Order(True, False), Order(True, True)),
}


def both_ways(
    attend: Callable[..., Tensor],
    *tensors: Tensor,
    cu_seqlens: Tensor | None = None,
    orders: tuple[Order, ...] = BOTH,
    sides: tuple[int, ...] | None = None,
    prefix: int = 0,
) -> Tensor:
    """Returns the sum over directions of a causal op, in one call: o_t = sum_i o^i_t, each token counted in each.

    The outputs are added, as in HGRN2's bidirectional module, and the norm that follows makes the sum a mean.

    Args:
        attend: maps the tensors, rows [S B, T, ...] in the orders of the scan, and `cu_seqlens` as a keyword, to o
            [S B, T, ...].
        tensors: [B, T, ...] each.
        cu_seqlens: int32 [N+1] with B = 1, where documents start in T, then T. The orders then follow one another
            along T.
        orders: of `ORDERS`: forward, both (row-major, from both ends) or cross (also column-major, from both ends).
        sides: of the grid; None for a sequence.
        prefix: tokens before the grid.

    Raises:
        ValueError: `cu_seqlens` with a grid, or sides that are not those of the row.
    """
    first, *others = in_orders(attend, *tensors, cu_seqlens=cu_seqlens, orders=orders, sides=sides, prefix=prefix)
    return sum(others, first)


def in_orders(
    attend: Callable[..., Tensor],
    *tensors: Tensor,
    cu_seqlens: Tensor | None = None,
    orders: tuple[Order, ...] = BOTH,
    sides: tuple[int, ...] | None = None,
    prefix: int = 0,
) -> list[Tensor]:
    """Returns the outputs of `both_ways` apart: one [B, T, ...] for each order, with the tokens of the row."""
    if orders == FORWARD:
        return [attend(*tensors, cu_seqlens=cu_seqlens)]
    along = 0 if cu_seqlens is None else 1
    if along:
        batch, length = tensors[0].shape[:2]
        check_documents(cu_seqlens, batch, length)
        cu_seqlens = _copied_documents(cu_seqlens, orders, length)
    on_grid = sides is not None or prefix > 0
    if along and on_grid:
        raise ValueError("in_orders: cu_seqlens packs rows of one axis; give a grid's rows as rows of a batch")
    folded = [torch.cat([reorder(x, order, sides, prefix) for order in orders], along) for x in tensors]
    outputs = attend(*folded, cu_seqlens=cu_seqlens).chunk(len(orders), along)
    return [restore(o, order, sides, prefix) for o, order in zip(outputs, orders, strict=True)]


def reorder(x: Tensor, order: Order, sides: tuple[int, ...] | None = None, prefix: int = 0) -> Tensor:
    """Returns the tokens of x [B, T, ...] as a scan visits them."""
    if order == (False, False):
        return x
    head, body = x[:, :prefix], x[:, prefix:]
    if order.by_columns and sides is not None:
        body = _transposed(body, sides)
    if order.backwards:
        body = body.flip(1)
    return torch.cat([head, body], 1) if prefix else body


def restore(x: Tensor, order: Order, sides: tuple[int, ...] | None = None, prefix: int = 0) -> Tensor:
    """Returns the inverse of `reorder`."""
    if order == (False, False):
        return x
    head, body = x[:, :prefix], x[:, prefix:]
    if order.backwards:
        body = body.flip(1)
    if order.by_columns and sides is not None:
        body = _transposed(body, sides[::-1])
    return torch.cat([head, body], 1) if prefix else body


def _transposed(x: Tensor, sides: tuple[int, ...]) -> Tensor:
    """Returns x [B, N, ...] with the tokens of a grid in the order in which the first axis is the fastest."""
    if x.shape[1] != prod(sides):
        raise ValueError(f"a grid of {' x '.join(map(str, sides))} has {prod(sides)} tokens, but the row {x.shape[1]}")
    axes = range(1, 1 + len(sides))
    rest = range(1 + len(sides), x.ndim - 1 + len(sides))
    return x.unflatten(1, sides).permute(0, *reversed(axes), *rest).flatten(1, len(sides))


def _copied_documents(cu_seqlens: Tensor, orders: tuple[Order, ...], length: int) -> Tensor:
    """Returns the offsets of copies of packed documents that follow one another, backwards ones from the last."""
    parts = [cu_seqlens[:1]]
    for index, order in enumerate(orders):
        offsets = length - cu_seqlens.flip(0) if order.backwards else cu_seqlens
        parts.append(offsets[1:] + index * length)
    return torch.cat(parts)
