"""Mamba-3 with one input and one output per head (SISO): Mamba-2 without a convolution, whose state turns.

z, x, B, C = u W_z, u W_x, u W_B, u W_C; k = turn(RMSNorm(B) + b_B), q = turn(RMSNorm(C) + b_C), biases per head, turned
in pairs of neighbours by angles theta_t = theta_{t-1} + pi tanh(u W_theta) dt; dt = softplus(u W_dt + b_dt), l =
sigmoid(u W_l), A = -max(eta(u W_A), 1e-4) with eta(x) = 1 + x above 0 and 1 / (1 - x) below, per head.

A token adds a mean of its own product and that of the token before it, a trapezoid in place of a step:

    h_t = exp(A dt) (h_{t-1} + (1 - l) dt k_{t-1}^T v_{t-1}) + l dt k_t^T v_t, y = q h_t + D v, out = (y silu(z)) W_out

Token j reaches a later one with l_j dt_j + (1 - l_{j+1}) dt_{j+1}, and itself with l_j dt_j alone. So the recurrence is
`linnet.ops.ssd` of values with that weight, less what it gives each token of itself that belongs to the next.

Equations as in the mixer `mamba3` of state-spaces/mamba.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import Epsilon
from linnet.layers.base import LayerContext, State, TensorSpec, last_linear, register_mixer
from linnet.layers.delta import draw_steps
from linnet.layers.mixers.diagonal.mamba2 import HeadsConfig, HeadsMixer
from linnet.layers.norm import build_norm
from linnet.ops import gated_activation, sequence, ssd, ssd_step
from linnet.ops.chunks import at_least_float32
from linnet.ops.spans import split_rows

SLOWEST = 1e-4  # of -A


class Mamba3Config(HeadsConfig):
    """Options of `mamba3`."""

    rope_fraction: Literal[0.5, 1.0] = Field(0.5, description="share of the states that turn")
    norm_eps: Epsilon = Field(1e-5, description="epsilon of the norms of B and C")

    def check(self, context: LayerContext) -> list[str]:
        if self.angles:
            return super().check(context)
        return [*super().check(context), f"state: {self.state} has no pair to turn; use a multiple of 4"]

    @property
    def angles(self) -> int:
        """Returns the number of pairs of states that turn."""
        return round(self.state * self.rope_fraction) // 2


@register_mixer("mamba3", Mamba3Config)
class Mamba3(HeadsMixer):
    """x [B, T, D] -> [B, T, D], state [B, H, N, P], the angles [B, H, A] of the last token, and its k and values."""

    full_precision = ("dt_bias", "skip")

    def __init__(self, config: Mamba3Config, context: LayerContext):
        super().__init__(config, context)
        d_model, heads = context.d_model, self.num_heads
        self.A_proj, self.share_proj = (nn.Linear(d_model, heads, bias=context.bias_all) for _ in range(2))
        self.angle_proj = nn.Linear(d_model, config.angles, bias=context.bias_all)
        self.B_norm, self.C_norm = (build_norm("rmsnorm", config.state, config.norm_eps) for _ in range(2))
        self.B_bias, self.C_bias = (nn.Parameter(torch.ones(heads, config.state)) for _ in range(2))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        draw_steps(self.dt_bias)
        self.skip = nn.Parameter(torch.ones(heads))
        self.out_proj = last_linear(config.channels(d_model), d_model, bias=context.bias_all)
        self.out_proj.counts_branches = True

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        dt, log_decay, share = self._steps(x)
        rows, late, values = _Rows(x, cu_seqlens), (1 - share) * dt, self._values(x)
        theta = rows.sum_up(self._turns(x, dt), None if state is None else state["angle"])
        q, k = self._keys(x, theta)
        following = rows.following(late)
        initial = None
        if state is not None:
            before = state["k"][..., None] * state["v"][..., None, :]
            initial = state["ssm"] + rows.first(late)[..., None, None] * before
        itself = (q * k).sum(-1, dtype=dt.dtype) * following
        y, ssm = ssd(
            q,
            k,
            values,
            log_decay,
            times=share * dt + following,
            skip=self.skip - itself,
            initial_state=initial,
            output_final_state=state is not None,
            cu_seqlens=cu_seqlens,
        )
        y = self._read(y, x)
        if state is None:
            return y, None
        ends = {name: rows.last(z, state[name]) for name, z in (("angle", theta), ("k", k), ("v", values))}
        return y, {"ssm": ssm} | ends

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (dt, log_decay, share), values = self._steps(x), self._values(x)
        state["angle"].copy_((state["angle"] + self._turns(x, dt)).remainder(2 * math.pi))
        late = ((1 - share) * dt)[..., None, None]
        state["ssm"].add_(late * state["k"][..., None] * state["v"][..., None, :])
        q, k = self._keys(x, state["angle"])
        y = ssd_step(q, k, ((share * dt)[..., None] * values).to(values.dtype), log_decay, state["ssm"])
        state["k"].copy_(k)
        state["v"].copy_(values)
        return self._read((y + self.skip[:, None] * values).to(y.dtype), x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        heads, states = (batch, self.num_heads), self.config.state
        return {
            "ssm": TensorSpec((*heads, states, self.head_dim)),
            "angle": TensorSpec((*heads, self.config.angles), counted=0),  # a position, which the data moves on
            "k": TensorSpec((*heads, states), counted=0),
            "v": TensorSpec((*heads, self.head_dim), counted=0),
        }

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and 8 n N per channel for the recurrence, the convention of paper 000."""
        weights = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        return 2.0 * seq_len * (weights + 4 * self.num_heads * self.head_dim * self.config.state)

    def tp_plan(self) -> dict[str, str]:
        """Splits by heads, and by groups with their B and C if there are several; one group is on all ranks."""
        plan = dict.fromkeys(("gate_proj", "in_proj", "dt_proj", "A_proj", "share_proj"), "colwise")
        plan |= dict.fromkeys(("B_bias", "C_bias", "dt_bias", "skip"), "split")
        plan |= dict.fromkeys(("B_proj", "C_proj"), "colwise" if self.config.num_groups > 1 else "partial")
        return plan | dict.fromkeys(("angle_proj", "B_norm", "C_norm"), "partial") | {"out_proj": "rowwise"}

    def _values(self, x: Tensor) -> Tensor:
        return self.in_proj(x).unflatten(-1, (self.num_heads, -1))

    def _steps(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dt, log-decays and a token's own share of its step, [..., H] each, at least in float32."""
        dt = F.softplus(at_least_float32(self.dt_proj(x)) + at_least_float32(self.dt_bias))
        rate = at_least_float32(self.A_proj(x))
        rate = torch.where(rate >= 0, 1 + rate, 1 / (1 - rate.clamp(max=0))).clamp(min=SLOWEST)
        return dt, -rate * dt, at_least_float32(self.share_proj(x)).sigmoid()

    def _turns(self, x: Tensor, dt: Tensor) -> Tensor:
        """Returns by how much the pairs of states of a token turn, [..., H, A]."""
        return math.pi * at_least_float32(self.angle_proj(x)).tanh()[..., None, :] * dt[..., None]

    def _keys(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q and k [..., H, N], turned by theta [..., H, A]."""
        cos, sin = theta.cos(), theta.sin()
        turned = []
        for proj, norm, bias in (
            (self.C_proj, self.C_norm, self.C_bias),
            (self.B_proj, self.B_norm, self.B_bias),
        ):
            y = norm(proj(x).unflatten(-1, (self.num_groups, -1)))
            y = y.repeat_interleave(self.num_heads // self.num_groups, -2) + bias
            first, second = y[..., : 2 * theta.shape[-1]].unflatten(-1, (-1, 2)).unbind(-1)
            pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
            turned.append(torch.cat([pairs, y[..., 2 * theta.shape[-1] :]], -1).to(x.dtype))
        return turned[0], turned[1]

    def _read(self, y: Tensor, x: Tensor) -> Tensor:
        return self.out_proj(gated_activation(self.gate_proj(x), y.flatten(-2), "silu"))


class _Rows:
    """Where the rows of x [B, T, D], or the documents packed in one, begin and end; or those of spans of rows."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None):
        self.length, self.owner = x.shape[1], None
        self.span, self.across = sequence.span(), None
        if cu_seqlens is not None:
            self.across = None if self.span is None else sequence.rows_of(cu_seqlens, self.length)
            self.starts, self.ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
            places = torch.arange(self.length, device=x.device)
            self.owner = torch.searchsorted(self.ends, places, right=True)  # the document of each token
            self.exists = self.starts < self.ends
            self.goes_on = places + 1 < self.ends[self.owner]

    def sum_up(self, x: Tensor, before: Tensor | None) -> Tensor:
        """Angles after each token from turns x [B, T, ...] and those `before` [N, ...], between 0 and 2 pi.

        In float64, since a sum over many tokens would lose the small turns.
        """
        total = x.cumsum(1, dtype=torch.float64)
        if self.owner is not None:
            total = total - F.pad(total, (0, 0, 0, 0, 1, 0))[:, self.starts[self.owner]]
        if self.span is not None:
            before = self._before(total)
        if before is not None:
            total = total + (before[:, None] if self.owner is None else before[self.owner][None])
        return total.remainder(2 * math.pi).to(x.dtype)

    def _before(self, total: Tensor) -> Tensor:
        """The angles [N, ...] before the first tokens of a span, from those after its tokens [B, T, ...]."""
        if self.across is None:
            return sequence.exchange(total[:, -1])
        ends = total[0, (self.ends - 1).clamp(min=0)]
        over = sequence.match(self.across.passing, ends).to(ends.dtype)
        return self.across.spread_first(sequence.exchange(self.across.select_last(ends), over), len(ends))

    def following(self, x: Tensor) -> Tensor:
        """x [B, T, H] of the next token, 0 at the last one."""
        after = F.pad(x[:, 1:], (0, 0, 0, 1))
        after = after if self.owner is None else after * self.goes_on[:, None]
        if self.span is None:
            return after
        rows = split_rows(x, 0 if self.across is None else len(self.across.first))
        first = rows[:, :1] if self.across is None else rows[:, :1] * sequence.match(self.across.continued, rows)
        later = sequence.shift.call(first, self.span.name, True)  # from the span after
        return after + F.pad(later, (0, 0, rows.shape[1] - 1, 0)).view(x.shape)

    def first(self, x: Tensor) -> Tensor:
        """x [B, T, H] of the first tokens, [N, H]; 0 for an empty document."""
        if self.owner is None:
            return x[:, 0]
        return x[0, self.starts.clamp(max=self.length - 1)] * self.exists[:, None]

    def last(self, x: Tensor, before: Tensor) -> Tensor:
        """x [B, T, ...] of the last tokens, [N, ...] in the dtype of `before`; that itself for an empty document."""
        if self.owner is None:
            return x[:, -1].to(before.dtype)
        return torch.where(self.exists[:, None, None], x[0, (self.ends - 1).clamp(min=0)].to(before.dtype), before)
