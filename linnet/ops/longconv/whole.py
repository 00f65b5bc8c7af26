"""Attention with a long filter, all pairs of tokens at once in plain PyTorch: what its kernels compute."""

import torch
from torch import Tensor

from linnet.ops.chunks import state_dtype


def attend_forward(q: Tensor, k: Tensor, v: Tensor, filters: Tensor) -> Tensor:
    """y like q; arguments as in the registered op."""
    q_, k_, v_ = _heads(q, k, v, filters)
    return _tokens(torch.matmul(torch.matmul(q_, k_.mT) * _matrix(q, filters), v_)).to(q.dtype)


def attend_backward(q: Tensor, k: Tensor, v: Tensor, filters: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients to q, k, v and the filters."""
    q_, k_, v_, dy_ = _heads(q, k, v, dy, filters)
    matrix = _matrix(q, filters)
    scores, gradients = torch.matmul(q_, k_.mT), torch.matmul(dy_, v_.mT)
    pairs = (scores * gradients).unflatten(0, (filters.shape[0], -1)).sum(1)
    dfilters = torch.stack([pairs.diagonal(-lag, 2, 3).sum(-1) for lag in range(q.shape[1])], -1)
    scores, gradients = scores * matrix, gradients * matrix
    grads = (torch.matmul(gradients, k_), torch.matmul(gradients.mT, q_), torch.matmul(scores.mT, dy_))
    return *(_tokens(x).to(y.dtype) for x, y in zip(grads, (q, k, v), strict=True)), dfilters.to(filters.dtype)


def _matrix(q: Tensor, filters: Tensor) -> Tensor:
    """[R, H, T, T] with filter_{t-s} at (t, s)."""
    index = torch.arange(q.shape[1], device=q.device)
    lag = index[:, None] - index
    values = filters.to(state_dtype(q, filters))[..., lag.clamp(min=0)].masked_fill(lag < 0, 0.0)
    return values.repeat_interleave(q.shape[0] // filters.shape[0], 0)


def _heads(*tensors: Tensor) -> list[Tensor]:
    """All but the last [R, T, H, D] -> [R, H, T, D], in the dtype of arithmetic."""
    return [x.to(state_dtype(*tensors)).transpose(1, 2) for x in tensors[:-1]]


def _tokens(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()
