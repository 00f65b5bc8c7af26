"""The plain two-layer perceptron: y = act(x W_1) W_2, with or without biases (Vaswani et al. 2017, section 3.3)."""

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from linnet.layers.base import Channel, LayerConfig, LayerContext, last_linear, register_channel
from linnet.ops.activation import ACTIVATIONS


class MlpConfig(LayerConfig):
    """Options of `mlp`."""

    inner: int = Field(0, ge=0, description="inner width; 0 means four times the model width")
    activation: Literal["silu", "sigmoid", "gelu", "relu", "relu2"] = Field(
        "gelu", description="between the two projections; relu2 is the square of relu (Nemotron-H)"
    )
    bias: bool = Field(False, description="bias of both projections")


@register_channel("mlp", MlpConfig, "ffn", "feed_forward", "feed_forward_network")
class Mlp(Channel):
    """The perceptron as a channel mixer. Its paper cost is the default of a layer: two FLOPs per weight and token."""

    def __init__(self, config: MlpConfig, context: LayerContext):
        super().__init__()
        self.inner = inner = config.inner or 4 * context.d_model
        bias = config.bias or context.bias_all
        self.activation = config.activation
        self.up_proj = nn.Linear(context.d_model, inner, bias=bias)
        self.down_proj = last_linear(inner, context.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))

    def tp_plan(self) -> dict[str, str]:
        return {"up_proj": "colwise", "down_proj": "rowwise"}
