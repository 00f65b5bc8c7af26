"""The short convolution on a GPU: everything is read once and written once.

A program is a warp that owns some channels of a segment of one sequence. The backward walks from the last token to the
first with the last few gradients before the activation in registers, so that each is found once; what a segment gives
to the parameters is a partial sum, added up in a fixed order.

float64 and more than 8 taps run in the chunked form.
"""

import functools

import torch
import triton
from torch import Tensor

from linnet.ops import backend
from linnet.ops.launching import Launcher, align
from linnet.ops.shortconv import chunked
from linnet.ops.shortconv.kernels import backward_kernel, forward_kernel

MOST_TAPS = 8
CHANNELS, READ_AHEAD = 128, 8  # of a program, 4 a thread; and tokens read at a time
SEGMENT = 128  # tokens of a program


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None, silu: bool) -> Tensor:
    """y [R, T, D]; arguments as in the registered op."""
    if not _supports(x, weight):
        return chunked.forward(x, weight, bias, offset, silu)
    inputs = tuple(align(y) for y in (x, weight, bias, offset))
    y = torch.empty_like(inputs[0])
    _plan(forward_kernel, *_key(*inputs), silu)(*inputs, y)
    return y


def backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None, silu: bool, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients to x, weight, bias and offset (or None)."""
    if not _supports(x, weight):
        return chunked.backward(x, weight, bias, offset, silu, dy)
    inputs = tuple(align(y) for y in (x, weight, bias, offset))
    (models, channels, width), segments = weight.shape, triton.cdiv(x.shape[1], SEGMENT)
    dx = torch.empty_like(inputs[0])
    sums = x.new_empty(models, x.shape[0] // models * segments, width + 2, channels, dtype=torch.float32)
    _plan(backward_kernel, *_key(*inputs), silu)(*inputs, align(dy), dx, sums)
    total = sums.sum(1).to(weight.dtype)
    dbias = None if bias is None else total[:, width].to(bias.dtype, copy=True)
    doffset = None if offset is None else total[:, width + 1].to(offset.dtype, copy=True)
    return dx, total[:, :width].mT.contiguous(), dbias, doffset


def _supports(x: Tensor, weight: Tensor) -> bool:
    if weight.shape[2] > MOST_TAPS:
        backend.warn_slow("short_convolution", f"{weight.shape[2]} taps", f"use at most {MOST_TAPS}")
        return False
    return not backend.is_wide("short_convolution", x, weight)


def _key(*inputs: Tensor | None) -> tuple:
    """What a launch depends on, of x, weight, bias and offset."""
    dtypes = tuple(None if y is None else y.dtype for y in inputs)
    return inputs[0].shape, inputs[1].shape, dtypes, inputs[0].device


@functools.lru_cache(1024)
def _plan(kernel, shape, weight_shape, dtypes: tuple, device: torch.device, silu: bool) -> Launcher:
    (rows, length, channels), (models, _, width) = shape, weight_shape
    block = min(CHANNELS, max(32, triton.next_power_of_2(channels)))
    segments = triton.cdiv(length, SEGMENT)
    even = channels % block == 0 and length % READ_AHEAD == 0
    given = (y is not None for y in dtypes[2:])
    constants = (
        length, segments, rows // models, channels, width, block, READ_AHEAD, SEGMENT, silu, *given, not even,
    )  # fmt: skip
    return Launcher(kernel, rows * segments * triton.cdiv(channels, block), constants, num_warps=1)
