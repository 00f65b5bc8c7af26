"""The definition of the root-mean-square norm with what goes before and after it; also the form that runs on a CPU."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops.activation.reference import ACTIVATIONS


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    gate: Tensor | None = None,
    gate_activation: str = "none",
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """y = (h / rms(h) * weight) act(gate) and h = x + residual (or x); arguments as `rms_norm`."""
    h = x if residual is None else x + residual
    if weight is None or weight.dtype == h.dtype:
        y = F.rms_norm(h, h.shape[-1:], weight, eps)
    else:  # PyTorch warns of it that it is not fused
        both = torch.promote_types(h.dtype, weight.dtype)
        y = F.rms_norm(h.to(both), h.shape[-1:], weight.to(both), eps)
    if gate is not None:
        y = y * ACTIVATIONS[gate_activation](gate)
    return y.to(h.dtype if dtype is None else dtype), h
