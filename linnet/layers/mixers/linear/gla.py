"""GLA: gated linear attention (Yang et al. 2023, arXiv:2312.06635), with the details of the MAD benchmark (paper 004).

log a_t = logsigmoid(x W_1 W_2 + b) / 16 for each key channel, S_t = diag(a_t) S_{t-1} + k_t (x) v_t,
o_t = d_k^{-1/2} q_t S_t; RMSNorm in each head with one gain shared by the heads, SiLU gate, output projection.
"""

from functools import partial

from pydantic import Field
from torch import Tensor, nn

from linnet.config import Epsilon, Factor
from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.non_causal import refuse_state, scan_both_ways
from linnet.layers.norm import build_norm, norm_and_gate
from linnet.layers.output import check_heads, split_heads
from linnet.layers.positions import Grid
from linnet.ops import gated_linear_attention, gated_step
from linnet.ops.activation import log_sigmoid
from linnet.ops.scans import ORDERS


class GlaConfig(LayerConfig):
    """Options of `gla`."""

    num_heads: int = Field(4, ge=1, description="heads; must divide d_model")
    expand_k: Factor = Field(1.0, description="key width over model width (the GLA paper uses 0.5)")
    gate_rank: int = Field(16, ge=1, description="rank of the decay's projection")
    gate_temperature: Factor = Field(16.0, description="log-decays are divided by it")
    norm_eps: Epsilon = Field(1e-5, description="epsilon of the norm in each head")

    def key_width(self, d_model: int) -> int:
        """Returns the width of the keys of all heads together."""
        return round(d_model * self.expand_k)

    def check(self, context: LayerContext) -> list[str]:
        width = self.key_width(context.d_model)
        if (problems := check_heads(context.d_model, self.num_heads, self, context)) or (
            width and width % self.num_heads == 0
        ):
            return problems
        return [
            f"expand_k: {self.expand_k} gives a key width of {width}, which is not a positive multiple of num_heads "
            f"{self.num_heads}; change one of the two"
        ]


@register_mixer("gla", GlaConfig, "gated_linear_attention")
class Gla(Mixer):
    """x [B, T, D] -> [B, T, D], state [B, H, K, V]. Without causality the outputs of all directions are added."""

    sequence_parallel = True
    non_causal = "two_scans"
    takes_grid = True

    def __init__(self, config: GlaConfig, context: LayerContext):
        super().__init__()
        d_model = context.d_model
        self.config, self.d_model, self.num_heads = config, d_model, config.num_heads
        self.causal, self.orders = context.causal, ORDERS[context.scan]
        self.value_dim = split_heads(d_model, config.num_heads, self.name, config, context)
        self.refuse_options(config, context)
        key_width = config.key_width(d_model)
        self.key_dim = key_width // config.num_heads
        self.q_proj = nn.Linear(d_model, key_width, bias=context.bias_qkv)
        self.k_proj = nn.Linear(d_model, key_width, bias=context.bias_qkv)
        self.v_proj = nn.Linear(d_model, d_model, bias=context.bias_qkv)
        self.decay_down = nn.Linear(d_model, config.gate_rank, bias=context.bias_all)
        self.decay_up = nn.Linear(config.gate_rank, key_width, bias=True)
        self.decay_up.mup_roles = {"weight": "vector"}  # the rank does not grow with the width
        self.gate_proj = nn.Linear(d_model, d_model, bias=context.bias_all)
        self.norm = build_norm("rmsnorm", self.value_dim, config.norm_eps)
        self.out_proj = last_linear(d_model, d_model, bias=context.bias_all)

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        q, k, v, log_decay = self._project(x)
        if not self.causal:
            refuse_state(state)
            op = partial(gated_linear_attention, scale=self.key_dim**-0.5)
            o = scan_both_ways(op, q, k, v, log_decay, orders=self.orders, cu_seqlens=cu_seqlens, grid=grid)
            return self._read(o, x), None
        o, matrix = gated_linear_attention(
            q, k, v, log_decay, scale=self.key_dim**-0.5, **carried(state, "matrix", cu_seqlens)
        )
        return self._read(o, x), (None if state is None else {"matrix": matrix})

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        q, k, v, log_decay = self._project(x)
        o = gated_step(q, k, v, log_decay, state["matrix"], scale=self.key_dim**-0.5)
        return self._read(o, x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {"matrix": TensorSpec((batch, self.num_heads, self.key_dim, self.value_dim))}

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and 8 n d_k per value channel for the recurrence, the convention of paper 000."""
        return super().flops_paper(seq_len) + 8.0 * seq_len * self.d_model * self.key_dim

    def tp_plan(self) -> dict[str, str]:
        plan = {name: "colwise" for name in ("q_proj", "k_proj", "v_proj", "decay_up", "gate_proj")}
        return plan | {"decay_down": "partial", "norm": "partial", "out_proj": "rowwise"}

    def _project(self, x: Tensor):
        keys = (self.num_heads, self.key_dim)
        log_decay = log_sigmoid(self.decay_up(self.decay_down(x)), self.config.gate_temperature)
        return (
            self.q_proj(x).unflatten(-1, keys),
            self.k_proj(x).unflatten(-1, keys),
            self.v_proj(x).unflatten(-1, (self.num_heads, self.value_dim)),
            log_decay.unflatten(-1, keys),
        )

    def _read(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).unflatten(-1, (self.num_heads, self.value_dim))
        return self.out_proj(norm_and_gate(self.norm, o, gate, "silu").flatten(-2))
