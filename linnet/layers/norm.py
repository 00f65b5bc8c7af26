"""Norms over the last dimension: SRMSNorm (no gain), RMSNorm, LayerNorm.

SRMSNorm(x) = x / (||x||_2 / sqrt(d)) is paper 001, equation 14. Epsilon sits inside the mean square: 1e-6 for SRMSNorm
and RMSNorm, 1e-5 for LayerNorm.
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

NormKind = Literal["srmsnorm", "rmsnorm", "layernorm"]


class SRMSNorm(nn.Module):
    """Root-mean-square norm without a gain (paper 001, section 4)."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


def build_norm(kind: NormKind, dim: int, eps: float | None = None) -> nn.Module:
    """The norm of one kind over `dim` features. Raises ValueError for an unknown kind."""
    match kind:
        case "srmsnorm":
            return SRMSNorm(dim, eps or 1e-6)
        case "rmsnorm":
            return nn.RMSNorm(dim, eps or 1e-6)
        case "layernorm":
            return nn.LayerNorm(dim, eps or 1e-5)
    raise ValueError(f"norm {kind!r} is unknown; use srmsnorm, rmsnorm or layernorm")
