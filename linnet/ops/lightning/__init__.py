"""Lightning Attention: linear attention with one constant decay per head, or none (papers 001 and 000).

A step for decoding may write its state only every N tokens: a pair (k, v) has K + V numbers where the state has K V.
With pending tokens (`linnet.ops.stepping`) every step reads the state and the pending pairs, and one in N adds the
pairs to the state and writes it. The result is the same; sums are taken in another order.

`linear_attention`, in which every token sees all others, is two products, without decay and denominator.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend, sequence
from linnet.ops.arguments import check_decay_values, check_devices, check_matrix_state
from linnet.ops.chunks import count_pairs, exact, state_dtype
from linnet.ops.lightning import chunked
from linnet.ops.lightning.reference import lightning_reference
from linnet.ops.registration import empty_state, register_matrix_state, register_plain, register_step
from linnet.ops.scans import both_ways
from linnet.ops.spans import cut_linear, run_form
from linnet.ops.stepping import append, check_activation, check_pending, check_step, fits_kernel, use_kernel

__all__ = ["lightning_attention", "lightning_pending_step", "lightning_step"]


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(log_decay) S_{t-1} + k_t^T v_t, o_t = scale q_t S_t for each head (paper 001, eq. 17).

    Time and memory are linear in T. States and sums are float32. Operands of products are float32 on a CPU (float64 for
    float64 inputs); on a GPU bfloat16 inputs are multiplied as bfloat16, float32 ones in three TF32 passes, and float16
    ones are refused, since a state can exceed the range of float16.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        log_decay: [H], at most 0, a constant (001: a learned one is unstable); None for no decay.
        scale: multiplies o. The paper has none; a norm follows.
        initial_state: [N, H, K, V], float32 (float64 for float64 inputs), the state after the token before the first;
            None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [N, H, K, V] or None. Both, and the initial state, have
        gradients.

    Raises:
        ValueError: shapes or dtypes that do not go together, a log_decay that requires a gradient, float16 on a GPU,
            offsets that do not rise from 0 to T.
    """
    check_matrix_state("lightning_attention", q, k, v, initial_state, cu_seqlens)
    if log_decay is not None and (log_decay.shape != q.shape[2:3] or log_decay.requires_grad):
        raise ValueError(
            f"lightning_attention: log_decay has shape {list(log_decay.shape)} and "
            f"requires_grad={log_decay.requires_grad}; give a constant [{q.shape[2]}], one per head"
        )
    check_devices("lightning_attention", q=q, log_decay=log_decay)
    check_decay_values("lightning_attention", log_decay)
    arguments = (q, k, v, log_decay, initial_state, cu_seqlens, float(scale))
    return run_form(lightning, lightning_span, lightning_reference, arguments, output_final_state)


def _flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """2 C (K + V) + 4 K V per token and head: scores, scores with v, the state's update and use."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * H * (count_pairs(T, chunked.CHUNK) * 2 * (K + V) + 4 * T * K * V)


def _backward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """2 C (3 K + 2 V) + 10 K V per token and head: two scores, three products with them, five with states."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * H * (count_pairs(T, chunked.CHUNK) * 2 * (3 * K + 2 * V) + 10 * T * K * V)


# FLOPs: 2 per multiply-add, in chunks of 64 whatever form runs, matrix products only; the masked half of a chunk's
# scores is computed, and so counted. Decays that differ by model fold into the heads.
lightning = register_matrix_state(
    "lightning",
    *backend.forms("lightning", chunked, "lightning_forward", "lightning_backward"),
    by_heads=lambda arguments, in_dims: in_dims[3] is not None,
    learns_gate=False,
    gate_axes=(None, 0),
    flops=_flops,
    backward_flops=_backward_flops,
)


def _decay(rows: int, q, k, v, log_decay, *_) -> Tensor | None:
    """[1, H, 1, 1]: the decay over a span."""
    if log_decay is None:
        return None
    return (log_decay.to(state_dtype(q, k, v)) * (q.shape[1] // max(1, rows))).exp()[None, :, None, None]


# The summary of a span for other ranks, without running the op: with c = v the state [B, H, K, V] after it, from zero;
# `reverse` and c = do: the gradient of the state before it.
_summary = register_plain(
    "summary_lightning",
    "Tensor q, Tensor k, Tensor? log_decay, Tensor c, float scale, bool reverse",
    1,
    *backend.forms("lightning", chunked, "lightning_summary"),
    lambda q, k, log_decay, c, scale, reverse: empty_state(q, k, c, None),
)


def _summarise(q, k, v, log_decay, initial, cu_seqlens, scale: float, *_) -> tuple[Tensor, Tensor | None]:
    return _summary(q, k, log_decay, v, scale, False), _decay(0, q, k, v, log_decay)


def _summarise_backward(q, k, v, log_decay, initial, cu_seqlens, scale: float, do: Tensor) -> Tensor:
    return _summary(q, k, log_decay, do, scale, True)


lightning_span = cut_linear(lightning, 4, 5, _decay, summary=_summarise, summary_backward=_summarise_backward)


def lightning_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float = 1.0,
    activation: Literal["none", "silu"] = "none",
) -> Tensor:
    """One step of paper 001, eq. 17: S <- lambda S + k^T v, o = scale q S.

    Args:
        q, k: [B, H, K].
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state after the previous token; updated in place.
        log_decay: [H], at most 0; None for no decay.
        activation: none or silu, on q and k before anything else; in the same launch on a GPU.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together, an unknown activation.
    """
    _check("lightning_step", q, k, v, state, log_decay, activation)
    if use_kernel("lightning", state, q, k, v, log_decay):
        return _step(q, k, v, state, log_decay, float(scale), activation)
    if activation == "silu":
        q, k = F.silu(q), F.silu(k)
    with exact(q):
        if log_decay is not None:
            state.mul_(log_decay.to(state.dtype).exp()[:, None, None])
        state.addcmul_(k.to(state.dtype)[..., None], v.to(state.dtype)[..., None, :])
        return (scale * (q.to(state.dtype)[..., None, :] @ state).squeeze(-2)).to(v.dtype)


def lightning_pending_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    keys: Tensor,
    values: Tensor,
    pending: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float = 1.0,
    activation: Literal["none", "silu"] = "none",
) -> Tensor:
    """One token behind n pending ones: o = scale q (lambda^(n+1) S + sum_j lambda^(n-j) k_j^T v_j + k^T v).

    With n = N - 1 the bracket is the new state; before that the pair becomes the next pending one. S is the state of
    paper 001, eq. 17, n tokens ago. The caller counts: after the step of all layers, n <- (n + 1) mod N.

    Args:
        q, k: [B, H, K].
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64; updated in place.
        keys: [B, H, N - 1, K], values: [B, H, N - 1, V]: the pending pairs, in the dtypes of k and v, before the
            activation; updated in place. Only the first n are read.
        pending: int32 [B], n of each sequence, 0 to N - 1.
        log_decay: [H], at most 0; None for no decay.
        activation: none or silu, on q and k before anything else.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes that do not go together, an unknown activation.
    """
    _check("lightning_pending_step", q, k, v, state, log_decay, activation)
    check_pending("lightning_pending_step", pending, keys=(keys, k), values=(values, v))
    if fits_kernel(pending, keys, values) and use_kernel("lightning", state, q, k, v, log_decay):
        return _pending_step(q, k, v, state, keys, values, pending, log_decay, float(scale), activation)
    with exact(q):
        return _pending_plain(q, k, v, state, keys, values, pending, log_decay, scale, activation)


def _check(op: str, q, k, v, state, log_decay, activation) -> None:
    check_activation(op, activation)
    check_step(op, v, state, q=q, k=k)
    if log_decay is not None and log_decay.shape != q.shape[1:2]:
        raise ValueError(f"{op}: log_decay has shape {list(log_decay.shape)}; give [{q.shape[1]}], one per head")


def _pending_plain(q, k, v, state, keys, values, pending, log_decay, scale, activation):
    (k, _, full), (v_all, _, _) = append(k, keys, pending), append(v, values, pending)
    if activation == "silu":
        q, k = F.silu(q), F.silu(k)
    k, after = k.to(state.dtype), state
    if log_decay is not None:
        rate = log_decay.to(state.dtype)[:, None, None]
        number = pending.long()[:, None, None, None]
        age = (number - torch.arange(k.shape[2], device=q.device)[:, None]).clamp_min(0)
        k = k * torch.where(age > 0, (rate * age.clamp_min(1)).exp(), 1.0)  # no infinity times zero
        after = state * (rate * (number + 1)).exp()
    after = after + k.mT @ v_all.to(state.dtype)
    state.copy_(torch.where(full, after, state))
    return (scale * (q.to(state.dtype)[..., None, :] @ after).squeeze(-2)).to(v.dtype)


_step = register_step(
    "lightning_step",
    "Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? log_decay, float scale, str activation",
    "lightning.step_kernel.step",
    like="v",
)
_pending_step = register_step(
    "lightning_pending_step",
    "Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor(b!) keys, Tensor(c!) values, Tensor pending, "
    "Tensor? log_decay, float scale, str activation",
    "lightning.step_kernel.pending_step",
    like="v",
)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float = 1.0, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Returns o_t = scale q_t sum_s k_s^T v_s for each head, over all tokens s of the row or document.

    Time and memory are linear in T. Packed documents have no matrix each: their sum over all tokens is the causal one
    in both directions, which counts the token itself twice and loses it once.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T.

    Returns:
        o [B, T, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes that do not go together, float16 on a GPU, or ranks that share the rows.
    """
    check_matrix_state("linear_attention", q, k, v, None, cu_seqlens)
    if sequence.span() is not None:
        raise ValueError("linear_attention: tokens see the whole row, but ranks share it; use parallel.sp: 1")
    if cu_seqlens is None:
        matrix = torch.einsum("bthk,bthv->bhkv", k, v)
        o = torch.einsum("bthk,bhkv->bthv", q, matrix)
        return o if scale == 1.0 else o * scale

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return lightning_attention(q, k, v, scale=scale, cu_seqlens=cu_seqlens)[0]

    diagonal = scale * (q * k).sum(-1, keepdim=True)
    return both_ways(attend, q, k, v, cu_seqlens=cu_seqlens) - (diagonal * v).to(v.dtype)
