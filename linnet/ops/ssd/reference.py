"""Scalar decay, token by token: the definition that every other form must agree with."""

from torch import Tensor

from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import walk_tokens


def ssd_reference(q, k, v, log_decay, times, skip, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """The recurrence of `ssd`, and the state after the last token (arguments and results as there)."""
    B, T, HV, V = v.shape
    K, group, dtype = q.shape[-1], HV // q.shape[2], state_dtype(q, k, v)
    with exact(q):
        q, k = (x.to(dtype).repeat_interleave(group, 2) for x in (q, k))
        inputs, decay = v.to(dtype), log_decay.to(dtype).exp()[..., None, None]
        values = inputs if times is None else times.to(dtype)[..., None] * inputs

        def step(t: int, S: Tensor) -> tuple[Tensor, Tensor]:
            S = decay[:, t] * S + k[:, t, :, :, None] * values[:, t, :, None]
            return S, scale * (q[:, t, :, :, None] * S).sum(-2)

        o, states = walk_tokens(step, initial_state, values.new_zeros(HV, K, V), cu_seqlens, B, T)
        o = o if skip is None else o + skip.to(dtype)[..., None] * inputs
        return o.to(v.dtype), states
