"""Parts of the three Hyena mixers: projections with a short convolution, learned long filters, and their cost."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.base import TensorSpec
from linnet.layers.short_conv import ShortConv, short_convolution_spec
from linnet.ops import ModalFilter, short_convolution
from linnet.ops.chunks import exact
from linnet.ops.projections import is_prepared


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
        return short_convolution_spec(batch, self.conv.channels, self.conv.width)


class TiedProjection(nn.Module):
    """q, k, v as overlapping copies of one projection: p = x W + b of 3 C / groups channels, `groups` times in a row,
    then one short convolution of all 3 C channels, cut into q, k, v of C channels each.

    The published implementation of paper 004 ties the projections of `hyena` and `mh_hyena` in this way (4 groups).
    """

    def __init__(self, d_model: int, channels: int, width: int, groups: int):
        super().__init__()
        self.groups = groups
        self.linear = nn.Linear(d_model, 3 * channels // groups)
        self.conv = ShortConv(3 * channels, width, bias=True)

    def forward(self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None):
        """x [B, T, D] -> (q, k, v), each [B, T, C], and the state after the last token, as `ShortConv`."""
        y, state = self.conv(self._copies(x), state, cu_seqlens)
        return y.chunk(3, -1), state

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return self.conv.step(self._copies(x), state).chunk(3, -1)

    def state_spec(self, batch: int) -> TensorSpec:
        return short_convolution_spec(batch, self.conv.channels, self.conv.width)

    def _copies(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x)] * self.groups, -1)


def _is_bare(layer: nn.Module, kind: type) -> bool:
    """Returns whether the layer's weights alone give its result: no hooks and no other forward of its own (as tensor
    parallelism sets) than that of `projections.prepare`, no subclass."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    own = "forward" in vars(layer) and not is_prepared(layer)
    return type(layer) is kind and not any(hooks) and not own


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


class SineFilter(nn.Module):
    """Implicit filters h_t = skip [t = 0] + (W_4 a_3)(t) exp(-|delta| t / (L - 1)), from a small network of positions.

    a_i = sin(w * (W_i a_{i-1} + b_i)) for i = 1, 2, 3, with one learned w for all three; a_0 is a learned table of L
    positions that starts at (t / (L - 1), cos, -sin of 2 pi 1e-4 t / L). The rates delta of the filters are fixed, in
    equal steps from ln(0.01) / 1.5 to ln(0.01) / 0.3. Such filters have no finite state (arXiv:2302.10866; the
    filters of the published implementation of paper 004).

    Initialisation: matrices and biases uniform in +- fan_in^-1/2, w = 1, the skip N(0, 1).
    """

    full_precision = ("positions", "frequency", "skip", "output", "rates")

    def __init__(self, filters: int, width: int, length: int):
        super().__init__()
        times = torch.arange(length, dtype=torch.float64)
        angle = 2e-4 * math.pi * times / length
        table = torch.stack([times / max(length - 1, 1), angle.cos(), -angle.sin()], 1)
        self.positions = nn.Parameter(table.float())
        self.frequency = nn.Parameter(torch.ones(width))
        inputs = (3, width, width)
        self.weights = nn.ParameterList(_uniform(width, size, fan_in=size) for size in inputs)
        self.biases = nn.ParameterList(_uniform(width, fan_in=size) for size in inputs)
        self.output = nn.Parameter(_uniform(filters, width, fan_in=width))
        self.skip = nn.Parameter(torch.randn(filters))
        rates = torch.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, filters, dtype=torch.float64).abs()
        self.register_buffer("rates", rates.float(), persistent=False)

    def forward(self, length: int) -> Tensor:
        """Returns the values of the filters at the first `length` lags, [F, length], at least in float32.

        Raises:
            ValueError: the table of positions is shorter.
        """
        most = self.positions.shape[0]
        if length > most:
            raise ValueError(f"filter_length: {most} is less than a sequence of {length} tokens; raise it to {length}")
        dtype = torch.promote_types(self.positions.dtype, torch.float32)
        with exact(self.positions):
            x = self.positions[:length].to(dtype)
            for weight, bias in zip(self.weights, self.biases, strict=True):
                x = (self.frequency.to(dtype) * F.linear(x, weight.to(dtype), bias.to(dtype))).sin()
            times = torch.arange(length, device=x.device, dtype=dtype) / max(most - 1, 1)
            h = F.linear(self.output.to(dtype), x) * (-self.rates.to(dtype)[:, None] * times).exp()
        return torch.cat([h[:, :1] + self.skip.to(dtype)[:, None], h[:, 1:]], 1)


def _uniform(*shape: int, fan_in: int) -> Tensor:
    return torch.empty(*shape).uniform_(-(fan_in**-0.5), fan_in**-0.5)


def long_flops_paper(seq_len: int, modes: int, filters: int, channels: float) -> float:
    """Returns S L F + 10 L log2(L) C + 4 L C: features of F filters, convolution and gates of C channels (004, C.4)."""
    return seq_len * (modes * filters + (10.0 * math.log2(seq_len) + 4.0) * channels)
