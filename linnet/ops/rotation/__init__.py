"""Rotation of queries and keys by their positions: RoPE and LRPE, real and complex."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.compat_torch import is_plain
from linnet.ops.fast_path import find_apply
from linnet.ops.registration import Mapped, fold, is_mapped, unfold

__all__ = ["rotate"]


def rotate(x: Tensor, positions: Tensor, theta: Tensor, *, doubling: bool = False, activation: str = "none") -> Tensor:
    """Rotates each head of act(x) by t theta: pairs (i, i + d/2), or x -> [x cos, x sin], which doubles the width.

    On a GPU in eager mode one kernel does it and one its backward; elsewhere, and for a compiler, it is a composition
    of PyTorch's functions. The kernel forms t theta more exactly than float32, so far from the start (from some ten
    thousand tokens) the two differ by the rounding of the composition. It is exact only for positions below
    2^24 and |t theta| below 2.6e7 radians; it does not check, and beyond them the sign of a result can be wrong.

    Args:
        x: [B, T, H, d], or [B, H, d] for one token.
        positions: integers [1 or B, T], or [B]; or [1 or B, T, A], coordinates on A axes: the F frequencies fall into A
            contiguous groups of ceil(F / A), and each group rotates by its coordinate.
        theta: frequencies in radians a token, [H, F] or [1, F] for all heads alike; F is d / 2, or d when doubling.
        doubling: the complex form (LRPE) instead of pairs.
        activation: none or silu, on x before it is rotated.

    Returns:
        [..., d], or [..., 2 d] when doubling, in the dtype of x; with gradients to x and theta.

    Raises:
        ValueError: shapes that do not go together, an unknown activation.
    """
    heads, width = x.shape[-2:]
    fits = theta.ndim == 2 and theta.shape[0] in (1, heads) and width == theta.shape[1] * (1 if doubling else 2)
    if not fits or not _places_fit(x, positions) or activation not in ("none", "silu"):
        raise ValueError(
            f"rotate: x has shape {list(x.shape)}, positions {list(positions.shape)}, theta {list(theta.shape)} and "
            f"activation {activation!r}; give [B, T, H, d], [B or 1, T] or [B or 1, T, A], "
            f"[H or 1, {'d' if doubling else 'd / 2'}] and none or silu (for one token [B, H, d] and [B])"
        )
    positions = drop_single_axis(positions)
    if backend.use_triton("rotation", x.is_cuda) and x.ndim in (3, 4):
        rows = positions.expand(x.shape[0], *positions.shape[1:])
        if is_plain((x, rows, theta)):
            kernels = importlib.import_module("linnet.ops.rotation.triton")
            if kernels.supports(x, rows, theta):
                return _apply(x, rows, theta, doubling, activation)
        if is_mapped(x, positions) and not is_mapped(theta):
            return Mapped.apply(_rule, x, rows, theta, doubling, activation)
    return rotate_reference(x, positions, theta, doubling, activation)


def _places_fit(x: Tensor, positions: Tensor) -> bool:
    if x.ndim == 4 and positions.ndim in (2, 3) and 0 not in positions.shape[2:]:
        return positions.shape[0] in (1, x.shape[0]) and positions.shape[1] == x.shape[1]
    return positions.shape == x.shape[:-2]


def _rule(size, dims, x, positions, *others):
    x, positions = (fold(t, dim, size, 0) for t, dim in zip((x, positions), dims, strict=False))
    return unfold(rotate(x, positions, others[0], doubling=others[1], activation=others[2]), size, 0), 0


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, theta, doubling, activation):
        kernels = importlib.import_module("linnet.ops.rotation.triton")
        needs_x = activation != "none" or ctx.needs_input_grad[2]
        ctx.save_for_backward(x if needs_x else None, positions, theta)
        ctx.constants = kernels, doubling, activation
        return kernels.rotate_forward(x, positions, theta, doubling, activation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        kernels, doubling, activation = ctx.constants
        dx, dtheta = kernels.rotate_backward(*ctx.saved_tensors, dy, doubling, activation, ctx.needs_input_grad[2])
        return dx, None, dtheta, None, None


_apply = find_apply(_Rotate)


def rotate_reference(x: Tensor, positions: Tensor, theta: Tensor, doubling: bool, activation: str = "none") -> Tensor:
    """As `rotate`. Angles are at least float32: positions beyond 2^24 or half-precision angles would collide."""
    theta = theta if theta.dtype == torch.float64 else theta.float()
    places = positions[..., None] if positions.ndim == x.ndim - 2 else spread(positions, theta.shape[1])
    angle = places[..., None, :].to(theta.dtype) * theta
    x = F.silu(x) if activation == "silu" else x
    cos, sin = angle.cos(), angle.sin()
    wide = x.to(torch.promote_types(x.dtype, angle.dtype))
    if doubling:
        return torch.cat([wide * cos, wide * sin], dim=-1).to(x.dtype)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def check_positions(op: str, positions: Tensor, batch: int, length: int) -> None:
    """Raises ValueError unless positions are integers [1 or B, T] or [1 or B, T, A] with at least one axis."""
    shape = tuple(positions.shape)
    fits = len(shape) in (2, 3) and shape[0] in (1, batch) and shape[1] == length and 0 not in shape[2:]
    if not fits or positions.is_floating_point():
        raise ValueError(
            f"{op}: positions must be integers [B or 1, T] or [B or 1, T, A] with B = {batch} and T = {length}; given "
            f"{positions.dtype} {list(shape)}"
        )


def drop_single_axis(positions: Tensor | None) -> Tensor | None:
    """Returns positions [..., T, 1] as [..., T], and any others as they are: one axis is the sequence."""
    return positions[..., 0] if positions is not None and positions.ndim == 3 and positions.shape[2] == 1 else positions


def spread(positions: Tensor, width: int) -> Tensor:
    """Returns for positions [..., A] the coordinate of each of `width` channels, [..., width].

    Channels fall into A contiguous groups of ceil(width / A), one per axis; the last groups may be smaller.
    """
    axes = positions.shape[-1]
    return positions.repeat_interleave(-(-width // axes), -1)[..., :width]
