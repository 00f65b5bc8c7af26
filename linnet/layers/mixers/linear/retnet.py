"""RetNet: retention in several heads, each with its decay (Sun et al. 2023, arXiv:2307.08621).

q = x W_q and k = x W_k, both rotated by their positions (RoPE); v = x W_v. For each head h = 0, 1, ... of width K:
S_t = (1 - 2^(-5-h)) S_{t-1} + k_t^T v_t, o_t = q_t S_t / sqrt(K); y = (silu(x W_g) * GroupNorm(o)) W_o, where a group
is a head. The decay is xPos's with one rate per head.

Departures: the paper divides scores by their sums where that exceeds 1, which the norm of each head cancels, so this is
left out. Its norm has no gain and bias, as in the authors' module. Frequencies are those of RoPE, 10000^(-2i/K); the
authors' module spreads as many from 1 to 1/10000.
"""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import Epsilon, Factor
from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.norm import NormKind, build_norm, norm_and_gate
from linnet.layers.output import check_heads
from linnet.layers.positions import Rope, check_rope, next_positions, token_positions
from linnet.ops import lightning_attention, lightning_step


class RetnetConfig(LayerConfig):
    """Options of `retnet`."""

    num_heads: int = Field(4, ge=1, description="heads; must divide d_model into even widths (the paper's are 256)")
    expand_v: Factor = Field(2.0, description="width of all values over d_model")
    norm: NormKind = Field("layernorm", description="norm of each head, without gain and bias")
    norm_eps: Epsilon | None = Field(None, description="epsilon of the norm; null is the default of its kind")

    def check(self, context: LayerContext) -> list[str]:
        if problems := check_heads(context.d_model, self.num_heads, self, context):
            return problems
        width = context.d_model // self.num_heads
        if not (width * self.expand_v).is_integer():
            return [f"expand_v: {self.expand_v} gives heads of {width * self.expand_v:g} values; use 1 or 2"]
        return check_rope(width, optional=False)


@register_mixer("retnet", RetnetConfig, "retention", "multi_scale_retention")
class Retnet(Mixer):
    """x [B, T, D] -> [B, T, D]; the state is a matrix [B, H, K, V] and the position of the next token."""

    sequence_parallel = True

    def __init__(self, config: RetnetConfig, context: LayerContext):
        super().__init__()
        self.refuse_options(config, context)
        d_model = context.d_model
        self.config, self.num_heads, self.key_dim = config, config.num_heads, d_model // config.num_heads
        self.value_dim = int(self.key_dim * config.expand_v)
        values = self.num_heads * self.value_dim
        self.q_proj = nn.Linear(d_model, d_model, bias=context.bias_qkv)
        self.k_proj = nn.Linear(d_model, d_model, bias=context.bias_qkv)
        self.v_proj = nn.Linear(d_model, values, bias=context.bias_qkv)
        self.gate_proj = nn.Linear(d_model, values, bias=context.bias_all)
        self.rope = Rope(self.key_dim)
        self.norm = build_norm(config.norm, self.value_dim, config.norm_eps, affine=False)
        self.out_proj = last_linear(values, d_model, bias=context.bias_all)
        decays = np.log1p(-(2.0 ** (-5.0 - np.arange(self.num_heads)))).astype(np.float32)
        self.register_buffer("log_decay", torch.tensor(decays), persistent=False)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        start = None if state is None else state["position"]
        o, matrix = lightning_attention(
            *self._project(x, token_positions(x, start, cu_seqlens)),
            log_decay=self.log_decay,
            scale=self.key_dim**-0.5,
            **carried(state, "matrix", cu_seqlens),
        )
        if state is not None:
            state = {"matrix": matrix, "position": next_positions(x, start, cu_seqlens)}
        return self._read(o, x), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        q, k, v = self._project(x, state["position"])
        o = lightning_step(q, k, v, state["matrix"], log_decay=self.log_decay, scale=self.key_dim**-0.5)
        state["position"] += 1
        return self._read(o, x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {
            "matrix": TensorSpec((batch, self.num_heads, self.key_dim, self.value_dim)),
            "position": TensorSpec((batch,), torch.int64),
        }

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and 8 n K per value channel for the recurrence, the convention of paper 000."""
        return super().flops_paper(seq_len) + 8.0 * seq_len * self.num_heads * self.value_dim * self.key_dim

    def tp_plan(self) -> dict[str, str]:
        plan = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj"), "colwise")
        return plan | {"rope": "whole", "log_decay": "split", "out_proj": "rowwise"}

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q and k, rotated, and v, [..., H, K or V]."""
        q, k, v = (proj(x).unflatten(-1, (self.num_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.rope(q, positions), self.rope(k, positions), v

    def _read(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).unflatten(-1, (self.num_heads, -1))
        return self.out_proj(norm_and_gate(self.norm, o, gate, "silu").flatten(-2))
