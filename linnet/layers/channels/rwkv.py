"""The channel mixer of RWKV-7 (Peng et al. 2025, arXiv:2503.14456): y_t = relu((x_t + mu (x_{t-1} - x_t)) W_1)^2 W_2.

That of RWKV-4 (Peng et al. 2023, arXiv:2305.13048; `receptance: true`) multiplies it by sigmoid(x_r W_r), with a share
mu_r of its own for x_r; W_r starts at zero.

It looks at the token before, so it is a `Mixer` in the place of a channel mixer, with a state of one input.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import added
from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, last_linear, register_channel
from linnet.layers.short_conv import short_convolution_spec, token_shift, token_shift_step
from linnet.ops.tensor_parallel import share


class RwkvConfig(LayerConfig):
    """Options of `rwkv`."""

    inner: int = Field(0, ge=0, description="inner width; 0 means four times the model width")
    receptance: bool = added(False, description="a sigmoid gate of the output, as in RWKV-4")


@register_channel("rwkv", RwkvConfig, "rwkv_channel_mixing", "cmix")
class Rwkv(Mixer):
    """x [B, T, D] -> [B, T, D], state [B, 1, D]: the last input. W_1 starts orthogonal and W_2 at zero."""

    sequence_parallel = True
    tp_counts = ("inner",)

    def __init__(self, config: RwkvConfig, context: LayerContext):
        super().__init__()
        self.d_model, self.inner = context.d_model, config.inner or 4 * context.d_model
        channel = torch.arange(self.d_model) / self.d_model
        self.x_k = nn.Parameter(1 - channel ** (1 - context.layer_index / context.num_layers) ** 4)
        self.up_proj = nn.Linear(self.d_model, self.inner, bias=context.bias_all)
        self.down_proj = last_linear(self.inner, self.d_model, bias=context.bias_all)
        self.up_proj.orthogonal = 1.0
        self.down_proj.starts_zero = True
        self.receptance = config.receptance
        if config.receptance:
            rest = 1 - context.layer_index / context.num_layers
            self.x_k, self.x_r = (nn.Parameter(1 - channel**rest) for _ in range(2))
            self.r_proj = nn.Linear(self.d_model, self.d_model, bias=context.bias_all)
            self.r_proj.starts_zero = True

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        delta, last = token_shift(x, None if state is None else state["shift"], cu_seqlens)
        return self._mix(x, delta), None if state is None else {"shift": last}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._mix(x, token_shift_step(x, state["shift"])), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {"shift": short_convolution_spec(batch, self.d_model, 2)}

    def tp_plan(self) -> dict[str, str]:
        plan = {"x_k": "partial", "up_proj": "colwise", "down_proj": "rowwise"}
        return plan | {"x_r": "partial", "r_proj": "whole"} if self.receptance else plan

    def _mix(self, x: Tensor, delta: Tensor) -> Tensor:
        y = self.down_proj(F.relu(self.up_proj(torch.addcmul(x, delta, self.x_k.to(x.dtype)))).square())
        if not self.receptance:
            return y
        return y * self.r_proj(share(torch.addcmul(x, delta, self.x_r.to(x.dtype)), self.tp)).sigmoid()
