"""Lightning Attention, token by token: the definition that every other form must agree with."""

import torch
from torch import Tensor

from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import count_states, documents


def lightning_reference(q, k, v, log_decay, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """Paper 001, eq. 17, with the state after the last token (arguments and results as `lightning_attention`).

    For each head, with decay lambda = exp(log_decay):

        S_t = lambda S_{t-1} + k_t^T v_t,    o_t = scale q_t S_t
    """
    B, T, H, K = q.shape
    dtype = state_dtype(q, k, v)
    with exact(q):
        q_BTHK, k_BTHK, v_BTHV = q.to(dtype), k.to(dtype), v.to(dtype)
        decay_H11 = q_BTHK.new_ones(H, 1, 1) if log_decay is None else log_decay.to(dtype).exp()[:, None, None]
        if initial_state is None:
            initial_state = q_BTHK.new_zeros(count_states(cu_seqlens, B), H, K, v.shape[-1])
        outputs, states = [], []
        for rows, start, end in documents(cu_seqlens, B, T):
            S_NHKV = initial_state[rows]
            for t in range(start, end):
                S_NHKV = decay_H11 * S_NHKV + k_BTHK[:, t, :, :, None] * v_BTHV[:, t, :, None, :]
                outputs.append(scale * (q_BTHK[:, t, :, :, None] * S_NHKV).sum(-2))
            states.append(S_NHKV)
        return torch.stack(outputs, 1).to(v.dtype), torch.cat(states)
