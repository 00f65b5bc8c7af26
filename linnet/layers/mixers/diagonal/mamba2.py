"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): one decay per head, on the op `linnet.ops.ssd`.

z = u W_z; x, B, C = silu(conv4(u W_x)), silu(conv4(u W_B)), silu(conv4(u W_C)), convolutions of each channel with bias;
dt = softplus(u W_dt + b_dt), A = -exp(A_log), one of each per head; h_t = exp(dt A) h_{t-1} + B^T dt x;
y = C h_t + D x; out = RMSNorm(y * silu(z)) W_out. The heads of a group share B and C, and the norm is over the channels
of a group.
"""

from math import gcd

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import Epsilon, Factor, added
from linnet.layers.base import (
    SET,
    LayerConfig,
    LayerContext,
    Mixer,
    State,
    TensorSpec,
    carried,
    last_linear,
    register_mixer,
)
from linnet.layers.delta import draw_steps, pending_tokens
from linnet.layers.norm import build_norm
from linnet.layers.short_conv import ConvolvedMixer, ShortConv, short_convolution_spec, step_all
from linnet.ops import gated_activation, rms_norm, ssd
from linnet.ops.activation import softplus_steps
from linnet.ops.projections import project
from linnet.ops.ssd import projected_ssd_step
from linnet.ops.stepping import Pending

HEAD = 64
LARGEST_RATE = 16.0  # of the decay at initialisation


class HeadsConfig(LayerConfig):
    """Options of heads that share B and C in groups."""

    unread = {("inner", SET): ("expand",)}

    expand: int = Field(2, ge=1, description="channels of the recurrence over the model width")
    inner: int = added(
        0, ge=0, description="channels of the recurrence, in place of expand x d_model; 0 is that product"
    )
    head_dim: int = Field(
        0, ge=0, description="channels of a head; 0 is 64, or the largest power of two below that divides the channels"
    )
    state: int = Field(128, ge=1, description="states per channel, the width of B and C")
    num_groups: int = Field(1, ge=1, description="groups of heads that share B and C; must divide the heads")

    def channels(self, d_model: int) -> int:
        return self.inner or self.expand * d_model

    def heads(self, d_model: int) -> tuple[int, int]:
        """Returns the number of heads, rounded down, and their width."""
        channels = self.channels(d_model)
        width = self.head_dim or gcd(HEAD, channels)
        return channels // width, width

    def check(self, context: LayerContext) -> list[str]:
        channels, (count, width) = self.channels(context.d_model), self.heads(context.d_model)
        if count * width != channels:
            fit = f"use 0 or {gcd(width, channels)}"
            origin = "inner" if self.inner else "expand x d_model"
            return [f"head_dim: {width} does not divide the {channels} channels ({origin}); {fit}"]
        if count % self.num_groups:
            fit = gcd(self.num_groups, count)
            return [f"num_groups: {self.num_groups} does not divide the {count} heads; use {fit}"]
        return []


class HeadsMixer(Mixer):
    """The projections and the counts of heads of a mixer with `HeadsConfig`.

    Args:
        bias: whether all projections have a bias, whatever the model says.
    """

    sequence_parallel = True

    def __init__(self, config: HeadsConfig, context: LayerContext, bias: bool = False):
        super().__init__()
        self.refuse_options(config, context)
        d_model, channels, keys = context.d_model, config.channels(context.d_model), config.num_groups * config.state
        self.config, self.num_groups = config, config.num_groups
        self.num_heads, self.head_dim = config.heads(d_model)
        self.tp_counts = ("num_heads", "num_groups") if config.num_groups > 1 else ("num_heads",)
        inner, gates = bias or context.bias_qkv, bias or context.bias_all
        self.gate_proj = nn.Linear(d_model, channels, bias=gates)
        self.in_proj = nn.Linear(d_model, channels, bias=inner)
        self.B_proj, self.C_proj = (nn.Linear(d_model, keys, bias=inner) for _ in range(2))
        self.dt_proj = nn.Linear(d_model, self.num_heads, bias=gates)


class Mamba2Config(HeadsConfig):
    """Options of `mamba2`."""

    unread = HeadsConfig.unread | {("norm", False): ("norm_eps",)}

    conv_width: int = Field(4, ge=2, description="tokens that the convolutions see")
    conv_bias: bool = Field(True, description="a bias after the convolutions")
    dt_limit: list[float] | None = Field(
        None, min_length=2, max_length=2, description="least and largest dt after its softplus; null: no limits"
    )
    norm: bool = Field(True, description="an RMSNorm of the output")
    norm_before_gate: bool = Field(False, description="RMSNorm(y) * silu(z) in place of RMSNorm(y * silu(z))")
    norm_eps: Epsilon = Field(1e-5, description="epsilon of the norm")
    bias: bool = added(
        False, description="biases of the projections of the input, whatever the `bias` of the model says"
    )
    out_bias: bool = added(False, description="a bias of the output projection, whatever the `bias` of the model says")
    scales: list[Factor] | None = added(
        None,
        min_length=5,
        max_length=5,
        description="factors of what the projections give: the gate z, x, B, C and dt (Falcon-H1); null: none",
    )

    def check(self, context: LayerContext) -> list[str]:
        problems = super().check(context)
        if self.dt_limit is not None and not 0 <= self.dt_limit[0] <= self.dt_limit[1]:
            problems.append(f"dt_limit: {self.dt_limit} is not a range; give [least, largest] from 0 on, or null")
        if self.norm_before_gate and not self.norm:
            problems.append("norm_before_gate: true needs the norm; set norm: true, or norm_before_gate: false")
        return problems


@register_mixer("mamba2", Mamba2Config, "ssd", "mamba2_ssd")
class Mamba2(ConvolvedMixer, HeadsMixer):
    """x [B, T, D] -> [B, T, D], state [B, H, N, P] and the last inputs of three convolutions, [B, W - 1, ...] each."""

    full_precision = ("A_log", "dt_bias", "skip")

    def __init__(self, config: Mamba2Config, context: LayerContext):
        super().__init__(config, context, config.bias)
        channels, keys = config.channels(context.d_model), config.num_groups * config.state
        self.scales = dict(zip(("gate", "x", "B", "C", "dt"), config.scales or [1.0] * 5, strict=True))
        self.x_conv, self.B_conv, self.C_conv = (
            ShortConv(width, config.conv_width, config.conv_bias, silu=True) for width in (channels, keys, keys)
        )
        self.A_log = nn.Parameter(torch.empty(self.num_heads).uniform_(1.0, LARGEST_RATE).log())
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        draw_steps(self.dt_bias)
        self.skip = nn.Parameter(torch.ones(self.num_heads))
        self.norm = build_norm("rmsnorm", channels, config.norm_eps) if config.norm else None
        self.out_proj = last_linear(channels, context.d_model, bias=config.out_bias or context.bias_all)
        self.out_proj.counts_branches = True

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        before, after, inputs = {} if state is None else state, {}, []
        products = dict(zip(("dt", "C", "B"), project(x, (self.dt_proj, self.C_proj, self.B_proj)), strict=True))
        products["x"] = self.in_proj(x)
        dt, log_decay = softplus_steps(self._scaled("dt", products["dt"]), self.A_log, self.dt_bias, self._limits)
        for name, _, conv in self._convolved():
            y, after[name] = conv(self._scaled(name[0], products[name[0]]), before.get(name), cu_seqlens)
            inputs.append(y)
        q, k, values = self._heads(*inputs)
        factors = {"times": dt, "skip": self.skip[None, None]}
        y, after["ssm"] = ssd(q, k, values, log_decay, **factors, **carried(state, "ssm", cu_seqlens))
        return self._read(y.flatten(-2), x), None if state is None else after

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        names, projections, convolutions = zip(*self._convolved(), strict=True)
        inputs = [self._scaled(name[0], proj(x)) for name, proj in zip(names, projections, strict=True)]
        q, k, values = self._heads(*step_all(convolutions, inputs, [state[name] for name in names]))
        logits, gates = self._scaled("dt", self.dt_proj(x)), (self.A_log, self.dt_bias, self.skip)
        settings = {"steps": self._limits, "pending": Pending.of(state)}
        y = projected_ssd_step(q, k, values, logits, *gates, state["ssm"], **settings)
        return self._read(y.flatten(-2), x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        keys, width = self.num_groups * self.config.state, self.config.conv_width
        return {
            "ssm": TensorSpec((batch, self.num_heads, self.config.state, self.head_dim), half=True),
            "x_conv": short_convolution_spec(batch, self.num_heads * self.head_dim, width),
            "B_conv": short_convolution_spec(batch, keys, width),
            "C_conv": short_convolution_spec(batch, keys, width),
        }

    def pending_spec(self, batch: int, tokens: int) -> dict[str, TensorSpec]:
        keys, values = (self.num_groups, self.config.state), (self.num_heads, self.head_dim)
        return pending_tokens(batch, tokens - 1, keys, values, self.B_proj.weight.dtype, "head")

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and 8 n N per channel for the recurrence, the convention of paper 000."""
        return super().flops_paper(seq_len) + 8.0 * seq_len * self.num_heads * self.head_dim * self.config.state

    def flops(self, seq_len: int) -> float:
        """Returns the FLOPs of the convolutions, 2 per weight and token, which no matrix product or op counts."""
        return 2.0 * seq_len * sum(conv.weight.numel() for _, _, conv in self._convolved())

    def tp_plan(self) -> dict[str, str]:
        """Splits by heads, and by groups with their B and C if there are several; one group is on all ranks."""
        grouped = self.config.num_groups > 1
        plan = dict.fromkeys(("gate_proj", "in_proj", "dt_proj"), "colwise")
        plan |= dict.fromkeys(("x_conv", "A_log", "dt_bias", "skip"), "split")
        plan |= dict.fromkeys(("B_proj", "C_proj"), "colwise" if grouped else "partial")
        plan |= dict.fromkeys(("B_conv", "C_conv"), "split" if grouped else "partial")
        if self.norm is not None:
            plan["norm"] = "split" if grouped else "split_norm"
        return plan | {"out_proj": "rowwise"}

    def _convolved(self) -> tuple[tuple[str, nn.Linear, ShortConv], ...]:
        """The convolutions of C, B and x with the projections before them, by the names of their states."""
        return (
            ("C_conv", self.C_proj, self.C_conv),
            ("B_conv", self.B_proj, self.B_conv),
            ("x_conv", self.in_proj, self.x_conv),
        )

    def _scaled(self, name: str, product: Tensor) -> Tensor:
        return product if self.scales[name] == 1.0 else product * self.scales[name]

    def _heads(self, C: Tensor, B: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns C and B [..., G, N], and x [..., H, P]."""
        C, B = (y.unflatten(-1, (self.num_groups, -1)) for y in (C, B))
        return C, B, x.unflatten(-1, (self.num_heads, -1))

    @property
    def _limits(self) -> tuple[float, float]:
        low, high = self.config.dt_limit or (0.0, float("inf"))
        return low, high

    def _read(self, y: Tensor, x: Tensor) -> Tensor:
        """Returns the output of the layer from that of the recurrence with what skips it, [..., H P]."""
        gate, late = self._scaled("gate", self.gate_proj(x)), self.config.norm_before_gate
        if self.norm is None:
            return self.out_proj(gated_activation(gate, y, "silu"))
        gates = {"gate_activation": "silu", "gate_first": not late}
        if self.num_groups == self.config.num_groups == 1:
            return self.out_proj(self.norm(y, gate=gate, **gates))
        groups, by_group = (z.unflatten(-1, (self.num_groups, -1)) for z in (y, gate))
        y = rms_norm(groups, eps=self.norm.eps, gate=by_group, **gates)
        return self.out_proj((y.flatten(-2) * self.norm.weight).to(gate.dtype))
