"""The learned lower bounds of forget gates that HGRN and HGRN2 share over their layers (paper 002, section 2.2).

P = softmax of gamma [L, D] over layers, beta of layer l = sum of P_j over 1 <= j <= l: 0 in the first layer, below 1 in
the last. Paper 000 (A.1.3) writes the sum from j = 0, which makes the last layer's gate 1 and its input 0; paper 002
subtracts the first term, as here. `exclusive` sums P_j over j < l (the authors' vision code): the same at the start.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.base import LayerContext


class LowerBounds(nn.Module):
    """gamma [L, D], one row for each layer that has this mixer; starts at ones, so that beta = l / L."""

    def __init__(self, num_layers: int, d_model: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_layers, d_model))

    def forward(self, index: int, form: Literal["inclusive", "exclusive"]) -> Tensor:
        share = self.gamma.float().softmax(dim=0) if self.gamma.dtype != torch.float64 else self.gamma.softmax(dim=0)
        return share[1 : index + 1].sum(dim=0) if form == "inclusive" else share[:index].sum(dim=0)


def shared_lower_bounds(mixer: str, context: LayerContext) -> LowerBounds:
    """The table of this kind of mixer: made by its first layer, found by the others."""
    if mixer not in context.shared:
        context.shared[mixer] = LowerBounds(context.mixer_count, context.d_model)
    return context.shared[mixer]


def forget_gate(z: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """log f and 1 - f of f = beta + (1 - beta) sigmoid(z), without cancellation, in float32 (float64 stays).

    Args:
        z: gate logits [..., D].
        beta: lower bound [D] in (0, 1), or None for 0 (the first layer), where log f is logsigmoid(z).
    """
    z = z if z.dtype == torch.float64 else z.float()
    if beta is None:
        return F.logsigmoid(z), torch.sigmoid(-z)
    log_f = torch.logaddexp(beta.log(), torch.log1p(-beta) + F.logsigmoid(z))
    return log_f, (1.0 - beta) * torch.sigmoid(-z)
