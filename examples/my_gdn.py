"""A variant of Gated DeltaNet in one short file: a decay with a floor, as later models use it.

    linnet mad run --mixer examples/my_gdn.py:MyGdn --tasks fuzzy_recall
    linnet study --mixer examples/my_gdn.py:MyGdn

The state of a head erases what its key reads before it writes, after a decay of each token's own (arXiv:2412.06464):

    R_t = a_t S_{t-1},   S_t = R_t + k_t^T beta_t (v_t - k_t R_t),   o_t = q_t S_t / sqrt(K)

Gated DeltaNet's log a_t = -exp(A) softplus(x_t W + b) has no floor, so one token can empty a head. Here it is
log a_t = floor sigmoid(exp(A) (x_t W + b)), as in Kimi Delta Attention (arXiv:2510.26692), for whole heads.
Projections, short convolutions, unit keys, beta, norm and state are those of every mixer on this op (`DeltaMixer`).
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.layers.base import LayerContext, register_mixer
from linnet.layers.delta import DeltaConfig, DeltaMixer, at_least_float32, draw_steps


class MyGdnConfig(DeltaConfig):
    """Options of the layer, beside those of every mixer on the gated delta rule."""

    floor: float = Field(-5.0, lt=0, description="lowest log-decay of a token")


@register_mixer("my_gdn", MyGdnConfig)
class MyGdn(DeltaMixer):
    """x [B, T, D] -> [B, T, D], with one decay per value head in (exp(floor), 1)."""

    full_precision = ("A", "bias")  # stay float32 when a model is cast for serving

    def __init__(self, config: MyGdnConfig, context: LayerContext):
        super().__init__(config, context)
        self.decay_proj = nn.Linear(context.d_model, self.num_v_heads, bias=False)
        self.gate_proj = nn.Linear(context.d_model, self.num_v_heads * self.value_dim, bias=False)
        self.A, self.bias = (nn.Parameter(torch.zeros(self.num_v_heads)) for _ in range(2))
        draw_steps(self.bias)

    def log_decay(self, x: Tensor) -> Tensor:
        logits = at_least_float32(self.decay_proj(x)) + at_least_float32(self.bias)
        return self.config.floor * (at_least_float32(self.A).exp() * logits).sigmoid()

    def gate(self, x: Tensor) -> Tensor:
        return self.gate_proj(x)

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {"decay_proj": "colwise", "gate_proj": "colwise", "A": "split", "bias": "split"}
