"""The diagonal recurrence, the definition: token by token, differentiated by autograd."""

import torch
from torch import Tensor

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states, documents


def scan_reference(x, log_decay, theta, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_decay_t + i theta) h_{t-1} + x_t (HGRN, as in paper 002, eq. 1). Shapes as in `diagonal_scan`."""
    dtype = state_dtype(x, log_decay)
    batch, length, channels = log_decay.shape
    if theta is None:
        values, decay = x.to(dtype), log_decay.to(dtype).exp()
    else:
        turn = torch.complex(theta.to(dtype).cos(), theta.to(dtype).sin())
        values, decay = torch.view_as_complex(x.to(dtype).contiguous()), log_decay.to(dtype).exp() * turn
    states = count_states(cu_seqlens, batch)
    if initial_state is None:
        first = values.new_zeros(states, channels)
    else:
        first = initial_state if theta is None else torch.view_as_complex(initial_state.contiguous())
    outputs, finals = [], []
    for rows, start, end in documents(cu_seqlens, batch, length):
        h = first[rows]
        for t in range(start, end):
            h = decay[:, t] * h + values[:, t]
            outputs.append(h)
        finals.append(h)
    h, final = torch.stack(outputs, 1), torch.cat(finals)
    if theta is not None:
        h, final = torch.view_as_real(h), torch.view_as_real(final)
    return h.to(x.dtype), final
