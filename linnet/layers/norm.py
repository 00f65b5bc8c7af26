"""Norms over the last dimension: SRMSNorm (no gain), RMSNorm, LayerNorm.

SRMSNorm(x) = x / (||x||_2 / sqrt(d)) is paper 001, equation 14. Epsilon sits inside the mean square: 1e-6 for SRMSNorm
and RMSNorm, 1e-5 for LayerNorm.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linnet.ops.activation import ACTIVATIONS
from linnet.ops.norm import rms_norm, split_rms_norm
from linnet.ops.tensor_parallel import Split

NormKind = Literal["srmsnorm", "rmsnorm", "layernorm"]


class SRMSNorm(nn.Module):
    """Root-mean-square norm without a gain (paper 001, section 4).

    Attributes:
        tp: how tensor parallelism splits the width, if it does; x then has this rank's channels.
    """

    tp: Split | None = None

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.register_parameter("weight", None)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        gate_activation: str = "none",
        keep: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `linnet.ops.norm.rms_norm`. A split norm takes no residual."""
        if self.tp is not None:
            settings = {"eps": self.eps, "gate": gate, "gate_activation": gate_activation}
            return split_rms_norm(x, self.weight, self.tp, **settings)
        return rms_norm(
            x, self.weight, eps=self.eps, gate=gate, gate_activation=gate_activation, residual=residual, keep=keep
        )

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class RMSNorm(SRMSNorm):
    """Root-mean-square norm with a learned gain (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.ones(dim))


def build_norm(kind: NormKind, dim: int, eps: float | None = None, affine: bool = True) -> nn.Module:
    """Returns the norm of one kind over `dim` features. Raises ValueError for an unknown kind.

    Args:
        affine: False leaves out the learned gain and bias, where a layer has its own; RMSNorm is SRMSNorm then.
    """
    match kind:
        case "srmsnorm":
            return SRMSNorm(dim, eps or 1e-6)
        case "rmsnorm":
            return RMSNorm(dim, eps or 1e-6) if affine else SRMSNorm(dim, eps or 1e-6)
        case "layernorm":
            return nn.LayerNorm(dim, eps or 1e-5, elementwise_affine=affine)
    raise ValueError(f"norm {kind!r} is unknown; use srmsnorm, rmsnorm or layernorm")


def norm_and_gate(norm: nn.Module, x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Returns norm(x) * act(gate) for a norm of `build_norm`; on a GPU in one pass, except for LayerNorm."""
    if isinstance(norm, SRMSNorm):
        return norm(x, gate=gate, gate_activation=activation)
    return norm(x) * ACTIVATIONS[activation](gate)


def add_and_norm(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Returns norm(x + residual) and x + residual; on a GPU in one pass, except for LayerNorm."""
    if isinstance(norm, SRMSNorm):
        return norm(x, residual=residual)
    total = x + residual
    return norm(total), total


def norm_and_keep(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns norm(x) and x for other readers. The norm's backward adds the gradient of x, except for LayerNorm."""
    return norm(x, keep=True) if isinstance(norm, SRMSNorm) else (norm(x), x)
