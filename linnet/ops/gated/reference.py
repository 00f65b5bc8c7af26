"""Gated linear attention, token by token: the definition that every other form must agree with."""

import torch
from torch import Tensor

from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import count_states, documents


def gated_reference(q, k, v, log_decay, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """Paper 002, eq. 3, with the state after the last token (arguments and results as `gated_linear_attention`).

    For each head, with a_t = exp(log_decay_t), one decay a channel of the key:

        S_t = diag(a_t) S_{t-1} + k_t^T v_t,    o_t = scale q_t S_t
    """
    B, T, H, K = q.shape
    dtype = state_dtype(q, k, v)
    with exact(q):
        q_BTHK, k_BTHK, v_BTHV, a_BTHK = q.to(dtype), k.to(dtype), v.to(dtype), log_decay.to(dtype).exp()
        if initial_state is None:
            initial_state = q_BTHK.new_zeros(count_states(cu_seqlens, B), H, K, v.shape[-1])
        outputs, states = [], []
        for rows, start, end in documents(cu_seqlens, B, T):
            S_NHKV = initial_state[rows]
            for t in range(start, end):
                S_NHKV = a_BTHK[:, t, :, :, None] * S_NHKV + k_BTHK[:, t, :, :, None] * v_BTHV[:, t, :, None, :]
                outputs.append(scale * (q_BTHK[:, t, :, :, None] * S_NHKV).sum(-2))
            states.append(S_NHKV)
        return torch.stack(outputs, 1).to(v.dtype), torch.cat(states)
