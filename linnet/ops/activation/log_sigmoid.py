"""The logarithm of a sigmoid, as decays are made of it."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.compat_torch import is_plain
from linnet.ops.fast_path import find_apply
from linnet.ops.vmap_rules import Mapped, is_mapped, lead


def log_sigmoid(x: Tensor, divisor: float = 1.0) -> Tensor:
    """log(sigmoid(x)) / divisor in float32 (float64 stays), whatever the dtype of x.

    On a GPU in eager mode one kernel does it and one its backward, which keep nothing but x; elsewhere, and for a
    compiler, it is a composition of PyTorch's functions.
    """
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.numel() > 0
    if known and is_plain((x,)) and backend.use_triton("activation", x.is_cuda):
        return _apply(x, float(divisor))
    if known and is_mapped(x) and backend.use_triton("activation", x.is_cuda):
        return Mapped.apply(_rule, x, divisor)
    return F.logsigmoid(x if x.dtype == torch.float64 else x.float()) / divisor


def _rule(size, dims, x, divisor):
    return log_sigmoid(lead(x, dims[0], size), divisor), 0


class _LogSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, divisor):
        kernels = importlib.import_module("linnet.ops.activation.triton")
        ctx.save_for_backward(x)
        ctx.constants = kernels, divisor
        return kernels.log_sigmoid_forward(x, divisor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        kernels, divisor = ctx.constants
        return kernels.log_sigmoid_backward(*ctx.saved_tensors, dy, divisor), None


_apply = find_apply(_LogSigmoid)
