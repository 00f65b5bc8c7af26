"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464).

q, k = l2(silu(conv4(x W_q))), l2(silu(conv4(x W_k))), v = silu(conv4(x W_v)); beta = sigmoid(x W_b), log a =
-exp(A_log) softplus(x W_a + b_a), one of each per value head; S_t = a_t S_{t-1} + k_t^T beta_t (v_t - k_t a_t S_{t-1}),
o_t = d_k^{-1/2} q_t S_t; RMSNorm in each head with one gain shared by the heads, SiLU gate, output projection.

By default keys have 3/4 of the model width and values twice theirs, so that a mixer has the 6 d^2 weights of the paper.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import Factor
from linnet.layers.base import LayerContext, State, register_mixer
from linnet.layers.delta import DeltaConfig, DeltaMixer, draw_steps
from linnet.ops.activation import softplus_decay


class GdnConfig(DeltaConfig):
    """Options of `gdn`."""

    expand_k: Factor = Field(0.75, description="width of all keys over d_model, without head_dim")
    expand_v: Factor = Field(2.0, description="width of a value over that of a key")
    use_gate: bool = Field(True, description="a SiLU gate after the norm of the output")


@register_mixer("gdn", GdnConfig, "gated_delta_net", "gated_delta_rule", "gated_delta", "qwen3_next", "qwen3.5")
class Gdn(DeltaMixer):
    """x [B, T, D] -> [B, T, D], with one decay per value head."""

    pending_decays = "head"

    full_precision = ("A_log", "dt_bias")

    def __init__(self, config: GdnConfig, context: LayerContext):
        super().__init__(config, context)
        self.decay_proj = nn.Linear(context.d_model, self.num_v_heads, bias=context.bias_all)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads).uniform_(0.01, 16.0).log())
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        draw_steps(self.dt_bias)
        if config.use_gate:
            self.gate_proj = nn.Linear(context.d_model, self.num_v_heads * self.value_dim, bias=context.bias_all)

    def log_decay(self, x: Tensor) -> Tensor:
        return softplus_decay(self.decay_proj(x), self.A_log, self.dt_bias)

    def token(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: State) -> Tensor:
        return self.projected_token(q, k, v, x, state, self.decay_proj(x), self.A_log, self.dt_bias)

    def gate(self, x: Tensor) -> Tensor | None:
        return self.gate_proj(x) if self.config.use_gate else None

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan() | {"decay_proj": "colwise", "A_log": "split", "dt_bias": "split"}
        return plan | {"gate_proj": "colwise"} if self.config.use_gate else plan
