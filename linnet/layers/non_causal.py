"""Runs any mixer in a model without causality, where each token sees those before and after it.

A mixer that is causal by nature runs in each order of the model's scan, all orders as rows of one batch, and its
outputs are averaged: mean and not sum, so that the residual branch keeps its scale (`scan_sum` takes the sum). A mixer
with a better form of its own has `non_causal` set and is called once. Tokens before a grid stay in front in every
order: they see only each other, unless every token sees all (`one_scan`).
"""

from collections.abc import Callable
from typing import Literal, NoReturn

from torch import Tensor

from linnet.layers.base import Mixer, State
from linnet.layers.positions import Grid
from linnet.ops import sequence
from linnet.ops.scans import ORDERS, Order, both_ways, in_orders, reorder, restore

ScanOption = Literal["forward", "both", "cross", "series"]

_COLUMNS = Order(by_columns=True, backwards=False)


def mix_all(
    mixer: Mixer,
    x: Tensor,
    scan: ScanOption,
    cu_seqlens: Tensor | None = None,
    grid: Grid | None = None,
    scan_sum: bool = False,
) -> Tensor:
    """Returns the output [B, T, D] of a mixer without causality.

    Args:
        scan: order in which tokens are visited: `forward`, row-major from the start (an ablation); `both`, from both
            ends; `cross`, row-major and column-major, each from both ends; `series`, the whole mixer row-major from
            both ends, then on its output column-major from both ends (HGRN2's module for two axes).
        cu_seqlens: int32 [N+1], documents of one packed row (B = 1).
        grid: of the tokens; None for a sequence.
        scan_sum: add the outputs of the orders in place of their mean.

    Raises:
        ValueError: inside `sequence_parallel`, where a token would not see the other spans of its row.
    """
    if sequence.span() is not None:
        raise ValueError(
            f"{mixer.name}: rows of a model that sees all tokens at once cannot be cut into spans; use parallel.sp: 1"
        )
    sides, prefix = (None, 0) if grid is None else (grid.sides, grid.prefix)
    if scan == "series" and mixer.non_causal != "one_scan":
        y = mix_all(mixer, x, "both", cu_seqlens, grid, scan_sum)
        if grid is not None:
            y, grid = reorder(y, _COLUMNS, sides, prefix), grid.transposed()
        return restore(mix_all(mixer, y, "both", cu_seqlens, grid, scan_sum), _COLUMNS, sides, prefix)
    if mixer.non_causal != "generic":
        more = (grid,) if mixer.takes_grid and grid is not None else ()
        return mixer(x, None, cu_seqlens, *more)[0]

    def run(rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return mixer(rows, None, cu_seqlens)[0]

    first, *others = in_orders(run, x, cu_seqlens=cu_seqlens, orders=ORDERS[scan], sides=sides, prefix=prefix)
    total = sum(others, first)
    return total if scan_sum or not others else total / (1 + len(others))


def scan_both_ways(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    *tensors: Tensor,
    orders: tuple[Order, ...],
    cu_seqlens: Tensor | None,
    grid: Grid | None,
) -> Tensor:
    """Returns `linnet.ops.scans.both_ways` of an op on a grid, for mixers that scan themselves (`two_scans`).

    Args:
        op: (*tensors, cu_seqlens) -> outputs and a state, which is not read.
    """
    sides, prefix = (None, 0) if grid is None else (grid.sides, grid.prefix)

    def attend(*tensors: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return op(*tensors, cu_seqlens=cu_seqlens)[0]

    return both_ways(attend, *tensors, cu_seqlens=cu_seqlens, orders=orders, sides=sides, prefix=prefix)


def passes(mixer: type[Mixer] | Mixer, scan: ScanOption) -> int:
    """Returns how often `mix_all` computes each token in a pass of the model."""
    if mixer.non_causal == "one_scan":
        return 1
    stages, orders = (2, "both") if scan == "series" else (1, scan)
    return stages * (len(ORDERS[orders]) if mixer.non_causal == "generic" else 1)


def refuse_state(state: State | None) -> None:
    """Raises ValueError if a layer without causality is given a state."""
    if state is not None:
        refuse_next_token()


def refuse_next_token() -> NoReturn:
    """Raises the ValueError of a model that is asked for its next token and has none."""
    raise ValueError("this model sees all tokens at once, so it has no next token; only causal models have a state")
