"""The modal convolution, the definition: token by token, differentiated by autograd."""

import torch
from torch import Tensor

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states, documents


def modal_reference(x, log_decay, weight, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """u_t = exp(log_decay) u_{t-1} + x_t, y_t = sum_m weight u_t (TPE, papers 003 and 000, A.1.4).

    Shapes as in `modal_convolution`.
    """
    dtype = state_dtype(x, log_decay, weight)
    batch, length, channels = x.shape
    values, decay, weight = x.to(dtype), log_decay.to(dtype).exp(), weight.to(dtype)
    if initial_state is None:
        initial_state = values.new_zeros(count_states(cu_seqlens, batch), channels, decay.shape[1])
    outputs, finals = [], []
    for rows, start, end in documents(cu_seqlens, batch, length):
        u = initial_state[rows]
        for t in range(start, end):
            u = decay * u + values[:, t, :, None]
            outputs.append((weight * u).sum(-1))
        finals.append(u)
    return torch.stack(outputs, 1).to(x.dtype), torch.cat(finals)
