"""A linear layer for the one token of a decoding step: a matrix times a vector, bound by reading the matrix."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.direct import is_plain

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; for a single row on a GPU, without a gradient, by a kernel of its own.

    A library's product of matrices keeps few programs busy with one row. This one gives each program some rows of the
    matrix, as many as keep the memory busy, and adds up in float32 in a fixed order.

    Args:
        x: [..., K]; the kernel takes [1, K].
        weight: [N, K]. bias: [N] or None.

    Returns:
        [..., N] in the dtype of x.
    """
    if x.ndim == 2 and x.shape[0] == 1 and x.is_cuda and not torch.is_grad_enabled() and _has_kernel(x, weight, bias):
        return importlib.import_module("linnet.ops.matvec.triton").matvec(x, weight, bias)
    return F.linear(x, weight, bias)


def _has_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if not is_plain((x, weight, bias)) or not backend.use_triton("matvec", x.is_cuda):
        return False
    return importlib.import_module("linnet.ops.matvec.triton").supports(x, weight, bias)
