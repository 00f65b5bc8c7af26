"""Windows and documents on a GPU by PyTorch's flex attention, compiled once per shape.

The block mask is computed from the first and the last key that each query sees, which rise along the row, so that the
blocks that a block of queries reads are neighbours. Nothing is read on the host and no mask of T x T is evaluated.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

BLOCK = 128  # tokens of a block of the mask; rows are padded to a multiple, which also limits how many shapes compile
NARROWEST = 16  # flex attention has no kernels for narrower heads
WIDE = range(129, 256)  # padded to 256 in float32: torch 2.11 has no blocks for 192 that fit a GPU's shared memory


def attend_flex(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None, causal: bool = True) -> Tensor:
    """Returns what `causal_attention`, or `full_attention`, returns, for q, k and v of one dtype on a GPU."""
    length, width = q.shape[1], q.shape[3]
    least = WIDE.stop if q.dtype == torch.float32 and width in WIDE else NARROWEST
    padding = (0, max(0, least - width), 0, 0, 0, -length % BLOCK)
    if any(padding):
        q, k, v = (F.pad(x, padding) for x in (q, k, v))
    mask = _mask(q.shape[1], window, cu_seqlens, q.device, causal)
    call = flex_attention if torch.compiler.is_compiling() else _compiled(q.shape, k.shape, q.dtype, q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = call(q, k, v, block_mask=mask, scale=width**-0.5, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)[:, :length, :, :width]


def _mask(length: int, window: int, cu_seqlens: Tensor | None, device: torch.device, causal: bool = True) -> BlockMask:
    """Returns the mask of a call. It takes some seventy small kernels, so it is kept for the layers that follow."""
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return _make_mask(length, window, cu_seqlens, device, causal)  # what a CUDA graph makes stays in it
    if cu_seqlens is None:
        return _window_mask(length, window, device)
    version, masks = _masks.get(cu_seqlens, (None, {}))
    if version != cu_seqlens._version:
        version, masks = _masks[cu_seqlens] = (cu_seqlens._version, {})
    if (length, window, causal) not in masks:
        with torch.inference_mode(False):
            masks[length, window, causal] = _make_mask(length, window, cu_seqlens, device, causal)
    return masks[length, window, causal]


def _make_mask(
    length: int, window: int, cu_seqlens: Tensor | None, device: torch.device, causal: bool = True
) -> BlockMask:
    first = first_visible(length, window, cu_seqlens, device)
    return block_mask(first) if causal else document_mask(first, last_visible(length, cu_seqlens, device))


_masks = WeakTensorKeyDictionary()  # boundaries -> (their version, {settings of a call: mask}), as long as they live


@functools.lru_cache(16)
def _window_mask(length: int, window: int, device: torch.device) -> BlockMask:
    with torch.inference_mode(False):
        return _make_mask(length, window, None, device)


def first_visible(length: int, window: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Returns int32 [length]: the first token that each token sees; those behind the last document are their own."""
    index = torch.arange(length, device=device)
    first = (index - (window - 1)).clamp(min=0) if window else torch.zeros_like(index)
    if cu_seqlens is not None:
        starts = cu_seqlens.to(index.dtype)
        first = torch.maximum(first, starts[torch.searchsorted(starts, index, right=True) - 1])
    return first.to(torch.int32)


def block_mask(first: Tensor) -> BlockMask:
    """Returns the mask in which query t sees the keys first[t] ... t.

    Args:
        first: int32 [T], rising, first[t] <= t; T is a multiple of `BLOCK`.
    """
    count = first.shape[0] // BLOCK
    block = torch.arange(count, device=first.device, dtype=torch.int32)
    rows = first.view(count, BLOCK)
    start = rows[:, 0] // BLOCK  # the first block that some query of the block sees
    clear = torch.minimum((rows[:, -1] + (BLOCK - 1)) // BLOCK, block)  # the first that all of them see whole
    place = block[None, :]
    # Partly visible blocks are start ... clear - 1 and the diagonal; whole blocks are clear ... diagonal - 1.
    partial = torch.where(place < (clear - start)[:, None], start[:, None] + place, block[:, None])
    whole = (clear[:, None] + place).clamp(max=count - 1)

    def visible(batch, head, query, key):
        return (key <= query) & (key >= first[query])

    return BlockMask.from_kv_blocks(
        (clear - start + 1)[None, None],
        partial[None, None],
        (block - clear)[None, None],
        whole[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
    )


def last_visible(length: int, cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """Returns int32 [length]: the last token of each token's document, or of the tokens behind the last document."""
    index = torch.arange(length, device=device)
    starts = cu_seqlens.to(index.dtype)
    ends = F.pad(starts[1:] - 1, (0, 1), value=length - 1)
    return ends[torch.searchsorted(starts, index, right=True) - 1].to(torch.int32)


def document_mask(first: Tensor, last: Tensor) -> BlockMask:
    """Returns the mask in which query t sees the keys first[t] ... last[t].

    Args:
        first, last: int32 [T], rising, first[t] <= t <= last[t]; T is a multiple of `BLOCK`.
    """
    count = first.shape[0] // BLOCK
    first_rows, last_rows = first.view(count, BLOCK), last.view(count, BLOCK)
    start, end = first_rows[:, 0] // BLOCK, last_rows[:, -1] // BLOCK  # blocks that some query of a block sees
    clear = (first_rows[:, -1] + (BLOCK - 1)) // BLOCK  # the first block that all of them see whole
    whole = ((last_rows[:, 0] + 1) // BLOCK - clear).clamp(min=0)  # and the number of such blocks
    place = torch.arange(count, device=first.device, dtype=torch.int32)[None, :]
    partial = start[:, None] + place
    partial = partial + torch.where((whole > 0)[:, None] & (partial >= clear[:, None]), whole[:, None], 0)

    def visible(batch, head, query, key):
        return (key <= last[query]) & (key >= first[query])

    return BlockMask.from_kv_blocks(
        (end - start + 1 - whole)[None, None],
        partial.clamp(max=count - 1)[None, None],
        whole[None, None],
        (clear[:, None] + place).clamp(max=count - 1)[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
    )


@functools.lru_cache(64)
def _compiled(q: torch.Size, k: torch.Size, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Flex attention with a code object of its own, so that no shape counts towards another's recompilation limit."""

    def own(*tensors: Tensor, **options) -> Tensor:
        return flex_attention(*tensors, **options)

    own.__code__ = own.__code__.replace()
    return torch.compile(own, dynamic=False, fullgraph=True)
