"""Gated linear attention, token by token: the definition that every other form must agree with."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import walk_tokens


def gated_reference(q, k, v, log_decay, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """Paper 002, eq. 3, with the state after the last token (arguments and results as `gated_linear_attention`).

    For each head, with a_t = exp(log_decay_t), one decay a channel of the key:

        S_t = diag(a_t) S_{t-1} + k_t^T v_t,    o_t = scale q_t S_t
    """
    B, T, H, K = q.shape
    dtype = state_dtype(q, k, v)
    with exact(q):
        q_BTHK, k_BTHK, v_BTHV, a_BTHK = q.to(dtype), k.to(dtype), v.to(dtype), log_decay.to(dtype).exp()

        def step(t: int, S_NHKV: Tensor) -> tuple[Tensor, Tensor]:
            S_NHKV = a_BTHK[:, t, :, :, None] * S_NHKV + k_BTHK[:, t, :, :, None] * v_BTHV[:, t, :, None, :]
            return S_NHKV, scale * (q_BTHK[:, t, :, :, None] * S_NHKV).sum(-2)

        zero = q_BTHK.new_zeros(H, K, v.shape[-1])
        o, states = walk_tokens(step, initial_state, zero, cu_seqlens, B, T)
        return o.to(v.dtype), states


def forget_gate(x: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """log f and 1 - f of f = beta + (1 - beta) sigmoid(x), without cancellation, in float32 (float64 stays).

    Args:
        x: [..., D], gate logits.
        beta: [D] or [H, K], lower bound in (0, 1); None for 0 (the first layer), where log f is logsigmoid(x).

    Returns:
        log f and 1 - f, [..., D] each.

    Source: paper 002, section 3.2.
    """
    x = x if x.dtype == torch.float64 else x.float()
    if beta is None:
        return F.logsigmoid(x), torch.sigmoid(-x)
    log_f = torch.logaddexp(beta.log(), torch.log1p(-beta) + F.logsigmoid(x))
    return log_f, (1.0 - beta) * torch.sigmoid(-x)
