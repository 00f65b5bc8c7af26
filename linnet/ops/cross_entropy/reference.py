"""The definition: all logits at once. It also runs where they are few, where a transform looks on, and on sharded
weights."""

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy_reference(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Sum of -log softmax(logits)[target] over targets but `ignore_index`, in float32 (float64 for float64)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.flatten(), ignore_index=ignore_index, reduction="sum"
    )
