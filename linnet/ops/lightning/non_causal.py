"""Linear attention in which every token sees all others: two products, without decay and denominator."""

import torch
from torch import Tensor

from linnet.ops import sequence
from linnet.ops.arguments import check_matrix_state
from linnet.ops.lightning import lightning_attention
from linnet.ops.scans import both_ways


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float = 1.0, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Returns o_t = scale q_t sum_s k_s^T v_s for each head, over all tokens s of the row or document.

    Time and memory are linear in T. Packed documents have no matrix each: their sum over all tokens is the causal one
    in both directions, which counts the token itself twice and loses it once.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T.

    Returns:
        o [B, T, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes that do not go together, float16 on a GPU, or ranks that share the rows.
    """
    check_matrix_state("linear_attention", q, k, v, None, cu_seqlens)
    if sequence.span() is not None:
        raise ValueError("linear_attention: tokens see the whole row, but ranks share it; use parallel.sp: 1")
    if cu_seqlens is None:
        matrix = torch.einsum("bthk,bthv->bhkv", k, v)
        o = torch.einsum("bthk,bhkv->bthv", q, matrix)
        return o if scale == 1.0 else o * scale

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return lightning_attention(q, k, v, scale=scale, cu_seqlens=cu_seqlens)[0]

    own = scale * (q * k).sum(-1, keepdim=True)
    return both_ways(attend, q, k, v, cu_seqlens=cu_seqlens) - (own * v).to(v.dtype)
