"""TPE: Toeplitz position encoding, once after the embedding (papers 003, 4.2 and eq. 8-9, and 000, A.1.4).

It is a mixer before the layers: `tpe cosformer2+sglu x12`. The filter of each channel is T_j = sum_m b_m lambda_m^j, so
it runs as a recurrence of E real modes per channel: u_t = lambda u_{t-1} + x_t, y_t = sum_m b_m u_t[m]. The papers
specify neither the parametrisation nor the initialisation. Here lambda = exp(-exp(a)) with time constants log-uniform
in [1, max_time_constant], and b = 1/E, the mean over time scales. Published parameter counts agree with 128 numbers per
channel: 64 modes with learned lambda and b (`decay: learned`), or 128 with b alone.

Without causality (MD-TPE) there is such a filter for each axis of the grid and each direction along it, and the outputs
are added: 2 directions x 32 modes x 2 numbers are the published 128 per channel and axis. Each direction has its own
filter, because one filter T_|j| is even: with LRPE, which is even too, a layer could not tell left from right. Modes
then start as averages, b = (1 - lambda)/E, with time constants up to twice the longest side: with b = 1/E the sum would
grow with the side and blur the tokens away. Tokens before the grid pass unchanged.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import added
from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, carried, register_mixer
from linnet.layers.non_causal import refuse_next_token
from linnet.layers.positions import Grid
from linnet.ops import modal_convolution, modal_grid_convolution, modal_step

Directions = Literal["own", "shared", "forward"]


class TpeConfig(LayerConfig):
    """Options of `tpe`. null chooses by the model: text or another sequence with causality, or none."""

    causal_defaults: ClassVar[Mapping[str, object]] = {
        "num_modes": 64,
        "residual": False,
        "max_time_constant": 1024,
    }

    num_modes: int | None = Field(
        None,
        ge=1,
        description="modes E per channel, axis and direction; null: 64 with causality, otherwise as many as give 128 "
        "numbers per channel and axis (32 with own directions, 64 with others, twice that with fixed decay)",
    )
    decay: Literal["learned", "fixed"] = Field("learned", description="not specified in the paper; fixed trains b only")
    residual: bool | None = Field(
        None,
        description="y = x + TPE(x); paper 000 writes y = TPE(x); null: false with causality, true without",
    )
    max_time_constant: int | None = Field(
        None,
        ge=2,
        description="slowest mode at the start, in tokens; null: twice the longest side of a grid, 1024 for a sequence",
    )
    directions: Directions | None = added(
        None,
        description="without causality: own, a filter for each direction; shared, one for both, which cannot tell left "
        "from right; forward, one direction; null: forward with causality, own without",
    )

    def check(self, context: LayerContext) -> list[str]:
        if context.causal and self.directions not in (None, "forward"):
            return [
                f"directions: {self.directions} needs a model without causality, and here a token sees only those "
                "before it; leave directions out"
            ]
        return []

    def count_modes(self, causal: bool) -> int:
        """Returns the modes per channel, and without causality per axis and direction."""
        if self.num_modes is not None:
            return self.num_modes
        per_direction = not causal and self.directions in (None, "own")
        return (32 if per_direction else 64) * (2 if self.decay == "fixed" and not causal else 1)


@register_mixer("tpe", TpeConfig)
class Tpe(Mixer):
    """Maps x [B, T, D] to [B, T, D].

    Causal: the state is u [B, D, E], and `log_rate`, `weight` are [D, E]. Without causality there is no state, and they
    are [A, R, D, E]: one filter for each axis, and with own directions one along the axis and one against it (R = 2).
    """

    sequence_parallel = True
    before_layers = True
    full_precision = ("log_rate", "weight")
    non_causal = "one_scan"
    takes_grid = True

    def __init__(self, config: TpeConfig, context: LayerContext):
        super().__init__()
        self.config, self.d_model, self.causal = config, context.d_model, context.causal
        for problem in config.check(context):
            raise ValueError(problem)
        self.residual = (not context.causal) if config.residual is None else config.residual
        self.directions: Directions = config.directions or ("forward" if context.causal else "own")
        self.num_modes = modes = config.count_modes(context.causal)
        slowest = config.max_time_constant
        if slowest is None:
            slowest = 1024 if context.causal or context.side is None else max(2, 2 * context.side)
        time_constant = torch.logspace(0, math.log2(slowest), modes, base=2.0)
        filters = () if context.causal else (context.axes, 2 if self.directions == "own" else 1)
        rate = -time_constant.log().expand(*filters, self.d_model, modes).contiguous()
        if config.decay == "learned":
            self.log_rate = nn.Parameter(rate)
        else:
            self.register_buffer("log_rate", rate, persistent=False)
        weight = torch.full(rate.shape, 1.0 / modes)
        if not context.causal:
            weight *= 1.0 - (-1.0 / time_constant).exp()
        self.weight = nn.Parameter(weight)

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        if not self.causal:
            if state is not None:
                refuse_next_token()
            return self._filter_grid(x, cu_seqlens, grid), None
        y, modes = modal_convolution(x, -self.log_rate.exp(), self.weight, **carried(state, "modes", cu_seqlens))
        return (x + y if self.residual else y), (None if state is None else {"modes": modes})

    def _filter_grid(self, x: Tensor, cu_seqlens: Tensor | None, grid: Grid | None) -> Tensor:
        prefix, sides = (0, x.shape[1:2]) if grid is None else (grid.prefix, grid.sides)
        log_decay, weight = -self.log_rate.exp(), self.weight
        if self.directions == "shared":
            log_decay, weight = (parameter.expand(-1, 2, -1, -1) for parameter in (log_decay, weight))
        inside = x[:, prefix:]
        y = modal_grid_convolution(inside.unflatten(1, sides), log_decay, weight, cu_seqlens=cu_seqlens)
        y = y.flatten(1, len(sides))
        y = inside + y if self.residual else y
        return torch.cat([x[:, :prefix], y], 1) if prefix else y

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if not self.causal:
            refuse_next_token()
        y = modal_step(x, -self.log_rate.exp(), self.weight, state["modes"])
        return (x + y if self.residual else y), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {"modes": TensorSpec((batch, self.d_model, self.num_modes))} if self.causal else {}

    def init_state(self, batch: int, context_length: int, device=None, dtype: torch.dtype | None = None) -> State:
        if not self.causal:
            refuse_next_token()
        return super().init_state(batch, context_length, device, dtype)

    def tp_plan(self) -> dict[str, str]:
        """Returns a plan that splits nothing: each rank computes all channels, which cost little."""
        return {"log_rate": "whole", "weight": "whole"}

    def flops_paper(self, seq_len: int) -> float:
        """Returns zero: Table 1 of paper 000 omits the term 4nde (less than 0.05 %)."""
        return 0.0
