"""RoPE: rotary position embedding (Su et al. 2021, arXiv:2104.09864), the fixed real case of LRPE.

Features i and i + d/2 form a pair (the half-split order of released LLaMA weights). On a grid the pairs fall into one
contiguous group per axis, each rotated by its coordinate, with the frequencies of a head of the group's width.
"""

import math
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn

from linnet.config import Config, Factor
from linnet.layers.positions.angles import geometric_frequencies
from linnet.ops.rotation import rotate


class RopeScalingConfig(Config):
    """How frequencies are lowered for contexts longer than those of the first training.

    `linear` divides all frequencies by `factor` (position interpolation, arXiv:2306.15595). `llama3` divides those with
    fewer than `low` rotations over `length` tokens, keeps those with more than `high` rotations, and interpolates
    linearly in between (Llama 3.1, arXiv:2407.21783).
    """

    kind: Literal["linear", "llama3"] = Field(description="which frequencies are lowered, and by how much")
    factor: Factor = Field(description="divisor of the lowered frequencies")
    low: Factor = Field(1.0, description="llama3: frequencies with fewer rotations over `length` are lowered")
    high: Factor = Field(4.0, description="llama3: frequencies with more rotations over `length` are kept")
    length: int = Field(8192, ge=1, description="llama3: context of the first training, in tokens")

    @field_validator("high")
    @classmethod
    def _above(cls, high: float, info: ValidationInfo) -> float:
        if "low" in info.data and high <= info.data["low"]:
            raise ValueError(f"{high} must be above low, which is {info.data['low']}")
        return high


class Rope(nn.Module):
    """Rotates queries and keys [B, T, H, d] (or [B, H, d] in a step) by position times a fixed frequency."""

    def __init__(self, head_dim: int, base: float = 10000.0, scaling: RopeScalingConfig | None = None, axes: int = 1):
        super().__init__()
        for problem in check_rope(head_dim):
            raise ValueError(problem)
        group = -(-(head_dim // 2) // axes)  # pairs per axis
        frequencies = geometric_frequencies(group, base**0.5)  # base^(-2i/d) for i < d/2
        frequencies = frequencies.repeat(axes)[: head_dim // 2]
        if scaling is not None:
            frequencies = scale_frequencies(frequencies, scaling)
        self.register_buffer("theta", frequencies[None], persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, self.theta)


def check_rope(head_dim: int, key: str = "num_heads") -> list[str]:
    """Returns a list with one problem, of the option `key`, if the head width cannot be split into pairs."""
    if head_dim % 2 == 0:
        return []
    return [f"{key}: RoPE needs an even head width, not {head_dim}; change {key} or set rope: false"]


def scale_frequencies(frequencies: Tensor, scaling: RopeScalingConfig) -> Tensor:
    """Returns the frequencies [F], in radians per token, lowered according to `RopeScalingConfig`."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.length * frequencies / (2.0 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
