"""One token of the modal convolution in one launch: every element of the state is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import launch


def step(x: Tensor, log_decay: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """As `modal_step`: x [B, D], log_decay and weight [D, E], the state [B, D, E] float32, contiguous."""
    B, D, E = state.shape
    x, log_decay, weight = x.contiguous(), log_decay.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    padded = triton.next_power_of_2(E)
    channels = max(1, 1024 // padded)
    constants = D, E, padded, channels, padded == E and D % channels == 0
    launch(step_kernel, B * triton.cdiv(D, channels), (x, log_decay, weight, state, y), (), constants, num_warps=4)
    return y


@triton.jit
def step_kernel(
    x, log_decay, weight, state, y, D: tl.constexpr, E: tl.constexpr,
    MODES: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    block, b = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS).to(tl.int64)
    d, e = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, MODES)
    at = d[:, None] * E + e[None, :]
    states = state + b * (D * E) + at
    if EVEN:
        u = tl.load(states)
        decay = tl.load(log_decay + at).to(tl.float32)
        read = tl.load(weight + at).to(tl.float32)
        entering = tl.load(x + b * D + d).to(tl.float32)
    else:
        inside = (d < D)[:, None] & (e < E)[None, :]
        u = tl.load(states, mask=inside, other=0.0)
        decay = tl.load(log_decay + at, mask=inside, other=0.0).to(tl.float32)
        read = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        entering = tl.load(x + b * D + d, mask=d < D, other=0.0).to(tl.float32)
    u = u * tl.exp(decay) + entering[:, None]
    out = tl.sum(u * read, 1).to(y.dtype.element_ty)
    if EVEN:
        tl.store(states, u)
        tl.store(y + b * D + d, out)
    else:
        tl.store(states, u, mask=inside)
        tl.store(y + b * D + d, out, mask=d < D)
