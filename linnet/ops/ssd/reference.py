"""Scalar decay, token by token: the definition that every other form must agree with."""

import torch
from torch import Tensor

from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import count_states, documents


def ssd_reference(q, k, v, log_decay, times, skip, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """The recurrence of `ssd`, and the state after the last token (arguments and results as there)."""
    B, T, HV, V = v.shape
    K, group, dtype = q.shape[-1], HV // q.shape[2], state_dtype(q, k, v)
    with exact(q):
        q, k = (x.to(dtype).repeat_interleave(group, 2) for x in (q, k))
        inputs, decay = v.to(dtype), log_decay.to(dtype).exp()[..., None, None]
        values = inputs if times is None else times.to(dtype)[..., None] * inputs
        if initial_state is None:
            initial_state = values.new_zeros(count_states(cu_seqlens, B), HV, K, V)
        outputs, states = [], []
        for rows, start, end in documents(cu_seqlens, B, T):
            S = initial_state[rows]
            for t in range(start, end):
                S = decay[:, t] * S + k[:, t, :, :, None] * values[:, t, :, None]
                outputs.append(scale * (q[:, t, :, :, None] * S).sum(-2))
            states.append(S)
        o = torch.stack(outputs, 1)
        o = o if skip is None else o + skip.to(dtype)[..., None] * inputs
        return o.to(v.dtype), torch.cat(states)
