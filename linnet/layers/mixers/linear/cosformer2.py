"""cosFormer2: linear attention without decay, with learned complex LRPE in every layer (paper 000, A.1.4).

Q = silu(X W_q), K = silu(X W_k), V = X W_v; LRPE doubles the heads of Q and K; O = Norm(LA(Q, K, V)) * sigmoid(X W_d
W_u); y = O W_o. No denominator. Without causality every token sees all others in two products, O = Q (K^T V), and on a
grid LRPE rotates one group of channels per axis. The recipes apply TPE once after the embedding (the mixer `tpe`). The
gate reads the normed input by default; `gate_input: residual` is the equation of the paper.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.layers.base import LayerContext, Mixer, State, TensorSpec, carried, register_mixer
from linnet.layers.non_causal import refuse_state
from linnet.layers.norm import NormKind, build_norm
from linnet.layers.output import GatedOutput, GatedOutputConfig, check_heads, split_heads
from linnet.layers.positions import Grid, Lrpe, next_positions, token_positions
from linnet.ops import lightning_attention, lightning_step, linear_attention


class Cosformer2Config(GatedOutputConfig):
    """Options of `cosformer2`."""

    norm: NormKind = Field("rmsnorm", description="norm of the output, over the full width")
    num_heads: int = Field(8, ge=1, description="heads; must divide d_model")
    gate_input: Literal["normed", "residual"] = Field("normed", description="paper 000, A.1.4: residual")
    lrpe_shared_heads: bool = Field(False, description="one set of frequencies for all heads")

    def check(self, context: LayerContext) -> list[str]:
        return check_heads(context.d_model, self.num_heads)


@register_mixer("cosformer2", Cosformer2Config)
class Cosformer2(Mixer):
    """Maps x [B, T, D] to [B, T, D]; the state is [B, H, 2 K, V] and the position of the next token."""

    sequence_parallel = True
    non_causal = "one_scan"
    takes_grid = True

    def __init__(self, config: Cosformer2Config, context: LayerContext):
        super().__init__()
        d_model = context.d_model
        self.config, self.d_model, self.num_heads = config, d_model, config.num_heads
        self.causal = context.causal
        self.head_dim = split_heads(d_model, config.num_heads, self.name)
        self.owns_input_norm = config.gate_input == "residual"
        self.input_norm = build_norm(context.norm, d_model, context.norm_eps) if self.owns_input_norm else None
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, d_model, bias=context.bias_qkv) for _ in range(3))
        self.lrpe = Lrpe(config.num_heads, self.head_dim, "complex", config.lrpe_shared_heads, context.axes)
        self.output = GatedOutput(config, context, self.head_dim)

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        if not self.causal:
            refuse_state(state)
            places = token_positions(x, None, cu_seqlens) if grid is None else grid.positions(x.device)
            o = linear_attention(*self._project(x, places), cu_seqlens=cu_seqlens)
            return self.output(o.flatten(-2), x), None
        start = None if state is None else state["position"]
        q, k, v = self._project(x, token_positions(x, start, cu_seqlens))
        o, matrix = lightning_attention(q, k, v, **carried(state, "matrix", cu_seqlens))
        if state is not None:
            state = {"matrix": matrix, "position": next_positions(x, start, cu_seqlens)}
        return self.output(o.flatten(-2), x), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        q, k, v = self._project(x, state["position"])
        o = lightning_step(q, k, v, state["matrix"])
        state["position"] += 1
        return self.output(o.flatten(-2), x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {
            "matrix": TensorSpec((batch, self.num_heads, 2 * self.head_dim, self.head_dim)),
            "position": TensorSpec((batch,), torch.int64),
        }

    def flops_paper(self, seq_len: int) -> float:
        """8nd^2 + 18nd^2/h + 5nd (paper 000, A.1.4 with block size and gate rank d/h)."""
        n, d = seq_len, self.d_model
        return n * (8.0 * d**2 + 18.0 * d * self.head_dim + 5.0 * d)

    def tp_plan(self) -> dict[str, str]:
        plan = {name: "colwise" for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {"input_norm": "partial", "lrpe": "partial" if self.config.lrpe_shared_heads else "split"}
        return plan | {f"output.{name}": how for name, how in self.output.tp_plan().items()}

    def _project(self, x: Tensor, positions: Tensor):
        if self.input_norm is not None:
            x = self.input_norm(x)
        heads = (self.num_heads, self.head_dim)
        q, k = self.q_proj(x).unflatten(-1, heads), self.k_proj(x).unflatten(-1, heads)
        v = self.v_proj(x).unflatten(-1, heads)
        return self.lrpe(q, positions, "silu"), self.lrpe(k, positions, "silu"), v
