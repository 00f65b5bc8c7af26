"""LRPE in the complex form, x -> [x cos(t theta), x sin(t theta)], and its transpose (paper 003, section 4.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """The rotation of a run of tokens [B, H, n, C, K]; without tables (no theta) everything passes unchanged.

    cos, sin: [1 or B, H, n, C, K]; positions: [1 or B, 1, n, C, 1].
    A `view` picks tokens out of tables and tensors alike (the rows or columns of a block).
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    positions: Tensor | None = None

    @staticmethod
    def of(theta: Tensor | None, positions: Tensor, dtype: torch.dtype) -> "Turn":
        """For positions [1 or B, n, C] and theta [H, K]. Angles are formed in float64: t theta needs the digits."""
        if theta is None:
            return Turn()
        positions = positions[:, None, :, :, None]
        angle = positions.double() * theta.double()[:, None, None]
        return Turn(angle.cos().to(dtype), angle.sin().to(dtype), positions.to(dtype))

    def apply(self, x: Tensor, view=lambda x: x) -> Tensor:
        if self.cos is None:
            return x
        both = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
        for half, table in zip(both.chunk(2, -1), (self.cos, self.sin), strict=True):
            torch.mul(x, view(table), out=half)
        return both

    def transpose(self, x: Tensor, grad: Tensor, view=lambda x: x) -> tuple[Tensor, Tensor | None]:
        """From the gradient to `apply(x)`: those to x and to x's angles (None without tables)."""
        if self.cos is None:
            return grad, None
        cos, sin = view(self.cos), view(self.sin)
        first, second = grad.chunk(2, -1)
        angle = (second * cos).addcmul_(first, sin, value=-1).mul_(x)
        return (first * cos).addcmul_(second, sin), angle

    def twice(self, x: Tensor) -> Tensor:
        """A factor per channel [..., K], made to multiply rows of the state: [..., K or 2K, 1]."""
        return (x if self.cos is None else torch.cat([x, x], -1))[..., None]

    def once(self, x: Tensor) -> Tensor:
        """The transpose of doubling: [..., K or 2K] -> [..., K]."""
        return x if self.cos is None else x.unflatten(-1, (2, -1)).sum(-2)

    def theta_gradient(self, angle: Tensor) -> Tensor:
        return (angle * self.positions).sum((0, 2, 3))
