"""Positions of tokens: within a sequence, within packed documents, and after a carried state.

Absolute ones are added once to the embedding: sinusoids or a learned table (Vaswani et al. 2017, section 3.5).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn

from linnet.config import Config, Factor, added
from linnet.ops import sequence
from linnet.ops.activation import ACTIVATIONS
from linnet.ops.compat_torch import is_plain
from linnet.ops.rotation import rotate
from linnet.ops.scans import ORDERS, reorder


def check_room(last: Tensor, slots: int, reach: int = 0) -> None:
    """Raises ValueError if a state has no slot left for the tokens at positions `last`, int64 [B].

    The oldest tokens would be lost without a word. On a GPU nothing is read, since that would wait for the device.

    Args:
        last: of the last token of each row. Rows of a pool that have no sequence may be beyond the slots, so the lowest
            position counts.
        slots: tokens that the state holds. reach: tokens that the layer reads at most, 0 for all.
    """
    if (reach and slots >= reach) or last.device.type != "cpu" or not is_plain((last,)):
        return
    if (position := int(last.min())) >= slots:
        raise ValueError(
            f"context_length: the state has room for {slots} tokens, but {position + 1} have come, and the first ones "
            "would be lost; give init_state a larger context_length"
        )


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


# The grid on which tokens without causality lie: their coordinates, and the orders in which scans visit them.


@dataclass(frozen=True)
class Grid:
    """Tokens of a grid in row-major order, after `prefix` tokens that lie on none.

    Attributes:
        sides: number of tokens along each axis, for example (rows, columns).
        prefix: tokens before the grid, such as a class token.
    """

    sides: tuple[int, ...]
    prefix: int = 0

    def __post_init__(self):
        if not self.sides or min(self.sides) < 1 or self.prefix < 0:
            raise ValueError(
                f"grid: sides {self.sides}, prefix {self.prefix}; give sides of at least 1 and a prefix of at least 0"
            )

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of a row, with the prefix."""
        return self.prefix + prod(self.sides)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the coordinates of the tokens, int32 [1, T, A], from 0; those of the prefix are 0 on all axes."""
        device = torch.device("cpu" if device is None else device)
        # Tensors made for a compiler, a mode or a CUDA graph must not be kept.
        if not is_plain(()) or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return _positions(self, device)
        return _kept_positions(self, device)

    def orders(self, scan: str) -> list[Tensor]:
        """Returns the orders of a scan as permutations, int64 [T] each: position in the scan -> token of the row.

        Args:
            scan: `forward`, row-major from the start; `both`, row-major from both ends; `cross`, also column-major from
                both ends; `series`, the orders of `cross`, of which the first two and the last two are one after the
                other (`linnet.layers.non_causal`).
        """
        tokens = torch.arange(self.tokens)[None]
        orders = ORDERS["cross" if scan == "series" else scan]
        return [reorder(tokens, order, self.sides, self.prefix)[0] for order in orders]

    def transposed(self) -> "Grid":
        """Returns the grid whose row-major order is the column-major order of this one."""
        return Grid(self.sides[::-1], self.prefix)


def _positions(grid: Grid, device: torch.device) -> Tensor:
    # Filled and not stacked: on the meta device, torch.stack imports torch's compiler, which takes a second.
    places = torch.zeros(grid.tokens, len(grid.sides), dtype=torch.int32, device=device)
    body = places[grid.prefix :].view(*grid.sides, len(grid.sides))
    for axis, side in enumerate(grid.sides):
        shape = [-1 if other == axis else 1 for other in range(len(grid.sides))]
        body[..., axis].copy_(torch.arange(side, dtype=torch.int32, device=device).view(shape))
    return places[None]


@lru_cache(64)
def _kept_positions(grid: Grid, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _positions(grid, device)


Reflection = Literal["none", "householder"]


class Lrpe(nn.Module):
    """LRPE: linearized relative position encoding (Qin et al. 2023), in its real and complex forms.

    Complex: x -> [x cos(t theta), x sin(t theta)] doubles the head width, and q.k becomes sum_j q_j k_j cos(theta_j (t
    - s)). TNL's first layer, cosFormer2 and LightNet use it (papers 001 eq. 9, 000 A.1.4, 003 eq. 10). On a grid (MD-
    LRPE, paper 003, eq. 10-14) the channels of a head fall into one group per axis, each rotated by its coordinate, so
    that products depend on the differences of all coordinates. Real: rotates pairs and keeps the width; with learned
    frequencies it generalises RoPE. With a decay per channel only the complex form stays relative, because both copies
    of a channel share its decay. TransNormer first reflects x at a fixed random unit vector u, x - 2 u (u.x), a
    Householder matrix (arXiv:2210.10340); products at equal positions stay as they are.

    Learned frequencies theta [H, d_h] (complex) or [H, d_h / 2] (real).

    `shared_heads` False: theta = base^(-2i/D) over the whole model width, so the first head rotates fastest (the
    released TransNormerLLM); True: one theta [1, .] with exponents -2i/d_h for all heads.

    Several axes: all heads start with base^(-2i/e), i the index inside the group of an axis and e its width, the number
    of frequencies per axis rounded up. `base` None is 10000 for a sequence and 100 for a grid: with 10000, three
    quarters of the channels would turn by less than 0.1 radian over 14 patches.

    `reflection: householder` has one vector for all heads of a layer. It is drawn from `layer_index` alone: it is the
    same for every seed, and not a weight of the model.
    """

    full_precision = ("theta",)  # positions multiply it, so rounding errors grow with the position

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        form: Literal["complex", "real"] = "complex",
        shared_heads: bool = False,
        axes: int = 1,
        base: float | None = None,
        reflection: Reflection = "none",
        layer_index: int = 0,
    ):
        super().__init__()
        if form == "real" and check_real(head_dim):
            raise ValueError(check_real(head_dim)[0])
        self.form, self.shared_heads = form, shared_heads
        per_head = head_dim if form == "complex" else head_dim // 2
        heads = 1 if shared_heads else num_heads
        if axes == 1:
            theta = geometric_frequencies(heads * per_head, 10000.0 if base is None else base).view(heads, per_head)
        else:
            group = geometric_frequencies(-(-per_head // axes), 100.0 if base is None else base)
            theta = torch.cat([group] * axes)[:per_head].repeat(heads, 1)
        self.theta = nn.Parameter(theta)
        mirror = torch.tensor(unit_vector(head_dim, layer_index)) if reflection == "householder" else None
        self.register_buffer("mirror", mirror, persistent=False)

    def expanded(self, head_dim: int) -> int:
        """Returns the head width of queries and keys after the encoding."""
        return 2 * head_dim if self.form == "complex" else head_dim

    def tp_plan(self) -> dict[str, str]:
        """Returns the words of its tensors, as `Mixer.tp_plan`."""
        plan = {"theta": "partial" if self.shared_heads else "split"}
        return plan if self.mirror is None else plan | {"mirror": "whole"}

    def forward(self, x: Tensor, positions: Tensor, activation: Literal["none", "silu"] = "none") -> Tensor:
        """Encodes act(x) [B, T, H, d_h] at positions [1 or B, T], or [1 or B, T, A] on A axes; in a step [B, H, d_h]
        at positions [B]."""
        doubling = self.form == "complex"
        if self.mirror is None:
            return rotate(x, positions, self.theta, doubling=doubling, activation=activation)
        mirror = self.mirror.to(x.dtype)
        x = ACTIVATIONS[activation](x)
        x = x - 2.0 * (x @ mirror)[..., None] * mirror
        return rotate(x, positions, self.theta, doubling=doubling)


def unit_vector(width: int, seed: int) -> np.ndarray:
    """Returns a random unit vector, float32 [width], that is the same on every machine."""
    drawn = np.random.RandomState(seed).standard_normal(width)  # NumPy keeps the numbers of RandomState for ever
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def check_real(head_dim: int) -> list[str]:
    """Returns a list with one problem if the real form cannot split the head width into pairs, else an empty list."""
    problem = f"num_heads: real LRPE needs an even head width, not {head_dim}; change num_heads or d_model"
    return [problem] if head_dim % 2 else []


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
    """RoPE: rotary position embedding (Su et al. 2021, arXiv:2104.09864), the fixed real case of LRPE.

    Features i and i + d/2 form a pair (the half-split order of released LLaMA weights). On a grid the pairs fall into
    one contiguous group per axis, each rotated by its coordinate, with the frequencies of a head of the group's width.

    Partial RoPE rotates the first channels of a head, as a head of their width, and passes the others.

    Rotates queries and keys [B, T, H, d] (or [B, H, d] in a step) by position times a fixed frequency.

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
    optional: bool = True,
) -> list[str]:
    """Returns the problems of RoPE: of the option `key`, of rope_fraction (no pairs of channels), and of rope_base.

    Args:
        optional: whether the layer has an option `rope`.
    """
    width, problems = int(head_dim * fraction), []
    if width < 2 or width % 2:
        if fraction == 1.0:
            fix = f"change {key}{' or d_model' * (key == 'num_heads')}{', or set rope: false' * optional}"
            problems.append(f"{key}: RoPE needs an even head width, not {head_dim}; {fix}")
        else:
            share = math.ceil(max(2, width // 2 * 2) / head_dim * 1e6) / 1e6  # rounded up: down would be an odd number
            problems.append(
                f"rope_fraction: {fraction} rotates {width} of the {head_dim} channels of a head, but RoPE needs an "
                f"even number of at least 2; use {share:g}, or set rope: false"
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
