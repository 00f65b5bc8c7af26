"""The short causal convolution of each channel that Mamba and Hyena put before their recurrence."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linnet.layers.base import LayerContext, Mixer, TensorSpec
from linnet.ops import short_convolution, short_convolution_step
from linnet.ops.shortconv import short_convolution_steps


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
        options = {"silu": self.silu, "initial_state": state, "cu_seqlens": cu_seqlens}
        if state is None:
            return short_convolution(x, self.weight, self.bias, **options), None
        return short_convolution(x, self.weight, self.bias, output_final_state=True, **options)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """Computes one token, x [B, channels]; updates the state in place."""
        return short_convolution_step(x, self.weight, state, self.bias, silu=self.silu)


def step_all(convolutions: Sequence[ShortConv], inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Sequence[Tensor]:
    """Computes one token of several convolutions with SiLU, inputs [B, channels] each; in one launch on a GPU. Updates
    the states in place."""
    weights, biases = ([conv.weight for conv in convolutions], [conv.bias for conv in convolutions])
    return short_convolution_steps(inputs, weights, states, biases, silu=True)


class ConvolvedMixer(Mixer):
    """A mixer whose convolutions of `config.conv_width` tokens read the inputs before a span."""

    sequence_parallel = True

    @classmethod
    def span_problems(cls, config, context: LayerContext, span: int, ranks: int, tp: int = 1) -> list[str]:
        return convolution_problems(config.conv_width, span)

    def least_span(self, ranks: int) -> int:
        return self.config.conv_width - 1


def token_shift(
    x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns x_{t-1} - x_t of x [B, T, D], with zeros before the first token; also the last input (None without
    `state`).

    Args:
        state: the last input before x, [N, 1, D]. cu_seqlens: as in `ShortConv.forward`.
    """
    options = {"initial_state": state, "cu_seqlens": cu_seqlens}
    if state is None:
        return short_convolution(x, _difference(x), **options), None
    return short_convolution(x, _difference(x), output_final_state=True, **options)


def token_shift_step(x: Tensor, state: Tensor) -> Tensor:
    """Computes one token of `token_shift`, x [B, D]; updates the state in place."""
    return short_convolution_step(x, _difference(x), state)


def _difference(x: Tensor) -> Tensor:
    return torch.stack([x.new_ones(x.shape[-1]), x.new_full(x.shape[-1:], -1.0)], 1)


def short_convolution_spec(batch: int, channels: int, width: int) -> TensorSpec:
    """Returns the state of `ShortConv` or `short_convolution`: its last inputs [batch, width - 1, channels].

    Their state bytes count, but not their numbers: paper 004 counts recurrent states only (`TensorSpec.counted`), so
    the state of 4,096 numbers of MAD is without them.
    """
    return TensorSpec((batch, width - 1, channels), counted=0)


def convolution_problems(width: int, span: int) -> list[str]:
    """Returns a list with one problem if a span is shorter than what the next one reads of it, else an empty one."""
    if width - 1 <= span:
        return []
    return [f"conv_width: {width} reads {width - 1} tokens back, but a span has {span}; lower sp or conv_width"]
