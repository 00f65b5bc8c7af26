"""Rows of tokens, cut in time into spans: one for each rank that shares them (`linnet.ops.sequence`)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from linnet.ops import sequence

IGNORE = -100  # a target that is not scored


def cut_rows(
    tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None, least: int = 1
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns this rank's span of rows, inside `linnet.ops.sequence.sequence_parallel`.

    Targets are cut as they are, shifted already, so that no token is lost between two spans. Rows that the number of
    spans does not divide, and rows shorter than `least` for each, are filled at the end with tokens that no target
    scores; nothing before them sees them.

    Args:
        tokens, targets: int64 [B, T], the same on every rank.
        cu_seqlens: int32 [N+1], the documents of whole rows with B = 1, or None.
        least: tokens that a span must have.

    Returns:
        tokens and targets [B, L]; and int32 [N+1], the parts of the documents in the span (`sequence.cut_documents`).
    """
    length = max(-(-tokens.shape[1] // sequence.spans()), least)
    if fill := length * sequence.spans() - tokens.shape[1]:
        tokens, targets = pad(tokens, (0, fill)), pad(targets, (0, fill), value=IGNORE)
    start = sequence.first_position(length)
    tokens, targets = (x[:, start : start + length].contiguous() for x in (tokens, targets))
    if cu_seqlens is None or cu_seqlens.shape[0] == 2:  # one document fills the row
        sequence.cut_documents(torch.zeros(1, 1, dtype=torch.int32, device=tokens.device), length)
        return tokens, targets, None
    starts = sequence.cut_documents(cu_seqlens[None, :-1], length)
    return tokens, targets, pad(starts[0], (0, 1), value=length)
