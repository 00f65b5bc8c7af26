"""Softmax attention with RoPE: the Transformer baseline (LLaMA; paper 000, A.1.1), with an optional sliding window.

`forward` chooses the kernel for windows and packed documents (`linnet/ops/attention`). The state is a KV cache: a ring
of `context_length` slots, or of `window` (or `block`) slots, so such a layer has constant memory.

TransNormer's DiagAttention (arXiv:2210.10340; paper 001, Table 12) is `block: 64` with LRPE in place of RoPE, a norm of
the output, and scores from softmax (T2) or relu (T1).

Hybrids of linear and softmax attention use further options: an output gate o * sigmoid(x W_g) (arXiv:2505.06708,
Qwen3-Next), a norm of queries and keys that is zero-centred or over all heads (OLMo 2, arXiv:2501.00656), RoPE of a
share of the channels, and a scale of the scores (Granite).

Without causality every token attends to all tokens, and windows and blocks are refused; on a grid RoPE rotates one
group of pairs per axis.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import Factor, Period, added
from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, last_linear, register_mixer
from linnet.layers.non_causal import refuse_state
from linnet.layers.norm import NormKind, build_norm
from linnet.layers.output import check_heads, split_heads
from linnet.layers.positions import (
    Grid,
    Lrpe,
    Reflection,
    Rope,
    RopeScalingConfig,
    check_real,
    check_room,
    check_rope,
    token_positions,
)
from linnet.ops.activation import gated_activation
from linnet.ops.attention import (
    Cache,
    Turn,
    attend_token,
    attend_window,
    causal_attention,
    full_attention,
    has_step_kernel,
    span_problems,
)
from linnet.ops.attention.blocked import Scores, block_attention, weigh

QkNorm = Literal["rmsnorm", "zero_centred_rmsnorm"]


class AttentionConfig(LayerConfig):
    """Options of `attention`."""

    unread = {("rope", False): ("rope_base", "rope_scaling")}

    num_heads: int = Field(8, ge=1, description="heads; must divide d_model unless head_dim is given")
    num_kv_heads: int = Field(0, ge=0, description="grouped-query attention; 0 means num_heads")
    head_dim: int = Field(0, ge=0, description="width of a head; 0 means d_model / num_heads")
    qk_norm: bool = Field(False, description="RMSNorm of each query and key, before their rotation, as in Qwen3")
    qk_norm_kind: QkNorm = added("rmsnorm", description="of qk_norm; zero_centred_rmsnorm multiplies by 1 + w")
    qk_norm_over: Literal["head", "width"] = added(
        "head",
        description="what qk_norm normalises: the channels of each head, or those of all heads together, as in OLMo 2",
    )
    gate: Literal["none", "channel", "head"] = added(
        "none",
        description="multiplies the output by a sigmoid of x W before the output projection; one gate per channel "
        "(Qwen3-Next) or per head",
    )
    scale: Factor | None = added(None, description="of q k; null is 1 / sqrt(head width), with muP 1 / head width")
    rope: bool = Field(
        True, description="rotary position embedding of queries and keys; false leaves positions out (NoPE)"
    )
    rope_fraction: float = added(
        1.0, gt=0, le=1, description="share of the channels of a head that RoPE rotates, the first ones"
    )
    rope_base: Period = Field(10000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="lower frequencies, for longer contexts")
    bias: bool = Field(False, description="biases of all four projections, whatever the `bias` of the model says")
    window: int = Field(0, ge=0, description="tokens that each token sees, itself included; 0 means all before it")
    block: int = Field(
        0, ge=0, description="tokens per block: a token sees those before it in its own block only; 0 means no blocks"
    )
    scores: Scores = Field("softmax", description="of q k / sqrt(head width); relu needs a block")
    out_norm: Literal["none"] | NormKind = Field(
        "none", description="norm of the concatenated heads before the output projection"
    )
    lrpe: bool = Field(
        False, description="rotate queries and keys by learned frequencies (LRPE, real form); needs rope: false"
    )
    lrpe_reflection: Reflection = Field(
        "none", description="householder reflects queries and keys at a fixed random vector before LRPE rotates them"
    )

    def check(self, context: LayerContext) -> list[str]:
        problems = [] if self.head_dim else check_heads(context.d_model, self.num_heads, self, context)
        if problems:
            return problems
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            problems = [f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}; use a divisor"]
        if self.window and not context.causal:
            problems.append(
                f"window: {self.window} is defined by the tokens before a token; without causality use window: 0"
            )
        if self.rope:
            key = "head_dim" if self.head_dim else "num_heads"
            width = self.head_dim or context.d_model // self.num_heads
            problems += check_rope(width, key, self.rope_fraction, self.rope_base, self.rope_scaling)
        elif self.rope_fraction != 1.0:
            problems.append(f"rope_fraction: {self.rope_fraction} has no effect without RoPE; set rope: true")
        if not self.qk_norm:
            problems += [
                f"{key}: {option} has no effect without qk_norm; set qk_norm: true"
                for key, option, default in (
                    ("qk_norm_kind", self.qk_norm_kind, "rmsnorm"),
                    ("qk_norm_over", self.qk_norm_over, "head"),
                )
                if option != default
            ]
        return problems + self._block_problems(context) + self._lrpe_problems(context)

    def _block_problems(self, context: LayerContext) -> list[str]:
        if self.scores == "relu" and not self.block:
            return ["scores: relu is computed in blocks; set block, for example 64, or use scores: softmax"]
        if self.block and self.window:
            return [f"block: {self.block} and window: {self.window} exclude each other; set one of them to 0"]
        if self.block and not context.causal:
            return [f"block: {self.block} is defined by the tokens before a token; without causality use block: 0"]
        return []

    def _lrpe_problems(self, context: LayerContext) -> list[str]:
        if not self.lrpe:
            if self.lrpe_reflection == "none":
                return []
            return [f"lrpe_reflection: {self.lrpe_reflection} has no effect without LRPE; set lrpe: true"]
        if self.rope:
            return ["lrpe: true takes the place of RoPE; set rope: false"]
        if self.num_kv_heads not in (0, self.num_heads):
            return [
                f"lrpe: has frequencies of {self.num_heads} heads, but num_kv_heads is {self.num_kv_heads}; set it to 0"
            ]
        return check_real(self.head_dim or context.d_model // self.num_heads)


class Kind(NamedTuple):
    """The options that decide which tokens each token sees, and how."""

    window: int
    block: int
    scores: Scores


@register_mixer("attention", AttentionConfig, "transformer", "softmax_attention", "self_attention", "mha", "gqa", "mqa")
class Attention(Mixer):
    """Maps x [B, T, D] to [B, T, D]; the state is a ring of keys and values, their positions, and the next position."""

    sequence_parallel = True
    non_causal = "one_scan"
    takes_grid = True

    def __init__(self, config: AttentionConfig, context: LayerContext):
        super().__init__()
        d_model = context.d_model
        self.config, self.d_model, self.num_heads = config, d_model, config.num_heads
        self.causal = context.causal
        self._kind = Kind(config.window, config.block, config.scores)
        self.head_dim = config.head_dim or split_heads(d_model, config.num_heads, self.name, config, context)
        self.refuse_options(config, context)
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(d_model, dim, bias=config.bias or context.bias_qkv)
        self.k_proj = nn.Linear(d_model, kv_dim, bias=config.bias or context.bias_qkv)
        self.v_proj = nn.Linear(d_model, kv_dim, bias=config.bias or context.bias_qkv)
        self.out_proj = last_linear(dim, d_model, bias=config.bias or context.bias_all)
        if config.gate != "none":
            gates = dim if config.gate == "channel" else self.num_heads
            self.gate_proj = nn.Linear(d_model, gates, bias=config.bias or context.bias_all)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            widths = (dim, kv_dim) if config.qk_norm_over == "width" else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = (build_norm(config.qk_norm_kind, width, context.norm_eps) for width in widths)
        self.out_norm = None if config.out_norm == "none" else build_norm(config.out_norm, dim, context.norm_eps)
        # Kernels divide by the square root of the width of a head.
        self.query_scale = self.head_dim**-0.5 if context.mup else None
        if config.scale is not None:
            self.query_scale = config.scale * self.head_dim**0.5
        self.rope = None
        if config.rope:
            self.rope = Rope(self.head_dim, config.rope_base, config.rope_scaling, context.axes, config.rope_fraction)
        self.lrpe = None
        if config.lrpe:
            settings = {"reflection": config.lrpe_reflection, "layer_index": context.layer_index}
            self.lrpe = Lrpe(self.num_heads, self.head_dim, "real", axes=context.axes, **settings)

    @classmethod
    def span_problems(cls, config: AttentionConfig, context: LayerContext, span: int, ranks: int, tp: int = 1):
        if config.block:
            return [f"block: {config.block} has no form for rows that are cut into spans; use parallel.sp: 1"]
        groups = config.num_kv_heads or config.num_heads
        return span_problems(config.num_heads, groups, config.window, span, ranks, tp)

    def least_span(self, ranks: int) -> int:
        by_heads = not span_problems(self.num_heads, self.num_kv_heads, 0, 1, ranks)
        return 1 if by_heads else max(1, self.config.window - 1)

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        if not self.causal:
            refuse_state(state)
            positions = token_positions(x, None, cu_seqlens) if grid is None else grid.positions(x.device)
            o = full_attention(*self._project(x, positions), cu_seqlens)
            return self._output(o, x), None
        if cu_seqlens is not None and state is not None:
            raise ValueError(
                "attention: a state belongs to rows of a batch and cu_seqlens to packed documents; pass one of the two"
            )
        positions = token_positions(x, None if state is None else state["position"], cu_seqlens)
        q, k, v = self._project(x, positions)
        if state is None:
            o = _attend_rows(q, k, v, self._kind, cu_seqlens)
        else:
            check_room(positions[:, -1], state["key_position"].shape[1], self._reach)
            after = self._attend_block_after if self.config.block else self._attend_after
            o = after(q, k, v, positions, state)
            state = write_ring(state, {"k": k, "v": v}, positions)
        return self._output(o, x), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Computes one token. Writes the ring in place and reads all slots, so a CUDA graph can capture the step."""
        check_room(state["position"], state["key_position"].shape[1], self._reach)
        q, k, v = self._heads(x)
        cache = Cache(state["k"], state["v"], state["key_position"], state["position"])
        plain = self.lrpe is None and self.config.scores == "softmax"
        if plain and has_step_kernel(q, k, v, cache) and not self._learns():
            return self._attend_token(q, k, v, x, cache), state
        positions = state["position"][:, None]
        q, k, v = *self._place(q, k, state["position"]), v
        write_slot(state, {"k": k, "v": v}, positions)
        keys, values = state["k"].to(q.dtype), state["v"].to(q.dtype)
        o = self._attend_slots(q[:, None], keys, values, positions, state["key_position"] - 1)
        state["position"] += 1
        return self._output(o[:, 0], x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        slots = min(context_length, self._reach or context_length)
        kv = (batch, slots, self.num_kv_heads, self.head_dim)
        dtype = self.k_proj.weight.dtype
        return {
            "k": TensorSpec(kv, dtype, counted=0),
            "v": TensorSpec(kv, dtype, counted=0),
            "key_position": TensorSpec((batch, slots), torch.int64),
            "position": TensorSpec((batch,), torch.int64),
        }

    def flops_paper(self, seq_len: int) -> float:
        """8ndw + 4n^2 w + 4nw with w = d unless `head_dim` is given (paper 000, A.1.1, without the softmax term, as in
        its Table 1), and 2 per weight of a gate."""
        n, d, w = seq_len, self.d_model, self.num_heads * self.head_dim
        seen = min(n, self._reach or n)
        gate = 0.0 if self.config.gate == "none" else 2.0 * n * self.gate_proj.weight.numel()
        return 8.0 * n * d * w + 4.0 * n * seen * w + 4.0 * n * w + gate

    def flops_004(self, seq_len: int) -> float:
        """6ndw + 4n^2 w + 2hn^2 + 2nwd (paper 004, C.4.1): with the softmax of h heads, and without the term 4nw."""
        n, w = seq_len, self.num_heads * self.head_dim
        return self.flops_paper(n) - 4.0 * n * w + 2.0 * self.num_heads * n * min(n, self._reach or n)

    def flops_masked(self, seq_len: int) -> float:
        """4 w for each pair of tokens that the kernel computes and the mask hides; 0 without causality."""
        if not self.causal:
            return 0.0
        return 4.0 * self.num_heads * self.head_dim * hidden_pairs(seq_len, self._kind)

    def tp_plan(self) -> dict[str, str]:
        plan = {name: "colwise" for name in ("q_proj", "k_proj", "v_proj")}
        norm = "split_norm" if self.config.qk_norm_over == "width" else "partial"
        plan |= {"q_norm": norm, "k_norm": norm, "rope": "whole", "out_proj": "rowwise"}
        if self.config.gate != "none":
            plan["gate_proj"] = "colwise"
        if self.out_norm is not None:
            plan["out_norm"] = "split_norm"
        return plan if self.lrpe is None else plan | {f"lrpe.{name}": how for name, how in self.lrpe.tp_plan().items()}

    @property
    def _reach(self) -> int:
        """Returns how many tokens each token sees at most, 0 for all before it."""
        return self.config.block or self.config.window

    def _learns(self) -> bool:
        """Whether a gradient is requested: of a gate or a gain, for example, while the projections are fixed."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.parameters())

    def _attend_token(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, cache: Cache) -> Tensor:
        """`step` from the projections on, by kernels."""
        turn = Turn()
        if self.q_norm is not None and self.config.qk_norm_over == "head":
            turn = turn._replace(q_gain=self.q_norm.gain(), k_gain=self.k_norm.gain(), eps=self.q_norm.eps)
        if self.rope is not None:
            turn = turn._replace(theta=self.rope.theta, amplitude=self.rope.amplitude)
        gated = self.config.gate != "none" and self.out_norm is None
        gate = self.gate_proj(x) if gated else None
        o = attend_token(q, k, v, cache, turn, gate, self.query_scale or 1.0, self.config.window, self.config.block)
        return self.out_proj(o.flatten(-2)) if gated else self._output(o, x)

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        """Maps the heads' outputs [..., H, d] and the layer's input [..., D] to [..., D]."""
        if self.config.gate == "head":
            o = o * self.gate_proj(x).sigmoid()[..., None]
        o = o.flatten(-2)
        o = o if self.out_norm is None else self.out_norm(o)
        return self.out_proj(gated_activation(self.gate_proj(x), o, "sigmoid") if self.config.gate == "channel" else o)

    def _project(self, x: Tensor, positions: Tensor):
        """Returns q, k, v [B, T, H, d] of x [B, T, D] at positions [B, T]."""
        q, k, v = self._heads(x)
        return *self._place(q, k, positions), v

    def _heads(self, x: Tensor):
        """Returns q, k, v [..., H, d] of x [B, T, D], or of one token [B, D], before all that is done to each head."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.config.qk_norm_over == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        return q, *(y.unflatten(-1, (self.num_kv_heads, self.head_dim)) for y in (k, v))

    def _place(self, q: Tensor, k: Tensor, positions: Tensor):
        """Returns queries and keys after the norm of each head and the rotation by their positions, [B, T] or [B]."""
        if self.q_norm is not None and self.config.qk_norm_over == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self.rope(q, positions), self.rope(k, positions)
        if self.lrpe is not None:
            q, k = self.lrpe(q, positions), self.lrpe(k, positions)
        return q if self.query_scale is None else q * self.query_scale, k

    def _attend_after(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, state: State) -> Tensor:
        """Returns the attention of T tokens that follow a state.

        With a window, only the first `window` tokens attend to the ring. Later tokens attend only to tokens of this
        call, in blocks, which work for any T without compilation.
        """
        length, window = q.shape[1], self.config.window
        head = min(length, window) if window else length
        keys = torch.cat([state["k"].to(k.dtype), k[:, :head]], dim=1)
        values = torch.cat([state["v"].to(v.dtype), v[:, :head]], dim=1)
        # An empty slot has position -1. Positions are stored shifted by one, so that a zero state is an empty ring.
        key_positions = torch.cat([state["key_position"] - 1, positions[:, :head]], dim=1)
        o = self._attend_slots(q[:, :head], keys, values, positions[:, :head], key_positions)
        if head == length:
            return o
        return torch.cat([o, attend_window(q, k, v, window)[:, head:]], dim=1)

    def _attend_block_after(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, state: State) -> Tensor:
        """As `_attend_after`, with blocks.

        The blocks of each row start at other tokens of this call, so the tokens are cut into pieces of `block`. Each
        piece attends to itself and to the piece before it, the first one to the ring.
        """
        (batch, length), block = q.shape[:2], self.config.block
        missing, empty = -length % block, block - state["k"].shape[1]
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
        index = torch.arange(length + missing, device=q.device)
        places = (state["position"][:, None] + index) if missing else positions  # padding sees and is seen by itself
        ring = (F.pad(state[name].to(k.dtype), (0, 0, 0, 0, 0, empty)) for name in ("k", "v"))
        before = F.pad(state["key_position"] - 1, (0, empty), value=-1)

        def pieces(x: Tensor, first: Tensor | None = None) -> Tensor:
            blocks = x.unflatten(1, (-1, block))
            if first is None:
                return blocks.flatten(0, 1)
            return torch.cat([torch.cat([first[:, None], blocks[:, :-1]], 1), blocks], 2).flatten(0, 1)

        keys, values = (pieces(x, first) for x, first in zip((k, v), ring, strict=True))
        o = self._attend_slots(pieces(q), keys, values, pieces(places), pieces(places, before))
        return o.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]

    def _attend_slots(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        """Returns attention of q [B, T, H, d] at `positions` [B, T] to slots in any order; -1 marks an empty slot."""
        distance = positions[:, :, None] - key_positions[:, None, :]
        visible = (distance >= 0) & (key_positions >= 0)[:, None, :]
        if self.config.window:
            visible = visible & (distance < self.config.window)
        if block := self.config.block:
            visible = visible & (positions[:, :, None] // block == key_positions[:, None, :] // block)
        return weigh(q, k, v, visible, self.config.scores)


def write_ring(state: State, new: State, positions: Tensor) -> State:
    """Returns a ring of slots after the tokens `new` [B, T, ...], by the names of its tensors, at positions [B, T]."""
    slots, length = state["key_position"].shape[1], positions.shape[1]
    kept = min(slots, length)
    last = positions[:, -kept:]
    place = (torch.arange(positions.shape[0], device=positions.device)[:, None], last % slots)
    return {
        **{name: state[name].index_put(place, x[:, -kept:].to(state[name].dtype)) for name, x in new.items()},
        "key_position": state["key_position"].index_put(place, last + 1),
        "position": state["position"] + length,
    }


def write_slot(state: State, new: State, positions: Tensor) -> None:
    """As `write_ring` for one token, [B, ...] at [B, 1], in place and without the next position."""
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
    place = (rows, positions % state["key_position"].shape[1])
    for name, x in (new | {"key_position": positions[:, 0] + 1}).items():
        state[name].index_put_(place, x[:, None].to(state[name].dtype))


def hidden_pairs(seq_len: int, kind: Kind) -> int:
    """Returns how many pairs of tokens attention computes in one head though the causal mask hides them."""
    seen = min(seq_len, kind.block or kind.window or seq_len)
    if kind.block:
        whole, rest = divmod(seq_len, seen)
        visible = (whole * seen * (seen + 1) + rest * (rest + 1)) // 2
    else:
        visible = seq_len * seen - seen * (seen - 1) // 2
    return _computed_pairs(seq_len, kind) - visible


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, kind: Kind, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns the attention of whole rows from their start."""
    if kind.block:
        return block_attention(q, k, v, kind.block, kind.scores, cu_seqlens)
    return causal_attention(q, k, v, kind.window, cu_seqlens)


@lru_cache(maxsize=256)
def _computed_pairs(seq_len: int, kind: Kind) -> int:
    """Returns how many pairs of tokens attention computes in one head, whether the mask hides them or not."""
    from torch.utils.flop_counter import FlopCounterMode  # brings Triton with it

    x = torch.empty(1, seq_len, 1, 1, device="meta")
    with FlopCounterMode(display=False) as counter:
        _attend_rows(x, x, x, kind)
    return counter.get_total_flops() // 4
