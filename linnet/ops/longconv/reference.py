"""The long convolution, the definition: token by token, differentiated by autograd."""

import torch
from torch import Tensor

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import documents, walk_tokens
from linnet.ops.longconv.chunked import ModalFilter


def modal_reference(
    x: Tensor, filter: ModalFilter, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """u_t = lambda u_{t-1} + x_t, y_t = sum_n Re(R_n u_t) + skip x_t. Shapes as in `long_convolution`."""
    dtype = state_dtype(x, filter.theta)
    batch, length, channels = x.shape
    decay, residue = _of_channels(filter.to(dtype), channels)
    values = x.to(dtype)
    if initial_state is not None:
        initial_state = torch.view_as_complex(initial_state.contiguous())

    def step(t: int, u: Tensor) -> tuple[Tensor, Tensor]:
        u = decay * u + values[:, t, :, None]
        return u, (residue * u).sum(-1).real

    y, final = walk_tokens(step, initial_state, torch.zeros_like(decay), cu_seqlens, batch, length)
    if filter.skip is not None:
        y = y + filter.skip.to(dtype).repeat_interleave(channels // filter.skip.shape[0]) * values
    return y.to(x.dtype), torch.view_as_real(final)


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
