"""Gated DeltaProduct (Siems et al. 2025, arXiv:2502.10297): `gdn` with several erasures and writes per token.

A token has n keys k_i, values v_i and gates beta_i. It decays the state once, then erases and writes with each of them:

    R_0 = a_t S_{t-1},   R_i = R_{i-1} + k_i^T beta_i (v_i - k_i R_{i-1}),   S_t = R_n,   o_t = d_k^{-1/2} q_t S_t

This is the gated delta rule with n tokens in the place of one: the first has the decay, the last has the query. By
default beta is in (0, 2), so that the transition of a token is a product of n generalised reflections. Rows of the
projections of k, v and beta are ordered by head, then micro-step, then channel.
"""

from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from linnet.layers.base import LayerContext, State, register_mixer
from linnet.layers.delta import DeltaMixer
from linnet.layers.mixers.delta.gdn import Gdn, GdnConfig
from linnet.layers.short_conv import ShortConv
from linnet.ops.norm import unit_norm


class GatedDeltaProductConfig(GdnConfig):
    """Options of `gated_delta_product`."""

    num_householder: int = Field(2, ge=1, le=64, description="erasures and writes per token")
    allow_neg_eigval: bool = Field(True, description="beta in (0, 2): an erasure may flip the sign of what it reads")


@register_mixer("gated_delta_product", GatedDeltaProductConfig, "delta_product")
class GatedDeltaProduct(Gdn):
    """x [B, T, D] -> [B, T, D], with n micro-steps per token."""

    def __init__(self, config: GatedDeltaProductConfig, context: LayerContext):
        super().__init__(config, context)
        d_model, self.steps = context.d_model, config.num_householder
        keys, values = (
            self.steps * width for width in (self.num_heads * self.key_dim, self.num_v_heads * self.value_dim)
        )
        self.k_proj = nn.Linear(d_model, keys, bias=context.bias_qkv)
        self.v_proj = nn.Linear(d_model, values, bias=context.bias_qkv)
        self.beta_proj = nn.Linear(d_model, self.steps * self.num_v_heads, bias=context.bias_all)
        self.k_conv, self.v_conv = (ShortConv(x, config.conv_width, silu=True) for x in (keys, values))

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [..., H, K], and k [..., n, H, K] and v [..., n, HV, V] by micro-step."""
        q = unit_norm(q.unflatten(-1, (self.num_heads, self.key_dim)))
        k = unit_norm(k.unflatten(-1, (self.num_heads, self.steps, self.key_dim)))
        v = v.unflatten(-1, (self.num_v_heads, self.steps, self.value_dim))
        return q, k.transpose(-2, -3), v.transpose(-2, -3)

    def gates(self, x: Tensor) -> tuple[Tensor, None]:
        beta, _ = super().gates(x)
        return beta.unflatten(-1, (self.num_v_heads, self.steps)).mT, None

    def recurrence(self, q, k, v, log_decay, erase, write, cu_seqlens: Tensor | None, **states):
        late = self.steps - 1
        q, log_decay = pad(q[:, :, None], (0, 0, 0, 0, late, 0)), pad(log_decay[:, :, None], (0, 0, 0, late))
        tokens = (y.flatten(1, 2) for y in (q, k, v, log_decay, erase))
        bounds = None if cu_seqlens is None else cu_seqlens * self.steps
        o, state = super().recurrence(*tokens, write, bounds, **states)
        return o[:, late :: self.steps], state

    token = DeltaMixer.token

    def recurrence_step(self, q, k, v, log_decay, erase, write, state: State) -> Tensor:
        for i in range(self.steps):
            o = super().recurrence_step(q, k[:, i], v[:, i], None if i else log_decay, erase[:, i], write, state)
        return o

    def flops_paper(self, seq_len: int) -> float:
        """Returns that of `gdn` with n times the recurrence."""
        matrix = self.num_v_heads * self.value_dim * self.key_dim
        return super().flops_paper(seq_len) + (self.steps - 1) * 10.0 * seq_len * matrix
