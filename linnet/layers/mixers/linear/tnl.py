"""TNL: linear attention with a fixed decay per head, run by Lightning Attention (paper 001; TNL3: paper 000, A.1.2).

TNL3 (default): Q = silu(X W_q), K = silu(X W_k), V = X W_v, O = Norm(LightningAttention(Q, K, V)) * sigmoid(X W_d W_u),
y = O W_o. TNL v1: LRPE in the first layer, gate `full` without activation.

Departures, each with an option: the gate reads the normed input (paper 000 writes the raw residual: `gate_input:
residual`); slopes are ALiBi's times (1 - l/(L-1) + 1e-5), as in the released models. Equation 10 of paper 001, read
literally, leaves a receptive field of one token (`slopes: paper_eq10`); `slopes: log_spaced` spreads the slopes over
[1/2, 1/256]. `slopes: geometric` is 2^(-8h/H) for any number H of heads, as in MiniMax-01 (arXiv:2501.08313), which
also has values with SiLU, a full gate, and `head_dim`.

TransNormer (paper 001, Table 12) is `decay: none` with LRPE in all layers, and no gate.
"""

import math
from functools import partial
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import added
from linnet.layers.base import LayerContext, Mixer, State, TensorSpec, carried, register_mixer
from linnet.layers.non_causal import refuse_state, scan_both_ways
from linnet.layers.norm import build_norm
from linnet.layers.output import GatedOutput, GatedOutputConfig, check_heads, split_heads
from linnet.layers.positions import Grid, Lrpe, Reflection, check_real, next_positions, token_positions
from linnet.ops import lightning_attention, lightning_pending_step, lightning_step
from linnet.ops.scans import ORDERS


class TnlConfig(GatedOutputConfig):
    """Options of `tnl`; the defaults are TNL3 (paper 000, A.1.2)."""

    unread = GatedOutputConfig.unread | {
        ("decay", "none"): ("slopes", "layer_factor"),
        ("lrpe", "none"): ("lrpe_form", "lrpe_shared_heads"),
    }

    num_heads: int = Field(8, ge=1, description="heads; must divide d_model unless head_dim is set")
    head_dim: int = added(0, ge=0, description="width of a head; 0 is d_model / num_heads")
    qk_activation: Literal["silu", "elu", "elu1", "none"] = Field(
        "silu", description="elu1 is 1 + elu (paper 001, Table 8)"
    )
    v_activation: Literal["none", "silu"] = Field("none", description="released code: silu")
    gate_input: Literal["normed", "residual"] = Field("normed", description="paper 000, A.1.2: residual")
    decay: Literal["per_head", "none"] = Field(
        "per_head", description="none keeps every token at full weight (paper 001, Table 4: LRPE and APE)"
    )
    slopes: Literal["alibi", "paper_eq10", "log_spaced", "geometric"] = Field(
        "alibi", description="how the decays of the heads are spread (see the top of this module)"
    )
    layer_factor: bool = Field(True, description="slower decay in later layers (the temperature of paper 001, Table 5)")
    lrpe: Literal["none", "first_layer", "all_layers"] = Field("none", description="TNL v1: first_layer")
    lrpe_form: Literal["complex", "real"] = Field("complex", description="form of the relative position encoding LRPE")
    lrpe_shared_heads: bool = Field(False, description="one set of frequencies for all heads")
    lrpe_reflection: Reflection = Field(
        "none", description="householder reflects queries and keys at a fixed random vector before LRPE rotates them"
    )

    def check(self, context: LayerContext) -> list[str]:
        problems = [] if self.head_dim else check_heads(context.d_model, self.num_heads, self, context)
        if not problems and self.lrpe != "none" and self.lrpe_form == "real":
            problems = check_real(self.head_dim or context.d_model // self.num_heads)
        if self.lrpe == "none" and self.lrpe_reflection != "none":
            problems.append(
                f"lrpe_reflection: {self.lrpe_reflection} has no effect with lrpe: none; use lrpe: all_layers, or "
                "leave it out"
            )
        return problems


@register_mixer("tnl", TnlConfig, "lightning_attention", "transnormer", "transnormer_llm", "minimax")
class Tnl(Mixer):
    """x [B, T, D] -> [B, T, D], state [B, H, K, V] and, with LRPE, the position of the next token.

    Without causality the projections are computed once and the outputs of all directions added before the norm.
    """

    sequence_parallel = True
    non_causal = "two_scans"
    takes_grid = True

    def __init__(self, config: TnlConfig, context: LayerContext):
        super().__init__()
        d_model = context.d_model
        self.config, self.d_model, self.num_heads = config, d_model, config.num_heads
        self.causal, self.orders = context.causal, ORDERS[context.scan]
        self.head_dim = config.head_dim or split_heads(d_model, config.num_heads, self.name, config, context)
        self.inner = inner = config.num_heads * self.head_dim
        self.owns_input_norm = config.gate_input == "residual"
        self.input_norm = build_norm(context.norm, d_model, context.norm_eps) if self.owns_input_norm else None
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, inner, bias=context.bias_qkv) for _ in range(3))
        self.output = GatedOutput(config, context, self.head_dim, inner)
        with_lrpe = config.lrpe == "all_layers" or (config.lrpe == "first_layer" and context.layer_index == 0)
        self.lrpe = (
            Lrpe(
                config.num_heads,
                self.head_dim,
                config.lrpe_form,
                config.lrpe_shared_heads,
                context.axes,
                reflection=config.lrpe_reflection,
                layer_index=context.layer_index,
            )
            if with_lrpe
            else None
        )
        rates = decay_rates(config, context.layer_index, context.num_layers)
        log_decay = None if config.decay == "none" else torch.tensor(-rates)
        self.register_buffer("log_decay", log_decay, persistent=False)

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        if not self.causal:
            refuse_state(state)
        positions = None
        if self.lrpe is not None:
            start = None if state is None else state["position"]
            positions = token_positions(x, start, cu_seqlens) if grid is None else grid.positions(x.device)
        q, k, v = self._project(x, positions, self.config.qk_activation)
        if not self.causal:
            op = partial(lightning_attention, log_decay=self.log_decay)
            o = scan_both_ways(op, q, k, v, orders=self.orders, cu_seqlens=cu_seqlens, grid=grid)
            return self.output(o.flatten(-2), x), None
        o, matrix = lightning_attention(q, k, v, log_decay=self.log_decay, **carried(state, "matrix", cu_seqlens))
        if state is not None:
            state = {"matrix": matrix}
            if self.lrpe is not None:
                state["position"] = next_positions(x, start, cu_seqlens)
        return self.output(o.flatten(-2), x), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        kind = self.config.qk_activation
        inside = self.lrpe is None and kind in ("silu", "none")  # the step itself activates q and k
        q, k, v = self._project(x, state.get("position"), "none" if inside else kind)
        activation = kind if inside else "none"
        settings = {"log_decay": self.log_decay, "activation": activation}
        if "pending" in state:
            buffers = (state["keys"], state["values"], state["pending"])
            o = lightning_pending_step(q, k, v, state["matrix"], *buffers, **settings)
        else:
            o = lightning_step(q, k, v, state["matrix"], **settings)
        if self.lrpe is not None:
            state["position"] += 1
        return self.output(o.flatten(-2), x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        key_dim = self.head_dim if self.lrpe is None else self.lrpe.expanded(self.head_dim)
        spec = {"matrix": TensorSpec((batch, self.num_heads, key_dim, self.head_dim))}
        if self.lrpe is not None:
            spec["position"] = TensorSpec((batch,), torch.int64)
        return spec

    def pending_spec(self, batch: int, tokens: int) -> dict[str, TensorSpec]:
        if self.lrpe is not None:  # LRPE makes keys float32 and wider, so delayed writes do not apply
            return {}
        rows = TensorSpec((batch, self.num_heads, tokens - 1, self.head_dim), self.k_proj.weight.dtype)
        return {"keys": rows, "values": rows}

    def flops_paper(self, seq_len: int) -> float:
        """8nd^2 + 12nd^2/h + 4nd (paper 000, A.1.2 with block size and gate rank d/h)."""
        n, d, inner = seq_len, self.d_model, self.inner  # the paper has inner = d
        return n * (8.0 * d * inner + 12.0 * inner * self.head_dim + 4.0 * inner)

    def tp_plan(self) -> dict[str, str]:
        plan = {name: "colwise" for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {"input_norm": "partial"} | ({} if self.log_decay is None else {"log_decay": "split"})
        if self.lrpe is not None:
            plan |= {f"lrpe.{name}": how for name, how in self.lrpe.tp_plan().items()}
        return plan | {f"output.{name}": how for name, how in self.output.tp_plan().items()}

    def _project(self, x: Tensor, positions: Tensor | None, activation: str):
        """Returns q and k (activated, rotated) and v [..., H, d]."""
        if self.input_norm is not None:
            x = self.input_norm(x)
        heads = (self.num_heads, self.head_dim)
        q = activate(self.q_proj(x), activation).unflatten(-1, heads)
        k = activate(self.k_proj(x), activation).unflatten(-1, heads)
        v = activate(self.v_proj(x), self.config.v_activation).unflatten(-1, heads)
        if self.lrpe is not None:
            q, k = self.lrpe(q, positions), self.lrpe(k, positions)
        return q, k, v


def activate(x: Tensor, kind: str) -> Tensor:
    """Returns the activation `kind` (silu, elu, elu1 = 1 + elu, none) of x, of any shape."""
    match kind:
        case "silu":
            return F.silu(x)
        case "elu":
            return F.elu(x)
        case "elu1":
            return 1.0 + F.elu(x)
    return x


def decay_rates(config: TnlConfig, layer_index: int, num_layers: int) -> np.ndarray:
    """Returns the rates s_h >= 0 of the decay exp(-s_h) for each head of a layer, float32 [H].

    NumPy computes them: on the meta device, tensor arithmetic would import torch's compiler, which takes a second.
    """
    heads = config.num_heads
    match config.slopes:
        case "alibi":
            slopes = alibi_slopes(heads)
        case "paper_eq10":
            slopes = [8.0 * h / heads for h in range(1, heads + 1)]
        case "geometric":
            slopes = [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)]
        case "log_spaced":
            slopes = [2.0 ** -(1.0 + 7.0 * h / max(heads - 1, 1)) for h in range(heads)]
    factor = 1.0
    if config.layer_factor:
        if config.slopes == "paper_eq10":
            factor = 1.0 - layer_index / num_layers
        else:
            last = num_layers - 1 + 1e-5 if config.slopes == "geometric" else max(num_layers - 1, 1)
            factor = 1.0 - layer_index / last + 1e-5
    return np.asarray(slopes, dtype=np.float32) * factor


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns ALiBi's slopes 2^(-8h/H), h = 1..H. If H is not a power of two: those of the power of two below H, filled
    up with slopes of the power above."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    above = [2.0 ** (-4.0 * h / power) for h in range(1, 2 * power + 1)]
    return slopes + above[0 : 2 * (num_heads - power) : 2]
