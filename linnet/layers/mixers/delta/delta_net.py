"""DeltaNet (Yang et al. 2024, arXiv:2406.06484): `gdn` without a decay.

q, k = l2(silu(conv4(x W_q))), l2(silu(conv4(x W_k))), v = silu(conv4(x W_v)), beta = sigmoid(x W_b);
S_t = S_{t-1} + k_t^T beta_t (v_t - k_t S_{t-1}), o_t = d_k^{-1/2} q_t S_t; RMSNorm in each head with one gain shared by
the heads, output projection. `use_gate` puts a SiLU gate after the norm.
"""

from pydantic import Field
from torch import Tensor, nn

from linnet.layers.base import LayerContext, State, register_mixer
from linnet.layers.delta import DeltaConfig, DeltaMixer


class DeltaNetConfig(DeltaConfig):
    """Options of `delta_net`."""

    use_gate: bool = Field(False, description="a SiLU gate after the norm of the output")


@register_mixer("delta_net", DeltaNetConfig, "delta_rule")
class DeltaNet(DeltaMixer):
    """x [B, T, D] -> [B, T, D], without a decay."""

    pending_decays = "none"

    def __init__(self, config: DeltaNetConfig, context: LayerContext):
        super().__init__(config, context)
        if config.use_gate:
            self.gate_proj = nn.Linear(context.d_model, self.num_v_heads * self.value_dim, bias=context.bias_all)

    def log_decay(self, x: Tensor) -> None:
        return None

    def token(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: State) -> Tensor:
        return self.projected_token(q, k, v, x, state, None, None, None)

    def gate(self, x: Tensor) -> Tensor | None:
        return self.gate_proj(x) if self.config.use_gate else None

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | ({"gate_proj": "colwise"} if self.config.use_gate else {})
