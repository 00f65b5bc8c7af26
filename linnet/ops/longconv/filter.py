"""A long filter in modes, h_t = skip [t = 0] + sum_n Re(R_n lambda_n^t), and the tables that a convolution needs of it.

Every mode is the recurrence u_t = lambda u_{t-1} + x_t, so the filter decodes with constant state. Complex numbers are
pairs of reals here: products of complex tables are ordinary matrix products, which compile, count and batch as such.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ModalFilter(NamedTuple):
    """F filters of N modes each.

    Attributes:
        log_decay: [F, N], the logarithm of |lambda|, at most 0.
        theta: [F, N], the angle of lambda in radians a token.
        residue: [F, N, 2], R, real and imaginary part.
        skip: [F], what h_0 has beside the modes; None for nothing.
    """

    log_decay: Tensor
    theta: Tensor
    residue: Tensor
    skip: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "ModalFilter":
        return ModalFilter(*(None if x is None else x.to(dtype) for x in self))


def powers(filter: ModalFilter, times: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of lambda^t, both [F, N, len(times)], in the dtype of the filter.

    Angles are turned in float64: at thousands of tokens a float32 phase would have lost three digits. The tables are
    small beside the convolution.
    """
    times = times.to(torch.float64)
    phase = filter.theta.to(torch.float64)[..., None] * times
    # 0 times the logarithm of a decay of 0 is not a number, but lambda^0 is 1.
    size = (filter.log_decay[..., None] * times.to(filter.log_decay.dtype)).masked_fill(times == 0, 0.0).exp()
    return size * phase.cos().to(size.dtype), size * phase.sin().to(size.dtype)


def kernel_of(filter: ModalFilter, length: int) -> Tensor:
    """h_t for t < length, [F, length].

    lambda^(a C + b) = lambda^(a C) lambda^b with C near the square root of the length: one product of two small
    tables, so that nothing of size [F, length, N] is formed or kept for the backward.
    """
    near = max(1, round(length**0.5))
    far = -(-length // near)
    device = filter.theta.device
    left = torch.stack(_weigh(filter, *powers(filter, near * torch.arange(far, device=device))), 1)  # [F, 2, N, far]
    right = torch.stack(powers(filter, torch.arange(near, device=device)), 1)
    kernel = torch.bmm(left.flatten(1, 2).mT, right.flatten(1, 2)).flatten(1)[:, :length]
    if filter.skip is None:
        return kernel
    return torch.cat([kernel[:, :1] + filter.skip[:, None], kernel[:, 1:]], 1)


def read_table(filter: ModalFilter, length: int) -> Tensor:
    """[F, length, N, 2]: what token t reads of the modes before the first token, Re(R lambda^{t+1} u)."""
    times = torch.arange(1, length + 1, device=filter.theta.device)
    return torch.stack(_weigh(filter, *powers(filter, times)), -1).transpose(1, 2)


def write_table(filter: ModalFilter, length: int) -> Tensor:
    """[F, length, N, 2]: lambda^t, what a token becomes in the modes after t more."""
    return torch.stack(powers(filter, torch.arange(length, device=filter.theta.device)), -1).transpose(1, 2)


def turn(state: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """The complex numbers state [..., 2] times real + i imaginary."""
    x, y = state.unbind(-1)
    return torch.stack([x * real - y * imaginary, x * imaginary + y * real], -1)


def _weigh(filter: ModalFilter, real: Tensor, imaginary: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) with Re(R lambda^t u) = a Re u + b Im u."""
    weight, twist = filter.residue[..., 0, None], filter.residue[..., 1, None]
    return weight * real - twist * imaginary, -(weight * imaginary + twist * real)
