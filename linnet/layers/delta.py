"""The common body of mixers on the gated delta rule (`linnet.ops.gated_delta_rule`): projections, short convolutions of
q, k and v, keys and queries of unit norm, and the norm of each head before output gate and projection.

A mixer adds its decay (`log_decay`) and its output gate (`gate`), and may change what tokens erase and write (`gates`).
"""

import math
from fractions import Fraction

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import Epsilon, Factor
from linnet.layers.base import SET, LayerConfig, LayerContext, State, TensorSpec, last_linear
from linnet.layers.norm import build_norm, norm_and_gate
from linnet.layers.output import check_heads
from linnet.layers.short_conv import ConvolvedMixer, ShortConv, short_convolution_spec, step_all
from linnet.ops import gated_delta_rule, gated_delta_step
from linnet.ops.chunks import at_least_float32
from linnet.ops.delta import projected_delta_step
from linnet.ops.norm import unit_norm
from linnet.ops.stepping import Pending

# A class that replaces one of these may read or write the state in another way, or more than once per token.
_TOKEN_METHODS = {"step", "token", "heads", "log_decay", "recurrence_step", "state_spec"}
SHORTEST_STEP, LONGEST_STEP, SMALLEST_STEP = 1e-3, 1e-1, 1e-4  # of softplus(bias) at initialisation


class DeltaConfig(LayerConfig):
    """Options of every mixer on the gated delta rule."""

    grows = (*LayerConfig.grows, "num_v_heads")
    unread = {("head_dim", SET): ("expand_k",)}

    num_heads: int = Field(4, ge=1, description="heads of queries and keys; must divide d_model unless head_dim is set")
    num_v_heads: int = Field(
        0, ge=0, description="heads of values, a multiple of num_heads that share its keys; 0 is num_heads"
    )
    head_dim: int = Field(
        0, ge=0, description="width of a key; 0 is expand_k d_model / num_heads, which must be a whole number"
    )
    expand_k: Factor = Field(1.0, description="width of all keys over d_model, without head_dim")
    expand_v: Factor = Field(1.0, description="width of a value over that of a key")
    conv_width: int = Field(4, ge=2, description="tokens that the convolutions of q, k and v see")
    allow_neg_eigval: bool = Field(
        False, description="beta in (0, 2): a token may flip the sign of what it reads, as counting needs"
    )
    norm_eps: Epsilon = Field(1e-5, description="epsilon of the norm in each head")

    @property
    def value_heads(self) -> int:
        return self.num_v_heads or self.num_heads

    def widths(self, d_model: int) -> tuple[int, int]:
        """Returns the widths K and V of a key and a value."""
        key = self.head_dim or round(d_model * self.expand_k / self.num_heads)
        return key, round(key * self.expand_v)

    def check(self, context: LayerContext) -> list[str]:
        problems = [] if self.head_dim else check_heads(context.d_model, self.num_heads, self, context)
        if self.value_heads % self.num_heads:
            problems.append(
                f"num_v_heads: {self.num_v_heads} is not a multiple of num_heads {self.num_heads}; use "
                f"{self.num_heads * max(1, self.num_v_heads // self.num_heads)}"
            )
        exact = context.d_model * self.expand_k / self.num_heads
        if not self.head_dim and not problems and (exact < 1 or not exact.is_integer()):
            step = (Fraction(self.expand_k).limit_denominator(1000) / self.num_heads).denominator
            problems.append(
                f"expand_k: {self.expand_k} gives keys of {exact:g} channels in {self.num_heads} heads of d_model "
                f"{context.d_model}; use a d_model that is a multiple of {step}, change one of the other two, or set "
                "head_dim"
            )
        key = self.head_dim or exact
        if not problems and (
            key * self.expand_v < 0.5 or not math.isclose(key * self.expand_v, round(key * self.expand_v))
        ):
            problems.append(
                f"expand_v: {self.expand_v} gives values of {key * self.expand_v:g} channels for keys of {key:g}; use "
                "a multiple of one over the width of a key"
            )
        return problems


class DeltaMixer(ConvolvedMixer):
    """x [B, T, D] -> [B, T, D]; state [B, HV, K, V] and the last inputs of three convolutions, [B, W - 1, ...] each.

    Attributes:
        gate_activation: activation of the output gate.
        pending_decays: what `log_decay` gives, "none", "head" or "channel", if writes of the state may be delayed. A
            subclass with a `step`, `token`, `heads`, `log_decay`, `recurrence_step` or `state_spec` of its own sets it
            again; without it every token writes.
    """

    mixes_state = True
    tp_counts = ("num_heads", "num_v_heads")
    gate_activation = "silu"
    pending_decays: str | None = None

    def __init__(self, config: DeltaConfig, context: LayerContext):
        super().__init__()
        self.refuse_options(config, context)
        d_model, width = context.d_model, config.conv_width
        self.config, self.d_model = config, d_model
        self.num_heads, self.num_v_heads = config.num_heads, config.value_heads
        self.key_dim, self.value_dim = config.widths(d_model)
        keys, values = self.num_heads * self.key_dim, self.num_v_heads * self.value_dim
        self.q_proj = nn.Linear(d_model, keys, bias=context.bias_qkv)
        self.k_proj = nn.Linear(d_model, keys, bias=context.bias_qkv)
        self.v_proj = nn.Linear(d_model, values, bias=context.bias_qkv)
        self.beta_proj = nn.Linear(d_model, self.num_v_heads, bias=context.bias_all)
        self.q_conv, self.k_conv, self.v_conv = (ShortConv(x, width, silu=True) for x in (keys, keys, values))
        self.norm = build_norm("rmsnorm", self.value_dim, config.norm_eps)
        self.out_proj = last_linear(values, d_model, bias=context.bias_all)

    def log_decay(self, x: Tensor) -> Tensor | None:
        """Returns the log-decays of x [..., D], [..., HV] or [..., HV, K] at least in float32; None for no decay."""
        raise NotImplementedError(f"{self.name} has no log_decay")

    def gate(self, x: Tensor) -> Tensor | None:
        """Returns the output gate of x [..., D] before its activation, [..., HV V]; None for no gate."""
        raise NotImplementedError(f"{self.name} has no gate")

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        before = {} if state is None else state
        q, q_inputs = self.q_conv(self.q_proj(x), before.get("q_conv"), cu_seqlens)
        k, k_inputs = self.k_conv(self.k_proj(x), before.get("k_conv"), cu_seqlens)
        v, v_inputs = self.v_conv(self.v_proj(x), before.get("v_conv"), cu_seqlens)
        o, matrix = self.recurrence(
            *self.heads(q, k, v),
            self.log_decay(x),
            *self.gates(x),
            cu_seqlens,
            initial_state=before.get("matrix"),
            output_final_state=state is not None,
        )
        after = {"matrix": matrix, "q_conv": q_inputs, "k_conv": k_inputs, "v_conv": v_inputs}
        return self._read(o, x), None if state is None else after

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        inputs = [proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        states = [state[name] for name in ("q_conv", "k_conv", "v_conv")]
        q, k, v = step_all((self.q_conv, self.k_conv, self.v_conv), inputs, states)
        return self._read(self.token(q, k, v, x, state), x), state

    def token(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: State) -> Tensor:
        """Computes one token of the recurrence from the outputs of the convolutions and the input x [B, D]; updates
        `matrix` or the pending tokens of the state in place."""
        return self.recurrence_step(*self.heads(q, k, v), self.log_decay(x), *self.gates(x), state)

    def projected_token(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: State, decay: Tensor | None, *gate: Tensor | None
    ) -> Tensor:
        """Computes `token` in one launch on a GPU where heads and gates are those of this class; `decay` are the logits
        of the decay, `gate` its rates and bias (`projected_delta_step`)."""
        q, k = (y.unflatten(-1, (self.num_heads, self.key_dim)) for y in (q, k))
        v, most = v.unflatten(-1, (self.num_v_heads, self.value_dim)), 2.0 if self.config.allow_neg_eigval else 1.0
        settings = {"most": most, "scale": self.key_dim**-0.5, "pending": Pending.of(state)}
        return projected_delta_step(q, k, v, decay, *gate, self.beta_proj(x), state["matrix"], **settings)

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        convolutions = {"q_conv": self.q_conv, "k_conv": self.k_conv, "v_conv": self.v_conv}
        spec = {"matrix": TensorSpec((batch, self.num_v_heads, self.key_dim, self.value_dim), half=True)}
        return spec | {name: short_convolution_spec(batch, *x.weight.shape) for name, x in convolutions.items()}

    def pending_spec(self, batch: int, tokens: int) -> dict[str, TensorSpec]:
        owner = next(kind for kind in type(self).__mro__ if vars(kind).keys() & {*_TOKEN_METHODS, "pending_decays"})
        decays = vars(owner).get("pending_decays")
        if decays is None:
            return {}
        keys, values = (self.num_heads, self.key_dim), (self.num_v_heads, self.value_dim)
        return pending_tokens(batch, tokens - 1, keys, values, self.k_proj.weight.dtype, decays)

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and 10 n K per value channel for the recurrence: the 8 of gated linear attention
        in the convention of paper 000, and 2 for what a key reads before it writes."""
        return super().flops_paper(seq_len) + 10.0 * seq_len * self.num_v_heads * self.value_dim * self.key_dim

    def flops(self, seq_len: int) -> float:
        """Returns the FLOPs of the convolutions, 2 per weight and token, which no matrix product or op counts."""
        return 2.0 * seq_len * sum(conv.weight.numel() for conv in (self.q_conv, self.k_conv, self.v_conv))

    def tp_plan(self) -> dict[str, str]:
        """Splits by heads; a mixer adds the tensors of its decay and gate."""
        plan = dict.fromkeys(("q_proj", "k_proj", "v_proj", "beta_proj"), "colwise")
        plan |= dict.fromkeys(("q_conv", "k_conv", "v_conv"), "split")
        return plan | {"norm": "partial", "out_proj": "rowwise"}

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k [..., H, K] of unit norm and v [..., HV, V] from the outputs of the convolutions."""
        keys = (self.num_heads, self.key_dim)
        q, k = (unit_norm(x.unflatten(-1, keys)) for x in (q, k))
        return q, k, v.unflatten(-1, (self.num_v_heads, self.value_dim))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns what tokens erase, in (0, 1) or (0, 2), and what they write: [..., HV], and None for the same."""
        beta = at_least_float32(self.beta_proj(x)).sigmoid()
        return 2 * beta if self.config.allow_neg_eigval else beta, None

    def recurrence(self, q, k, v, log_decay, erase, write, cu_seqlens: Tensor | None, **states):
        """Returns `gated_delta_rule` of heads and gates; `states` are its arguments about states."""
        gates = (log_decay, erase, write)
        return gated_delta_rule(q, k, v, *gates, scale=self.key_dim**-0.5, cu_seqlens=cu_seqlens, **states)

    def recurrence_step(self, q, k, v, log_decay, erase, write, state: State) -> Tensor:
        """Computes one token of `recurrence`; updates `matrix` or the pending tokens of the state in place."""
        settings = {"scale": self.key_dim**-0.5, "pending": Pending.of(state)}
        return gated_delta_step(q, k, v, log_decay, erase, write, state["matrix"], **settings)

    def _read(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.gate(x)
        if gate is None:
            return self.out_proj(self.norm(o).flatten(-2))
        gate = gate.unflatten(-1, (self.num_v_heads, self.value_dim))
        return self.out_proj(norm_and_gate(self.norm, o, gate, self.gate_activation).flatten(-2))


def pending_tokens(
    batch: int, room: int, keys: tuple[int, int], values: tuple[int, int], dtype: torch.dtype, decays: str
) -> dict[str, TensorSpec]:
    """Returns the buffers of `linnet.ops.stepping.Pending` for `room` tokens.

    Args:
        keys, values: heads and their width.
        dtype: of the keys.
        decays: "none", "head" or "channel".
    """
    (key_heads, K), (heads, V) = keys, values
    spec = {"keys": TensorSpec((batch, key_heads, room, K), dtype), "updates": TensorSpec((batch, heads, room, V))}
    if decays == "none":
        return spec
    return spec | {"decays": TensorSpec((batch, heads, room, K) if decays == "channel" else (batch, heads, room))}


@torch.no_grad()
def draw_steps(bias: Tensor) -> None:
    """Fills a bias so that its softplus is log-uniform in [1e-3, 1e-1] (Gu and Dao 2023, arXiv:2312.00752)."""
    step = bias.uniform_(math.log(SHORTEST_STEP), math.log(LONGEST_STEP)).exp().clamp(min=SMALLEST_STEP)
    bias.copy_(step + (-torch.expm1(-step)).log())
