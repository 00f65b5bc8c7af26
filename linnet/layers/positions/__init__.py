"""Positions of tokens: within a sequence, within packed documents, and after a carried state.

Absolute ones are added once to the embedding: sinusoids or a learned table (Vaswani et al. 2017, section 3.5).
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from linnet.ops import sequence


def token_positions(x: Tensor, start: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns the positions [B, T] (int64) of the tokens of x [B, T, ...].

    Args:
        start: [B] number of tokens before x in a carried state (or [N] with packed documents).
        cu_seqlens: int32 [N+1], document boundaries of a packed batch of one row; positions restart at each.

    Inside `linnet.ops.sequence.sequence_parallel`, x is a span of a longer row: its positions are those in the row
    or, of a document that began on a rank before, in the document.
    """
    batch, length = x.shape[:2]
    first = 0
    if sequence.span() is not None and start is None:
        if cu_seqlens is None:
            first = sequence.first_position(length)
        else:
            start = sequence.document_positions(cu_seqlens, length)
    index = torch.arange(first, first + length, device=x.device)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)
        index = index - cu_seqlens.to(index.dtype)[document]
        return (index if start is None else index + start[document])[None]
    index = index.expand(batch, length)
    return index if start is None else index + start[:, None]


def next_positions(x: Tensor, start: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns the positions after the tokens of x, one per sequence or document; arguments as in `token_positions`."""
    return start + (x.shape[1] if cu_seqlens is None else cu_seqlens.diff().to(torch.int64))


def geometric_frequencies(count: int, base: float = 10000.0) -> Tensor:
    """Returns base^(-2i/count) for i = 0 .. count-1, float32 [count]."""
    return torch.tensor((base ** (-2.0 * np.arange(count) / count)).astype(np.float32))


PositionKind = Literal["none", "sinusoidal", "scaled_sinusoidal", "learned"]


class Sinusoidal(nn.Module):
    """sin(t w_j), then cos(t w_j), with w_j = 10000^(-2j/D) for j = 0 .. D/2 - 1. No parameters, no maximum length.

    The paper interleaves sines and cosines, which is a permutation of the channels.
    """

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model

    def forward(self, positions: Tensor) -> Tensor:
        """Maps int64 [...] to float64 [..., D]. Angles in float32 would be off by 0.01 beyond 100,000 tokens."""
        half = self.d_model // 2
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=positions.device) / half)
        angles = positions.to(torch.float64)[..., None] * rates
        return torch.cat([angles.sin(), angles.cos()], -1)


class ScaledSinusoidal(Sinusoidal):
    """Sinusoids times one learned number, which starts at 1 / sqrt(D) (Hua et al. 2022, arXiv:2202.10447)."""

    full_precision = ("scale",)

    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.scale = nn.Parameter(torch.tensor([d_model**-0.5]))

    def forward(self, positions: Tensor) -> Tensor:
        """Maps int64 [...] to [..., D], in the dtype of the learned number."""
        return self.scale * super().forward(positions).to(self.scale.dtype)


def build_positions(kind: PositionKind, d_model: int, num_positions: int | None) -> nn.Module | None:
    """Returns a module from positions int64 [...] to vectors [..., D], None for `none`."""
    match kind:
        case "sinusoidal":
            return Sinusoidal(d_model)
        case "scaled_sinusoidal":
            return ScaledSinusoidal(d_model)
        case "learned":
            return nn.Embedding(num_positions, d_model)
    return None


def length_problems(key: str, length: int, num_positions: int | None, fix: str = "") -> list[str]:
    """Returns why sequences of `length` tokens do not fit a learned table of positions; [] if they do.

    Args:
        key: the setting that gives the length.
        num_positions: rows of the table; None without one.
        fix: default: a shorter sequence, which is all that a trained model allows.
    """
    if num_positions is None or length <= num_positions:
        return []
    fix = fix or f"use at most {num_positions}"
    return [f"{key}: {length} is above model.num_positions: {num_positions}; {fix}"]


def check_positions(kind: PositionKind, d_model: int, num_positions: int | None) -> list[str]:
    """Returns the problems of the model keys `positions` and `num_positions`."""
    if kind == "learned" and num_positions is None:
        return ["num_positions: positions: learned needs the longest sequence in tokens; set it, for example 512"]
    if kind != "learned" and num_positions is not None:
        return [f"num_positions: {num_positions} has no effect with positions: {kind}; leave it out, or use learned"]
    if kind.endswith("sinusoidal") and d_model % 2:
        return [f"d_model: {d_model} is odd; positions: {kind} needs an even width"]
    return []
