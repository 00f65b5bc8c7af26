"""RWKV-7 (Peng et al. 2025, arXiv:2503.14456). With d_t = x_{t-1} - x_t and x_c = x + mu_c d for c = r, w, k, v, a, g:

    r, k0, v = x_r W_r, x_k W_k, x_v W_v                log w = -e^(-1/2) sigmoid(w0 + tanh(x_w W_w1) W_w2)
    a = sigmoid(a0 + x_a W_a1 W_a2)                     gate = sigmoid(x_g W_g1) W_g2
    v <- v + (v_first - v) sigmoid(v0 + x_v W_v1 W_v2)  in all layers but the first, whose v is v_first
    kappa = l2(k0 k_k) per head,                        k = k0 (1 + (a - 1) k_a)
    S_t = diag(w_t) S_{t-1} - (kappa a)^T (kappa S_{t-1}) + k^T v,   y_t = r_t S_t

Each head of y is normed, with a gain and a bias per channel; then (sum over the head of r k r_k) v is added, the gate
multiplies, and W_o projects. Without causality every layer has values of its own. A layer that is called alone and is
not the first has v_first = 0.

Weights start as in flash-linear-attention's layer: decays, rates and the shares mu depend on channel and depth, W_r and
W_v are orthogonal, W_k is orthogonal with a gain of 0.1, and W_o and the first factors of the low ranks are zero.
"""

import math

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.norm import build_norm
from linnet.layers.output import check_heads
from linnet.layers.short_conv import short_convolution_spec, token_shift, token_shift_step
from linnet.ops import dplr_rule, dplr_step
from linnet.ops.chunks import at_least_float32
from linnet.ops.norm import unit_norm

SHIFTS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}  # exponents of the initial shares mu
NORM_EPS = 1e-5  # per channel of a head


class Rwkv7Config(LayerConfig):
    """Options of `rwkv7`. The default ranks are those of the published models of 0.1B, 1.5B and 2.9B."""

    num_heads: int = Field(4, ge=1, description="heads; must divide d_model. Published models have heads of 64")
    decay_rank: int = Field(0, ge=0, description="rank of the decay; 0 is 1.8 sqrt(d_model), a multiple of 32")
    rate_rank: int = Field(0, ge=0, description="rank of the rate a; 0 is 1.8 sqrt(d_model), a multiple of 32")
    value_rank: int = Field(
        0, ge=0, description="rank of the share of the first layer's values; 0 is 1.3 sqrt(d_model), a multiple of 32"
    )
    gate_rank: int = Field(0, ge=0, description="rank of the gate; 0 is 0.6 d_model^0.8, a multiple of 32")

    def check(self, context: LayerContext) -> list[str]:
        return check_heads(context.d_model, self.num_heads)


class LowRank(nn.Module):
    """act(x W_1) W_2, with W_1 zero and W_2 orthogonal at the start."""

    def __init__(self, width: int, rank: int, default: float, activation: nn.Module | None = None):
        super().__init__()
        rank = rank or max(32, 32 * round(default / 32))
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.activation = activation or nn.Identity()
        self.down.starts_zero, self.up.orthogonal = True, 0.1
        self.up.mup_roles = {"weight": "vector"}  # the rank does not grow with the width

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.activation(self.down(x)))


@register_mixer("rwkv7", Rwkv7Config, "rwkv", "goose", "rwkv7_goose")
class Rwkv7(Mixer):
    """x [B, T, D] -> [B, T, D]; state [B, H, K, K] and the last input, [B, 1, D]."""

    sequence_parallel = mixes_state = True
    shares_values = True
    full_precision = ("w0",)

    def __init__(self, config: Rwkv7Config, context: LayerContext):
        super().__init__()
        self.refuse_options(config, context)
        width, bias = context.d_model, context.bias_qkv
        self.d_model, self.num_heads, self.head_dim = width, config.num_heads, width // config.num_heads
        depth = context.layer_index / context.num_layers
        line = torch.arange(width) / max(1, width - 1)  # from 0 to 1
        zigzag = 2 * torch.arange(self.head_dim) / max(1, self.head_dim - 1) - 1
        zigzag = (zigzag * zigzag.abs()).repeat(self.num_heads)
        for name, exponent in SHIFTS.items():
            share = 1 - (torch.arange(width) / width) ** (exponent * (1 - depth))
            self.register_parameter(f"x_{name}", nn.Parameter(share))
        bend = 1 + (context.layer_index / max(1, context.num_layers - 1)) ** 0.3
        self.w0 = nn.Parameter(6 * line**bend - 5.5 + 2.5 * zigzag)
        self.a0 = nn.Parameter(0.4 * (line - 0.5) + 0.3 * zigzag - 0.19)
        self.k_k, self.k_a = nn.Parameter(0.76 - 0.1 * line), nn.Parameter(torch.full((width,), 1.02))
        self.r_k = nn.Parameter(torch.full((width,), -0.04))
        self.r_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.r_proj.orthogonal, self.k_proj.orthogonal, self.v_proj.orthogonal = 1.0, 0.1, 1.0
        self.decay = LowRank(width, config.decay_rank, 1.8 * math.sqrt(width), nn.Tanh())
        self.rate = LowRank(width, config.rate_rank, 1.8 * math.sqrt(width))
        self.gate = LowRank(width, config.gate_rank, 0.6 * width**0.8, nn.Sigmoid())
        self.value: LowRank | None = None
        if context.causal and context.mixer_index:
            self.value = LowRank(width, config.value_rank, 1.3 * math.sqrt(width))
            self.v0 = nn.Parameter(0.93 - 0.4 * line)
        self.norm = build_norm("layernorm", self.head_dim, NORM_EPS * self.head_dim, affine=False)
        self.norm_weight = nn.Parameter(torch.full((width,), ((context.layer_index + 1) / context.num_layers) ** 0.7))
        self.norm_bias = nn.Parameter(torch.zeros(width))
        self.out_proj = last_linear(width, width, bias=context.bias_all)
        self.out_proj.starts_zero = True

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        values: list[Tensor] | None = None,
    ):
        before = {} if state is None else state
        delta, last = token_shift(x, before.get("shift"), cu_seqlens)
        *heads, gate = self._project(x, delta, values)
        o, matrix = dplr_rule(*heads, **carried(state, "matrix", cu_seqlens))
        return self._read(o, *heads[:3], gate), None if state is None else {"matrix": matrix, "shift": last}

    def step(self, x: Tensor, state: State, values: list[Tensor] | None = None) -> tuple[Tensor, State]:
        *heads, gate = self._project(x, token_shift_step(x, state["shift"]), values)
        return self._read(dplr_step(*heads, state["matrix"]), *heads[:3], gate), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        matrix = TensorSpec((batch, self.num_heads, self.head_dim, self.head_dim))
        return {"matrix": matrix, "shift": short_convolution_spec(batch, self.d_model, 2)}

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and 12 n K per value channel for the recurrence: the 8 of gated linear attention
        in the convention of paper 000, and 4 for what a token reads and adds."""
        return super().flops_paper(seq_len) + 12.0 * seq_len * self.num_heads * self.head_dim**2

    def tp_plan(self) -> dict[str, str]:
        low_ranks = ("decay", "rate", "gate", *(() if self.value is None else ("value",)))
        plan = dict.fromkeys([f"x_{name}" for name in SHIFTS] + [f"{name}.down" for name in low_ranks], "partial")
        plan |= dict.fromkeys(["r_proj", "k_proj", "v_proj"] + [f"{name}.up" for name in low_ranks], "colwise")
        plan |= dict.fromkeys(("w0", "a0", "k_k", "k_a", "r_k", "norm_weight", "norm_bias"), "split")
        return plan | ({} if self.value is None else {"v0": "split"}) | {"out_proj": "rowwise"}

    def _project(self, x: Tensor, delta: Tensor, values: list[Tensor] | None) -> list[Tensor]:
        """Returns r, k, v, the log-decay, the vectors that write and read, [..., H, K] each, and the gate."""
        r, w, k, v, a, g = (torch.addcmul(x, delta, getattr(self, f"x_{name}").to(x.dtype)) for name in SHIFTS)
        log_decay = at_least_float32(self.decay(w)) + at_least_float32(self.w0)
        log_decay = -math.exp(-0.5) * log_decay.sigmoid()
        rate = (self.rate(a) + self.a0).sigmoid()
        share = None if self.value is None else (self.value(v) + self.v0).sigmoid()
        r, k, v = self.r_proj(r), self.k_proj(k), self.v_proj(v)
        if share is not None:
            first = values[0] if values else torch.zeros_like(v)
            v = (v + (first - v) * share).to(v.dtype)
        elif values is not None:
            values.append(v)
        heads = (self.num_heads, self.head_dim)
        kappa = unit_norm((k * self.k_k).unflatten(-1, heads)).to(r.dtype)
        k = (k * (1 + (rate - 1) * self.k_a)).to(r.dtype)
        r, k, v, log_decay, rate = (y.unflatten(-1, heads) for y in (r, k, v, log_decay, rate))
        return [r, k, v, log_decay, (-kappa * rate).to(r.dtype), kappa, self.gate(g)]

    def _read(self, o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        y = self.norm(o).flatten(-2) * self.norm_weight + self.norm_bias
        direct = (r * k * self.r_k.unflatten(-1, r.shape[-2:])).sum(-1, keepdim=True) * v
        return self.out_proj((y + direct.flatten(-2)) * gate)
