"""Lightning Attention, token by token: the definition that every other form must agree with."""

from torch import Tensor

from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import walk_tokens


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

        def step(t: int, S_NHKV: Tensor) -> tuple[Tensor, Tensor]:
            S_NHKV = decay_H11 * S_NHKV + k_BTHK[:, t, :, :, None] * v_BTHV[:, t, :, None, :]
            return S_NHKV, scale * (q_BTHK[:, t, :, :, None] * S_NHKV).sum(-2)

        zero = q_BTHK.new_zeros(H, K, v.shape[-1])
        o, states = walk_tokens(step, initial_state, zero, cu_seqlens, B, T)
        return o.to(v.dtype), states
