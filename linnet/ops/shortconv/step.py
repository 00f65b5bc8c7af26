"""The short convolution, one token: the window of inputs is updated in place."""

import torch
from torch import Tensor
from torch.nn import functional as F


def short_convolution_step(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    bias: Tensor | None = None,
    *,
    offset: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """One token of `short_convolution`: the state drops its oldest input and gets x + a, in place.

    Args:
        x: [B, D].
        weight: [D, W], the newest token's last.
        state: [B, W - 1, D], the inputs before this one, oldest first.
        bias, offset: b and a, [D] or None.
        silu: whether the activation is x sigmoid(x); else there is none.

    Returns:
        y [B, D] in the dtype of x.

    Raises:
        ValueError: shapes do not fit together.
    """
    if (
        x.ndim != 2
        or weight.ndim != 2
        or weight.shape[0] != x.shape[1]
        or tuple(state.shape) != (x.shape[0], weight.shape[1] - 1, x.shape[1])
        or any(y is not None and y.shape != x.shape[1:] for y in (bias, offset))
    ):
        raise ValueError(
            f"short_convolution_step: x {list(x.shape)}, weight {list(weight.shape)}, state {list(state.shape)}; "
            "give x [B, D], weight [D, W], state [B, W - 1, D], and bias and offset [D] or None"
        )
    if offset is not None:
        x = x + offset.to(x.dtype)
    line = torch.cat([state.to(x.dtype), x[:, None]], 1)
    state.copy_(line[:, 1:])
    y = (line * weight.mT).sum(1)
    y = y if bias is None else y + bias
    return (F.silu(y) if silu else y).to(x.dtype)
