"""The learned lower bounds of forget gates that HGRN and HGRN2 share over their layers (paper 002, section 2.2).

P is the softmax of gamma [L, D] over layers. The bound beta of layer l is the sum of P_j over 1 <= j <= l: 0 in the
first layer, below 1 in the last. Paper 000 (A.1.3) writes the sum from j = 0, which makes the last layer's gate 1 and
its input 0. Paper 002 subtracts the first term, and so does this module. The form `exclusive` sums P_j over j < l (the
authors' vision code); it has the same values at initialisation.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linnet.ops import forget_gate
from linnet.ops.compat_torch import is_plain

__all__ = ["LowerBounds", "forget_gate"]


class LowerBounds(nn.Module):
    """The table gamma [L, D], one row per layer with this mixer; it starts at ones, so that beta = l / L."""

    full_precision = ("gamma",)

    def __init__(self, num_layers: int, d_model: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_layers, d_model))
        self._kept: tuple[Tensor | None, tuple, dict] = (None, (), {})

    def forward(self, index: int, form: Literal["inclusive", "exclusive"]) -> Tensor:
        share = self.gamma.float().softmax(dim=0) if self.gamma.dtype != torch.float64 else self.gamma.softmax(dim=0)
        return share[1 : index + 1].sum(dim=0) if form == "inclusive" else share[:index].sum(dim=0)

    def constant(self, index: int, form: Literal["inclusive", "exclusive"]) -> Tensor:
        """Returns the result of `forward`, for decoding: cached until gamma changes, since it is the same for every
        token.

        The cache does not notice a write through `gamma.data`, and a CUDA graph keeps reading the tensor from before
        its capture.
        """
        if torch.is_grad_enabled() or not is_plain((self.gamma,)) or self.gamma.is_inference():
            return self.forward(index, form)
        version = (self.gamma.data_ptr(), self.gamma._version, self.gamma.dtype, self.gamma.device)
        if self._kept[0] is not self.gamma or self._kept[1] != version:  # a new tensor may reuse an old address
            self._kept = (self.gamma, version, {})
        kept = self._kept[2]
        if (index, form) not in kept:
            beta = self.forward(index, form)
            if self.gamma.is_cuda and torch.cuda.is_current_stream_capturing():
                return beta  # during a capture the tensor belongs to the graph, so it is not cached
            kept[index, form] = beta
        return kept[index, form]
