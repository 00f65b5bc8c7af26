"""One token of the diagonal recurrence in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import launch

BLOCK = 256


def step(x: Tensor, log_decay: Tensor, state: Tensor, theta: Tensor | None) -> Tensor:
    """As `diagonal_step`: log_decay [B, D], x and state [B, D], with theta [D] both [B, D, 2]; the state is float32."""
    x, log_decay = x.contiguous(), log_decay.contiguous()
    h = torch.empty_like(x)
    count = log_decay.numel()
    theta = None if theta is None else theta.contiguous()
    constants = count, log_decay.shape[1], BLOCK, theta is not None
    launch(step_kernel, triton.cdiv(count, BLOCK), (x, log_decay, state, h, theta), (), constants, num_warps=2)
    return h


@triton.jit
def step_kernel(x, log_decay, state, h, theta, count, D, BLOCK: tl.constexpr, COMPLEX: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    decay = tl.exp(tl.load(log_decay + i, mask=inside, other=0.0).to(tl.float32))
    if COMPLEX:
        angle = tl.load(theta + i % D, mask=inside, other=0.0).to(tl.float32)
        real, imaginary = decay * tl.cos(angle), decay * tl.sin(angle)
        re = tl.load(state + 2 * i, mask=inside, other=0.0)
        im = tl.load(state + 2 * i + 1, mask=inside, other=0.0)
        new_re = real * re - imaginary * im + tl.load(x + 2 * i, mask=inside, other=0.0).to(tl.float32)
        new_im = imaginary * re + real * im + tl.load(x + 2 * i + 1, mask=inside, other=0.0).to(tl.float32)
        tl.store(state + 2 * i, new_re, mask=inside)
        tl.store(state + 2 * i + 1, new_im, mask=inside)
        tl.store(h + 2 * i, new_re.to(h.dtype.element_ty), mask=inside)
        tl.store(h + 2 * i + 1, new_im.to(h.dtype.element_ty), mask=inside)
    else:
        new = decay * tl.load(state + i, mask=inside, other=0.0)
        new += tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(state + i, new, mask=inside)
        tl.store(h + i, new.to(h.dtype.element_ty), mask=inside)
