"""A token mixer outside the package: gated retention (Sun et al. 2024, arXiv:2405.05254).

One file and one class are all that an architecture needs. With this file come training, exact FLOPs, state size,
decoding and a scaling law:

    linnet study --mixer examples/my_mixer.py:MyMixer

Gated retention is linear attention that forgets at a pace which each token sets anew for each head:

    gamma_t = sigmoid(x_t W_gamma + b)^(1/tau)       in (0, 1), one number a head
    S_t     = gamma_t S_{t-1} + k_t^T v_t            the state, [K, V] a head
    o_t     = q_t S_t / sqrt(K)
    y       = (silu(x W_g) * HeadNorm(o)) W_o

Departures: no rotation of q and k (the decay already tells near from far), and a bias in the gate, spread over the
heads at the start, so that some heads look far and some near before anything is learned.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.base import LayerConfig, LayerContext, Mixer, TensorSpec, register_mixer
from linnet.ops import gated_linear_attention, gated_step


class MyMixerConfig(LayerConfig):
    """Options of the layer. Every field can be set in a study: `options: {my_mixer: {temperature: 8}}`."""

    num_heads: int = Field(4, ge=1, description="heads; must divide d_model")
    temperature: float = Field(16.0, gt=0, description="tau: larger is slower forgetting")

    def check(self, context: LayerContext):
        """What is wrong with options that fit one by one, found before any layer is built."""
        if context.d_model % self.num_heads:
            return [f"num_heads: {self.num_heads} does not divide the width {context.d_model}; use a divisor"]
        return []


@register_mixer("my_mixer", MyMixerConfig)  # the name that layouts, tables and figures use
class MyMixer(Mixer):
    """x [B, T, D] -> [B, T, D]. `context` says where in the stack the layer sits and how wide the model is."""

    def __init__(self, config: MyMixerConfig, context: LayerContext):
        super().__init__()
        d_model, heads = context.d_model, config.num_heads
        self.num_heads, self.head_dim, self.temperature = heads, d_model // heads, config.temperature
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.decay = nn.Linear(d_model, heads, bias=False)
        self.decay_bias = nn.Parameter(torch.linspace(-2.0, 2.0, heads))
        self.gate = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.out.ends_residual = True  # drawn smaller in deep stacks

    def forward(self, x: Tensor, state=None, cu_seqlens=None):
        """All tokens at once. Without a state this is training; with one it goes on from it (prefill)."""
        q, k, v, log_decay = self._project(x)
        o, matrix = gated_linear_attention(
            q,
            k,
            v,
            log_decay,
            scale=self.head_dim**-0.5,
            initial_state=None if state is None else state["matrix"],
            output_final_state=state is not None,
            cu_seqlens=cu_seqlens,  # documents packed in one row: the op starts each with an empty state
        )
        return self._read(o, x), None if state is None else {"matrix": matrix}

    def step(self, x: Tensor, state):
        """One token, x [B, D]: the same equations as a recurrence. The op updates the state in place."""
        q, k, v, log_decay = self._project(x)
        return self._read(gated_step(q, k, v, log_decay, state["matrix"], scale=self.head_dim**-0.5), x), state

    def state_spec(self, batch: int, context_length: int):
        """What is carried from token to token; its size does not depend on the context length."""
        return {"matrix": TensorSpec((batch, self.num_heads, self.head_dim, self.head_dim))}

    def tp_plan(self):
        """How `parallel.tp` splits the layer over devices: by heads, so that each device has all tensors of its heads.

        q, k and v of one head are neighbours in `qkv`. With all q first, its rows could not be split by heads.
        """
        return {"qkv": "colwise", "decay": "colwise", "decay_bias": "split", "gate": "colwise", "out": "rowwise"}

    def _project(self, x: Tensor):
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3 * self.head_dim)).chunk(3, dim=-1)
        logits = self.decay(x) + self.decay_bias
        log_gamma = F.logsigmoid(logits.to(torch.promote_types(x.dtype, torch.float32))) / self.temperature
        # the op takes a decay for each key channel; here all channels of a head share one
        return q, k, v, log_gamma.unsqueeze(-1).expand(q.shape)

    def _read(self, o: Tensor, x: Tensor) -> Tensor:
        o = F.rms_norm(o, (self.head_dim,), eps=1e-6).flatten(-2)
        return self.out(o * F.silu(self.gate(x)))
