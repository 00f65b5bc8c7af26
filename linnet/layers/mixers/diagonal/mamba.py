"""Mamba, the selective state space S6 (Gu and Dao 2023, arXiv:2312.00752), as the MAD benchmark has it (paper 004).

[x, z] = u W_in; x = silu(conv4(x)), a causal convolution of each channel; (dt, B, C) = x W_x;
delta = softplus(W_dt dt + b_dt), A = -exp(A_log); s_t = exp(delta A) s_{t-1} + delta B x, y = C s_t + D x;
out = (y * silu(z)) W_out. By default b_dt is the only bias: the projections and the convolution have none.

Only the three large projections and W_x are linear layers, whose weights the model draws. W_dt and b_dt keep their own
initialisation, b_dt = softplus^-1(exp(U(ln 1e-3, ln 1e-1))); otherwise all channels would forget at the same rate.

Vim (Zhu et al. 2024, arXiv:2401.09417; `weights_per_direction: true`, without causality): the projections and the gate
are computed once, and the scans from the end have a convolution, W_x, W_dt, A and D of their own.
"""

import math

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import added
from linnet.layers.base import LayerConfig, LayerContext, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.delta import draw_steps
from linnet.layers.non_causal import refuse_state
from linnet.layers.norm import RMSNorm
from linnet.layers.positions import Grid
from linnet.layers.short_conv import ConvolvedMixer, ShortConv, short_convolution_spec
from linnet.ops import gated_activation, selective_scan, selective_step
from linnet.ops.scans import FORWARD, ORDERS, in_orders


class MambaConfig(LayerConfig):
    """Options of `mamba`."""

    expand: int = Field(2, ge=1, description="channels of the recurrence over the model width")
    state: int = Field(16, ge=1, description="states per channel (MAD: 4)")
    dt_rank: int = Field(0, ge=0, description="rank of the projection to delta; 0 is d_model / 16, rounded up")
    conv_width: int = Field(4, ge=2, description="tokens that the convolution sees")
    conv_bias: bool = Field(False, description="a bias after the convolution, as in the models of the Mamba paper")
    norms: bool = added(False, description="RMSNorms of dt, B and C (Jamba)")
    weights_per_direction: bool = added(
        False, description="weights of their own for the scans from the end, without causality (Vim)"
    )

    def check(self, context: LayerContext) -> list[str]:
        setting = "a causal model" if context.causal else "scan: forward" if context.scan == "forward" else ""
        if not (self.weights_per_direction and setting):
            return []
        return [f"weights_per_direction: true has no effect with {setting}, which has one direction; leave it out"]


@register_mixer("mamba", MambaConfig, "mamba1", "s6", "selective_ssm")
class Mamba(ConvolvedMixer):
    """x [B, T, D] -> [B, T, D], state [B, C, N] and the inputs that the convolution looks back to, [B, W - 1, C]."""

    full_precision = ("dt_bias", "A_log", "skip")
    mup_roles = {"dt_weight": "hidden"}

    def __init__(self, config: MambaConfig, context: LayerContext):
        super().__init__()
        self.refuse_options(config, context)
        self.config, self.d_model = config, context.d_model
        self.channels = config.expand * context.d_model
        self.dt_rank = config.dt_rank or math.ceil(context.d_model / 16)
        self.in_proj = nn.Linear(context.d_model, self.channels, bias=context.bias_qkv)
        self.gate_proj = nn.Linear(context.d_model, self.channels, bias=context.bias_all)
        self.conv = ShortConv(self.channels, config.conv_width, config.conv_bias, silu=True)
        self.select_proj = nn.Linear(self.channels, self.dt_rank + 2 * config.state, bias=context.bias_all)
        if config.norms:
            eps = context.norm_eps or 1e-6
            self.dt_norm, self.B_norm, self.C_norm = (
                RMSNorm(size, eps) for size in (self.dt_rank, config.state, config.state)
            )
        self.dt_weight = nn.Parameter(torch.empty(self.channels, self.dt_rank))
        self.dt_bias = nn.Parameter(torch.empty(self.channels))
        self.A_log = nn.Parameter(torch.arange(1, config.state + 1).float().log().repeat(self.channels, 1))
        self.skip = nn.Parameter(torch.ones(self.channels))
        self.out_proj = last_linear(self.channels, context.d_model, bias=context.bias_all)
        self.reset_steps()
        self.orders, self.scan_sum = FORWARD, context.scan_sum
        self.backwards: Mamba | None = None
        if config.weights_per_direction:
            self.orders, self.non_causal, self.takes_grid = ORDERS[context.scan], "two_scans", True
            self.backwards = Mamba(config.model_copy(update={"weights_per_direction": False}), context)
            for name in ("in_proj", "gate_proj", "out_proj"):  # those of this layer
                delattr(self.backwards, name)

    @torch.no_grad()
    def reset_steps(self) -> None:
        """Draws W_dt from U(-rank^-1/2, rank^-1/2), and b_dt so that delta is log-uniform in [1e-3, 1e-1]."""
        self.dt_weight.uniform_(-(self.dt_rank**-0.5), self.dt_rank**-0.5)
        draw_steps(self.dt_bias)

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        z, x = self.gate_proj(x), self.in_proj(x)
        if self.backwards is None:
            y, state = self._scan(x, state, cu_seqlens)
        else:
            refuse_state(state)
            y = self._scan_both_ways(x, cu_seqlens, grid)
        return self.out_proj(gated_activation(z, y, "silu")), state

    def _scan_both_ways(self, x: Tensor, cu_seqlens: Tensor | None, grid: Grid | None) -> Tensor:
        """Returns the mean (the sum with `scan_sum`) of the scans of x [B, T, C], each direction by its weights."""
        outputs = []
        for layer in (self, self.backwards):
            orders = tuple(order for order in self.orders if order.backwards == (layer is not self))

            def attend(x: Tensor, cu_seqlens: Tensor | None, layer=layer) -> Tensor:
                return layer._scan(x, None, cu_seqlens)[0]

            sides, prefix = (None, 0) if grid is None else (grid.sides, grid.prefix)
            outputs += in_orders(attend, x, cu_seqlens=cu_seqlens, orders=orders, sides=sides, prefix=prefix)
        total = sum(outputs[1:], outputs[0])
        return total if self.scan_sum else total / len(outputs)

    def _scan(self, x: Tensor, state: State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, State | None]:
        """Returns y [B, T, C] of projected inputs [B, T, C], and the state after them."""
        x, inputs = self.conv(x, None if state is None else state["conv"], cu_seqlens)
        y, states = selective_scan(
            x, *self._select(x), self.skip, delta_bias=self.dt_bias, **carried(state, "ssm", cu_seqlens)
        )
        return y, None if state is None else {"conv": inputs, "ssm": states}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        z = self.gate_proj(x)
        x = self.conv.step(self.in_proj(x), state["conv"])
        delta, A, B, C = self._select(x)
        delta = F.softplus(delta.to(A.dtype) + self.dt_bias.to(A.dtype))
        y = selective_step(x, delta, A, B, C, self.skip, state["ssm"])
        return self.out_proj(gated_activation(z, y, "silu")), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {
            "conv": short_convolution_spec(batch, self.channels, self.config.conv_width),
            "ssm": TensorSpec((batch, self.channels, self.config.state)),
        }

    def flops_paper(self, seq_len: int) -> float:
        """Paper 004, C.4, with E = expand, S = state and R = dt_rank, in the order of the equations above:

        4 L D^2 E + 6 L D E + 2 L D E (R + 2 S) + 2 L D E R + 2 L D E S + 2 L D^2 E

        All but the terms with D^2 once per scan.
        """
        width, state, rank = self.channels, self.config.state, self.dt_rank
        scan = 3 + (rank + 2 * state) + rank + state
        return 2.0 * seq_len * width * (3 * self.d_model + len(self.orders) * scan)

    def flops(self, seq_len: int) -> float:
        """Returns the FLOPs of the convolution, 2 per weight and token, which no matrix product or op counts."""
        return 2.0 * seq_len * self.conv.weight.numel() * len(self.orders)

    def tp_plan(self) -> dict[str, str]:
        """Splits by channel of the recurrence, and with it the convolution and all parameters of a channel."""
        plan = dict.fromkeys(("in_proj", "gate_proj"), "colwise")
        plan |= dict.fromkeys(("conv", "A_log", "skip", "dt_weight", "dt_bias"), "split")
        norms = ("dt_norm", "B_norm", "C_norm") if self.config.norms else ()
        return plan | dict.fromkeys(("select_proj", "out_proj"), "rowwise") | dict.fromkeys(norms, "partial")

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns delta (before its bias and softplus), A, B, C of x [..., channels]; A at least in float32."""
        dt, B, C = self.select_proj(x).split([self.dt_rank, self.config.state, self.config.state], -1)
        if self.config.norms:
            dt, B, C = self.dt_norm(dt), self.B_norm(B), self.C_norm(C)
        rates = -self.A_log.to(torch.promote_types(x.dtype, torch.float32)).exp()
        return F.linear(dt, self.dt_weight), rates, B, C
