"""Positions of tokens: within a sequence, within packed documents, and after a carried state."""

import numpy as np
import torch
from torch import Tensor

from linnet.ops import sequence


def token_positions(x: Tensor, start: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns the positions [B, T] (int64) of the tokens of x [B, T, ...].

    Args:
        start: [B] number of tokens before x in a carried state (or [N] with packed documents).
        cu_seqlens: int32 [N+1], document boundaries of a packed batch of one row; positions restart at each.

    Inside `linnet.ops.sequence.sequence_parallel`, x is a span of a longer row: its positions are those in the row
    or, of a document that began on a rank before, in the document.
    """
    batch, length = x.shape[:2]
    first = 0
    if sequence.span() is not None and start is None:
        if cu_seqlens is None:
            first = sequence.first_position(length)
        else:
            start = sequence.document_positions(cu_seqlens, length)
    index = torch.arange(first, first + length, device=x.device)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)
        index = index - cu_seqlens.to(index.dtype)[document]
        return (index if start is None else index + start[document])[None]
    index = index.expand(batch, length)
    return index if start is None else index + start[:, None]


def geometric_frequencies(count: int, base: float = 10000.0) -> Tensor:
    """Returns base^(-2i/count) for i = 0 .. count-1, float32 [count]."""
    return torch.tensor((base ** (-2.0 * np.arange(count) / count)).astype(np.float32))
