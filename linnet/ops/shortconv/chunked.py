"""The short convolution on any device: the sequence shifted once a tap, with a hand-written backward."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops.chunks import state_dtype


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None, silu: bool) -> Tensor:
    """y [R, T, D]; arguments as in the registered op."""
    z, _, _ = _before_activation(x, weight, bias, offset)
    return (F.silu(z) if silu else z).to(x.dtype).contiguous()


def backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None, silu: bool, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients to x, weight, bias and offset (or None)."""
    z, line, taps = _before_activation(x, weight, bias, offset)
    length, width = x.shape[1], weight.shape[2]
    dz = dy.to(z.dtype)
    if silu:
        gate = z.sigmoid()
        dz = dz * (gate * (1 + z * (1 - gate)))
    dline = torch.zeros_like(line)
    dweight = weight.new_empty(weight.shape, dtype=z.dtype)
    of_model = (weight.shape[0], -1)
    for j in range(width):
        dline[:, j : j + length].addcmul_(dz, taps[:, None, :, j])
        dweight[..., j] = (dz * line[:, j : j + length]).sum(1).unflatten(0, of_model).sum(1)
    dx = dline[:, width - 1 :]
    sums = (
        None if y is None else z.sum(1).unflatten(0, of_model).sum(1).to(weight.dtype).to(y.dtype)
        for y, z in ((bias, dz), (offset, dx))
    )
    return dx.to(x.dtype).contiguous(), dweight.to(weight.dtype), *sums


def _before_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, x and its offset with the zeros before them, and the taps of each row [R, D, W]."""
    dtype, each = state_dtype(x, weight), x.shape[0] // weight.shape[0]
    taps, line = weight.to(dtype).repeat_interleave(each, 0), x.to(dtype)
    if offset is not None:
        line = line + offset.to(dtype).repeat_interleave(each, 0)[:, None]
    line = F.pad(line, (0, 0, weight.shape[2] - 1, 0))
    z = torch.zeros_like(x, dtype=dtype)
    if bias is not None:
        z += bias.to(dtype).repeat_interleave(each, 0)[:, None]
    for j in range(weight.shape[2]):
        z.addcmul_(line[:, j : j + x.shape[1]], taps[:, None, :, j])
    return z, line, taps


def convolve_documents(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor
) -> Tensor:
    """Returns the convolution of x [1, T, D] before the activation; `state` [N, W - 1, D] precedes the documents."""
    before, index = weight.shape[1] - 1, torch.arange(x.shape[1], device=x.device)
    document, position = _places(index, cu_seqlens)
    weight = weight.to(state_dtype(x, weight))  # products and sums get its dtype
    newest = weight[:, -1]
    y = x * newest if bias is None else torch.addcmul(bias.to(weight.dtype), x, newest)
    for lag in range(1, weight.shape[1]):
        inside = (position >= lag)[:, None]
        seen = x[:, (index - lag).clamp(min=0)]
        past = 0.0
        if state is not None:
            past = state.to(x.dtype)[document, (before + position - lag).clamp(max=before - 1)]
        y = torch.addcmul(y, torch.where(inside, seen, past), weight[:, before - lag])
    return y


def last_inputs(x: Tensor, state: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the states after the documents of x [1, T, D]: their last inputs, after the end of a state before a short
    document."""
    before, start, end = state.shape[1], cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    place = end - before + torch.arange(before, device=x.device)
    kept = (place - start + before).clamp(0, before - 1)
    old = state.gather(1, kept[..., None].expand(-1, -1, x.shape[2]))
    new = x[0, place.clamp(min=0)].to(state.dtype)
    return torch.where((place >= start)[..., None], new, old)


def _places(index: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the document of each token, and its place in the document."""
    document = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)
    return document, index - cu_seqlens.to(index.dtype)[document]
