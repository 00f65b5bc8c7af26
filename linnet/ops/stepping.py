"""What the steps of the ops share on a GPU: when a kernel serves one token, and how a state is cut into programs."""

import functools

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.direct import is_plain


def use_kernel(op: str, state: Tensor, *inputs: Tensor | None) -> bool:
    """Whether `linnet.ops.<op>.step_kernel` takes a token: a float32 state in one piece, and no gradient asked for."""
    if not backend.use_triton(op, state.is_cuda, "step_kernel"):
        return False
    if state.dtype != torch.float32 or not state.is_contiguous():
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (state, *inputs)):
        return False
    # Triton kernels are no secret to torch.compile; transforms (compiled or not) and dispatch modes get operations that
    # they know.
    if torch.compiler.is_compiling():
        return not torch._C._are_functorch_transforms_active()
    return is_plain((state, *inputs))


def as_heads(x: Tensor) -> Tensor:
    """x [B, H, D] with the heads of a token in one piece, as the kernels read it: a slice of a wider row stays one."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@functools.cache
def choose_columns(rows: int, columns: int, heads: int, most: int = 64) -> tuple[int, int, int, int]:
    """Cuts the states [rows, columns] of `heads` heads, over a batch, into programs of all rows and some columns.

    `most` columns, or fewer where heads are few, so that a small batch reaches more of the GPU; 64 elements a thread.
    On an H200 the fastest of 16 to 256 columns and 8 to 64 elements, or within a few percent of it.

    Returns:
        padded rows, columns a program, programs a head, warps.
    """
    padded = max(16, 1 << (rows - 1).bit_length())
    width = min(most, max(16, 1 << (columns - 1).bit_length()))
    while width > 16 and heads * -(-columns // width) < PROGRAMS:
        width //= 2
    return padded, width, -(-columns // width), min(8, max(1, padded * width // 2048))


PROGRAMS = 1024  # about eight for each multiprocessor of a large GPU
