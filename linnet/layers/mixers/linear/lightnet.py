"""LightNet: additive decay, a running softmax over time (paper 003, section 4.1).

q = silu(x W_q), u = x W_k (logits), v = x W_v; keys k_t = exp(u_t) / sum_{s<=t} exp(u_s), decay a_t = 1 - k_t, both
from the one projection ("parameter tiling"); y = (Norm(O) * sigmoid(x W_d W_u)) W_o, gated like TNL3. LRPE rotates
queries and normalised keys (paper 003, equation 10); the model applies TPE once after the embedding.

`decay` has the ablations of the sharing (paper 003, Table 4, "no share"). `independent`: a decay per channel from a
projection of its own, a = sigmoid(x W_1 W_2) of rank d / h, which has the printed number of parameters, and keys
k = silu(x W_k) (1 - a), with LRPE on both; the paper leaves this key open, so it is Linnet's choice, and the factor
1 - a keeps the state bounded. `scalar`: one such decay per head, a = sigmoid(x W_a) with W_a [d, h]. `none`: keys
silu(x W_k), and nothing decays.

Without causality the softmax of the keys is over all tokens, so that one scan is enough: o = q (k^T v). On a grid LRPE
rotates one group of channels per axis. The layer then commutes with a mirror of each axis, because cosines are even:
only a position encoding such as `tpe` with own directions tells left from right.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import added
from linnet.layers.base import LayerContext, Mixer, State, TensorSpec, carried, register_mixer
from linnet.layers.non_causal import refuse_next_token, refuse_state
from linnet.layers.norm import NormKind
from linnet.layers.output import GatedOutput, GatedOutputConfig, check_heads, split_heads
from linnet.layers.positions import Grid, Lrpe, next_positions, token_positions
from linnet.ops import (
    additive_attention,
    additive_step,
    gated_linear_attention,
    gated_step,
    lightning_attention,
    lightning_step,
    linear_attention,
)
from linnet.ops.activation import log_sigmoid


class LightnetConfig(GatedOutputConfig):
    """Options of `lightnet`."""

    unread = GatedOutputConfig.unread | {("lrpe", False): ("lrpe_shared_heads",)}

    norm: NormKind = Field("rmsnorm", description="norm of the output, over the full width")
    num_heads: int = Field(8, ge=1, description="heads; must divide d_model")
    decay: Literal["shared", "independent", "scalar", "none"] = added(
        "shared",
        description="shared: keys and decays are one softmax over time; independent: a decay per channel from a "
        "projection of its own; scalar: one per head; none",
    )
    lrpe: bool = Field(True, description="False is an ablation of paper 003, section 5.3")
    lrpe_shared_heads: bool = Field(False, description="one set of frequencies for all heads")
    lrpe_base: float | None = added(
        None, gt=1, le=1e15, description="base of the first frequencies; null: 10000 for a sequence, 100 for a grid"
    )

    def check(self, context: LayerContext) -> list[str]:
        problems = check_heads(context.d_model, self.num_heads)
        if not self.lrpe and self.lrpe_base is not None:
            problems.append(f"lrpe_base: {self.lrpe_base:g} has no effect with lrpe: false; leave it out")
        if self.decay in ("independent", "scalar") and not context.causal:
            problems.append(
                f"decay: {self.decay} multiplies decays from token to token, which has no form without causality; use "
                "shared or none"
            )
        return problems


@register_mixer("lightnet", LightnetConfig)
class Lightnet(Mixer):
    """Maps x [B, T, D] to [B, T, D]; the state is that of `linnet.ops.additive_attention` and the next position.

    Without causality every token sees all others, and there is no state.
    """

    sequence_parallel = True
    non_causal = "one_scan"
    takes_grid = True

    def __init__(self, config: LightnetConfig, context: LayerContext):
        super().__init__()
        d_model = context.d_model
        self.config, self.d_model, self.num_heads = config, d_model, config.num_heads
        self.causal = context.causal
        self.head_dim = split_heads(d_model, config.num_heads, self.name)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, d_model, bias=context.bias_qkv) for _ in range(3))
        if config.decay == "independent":
            self.decay_down = nn.Linear(d_model, self.head_dim, bias=context.bias_all)
            self.decay_up = nn.Linear(self.head_dim, d_model, bias=context.bias_all)
            self.decay_up.mup_roles = {"weight": "vector"}  # its inputs are those of a head, whatever the width
        elif config.decay == "scalar":
            self.decay_proj = nn.Linear(d_model, config.num_heads, bias=context.bias_all)
        self.refuse_options(config, context)
        frequencies = (config.lrpe_shared_heads, context.axes, config.lrpe_base)
        self.lrpe = Lrpe(config.num_heads, self.head_dim, "complex", *frequencies) if config.lrpe else None
        self.output = GatedOutput(config, context, self.head_dim)

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        if not self.causal:
            return self._attend_all(x, state, cu_seqlens, grid), None
        start = None if state is None else state["position"]
        if self.config.decay != "shared":
            return self._forward_apart(x, state, start, cu_seqlens)
        q, k, v = self._project(x)
        o, after = additive_attention(
            q,
            k,
            v,
            theta=self._theta(),
            query_activation="silu",
            positions=None if start is None or self.lrpe is None else token_positions(x, start, cu_seqlens),
            initial_state=None if state is None else (state["matrix"], state["log_sum"]),
            output_final_state=state is not None,
            cu_seqlens=cu_seqlens,
        )
        if state is not None:
            place = next_positions(x, start, cu_seqlens)
            state = {"matrix": after[0], "log_sum": after[1], "position": place}
        return self.output(o.flatten(-2), x), state

    def _forward_apart(self, x: Tensor, state: State | None, start: Tensor | None, cu_seqlens: Tensor | None):
        """Returns the result of `forward` with keys that are not normalised over time, and decays of their own."""
        positions = None if self.lrpe is None else token_positions(x, start, cu_seqlens)
        *inputs, log_decay = self._project_apart(x, positions)
        if log_decay is None:
            o, matrix = lightning_attention(*inputs, **carried(state, "matrix", cu_seqlens))
        else:
            o, matrix = gated_linear_attention(*inputs, log_decay, **carried(state, "matrix", cu_seqlens))
        if state is not None:
            state = {"matrix": matrix, "position": next_positions(x, start, cu_seqlens)}
        return self.output(o.flatten(-2), x), state

    def _attend_all(self, x: Tensor, state: State | None, cu_seqlens: Tensor | None, grid: Grid | None) -> Tensor:
        """Returns the output for x [B, T, D] in which every token sees all others of its row or document."""
        refuse_state(state)
        if self.config.decay != "shared":
            positions = None
            if self.lrpe is not None:
                positions = token_positions(x, None, cu_seqlens) if grid is None else grid.positions(x.device)
            q, k, v, _ = self._project_apart(x, positions)
            return self.output(linear_attention(q, k, v, cu_seqlens=cu_seqlens).flatten(-2), x)
        q, k, v = self._project(x)
        positions = None if grid is None or self.lrpe is None else grid.positions(x.device)
        o, _ = additive_attention(
            q,
            k,
            v,
            theta=self._theta(),
            positions=positions,
            causal=False,
            query_activation="silu",
            cu_seqlens=cu_seqlens,
        )
        return self.output(o.flatten(-2), x)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if not self.causal:
            refuse_next_token()
        position = state["position"]
        if self.config.decay != "shared":
            q, k, v, log_decay = self._project_apart(x, position)
            if log_decay is None:
                o = lightning_step(q, k, v, state["matrix"])
            else:
                o = gated_step(q, k, v, log_decay, state["matrix"])
        else:
            q, k, v = self._project(x)
            o = additive_step(
                F.silu(q),
                k,
                v,
                (state["matrix"], state["log_sum"]),
                theta=self._theta(),
                positions=position if self.lrpe is not None else None,
            )
        position += 1
        return self.output(o.flatten(-2), x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        if not self.causal:
            return {}
        key_dim = 2 * self.head_dim if self.lrpe is not None else self.head_dim
        spec = {"matrix": TensorSpec((batch, self.num_heads, key_dim, self.head_dim))}
        if self.config.decay == "shared":
            spec["log_sum"] = TensorSpec((batch, self.num_heads, self.head_dim))
        return spec | {"position": TensorSpec((batch,), torch.int64)}

    def init_state(self, batch: int, context_length: int, device=None, dtype: torch.dtype | None = None) -> State:
        if not self.causal:
            refuse_next_token()
        state = super().init_state(batch, context_length, device, dtype)
        if "log_sum" in state:
            state["log_sum"].fill_(-torch.inf)  # the sum of exponentials before the first token is zero
        return state

    def flops_paper(self, seq_len: int) -> float:
        """Returns 8nd^2 + 18nd^2/h + 5nd: not in paper 000, but the matrix products are those of cosFormer2. The
        projection of a decay adds 2 per weight."""
        n, d = seq_len, self.d_model
        decay = {"independent": 4.0 * d * self.head_dim, "scalar": 2.0 * d * self.num_heads}.get(self.config.decay, 0.0)
        return n * (8.0 * d**2 + decay + 18.0 * d * self.head_dim + 5.0 * d)

    def tp_plan(self) -> dict[str, str]:
        plan = {name: "colwise" for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {"lrpe": "partial" if self.config.lrpe_shared_heads else "split"}
        match self.config.decay:
            case "independent":
                plan |= {"decay_down": "partial", "decay_up": "colwise"}
            case "scalar":
                plan["decay_proj"] = "colwise"
        return plan | {f"output.{name}": how for name, how in self.output.tp_plan().items()}

    def _theta(self) -> Tensor | None:
        return None if self.lrpe is None else self.lrpe.theta.expand(self.num_heads, -1)

    def _project(self, x: Tensor):
        """Returns q before its SiLU, k and v [..., H, .]."""
        heads = (self.num_heads, self.head_dim)
        q = self.q_proj(x).unflatten(-1, heads)
        return q, self.k_proj(x).unflatten(-1, heads), self.v_proj(x).unflatten(-1, heads)

    def _project_apart(self, x: Tensor, positions: Tensor | None):
        """Returns q, k, v [..., H, .] with LRPE, and the log-decays in the shape of k, or None without decay."""
        heads = (self.num_heads, self.head_dim)
        q, k = self.q_proj(x).unflatten(-1, heads), F.silu(self.k_proj(x)).unflatten(-1, heads)
        log_decay = None
        match self.config.decay:
            case "independent":
                logits = self.decay_up(self.decay_down(x)).unflatten(-1, heads)
                log_decay, k = log_sigmoid(logits), (k * torch.sigmoid(-logits)).to(k.dtype)
            case "scalar":
                logits = self.decay_proj(x).unsqueeze(-1)
                log_decay, k = log_sigmoid(logits).expand(k.shape), (k * torch.sigmoid(-logits)).to(k.dtype)
        if self.lrpe is None or positions is None:
            return F.silu(q), k, self.v_proj(x).unflatten(-1, heads), log_decay
        if log_decay is not None:  # both copies of a channel
            log_decay = torch.cat([log_decay, log_decay], -1)
        v = self.v_proj(x).unflatten(-1, heads)
        return self.lrpe(q, positions, "silu"), self.lrpe(k, positions), v, log_decay
