"""The steps of the selective scan on a GPU: softplus(delta + bias) in one pass, and its gradients in another."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import LOG2_E
from linnet.ops.launching import Launcher, align

ROWS, CHANNELS = 64, 128  # of a program


def make_steps(delta: Tensor, bias: Tensor) -> Tensor:
    """softplus(delta + bias) of [R, T, D] in float32, with bias [M, D] for R / M rows each."""
    delta, bias = align(delta), align(bias)
    steps = torch.empty_like(delta, dtype=torch.float32)
    _plan(steps_kernel, delta.shape, *_dtypes(delta, bias))(delta, bias, steps)
    return steps


def pass_steps(delta: Tensor, bias: Tensor, dsteps: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients to delta and bias from that of the steps."""
    delta, bias = align(delta), align(bias)
    models, channels = bias.shape
    ddelta = torch.empty_like(delta)
    blocks = triton.cdiv(delta.numel() // bias.numel(), ROWS)
    sums = delta.new_empty(models, blocks, channels, dtype=torch.float32)
    _plan(gradients_kernel, delta.shape, *_dtypes(delta, bias))(delta, bias, dsteps, ddelta, sums)
    return ddelta, sums.sum(1).to(bias.dtype)


def _dtypes(delta: Tensor, bias: Tensor) -> tuple:
    return bias.shape[0], delta.dtype, bias.dtype, delta.device


@functools.lru_cache(1024)
def _plan(kernel, shape: torch.Size, models: int, dtype, bias_dtype, device: torch.device) -> Launcher:
    tokens, channels = shape[0] // models * shape[1], shape[2]
    programs = models * triton.cdiv(tokens, ROWS) * triton.cdiv(channels, CHANNELS)
    return Launcher(kernel, programs, (tokens, channels, ROWS, CHANNELS), num_warps=8)


@triton.jit
def _place(tokens, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The model, the block of its tokens, where its elements are, which are there, and the channels [1, CHANNELS]."""
    BLOCKS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    d = (tl.program_id(0) % BLOCKS) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    blocks = tl.cdiv(tokens, ROWS)
    block, model = (tl.program_id(0) // BLOCKS) % blocks, tl.program_id(0) // (BLOCKS * blocks)
    t = block * ROWS + tl.arange(0, ROWS)[:, None]
    at = (model.to(tl.int64) * tokens + t) * D + d
    return model, block, at, (t < tokens) & (d < D), d


@triton.jit
def _shifted(delta, bias, model, at, there, d, D: tl.constexpr):
    """delta + bias, and exp(-|.|) of it."""
    z = tl.load(delta + at, mask=there, other=0.0).to(tl.float32)
    z += tl.load(bias + model.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    return z, tl.exp2(-tl.abs(z) * LOG2_E)


@triton.jit
def steps_kernel(delta, bias, steps, tokens, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    model, _, at, there, d = _place(tokens, D, ROWS, CHANNELS)
    z, t = _shifted(delta, bias, model, at, there, d, D)
    # ln(1 + t) = 2 artanh(t / (2 + t)), so that a small step keeps its digits.
    r = t / (2.0 + t)
    q = r * r
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13))))))
    tl.store(steps + at, tl.maximum(z, 0.0) + 2.0 * r * series, mask=there)


@triton.jit
def gradients_kernel(
    delta, bias, dsteps, ddelta, sums, tokens, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    model, block, at, there, d = _place(tokens, D, ROWS, CHANNELS)
    z, t = _shifted(delta, bias, model, at, there, d, D)
    gradient = tl.load(dsteps + at, mask=there, other=0.0) * tl.where(z >= 0, 1.0, t) / (1.0 + t)
    tl.store(ddelta + at, gradient.to(ddelta.dtype.element_ty), mask=there)
    place = (model * tl.cdiv(tokens, ROWS) + block).to(tl.int64)
    tl.store(sums + place * D + d, tl.sum(gradient, 0)[None, :], mask=d < D)
