"""The short convolution over packed documents: no token sees a token of another document."""

import torch
from torch import Tensor


def convolve_documents(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor
) -> Tensor:
    """Returns the convolution of x [1, T, D] before the activation; `state` [N, W - 1, D] precedes the documents."""
    before, index = weight.shape[1] - 1, torch.arange(x.shape[1], device=x.device)
    document, position = _places(index, cu_seqlens)
    newest = weight[:, -1]
    y = x * newest if bias is None else torch.addcmul(bias, x, newest)
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
