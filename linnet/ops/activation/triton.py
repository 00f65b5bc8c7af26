"""Gated activations and log-decays on a GPU: one pass forward; the backward computes them again from the inputs."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import backend
from linnet.ops.device import activate, activate_and_differentiate, after_previous, clamp, silu, softplus
from linnet.ops.launching import Launcher, align, align_rows, align_slices, cdiv, next_power_of_2

BLOCK, WARPS = 2048, 4
SEGMENT, COLUMNS = 256, 128  # rows and columns whose sums a program has
FORGET_SEGMENT, FORGET_COLUMNS = 64, 512  # the same in the backward of `forget_inputs`


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


def softplus_steps_forward(x, rates, bias, limits: tuple[float, float], keeps_steps: bool):
    """Steps, or None, and log-decays, in float32."""
    log_decay = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    steps = torch.empty_like(log_decay) if keeps_steps else None
    (x, hop), rates, bias = align_rows(x, bias.shape), align(rates), align(bias)
    key = bias.numel(), rates.numel(), hop, x.dtype, rates.dtype, bias.dtype, x.device, keeps_steps
    _plan_steps(cdiv(x.numel(), BLOCK), *key)(x, rates, bias, steps, log_decay, x.numel(), *map(float, limits))
    return steps, log_decay


def softplus_steps_backward(
    x, rates, bias, limits: tuple[float, float], dsteps: Tensor | None, dlog_decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, rates and bias."""
    dx = x.new_empty(x.shape)
    (x, hop), rates, bias, *gradients = align_rows(x, bias.shape), *map(align, (rates, bias, dsteps, dlog_decay))
    rows = x.numel() // bias.numel()
    segments = cdiv(rows, SEGMENT)
    sums = x.new_empty(segments, 2, bias.numel(), dtype=torch.float32)
    dtypes = tuple(None if y is None else y.dtype for y in gradients)
    key = bias.numel(), rates.numel(), hop, x.dtype, rates.dtype, bias.dtype, x.device, dtypes
    _plan_steps(segments, *key)(x, rates, bias, *gradients, dx, sums, rows, *map(float, limits))
    of_bias, of_rates = sums.sum(0)
    return dx, of_rates.view(rates.numel(), -1).sum(1).to(rates.dtype), of_bias.view(bias.shape).to(bias.dtype)


@functools.lru_cache(1024)
def _plan_steps(programs: int, columns: int, heads: int, hop: int, dtype, of_rates, of_bias, device, kind) -> Launcher:
    """Of the forward, which keeps steps or not, or of the backward, with the dtypes of its gradients."""
    sizes = columns, columns // heads, hop
    if isinstance(kind, bool):
        return Launcher(softplus_steps_kernel, programs, (*sizes, kind, BLOCK), num_warps=WARPS)
    block = min(COLUMNS, next_power_of_2(columns))
    constants = *sizes, *(x is not None for x in kind), block, BLOCK // block, SEGMENT
    return Launcher(softplus_steps_backward_kernel, programs * cdiv(columns, block), constants, num_warps=WARPS)


def forget_inputs_forward(c: Tensor, x: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """(1 - f) silu(c), like c, and log f in float32."""
    c, x, beta = map(align, (c, x, beta))
    inputs, log_f = torch.empty_like(c), torch.empty_like(x, dtype=torch.float32)
    key = x.shape[-1], c.numel() // x.numel(), c.dtype, x.dtype, None if beta is None else beta.dtype, x.device
    _plan_forget(cdiv(x.numel(), BLOCK), *key, None)(c, x, beta, inputs, log_f, x.numel())
    return inputs, log_f


def forget_inputs_backward(c, x, beta: Tensor | None, dinputs, dlog_f) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of c, x and beta."""
    c, x, beta, *gradients = map(align, (c, x, beta, dinputs, dlog_f))
    dc, dx, D = torch.empty_like(c), torch.empty_like(x), x.shape[-1]
    rows = x.numel() // D
    segments = cdiv(rows, FORGET_SEGMENT)
    sums = None if beta is None else torch.empty(segments, D, dtype=torch.float32, device=x.device)
    key = D, c.numel() // x.numel(), c.dtype, x.dtype, None if beta is None else beta.dtype, x.device
    _plan_forget(segments, *key, tuple(y.dtype for y in gradients))(c, x, beta, *gradients, dc, dx, sums, rows)
    return dc, dx, None if sums is None else sums.sum(0).to(beta.dtype)


@functools.lru_cache(1024)
def _plan_forget(programs: int, columns: int, parts: int, of_c, of_x, of_beta, device, gradients) -> Launcher:
    """Of the forward, or of the backward, with the dtypes of its gradients."""
    constants = columns, parts, of_beta is not None
    if gradients is None:
        return Launcher(forget_inputs_kernel, programs, (*constants, BLOCK), num_warps=WARPS)
    block = min(FORGET_COLUMNS, next_power_of_2(columns))
    constants += block, FORGET_COLUMNS // block, FORGET_SEGMENT
    return Launcher(forget_inputs_backward_kernel, programs * cdiv(columns, block), constants, num_warps=WARPS)


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


@triton.jit
def softplus_steps_kernel(
    x, rates, bias, steps, log_decay, count, low, high, C: tl.constexpr, GROUP: tl.constexpr, HOP: tl.constexpr,
    KEEPS_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of C numbers, HOP apart in x; GROUP columns have one rate."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask, column = at < count, at % C
    z = tl.load(x + at // C * HOP + column, mask=mask, other=0.0).to(tl.float32)
    z += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    step = clamp(softplus(z), low, high)
    rate = tl.exp(tl.load(rates + column // GROUP, mask=mask, other=0.0).to(tl.float32))
    if KEEPS_STEPS:
        tl.store(steps + at, step, mask=mask)
    tl.store(log_decay + at, -rate * step, mask=mask)


@triton.jit
def softplus_steps_backward_kernel(
    x, rates, bias, dsteps, dlog_decay, dx, sums, rows, low, high, C: tl.constexpr, GROUP: tl.constexpr,
    HOP: tl.constexpr, HAS_STEPS: tl.constexpr, HAS_LOG: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """dx, and the sums of SIZE rows for the bias and the rates, [segments, 2, C]."""
    BLOCKS: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    segment = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < C
    first = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(rates + column // GROUP, mask=inside, other=0.0).to(tl.float32))
    of_bias, of_rates = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for i in range(0, SIZE, ROWS):
        row = segment * SIZE + i + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        z = tl.load(x + row[:, None] * HOP + column[None, :], mask=mask, other=0.0).to(tl.float32) + first[None, :]
        at, step, gradient = row[:, None] * C + column[None, :], softplus(z), tl.zeros([ROWS, COLUMNS], tl.float32)
        if HAS_STEPS:
            gradient += tl.load(dsteps + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_LOG:
            passed = -rate[None, :] * tl.load(dlog_decay + at, mask=mask, other=0.0).to(tl.float32)
            of_rates += tl.sum(passed * clamp(step, low, high), 0)
            gradient += passed
        gradient = tl.where((step < low) | (step > high), 0.0, gradient / (1.0 + tl.exp(-z)))  # of NaN it is NaN
        gradient = tl.where(mask, gradient, 0.0)
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=mask)
        of_bias += tl.sum(gradient, 0)
    tl.store(sums + segment * (2 * C) + column, of_bias, mask=inside)
    tl.store(sums + segment * (2 * C) + C + column, of_rates, mask=inside)


@triton.jit
def _forget(x, beta):
    """With small = exp(-|x|): small, 1 / (1 + small), 1 - sigmoid(x), and f (1 + small), above 0: 0 / f is 0."""
    small = tl.exp(-tl.abs(x))
    share = 1.0 / (1.0 + small)
    top = tl.where(x >= 0.0, 1.0 + beta * small, small + beta)
    return small, share, tl.where(x >= 0.0, small, 1.0) * share, tl.where(top < 1e-37, 1e-37, top)


@triton.jit
def forget_inputs_kernel(
    c, x, beta, inputs, log_f, count, D: tl.constexpr, PARTS: tl.constexpr, BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tx = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    low = tl.zeros([BLOCK], tl.float32)
    if BOUNDED:
        low = tl.load(beta + at % D, mask=mask, other=0.0).to(tl.float32)
    small, share, rest, top = _forget(tx, low)
    key = (1.0 - low) * rest
    # One logarithm, from what has all digits: 1 - f where f is near 1, else f, or without a bound exp(x).
    near = key < 0.5
    whole = tl.where(near, 1.0 - key, top * share if BOUNDED else 1.0 + small)
    lost = tl.where(near, -key, 0.0 if BOUNDED else small)
    lost = tl.where(near | (not BOUNDED), (lost - (whole - 1.0)) / whole, 0.0)
    log = tl.log(whole) + lost
    tl.store(log_f + at, log if BOUNDED else tl.where(near, log, tx - log), mask=mask)
    for part in tl.static_range(PARTS):
        tc = tl.load(c + at * PARTS + part, mask=mask, other=0.0).to(tl.float32)
        tl.store(inputs + at * PARTS + part, (silu(tc) * key).to(inputs.dtype.element_ty), mask=mask)


@triton.jit
def forget_inputs_backward_kernel(
    c, x, beta, dinputs, dlog_f, dc, dx, sums, rows, D: tl.constexpr, PARTS: tl.constexpr, BOUNDED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """With s = sigmoid(x): df/dx = (1 - beta) s (1 - s), df/dbeta = 1 - s, and d log f = df / f.

    If BOUNDED, `sums` [segments, D] are those of SIZE rows for beta.
    """
    BLOCKS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    segment = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    low = tl.zeros([COLUMNS], tl.float32)
    if BOUNDED:
        low = tl.load(beta + column, mask=column < D, other=0.0).to(tl.float32)
    low = low[None, :]
    of_beta = tl.zeros([COLUMNS], tl.float32)
    for i in range(0, SIZE, ROWS):
        row = segment * SIZE + i + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        tx = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        dlog = tl.load(dlog_f + at, mask=mask, other=0.0).to(tl.float32)
        small, share, rest, top = _forget(tx, low)
        inverse = 1.0 / top
        dkey = tl.zeros([ROWS, COLUMNS], tl.float32)
        for part in tl.static_range(PARTS):
            tc = tl.load(c + at * PARTS + part, mask=mask, other=0.0).to(tl.float32)
            gradient = tl.load(dinputs + at * PARTS + part, mask=mask, other=0.0).to(tl.float32)
            value, slope = activate_and_differentiate(tc, "silu")
            dkey += gradient * value
            tl.store(dc + at * PARTS + part, (gradient * slope * (1.0 - low) * rest).to(dc.dtype.element_ty), mask=mask)
        first = tl.where(tx >= 0.0, 1.0, small)
        ratio = first * inverse if BOUNDED else 1.0  # s / f
        gradient = (1.0 - low) * rest * (dlog * ratio - dkey * (first * share))
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=mask)
        if BOUNDED:
            of_beta += tl.sum(tl.where(mask, rest * (dlog * ((1.0 + small) * inverse) - dkey), 0.0), 0)
    if BOUNDED:
        tl.store(sums + segment * D + column, of_beta, mask=column < D)
