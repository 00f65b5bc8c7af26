"""TPE: Toeplitz position encoding, once after the embedding (papers 003, 4.2, and 000, A.1.4).

It is a mixer before the layers: `tpe cosformer2+sglu x12`. The filter of each channel is T_j = sum_m b_m lambda_m^j, so
it runs as a recurrence of E real modes per channel: u_t = lambda u_{t-1} + x_t, y_t = sum_m b_m u_t[m]. The papers
specify neither the parametrisation nor the initialisation. Here lambda = exp(-exp(a)) with time constants log-uniform
in [1, max_time_constant], and b = 1/E, the mean over time scales. Published parameter counts agree with 128 numbers per
channel: 64 modes with learned lambda and b (`decay: learned`), or 128 with b alone.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, register_mixer
from linnet.ops import modal_convolution, modal_step


class TpeConfig(LayerConfig):
    """Options of `tpe`."""

    num_modes: int = Field(64, ge=1, description="modes E per channel")
    decay: Literal["learned", "fixed"] = Field("learned", description="not specified in the paper; fixed trains b only")
    residual: bool = Field(False, description="y = x + TPE(x); paper 000 writes y = TPE(x)")
    max_time_constant: int = Field(1024, ge=2, description="slowest mode at the start, in tokens")


@register_mixer("tpe", TpeConfig)
class Tpe(Mixer):
    """x [B, T, D] -> [B, T, D], causal, with state u [B, D, E]."""

    sequence_parallel = True
    before_layers = True
    full_precision = ("log_rate", "weight")

    def __init__(self, config: TpeConfig, context: LayerContext):
        super().__init__()
        self.config, self.d_model = config, context.d_model
        modes = config.num_modes
        time_constant = torch.logspace(0, math.log2(config.max_time_constant), modes, base=2.0)
        rate = -time_constant.log().expand(self.d_model, modes).contiguous()
        if config.decay == "learned":
            self.log_rate = nn.Parameter(rate)
        else:
            self.register_buffer("log_rate", rate, persistent=False)
        self.weight = nn.Parameter(torch.full((self.d_model, modes), 1.0 / modes))

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        y, modes = modal_convolution(
            x,
            -self.log_rate.exp(),
            self.weight,
            initial_state=None if state is None else state["modes"],
            output_final_state=state is not None,
            cu_seqlens=cu_seqlens,
        )
        return (x + y if self.config.residual else y), (None if state is None else {"modes": modes})

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y = modal_step(x, -self.log_rate.exp(), self.weight, state["modes"])
        return (x + y if self.config.residual else y), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {"modes": TensorSpec((batch, self.d_model, self.config.num_modes))}

    def tp_plan(self) -> dict[str, str]:
        """Returns a plan that splits nothing: each rank computes all channels, which cost little."""
        return {"log_rate": "whole", "weight": "whole"}

    def flops_paper(self, seq_len: int) -> float:
        """Returns zero: Table 1 of paper 000 omits the term 4nde (less than 0.05 %)."""
        return 0.0
