"""LRPE: linearized relative position encoding (Qin et al. 2023), in its real and complex forms.

Complex: x -> [x cos(t theta), x sin(t theta)] doubles the head width, and q.k becomes
sum_j q_j k_j cos(theta_j (t - s)). TNL's first layer, cosFormer2 and LightNet use it (papers 001 eq. 9, 000 A.1.4, 003
eq. 10). On a grid (MD-LRPE, paper 003, eq. 10-14) the channels of a head fall into one group per axis, each rotated by
its coordinate, so that products depend on the differences of all coordinates. Real: rotates pairs and keeps the width;
with learned frequencies it generalises RoPE. With a decay per channel only the complex form stays relative, because
both copies of a channel share its decay. TransNormer first reflects x at a fixed random unit vector u, x - 2 u (u.x), a
Householder matrix (arXiv:2210.10340); products at equal positions stay as they are.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from linnet.layers.positions import geometric_frequencies
from linnet.ops.activation import ACTIVATIONS
from linnet.ops.rotation import rotate

Reflection = Literal["none", "householder"]


class Lrpe(nn.Module):
    """Learned frequencies theta [H, d_h] (complex) or [H, d_h / 2] (real).

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
    return [f"num_heads: real LRPE needs an even head width, not {head_dim}; change num_heads"] if head_dim % 2 else []
