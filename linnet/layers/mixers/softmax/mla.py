"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434; Kimi Linear, arXiv:2510.26692): a cache of latents.

Keys and values of all heads are linear in one latent per token, c = RMSNorm(x W_c), and all heads share one further key
x W_r, which RoPE rotates:

    q_h = [x W_q,h | rope(x W_qr,h)],   k_h = [c W_k,h | rope(x W_r)],   v_h = c W_v,h

The cache is c and the rotated key, 512 + 64 numbers per token by default for any number of heads. A step does not form
the keys: W_k moves to the query and W_v behind the sum, so it attends to the latents themselves. With `q_rank` queries
come from a latent of their own. Kimi Linear has `rope: false`: the shared key stays, and nothing rotates.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import Epsilon, Factor, Period, added
from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, last_linear, register_mixer
from linnet.layers.mixers.softmax.attention import Kind, hidden_pairs, write_ring, write_slot
from linnet.layers.norm import RMSNorm
from linnet.layers.positions import Rope, RopeScalingConfig, check_room, check_rope, token_positions
from linnet.ops.activation import gated_activation
from linnet.ops.attention import causal_attention, span_problems
from linnet.ops.attention.blocked import weigh


class MlaConfig(LayerConfig):
    """Options of `mla`."""

    unread = {("rope", False): ("rope_interleaved", "rope_base", "rope_scaling")}

    num_heads: int = Field(8, ge=1, description="heads")
    kv_rank: int = Field(512, ge=1, description="numbers of the latent of keys and values")
    q_rank: int = Field(0, ge=0, description="numbers of the latent of queries; 0 is none")
    nope_dim: int = Field(128, ge=1, description="channels of a key from the latent")
    rope_dim: int = Field(64, ge=1, description="channels of the key that all heads share")
    v_dim: int = Field(128, ge=1, description="channels of a value")
    rope: bool = Field(
        True, description="rotate the shared key and its part of the queries; false leaves positions out"
    )
    rope_interleaved: bool = added(
        False, description="rotate channels 2i and 2i + 1 together, in place of i and i + rope_dim / 2"
    )
    rope_base: Period = Field(10000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="lower frequencies, for longer contexts")
    scale: Factor | None = Field(
        None, description="of q k; null is 1 / sqrt(nope_dim + rope_dim), with muP without the root"
    )
    gate: bool = Field(False, description="multiplies the output by a sigmoid of x W before the output projection")
    gate_per_head: bool = added(False, description="the gate has one number per head (Ling 3)")
    norm_eps: Epsilon | None = Field(None, description="epsilon of the norms of latents; null is that of the model")
    bias: bool = Field(False, description="biases of the projections to latents and of the output projection")

    def check(self, context: LayerContext) -> list[str]:
        problems = ["gate_per_head: true has no effect without a gate; set gate: true"]
        problems = problems if self.gate_per_head and not self.gate else []
        if not self.rope:
            return problems
        return problems + check_rope(self.rope_dim, "rope_dim", base=self.rope_base, scaling=self.rope_scaling)


@register_mixer("mla", MlaConfig, "multi_head_latent_attention", "latent_attention")
class Mla(Mixer):
    """x [B, T, D] -> [B, T, D]; the state is a ring of latents and shared keys, their positions, and the next one."""

    sequence_parallel = True

    def __init__(self, config: MlaConfig, context: LayerContext):
        super().__init__()
        self.refuse_options(config, context)
        d_model, heads, eps = context.d_model, config.num_heads, config.norm_eps or context.norm_eps or 1e-6
        self.config, self.num_heads, self.width = config, heads, config.nope_dim + config.rope_dim
        inner = config.bias or context.bias_qkv
        if config.q_rank:
            self.q_down = nn.Linear(d_model, config.q_rank, bias=inner)
            self.q_norm = RMSNorm(config.q_rank, eps)
            self.q_proj = nn.Linear(config.q_rank, heads * self.width, bias=context.bias_all)
            self.q_proj.mup_roles = {"weight": "vector"}  # a rank does not grow with the width
        else:
            self.q_proj = nn.Linear(d_model, heads * self.width, bias=context.bias_qkv)
        self.kv_down = nn.Linear(d_model, config.kv_rank + config.rope_dim, bias=inner)
        self.kv_norm = RMSNorm(config.kv_rank, eps)
        self.kv_up = nn.Linear(config.kv_rank, heads * (config.nope_dim + config.v_dim), bias=context.bias_all)
        self.kv_up.mup_roles = {"weight": "vector"}
        if config.gate:
            channels = heads if config.gate_per_head else heads * config.v_dim
            self.gate_proj = nn.Linear(d_model, channels, bias=context.bias_all)
        self.out_proj = last_linear(heads * config.v_dim, d_model, bias=config.bias or context.bias_all)
        self.scale = config.scale or (1.0 / self.width if context.mup else self.width**-0.5)
        self.rope = Rope(config.rope_dim, config.rope_base, config.rope_scaling) if config.rope else None

    @classmethod
    def span_problems(cls, config: MlaConfig, context: LayerContext, span: int, ranks: int, tp: int = 1):
        return span_problems(config.num_heads, config.num_heads, 0, span, ranks, tp)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        if cu_seqlens is not None and state is not None:
            raise ValueError(
                "mla: a state belongs to rows of a batch and cu_seqlens to packed documents; pass one of the two"
            )
        positions = token_positions(x, None if state is None else state["position"], cu_seqlens)
        q, latent, key = self._project(x, positions)
        if state is None:
            # The kernels take one width, of which they divide by the square root.
            width = max(self.width, self.config.v_dim)
            k, v = self._expand(latent, key)
            q, k, v = (F.pad(y, (0, width - y.shape[-1])) for y in (q * (self.scale * width**0.5), k, v))
            o = causal_attention(q, k, v, 0, cu_seqlens)[..., : self.config.v_dim]
            return self._output(o, x), None
        check_room(positions[:, -1], state["key_position"].shape[1])
        k, v = self._expand(
            torch.cat([state["latent"].to(x.dtype), latent], 1), torch.cat([state["key"].to(x.dtype), key], 1)
        )
        places = torch.cat([state["key_position"] - 1, positions], 1)  # -1 is an empty slot
        o = self._attend(q, k, v, positions, places)
        return self._output(o, x), write_ring(state, {"latent": latent, "key": key}, positions)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Computes one token from the latents. Writes the ring in place and reads all slots."""
        check_room(state["position"], state["key_position"].shape[1])
        positions = state["position"][:, None]
        q, latent, key = self._project(x, state["position"])
        write_slot(state, {"latent": latent, "key": key}, positions)
        latents, keys = (state[name].to(q.dtype) for name in ("latent", "key"))
        of_keys, of_values = self.kv_up.weight.unflatten(0, (self.num_heads, -1)).split(
            [self.config.nope_dim, self.config.v_dim], 1
        )
        q, rotated = q.split([self.config.nope_dim, self.config.rope_dim], -1)
        q = torch.cat([torch.einsum("bhn,hnr->bhr", q, of_keys.to(q.dtype)), rotated], -1)[:, None]
        places = state["key_position"] - 1
        o = self._attend(q, torch.cat([latents, keys], -1)[:, :, None], latents[:, :, None], positions, places)
        o = torch.einsum("bhr,hvr->bhv", o[:, 0], of_values.to(o.dtype))
        if self.kv_up.bias is not None:  # that of the keys adds the same to all scores of a query
            o = o + self.kv_up.bias.unflatten(0, (self.num_heads, -1))[:, self.config.nope_dim :].to(o.dtype)
        state["position"] += 1
        return self._output(o, x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        dtype = self.kv_down.weight.dtype
        return {
            "latent": TensorSpec((batch, context_length, self.config.kv_rank), dtype, counted=0),
            "key": TensorSpec((batch, context_length, self.config.rope_dim), dtype, counted=0),
            "key_position": TensorSpec((batch, context_length), torch.int64),
            "position": TensorSpec((batch,), torch.int64),
        }

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and token, and 2 per channel of keys and values and pair, as of attention."""
        pairs = 2.0 * seq_len**2 * self.num_heads * (self.width + self.config.v_dim)
        return super().flops_paper(seq_len) + pairs

    def flops_masked(self, seq_len: int) -> float:
        """Returns 4 FLOPs per channel, head and hidden pair; of keys and values the wider ones count, as computed."""
        width = max(self.width, self.config.v_dim)
        return 4.0 * self.num_heads * width * hidden_pairs(seq_len, Kind(0, 0, "softmax"))

    def tp_plan(self) -> dict[str, str]:
        """Splits by heads; every rank has all latents."""
        plan = {"q_proj": "colwise", "kv_up": "colwise", "out_proj": "rowwise", "rope": "whole"}
        plan |= dict.fromkeys(("kv_down", "kv_norm"), "partial")
        if self.config.q_rank:
            plan |= dict.fromkeys(("q_down", "q_norm"), "partial")
        return plan | {"gate_proj": "colwise"} if self.config.gate else plan

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [..., H, nope + rope], latents [..., R] and shared keys [..., rope] of x [..., D]."""
        rank, rotated = self.config.kv_rank, self.config.rope_dim
        q = self.q_proj(self.q_norm(self.q_down(x)) if self.config.q_rank else x)
        q = q.unflatten(-1, (self.num_heads, self.width))
        latent, key = self.kv_down(x).split([rank, rotated], -1)
        if self.rope is not None:
            plain, last = q.split([self.config.nope_dim, rotated], -1)
            if self.config.rope_interleaved:  # one order for queries and keys does not change their products
                last, key = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (last, key))
            q = torch.cat([plain, self.rope(last, positions)], -1)
            key = self.rope(key[..., None, :], positions)[..., 0, :]
        return q, self.kv_norm(latent), key

    def _expand(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values [B, S, H, ...] of latents and shared keys."""
        up = self.kv_up(latent).unflatten(-1, (self.num_heads, -1))
        k, v = up.split([self.config.nope_dim, self.config.v_dim], -1)
        return torch.cat([k, key[..., None, :].expand(*k.shape[:-1], -1)], -1), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        """Returns attention of q [B, T, H, d] at `positions` [B, T] to slots in any order; -1 is an empty slot."""
        visible = (places[:, None] >= 0) & (places[:, None] <= positions[..., None])
        return weigh(q * (self.scale * q.shape[-1] ** 0.5), k, v, visible, "softmax")

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        if self.config.gate_per_head:
            return self.out_proj((o * self.gate_proj(x).sigmoid()[..., None]).flatten(-2))
        o = o.flatten(-2)
        return self.out_proj(gated_activation(self.gate_proj(x), o, "sigmoid") if self.config.gate else o)
