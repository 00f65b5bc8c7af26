"""cosFormer: linear attention with ReLU features, weighted by the cosine of the distance (Qin et al. 2022,
arXiv:2202.08791; papers 001, 002 and 003).

q = relu(x W_q), k = relu(x W_k), v = x W_v; o_t = sum_{s <= t} w_ts v_s / sum_{s <= t} w_ts with the weights
w_ts = q_t k_s^T cos(pi (t - s) / 2M) for each head; y = o W_o. By cos(a - b) = cos a cos b + sin a sin b the weights
are products of [q cos, q sin] and [k cos, k sin], one frequency of the rotation that cosFormer2 has for each channel
(`linnet.ops.rotation`), so the recurrence is that of `elu1`.

M is the option `max_length`. Departure: the authors' module takes the longest row of a batch, with which a prefix of a
row has other outputs than the row. Positions from M on count as M, so that no weight is negative. On a grid the
channels of a head fall into one group per axis, each weighted by the distance along it, as in cosFormer2.
"""

import math

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from linnet.layers.base import LayerContext, register_mixer
from linnet.layers.mixers.linear.elu1 import Elu1, Elu1Config
from linnet.ops.rotation import rotate


class CosformerConfig(Elu1Config):
    """Options of `cosformer`."""

    max_length: int = Field(1024, ge=1, description="M, the longest row in tokens; later positions count as M")


@register_mixer("cosformer", CosformerConfig)
class Cosformer(Elu1):
    """x [B, T, D] -> [B, T, D]; the state is [B, H, 2 K, V + 1], as of `elu1`, and the position of the next token."""

    places, expanded = True, 2

    def __init__(self, config: CosformerConfig, context: LayerContext):
        super().__init__(config, context)
        theta = torch.full((1, self.head_dim), math.pi / 2 / config.max_length)
        self.register_buffer("theta", theta, persistent=False)

    def features(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(F.relu(x), positions.clamp(max=self.config.max_length), self.theta, doubling=True)

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {"theta": "whole"}
