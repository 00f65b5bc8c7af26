"""The loss of models whose rows have one label each: a class, the probabilities of classes, or a number."""

import torch
from torch import Tensor
from torch.nn import functional as F


def labelled_loss(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns the summed loss (at least float32) and the number of rows.

    The loss is the cross-entropy in nats, or with one output the squared error.

    Args:
        outputs: [B, classes], or [B, 1] of numbers.
        labels: int64 [B]; the probabilities of each class, [B, classes]; or numbers, float [B].
        smoothing: label smoothing: this share of the target is spread evenly over all classes.
    """
    outputs = outputs.float() if outputs.dtype.itemsize < 4 else outputs
    count = torch.full((), len(outputs), dtype=torch.int64, device=outputs.device)
    labels = labels.to(outputs.dtype) if labels.is_floating_point() else labels
    if outputs.shape[1] == 1:
        return (outputs[:, 0] - labels).square().sum(), count
    return F.cross_entropy(outputs, labels, reduction="sum", label_smoothing=smoothing), count
