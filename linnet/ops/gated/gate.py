"""The forget gate of HGRN and HGRN2, with its lower bound (paper 002, 3.2)."""

import torch
from torch import Tensor
from torch.nn import functional as F


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
