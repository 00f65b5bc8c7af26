"""Gated DeltaNet-2: `kda` with an erase gate per channel of the key and a write gate per channel of the value.

With e = sigmoid(x W_b) in the heads of keys and w = sigmoid(x W_w) in those of values:

    S_t = R_t + k_t^T (w_t v_t - (e_t k_t) R_t),  R_t = diag(a_t) S_{t-1}

Decays and erase gates belong to the heads of keys, and the heads of values of a group share them. `allow_neg_eigval`
doubles e. Decay, norm and output gate are those of `kda`. Source: flash-linear-attention's layer `gdn2`.
"""

from torch import Tensor, nn

from linnet.layers.base import LayerContext, register_mixer
from linnet.layers.delta import DeltaMixer
from linnet.layers.mixers.delta.kda import Kda, KdaConfig
from linnet.ops.chunks import at_least_float32


class Gdn2Config(KdaConfig):
    """Options of `gdn2`."""


@register_mixer("gdn2", Gdn2Config, "gated_delta_net_2")
class Gdn2(Kda):
    """x [B, T, D] -> [B, T, D], with gates per channel."""

    pending_decays = "channel"
    decay_heads = "num_heads"

    def __init__(self, config: Gdn2Config, context: LayerContext):
        super().__init__(config, context)
        keys, values = self.num_heads * self.key_dim, self.num_v_heads * self.value_dim
        self.beta_proj = nn.Linear(context.d_model, keys, bias=context.bias_all)
        self.write_proj = nn.Linear(context.d_model, values, bias=context.bias_all)

    def log_decay(self, x: Tensor) -> Tensor:
        return self._of_values(super().log_decay(x))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        erase, _ = super().gates(x)
        write = at_least_float32(self.write_proj(x)).sigmoid().unflatten(-1, (self.num_v_heads, self.value_dim))
        return self._of_values(erase.unflatten(-1, (self.num_heads, self.key_dim))), write

    token = DeltaMixer.token

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {"write_proj": "colwise"}

    def _of_values(self, x: Tensor) -> Tensor:
        """Returns numbers of heads of keys [..., H, K] for the heads of values, [..., HV, K]."""
        return x.repeat_interleave(self.num_v_heads // self.num_heads, -2)
