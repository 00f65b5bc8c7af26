"""TNN, the Toeplitz neural network (Qin et al. 2023, arXiv:2305.04749): its gated Toeplitz unit.

u = silu(x W_u),  v = silu(x W_v),  y = (u * (T v)) W_o,  (T v)_t = sum_{s <= t} lambda^{t-s} RPE(t - s) v_s

with `expand` D channels. RPE, a small network of the distance, gives one coefficient per channel: a linear layer from
the distance to `rpe_dim` numbers, then `rpe_layers` + 1 times a linear layer of relu(SRMSNorm(.)). It always has
biases; those of W_u, W_v and W_o follow `bias` of the model. lambda is fixed.

Such filters have no finite state. A row is a convolution in O(T log T), but decoding keeps all values v of a row, and a
token costs one pass over them and RPE at every distance: for T tokens O(T^2) per channel and T^2 evaluations of RPE.
Spans of a row pass these values from rank to rank. Without causality each direction is a causal convolution with the
same filters (`scan: both`), where the paper has RPE at negative distances.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, last_linear, register_mixer
from linnet.layers.hyena import long_flops_paper
from linnet.layers.norm import build_norm
from linnet.layers.positions import check_room, token_positions
from linnet.ops import long_convolution
from linnet.ops.chunks import exact


class TnnConfig(LayerConfig):
    """Options of `tnn`."""

    expand: int = Field(3, ge=1, description="channels of the convolution over the model width")
    decay: float = Field(0.99, gt=0, le=1, description="lambda, the fixed decay per token of distance")
    rpe_dim: int = Field(64, ge=1, description="width of the network that gives the coefficients")
    rpe_layers: int = Field(6, ge=0, description="layers of this network from rpe_dim to rpe_dim")


@register_mixer("tnn", TnnConfig, "toeplitz", "gtu")
class Tnn(Mixer):
    """x [B, T, D] -> [B, T, D]; the state is a cache: the values of all tokens so far, and the next position."""

    def __init__(self, config: TnnConfig, context: LayerContext):
        super().__init__()
        self.config, self.channels = config, config.expand * context.d_model
        self.u_proj = nn.Linear(context.d_model, self.channels, bias=context.bias_qkv)
        self.v_proj = nn.Linear(context.d_model, self.channels, bias=context.bias_qkv)
        self.out_proj = last_linear(self.channels, context.d_model, bias=context.bias_all)
        self.rpe = Rpe(self.channels, config)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        u, v = F.silu(self.u_proj(x)), F.silu(self.v_proj(x))
        if state is None:
            return self.out_proj(u * long_convolution(v, self.rpe(x.shape[1]), cu_seqlens=cu_seqlens)[0]), None
        place = token_positions(x, state["position"], cu_seqlens)
        if cu_seqlens is None:
            check_room(place[:, -1], state["values"].shape[1])
        row = torch.arange(x.shape[0], device=x.device)[:, None]
        lengths: Tensor | int = x.shape[1]
        if cu_seqlens is not None:
            index = torch.arange(x.shape[1], device=x.device)
            row = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)[None]
            lengths = cu_seqlens.diff().to(torch.int64)
        values = state["values"].index_put((row, place), v.to(state["values"].dtype))
        y = long_convolution(values, self.rpe(values.shape[1]))[0][row, place]
        return self.out_proj(u * y.to(u.dtype)), {"values": values, "position": state["position"] + lengths}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        u, v, values = F.silu(self.u_proj(x)), F.silu(self.v_proj(x)), state["values"]
        check_room(state["position"], values.shape[1])
        # A slot of a pool without a sequence goes on counting, beyond the values that there are.
        place = state["position"][:, None].clamp(max=values.shape[1] - 1)
        values.scatter_(1, place[..., None].expand(-1, -1, self.channels), v[:, None].to(values.dtype))
        lag = place - torch.arange(values.shape[1], device=x.device)  # below 0: an empty slot
        h = self.rpe(values.shape[1]).t()[lag.clamp(min=0)].masked_fill(lag[..., None] < 0, 0.0)
        y = torch.einsum("blc,blc->bc", h, values.to(h.dtype))
        state["position"] += 1
        return self.out_proj(u * y.to(u.dtype)), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {
            "values": TensorSpec((batch, context_length, self.channels), self.v_proj.weight.dtype, counted=0),
            "position": TensorSpec((batch,), torch.int64),
        }

    def flops_paper(self, seq_len: int) -> float:
        """Returns 2 FLOPs per weight and token, RPE included, and those of a long convolution (paper 004, C.4)."""
        return super().flops_paper(seq_len) + long_flops_paper(seq_len, 0, 0, self.channels)

    def tp_plan(self) -> dict[str, str]:
        """Splits by channel; every rank has the network of distances, up to its last layer."""
        plan = dict.fromkeys(("u_proj", "v_proj"), "colwise") | {"out_proj": "rowwise", "rpe.out": "split"}
        return plan | {"rpe.first": "partial", "rpe.layers": "partial"}


class Rpe(nn.Module):
    """The filters lambda^t RPE(t) of C channels, from a small network of the distance t."""

    def __init__(self, channels: int, config: TnnConfig):
        super().__init__()
        width, self.decay = config.rpe_dim, config.decay
        self.first = nn.Linear(1, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.rpe_layers))
        self.out = nn.Linear(width, channels)
        self.norm = build_norm("srmsnorm", width)
        for layer in (self.first, *self.layers, self.out):
            layer.mup_roles = {"weight": "vector"}  # its inputs do not grow with the width of the model
            layer.full_precision = ("weight", "bias")

    def forward(self, length: int) -> Tensor:
        """Returns the coefficients at the first `length` distances, [C, length], at least in float32."""
        dtype = torch.promote_types(self.out.weight.dtype, torch.float32)
        with exact(self.out.weight):
            times = torch.arange(length, device=self.out.weight.device, dtype=dtype)
            y = times[:, None]
            for layer in (self.first, *self.layers, self.out):
                y = y if layer is self.first else F.relu(self.norm(y))
                y = F.linear(y, layer.weight.to(dtype), layer.bias.to(dtype))
            return (y * self.decay ** times[:, None]).t()
