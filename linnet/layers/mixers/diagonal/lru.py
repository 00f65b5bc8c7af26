"""LRU, the linear recurrent unit (Orvieto et al. 2023, arXiv:2303.06349): a complex diagonal recurrence of N states.

h_t = lambda * h_{t-1} + gamma * (B x_t),   y_t = Re(C h_t) + D * x_t,   lambda = exp(-exp(nu) + i exp(theta))

Initialisation: lambda is uniform on the ring r_min <= |lambda| <= r_max with a phase in [0, max_phase), gamma =
sqrt(1 - |lambda|^2), so that h has the variance of B x, and D is normal. gamma is a parameter, as its logarithm.

Departures: B and C are linear layers (pairs of neighbours are a complex number), drawn as every linear layer; their
biases follow `bias` of the model, where the paper has none. The paper's block is norm, LRU, GLU and one residual
connection: here the GLU is the channel mixer, with a norm and a residual connection of its own.
"""

import math

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, carried, last_linear, register_mixer
from linnet.ops import diagonal_scan, diagonal_step
from linnet.ops.chunks import at_least_float32
from linnet.ops.tensor_parallel import share


class LruConfig(LayerConfig):
    """Options of `lru`."""

    state: int = Field(0, ge=0, description="N, complex numbers of state; 0 is d_model")
    r_min: float = Field(0.0, ge=0, lt=1, description="least |lambda| at the start")
    r_max: float = Field(1.0, gt=0, le=1, description="largest |lambda| at the start; near 1 for long sequences")
    max_phase: float = Field(2 * math.pi, gt=0, le=2 * math.pi, description="largest phase of lambda at the start")

    def check(self, context: LayerContext) -> list[str]:
        if self.r_min <= self.r_max:
            return []
        return [f"r_min: {self.r_min:g} is above r_max: {self.r_max:g}; lower it"]


@register_mixer("lru", LruConfig, "linear_recurrent_unit")
class Lru(Mixer):
    """x [B, T, D] -> [B, T, D], state [B, N, 2]: complex numbers as pairs (real, imaginary)."""

    sequence_parallel = True
    full_precision = ("nu", "theta", "gamma")

    def __init__(self, config: LruConfig, context: LayerContext):
        super().__init__()
        self.refuse_options(config, context)
        self.channels = config.state or context.d_model
        square = config.r_min**2 + (config.r_max**2 - config.r_min**2) * torch.rand(self.channels)  # |lambda|^2
        square = square.clamp(1e-12, 1 - 1e-6)
        self.nu = nn.Parameter((-square.log() / 2).log())
        self.theta = nn.Parameter((config.max_phase * torch.rand(self.channels)).clamp(min=1e-6).log())
        self.gamma = nn.Parameter((-square).log1p() / 2)
        self.skip = nn.Parameter(torch.randn(context.d_model))
        self.in_proj = nn.Linear(context.d_model, 2 * self.channels, bias=context.bias_qkv)
        self.out_proj = last_linear(2 * self.channels, context.d_model, bias=context.bias_all)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        inputs, log_decay, theta = self._project(x)
        h, hidden = diagonal_scan(inputs, log_decay, theta=theta, **carried(state, "hidden", cu_seqlens))
        return self._read(h, x), None if state is None else {"hidden": hidden}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        inputs, log_decay, theta = self._project(x)
        return self._read(diagonal_step(inputs, log_decay, state["hidden"], theta=theta), x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {"hidden": TensorSpec((batch, self.channels, 2), counted=0.5)}

    def tp_plan(self) -> dict[str, str]:
        plan = dict.fromkeys(self.full_precision, "split") | {"skip": "whole"}
        return plan | {"in_proj": "colwise", "out_proj": "rowwise"}

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns gamma B x [..., N, 2], log |lambda| [..., N] and the phase [N]."""
        inputs = self.in_proj(x).unflatten(-1, (self.channels, 2))
        inputs = (inputs * at_least_float32(self.gamma).exp()[:, None]).to(x.dtype)
        log_decay = -at_least_float32(self.nu).exp()
        return inputs, log_decay.expand(inputs.shape[:-1]), at_least_float32(self.theta).exp()

    def _read(self, h: Tensor, x: Tensor) -> Tensor:
        return self.out_proj(h.flatten(-2).to(x.dtype)) + share(x, self.tp) * self.skip.to(x.dtype)
