"""The diagonal-plus-low-rank rule, token by token: the definition that every other form must agree with."""

import torch
from torch import Tensor

from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import count_states, documents


def dplr_reference(q, k, v, log_decay, a, b, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """The recurrence of `dplr_rule`, and the state after the last token (arguments and results as there)."""
    B, T, H, K = q.shape
    dtype = state_dtype(q, k, v)
    with exact(q):
        q, k, values, decay, a, b = (x.to(dtype) for x in (q, k, v, log_decay, a, b))
        decay = decay.exp()
        if initial_state is None:
            initial_state = values.new_zeros(count_states(cu_seqlens, B), H, K, v.shape[-1])
        outputs, states = [], []
        for rows, start, end in documents(cu_seqlens, B, T):
            S = initial_state[rows]
            for t in range(start, end):
                read = (b[:, t, :, :, None] * S).sum(-2, keepdim=True)
                S = decay[:, t, :, :, None] * S + a[:, t, :, :, None] * read
                S = S + k[:, t, :, :, None] * values[:, t, :, None]
                outputs.append(scale * (q[:, t, :, :, None] * S).sum(-2))
            states.append(S)
        return torch.stack(outputs, 1).to(v.dtype), torch.cat(states)
