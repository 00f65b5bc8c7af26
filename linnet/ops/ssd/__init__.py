"""Linear attention with one data-dependent decay per value head: the state-space dual of Mamba-2."""

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.activation import softplus_steps
from linnet.ops.arguments import check_decay_dtype, check_decay_values, check_grouped, check_half, check_sequence
from linnet.ops.chunks import decay_rest, exact, state_dtype
from linnet.ops.delta import check_state, token_step
from linnet.ops.registration import empty_state, register_matrix_state, register_plain
from linnet.ops.spans import cut_linear, run_form, split_rows
from linnet.ops.ssd import chunked
from linnet.ops.ssd.chunked import backward_flops, forward_flops, weigh
from linnet.ops.ssd.reference import ssd_reference
from linnet.ops.stepping import Pending, step_widened, use_kernel

__all__ = ["projected_ssd_step", "ssd", "ssd_step"]

OP = "ssd"


def ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    times: Tensor | None = None,
    skip: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(log_decay_t) S_{t-1} + k_t^T (times_t v_t), o_t = scale q_t S_t + skip_t v_t for each value head.

    `lightning_attention` has constant decays, `gated_linear_attention` one per channel of the key; one per head is
    faster than the latter. Value heads may share queries and keys, as in the groups of Mamba-2: there q is C, k is B,
    v is x, `times` dt, `skip` D and the log-decay dt A. On a GPU `times` and `skip` add no pass over v to the forward;
    to the backward none on Hopper where value heads of 64 share keys, else two.

    Time and memory are linear in T. States and sums are float32. Operands of products are float32 on a CPU (float64 for
    float64 inputs), where times_t v_t is first rounded to the dtype of v; on a GPU bfloat16 inputs are multiplied as
    bfloat16, float32 ones in three TF32 passes, and float16 ones are refused. No decay overflows: exp(log_decay) may be
    anything from 1 down to 0, -inf included.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V]; H divides HV, and head j of v has the query and key of head j // (HV / H).
        log_decay: [B, T, HV], at most 0. Keep it in float32: bfloat16 rounds decays near 1 to 1, and float16 is refused
            where it needs a gradient, because that overflows.
        times: [B, T, HV], factors of v where it enters the state; None for 1.
        skip: [B, T, HV], or [1, 1, HV] for all tokens: factors of v in o; None for 0.
        scale: multiplies what o reads from the state.
        initial_state: [N, HV, K, V], float32 (float64 for float64 inputs), the state after the token before the first;
            None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] or None. All tensors have gradients.

    Raises:
        ValueError: shapes or dtypes that do not go together, float16 on a GPU or of a log_decay with a gradient,
            offsets that do not rise from 0 to T.

    Source: Dao and Gu 2024 (arXiv:2405.21060).
    """
    check_grouped(OP, q, k, v, "[B, T, ")
    if log_decay.shape != v.shape[:3] or not log_decay.is_floating_point():
        raise ValueError(
            f"{OP}: log_decay has shape {list(log_decay.shape)} and dtype {log_decay.dtype}; give floating-point "
            f"{list(v.shape[:3])}, one per value head"
        )
    check_decay_dtype(OP, log_decay)
    inputs = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    for name, factors, shapes in (("times", times, [v.shape[:3]]), ("skip", skip, [v.shape[:3], (1, 1, v.shape[2])])):
        if factors is None:
            continue
        if factors.shape not in shapes:
            asked = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{OP}: {name} has shape {list(factors.shape)}; give {asked}")
        inputs[name] = factors
    state_shape = (v.shape[2], q.shape[3], v.shape[3])
    check_sequence(OP, inputs, initial_state, state_shape, state_dtype(q, k, v), cu_seqlens)
    check_half(OP, q, k, v)
    check_decay_values(OP, log_decay)
    arguments = (q, k, v, log_decay, times, skip, initial_state, cu_seqlens, float(scale))
    return run_form(dual, dual_span, ssd_reference, arguments, output_final_state)


dual = register_matrix_state(
    OP,
    *backend.forms(OP, chunked, "ssd_forward", "ssd_backward"),
    gates="Tensor log_decay, Tensor? times, Tensor? skip",
    by_heads=lambda arguments, in_dims: arguments[5] is not None,  # a skip of all tokens has no axis for rows
    flops=forward_flops,
    backward_flops=backward_flops,
)


def _decay(rows: int, q, k, v, log_decay, *_) -> Tensor:
    """[B, HV, 1, 1]: the decay over a span."""
    return split_rows(log_decay, rows).sum(1, dtype=state_dtype(q, k, v)).exp()[..., None, None]


# The summary of a span for other ranks, without running the op: with c = v the state [B, HV, K, V] after it, from zero;
# `reverse` and c = do: the gradient of the state before it.
_summary = register_plain(
    "summary_ssd",
    "Tensor q, Tensor k, Tensor log_decay, Tensor c, float scale, bool reverse",
    1,
    *backend.forms(OP, chunked, "ssd_summary"),
    lambda q, k, log_decay, c, scale, reverse: empty_state(q, k, c, None),
)


def _summarise(q, k, v, log_decay, times, skip, initial, cu_seqlens, scale: float, *_) -> tuple[Tensor, Tensor]:
    return _summary(q, k, log_decay, weigh(v, times), scale, False), _decay(0, q, k, v, log_decay)


def _summarise_backward(q, k, v, log_decay, times, skip, initial, cu_seqlens, scale: float, do: Tensor) -> Tensor:
    return _summary(q, k, log_decay, do, scale, True)


dual_span = cut_linear(dual, 6, 7, _decay, summary=_summarise, summary_backward=_summarise_backward)


def ssd_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
    pending: Pending | None = None,
) -> Tensor:
    """One token of `ssd`: S <- exp(log_decay) S + k^T v, o = scale q S.

    Args:
        q, k: [B, H, K].
        v: [B, HV, V]; H divides HV.
        log_decay: [B, HV], at most 0.
        state: [B, HV, K, V], float32, float64 or bfloat16: the state after the previous token; updated in place.
        pending: the last tokens (`linnet.ops.Pending`), which the state does not hold yet; this one goes behind them,
            and as the last of N all go into the state. None: the state is written.

    Returns:
        o [B, HV, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_grouped("ssd_step", q, k, v, "[B, ")
    check_state("ssd_step", q, v, state)
    if log_decay.shape != v.shape[:2]:
        raise ValueError(f"ssd_step: log_decay {list(log_decay.shape)}; give {list(v.shape[:2])}")
    if pending is not None:
        pending.check("ssd_step", k, v, log_decay)
    if use_kernel("ssd", state, q, k, v, log_decay, half=True, pending=pending):
        return token_step(q, k, v, log_decay, None, None, None, None, None, state, scale, pending)
    if state.dtype == torch.bfloat16:
        return step_widened(lambda wide: ssd_step(q, k, v, log_decay, wide, scale=scale, pending=pending), state)
    dtype = state.dtype
    with exact(q):
        if pending is not None:
            pending.settle(state)
        q, k = (x.to(dtype).repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
        log_decay = log_decay.to(dtype)[..., None, None]
        decay = log_decay.exp()
        update = (k[..., None] * v.to(dtype)[..., None, :]).addcmul_(state, decay_rest(log_decay, decay))
        state.mul_(decay).add_(update)
        return (scale * (q[..., None, :] @ state).squeeze(-2)).to(v.dtype)


def projected_ssd_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rates: Tensor,
    bias: Tensor,
    skip: Tensor,
    state: Tensor,
    *,
    steps: tuple[float, float] = (0.0, float("inf")),
    pending: Pending | None = None,
) -> Tensor:
    """`ssd_step` of what Mamba-2 projects: S <- exp(-exp(rates) d) S + k^T d v with d = softplus(decay + bias) clamped
    to `steps`, o = q S + skip v. On a GPU all of it is one launch.

    Args:
        q, k: [B, H, K].
        v: [B, HV, V]; H divides HV.
        decay: [B, HV].
        rates, bias, skip: [HV].
        state: [B, HV, K, V], float32, float64 or bfloat16: the state after the previous token; updated in place.
        pending: the last tokens (`linnet.ops.Pending`), which the state does not hold yet; this one goes behind them,
            and as the last of N all go into the state. None: the state is written.

    Returns:
        o [B, HV, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_grouped("projected_ssd_step", q, k, v, "[B, ")
    check_state("projected_ssd_step", q, v, state)
    if pending is not None:
        pending.check("projected_ssd_step", k, v, decay)
    if use_kernel("ssd", state, q, k, v, decay, rates, bias, skip, half=True, pending=pending):
        return token_step(q, k, v, decay, rates, bias, None, None, skip, state, 1.0, pending, steps=steps, logits=True)
    times, log_decay = softplus_steps(decay, rates, bias, steps)
    y = ssd_step(q, k, (times[..., None] * v).to(v.dtype), log_decay, state, pending=pending)
    return (y + skip[:, None] * v).to(y.dtype)
