"""Gated linear attention: linear attention with data-dependent decays, one per channel of the key (002, 003).

A step for decoding from a forget gate may write its state only every N tokens: then the gate's logits and the values of
the last tokens are pending (`linnet.ops.stepping`).
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend, sequence
from linnet.ops.arguments import check_decay_dtype, check_decay_values, check_devices, check_matrix_state
from linnet.ops.chunks import decay_rest, exact, state_dtype
from linnet.ops.gated import chunked
from linnet.ops.gated.chunked import backward_flops, forward_flops
from linnet.ops.gated.forget import forget_gated_attention, summarise, summarise_backward
from linnet.ops.gated.narrow import narrow_attention, takes
from linnet.ops.gated.reference import forget_gate, gated_reference
from linnet.ops.registration import register_matrix_state, register_step
from linnet.ops.spans import cut_linear, run_form, split_rows
from linnet.ops.stepping import append, check_activation, check_pending, check_step, fits_kernel, use_kernel

__all__ = [
    "forget_gate",
    "forget_gated_attention",
    "forget_gated_pending_step",
    "forget_gated_step",
    "gated_linear_attention",
    "gated_step",
]


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t, o_t = scale q_t S_t for each head (paper 002, eq. 3).

    Time and memory are linear in T. States and sums are float32. Operands of products are float32 on a CPU (float64 for
    float64 inputs); on a GPU bfloat16 inputs are multiplied as bfloat16, float32 ones in three TF32 passes, and float16
    ones are refused. No decay overflows: exp(log_decay) may be anything from 1 down to 0, -inf included.

    Args:
        q, k, log_decay: [B, T, H, K]; log_decay at most 0. Keep it in float32: bfloat16 rounds decays near 1 to 1, and
            float16 is refused where it needs a gradient, because that overflows.
        v: [B, T, H, V].
        scale: multiplies o.
        initial_state: [N, H, K, V], float32 (float64 for float64 inputs), the state after the token before the first;
            None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [N, H, K, V] or None. All tensors have gradients.

    Raises:
        ValueError: shapes or dtypes that do not go together, float16 on a GPU or of a log_decay with a gradient,
            offsets that do not rise from 0 to T.
    """
    check_matrix_state("gated_linear_attention", q, k, v, initial_state, cu_seqlens)
    if log_decay.shape != q.shape or not log_decay.is_floating_point():
        raise ValueError(
            f"gated_linear_attention: log_decay has shape {list(log_decay.shape)} and dtype {log_decay.dtype}; "
            f"give floating-point {list(q.shape)}, one per channel of the key"
        )
    check_decay_dtype("gated_linear_attention", log_decay)
    check_devices("gated_linear_attention", q=q, log_decay=log_decay)
    check_decay_values("gated_linear_attention", log_decay)
    arguments = (q, k, v, log_decay, initial_state, cu_seqlens, float(scale))
    if sequence.span() is None and not backend.use_reference() and takes(q):
        o, final_state = narrow_attention(*arguments)
        return o, final_state if output_final_state else None
    return run_form(gated, gated_span, gated_reference, arguments, output_final_state)


gated = register_matrix_state(
    "gated",
    *backend.forms("gated", chunked, "gated_forward", "gated_backward"),
    flops=forward_flops,
    backward_flops=backward_flops,
)


def _decay(rows: int, q, k, v, log_decay, *_) -> Tensor:
    """[B, H, K, 1]: the decay over a span."""
    return split_rows(log_decay, rows).sum(1, dtype=state_dtype(q, k, v)).exp()[..., None]


gated_span = cut_linear(gated, 4, 5, _decay, summary=summarise, summary_backward=summarise_backward)


def gated_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """One step of paper 002, eq. 3: S <- diag(exp(log_decay)) S + k^T v, o = scale q S.

    Args:
        q, k, log_decay: [B, H, K]; log_decay at most 0.
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state after the previous token; updated in place.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_step("gated_step", v, state, q=q, k=k, log_decay=log_decay)
    if use_kernel("gated", state, q, k, v, log_decay):
        return _step(q, k, v, log_decay, None, state, float(scale), "none")
    with exact(q):
        log_decay = log_decay.to(state.dtype)
        decay = log_decay.exp()
        update = k.to(state.dtype)[..., None] * v.to(state.dtype)[..., None, :]
        update.addcmul_(state, decay_rest(log_decay, decay)[..., None])
        state.mul_(decay[..., None]).add_(update)
        return (scale * (q.to(state.dtype)[..., None, :] @ state).squeeze(-2)).to(v.dtype)


def forget_gated_step(
    q: Tensor,
    x: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    lower_bound: Tensor | None = None,
    scale: float = 1.0,
    activation: Literal["none", "silu"] = "none",
) -> Tensor:
    """One step of `forget_gated_attention` (paper 002, 3.2): the gate too is made in the one launch, in float32.

    Args:
        q, x: [B, H, K]; x are the logits of the forget gate.
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state after the previous token; updated in place.
        lower_bound: [H, K], beta in (0, 1); None for 0.
        activation: none or silu, on q before anything else; in the same launch on a GPU.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together, an unknown activation.
    """
    _check("forget_gated_step", q, x, v, state, lower_bound, activation)
    if use_kernel("gated", state, q, x, v, lower_bound):
        return _step(q, None, v, x, lower_bound, state, float(scale), activation)
    q = F.silu(q) if activation == "silu" else q
    log_decay, k = forget_gate(x, lower_bound)
    return gated_step(q, k.to(q.dtype), v, log_decay, state, scale=scale)


def forget_gated_pending_step(
    q: Tensor,
    x: Tensor,
    v: Tensor,
    state: Tensor,
    gates: Tensor,
    values: Tensor,
    pending: Tensor,
    *,
    lower_bound: Tensor | None = None,
    scale: float = 1.0,
    activation: Literal["none", "silu"] = "none",
) -> Tensor:
    """One step of `forget_gated_step` behind n pending tokens; as the last of N it writes the state.

    Args:
        q, x: [B, H, K]; x are the logits of the forget gate.
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state n tokens ago; updated in place.
        gates: [B, H, N - 1, K], values: [B, H, N - 1, V]: the pending tokens, in the dtypes of x and v; updated in
            place. Only the first n are read.
        pending: int32 [B], n of each sequence, 0 to N - 1; the caller counts, after the step of all layers.
        lower_bound: [H, K], beta in (0, 1); None for 0.
        activation: none or silu, on q before anything else.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes that do not go together, an unknown activation.
    """
    _check("forget_gated_pending_step", q, x, v, state, lower_bound, activation)
    check_pending("forget_gated_pending_step", pending, gates=(gates, x), values=(values, v))
    if fits_kernel(pending, gates, values) and use_kernel("gated", state, q, x, v, lower_bound):
        return _pending_step(q, x, v, state, gates, values, pending, lower_bound, float(scale), activation)
    q = F.silu(q) if activation == "silu" else q
    with exact(q):
        return _pending_plain(q, x, v, state, gates, values, pending, lower_bound, scale)


def _check(op: str, q, x, v, state, lower_bound, activation) -> None:
    check_activation(op, activation)
    check_step(op, v, state, q=q, x=x)
    if lower_bound is not None and lower_bound.shape != q.shape[1:]:
        raise ValueError(f"{op}: lower_bound has shape {list(lower_bound.shape)}; give {list(q.shape[1:])}")


def _pending_plain(q, x, v, state, gates, values, pending, lower_bound, scale):
    x, there, full = append(x, gates, pending)
    v_all, _, _ = append(v, values, pending)
    log_decay, k = forget_gate(x, None if lower_bound is None else lower_bound[:, None])
    log_decay, k = log_decay.to(state.dtype).where(there, 0.0), k.to(state.dtype).where(there, 0.0)
    behind = F.pad(log_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)  # of the tokens behind each
    total = log_decay.sum(2)
    decay = total.exp()
    update = (k * behind.exp()).mT @ v_all.to(state.dtype)
    after = torch.addcmul(update, state, decay_rest(total, decay)[..., None]).addcmul_(state, decay[..., None])
    state.copy_(torch.where(full, after, state))
    return (scale * (q.to(state.dtype)[..., None, :] @ after).squeeze(-2)).to(v.dtype)


_step = register_step(
    "gated_step",
    "Tensor q, Tensor? k, Tensor v, Tensor gate, Tensor? lower_bound, Tensor(a!) state, float scale, str activation",
    "gated.step_kernel.step",
    like="v",
)
_pending_step = register_step(
    "forget_gated_pending_step",
    "Tensor q, Tensor x, Tensor v, Tensor(a!) state, Tensor(b!) gates, Tensor(c!) values, Tensor pending, "
    "Tensor? lower_bound, float scale, str activation",
    "gated.step_kernel.pending_step",
    like="v",
)
