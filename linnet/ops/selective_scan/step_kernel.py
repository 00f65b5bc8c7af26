"""One token of the selective scan in one launch: every element of the state is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import launch


def step(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor) -> Tensor:
    """As `selective_step`: the state [Bt, D, N] float32, contiguous."""
    batch, channels, states = state.shape
    x, delta, A, D = x.contiguous(), delta.contiguous(), A.contiguous(), None if D is None else D.contiguous()
    # A slice of a wider row, as a projection to several things gives, is read where it is.
    B, C = (y if y.stride(1) == 1 else y.contiguous() for y in (B, C))
    y = torch.empty_like(x)
    padded = triton.next_power_of_2(states)
    width = min(triton.next_power_of_2(channels), max(1, 512 // padded))
    constants = B.stride(0), C.stride(0), channels, states, padded, width, D is not None
    programs = batch * triton.cdiv(channels, width)
    launch(step_kernel, programs, (x, delta, A, B, C, D, state, y), (), constants, num_warps=2)
    return y


@triton.jit
def step_kernel(
    x, delta, A, B, C, skip, state, y, stride_b, stride_c, D: tl.constexpr, N: tl.constexpr, STATES: tl.constexpr,
    WIDTH: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (D + WIDTH - 1) // WIDTH
    block, b = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    d, n = block * WIDTH + tl.arange(0, WIDTH), tl.arange(0, STATES)
    at, inside = d[:, None] * N + n[None, :], (d < D)[:, None] & (n < N)[None, :]
    held = tl.load(state + b * (D * N) + at, mask=inside, other=0.0)
    rate = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
    time = tl.load(delta + b * D + d, mask=d < D, other=0.0).to(tl.float32)
    value = tl.load(x + b * D + d, mask=d < D, other=0.0).to(tl.float32)
    write = tl.load(B + b * stride_b + n, mask=n < N, other=0.0).to(tl.float32)
    read = tl.load(C + b * stride_c + n, mask=n < N, other=0.0).to(tl.float32)
    held = tl.exp(time[:, None] * rate) * held + (time * value)[:, None] * write[None, :]
    out = tl.sum(held * read[None, :], 1)
    if HAS_SKIP:
        out += tl.load(skip + d, mask=d < D, other=0.0).to(tl.float32) * value
    tl.store(state + b * (D * N) + at, held, mask=inside)
    tl.store(y + b * D + d, out.to(y.dtype.element_ty), mask=d < D)
