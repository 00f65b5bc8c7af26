"""Dropout whose masks are a pure function of (seed, step, layer, global row, position, channel).

Ordinary dropout draws from a generator, so its masks depend on earlier draws: they change with gradient accumulation,
after a resume and in an ensemble. Here a counter-based generator hashes the coordinates of an element. The same element
gets the same decision for every split of the batch, with or without recomputed activations, after a resume, under
`torch.vmap` and under `torch.compile`.

A training loop sets the step and the first row that it computes:

    with dropout.position(model, step=step, first_row=0):
        total, count = model.loss(tokens, targets)  # the backward pass may come after

Outside such a context, seed and step are drawn from torch's default generator, so masks differ between calls.

The hash works on 32-bit words in int64 tensors. Its multipliers are below 2^31, so no product overflows:
`x ^= x >> 16; x *= 0x21f0aaad; x ^= x >> 15; x *= 0x735a2d97; x ^= x >> 15` (C. Wellons, hash-prospector). Two words
per token absorb seed, step, row, position and layer; an element mixes both with its channel, so two tokens share a
mask with a probability of 2^-64. One 32-bit result decides for two channels, 16 bits each.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from linnet.ops import sequence

_WORD = 0xFFFFFFFF
_LEVELS = 1 << 16  # a probability is rounded to a multiple of 1 / _LEVELS


class DropoutPosition(nn.Module):
    """Selects the masks of the next forward pass: seed, step and number of the first row, on the model's device.

    These are a tensor rather than numbers, so that a compiled model and a CUDA graph read the current values.

    Attributes:
        value: int64 [4]: seed, step, first row, tokens per row (0: the length of the batch's rows).
        given: True if a training loop sets the value; otherwise each pass draws its own seed and step.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("value", torch.zeros(4, dtype=torch.int64), persistent=False)
        self.given = False

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns the keys of the tokens of x [B, T, D]: two 32-bit words per token, int64 [B, T, 2].

        Of a span of longer rows, they are the keys that its tokens have in the rows.

        Args:
            cu_seqlens: int32 [N+1] with B = 1 if each packed document is a row of its own, as sentences are; it has no
                effect where `value` has the tokens of a row.
        """
        seed, step, first, length = self.value.unbind()
        if not self.given:
            seed, step = torch.randint(1 << 62, (2,), device=x.device).unbind()
        batch, span = x.shape[:2]
        whole = span * sequence.spans()  # tokens of a row of the batch, of which x has `span`
        place = torch.arange(batch * whole, device=x.device).view(batch, whole)
        if whole > span:
            place = place.narrow(1, sequence.first_position(span), span)
        in_rows = length > 0
        length = torch.where(in_rows, length, whole)
        row, column = place // length, place % length
        if cu_seqlens is not None:
            document, start = _documents(cu_seqlens, span)
            row, column = torch.where(in_rows, row, document), torch.where(in_rows, column, place - start)
        words = _absorb(seed.new_zeros(2), seed & _WORD, seed >> 32, step & _WORD, step >> 32)
        return _absorb(words, first + row, column)


class Dropout(nn.Module):
    """Zeroes elements with probability p and divides the others by 1 - p.

    Args:
        p: probability, rounded to a multiple of 2^-16.
        site: index of this dropout in the model; each has its own masks.
    """

    def __init__(self, p: float, site: int):
        super().__init__()
        self.p, self.site = p, site

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}"

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """x [B, T, D] with keys [B, T, 2] from `DropoutPosition`."""
        kept, threshold = self.kept(keys, x.shape[-1])
        return torch.where(kept, x * (_LEVELS / (_LEVELS - threshold)), 0.0)

    @torch.no_grad()
    def kept(self, keys: Tensor, channels: int) -> tuple[Tensor, int]:
        """Returns which elements stay, bool [B, T, channels], and how many of the 2^16 levels are dropped."""
        threshold = min(round(self.p * _LEVELS), _LEVELS - 1)
        half = (channels + 1) // 2
        first, second = _absorb(keys, torch.full((), self.site, device=keys.device))[..., None, :].unbind(-1)
        channel = _mix(torch.arange(1, half + 1, device=keys.device))
        bits = _mix(_mix(first ^ channel) ^ second)
        return torch.cat([bits & (_LEVELS - 1), bits >> 16], -1)[..., :channels] >= threshold, threshold


class DropPath(Dropout):
    """Drops the whole output of a layer for some rows of a batch (stochastic depth, Huang et al. 2016).

    A row is dropped with probability p, and the others are divided by 1 - p. Rows are documents where they are packed.
    """

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """x [..., D] with keys [..., 2] from `row_keys`."""
        kept, threshold = self.kept(keys, 1)
        return torch.where(kept, x * (_LEVELS / (_LEVELS - threshold)), 0.0)


def row_keys(keys: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns for each token the key of the first token of its row, or packed document: [B, T, 2] -> [B, T, 2]."""
    if cu_seqlens is None:
        return keys[:, :1].expand_as(keys)
    return keys[:, _documents(cu_seqlens, keys.shape[1])[1]]


def _documents(cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns the document of each of `length` tokens, and the document's first token: int64 [T] each."""
    index = torch.arange(length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)
    return document, cu_seqlens.to(index.dtype)[document]


@contextmanager
def position(
    model: nn.Module, *, step: int, first_row: int = 0, row_length: int = 0, seed: int | None = None
) -> Iterator[None]:
    """Fixes the masks of dropout and drop path of the forward passes inside; nothing for a model without both.

    Args:
        model: a model with a `backbone`. A model from `build_model` also carries its seed.
        step: optimizer step of the training.
        first_row: number of the batch's first row among all rows of this step.
        row_length: tokens per row if the batch packs several rows into one; 0 if each row of the batch is one row.
        seed: seed of the masks; None keeps the seed that the model was built with.
    """
    place = place_of(model)
    if place is None:
        yield
        return
    if seed is not None:
        place.value[0] = seed
    for index, number in enumerate((step, first_row, row_length), start=1):
        place.value[index] = number
    before, place.given = place.given, True
    try:
        yield
    finally:
        place.given = before


def place_of(model: nn.Module) -> DropoutPosition | None:
    """Returns the `DropoutPosition` of a model, None for a model without dropout."""
    return getattr(getattr(model, "backbone", None), "dropout_position", None)


def _absorb(words: Tensor, *numbers: Tensor) -> Tensor:
    """Mixes 32-bit numbers into words [..., 2], differently into each of the two words."""
    for number in numbers:
        other = (number * 0x5851F42D + 0x14057B7E) & _WORD
        words = _mix(words ^ torch.stack([number & _WORD, other], -1))
    return words


def _mix(x: Tensor) -> Tensor:
    """Applies a bijection of 32-bit words, which are stored in int64."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)
