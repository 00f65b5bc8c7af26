"""The diagonal-plus-low-rank rule, token by token: the definition that every other form must agree with."""

from torch import Tensor

from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import walk_tokens


def dplr_reference(q, k, v, log_decay, a, b, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """The recurrence of `dplr_rule`, and the state after the last token (arguments and results as there)."""
    B, T, H, K = q.shape
    dtype = state_dtype(q, k, v)
    with exact(q):
        q, k, values, decay, a, b = (x.to(dtype) for x in (q, k, v, log_decay, a, b))
        decay = decay.exp()

        def step(t: int, S: Tensor) -> tuple[Tensor, Tensor]:
            read = (b[:, t, :, :, None] * S).sum(-2, keepdim=True)
            S = decay[:, t, :, :, None] * S + a[:, t, :, :, None] * read
            S = S + k[:, t, :, :, None] * values[:, t, :, None]
            return S, scale * (q[:, t, :, :, None] * S).sum(-2)

        o, states = walk_tokens(step, initial_state, values.new_zeros(H, K, v.shape[-1]), cu_seqlens, B, T)
        return o.to(v.dtype), states
