"""Gated activations on a GPU: one pass forward; the backward computes the activation again from the inputs."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import backend
from linnet.ops.device import activate, activate_and_differentiate, after_previous
from linnet.ops.launching import Launcher, align, align_slices, cdiv

BLOCK, WARPS = 2048, 4


def supports(gate: Tensor, x: Tensor, activation: str) -> bool:
    """Whether the kernels take a call: two tensors of one dtype of at most 32 bits; all activations but gelu, relu2."""
    if backend.is_wide("gated_activation", gate, x):
        return False
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    alike = gate.dtype == x.dtype and gate.device == x.device and gate.dtype in dtypes
    return alike and activation not in ("gelu", "relu2") and gate.numel() > 0


def gated_forward(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    """act(gate) * x."""
    (gate, *slices), x = align_slices(gate), align(x)
    y = torch.empty_like(x)
    launch = _plan(forward_kernel, x.numel(), x.dtype, None, activation, x.device, *slices)
    launch(gate, x, y, x.numel())
    return y


def gated_backward(gate: Tensor, x: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of the gate (before its activation) and of x."""
    gate, x, dy = align(gate), align(x), align(dy)
    dgate, dx = torch.empty_like(gate), torch.empty_like(x)
    launch = _plan(backward_kernel, x.numel(), x.dtype, dy.dtype, activation, x.device)
    launch(gate, x, dy, dgate, dx, x.numel())
    return dgate, dx


def log_sigmoid_forward(x: Tensor, divisor: float) -> Tensor:
    """log(sigmoid(x)) / divisor, float32."""
    x = align(x)
    y = torch.empty_like(x, dtype=torch.float32)
    _plan(log_sigmoid_kernel, x.numel(), x.dtype, None, "none", x.device)(x, x, y, x.numel(), 1.0 / divisor)
    return y


def log_sigmoid_backward(x: Tensor, dy: Tensor, divisor: float) -> Tensor:
    x, dy = align(x), align(dy)
    dx = torch.empty_like(x)
    _plan(log_sigmoid_kernel, x.numel(), x.dtype, dy.dtype, "slope", x.device)(x, dy, dx, x.numel(), 1.0 / divisor)
    return dx


@functools.lru_cache(1024)
def _plan(kernel, numel: int, dtype, gradient_dtype, activation: str, device, *slices: int) -> Launcher:
    return Launcher(kernel, cdiv(numel, BLOCK), (activation, *slices, BLOCK), num_warps=WARPS)


@triton.jit
def forward_kernel(
    gate, x, y, count, ACTIVATION: tl.constexpr, SLICE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """If SLICE, the gate is in pieces of so many numbers, STRIDE apart."""
    after_previous(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    gate_at = at // SLICE * STRIDE + at % SLICE if SLICE else at
    tg = tl.load(gate + gate_at, mask=mask, other=0.0).to(tl.float32)
    tx = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, (activate(tg, ACTIVATION) * tx).to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(gate, x, dy, dgate, dx, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tg = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    tx = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    td = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    tg, slope = activate_and_differentiate(tg, ACTIVATION)
    tl.store(dgate + at, (td * tx * slope).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dx + at, (td * tg).to(dx.dtype.element_ty), mask=mask)


@triton.jit
def log_sigmoid_kernel(x, dy, y, count, factor, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """factor log(sigmoid(x)), or dy times its slope."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tx = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(tx))
    if FORM == "slope":
        share = tl.where(tx > 0.0, small, 1.0) / (1.0 + small)  # sigmoid(-x)
        ty = share * factor * tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    else:
        # log(1 + small) to the last digits: what rounding takes from small in the sum is taken from it outside, too.
        more = 1.0 + small
        log = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
        ty = (tl.minimum(tx, 0.0) - log) * factor
    tl.store(y + at, ty.to(y.dtype.element_ty), mask=mask)
