"""One token of up to three short convolutions in one launch, each channel's inputs read and moved on once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import after_previous
from linnet.ops.launching import cdiv, launch

CHANNELS = 256  # of a program


def steps(x0, x1, x2, weight0, weight1, weight2, bias0, bias1, bias2, state0, state1, state2, silu) -> Tensor:
    """As `short_convolution_steps`, with y [B, D0 + D1 + D2] in one tensor; the states float32, contiguous."""
    inputs = [x if x is None or x.stride(1) == 1 else x.contiguous() for x in (x0, x1, x2)]
    parameters = [None if x is None else x.contiguous() for x in (weight0, weight1, weight2, bias0, bias1, bias2)]
    widths = [0 if x is None else x.shape[1] for x in inputs]
    strides = [0 if x is None else x.stride(0) for x in inputs]
    B = x0.shape[0]
    y = torch.empty(B, sum(widths), dtype=x0.dtype, device=x0.device)
    programs = B * sum(cdiv(width, CHANNELS) for width in widths)
    tensors = (*inputs, *parameters, state0, state1, state2, y)
    constants = (*strides, *widths, weight0.shape[1], CHANNELS, bias0 is not None, silu)
    launch(steps_kernel, programs, tensors, (), constants, num_warps=4)
    return y


@triton.jit
def steps_kernel(
    x0, x1, x2, weight0, weight1, weight2, bias0, bias1, bias2, state0, state1, state2, y,
    stride0: tl.constexpr, stride1: tl.constexpr, stride2: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    FIRST: tl.constexpr = (D0 + BD - 1) // BD
    SECOND: tl.constexpr = FIRST + (D1 + BD - 1) // BD
    ALL: tl.constexpr = SECOND + (D2 + BD - 1) // BD
    block, b = tl.program_id(0) % ALL, (tl.program_id(0) // ALL).to(tl.int64)
    y += b * (D0 + D1 + D2)
    if block < FIRST:
        _step(x0 + b * stride0, weight0, bias0, state0 + b * ((W - 1) * D0), y, block, D0, W, BD, BIASED, SILU)
    if D1 > 0:
        if (block >= FIRST) & (block < SECOND):
            _step(x1 + b * stride1, weight1, bias1, state1 + b * ((W - 1) * D1), y + D0, block - FIRST, D1, W, BD,
                  BIASED, SILU)  # fmt: skip
    if D2 > 0:
        if block >= SECOND:
            _step(x2 + b * stride2, weight2, bias2, state2 + b * ((W - 1) * D2), y + (D0 + D1), block - SECOND, D2, W,
                  BD, BIASED, SILU)  # fmt: skip


@triton.jit
def _step(
    x, weight, bias, state, y, block, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BIASED: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    d = block * BD + tl.arange(0, BD)
    inside = d < D
    newest = tl.load(x + d, mask=inside, other=0.0)
    total = newest.to(tl.float32) * tl.load(weight + d * W + (W - 1), mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(W - 1):
        before = tl.load(state + tap * D + d, mask=inside, other=0.0)
        total += before * tl.load(weight + d * W + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(state + (tap - 1) * D + d, before, mask=inside)
    tl.store(state + (W - 2) * D + d, newest.to(tl.float32), mask=inside)
    if BIASED:
        total += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total *= 1.0 / (1.0 + tl.exp(-total))
    tl.store(y + d, total.to(y.dtype.element_ty), mask=inside)
