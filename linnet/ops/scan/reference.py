"""The diagonal recurrence, the definition: token by token, differentiated by autograd."""

import torch
from torch import Tensor

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import walk_tokens


def scan_reference(x, log_decay, theta, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_decay_t + i theta) h_{t-1} + x_t (HGRN, as in paper 002, eq. 1). Shapes as in `diagonal_scan`."""
    dtype = state_dtype(x, log_decay)
    batch, length, channels = log_decay.shape
    if theta is None:
        values, decay = x.to(dtype), log_decay.to(dtype).exp()
    else:
        turn = torch.complex(theta.to(dtype).cos(), theta.to(dtype).sin())
        values, decay = torch.view_as_complex(x.to(dtype).contiguous()), log_decay.to(dtype).exp() * turn
    if initial_state is not None and theta is not None:
        initial_state = torch.view_as_complex(initial_state.contiguous())

    def step(t: int, h: Tensor) -> tuple[Tensor, Tensor]:
        h = decay[:, t] * h + values[:, t]
        return h, h

    h, final = walk_tokens(step, initial_state, values.new_zeros(channels), cu_seqlens, batch, length)
    if theta is not None:
        h, final = torch.view_as_real(h), torch.view_as_real(final)
    return h.to(x.dtype), final
