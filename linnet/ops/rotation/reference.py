"""The definition of a rotation by position times frequency; also the form that runs on a CPU."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rotate_reference(x: Tensor, positions: Tensor, theta: Tensor, doubling: bool, activation: str = "none") -> Tensor:
    """As `rotate`. Angles are at least float32: positions beyond 2^24 or half-precision angles would collide."""
    theta = theta if theta.dtype == torch.float64 else theta.float()
    angle = positions[..., None, None].to(theta.dtype) * theta
    x = F.silu(x) if activation == "silu" else x
    cos, sin = angle.cos(), angle.sin()
    wide = x.to(torch.promote_types(x.dtype, angle.dtype))
    if doubling:
        return torch.cat([wide * cos, wide * sin], dim=-1).to(x.dtype)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
