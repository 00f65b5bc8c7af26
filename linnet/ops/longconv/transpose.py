"""Channels to the outside: a plain transposition with a cast, which PyTorch's strided copy does many times slower."""

import importlib

import torch
from torch import Tensor

from linnet.ops import backend


def transpose(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, A, C] -> [M, C, A] in `dtype`, contiguous."""
    if torch.float64 in (x.dtype, dtype) or not backend.use_triton("longconv", x.is_cuda, "transpose_kernel"):
        return x.mT.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return importlib.import_module("linnet.ops.longconv.transpose_kernel").transpose(x, dtype)


def to_lines(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, B, T, F, P] -> [M F, P B, T]."""
    models, batch, length, filters, shared = x.shape
    return transpose(x.reshape(models, batch * length, filters * shared), dtype).view(models * filters, -1, length)


def from_lines(lines: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The inverse, to [M, B, T, F, P] of `shape`."""
    return transpose(lines.reshape(shape[0], shape[3] * shape[4], -1), dtype).view(shape)
