"""Softmax attention with RoPE: the Transformer baseline (LLaMA; paper 000, A.1.1), with an optional sliding window.

`forward` calls `linnet.ops.attention`, which chooses the kernel for windows and packed documents. The state is a KV
cache: a ring of `context_length` slots, or of `window` slots with a window, so a windowed layer has constant memory.
Without causality every token attends to all tokens and a window is refused; on a grid RoPE rotates one group of pairs
per axis.
"""

from functools import lru_cache

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, register_mixer
from linnet.layers.non_causal import refuse_state
from linnet.layers.norm import RMSNorm
from linnet.layers.output import check_heads, split_heads
from linnet.layers.positions.angles import token_positions
from linnet.layers.positions.grid import Grid
from linnet.layers.positions.rope import Rope, RopeScalingConfig, check_rope
from linnet.ops.attention import attend_window, causal_attention, full_attention, span_problems


class AttentionConfig(LayerConfig):
    """Options of `attention`."""

    num_heads: int = Field(8, ge=1, description="heads; must divide d_model unless head_dim is given")
    num_kv_heads: int = Field(0, ge=0, description="grouped-query attention; 0 means num_heads")
    head_dim: int = Field(0, ge=0, description="width of a head; 0 means d_model / num_heads")
    qk_norm: bool = Field(False, description="RMSNorm of each query and key, before their rotation, as in Qwen3")
    rope: bool = Field(True, description="rotary position embedding of queries and keys")
    rope_base: float = Field(10000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="lower frequencies, for longer contexts")
    bias: bool = Field(False, description="biases of all four projections, whatever the `bias` of the model says")
    window: int = Field(0, ge=0, description="tokens that each token sees, itself included; 0 means all before it")

    def check(self, context: LayerContext) -> list[str]:
        problems = [] if self.head_dim else check_heads(context.d_model, self.num_heads)
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
            problems += check_rope(self.head_dim or context.d_model // self.num_heads, key)
        return problems


@register_mixer("attention", AttentionConfig)
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
        self.head_dim = config.head_dim or split_heads(d_model, config.num_heads, self.name)
        for problem in config.check(context):
            raise ValueError(f"attention.{problem}")
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(d_model, dim, bias=config.bias or context.bias_qkv)
        self.k_proj = nn.Linear(d_model, kv_dim, bias=config.bias or context.bias_qkv)
        self.v_proj = nn.Linear(d_model, kv_dim, bias=config.bias or context.bias_qkv)
        self.out_proj = nn.Linear(dim, d_model, bias=config.bias or context.bias_all)
        self.out_proj.ends_residual = True
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, context.norm_eps or 1e-6) if config.qk_norm else None for _ in range(2)
        )
        self.rope = Rope(self.head_dim, config.rope_base, config.rope_scaling, context.axes) if config.rope else None

    @classmethod
    def span_problems(cls, config: AttentionConfig, context: LayerContext, span: int, ranks: int, tp: int = 1):
        groups = config.num_kv_heads or config.num_heads
        return span_problems(config.num_heads // tp, groups // tp, config.window, span, ranks)

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
            return self.out_proj(o.flatten(-2)), None
        if cu_seqlens is not None and state is not None:
            raise ValueError(
                "attention: a state belongs to rows of a batch and cu_seqlens to packed documents; pass one of the two"
            )
        positions = token_positions(x, None if state is None else state["position"], cu_seqlens)
        q, k, v = self._project(x, positions)
        if state is None:
            o = causal_attention(q, k, v, self.config.window, cu_seqlens)
        else:
            o = self._attend_after(q, k, v, positions, state)
            state = self._write(state, k, v, positions)
        return self.out_proj(o.flatten(-2)), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Computes one token. Writes the ring in place and reads all slots, so a CUDA graph can capture the step."""
        positions = state["position"][:, None]
        q, k, v = self._project(x, state["position"])
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        slot = (rows, positions % state["k"].shape[1])
        state["k"].index_put_(slot, k[:, None].to(state["k"].dtype))
        state["v"].index_put_(slot, v[:, None].to(state["v"].dtype))
        state["key_position"].index_put_(slot, positions + 1)
        keys, values = state["k"].to(q.dtype), state["v"].to(q.dtype)
        o = self._attend_slots(q[:, None], keys, values, positions, state["key_position"] - 1)
        state["position"] += 1
        return self.out_proj(o[:, 0].flatten(-2)), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        slots = min(context_length, self.config.window) if self.config.window else context_length
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
        its Table 1)."""
        n, d, w = seq_len, self.d_model, self.num_heads * self.head_dim
        seen = min(n, self.config.window) if self.config.window else n
        return 8.0 * n * d * w + 4.0 * n * seen * w + 4.0 * n * w

    def flops_masked(self, seq_len: int) -> float:
        """4 d for each pair of tokens that the kernel computes and the mask hides; 0 without causality."""
        if not self.causal:
            return 0.0
        seen = min(seq_len, self.config.window or seq_len)
        visible = seq_len * seen - seen * (seen - 1) // 2
        return 4.0 * self.d_model * (_computed_pairs(seq_len, self.config.window) - visible)

    def tp_plan(self) -> dict[str, str]:
        plan = {name: "colwise" for name in ("q_proj", "k_proj", "v_proj")}
        return plan | {"q_norm": "partial", "k_norm": "partial", "rope": "whole", "out_proj": "rowwise"}

    def _project(self, x: Tensor, positions: Tensor):
        """Returns q, k, v [..., H, d] of x [B, T, D] at positions [B, T], or of one token [B, D] at [B]."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self.rope(q, positions), self.rope(k, positions)
        return q, k, v

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

    def _attend_slots(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        """Returns attention of q [B, T, H, d] at `positions` [B, T] to slots in any order; -1 marks an empty slot."""
        distance = positions[:, :, None] - key_positions[:, None, :]
        visible = (distance >= 0) & (key_positions >= 0)[:, None, :]
        if self.config.window:
            visible = visible & (distance < self.config.window)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = self.num_kv_heads != self.num_heads
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], enable_gqa=grouped).transpose(1, 2)

    def _write(self, state: State, k: Tensor, v: Tensor, positions: Tensor) -> State:
        slots = state["k"].shape[1]
        kept = min(slots, k.shape[1])
        last = positions[:, -kept:]
        slot = last % slots
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        k_dtype = state["k"].dtype
        return {
            "k": state["k"].index_put((rows, slot), k[:, -kept:].to(k_dtype)),
            "v": state["v"].index_put((rows, slot), v[:, -kept:].to(k_dtype)),
            "key_position": state["key_position"].index_put((rows, slot), last + 1),
            "position": state["position"] + positions.shape[1],
        }


@lru_cache(maxsize=256)
def _computed_pairs(seq_len: int, window: int) -> int:
    """Returns how many pairs of tokens attention computes in one head, whether the mask hides them or not."""
    x = torch.empty(1, seq_len, 1, 1, device="meta")
    with FlopCounterMode(display=False) as counter:
        causal_attention(x, x, x, window)
    return counter.get_total_flops() // 4
