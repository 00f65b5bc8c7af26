"""The definition of attention in windows and documents: a dense mask."""

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None, causal: bool = True
) -> Tensor:
    """Returns what `causal_attention`, or `full_attention`, returns, by a mask [T, T]."""
    index = torch.arange(q.shape[1], device=q.device)
    distance = index[:, None] - index
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        mask = mask & (distance < window)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)
        mask = mask & (document[:, None] == document)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)
