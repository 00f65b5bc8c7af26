"""The long convolution, one token: the modes are updated in place."""

import torch
from torch import Tensor

from linnet.ops.longconv.filter import ModalFilter, turn


def long_convolution_step(x: Tensor, filter: ModalFilter, state: Tensor, *, channels: Tensor | None = None) -> Tensor:
    """One token of `long_convolution`: state <- lambda state + x, in place.

    Args:
        x: [B, D].
        filter: F filters of N modes; F divides D.
        state: [B, D, N, 2], float32 or float64.
        channels: int64 [B, C], the channels of each sequence whose output is computed (all states are written); None
            for all of them.

    Returns:
        y [B, D] or [B, C] in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    filters, modes = filter.theta.shape
    if x.ndim != 2 or x.shape[1] % filters or tuple(state.shape) != (*x.shape, modes, 2):
        raise ValueError(
            f"long_convolution_step: x {list(x.shape)}, {filters} filters of {modes} modes, state {list(state.shape)}; "
            "give x [B, D] with D a multiple of the filters, and the state [B, D, modes, 2]"
        )
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"long_convolution_step: state has dtype {state.dtype}; give float32 or float64")
    filter, shared, values = filter.to(state.dtype), x.shape[1] // filters, x.to(state.dtype)
    size = filter.log_decay.exp()
    decay = ((size * part).repeat_interleave(shared, 0) for part in (filter.theta.cos(), filter.theta.sin()))
    modes = turn(state, *decay)
    modes[..., 0] += values[..., None]
    state.copy_(modes)
    if channels is None:
        of_filter = torch.arange(x.shape[1], device=x.device) // shared
    else:
        of_filter = channels // shared
        modes = modes.gather(1, channels[..., None, None].expand(-1, -1, *modes.shape[2:]))
        values = values.gather(1, channels)
    residue = filter.residue[of_filter]
    y = (modes[..., 0] * residue[..., 0] - modes[..., 1] * residue[..., 1]).sum(-1)
    return (y if filter.skip is None else y + filter.skip[of_filter] * values).to(x.dtype)
