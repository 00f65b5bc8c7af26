"""RoPE: rotary position embedding (Su et al. 2021, arXiv:2104.09864), the fixed real case of LRPE.

Features i and i + d/2 form a pair (the half-split order of released LLaMA weights).
"""

from torch import Tensor, nn

from linnet.layers.positions.angles import geometric_frequencies
from linnet.ops.rotation import rotate


class Rope(nn.Module):
    """Rotates queries and keys [B, T, H, d] (or [B, H, d] in a step) by position times a fixed frequency."""

    def __init__(self, head_dim: int, base: float = 10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"RoPE needs an even head width, not {head_dim}; change num_heads or set rope: false")
        frequencies = geometric_frequencies(head_dim // 2, base**0.5)  # base^(-2i/d) for i < d/2
        self.register_buffer("theta", frequencies[None], persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, self.theta)
