"""The causal convolution with a kernel as long as the sequence: a Toeplitz product where T is short, else FFTs.

Shapes x [M, B, T, F, P] and kernel [M, F, T]: M models, and P channels that share each of the F filters. A Toeplitz
product costs 2 T^2 a channel on the matrix units, and pays where many columns (B P) share the matrix of a filter.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import documents

# Forward and backward on one CPU core, Toeplitz against FFT, in ms: 27, 107 (T = 128, 1024 columns of 16 filters);
# 91, 112 (T = 128, 128 columns of 128 filters); 23, 14 (32 columns); 207, 94 (T = 256, 64 columns).
TOEPLITZ = 256  # tokens of the longest sequence or document by Toeplitz product
COLUMNS = 128  # and the fewest columns


def convolve_forward(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """y_t = sum_{s <= t} kernel_{t-s} x_s, in each document alone; shaped like x and in its dtype."""
    dtype, y = state_dtype(x, kernel), torch.empty_like(x, memory_format=torch.contiguous_format)
    kernel = kernel.to(dtype)
    pieces, columns = _pieces(x, cu_seqlens), x.shape[1] * x.shape[4]
    matrix = _toeplitz(kernel.to(_operand(x, dtype)), pieces, columns)
    for start, end in pieces:
        x_, length = x[:, :, start:end], end - start
        if is_short(length, columns):
            y_ = _columns_back(torch.bmm(matrix[:, :length, :length], _columns(x_.to(matrix.dtype))), x_.shape)
        else:
            x_, size = x_.to(dtype), fft_size(length)
            y_ = _back(_spectrum(x_, size) * _spectrum(kernel[..., :length].mT[:, None, :, :, None], size), length)
        y[:, :, start:end] = y_
    return y


def convolve_backward(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients to x and kernel: the correlations of dy with the kernel, and with x over batch and channels."""
    dtype, dx = state_dtype(x, kernel), torch.empty_like(x, memory_format=torch.contiguous_format)
    values = kernel.to(dtype)
    dkernel = torch.zeros_like(values, memory_format=torch.contiguous_format)
    pieces, columns = _pieces(x, cu_seqlens), x.shape[1] * x.shape[4]
    matrix = _toeplitz(values.to(_operand(x, dtype)), pieces, columns)
    for start, end in pieces:
        x_, dy_, length = x[:, :, start:end], dy[:, :, start:end], end - start
        if is_short(length, columns):
            grads = _columns(dy_.to(matrix.dtype))
            dx_ = _columns_back(torch.bmm(matrix[:, :length, :length].mT, grads), x_.shape)
            pairs = torch.bmm(grads, _columns(x_.to(matrix.dtype)).mT)
            found = sum_diagonals(pairs, dtype).unflatten(0, kernel.shape[:2])
        else:
            x_, dy_, size = x_.to(dtype), dy_.to(dtype), fft_size(length)
            grads = _spectrum(dy_, size)
            dx_ = _back(grads * _spectrum(values[..., :length].mT[:, None, :, :, None], size).conj(), length)
            grads.mul_(_spectrum(x_, size).conj())
            found = _back(grads.sum((1, 4), keepdim=True), length)[:, 0, :, :, 0].mT
        dx[:, :, start:end] = dx_
        dkernel[..., :length] += found
    return dx, dkernel.to(kernel.dtype)


def is_short(length: int, columns: int) -> bool:
    """Whether a piece of a sequence goes by Toeplitz product."""
    return length <= TOEPLITZ and columns >= COLUMNS


def fft_size(length: int) -> int:
    """A length of 2^k or 3 2^k in which a convolution of two sequences of `length` does not reach around."""
    size = 1 << (2 * length - 2).bit_length()
    return size * 3 // 4 if size * 3 // 4 >= 2 * length - 1 else size


def _pieces(x: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    return [(start, end) for _, start, end in documents(cu_seqlens, x.shape[1], x.shape[2]) if start < end]


def _toeplitz(kernel: Tensor, pieces: list[tuple[int, int]], columns: int) -> Tensor | None:
    """[M F, C, C] with kernel_{t-s} at (t, s), C the longest of the short pieces."""
    size = max((end - start for start, end in pieces if is_short(end - start, columns)), default=0)
    if not size:
        return None
    rows = kernel[..., :size].flatten(0, 1).flip(1)
    # Row i of the unfolded kernel is row size - 1 - i of the matrix.
    return pad(rows, (0, size - 1)).unfold(1, size, 1).flip(1)


def _operand(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Of Toeplitz products: on a GPU bfloat16 for bfloat16 inputs, which rounds the filter and nothing else."""
    return x.dtype if x.is_cuda and x.dtype == torch.bfloat16 else dtype


def sum_diagonals(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """[G, C, C] -> [G, C]: the sum over t of (t, t - j) for each lag j."""
    length = matrix.shape[1]
    # With C zeros before each row, a row step of one column more walks along a diagonal.
    rows = pad(matrix, (length, 0)).contiguous()
    skewed = rows.as_strided((rows.shape[0], length, length), (2 * length**2, 2 * length + 1, 1), 1)
    return skewed.sum(1, dtype=dtype).flip(1)


def _columns(x: Tensor) -> Tensor:
    """[M, B, T, F, P] -> [M F, T, B P]."""
    return x.permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 1)


def _columns_back(x: Tensor, shape: torch.Size) -> Tensor:
    models, batch, _, filters, shared = shape
    return x.unflatten(0, (models, filters)).unflatten(3, (batch, shared)).permute(0, 3, 2, 1, 4)


def _spectrum(x: Tensor, size: int) -> Tensor:
    return torch.fft.rfft(x, size, dim=2)


def _back(spectrum: Tensor, length: int) -> Tensor:
    return torch.fft.irfft(spectrum, fft_size(length), dim=2)[:, :, :length]
