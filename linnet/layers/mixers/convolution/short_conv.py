"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404).

[B, C, v] = x W; y = (C * conv3(B * v)) W_o, with a causal convolution of each channel and no activation. It sees
`conv_width` tokens, so other layers must reach further back: LFM2 has it beside attention.
"""

from pydantic import Field
from torch import Tensor, nn

from linnet.layers.base import LayerConfig, LayerContext, State, TensorSpec, last_linear, register_mixer
from linnet.layers.short_conv import ConvolvedMixer, ShortConv, short_convolution_spec


class ShortConvConfig(LayerConfig):
    """Options of `short_conv`."""

    conv_width: int = Field(3, ge=2, description="tokens that the convolution sees")
    bias: bool = Field(False, description="biases of all projections and of the convolution")


@register_mixer("short_conv", ShortConvConfig, "lfm2", "lfm", "conv", "short_convolution")
class ShortConvMixer(ConvolvedMixer):
    """x [B, T, D] -> [B, T, D]; the state is the last inputs of the convolution, [B, W - 1, D]."""

    def __init__(self, config: ShortConvConfig, context: LayerContext):
        super().__init__()
        self.config, self.channels = config, context.d_model
        d_model = context.d_model
        bias = config.bias or context.bias_qkv
        self.write_proj, self.read_proj, self.in_proj = (nn.Linear(d_model, d_model, bias=bias) for _ in range(3))
        self.conv = ShortConv(d_model, config.conv_width, bias=config.bias)
        self.out_proj = last_linear(d_model, d_model, bias=config.bias or context.bias_all)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        before = None if state is None else state["conv"]
        y, inputs = self.conv(self.write_proj(x) * self.in_proj(x), before, cu_seqlens)
        return self.out_proj(self.read_proj(x) * y), None if state is None else {"conv": inputs}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y = self.conv.step(self.write_proj(x) * self.in_proj(x), state["conv"])
        return self.out_proj(self.read_proj(x) * y), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {"conv": short_convolution_spec(batch, self.channels, self.conv.width)}

    def flops(self, seq_len: int) -> float:
        """Returns the FLOPs of the convolution, 2 per weight and token."""
        return 2.0 * seq_len * self.conv.weight.numel()

    def tp_plan(self) -> dict[str, str]:
        plan = dict.fromkeys(("write_proj", "read_proj", "in_proj"), "colwise")
        return plan | {"conv": "split", "out_proj": "rowwise"}
