"""RoPE: rotary position embedding (Su et al. 2021, arXiv:2104.09864), the fixed real case of LRPE.

Features i and i + d/2 form a pair (the half-split order of released LLaMA weights). On a grid the pairs fall into one
contiguous group per axis, each rotated by its coordinate, with the frequencies of a head of the group's width.

Partial RoPE rotates the first channels of a head, as a head of their width, and passes the others.
"""

import math
from typing import Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn

from linnet.config import Config, Factor, added
from linnet.layers.positions import geometric_frequencies
from linnet.ops.rotation import rotate


class RopeScalingConfig(Config):
    """How frequencies are lowered for contexts longer than those of the first training.

    `linear` divides all frequencies by `factor` (position interpolation, arXiv:2306.15595). The others divide those
    with fewer than `low` rotations over `length` tokens and keep those with more than `high` rotations. In between,
    `llama3` interpolates linearly in the rotations (Llama 3.1, arXiv:2407.21783), and `yarn` linearly in the index of
    the pair of channels (arXiv:2309.00071). `yarn` also multiplies rotated queries and keys by `attention_factor`.
    """

    kind: Literal["linear", "llama3", "yarn"] = Field(description="which frequencies are lowered, and by how much")
    factor: Factor = Field(description="divisor of the lowered frequencies")
    low: Factor = Field(1.0, description="not linear: frequencies with fewer rotations over `length` are lowered")
    high: Factor = Field(
        4.0, description="not linear: frequencies with more rotations over `length` are kept; of yarn 32 by default"
    )
    length: int = Field(8192, ge=1, description="not linear: context of the first training, in tokens")
    attention_factor: Factor | None = added(None, description="yarn: null is 0.1 ln(factor) + 1, at least 1")
    truncate: bool = added(
        True, description="yarn: round the pairs between which it interpolates to whole numbers, outwards"
    )

    @model_validator(mode="before")
    @classmethod
    def _yarn_keeps_more(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kind") == "yarn":
            return {"high": 32.0, **values}
        return values

    @field_validator("high")
    @classmethod
    def _above(cls, high: float, info: ValidationInfo) -> float:
        if "low" in info.data and high <= info.data["low"]:
            raise ValueError(f"{high} must be above low, which is {info.data['low']}")
        return high

    @field_validator("attention_factor", "truncate")
    @classmethod
    def _of_yarn(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("kind") not in (None, "yarn") and value not in (None, True):
            raise ValueError(f"{value} is of yarn, but kind is {info.data['kind']}; leave it out, or use kind: yarn")
        return value

    @property
    def amplitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(max(1.0, self.factor)) + 1.0


class Rope(nn.Module):
    """Rotates queries and keys [B, T, H, d] (or [B, H, d] in a step) by position times a fixed frequency.

    Args:
        fraction: share of the d channels of a head that are rotated, the first ones.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        scaling: RopeScalingConfig | None = None,
        axes: int = 1,
        fraction: float = 1.0,
    ):
        super().__init__()
        for problem in check_rope(head_dim, fraction=fraction):
            raise ValueError(problem)
        self.width, self.head_dim = int(head_dim * fraction), head_dim
        self.amplitude = 1.0 if scaling is None else scaling.amplitude
        group = -(-(self.width // 2) // axes)  # pairs per axis
        frequencies = geometric_frequencies(group, base**0.5)  # base^(-2i/d) for i < d/2
        frequencies = frequencies.repeat(axes)[: self.width // 2]
        if scaling is not None:
            frequencies = scale_frequencies(frequencies, scaling, base)
        self.register_buffer("theta", frequencies[None], persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.width == self.head_dim:
            y = rotate(x, positions, self.theta)
            return y if self.amplitude == 1.0 else y * self.amplitude
        y = rotate(x[..., : self.width], positions, self.theta)
        y = y if self.amplitude == 1.0 else y * self.amplitude
        return torch.cat([y, x[..., self.width :]], dim=-1)


def check_rope(
    head_dim: int,
    key: str = "num_heads",
    fraction: float = 1.0,
    base: float = 10000.0,
    scaling: RopeScalingConfig | None = None,
) -> list[str]:
    """Returns the problems of RoPE: of the option `key`, of rope_fraction (no pairs of channels), and of rope_base."""
    width, problems = int(head_dim * fraction), []
    if width < 2 or width % 2:
        if fraction == 1.0:
            problems.append(f"{key}: RoPE needs an even head width, not {head_dim}; change {key} or set rope: false")
        else:
            problems.append(
                f"rope_fraction: {fraction} rotates {width} of the {head_dim} channels of a head, but RoPE needs an "
                f"even number of at least 2; use {max(2, width // 2 * 2) / head_dim:g}, or set rope: false"
            )
    if base == 1.0 and scaling is not None and scaling.kind == "yarn":
        problems.append("rope_base: 1.0 gives one frequency, and yarn interpolates between several; use 10000")
    return problems


def scale_frequencies(frequencies: Tensor, scaling: RopeScalingConfig, base: float = 10000.0) -> Tensor:
    """Returns the frequencies [F], in radians per token, lowered according to `RopeScalingConfig`.

    Args:
        base: of the frequencies, base^(-i / F).
    """
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        pairs = len(frequencies)
        first, last = (  # pairs with `high` and with `low` rotations
            pairs * math.log(scaling.length / (turns * 2.0 * math.pi)) / math.log(base)
            for turns in (scaling.high, scaling.low)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        last += 0.001 if first == last else 0.0
        kept = 1.0 - ((torch.arange(pairs) - first) / (last - first)).clamp(0.0, 1.0)
    else:
        turns = scaling.length * frequencies / (2.0 * math.pi)
        kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
