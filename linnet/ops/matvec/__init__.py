"""Linear layers for the tokens of a decoding step: a matrix times one or a few rows, bound by reading the matrix."""

import importlib
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.activation import gated_activation
from linnet.ops.compat_torch import is_plain

ACTIVATIONS = ("none", "silu", "sigmoid")  # of a gate, that the kernels apply

__all__ = ["gated_linear", "linear", "linears", "make_counters"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, counters: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; for few rows on a GPU, without a gradient, by kernels of its own.

    A library's matrix product keeps few programs busy with one row. The kernel for one row gives each program some rows
    of the matrix and adds up in float32 in a fixed order. The kernel for up to 64 rows, in 16 bits, cuts long sums into
    parts; it needs `counters`.

    Args:
        x: [..., K]; the kernels take [M, K].
        weight: [N, K]. bias: [N] or None.
        counters: from `make_counters`, for this layer only; its calls must follow one another on one stream, and never
            directly what writes its weights: the kernel for one row reads weights before the kernel before has ended.

    Returns:
        [..., N] in the dtype of x.
    """
    if x.ndim == 2 and serves(x):
        if x.shape[0] == 1 and _has_kernel(x, weight, bias):
            return _multiply_row(x, weight, bias, None, counters)
        if _takes_rows(x, weight, bias, [weight.shape[0]], counters):
            return _kernels().few_rows(x, weight, [weight.shape[0]], counters)[0]
    return F.linear(x, weight, bias)


def linears(
    x: Tensor, weight: Tensor, sizes: list[int], bias: Tensor | None = None, counters: Tensor | None = None
) -> list[Tensor]:
    """`linear` with several matrices below one another in `weight` [sum(sizes), K]: one tensor [M, size] per matrix.

    On a GPU results of equal size are contiguous: the kernels that read slices of wider rows would copy them.
    """
    if x.shape[0] > 1 and serves(x):
        if _takes_rows(x, weight, bias, sizes, counters):
            return _kernels().few_rows(x, weight, sizes, counters)
        if bias is None and len(set(sizes)) == 1:
            stack = weight.view(len(sizes), sizes[0], -1).transpose(1, 2)
            return list(torch.bmm(x.expand(len(sizes), *x.shape), stack).unbind(0))
    return list(linear(x, weight, bias, counters if len(x) == 1 else None).split(sizes, -1))


def gated_linear(x: Tensor, weight: Tensor, activation: str, counters: Tensor | None = None) -> Tensor:
    """act(x G^T) * (x U^T) for the matrices G over U in `weight` [2 N, K]: [M, N], for x [M, K]."""
    sizes = [weight.shape[0] // 2] * 2
    if serves(x) and activation in ACTIVATIONS:
        if x.shape[0] == 1 and _has_kernel(x, weight, None):
            return _multiply_row(x, weight, None, activation, counters)
        if x.shape[0] > 1 and _takes_rows(x, weight, None, sizes, counters, activation):
            return _kernels().few_rows(x, weight, sizes, counters, activation)[0]
    return gated_activation(*linears(x, weight, sizes, None, counters), activation)


class DeferredNorm(NamedTuple):
    """A root-mean-square norm of x + residual [1, K], or of x act(gate), that every product which reads its result
    computes itself.

    Attributes:
        residual: [1, K] or None. gain: [K] or None.
        h: [1, K], where x + residual goes; None without a residual.
        gate: [1, K] or None, without a residual; `activation` is one of `ACTIVATIONS`.
    """

    x: Tensor
    residual: Tensor | None
    gain: Tensor | None
    h: Tensor | None
    eps: float
    gate: Tensor | None = None
    activation: str = "none"


def defers_norm(x: Tensor, residual: Tensor | None, gain: Tensor | None, gate: Tensor | None = None) -> bool:
    """Whether `defer_norm` takes these: one row [1, K] on a GPU, x with residual and gate of one dtype, no gradient."""
    alike = x.is_contiguous() and (gain is None or gain.is_contiguous())
    for other in (residual, gate):
        alike = alike and (other is None or (other.is_contiguous() and other.dtype == x.dtype))
    row = x.ndim == 2 and x.shape[0] == 1 and serves(x)
    return alike and row and _has_kernel(x, x, None)


def defer_norm(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    eps: float,
    gate: Tensor | None = None,
    activation: str = "none",
    fill: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns y and h as `linnet.ops.norm.rms_norm`, y without values: `linear` and `gated_linear` compute them.

    Nothing else may read y, and nothing may read h before the first of them ran.

    Args:
        gate: multiplies x before the norm, after its activation; without a residual.
        fill: values of y, and of h until it is written, for a test that nothing reads them.
    """
    y, h = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    if fill is not None:
        for values in (y,) if residual is None else (y, h):
            values.fill_(fill)
    y.deferred_norm = DeferredNorm(x, residual, gain, None if residual is None else h, eps, gate, activation)
    return y, h


def serves(x: Tensor) -> bool:
    """Whether kernels may take x: on a GPU, without a gradient."""
    return x.is_cuda and not torch.is_grad_enabled()


def make_counters(device: torch.device) -> Tensor:
    """Returns the counters that a layer keeps for sums in parts: zeros, which each call resets to zero."""
    return torch.zeros(1024, dtype=torch.int32, device=device)


def _multiply_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, counters: Tensor | None
) -> Tensor:
    norm: DeferredNorm | None = getattr(x, "deferred_norm", None)
    return _kernels().matvec(x if norm is None else norm.x, weight, bias, activation, norm, counters is not None)


def _has_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    plain = is_plain((x, weight, bias)) and backend.use_triton("matvec", x.is_cuda)
    return plain and _kernels().supports(x, weight, bias)


def _takes_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int], counters: Tensor | None,
    activation: str | None = None,
) -> bool:  # fmt: skip
    if bias is not None or counters is None or not is_plain((x, weight)):
        return False
    return backend.use_triton("matvec", x.is_cuda) and _kernels().supports_rows(x, weight, sizes, activation)


def _kernels():
    return importlib.import_module("linnet.ops.matvec.triton")
