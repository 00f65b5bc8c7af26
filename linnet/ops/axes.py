"""Positions on several axes: which channel of a head is rotated by which coordinate (MD-LRPE, paper 003, eq. 10-14)."""

from torch import Tensor


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
