"""Softmax attention: causal, in a sliding window, without causality, and over packed documents.

Which code runs:

* Whole rows run PyTorch's scaled_dot_product_attention (SDPA), or kernels of Linnet for narrow heads on a GPU.
* Windows and documents on a GPU run compiled flex attention, which skips the blocks of scores that no query sees.
* Windows and documents elsewhere (CPU, float64, `torch.vmap`) run SDPA on blocks (`linnet.ops.attention.blocks`).

No path builds a [T, T] mask except the reference form. Rows that are cut into spans: `linnet.ops.attention.spans`.
"""

import functools
import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend, compat_torch, sequence
from linnet.ops.attention.blocks import attend_documents, attend_window
from linnet.ops.attention.spans import attend_span, span_problems
from linnet.ops.documents import check_documents
from linnet.ops.registration import empty_like, register
from linnet.ops.vmap_rules import Mapped, fold, is_mapped, unfold

__all__ = ["attend_window", "causal_attention", "full_attention", "span_problems"]

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
    if is_mapped(q, k, v) and backend.use_triton("attention", q.is_cuda):
        return Mapped.apply(_full_rule, q, k, v)  # PyTorch's own vmap rule of SDPA fails for some lengths on a GPU
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **_grouped(q, k)).transpose(1, 2)


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
    if backend.use_triton("attention", q.is_cuda):
        if _suits_kernels(q, k, v):
            return attend.call(q, k, v)[0]
        if is_mapped(q, k, v):  # PyTorch's own vmap rule of SDPA fails for some lengths on a GPU
            return Mapped.apply(_rule, q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **_grouped(q, k)).transpose(1, 2)


def _grouped(q: Tensor, k: Tensor) -> dict[str, bool]:
    return {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # a compiler's symbolic bool is refused


def _restricted(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | None, causal: bool = True) -> Tensor:
    """Attention in a window, over documents, or both."""
    if backend.use_reference():
        reference = importlib.import_module("linnet.ops.attention.reference")
        return reference.attend_dense(q, k, v, window, cu_seqlens, causal)
    if is_mapped(q, k, v):
        return Mapped.apply(functools.partial(_restricted_rule, window, cu_seqlens, causal), q, k, v)
    if backend.use_triton("attention", q.is_cuda, "flex") and q.is_cuda and _suits_flex(q, k, v):
        from linnet.ops.attention.flex import attend_flex  # a compiler traces an import statement, not import_module

        return attend_flex(q, k, v, window, cu_seqlens, causal)
    if cu_seqlens is not None:
        return attend_documents(q, k, v, window, cu_seqlens, causal)
    return attend_window(q, k, v, window)


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
    like=0,
    axes=lambda arguments, in_dims: ((0, 0, 0), (0, 0)),
    flops=_flops,
    backward_flops=_backward_flops,
)
