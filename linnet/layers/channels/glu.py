"""Gated linear units: y = (act(x W_gate) * (x W_up)) W_down, without biases unless the model has `bias: all`.

`swiglu` is SiLU-gated (Shazeer 2020, arXiv:2002.05202), `sglu` has no activation (paper 001, equation 12), and `glu`
takes the activation as an option.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from linnet.config import Factor, added
from linnet.layers.base import Channel, LayerConfig, LayerContext, last_linear, register_channel
from linnet.ops.activation import gated_activation


class GluWidthConfig(LayerConfig):
    """Options of `sglu`, and common to all."""

    inner: int = Field(
        0, ge=0, description="inner width; 0 means 8/3 of the model width, rounded up to a multiple of 8"
    )
    bias: bool = added(False, description="biases of all projections, whatever the `bias` of the model says")


class SwigluConfig(GluWidthConfig):
    """Options of `swiglu`."""

    gate_scale: Factor = added(1.0, description="factor of the gate before its SiLU (Falcon-H1)")
    out_scale: Factor = added(1.0, description="factor of the output (Falcon-H1)")


class GluConfig(GluWidthConfig):
    """Options of `glu`."""

    activation: Literal["none", "silu", "sigmoid", "gelu", "relu", "relu2"] = Field(
        "sigmoid", description="on the gate branch"
    )


class GatedLinearUnit(Channel):
    """Base class of the three gated linear units."""

    activation = "none"
    gate_scale = out_scale = 1.0

    def __init__(self, config: GluWidthConfig, context: LayerContext):
        super().__init__()
        d_model, bias = context.d_model, config.bias or context.bias_all
        self.inner = inner = config.inner or default_inner(d_model)
        self.gate_proj = nn.Linear(d_model, inner, bias=bias)
        self.up_proj = nn.Linear(d_model, inner, bias=bias)
        self.down_proj = last_linear(inner, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x) if self.gate_scale == 1.0 else self.gate_proj(x) * self.gate_scale
        y = self.down_proj(gated_activation(gate, self.up_proj(x), self.activation))
        return y if self.out_scale == 1.0 else y * self.out_scale

    def flops_paper(self, seq_len: int) -> float:
        """Returns 6ndg + ng with the ideal g = 8d/3, for any real width (paper 000, A.1)."""
        d_model = self.gate_proj.in_features
        return seq_len * (16.0 * d_model**2 + 8.0 * d_model / 3.0)

    def flops_004(self, seq_len: int) -> float:
        """Returns 6ndg with the real width g (paper 004, C.4.1)."""
        return super().flops_paper(seq_len)

    def tp_plan(self) -> dict[str, str]:
        return {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def default_inner(d_model: int) -> int:
    """Returns 8/3 of the model width, rounded up to a multiple of 8."""
    return -(-8 * d_model // 24) * 8


@register_channel("swiglu", SwigluConfig, "gated_mlp", "silu_glu")
class SwiGLU(GatedLinearUnit):
    """Gated by SiLU."""

    activation = "silu"

    def __init__(self, config: SwigluConfig, context: LayerContext):
        super().__init__(config, context)
        self.gate_scale, self.out_scale = config.gate_scale, config.out_scale


@register_channel("sglu", GluWidthConfig)
class SGLU(GatedLinearUnit):
    """A gated linear unit without an activation."""

    activation = "none"


@register_channel("glu", GluConfig)
class GLU(GatedLinearUnit):
    """A gated linear unit with the activation of the option `activation`."""

    def __init__(self, config: GluConfig, context: LayerContext):
        super().__init__(config, context)
        self.activation = config.activation
