"""Parts of the three Hyena mixers: projections with a short convolution, learned long filters, and their cost."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.base import TensorSpec
from linnet.layers.short_conv import ShortConv
from linnet.ops import ModalFilter, short_convolution


class ShortProjection(nn.Module):
    """y = conv(x W + b) + c: a linear layer, then a short causal convolution of each channel, both with a bias."""

    def __init__(self, d_model: int, channels: int, width: int):
        super().__init__()
        self.linear = nn.Linear(d_model, channels)
        self.conv = ShortConv(channels, width, bias=True)

    def forward(self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None):
        """x [B, T, D] -> [B, T, channels] and the state after the last token, as `ShortConv`."""
        bare = _is_bare(self.linear, nn.Linear) and _is_bare(self.conv, ShortConv)
        if state is None and cu_seqlens is None and bare:  # the bias in the convolution's pass
            y, bias = F.linear(x, self.linear.weight), self.linear.bias
            return short_convolution(y, self.conv.weight, self.conv.bias, offset=bias), None
        return self.conv(self.linear(x), state, cu_seqlens)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        return self.conv.step(self.linear(x), state)

    def state_spec(self, batch: int) -> TensorSpec:
        return TensorSpec((batch, self.conv.width - 1, self.conv.channels), counted=0)


def _is_bare(layer: nn.Module, kind: type) -> bool:
    """Returns whether the layer's weights alone give its result: no hooks (as tensor parallelism adds), no subclass."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return type(layer) is kind and not any(hooks)


class LongFilter(nn.Module):
    """Learned filters h_t = skip [t = 0] + sum_n Re(R_n lambda_n^t), lambda_n = exp(-exp(a_n) + i theta_n).

    Initialisation: the time constants exp(-a) are log-uniform in [1, max_time_constant], theta is uniform in [0, pi),
    the real and imaginary parts of R are N(0, 1/N), and the skip is N(0, 1).
    """

    full_precision = ("log_rate", "theta", "residue", "skip")

    def __init__(self, filters: int, modes: int, max_time_constant: int):
        super().__init__()
        self.log_rate = nn.Parameter(-math.log(max_time_constant) * torch.rand(filters, modes))
        self.theta = nn.Parameter(math.pi * torch.rand(filters, modes))
        self.residue = nn.Parameter(modes**-0.5 * torch.randn(filters, modes, 2))
        self.skip = nn.Parameter(torch.randn(filters))

    def forward(self) -> ModalFilter:
        rate = self.log_rate if self.log_rate.dtype == torch.float64 else self.log_rate.float()
        return ModalFilter(-rate.exp(), self.theta, self.residue, self.skip)

    def state_spec(self, batch: int, channels: int) -> TensorSpec:
        """Returns the spec of the modes of `channels` channels, in pairs (real, imaginary)."""
        return TensorSpec((batch, channels, self.theta.shape[1], 2), counted=0.5)


def long_flops_paper(seq_len: int, modes: int, filters: int, channels: float) -> float:
    """Returns S L F + 10 L log2(L) C + 4 L C: features of F filters, convolution and gates of C channels (004, C.4)."""
    return seq_len * (modes * filters + (10.0 * math.log2(seq_len) + 4.0) * channels)
