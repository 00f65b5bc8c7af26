"""The causal convolution with a kernel as long as the sequence: a Toeplitz product where T is short, else FFTs.

Shapes x [M, B, T, F, P] and kernel [M, F, T]: M models, and P channels that share each of the F filters. All work is on
lines [M F, P B, T], time innermost. A Toeplitz product costs 2 T^2 a channel on the matrix units, and pays where many
lines (P B) share the matrix of a filter. FFTs take, beside the lines, three spectra of 8 bytes a token and channel.
"""

import importlib
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from linnet.ops import backend
from linnet.ops.chunks import state_dtype
from linnet.ops.documents import documents

# A long filter in modes, h_t = skip [t = 0] + sum_n Re(R_n lambda_n^t), and the tables that a convolution needs of it.
#
# Every mode is the recurrence u_t = lambda u_{t-1} + x_t, so the filter decodes with constant state. Complex numbers
# are pairs of reals here: products of complex tables are ordinary matrix products, which compile, count and batch as
# such.


class ModalFilter(NamedTuple):
    """F filters of N modes each.

    Attributes:
        log_decay: [F, N], the logarithm of |lambda|, at most 0.
        theta: [F, N], the angle of lambda in radians a token.
        residue: [F, N, 2], R, real and imaginary part.
        skip: [F], what h_0 has beside the modes; None for nothing.
    """

    log_decay: Tensor
    theta: Tensor
    residue: Tensor
    skip: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "ModalFilter":
        return ModalFilter(*(None if x is None else x.to(dtype) for x in self))


def powers(filter: ModalFilter, times: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of lambda^t, both [F, N, len(times)], in the dtype of the filter.

    Angles are turned in float64: at thousands of tokens a float32 phase would have lost three digits. The tables are
    small beside the convolution.
    """
    times = times.to(torch.float64)
    phase = filter.theta.to(torch.float64)[..., None] * times
    # 0 times the logarithm of a decay of 0 is not a number, but lambda^0 is 1.
    size = (filter.log_decay[..., None] * times.to(filter.log_decay.dtype)).masked_fill(times == 0, 0.0).exp()
    return size * phase.cos().to(size.dtype), size * phase.sin().to(size.dtype)


def kernel_of(filter: ModalFilter, length: int) -> Tensor:
    """h_t for t < length, [F, length].

    lambda^(a C + b) = lambda^(a C) lambda^b with C near the square root of the length: one product of two small
    tables, so that nothing of size [F, length, N] is formed or kept for the backward.
    """
    near = max(1, round(length**0.5))
    far = -(-length // near)
    device = filter.theta.device
    left = torch.stack(_weigh(filter, *powers(filter, near * torch.arange(far, device=device))), 1)  # [F, 2, N, far]
    right = torch.stack(powers(filter, torch.arange(near, device=device)), 1)
    kernel = torch.bmm(left.flatten(1, 2).mT, right.flatten(1, 2)).flatten(1)[:, :length]
    if filter.skip is None:
        return kernel
    return torch.cat([kernel[:, :1] + filter.skip[:, None], kernel[:, 1:]], 1)


def read_table(filter: ModalFilter, length: int) -> Tensor:
    """[F, length, N, 2]: what token t reads of the modes before the first token, Re(R lambda^{t+1} u)."""
    times = torch.arange(1, length + 1, device=filter.theta.device)
    return torch.stack(_weigh(filter, *powers(filter, times)), -1).transpose(1, 2)


def write_table(filter: ModalFilter, length: int) -> Tensor:
    """[F, length, N, 2]: lambda^t, what a token becomes in the modes after t more."""
    return torch.stack(powers(filter, torch.arange(length, device=filter.theta.device)), -1).transpose(1, 2)


def turn(state: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """The complex numbers state [..., 2] times real + i imaginary."""
    x, y = state.unbind(-1)
    return torch.stack([x * real - y * imaginary, x * imaginary + y * real], -1)


def _weigh(filter: ModalFilter, real: Tensor, imaginary: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) with Re(R lambda^t u) = a Re u + b Im u."""
    weight, twist = filter.residue[..., 0, None], filter.residue[..., 1, None]
    return weight * real - twist * imaginary, -(weight * imaginary + twist * real)


# Forward and backward on one CPU core, Toeplitz against FFT, in ms: 27, 107 (T = 128, 1024 lines of 16 filters);
# 91, 112 (T = 128, 128 lines of 128 filters); 23, 14 (32 lines); 207, 94 (T = 256, 64 lines). On an H200 in bfloat16
# (float32): 1.0, 4.3 (2.1, 4.4) (T = 128, 128 lines of 3,072 filters); 1.3, 6.0 (3.7, 6.2) (T = 256, 256 lines of 1,024
# filters); 3.3, 5.6 (7.8, 5.7) (T = 512, 128 lines); 11.3, 5.6 (21, 5.8) (T = 1,024, 64 lines).
TOEPLITZ = 256  # tokens of the longest sequence or document by Toeplitz product
LINES = 128  # and the fewest lines of a filter


def convolve_forward(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """y_t = sum_{s <= t} kernel_{t-s} x_s, in each document alone; shaped like x and in its dtype."""
    pieces, dtype, operand = _plan(x, kernel, cu_seqlens)
    lines, values = to_lines(x, operand), kernel.flatten(0, 1).to(dtype)
    matrix, parts = _toeplitz(values.to(operand), pieces, lines.shape[1]), []
    for start, end in pieces:
        part, length = lines[..., start:end], end - start
        if is_short(length, lines.shape[1]):
            parts.append(torch.bmm(part, matrix[:, :length, :length].mT))
        else:
            size = fft_size(length)
            parts.append(_back(_spectrum(part, size) * _spectrum(values[:, None, :length], size), length))
    return from_lines(_join(parts), x.shape, x.dtype)


def convolve_backward(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients to x and kernel: the correlations of dy with the kernel, and with x over batch and channels."""
    pieces, dtype, operand = _plan(x, kernel, cu_seqlens)
    lines, grads, values = to_lines(x, operand), to_lines(dy, operand), kernel.flatten(0, 1).to(dtype)
    matrix, parts = _toeplitz(values.to(operand), pieces, lines.shape[1]), []
    dvalues = torch.zeros_like(values, memory_format=torch.contiguous_format)
    for start, end in pieces:
        part, grad, length = lines[..., start:end], grads[..., start:end], end - start
        if is_short(length, lines.shape[1]):
            parts.append(torch.bmm(grad, matrix[:, :length, :length]))
            dvalues[:, :length] += sum_diagonals(torch.bmm(grad.mT, part), dtype)
        else:
            size = fft_size(length)
            spectrum = _spectrum(grad, size)
            parts.append(_back(spectrum * _spectrum(values[:, None, :length], size).conj(), length))
            spectrum.mul_(_spectrum(part, size).conj())
            dvalues[:, :length] += _back(spectrum.sum(1), length)
    return from_lines(_join(parts), x.shape, x.dtype), dvalues.view(kernel.shape).to(kernel.dtype)


def is_short(length: int, lines: int) -> bool:
    """Whether a piece of a sequence goes by Toeplitz product."""
    return length <= TOEPLITZ and lines >= LINES


def fft_size(length: int) -> int:
    """A length of 2^k or 3 2^k in which a convolution of two sequences of `length` does not reach around."""
    size = 1 << (2 * length - 2).bit_length()
    return size * 3 // 4 if size * 3 // 4 >= 2 * length - 1 else size


def sum_diagonals(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """[G, C, C] -> [G, C]: the sum over t of (t, t - j) for each lag j."""
    length = matrix.shape[1]
    # With C zeros before each row, a row step of one column more walks along a diagonal.
    rows = pad(matrix, (length, 0)).contiguous()
    skewed = rows.as_strided((rows.shape[0], length, length), (2 * length**2, 2 * length + 1, 1), 1)
    return skewed.sum(1, dtype=dtype).flip(1)


def _plan(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None) -> tuple[list, torch.dtype, torch.dtype]:
    """First and end token of each piece, the dtype of arithmetic, and that of operands: on a GPU bfloat16 for bfloat16
    inputs where all are Toeplitz products, which rounds the filter and nothing else."""
    pieces = [(start, end) for _, start, end in documents(cu_seqlens, x.shape[1], x.shape[2]) if start < end]
    dtype, lines = state_dtype(x, kernel), x.shape[1] * x.shape[4]
    halved = x.is_cuda and x.dtype == torch.bfloat16 and all(is_short(end - start, lines) for start, end in pieces)
    return pieces, dtype, x.dtype if halved else dtype


def _toeplitz(values: Tensor, pieces: list[tuple[int, int]], lines: int) -> Tensor | None:
    """[M F, C, C] with value_{t-s} at (t, s), C the longest of the short pieces."""
    size = max((end - start for start, end in pieces if is_short(end - start, lines)), default=0)
    if not size:
        return None
    # Row i of the unfolded values is row size - 1 - i of the matrix.
    return pad(values[:, :size].flip(1), (0, size - 1)).unfold(1, size, 1).flip(1)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _spectrum(x: Tensor, size: int) -> Tensor:
    return torch.fft.rfft(x, size)


def _back(spectrum: Tensor, length: int) -> Tensor:
    return torch.fft.irfft(spectrum, fft_size(length))[..., :length]


def transpose(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, A, C] -> [M, C, A] in `dtype`, contiguous, by a kernel: PyTorch's strided copy is many times slower."""
    if torch.float64 in (x.dtype, dtype) or not backend.use_triton("longconv", x.is_cuda):
        return x.mT.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return importlib.import_module("linnet.ops.longconv.triton").transpose(x, dtype)


def to_lines(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, B, T, F, P] -> [M F, P B, T]."""
    models, batch, length, filters, shared = x.shape
    return transpose(x.reshape(models, batch * length, filters * shared), dtype).view(models * filters, -1, length)


def from_lines(lines: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The inverse, to [M, B, T, F, P] of `shape`."""
    return transpose(lines.reshape(shape[0], shape[3] * shape[4], -1), dtype).view(shape)


# Attention with a long filter: all pairs of tokens at once, as the kernels compute it.


def make_toeplitz(kernel: Tensor) -> Tensor:
    """[..., C] -> [..., C, C] with kernel_{t-s} at (t, s)."""
    index = torch.arange(kernel.shape[-1], device=kernel.device)
    lag = index[:, None] - index
    return kernel[..., lag.clamp(min=0)].masked_fill(lag < 0, 0.0)


def attend_forward(q: Tensor, k: Tensor, v: Tensor, filters: Tensor) -> Tensor:
    """y like q; arguments as in the registered op."""
    q_, k_, v_ = _heads(q, k, v, filters)
    return _tokens(torch.matmul(torch.matmul(q_, k_.mT) * _pair_weights(q, filters), v_)).to(q.dtype)


def attend_backward(q: Tensor, k: Tensor, v: Tensor, filters: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients to q, k, v and the filters."""
    q_, k_, v_, dy_ = _heads(q, k, v, dy, filters)
    matrix = _pair_weights(q, filters)
    scores, gradients = torch.matmul(q_, k_.mT), torch.matmul(dy_, v_.mT)
    pairs = (scores * gradients).unflatten(0, (filters.shape[0], -1)).sum(1)
    dfilters = torch.stack([pairs.diagonal(-lag, 2, 3).sum(-1) for lag in range(q.shape[1])], -1)
    scores, gradients = scores * matrix, gradients * matrix
    grads = (torch.matmul(gradients, k_), torch.matmul(gradients.mT, q_), torch.matmul(scores.mT, dy_))
    return *(_tokens(x).to(y.dtype) for x, y in zip(grads, (q, k, v), strict=True)), dfilters.to(filters.dtype)


def _pair_weights(q: Tensor, filters: Tensor) -> Tensor:
    """[R, H, T, T] with filter_{t-s} at (t, s)."""
    return make_toeplitz(filters.to(state_dtype(q, filters))).repeat_interleave(q.shape[0] // filters.shape[0], 0)


def _heads(*tensors: Tensor) -> list[Tensor]:
    """All but the last [R, T, H, D] -> [R, H, T, D], in the dtype of arithmetic."""
    return [x.to(state_dtype(*tensors)).transpose(1, 2) for x in tensors[:-1]]


def _tokens(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()
