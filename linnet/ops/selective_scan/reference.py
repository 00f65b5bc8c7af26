"""The selective scan, the definition: token by token, differentiated by autograd."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states, documents


def selective_reference(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """s_t = exp(delta_t A) s_{t-1} + delta_t B_t x_t,  y_t = C_t s_t + D x_t (Mamba, as paper 004 recalls it).

    Shapes as in `selective_scan`.
    """
    dtype = state_dtype(x, delta, A, B, C)
    batch, length, _ = x.shape
    values, delta, A = x.to(dtype), delta.to(dtype), A.to(dtype)
    B, C = (y.to(dtype).unsqueeze(2) for y in (B, C))
    if initial_state is None:
        initial_state = values.new_zeros(count_states(cu_seqlens, batch), *A.shape)
    if delta_bias is not None:
        delta = softplus(delta + delta_bias.to(dtype))
    outputs, finals = [], []
    for rows, start, end in documents(cu_seqlens, batch, length):
        state = initial_state[rows]
        for t in range(start, end):
            decay = (delta[:, t, :, None] * A).exp()
            state = decay * state + (delta[:, t] * values[:, t])[..., None] * B[:, t]
            outputs.append((state * C[:, t]).sum(-1))
        finals.append(state)
    y = torch.stack(outputs, 1)
    if D is not None:
        y = y + D.to(dtype) * values
    return y.to(x.dtype), torch.cat(finals)
