"""Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692): `gdn` with one decay per channel of the key.

With f = x W_fa W_fb + b_a, of the rank of a value head, and A_log one number per head, the log-decay is

    -exp(A_log) softplus(f)              by default, as in Kimi Linear
    lower_bound sigmoid(exp(A_log) f)    with `lower_bound`, such as -5: log-decays lie between it and 0

Keys, values, beta and the norm are those of `gdn`; the gate is a sigmoid of a low-rank projection, or of a full one.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import added
from linnet.layers.base import LayerContext, State, register_mixer
from linnet.layers.delta import DeltaConfig, DeltaMixer, draw_steps
from linnet.ops.activation import softplus_decay
from linnet.ops.chunks import at_least_float32


class KdaConfig(DeltaConfig):
    """Options of `kda`."""

    unread = DeltaConfig.unread | {("gate", "full"): ("gate_bias",)}

    lower_bound: float | None = Field(
        None, lt=0, description="log-decays are between it and 0, by a sigmoid; null is the softplus gate, unbounded"
    )
    gate: Literal["low_rank", "full"] = Field(
        "low_rank", description="projection of the output gate; low_rank has the rank of a value head and a bias"
    )
    gate_bias: bool = added(True, description="the bias of a low_rank gate; Kimi Linear as released has none")
    decay: Literal["low_rank", "full"] = added(
        "low_rank",
        description="projection of the decays; low_rank has the rank of a value head, and full is one matrix (Ling 3)",
    )


@register_mixer("kda", KdaConfig, "kimi_delta_attention", "kimi_linear", "kimi")
class Kda(DeltaMixer):
    """x [B, T, D] -> [B, T, D], with one decay per channel of the key and value head.

    Attributes:
        decay_heads: which heads have decays, those of keys or of values.
    """

    full_precision = ("A_log", "dt_bias")
    gate_activation = "sigmoid"
    pending_decays = "channel"
    decay_heads: Literal["num_heads", "num_v_heads"] = "num_v_heads"

    def __init__(self, config: KdaConfig, context: LayerContext):
        super().__init__(config, context)
        d_model, rank, bias = context.d_model, self.value_dim, context.bias_all
        heads, values = getattr(self, self.decay_heads), self.num_v_heads * self.value_dim
        channels = heads * self.key_dim
        if config.decay == "full":
            self.decay_proj = nn.Linear(d_model, channels, bias=False)
        else:
            self.decay_down = nn.Linear(d_model, rank, bias=bias)
            self.decay_up = nn.Linear(rank, channels, bias=False)
            self.decay_up.mup_roles = {"weight": "vector"}  # the rank does not grow with the width
        A_log = torch.zeros(heads)
        self.A_log = nn.Parameter(A_log.uniform_(1.0, 16.0).log() if config.lower_bound is None else A_log)
        self.dt_bias = nn.Parameter(torch.empty(channels))
        draw_steps(self.dt_bias)
        if config.gate == "full":
            self.gate_proj = nn.Linear(d_model, values, bias=bias)
        else:
            self.gate_down = nn.Linear(d_model, rank, bias=bias)
            self.gate_up = nn.Linear(rank, values, bias=config.gate_bias or bias)
            self.gate_up.mup_roles = {"weight": "vector"}

    def decay_logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits [..., H, K] of x [..., D], the logarithms of rates [H], and the bias [H, K]."""
        f = self.decay_proj(x) if self.config.decay == "full" else self.decay_up(self.decay_down(x))
        heads = (getattr(self, self.decay_heads), self.key_dim)
        return f.unflatten(-1, heads), self.A_log, self.dt_bias.unflatten(-1, heads)

    def log_decay(self, x: Tensor) -> Tensor:
        f, rates, bias = self.decay_logits(x)
        if self.config.lower_bound is None:
            return softplus_decay(f, rates, bias)
        f = at_least_float32(f) + at_least_float32(bias)
        return self.config.lower_bound * (at_least_float32(rates).exp()[:, None] * f).sigmoid()

    def token(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: State) -> Tensor:
        if self.config.lower_bound is not None:
            return super().token(q, k, v, x, state)
        return self.projected_token(q, k, v, x, state, *self.decay_logits(x))

    def gate(self, x: Tensor) -> Tensor:
        return self.gate_proj(x) if self.config.gate == "full" else self.gate_up(self.gate_down(x))

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan() | dict.fromkeys(("A_log", "dt_bias"), "split")
        full = self.config.decay == "full"
        plan |= {"decay_proj": "colwise"} if full else {"decay_down": "partial", "decay_up": "colwise"}
        if self.config.gate == "full":
            return plan | {"gate_proj": "colwise"}
        return plan | {"gate_down": "partial", "gate_up": "colwise"}
