"""The long convolution, the definition: token by token, differentiated by autograd."""

import torch
from torch import Tensor

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states, documents
from linnet.ops.longconv.chunked import ModalFilter


def modal_reference(
    x: Tensor, filter: ModalFilter, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """u_t = lambda u_{t-1} + x_t, y_t = sum_n Re(R_n u_t) + skip x_t. Shapes as in `long_convolution`."""
    dtype = state_dtype(x, filter.theta)
    batch, length, channels = x.shape
    decay, residue = _of_channels(filter.to(dtype), channels)
    values = x.to(dtype)
    if initial_state is None:
        initial_state = values.new_zeros(count_states(cu_seqlens, batch), *decay.shape, 2)
    first = torch.view_as_complex(initial_state.contiguous())
    outputs, finals = [], []
    for rows, start, end in documents(cu_seqlens, batch, length):
        u = first[rows]
        for t in range(start, end):
            u = decay * u + values[:, t, :, None]
            outputs.append((residue * u).sum(-1).real)
        finals.append(u)
    y = torch.stack(outputs, 1)
    if filter.skip is not None:
        y = y + filter.skip.to(dtype).repeat_interleave(channels // filter.skip.shape[0]) * values
    return y.to(x.dtype), torch.view_as_real(torch.cat(finals))


def kernel_reference(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """y_t = sum_s kernel_{t-s} x_s."""
    dtype = state_dtype(x, kernel)
    values = x.to(dtype)
    kernel = kernel.to(dtype).repeat_interleave(x.shape[2] // kernel.shape[0], 0).t()
    outputs = []
    for _, start, end in documents(cu_seqlens, *x.shape[:2]):
        for t in range(end - start):
            lags = kernel[: t + 1].flip(0)
            outputs.append((lags * values[:, start + t + 1 - lags.shape[0] : start + t + 1]).sum(1))
    return torch.stack(outputs, 1).to(x.dtype)


def _of_channels(filter: ModalFilter, channels: int) -> tuple[Tensor, Tensor]:
    """lambda and R of every channel, complex [D, N]."""
    decay = torch.complex(filter.theta.cos(), filter.theta.sin()) * filter.log_decay.exp()
    residue = torch.view_as_complex(filter.residue.contiguous())
    repeats = channels // filter.theta.shape[0]
    return decay.repeat_interleave(repeats, 0), residue.repeat_interleave(repeats, 0)
