"""Windows and documents by SDPA on blocks of tokens: any device, any dtype, any length, no [T, T] mask."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops.compat_torch import compiler_is_imported
from linnet.ops.documents import documents

# Queries per block. A block of b queries reads b + window keys, so a small b computes fewer scores that the mask drops,
# and a large b has larger matrix products. Forward and backward of window 512 at T = 8,192, 16 heads of 128, float32,
# one CPU thread, in seconds: 192 3.96, 256 3.60, 320 4.23 (causal SDPA over the whole row 13.8).
_LEAST, _MOST = 64, 1024


def attend_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Returns causal attention [B, T, H, D] in which each token sees the last `window` tokens, itself included.

    Each block of queries attends to the keys of its own block and of the window before it.

    Args:
        q: [B, T, H, D].
        k, v: [B, T, G, D]; G divides H.
        window: at least 1; 0 or T and more is full causal attention.
    """
    length = q.shape[1]
    if not 0 < window < length:
        return _sdpa(q, k, v)
    block = min(_MOST, max(_LEAST, 1 << (window // 2).bit_length() >> 1))
    before = -(-(window - 1) // block)  # blocks before its own that a block of queries reads
    reach = before * block
    count = max(0, length - reach) // block
    if not count:
        return _sdpa(q, k, v, _band(length, length, window, q.device))
    parts = []
    if reach:
        mask = None if reach <= window else _band(reach, reach, window, q.device)
        parts.append(_sdpa(q[:, :reach], k[:, :reach], v[:, :reach], mask))
    end = reach + count * block
    queries = q[:, reach:end].unflatten(1, (count, block)).flatten(0, 1)
    keys, values = (_overlapping(x[:, :end], block, before, count) for x in (k, v))
    o = _sdpa(queries, keys, values, _band(block, reach + block, window, q.device))
    parts.append(o.unflatten(0, (q.shape[0], count)).flatten(1, 2))
    if end < length:
        mask = _band(length - end, length - end + reach, window, q.device)
        parts.append(_sdpa(q[:, end:], k[:, end - reach :], v[:, end - reach :], mask))
    return torch.cat(parts, 1)


def attend_documents(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor, causal: bool = True) -> Tensor:
    """Returns attention in which each token sees its own document only: all of it, or its last `window` tokens.

    Neighbouring documents of equal length share one call, so the rows of a batch without boundaries take one call.

    Args:
        q, k, v, window: as in `attend_window`; all rows of the batch have the same documents.
        cu_seqlens: int32 [N+1].
        causal: False lets each token see its whole document, without a window.

    Raises:
        ValueError: if the boundaries do not rise from 0 to T.
    """
    # It reads the boundaries on the host, so a compiled model breaks its graph here.
    # `disable` imports the compiler, a second of processor time, so it waits for a process that compiles.
    if not compiler_is_imported():
        return _attend_documents(q, k, v, window, cu_seqlens, causal)
    if not _OUTSIDE_GRAPHS:
        _OUTSIDE_GRAPHS.append(torch.compiler.disable(_attend_documents))
    return _OUTSIDE_GRAPHS[0](q, k, v, window, cu_seqlens, causal)


_OUTSIDE_GRAPHS: list = []


def _attend_documents(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor, causal: bool) -> Tensor:
    runs: list[tuple[int, int]] = []  # (documents, their length)
    for _, start, end in documents(cu_seqlens, 1, q.shape[1]):
        if end == start:
            continue
        if runs and runs[-1][1] == end - start:
            runs[-1] = (runs[-1][0] + 1, end - start)
        else:
            runs.append((1, end - start))
    sizes = [count * length for count, length in runs]
    outputs = []
    # `split` has one backward for all parts; a slice each would add up N gradients of the whole row.
    for (count, length), *tensors in zip(runs, *(x.split(sizes, 1) for x in (q, k, v)), strict=True):
        parts = [x.unflatten(1, (count, length)).flatten(0, 1) for x in tensors]
        o = attend_window(*parts, window) if causal else _sdpa(*parts, causal=False)
        outputs.append(o.unflatten(0, (q.shape[0], count)).flatten(1, 2))
    return torch.cat(outputs, 1)


def _overlapping(x: Tensor, block: int, before: int, count: int) -> Tensor:
    """Copies x [B, (before + count) * block, G, D] to [B * count, (before + 1) * block, G, D]: each with those before.

    A view by unfold would save the copy, but its backward is slow, and SDPA would copy it for more than one row.
    """
    blocks = x.unflatten(1, (before + count, block))
    return torch.stack([blocks[:, i : i + count] for i in range(before + 1)], 2).flatten(2, 3).flatten(0, 1)


def _band(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """The mask [queries, keys] of the last `queries` of `keys` tokens."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = True) -> Tensor:
    """SDPA on [B, T, H, D]; by default causal without a mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return o.transpose(1, 2)
