"""Attention in blocks that do not overlap: a token sees the tokens before it in its own block, and itself.

TransNormer's DiagAttention (Qin et al. 2022, arXiv:2210.10340, section 4.2; paper 001, Table 12). Blocks become rows of
a batch, so time and memory are linear in T. With softmax the rows run `causal_attention`; with relu a block is two
matrix products of PyTorch on every device.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.attention import causal_attention
from linnet.ops.documents import check_documents

Scores = Literal["softmax", "relu"]


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, block: int, scores: Scores = "softmax", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Returns o_t = sum_s w_ts v_s over the tokens s <= t of t's block; w is softmax_s or relu of q_t k_s / sqrt(D).

    Blocks are counted from the start of the row, or of the document. The weights of relu do not sum to one, so a norm
    should follow.

    Args:
        q: [B, T, H, D].
        k, v: [B, T, G, D]; G divides H.
        block: tokens per block, at least 1.
        cu_seqlens: int32 [N+1], the start of each document and then T; B must be 1.

    Returns:
        o [B, T, H, D] in the dtype of q. Gradients reach q, k and v.

    Raises:
        ValueError: `block` is below 1, `scores` is unknown, or the boundaries do not rise from 0 to T.
    """
    if block < 1 or scores not in ("softmax", "relu"):
        raise ValueError(
            f"block_attention: block: {block} and scores: {scores!r}; give at least 1 token, and softmax or relu"
        )
    check_documents(cu_seqlens, *q.shape[:2])
    if backend.use_reference():
        return _reference(q, k, v, block, scores, cu_seqlens)
    if cu_seqlens is not None:
        return _attend_documents(q, k, v, block, scores, cu_seqlens)
    length = q.shape[1]
    block = min(block, length)
    count = -(-length // block)
    if missing := count * block - length:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))  # no token sees those after it
    rows = (x.unflatten(1, (count, block)).flatten(0, 1) for x in (q, k, v))
    o = _attend(*rows, scores).unflatten(0, (-1, count)).flatten(1, 2)
    return o[:, :length] if missing else o


def weigh(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """Returns the attention of q [B, T, H, D] to keys [B, S, G, D] that `visible`, bool [B or 1, T, S], selects."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if scores == "softmax":
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], enable_gqa=grouped)
        return o.transpose(1, 2)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    weights = F.relu(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    return (torch.where(visible[:, None], weights, 0.0) @ v).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Attention of rows that are one block each."""
    if scores == "softmax":
        return causal_attention(q, k, v)
    length = q.shape[1]
    return weigh(q, k, v, torch.ones(1, length, length, dtype=torch.bool, device=q.device).tril(), scores)


def _attend_documents(q: Tensor, k: Tensor, v: Tensor, block: int, scores: Scores, cu_seqlens: Tensor) -> Tensor:
    """Copies each block into a row of its own. The host does not read the boundaries."""
    length, place = q.shape[1], _places(q.shape[1], cu_seqlens)
    begins = place % block == 0
    number = begins.cumsum(0) - 1  # of the block of each token
    index = torch.arange(length, device=q.device)
    most = length // block + len(cu_seqlens) - 1
    first = torch.zeros(most, dtype=torch.int64, device=q.device).scatter_reduce(
        0, number, index, "amin", include_self=False
    )
    tokens = (first[:, None] + torch.arange(block, device=q.device)).clamp(max=length - 1)
    # The tail of a short block copies tokens of later blocks, which no token of this block sees.
    rows = (x[0][tokens] for x in (q, k, v))
    return _attend(*rows, scores)[number, place % block][None]


def _places(length: int, cu_seqlens: Tensor) -> Tensor:
    """Returns the position of each token in its document, int64 [T]."""
    index = torch.arange(length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)
    return index - cu_seqlens.to(index.dtype)[document]


def _reference(q: Tensor, k: Tensor, v: Tensor, block: int, scores: Scores, cu_seqlens: Tensor | None) -> Tensor:
    """The definition, by a mask [T, T]."""
    length = q.shape[1]
    bounds = torch.tensor([0, length], device=q.device) if cu_seqlens is None else cu_seqlens
    place = _places(length, bounds)
    index = torch.arange(length, device=q.device)
    start = index - place % block  # first token of each token's block
    visible = (index[:, None] >= index) & (start[:, None] == start)
    return weigh(q, k, v, visible[None], scores)
