"""Softmax attention: causal, in a sliding window, without causality, and over packed documents.

Which code runs:

* Whole rows run PyTorch's scaled_dot_product_attention (SDPA), or kernels of Linnet for narrow heads on a GPU.
* Windows and documents on a GPU run compiled flex attention, which skips the blocks of scores that no query sees.
* Windows and documents elsewhere (CPU, float64, `torch.vmap`) run SDPA on blocks of tokens.

No path builds a [T, T] mask except the reference form.

Of rows that are cut into spans (`linnet.ops.sequence`), a window reads the last `window - 1` keys and values of the
span before (a halo). Without a window, or with one that is longer than a span, every rank takes some of the heads over
the whole row: an all-to-all from spans to heads, the same attention as on one rank, and an all-to-all back. Both are
exact, keep spans contiguous and give every rank equal work.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend, compat_torch, sequence
from linnet.ops.compat_torch import compiler_is_imported, is_plain
from linnet.ops.documents import check_documents, documents
from linnet.ops.registration import Mapped, empty_like, fold, is_mapped, register, unfold

__all__ = ["attend_token", "attend_window", "causal_attention", "full_attention", "span_problems"]

# Largest sequence and head width of Linnet's own kernels; longer and wider ones were not measured.
LONGEST, WIDEST = 1024, 32
_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns o_t = sum_s softmax_s(q_t k_s / sqrt(D)) v_s for each head, over the tokens s that t sees.

    Token t sees s <= t, of its own document if `cu_seqlens` is given, and t - s < window if `window` is not 0.

    Args:
        q: [B, T, H, D].
        k, v: [B, T, G, D]; G divides H, and H / G neighbouring heads share one of k and v.
        window: tokens that each token sees, itself included; 0 for no limit.
        cu_seqlens: int32 [N+1], the start of each document and then T; B must be 1.

    Returns:
        o [B, T, H, D] in the dtype of q. Gradients reach q, k and v.

    Raises:
        ValueError: if the shapes do not match, `window` is negative, or the boundaries do not rise from 0 to T (on a
            GPU only inside `linnet.ops.backend.debug`, because reading them waits for the device).
    """
    _check_shapes("causal_attention", q, k, v)
    if window < 0:
        raise ValueError(f"causal_attention: window: {window} is negative; give tokens, or 0 for no limit")
    if (here := sequence.span()) is not None:
        return attend_span(here, _attend, q, k, v, window, cu_seqlens)
    return _attend(q, k, v, window, cu_seqlens)


def full_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns o_t = sum_s softmax_s(q_t k_s / sqrt(D)) v_s for each head, over all tokens s of the row or document.

    Args:
        q: [B, T, H, D].
        k, v: [B, T, G, D]; G divides H, and H / G neighbouring heads share one of k and v.
        cu_seqlens: int32 [N+1], the start of each document and then T; B must be 1.

    Returns:
        o [B, T, H, D] in the dtype of q. Gradients reach q, k and v.

    Raises:
        ValueError: if the shapes do not match, the boundaries do not rise from 0 to T (on a GPU only inside
            `linnet.ops.backend.debug`), or ranks share the rows (`linnet.ops.sequence`).
    """
    _check_shapes("full_attention", q, k, v)
    if sequence.span() is not None:
        raise ValueError("full_attention: tokens see the whole row, but ranks share it; use parallel.sp: 1")
    check_documents(cu_seqlens, *q.shape[:2])
    if cu_seqlens is not None:
        return _restricted(q, k, v, 0, cu_seqlens, causal=False)
    if q.is_cuda and is_mapped(q, k, v):  # PyTorch's own vmap rule of SDPA fails for some lengths on a GPU
        return Mapped.apply(_full_rule, q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **_grouped(q, k)).transpose(1, 2)


class Cache(NamedTuple):
    """A ring of keys and values and the number of tokens so far, all written in place.

    Attributes:
        keys, values: [B, S, G, D]. places: int64 [B, S], 1 + the position of the token of each slot, 0 for none.
        position: int64 [B].
    """

    keys: Tensor
    values: Tensor
    places: Tensor
    position: Tensor


class Turn(NamedTuple):
    """What is done to queries and keys before the scores.

    Attributes:
        q_gain, k_gain: [D], gains of a root-mean-square norm of each head with `eps`, both or none.
        theta: float32 [F], frequencies that turn the first F pairs (i, i + F) of channels; None for no rotation.
        amplitude: a factor of what was turned.
    """

    q_gain: Tensor | None = None
    k_gain: Tensor | None = None
    eps: float = 1e-6
    theta: Tensor | None = None
    amplitude: float = 1.0


def has_step_kernel(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> bool:
    """Whether `attend_token` takes a token: on a GPU, outside a compiler, without a gradient, alike dtypes."""
    if not backend.use_triton("attention", q.is_cuda, "step_kernel") or torch.compiler.is_compiling():
        return False
    tensors = q, k, v, *cache
    if not is_plain(tensors) or torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return _step_kernel().supports(q, k, v, cache)


def attend_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    turn: Turn,
    gate: Tensor | None = None,
    scale: float = 1.0,
    window: int = 0,
    block: int = 0,
) -> Tensor:
    """Returns softmax attention of one token to itself and to the tokens of a cache, [B, H, D], and advances the cache.

    By kernels alone, where `has_step_kernel` says so.

    Args:
        q: [B, H, D]. k, v: [B, G, D]; G divides H. All as projected, before the norms and the rotation of `turn`.
        gate: [B, H] or [B, H D], whose sigmoid multiplies the result; None for none.
        scale: of q k / sqrt(D).
        window, block: tokens that a token sees, and of its block; 0 for no limit.
    """
    return _step_kernel().attend_token(q, k, v, cache, turn, gate, scale * q.shape[-1] ** -0.5, window, block)


def _step_kernel():
    return importlib.import_module("linnet.ops.attention.step_kernel")


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{op}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; give q [B, T, H, D] and k, v [B, T, G, D]"
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None) -> Tensor:
    """Causal attention of whole rows."""
    check_documents(cu_seqlens, *q.shape[:2])
    window = window if window < q.shape[1] else 0  # a window as long as the row hides nothing
    if window or cu_seqlens is not None:
        return _restricted(q, k, v, window, cu_seqlens)
    if backend.use_triton("attention", q.is_cuda) and _suits_kernels(q, k, v):
        return attend.call(q, k, v)[0]
    if q.is_cuda and is_mapped(q, k, v):  # PyTorch's own vmap rule of SDPA fails for some lengths on a GPU
        return Mapped.apply(_rule, q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **_grouped(q, k)).transpose(1, 2)


def _grouped(q: Tensor, k: Tensor) -> dict[str, bool]:
    return {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # a compiler's symbolic bool is refused


def _restricted(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None, causal: bool = True) -> Tensor:
    """Attention in a window, over documents, or both."""
    if backend.use_reference():
        return attend_dense(q, k, v, window, cu_seqlens, causal)
    if is_mapped(q, k, v):
        return Mapped.apply(functools.partial(_restricted_rule, window, cu_seqlens, causal), q, k, v)
    if backend.use_triton("attention", q.is_cuda, "flex") and q.is_cuda and _suits_flex(q, k, v):
        from linnet.ops.attention.flex import attend_flex  # a compiler traces an import statement, not import_module

        return attend_flex(q, k, v, window, cu_seqlens, causal)
    if cu_seqlens is not None:
        return attend_documents(q, k, v, window, cu_seqlens, causal)
    return attend_window(q, k, v, window)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None, causal: bool) -> Tensor:
    """The definition, by a mask [T, T]."""
    index = torch.arange(q.shape[1], device=q.device)
    distance = index[:, None] - index
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        mask = mask & (distance < window)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)
        mask = mask & (document[:, None] == document)
    return _sdpa(q, k, v, mask)


def _suits_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if backend.is_wide("causal_attention", q, k, v):
        return False
    alike = q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype
    return alike and q.dtype in _GPU_DTYPES and q.shape[1] <= LONGEST and q.shape[3] <= WIDEST and 0 not in q.shape


def _suits_flex(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if 0 in q.shape:
        return False
    known = q.dtype in _GPU_DTYPES and q.dtype == k.dtype == v.dtype
    if not known:
        names = ", ".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in (q, k, v)))
        backend.warn_slow("attention in windows and documents", names, "give q, k and v in bfloat16 or float32")
    # Transforms that `is_mapped` leaves aside, torch.func.grad for one, have no rule for a compiled call.
    return known and not compat_torch.in_transform()


def _rule(size, dims, *tensors):
    return unfold(causal_attention(*(fold(x, dim, size, 0) for x, dim in zip(tensors, dims, strict=True))), size, 0), 0


def _full_rule(size, dims, *tensors):
    return unfold(full_attention(*(fold(x, dim, size, 0) for x, dim in zip(tensors, dims, strict=True))), size, 0), 0


def _restricted_rule(window, cu_seqlens, causal, size, dims, *tensors):
    """Models fold into the batch: one row per model, all with the same documents."""
    q, k, v = (fold(x, dim, size, 0) for x, dim in zip(tensors, dims, strict=True))
    if cu_seqlens is None:
        return unfold(causal_attention(q, k, v, window), size, 0), 0
    return unfold(attend_documents(q, k, v, window, cu_seqlens, causal), size, 0), 0


def _shapes(q, k, v):
    return empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def _forward(q, k, v):
    return importlib.import_module("linnet.ops.attention.triton").attend_forward(q, k, v)


def _backward(q, k, v, o, lse, do):
    return importlib.import_module("linnet.ops.attention.triton").attend_backward(q, k, v, o, lse, do)


# FLOPs: 2 per multiply-add, of the pairs of tokens whether seen or not, as PyTorch counts its own.


def _flops(q_shape, *_, **__) -> int:
    """4 D per pair and head."""
    B, T, H, D = q_shape
    return 4 * B * H * T * T * D


def _backward_flops(q_shape, *_, **__) -> int:
    """10 D per pair and head: five products."""
    B, T, H, D = q_shape
    return 10 * B * H * T * T * D


# The second output is the logarithm of each query's sum of scores, for the backward.
attend = register(
    "attend",
    "Tensor q, Tensor k, Tensor v",
    _forward,
    _backward,
    outputs=2,
    learned=range(3),
    kept=(0, 1),
    auxiliary=1,
    shapes=_shapes,
    axes=lambda arguments, in_dims: ((0, 0, 0), (0, 0)),
    flops=_flops,
    backward_flops=_backward_flops,
)


def attend_span(
    here: sequence.Span,
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Returns what `causal_attention` returns for the tokens of this rank's span.

    Args:
        here: the place of the span. attend: causal attention of whole rows.
        q: [B, L, H, D]. k, v: [B, L, G, D]. All of this rank's span of L tokens.
        cu_seqlens: the documents of this span of one row, int32 [N+1], B = 1.

    Raises:
        ValueError: neither the window nor the number of heads allows a cut.
    """
    if window and window - 1 <= q.shape[1]:
        return _beside(here, attend, q, k, v, window, cu_seqlens)
    return _by_heads(here, attend, q, k, v, window, cu_seqlens)


def span_problems(heads: int, groups: int, window: int, span: int, ranks: int, tp: int = 1) -> list[str]:
    """Returns why attention cannot be cut into spans: a list with one problem, or an empty one.

    Args:
        heads: of the queries. groups: heads of keys and values.
        span: tokens of a span. ranks: number of spans. tp: ranks that share the heads of a span.
    """
    if window and window - 1 <= span:
        return []
    own_heads, own_groups = heads // tp, groups // tp
    if own_groups and own_heads % (own_groups * _repeats(own_groups, ranks)) == 0:
        return []
    of_keys = "" if heads == groups else f" ({groups} of keys and values)"
    count = f"{heads}{of_keys}" + (f" over parallel.tp: {tp}" if tp > 1 else "")
    if not window:
        return [f"num_heads: {count} cannot be shared by the {ranks} ranks of a row; use a divisor for sp"]
    return [
        f"window: {window} reads {window - 1} tokens back, but a span has {span}, and {ranks} ranks of a row cannot "
        f"share num_heads: {count} instead; lower sp or window"
    ]


def _repeats(groups: int, ranks: int) -> int:
    """Returns how many copies of each head of keys make their number a multiple of the ranks."""
    return ranks // math.gcd(groups, ranks)


def _by_heads(
    here: sequence.Span, attend: Callable, q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None
) -> Tensor:
    if problems := span_problems(q.shape[2], k.shape[2], window, q.shape[1], here.size):
        raise ValueError(f"causal_attention: {problems[0]}")
    documents = sequence.whole_documents(cu_seqlens, q.shape[1])
    if (copies := _repeats(k.shape[2], here.size)) > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    q, k, v = (sequence.all_to_all(x, 1, 2) for x in (q, k, v))  # [B, T, H / ranks, D]
    return sequence.all_to_all(attend(q, k, v, window, documents), 2, 1)


def _beside(
    here: sequence.Span, attend: Callable, q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None
) -> Tensor:
    if window == 1:
        return attend(q, k, v, 1, None)
    length, before = q.shape[1], window - 1
    halo = sequence.halo(torch.cat([x.narrow(1, length - before, before) for x in (k, v)], -1), before, 1)
    k, v = (torch.cat([past, x], 1) for past, x in zip(halo.chunk(2, -1), (k, v), strict=True))
    documents = sequence.whole_documents(cu_seqlens, length)
    if documents is not None:
        first = here.rank * length - (before if here.rank else 0)
        documents = (documents - first).clamp(0, (here.rank + 1) * length - first)
    if here.rank == 0:  # nothing is before the row; the halo stays in the graph, since its backward is a collective
        return attend(q, k[:, before:], v[:, before:], window, documents)
    return attend(F.pad(q, (0, 0, 0, 0, before, 0)), k, v, window, documents)[:, before:]


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
