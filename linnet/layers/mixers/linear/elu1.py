"""1 + elu: linear attention with a denominator (Katharopoulos et al. 2020, arXiv:2006.16236; papers 001, 002 and 003).

phi(x) = 1 + elu(x); o_t = phi(q_t) sum_{s <= t} phi(k_s)^T v_s / phi(q_t) sum_{s <= t} phi(k_s)^T for each head, with
q = x W_q, k = x W_k and v = x W_v; y = o W_o. Without causality the sums are over all tokens.

Values have one more column, of ones, so that one recurrence without decay gives numerator and denominator; zeros fill
them up to a multiple of 8, which the kernels need. The mixer knows no positions: its recipes add sinusoids to the
embedding, as the paper does. Departure: a denominator is at least `eps`, where the authors add it.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import Epsilon
from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.non_causal import refuse_state
from linnet.layers.output import check_heads, split_heads
from linnet.layers.positions import Grid, next_positions, token_positions
from linnet.ops import lightning_attention, lightning_step, linear_attention


class Elu1Config(LayerConfig):
    """Options of `elu1`."""

    num_heads: int = Field(8, ge=1, description="heads; must divide d_model")
    eps: Epsilon = Field(1e-6, description="least denominator")

    def check(self, context: LayerContext) -> list[str]:
        return check_heads(context.d_model, self.num_heads)


@register_mixer("elu1", Elu1Config, "linear_attention", "linear_transformer")
class Elu1(Mixer):
    """x [B, T, D] -> [B, T, D]; the state is [B, H, K, V + 1], whose last column is the sum of the denominator, with
    zeros up to a multiple of 8.

    Attributes:
        places: whether features depend on the position of a token, which the state then counts.
        expanded: numbers of a feature per channel of a head.
    """

    sequence_parallel = True
    non_causal = "one_scan"
    takes_grid = True
    places, expanded = False, 1

    def __init__(self, config: Elu1Config, context: LayerContext):
        super().__init__()
        d_model = context.d_model
        self.config, self.causal, self.num_heads = config, context.causal, config.num_heads
        self.head_dim = split_heads(d_model, config.num_heads, self.name)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, d_model, bias=context.bias_qkv) for _ in range(3))
        self.out_proj = last_linear(d_model, d_model, bias=context.bias_all)
        self.register_buffer("tail", torch.tensor([1.0] + [0.0] * (7 - self.head_dim % 8)), persistent=False)

    def features(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Returns the features of queries or keys x [..., H, K], which are not negative."""
        return x.clamp(max=0.0).exp() + F.relu(x)  # 1 + elu(x), without the rounding of 1 + (exp(x) - 1)

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        start, positions = None if state is None else state.get("position"), None
        if self.places:
            positions = token_positions(x, start, cu_seqlens) if grid is None else grid.positions(x.device)
        q, k, v = self._project(x, positions)
        if not self.causal:
            refuse_state(state)
            return self._read(linear_attention(q, k, v, cu_seqlens=cu_seqlens)), None
        o, matrix = lightning_attention(q, k, v, **carried(state, "matrix", cu_seqlens))
        if state is not None:
            state = {"matrix": matrix}
            if start is not None:
                state["position"] = next_positions(x, start, cu_seqlens)
        return self._read(o), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y = self._read(lightning_step(*self._project(x, state.get("position")), state["matrix"]))
        if self.places:
            state["position"] += 1
        return y, state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        keys, columns = self.expanded * self.head_dim, self.head_dim + len(self.tail)
        shape, counted = (batch, self.num_heads, keys, columns), (self.head_dim + 1) / columns
        spec = {"matrix": TensorSpec(shape, counted=counted)}
        return spec | ({"position": TensorSpec((batch,), torch.int64)} if self.places else {})

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and 8 n per number of the state, the convention of paper 000."""
        return super().flops_paper(seq_len) + 8.0 * seq_len * self.state_spec(1, 1)["matrix"].size

    def tp_plan(self) -> dict[str, str]:
        return dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {"tail": "whole", "out_proj": "rowwise"}

    def _project(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the features of q and k, and v with a column of ones and those of zeros."""
        q, k, v = (proj(x).unflatten(-1, (self.num_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        v = torch.cat([v, self.tail.to(v.dtype).expand(*v.shape[:-1], -1)], -1)
        return self.features(q, positions), self.features(k, positions), v

    def _read(self, o: Tensor) -> Tensor:
        o, total = o[..., : self.head_dim], o[..., self.head_dim, None]
        return self.out_proj((o / total.clamp(min=self.config.eps)).flatten(-2))
