"""HGRN2: gated linear recurrence with state expansion (paper 002, 3.2; paper 000, A.1.3).

S_t = diag(f_t) S_{t-1} + (1 - f_t) (x) i_t, y_t = o_t S_t, in heads of d/h; f_t = beta + (1 - beta) sigmoid(x W_f)
with the lower bound beta of the layer; then norm over the full width and W_o. As linear attention: q = o, k = 1 - f,
v = i.

Departures, each with an option: the output gate is SiLU as in paper 002 (paper 000 has no gate: `output_activation:
none`; the WT-103 reproduction uses sigmoid); the value has no activation (`value_activation: silu` is the authors'
module). `tie: false` gives the input gate a projection of its own, k = sigmoid(x W_k), in place of 1 - f: the ablation
of a choice that the paper makes for fewer parameters (its section 3.2).

`num_heads: d_model` is an expansion of 1, the element-wise recurrence of HGRN. On a GPU, and in packed rows, heads of
fewer than 8 channels are scanned channel by channel (`linnet.ops.gated.narrow`), since a product of matrices needs 16.
"""

from functools import partial
from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import Epsilon, added
from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.lower_bound import LowerBounds
from linnet.layers.non_causal import refuse_state, scan_both_ways
from linnet.layers.norm import NormKind, build_norm
from linnet.layers.output import check_heads, split_heads
from linnet.layers.positions import Grid
from linnet.ops import (
    forget_gate,
    forget_gated_attention,
    forget_gated_pending_step,
    forget_gated_step,
    gated_linear_attention,
    gated_step,
)
from linnet.ops.scans import ORDERS
from linnet.ops.tensor_parallel import own_part


class Hgrn2Config(LayerConfig):
    """Options of `hgrn2`."""

    num_heads: int = Field(8, ge=1, description="paper 002 calls d_model / num_heads the expansion, 128 by default")
    norm: NormKind = Field("srmsnorm", description="norm of the output, over the full width")
    norm_eps: Epsilon | None = Field(None, description="epsilon of the norm; null is the default of its kind")
    output_activation: Literal["silu", "sigmoid", "none"] = Field("silu", description="activation of the output gate")
    value_activation: Literal["none", "silu"] = Field("none", description="of the values")
    tie: bool = added(
        True, description="the input gate is 1 - f; False gives it a projection of its own, as large as that of f"
    )
    lower_bound: Literal["inclusive", "exclusive", "none"] = Field(
        "inclusive",
        description="learned bound of the forget gate, which rises with the layers; none leaves it at 0",
    )

    def check(self, context: LayerContext) -> list[str]:
        return check_heads(context.d_model, self.num_heads)


@register_mixer("hgrn2", Hgrn2Config)
class Hgrn2(Mixer):
    """x [B, T, D] -> [B, T, D], state [B, H, K, V].

    Without causality the projections are computed once and the outputs of all directions added before the norm, as in
    the authors' bidirectional module.
    """

    sequence_parallel = True
    non_causal = "two_scans"
    takes_grid = True

    def __init__(self, config: Hgrn2Config, context: LayerContext):
        super().__init__()
        d_model = context.d_model
        self.config, self.d_model, self.num_heads = config, d_model, config.num_heads
        self.head_dim = split_heads(d_model, config.num_heads, self.name)
        self.index, self.causal, self.orders = context.mixer_index, context.causal, ORDERS[context.scan]
        self.q_proj, self.f_proj, self.i_proj = (nn.Linear(d_model, d_model, bias=context.bias_qkv) for _ in range(3))
        self.k_proj = None if config.tie else nn.Linear(d_model, d_model, bias=context.bias_qkv)
        self.norm = build_norm(config.norm, d_model, config.norm_eps)
        self.out_proj = last_linear(d_model, d_model, bias=context.bias_all)
        bounded = config.lower_bound != "none"
        self.bounds = self.shared(self.name, config, context) if bounded else ()

    @classmethod
    def shared_spec(cls, config: Hgrn2Config, context: LayerContext):
        """Returns one table of lower bounds for all layers of this kind, if this layer has a bound."""
        if config.lower_bound == "none":
            return {}
        return {cls.name: partial(LowerBounds, context.mixer_count, context.d_model)}

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        q, gate, v, beta = self._project(x)
        if self.k_proj is None:
            inputs, attention = (q, gate, v), partial(forget_gated_attention, lower_bound=beta)
        else:
            inputs, attention = (q, self._own_key(x).to(q.dtype), v, forget_gate(gate, beta)[0]), gated_linear_attention
        if not self.causal:
            refuse_state(state)
            o = scan_both_ways(attention, *inputs, orders=self.orders, cu_seqlens=cu_seqlens, grid=grid)
            return self.out_proj(self.norm(o.flatten(-2))), None
        o, matrix = attention(*inputs, **carried(state, "matrix", cu_seqlens))
        return self.out_proj(self.norm(o.flatten(-2))), (None if state is None else {"matrix": matrix})

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        # Of one row the step itself activates q, 12 % of a token; of many that took longer (docs/negative-results.md).
        inside = self.k_proj is None and self.config.output_activation == "silu" and len(x) == 1
        q, gate, v, beta = self._project(x, one_token=True, activated=not inside)
        settings = {"lower_bound": beta, "activation": "silu" if inside else "none"}
        if self.k_proj is not None:
            o = gated_step(q, self._own_key(x).to(q.dtype), v, forget_gate(gate, beta)[0], state["matrix"])
        elif "pending" in state:
            buffers = (state["gates"], state["values"], state["pending"])
            o = forget_gated_pending_step(q, gate, v, state["matrix"], *buffers, **settings)
        else:
            o = forget_gated_step(q, gate, v, state["matrix"], **settings)
        return self.out_proj(self.norm(o.flatten(-2))), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {"matrix": TensorSpec((batch, self.num_heads, self.head_dim, self.head_dim))}

    def pending_spec(self, batch: int, tokens: int) -> dict[str, TensorSpec]:
        if self.k_proj is not None:
            return {}
        rows = TensorSpec((batch, self.num_heads, tokens - 1, self.head_dim), self.f_proj.weight.dtype)
        return {"gates": rows, "values": rows}

    def flops_paper(self, seq_len: int) -> float:
        """8nd^2 + 8nd^2/h + 7nd (paper 000, A.1.3), and 2nd^2 for an input gate of its own."""
        n, d = seq_len, self.d_model
        gate = 0.0 if self.k_proj is None else 2.0 * d**2
        return n * (8.0 * d**2 + gate + 8.0 * d * self.head_dim + 7.0 * d)

    def tp_plan(self) -> dict[str, str]:
        names = ("q_proj", "f_proj", "i_proj") if self.k_proj is None else ("q_proj", "f_proj", "i_proj", "k_proj")
        plan = {name: "colwise" for name in names}
        return plan | {"norm": "split_norm", "out_proj": "rowwise"}

    def _own_key(self, x: Tensor) -> Tensor:
        """Returns the input gate [..., H, K] of `tie: false`."""
        return F.sigmoid(self.k_proj(x)).unflatten(-1, (self.num_heads, self.head_dim))

    def _project(self, x: Tensor, one_token: bool = False, activated: bool = True):
        """Returns q, the forget gate's logits and v [..., H, K], and the gate's lower bound [H, K] or None."""
        heads = (self.num_heads, self.head_dim)
        q = self.q_proj(x)
        match self.config.output_activation if activated else "none":
            case "silu":
                q = F.silu(q)
            case "sigmoid":
                q = F.sigmoid(q)
        v = self.i_proj(x)
        if self.config.value_activation == "silu":
            v = F.silu(v)
        beta = None
        if self.bounds and self.index:
            bounds = self.bounds[0].constant if one_token else self.bounds[0]
            beta = own_part(bounds(self.index, self.config.lower_bound), -1, self.tp).unflatten(-1, heads)
        return q.unflatten(-1, heads), self.f_proj(x).unflatten(-1, heads), v.unflatten(-1, heads), beta
