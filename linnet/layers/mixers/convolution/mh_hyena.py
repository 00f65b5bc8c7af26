"""Multi-head Hyena (Massaroli et al. 2023, arXiv:2310.18780; paper 004, section 3.2), with one modal filter per head.

q, k, v as in `hyena`, in H heads of width m: z_t = k_t (x) v_t, Z = h conv z with one filter for the m^2 products of a
head, y_t = q_t Z_t, then one output projection for all heads. This is linear attention whose decay is a learned filter;
training computes it in that form and never builds z (`linnet.ops.filtered_attention`).

Paper: 16 heads of width 8 at a width of 128. Its published implementation has 8 heads of width 16, twice the state
(`num_heads: 8`), implicit filters and tied projections (`linnet.layers.mixers.convolution.hyena`).
"""

from pydantic import Field
from torch import Tensor

from linnet.config import added
from linnet.layers.base import SET, LayerContext, State, last_linear, register_mixer
from linnet.layers.hyena import long_flops_paper
from linnet.layers.mixers.convolution.hyena import HyenaFilterConfig, HyenaMixer
from linnet.layers.output import check_heads, split_heads
from linnet.ops import filtered_attention, sequence


class MhHyenaConfig(HyenaFilterConfig):
    """Options of `mh_hyena`."""

    unread = HyenaFilterConfig.unread | {("head_dim", SET): ("num_heads",)}

    num_heads: int = Field(16, ge=1, description="heads; must divide d_model")
    head_dim: int = added(
        0,
        ge=0,
        description="channels of a head at any width of the model, in place of num_heads; 0 leaves it to num_heads",
    )
    num_modes: int = Field(2, ge=1, description="complex modes of a filter; the state is this times D^2 / num_heads")

    def heads(self, d_model: int) -> int:
        """Returns the number of heads at a width of the model."""
        return d_model // self.head_dim if self.head_dim else self.num_heads

    def check(self, context: LayerContext) -> list[str]:
        if self.head_dim and context.d_model % self.head_dim:
            what = f"head_dim: {self.head_dim} does not divide d_model: {context.d_model}"
            return [f"{what}; use a divisor", *super().check(context)]
        return check_heads(context.d_model, self.heads(context.d_model)) + super().check(context)


@register_mixer("mh_hyena", MhHyenaConfig, "multi_head_hyena")
class MhHyena(HyenaMixer):
    """x [B, T, D] -> [B, T, D], with one filter per head."""

    def __init__(self, config: MhHyenaConfig, context: LayerContext):
        d_model, heads = context.d_model, config.heads(context.d_model)
        head_dim = split_heads(d_model, heads, "mh_hyena")
        super().__init__(config, d_model, channels=d_model, filters=heads, conv_channels=d_model * head_dim)
        self.num_heads, self.head_dim = heads, head_dim
        self.out_proj = last_linear(d_model, d_model)

    @property
    def heads(self) -> tuple[int, int]:
        """Number of heads, on this rank if tensor parallelism splits them, and width of a head."""
        return self.num_heads, self.head_dim

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        if state is not None or cu_seqlens is not None or self.heads[0] % sequence.spans():
            return super().forward(x, state, cu_seqlens)
        q, k, v = (part.unflatten(-1, self.heads) for part in self._project(x, None, None)[0])
        return self.out_proj(filtered_attention(q, k, v, self.values(x.shape[1])).flatten(-2)), None

    def signal(self, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.unflatten(-1, self.heads), v.unflatten(-1, self.heads)
        return (k[..., :, None] * v[..., None, :]).flatten(-3)

    def read(self, y: Tensor, q: Tensor, x: Tensor) -> Tensor:
        matrices = y.unflatten(-1, (*self.heads, self.heads[1]))
        return self.out_proj((q.unflatten(-1, self.heads)[..., None] * matrices).sum(-2).flatten(-2))

    def flops_paper(self, seq_len: int) -> float:
        """6 L D^2 + 18 L D + S L H + 10 L log2(L) D^2/H + 4 L D^2/H + 2 L D^2 (paper 004, C.4; S modes)."""
        d, heads = self.d_model, self.heads[0]
        long = long_flops_paper(seq_len, self.modes, heads, d**2 / heads)
        return seq_len * ((6.0 / self.config.proj_groups + 2.0) * d**2 + 18.0 * d) + long
