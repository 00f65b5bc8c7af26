"""The short causal convolution of each channel that Mamba and Hyena put before their recurrence."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.positions.angles import token_positions
from linnet.ops import short_convolution


class ShortConv(nn.Module):
    """y_t = act(sum_j w_j x_{t - (width - 1) + j} (+ b)), with separate weights per channel; act is none or SiLU.

    Its state [N, width - 1, channels] holds its last inputs, oldest first; zeros before the first token.
    """

    def __init__(self, channels: int, width: int, bias: bool = False, silu: bool = False):
        super().__init__()
        self.channels, self.width, self.silu = channels, width, silu
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def extra_repr(self) -> str:
        return f"channels={self.channels}, width={self.width}"

    def forward(self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None):
        """Maps x [B, T, channels] to y of the same shape; also returns the state after the last token (None without
        `state`).

        Args:
            state: state before the first token, one per sequence or document; None for zeros.
            cu_seqlens: int32 [N+1] with B = 1: document boundaries; a document does not see the tokens before it.
        """
        if cu_seqlens is not None:
            y, state = self._documents(x, state, cu_seqlens)
            return self._activate(y).to(x.dtype), state
        if state is None:
            return short_convolution(x, self.weight, self.bias, silu=self.silu), None
        before = self.width - 1
        line = torch.cat([state.to(x.dtype), x], 1)
        y = short_convolution(line, self.weight, self.bias, silu=self.silu)
        return y[:, before:], line[:, x.shape[1] :].to(state.dtype)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """Computes one token, x [B, channels]; updates the state in place."""
        line = torch.cat([state.to(x.dtype), x[:, None]], 1)
        state.copy_(line[:, 1:])
        y = (line * self.weight.mT).sum(1)
        return self._activate(y if self.bias is None else y + self.bias).to(x.dtype)

    def _activate(self, y: Tensor) -> Tensor:
        return F.silu(y) if self.silu else y

    def _last(self, x: Tensor) -> Tensor:
        """Returns the contribution of the newest token, with the bias."""
        weight = self.weight[:, -1]
        return x * weight if self.bias is None else torch.addcmul(self.bias, x, weight)

    def _documents(self, x, state, cu_seqlens):
        before, index = self.width - 1, torch.arange(x.shape[1], device=x.device)
        position = token_positions(x, cu_seqlens=cu_seqlens)[0]
        document = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)
        y = self._last(x)
        for lag in range(1, self.width):
            inside = (position >= lag)[:, None]
            seen = x[:, (index - lag).clamp(min=0)]
            past = 0.0
            if state is not None:
                past = state.to(x.dtype)[document, (before + position - lag).clamp(max=before - 1)]
            y = torch.addcmul(y, torch.where(inside, seen, past), self.weight[:, before - lag])
        if state is None:
            return y, None
        # The final state of a document is its last tokens, preceded by the end of its initial state if it is short.
        start, end = cu_seqlens[:-1, None].to(index.dtype), cu_seqlens[1:, None].to(index.dtype)
        place = end - before + torch.arange(before, device=x.device)
        kept = (place - start + before).clamp(0, before - 1)
        old = state.gather(1, kept[..., None].expand(-1, -1, self.channels))
        new = x[0, place.clamp(min=0)].to(state.dtype)
        return y, torch.where((place >= start)[..., None], new, old)
