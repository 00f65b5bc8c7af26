"""RWKV-4 (Peng et al. 2023, arXiv:2305.13048): time mixing. With x_c = x + mu_c (x_{t-1} - x) for c = r, k, v:

    r, k, v = x_r W_r, x_k W_k, x_v W_v
    wkv_t = (sum_{s < t} e^{k_s - (t - 1 - s) w} v_s + e^{u + k_t} v_t) / (the same with 1 in place of v)
    y = (sigmoid(r) * wkv) W_o

with a decay w = exp(a) > 0 and a bonus u per channel. Numerator and denominator are two recurrences of D numbers
(`linnet.ops.diagonal_scan`), both divided by e^m with the running maximum m_t = max(m_{t-1} - w, k_t), so that keys of
any size neither overflow nor vanish. m is taken without a gradient, because it cancels; on whole rows it takes
log2(T) passes over [T, D].

Weights start as in the authors' training: decays, bonus and the shares mu depend on channel and depth, and W_r, W_k
and W_o are zero. Departures: there, all other matrices are orthogonal; here the model draws them. Spans of a row pass
their state from rank to rank. Its channel mixer is `rwkv` with `receptance: true`.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, last_linear, register_mixer
from linnet.layers.positions import token_positions
from linnet.layers.short_conv import short_convolution_spec, token_shift, token_shift_step
from linnet.ops import diagonal_scan
from linnet.ops.chunks import at_least_float32


class Rwkv4Config(LayerConfig):
    """Options of `rwkv4`: none."""


@register_mixer("rwkv4", Rwkv4Config, "rwkv_v4")
class Rwkv4(Mixer):
    """x [B, T, D] -> [B, T, D]; state: numerator and denominator [B, 2 D], their maximum [B, D], the last input."""

    full_precision = ("decay", "bonus")

    def __init__(self, config: Rwkv4Config, context: LayerContext):
        super().__init__()
        width = self.d_model = self.channels = context.d_model
        depth, rest = context.layer_index / max(1, context.num_layers - 1), 1 - context.layer_index / context.num_layers
        line, index = torch.arange(width) / width, torch.arange(width)
        self.decay = nn.Parameter(-5 + 8 * (index / max(1, width - 1)) ** (0.7 + 1.3 * depth))
        self.bonus = nn.Parameter(math.log(0.3) + 0.5 * ((index + 1) % 3 - 1))
        self.x_k, self.x_r = nn.Parameter(1 - line**rest), nn.Parameter(1 - line ** (rest / 2))
        self.x_v = nn.Parameter(1 - line**rest - 0.3 * depth)
        self.r_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=context.bias_qkv) for _ in range(3))
        self.out_proj = last_linear(width, width, bias=context.bias_all)
        self.r_proj.starts_zero = self.k_proj.starts_zero = self.out_proj.starts_zero = True

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        before = {} if state is None else state
        delta, last = token_shift(x, before.get("shift"), cu_seqlens)
        r, k, v, w = self._project(x, delta)
        sums, largest = before.get("sums"), before.get("largest")
        if state is not None:  # a state of zeros has seen no token, so it has no maximum
            largest = largest.masked_fill(sums[:, self.channels :] == 0, -torch.inf)
        place = token_positions(x, None, cu_seqlens)[..., None]
        with torch.no_grad():
            most = _running_maximum(k, w, place, largest, cu_seqlens)
            past = _shift(most, place, largest, cu_seqlens, -torch.inf)
        new, log_decay = (k - most).exp(), past - w - most
        log_decay = log_decay - log_decay.detach().clamp(min=0.0)  # rounded above 0; a clamp would stop its gradient
        h, after = diagonal_scan(
            torch.cat([new * v, new], -1),
            log_decay.repeat(1, 1, 2),
            initial_state=sums,
            output_final_state=state is not None,
            cu_seqlens=cu_seqlens,
        )
        y = self._read(_shift(h, place, sums, cu_seqlens, 0.0), past, k, v, r).to(x.dtype)
        if state is None:
            return self.out_proj(y), None
        if cu_seqlens is None:
            largest = most[:, -1]
        else:
            ends = most[0, (cu_seqlens[1:].long() - 1).clamp(min=0)]
            largest = torch.where(cu_seqlens.diff()[:, None] > 0, ends, state["largest"])
        return self.out_proj(y), {"sums": after, "largest": largest, "shift": last}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        r, k, v, w = (y.to(state["sums"].dtype) for y in self._project(x, token_shift_step(x, state["shift"])))
        sums = state["sums"]
        past = state["largest"].masked_fill(sums[:, self.channels :] == 0, -torch.inf)
        y = self._read(sums, past, k, v, r).to(x.dtype)
        most = torch.maximum(past - w, k)
        new = (k - most).exp()
        sums.mul_((past - w - most).exp().repeat(1, 2)).add_(torch.cat([new * v, new], -1))
        state["largest"].copy_(most)
        return self.out_proj(y), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {
            "sums": TensorSpec((batch, 2 * self.channels)),
            "largest": TensorSpec((batch, self.channels)),
            "shift": short_convolution_spec(batch, self.d_model, 2),
        }

    def tp_plan(self) -> dict[str, str]:
        plan = dict.fromkeys(("x_r", "x_k", "x_v"), "partial") | dict.fromkeys(self.full_precision, "split")
        return plan | dict.fromkeys(("r_proj", "k_proj", "v_proj"), "colwise") | {"out_proj": "rowwise"}

    def _project(self, x: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        """Returns r, k, v [..., D] and the decay w [D], at least in float32."""
        r, k, v = (torch.addcmul(x, delta, share.to(x.dtype)) for share in (self.x_r, self.x_k, self.x_v))
        r, k, v = map(at_least_float32, (self.r_proj(r), self.k_proj(k), self.v_proj(v)))
        return r, k, v, at_least_float32(self.decay).exp()

    def _read(self, sums: Tensor, past: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
        """Returns sigmoid(r) wkv from the sums before a token and their maximum."""
        log_weight = k + at_least_float32(self.bonus)
        most = torch.maximum(past, log_weight.detach())
        old, new = (past - most).exp(), (log_weight - most).exp()
        top, bottom = sums.chunk(2, -1)
        return r.sigmoid() * (old * top + new * v) / (old * bottom + new)


def _of_tokens(first: Tensor, cu_seqlens: Tensor | None, length: int) -> Tensor:
    """Returns what each token's row or document starts with: first [N, C] as [N, 1, C], or [1, T, C] of documents."""
    if cu_seqlens is None:
        return first[:, None]
    index = torch.arange(length, device=first.device)
    return first[torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)][None]


def _shift(y: Tensor, place: Tensor, first: Tensor | None, cu_seqlens: Tensor | None, empty: float) -> Tensor:
    """Returns y_{t-1} of y [B, T, C]; at the first token of a row or document `first`, or `empty` for None."""
    before = F.pad(y, (0, 0, 1, -1))
    start = y.new_full((), empty) if first is None else _of_tokens(first, cu_seqlens, y.shape[1]).to(y.dtype)
    return torch.where(place == 0, start, before)


def _running_maximum(k: Tensor, w: Tensor, place: Tensor, first: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Returns max_{s <= t} k_s - (t - s) w of the tokens s of a row or document, and of `first` before it."""
    most, distance = k, 1
    while distance < k.shape[1]:
        before = F.pad(most, (0, 0, distance, -distance)) - distance * w
        most = torch.maximum(most, before.masked_fill(place < distance, -torch.inf))
        distance *= 2
    if first is None:
        return most
    return torch.maximum(most, _of_tokens(first, cu_seqlens, k.shape[1]) - (place + 1) * w)
