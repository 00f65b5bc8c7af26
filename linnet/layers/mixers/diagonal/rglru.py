"""RG-LRU: the real-gated linear recurrent unit of Griffin and Hawk, in their recurrent block (De et al. 2024,
arXiv:2402.19427; paper 002, Table 7).

x = conv4(u W_x), a convolution of each channel with bias; r = sigmoid(x W_r + b_r), i = sigmoid(x W_i + b_i), with W_r
and W_i block-diagonal; a_t = sigmoid(Lambda)^(8 r_t) per channel; h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t;
y = (gelu(u W_g) * h) W_o.

Lambda starts so that a^8 is uniform in [0.9, 0.999] at r = 1, as the paper says (in the released code a is). Departure:
the released code gives the first token of a document the weight 1 in place of sqrt(1 - a^2); here it has that of the
paper's equation.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.base import LayerConfig, LayerContext, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.output import check_heads
from linnet.layers.short_conv import ConvolvedMixer, ShortConv, short_convolution_spec
from linnet.ops import diagonal_scan, diagonal_step, gated_activation
from linnet.ops.chunks import at_least_float32

EXPONENT = 8.0  # c of the paper
SLOWEST, FASTEST = 0.999, 0.9  # a^c at initialisation
SMALLEST = 1e-12  # of 1 - a^2, whose root has no finite gradient at 0


class RglruConfig(LayerConfig):
    """Options of `rglru`."""

    grows = (*LayerConfig.grows, "channels")

    num_heads: int = Field(4, ge=1, description="blocks of the gates' matrices; must divide the channels")
    channels: int = Field(
        0, ge=0, description="channels of the recurrence; 0 is 4/3 d_model, each block rounded up to a multiple of 8"
    )
    conv_width: int = Field(4, ge=2, description="tokens that the convolution sees")

    def width(self, d_model: int) -> int:
        """Returns the channels of a block."""
        return self.channels // self.num_heads or -(-4 * d_model // (24 * self.num_heads)) * 8

    def check(self, context: LayerContext) -> list[str]:
        if self.channels % self.num_heads:
            fit = f"use {self.num_heads * max(1, self.channels // self.num_heads)}"
            return [f"channels: {self.channels} is not a multiple of num_heads {self.num_heads}; {fit}"]
        return [] if self.channels else check_heads(context.d_model, self.num_heads)


@register_mixer("rglru", RglruConfig, "griffin", "hawk", "recurrent_gemma")
class Rglru(ConvolvedMixer):
    """x [B, T, D] -> [B, T, D]; the state is a number per channel and the last inputs of the convolution."""

    full_precision = ("decay_logit",)

    def __init__(self, config: RglruConfig, context: LayerContext):
        super().__init__()
        self.refuse_options(config, context)
        width, d_model = config.width(context.d_model), context.d_model
        self.config, self.num_heads, self.channels = config, config.num_heads, config.num_heads * width
        self.in_proj = nn.Linear(d_model, self.channels, bias=context.bias_qkv)
        self.gate_proj = nn.Linear(d_model, self.channels, bias=context.bias_all)
        self.conv = ShortConv(self.channels, config.conv_width, bias=True)
        self.gates = nn.Parameter(torch.randn(self.num_heads, width, 2 * width) * width**-0.5)  # W_r beside W_i
        self.gate_bias = nn.Parameter(torch.zeros(self.num_heads, 2 * width))
        log_a = torch.empty(self.channels).uniform_(FASTEST, SLOWEST).log() / EXPONENT
        self.decay_logit = nn.Parameter(log_a - (-torch.expm1(log_a)).log())
        self.out_proj = last_linear(self.channels, d_model, bias=context.bias_all)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        before = {} if state is None else state
        y, window = self.conv(self.in_proj(x), before.get("conv"), cu_seqlens)
        h, hidden = diagonal_scan(*self._gated(y), **carried(state, "hidden", cu_seqlens))
        return self._read(h, x), None if state is None else {"hidden": hidden, "conv": window}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y = self.conv.step(self.in_proj(x), state["conv"])
        return self._read(diagonal_step(*self._gated(y), state["hidden"]), x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {
            "hidden": TensorSpec((batch, self.channels)),
            "conv": short_convolution_spec(batch, self.channels, self.config.conv_width),
        }

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight of the projections and gates, and 8 n per channel for the recurrence."""
        return super().flops_paper(seq_len) + seq_len * (2.0 * self.gates.numel() + 8.0 * self.channels)

    def flops(self, seq_len: int) -> float:
        """Returns the FLOPs of the convolution, 2 per weight and token, which no matrix product or op counts."""
        return 2.0 * seq_len * self.conv.weight.numel()

    def tp_plan(self) -> dict[str, str]:
        plan = dict.fromkeys(("in_proj", "gate_proj"), "colwise") | {"out_proj": "rowwise"}
        return plan | dict.fromkeys(("conv", "gates", "gate_bias", "decay_logit"), "split")

    def _gated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs and the log-decays of the recurrence for x [..., C], the latter at least in float32."""
        blocks = torch.einsum("...hi,hij->...hj", x.unflatten(-1, (self.num_heads, -1)), self.gates)
        r, i = (at_least_float32(blocks) + at_least_float32(self.gate_bias)).sigmoid().chunk(2, -1)
        log_decay = -EXPONENT * F.softplus(-at_least_float32(self.decay_logit)) * r.flatten(-2)
        scale = (-torch.expm1(2.0 * log_decay)).clamp(min=SMALLEST).sqrt()
        return (scale * i.flatten(-2) * x).to(x.dtype), log_decay

    def _read(self, h: Tensor, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.out_proj(gated_activation(gate, h.to(gate.dtype), "gelu"))
