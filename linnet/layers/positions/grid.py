"""The grid on which tokens without causality lie: their coordinates, and the orders in which scans visit them."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from linnet.ops.compat_torch import is_plain
from linnet.ops.scans import ORDERS, reorder


@dataclass(frozen=True)
class Grid:
    """Tokens of a grid in row-major order, after `prefix` tokens that lie on none.

    Attributes:
        sides: number of tokens along each axis, for example (rows, columns).
        prefix: tokens before the grid, such as a class token.
    """

    sides: tuple[int, ...]
    prefix: int = 0

    def __post_init__(self):
        if not self.sides or min(self.sides) < 1 or self.prefix < 0:
            raise ValueError(
                f"grid: sides {self.sides}, prefix {self.prefix}; give sides of at least 1 and a prefix of at least 0"
            )

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of a row, with the prefix."""
        return self.prefix + prod(self.sides)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the coordinates of the tokens, int32 [1, T, A], from 0; those of the prefix are 0 on all axes."""
        device = torch.device("cpu" if device is None else device)
        # Tensors made for a compiler, a mode or a CUDA graph must not be kept.
        if not is_plain(()) or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return _positions(self, device)
        return _kept_positions(self, device)

    def orders(self, scan: str) -> list[Tensor]:
        """Returns the orders of a scan as permutations, int64 [T] each: position in the scan -> token of the row.

        Args:
            scan: `forward`, row-major from the start; `both`, row-major from both ends; `cross`, also column-major from
                both ends; `series`, the orders of `cross`, of which the first two and the last two are one after the
                other (`linnet.layers.non_causal`).
        """
        tokens = torch.arange(self.tokens)[None]
        orders = ORDERS["cross" if scan == "series" else scan]
        return [reorder(tokens, order, self.sides, self.prefix)[0] for order in orders]

    def transposed(self) -> "Grid":
        """Returns the grid whose row-major order is the column-major order of this one."""
        return Grid(self.sides[::-1], self.prefix)


def _positions(grid: Grid, device: torch.device) -> Tensor:
    # Filled and not stacked: on the meta device, torch.stack imports torch's compiler, which takes a second.
    places = torch.zeros(grid.tokens, len(grid.sides), dtype=torch.int32, device=device)
    body = places[grid.prefix :].view(*grid.sides, len(grid.sides))
    for axis, side in enumerate(grid.sides):
        shape = [-1 if other == axis else 1 for other in range(len(grid.sides))]
        body[..., axis].copy_(torch.arange(side, dtype=torch.int32, device=device).view(shape))
    return places[None]


@lru_cache(64)
def _kept_positions(grid: Grid, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _positions(grid, device)
