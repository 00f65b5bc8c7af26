"""S4D, a diagonal state space per channel (Gu et al. 2022, arXiv:2206.11893; DSS: Gupta et al. 2022, arXiv:2203.14343).

Each channel has N / 2 complex modes A = -exp(a) + i f and a step Delta:

    h_t = lambda h_{t-1} + B_bar x_t,   u_t = 2 Re(C h_t) + D x_t,   y = GLU(gelu(u) W + b)

    zoh         lambda = exp(Delta A)                               B_bar = (lambda - 1) / A
    bilinear    lambda = (1 + Delta A / 2) / (1 - Delta A / 2)      B_bar = Delta / (1 - Delta A / 2)
    none        lambda = exp(Delta A)                               B_bar = 1

which is a convolution of each channel with 2 Re(C B_bar lambda^t) (`linnet.ops.long_convolution`). `zoh` is DSS_exp of
the DSS paper and `none` its DSS_exp-no-scale, both with modes per channel where DSS has one set for all channels.
DSS_softmax is not here: its filter depends on the length of the row, so it has no recurrence.

Initialisation: a = ln 1/2; f = pi n (`lin`) or (N / pi) (N / (2 n + 1) - 1) (`inv`); Delta log-uniform in
[dt_min, dt_max]; C and D are normal. Departure: W is drawn and trained as every linear layer, where S4's training has
other rates for A and Delta.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.hyena import long_flops_paper
from linnet.ops import ModalFilter, long_convolution, long_convolution_step
from linnet.ops.chunks import at_least_float32


class S4dConfig(LayerConfig):
    """Options of `s4d`."""

    state: int = Field(64, ge=2, multiple_of=2, description="N, real numbers of state per channel: N / 2 complex modes")
    init: Literal["lin", "inv"] = Field("lin", description="frequencies at the start: S4D-Lin or S4D-Inv")
    discretisation: Literal["zoh", "bilinear", "none"] = Field(
        "zoh", description="zero-order hold, bilinear, or zoh without the scale of the input (DSS_exp-no-scale)"
    )
    dt_min: float = Field(1e-3, gt=0, description="least step Delta at the start")
    dt_max: float = Field(1e-1, gt=0, description="largest step Delta at the start")
    output: Literal["glu", "linear"] = Field("glu", description="output projection: gated (S4), or linear (DSS)")

    def check(self, context: LayerContext) -> list[str]:
        if self.dt_min <= self.dt_max:
            return []
        return [f"dt_min: {self.dt_min:g} is above dt_max: {self.dt_max:g}; lower it"]


@register_mixer("s4d", S4dConfig, "s4", "dss")
class S4d(Mixer):
    """x [B, T, D] -> [B, T, D], state [B, D, N / 2, 2]: complex modes as pairs (real, imaginary)."""

    sequence_parallel = True
    full_precision = ("log_dt", "log_rate", "frequency", "weight", "skip")

    def __init__(self, config: S4dConfig, context: LayerContext):
        super().__init__()
        self.refuse_options(config, context)
        width, modes = context.d_model, config.state // 2
        self.config, self.channels, self.modes = config, width, modes
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        self.log_dt = nn.Parameter(low + (high - low) * torch.rand(width))
        self.log_rate = nn.Parameter(torch.full((width, modes), math.log(0.5)))
        n, size = torch.arange(modes), config.state
        frequency = math.pi * n if config.init == "lin" else size / math.pi * (size / (2 * n + 1) - 1)
        self.frequency = nn.Parameter(frequency.float().repeat(width, 1))
        self.weight = nn.Parameter(0.5**0.5 * torch.randn(width, modes, 2))
        self.skip = nn.Parameter(torch.randn(width))
        self.out_proj = last_linear(width, (1 + (config.output == "glu")) * width, bias=context.bias_all)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        y, modes = long_convolution(self._own(x), self.filter(), **carried(state, "modes", cu_seqlens))
        return self._read(y), None if state is None else {"modes": modes}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._read(long_convolution_step(self._own(x), self.filter(), state["modes"])), state

    def filter(self) -> ModalFilter:
        """Returns the filters of the channels, in modes; at least float32."""
        dt, a, f, c, skip = map(at_least_float32, (self.log_dt, self.log_rate, self.frequency, self.weight, self.skip))
        x, y = -dt.exp()[:, None] * a.exp(), dt.exp()[:, None] * f  # Delta A
        match self.config.discretisation:
            case "bilinear":
                size = (1 - x / 2).square() + (y / 2).square()  # |1 - Delta A / 2|^2
                log_decay = (2 * x / size).log1p() / 2
                theta = torch.atan2(y / 2, 1 + x / 2) + torch.atan2(y / 2, 1 - x / 2)
                scale = dt.exp()[:, None] / size
                real, imaginary = scale * (1 - x / 2), scale * y / 2
            case kind:
                log_decay, theta = x, y
                real, imaginary = torch.ones_like(x), torch.zeros_like(x)
                if kind == "zoh":  # lambda - 1 without cancellation, times the conjugate of A over |A|^2
                    u, v = x.expm1() * y.cos() - 2 * (y / 2).sin().square(), x.exp() * y.sin()
                    size = a.exp().square() + f.square()
                    real, imaginary = (f * v - a.exp() * u) / size, -(a.exp() * v + f * u) / size
        residue = torch.stack([c[..., 0] * real - c[..., 1] * imaginary, c[..., 0] * imaginary + c[..., 1] * real], -1)
        return ModalFilter(log_decay, theta, 2 * residue, skip)

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {"modes": TensorSpec((batch, self.channels, self.modes, 2), counted=0.5)}

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and token, and those of a long convolution as paper 004, C.4, counts them."""
        dense = 2.0 * seq_len * self.out_proj.weight.numel()
        return dense + long_flops_paper(seq_len, self.modes, self.channels, self.channels)

    def tp_plan(self) -> dict[str, str]:
        return dict.fromkeys(self.full_precision, "split") | {"out_proj": "rowwise"}

    def _own(self, x: Tensor) -> Tensor:
        """Returns this rank's channels; those of other ranks get their gradients there."""
        return x if self.tp is None else self.tp.cut(x, -1)

    def _read(self, y: Tensor) -> Tensor:
        y = self.out_proj(F.gelu(y))
        return F.glu(y, -1) if self.config.output == "glu" else y
