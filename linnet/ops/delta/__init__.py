"""The gated delta rule: a token erases what its key reads of the state, then writes (DeltaNet, Gated DeltaNet, KDA)."""

import warnings

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.activation import softplus_decay
from linnet.ops.arguments import check_decay_dtype, check_decay_values, check_grouped, check_sequence
from linnet.ops.chunks import at_least_float32, decay_rest, exact, state_dtype
from linnet.ops.delta import chunked
from linnet.ops.delta.chunked import backward_flops, forward_flops
from linnet.ops.delta.reference import delta_reference
from linnet.ops.norm import unit_norm
from linnet.ops.registration import register_matrix_state, register_step
from linnet.ops.spans import cut_linear, run_form, transition
from linnet.ops.stepping import Pending, step_widened, use_kernel

__all__ = ["gated_delta_rule", "gated_delta_step", "projected_delta_step"]

OP = "gated_delta_rule"


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor,
    write: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """R_t = diag(exp(log_decay_t)) S_{t-1},  S_t = R_t + k_t^T (write_t v_t - (erase_t k_t) R_t),  o_t = scale q_t S_t.

    Each token decays the state, reads from it what its key holds, and writes the difference to its value. Without
    decay this is DeltaNet, with one decay per head Gated DeltaNet, with one per channel of the key KDA; `erase` per
    channel of the key and `write` per channel of the value are GDN-2.

    Time and memory are linear in T. States, sums and the triangular solve are float32 (float64 for float64 inputs).
    No decay overflows: exp(log_decay) may be anything from 1 down to 0, -inf included. A state stays bounded only where
    sum(erase k^2) of each token is in [0, 2], so give keys unit norm; `linnet.ops.debug` warns of others.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V]; H divides HV, and head j of v has the query and key of head j // (HV / H).
        log_decay: None for no decay, [B, T, HV], or [B, T, HV, K] for one per channel of the key; at most 0. Keep it in
            float32: bfloat16 rounds decays near 1 to 1, and float16 is refused where it needs a gradient.
        erase: [B, T, HV] or [B, T, HV, K].
        write: [B, T, HV] or [B, T, HV, V]; None for `erase`, which is then [B, T, HV].
        scale: multiplies o.
        initial_state: [N, HV, K, V], float32 (float64 for float64 inputs), the state after the token before the first;
            None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] or None. All tensors have gradients.

    Raises:
        ValueError: shapes or dtypes that do not go together, offsets that do not rise from 0 to T.

    Source: Yang et al. 2024 (arXiv:2406.06484, 2412.06464); Kimi Team 2025 (arXiv:2510.26692) for decays per channel.
    """
    check_shapes(OP, q, k, v, log_decay, erase, write, "[B, T, ")
    gates = {name: x for name, x in (("log_decay", log_decay), ("erase", erase), ("write", write)) if x is not None}
    state_shape = (v.shape[2], q.shape[3], v.shape[3])
    check_sequence(
        OP, {"q": q, "k": k, "v": v} | gates, initial_state, state_shape, state_dtype(q, k, v), cu_seqlens
    )  # fmt: skip
    check_decay_dtype(OP, log_decay)
    check_decay_values(OP, log_decay)
    if backend.debugging(k, erase):
        _check_growth(k, erase)
    arguments = (q, k, v, log_decay, erase, write, initial_state, cu_seqlens, float(scale))
    return run_form(delta, delta_span, delta_reference, arguments, output_final_state)


def _check_growth(k: Tensor, erase: Tensor) -> None:
    """For `linnet.ops.debug()`: warns of tokens that stretch what they read, 1 - sum(erase k^2) times. Waits for the
    device."""
    k = k.detach().to(state_dtype(k)).repeat_interleave(erase.shape[2] // k.shape[2], 2)
    erased = ((erase.detach() if erase.ndim == 4 else erase.detach()[..., None]) * k.square()).sum(-1)
    low, high = erased.min().item(), erased.max().item()
    if not (low >= -1e-3 and high <= 2 + 1e-2):  # not NaN, and what bfloat16 rounds of keys of unit norm
        warnings.warn(
            f"{OP}: sum(erase k^2) is between {low:g} and {high:g}, so the state can grow without bound; give keys "
            "unit norm and erase from 0 to 2",
            stacklevel=3,
        )


# Models fold into the batch, or into the heads of documents, where value heads stay with their keys.
delta = register_matrix_state(
    "delta",
    *backend.forms("delta", chunked, "delta_forward", "delta_backward"),
    gates="Tensor? log_decay, Tensor erase, Tensor? write",
    flops=forward_flops,
    backward_flops=backward_flops,
)

delta_span = cut_linear(delta, 6, 7, transition(delta, 6, 7, write=5), matrices=True)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor,
    write: Tensor | None,
    state: Tensor,
    *,
    scale: float = 1.0,
    pending: Pending | None = None,
) -> Tensor:
    """One token of `gated_delta_rule`: S <- diag(exp(log_decay)) S, then S <- S + k^T (write v - (erase k) S).

    Args:
        q, k: [B, H, K].
        v: [B, HV, V]; H divides HV.
        log_decay: None, [B, HV] or [B, HV, K], at most 0.
        erase: [B, HV] or [B, HV, K].
        write: [B, HV] or [B, HV, V]; None for `erase`, which is then [B, HV].
        state: [B, HV, K, V], float32, float64 or bfloat16: the state after the previous token; updated in place.
        pending: the last tokens (`linnet.ops.Pending`), which the state does not hold yet; this one goes behind them,
            and as the last of N all go into the state. None: the state is written.

    Returns:
        o [B, HV, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_shapes("gated_delta_step", q, k, v, log_decay, erase, write, "[B, ")
    check_state("gated_delta_step", q, v, state)
    gates = (log_decay, erase, write)
    if pending is not None:
        pending.check("gated_delta_step", k, v, log_decay)
    if use_kernel("delta", state, q, k, v, *gates, half=True, pending=pending):
        return token_step(q, k, v, log_decay, None, None, erase, write, None, state, scale, pending)
    if state.dtype == torch.bfloat16:
        return step_widened(lambda wide: gated_delta_step(q, k, v, *gates, wide, scale=scale, pending=pending), state)
    dtype = state.dtype
    with exact(q):
        if pending is not None:
            pending.settle(state)
        q, k = (x.to(dtype).repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
        erase, write = (
            (x if x.ndim == 3 else x[..., None]).to(dtype) for x in (erase, erase if write is None else write)
        )
        if log_decay is not None:
            log_decay = (log_decay if log_decay.ndim == 3 else log_decay[..., None]).to(dtype)[..., None]
            decay = log_decay.exp()
            state.copy_((state * decay).addcmul_(state, decay_rest(log_decay, decay)))
        correction = write * v.to(dtype) - ((erase * k)[..., None, :] @ state).squeeze(-2)
        state.addcmul_(k[..., None], correction[..., None, :])
        return (scale * (q[..., None, :] @ state).squeeze(-2)).to(v.dtype)


def projected_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    rates: Tensor | None,
    bias: Tensor | None,
    strength: Tensor,
    state: Tensor,
    *,
    most: float = 1.0,
    scale: float = 1.0,
    pending: Pending | None = None,
) -> Tensor:
    """`gated_delta_step` of what a layer projects: q and k get unit norm, the log-decay is -exp(rates) softplus(decay +
    bias), and a token erases and writes most sigmoid(strength). On a GPU all of it is one launch.

    Args:
        q, k: [B, H, K], of any norm.
        v: [B, HV, V]; H divides HV.
        decay: [B, HV] or [B, HV, K]; None for no decay.
        rates: [HV], the logarithms of rates; with `decay` only.
        bias: [HV] or [HV, K], as `decay`.
        strength: [B, HV].
        state: [B, HV, K, V], float32, float64 or bfloat16: the state after the previous token; updated in place.
        most: the largest strength, 1, or 2 where eigenvalues may be negative.
        pending: the last tokens (`linnet.ops.Pending`), which the state does not hold yet; this one goes behind them,
            and as the last of N all go into the state. None: the state is written.

    Returns:
        o [B, HV, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_shapes("projected_delta_step", q, k, v, decay, strength, None, "[B, ")
    check_state("projected_delta_step", q, v, state)
    if pending is not None:
        pending.check("projected_delta_step", k, v, decay)
    if use_kernel("delta", state, q, k, v, decay, rates, bias, strength, half=True, pending=pending):
        return token_step(q, k, v, decay, rates, bias, strength, None, None, state, scale, pending, most, logits=True)
    q, k = unit_norm(q), unit_norm(k)
    log_decay = None if decay is None else softplus_decay(decay, rates, bias)
    erase = most * at_least_float32(strength).sigmoid()
    return gated_delta_step(q, k, v, log_decay, erase, None, state, scale=scale, pending=pending)


_token_step = register_step(
    "delta_step",
    "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? rates, Tensor? bias, Tensor? erase, Tensor? write, "
    "Tensor? skip, Tensor(a!) state, Tensor? number, Tensor(b!)? keys, Tensor(c!)? updates, Tensor(d!)? decays, "
    "float scale, float most, float least_step, float most_step, bool logits",
    "delta.step_kernel.step",
    like="v",
)


def token_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    rates: Tensor | None,
    bias: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    skip: Tensor | None,
    state: Tensor,
    scale: float,
    pending: Pending | None,
    most: float = 1.0,
    steps: tuple[float, float] = (0.0, float("inf")),
    logits: bool = False,
) -> Tensor:
    """The one launch of `gated_delta_step`, `projected_delta_step`, and of the steps of `linnet.ops.ssd`.

    With `rates` [HV] the log-decay is -exp(rates) d with d = softplus(decay + bias) clamped to `steps`, and without
    `erase`, when tokens only add to the state, they add d v. `skip` [HV] adds skip v to the output. With `logits` and
    `erase`, q and k get unit norm and erase is most sigmoid(erase).
    """
    tensors = (q, k, v, decay, rates, bias, erase, write, skip, state, *(pending or (None,) * 4))
    return _token_step(*tensors, float(scale), float(most), *map(float, steps), logits)


def check_state(op: str, q: Tensor, v: Tensor, state: Tensor) -> None:
    """Raises ValueError unless the state is [B, HV, K, V] of a token q [B, H, K], v [B, HV, V] and wide enough."""
    size = (*v.shape[:2], q.shape[-1], v.shape[-1])
    if state.shape != size or state.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(
            f"{op}: state has shape {list(state.shape)} and dtype {state.dtype}; give {list(size)} in float32, float64 "
            "or bfloat16"
        )


def check_shapes(
    op: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, erase: Tensor, write: Tensor | None, axes: str
) -> None:
    """Raises ValueError unless the tensors of `gated_delta_rule`, or of one token of it, go together.

    `axes` is what the shapes in the message start with: "[B, T, " or "[B, ".
    """
    check_grouped(op, q, k, v, axes)
    K, V = q.shape[-1], v.shape[-1]
    head = v.shape[:-1]
    for name, x, width, letter in (
        ("log_decay", log_decay, K, "K"),
        ("erase", erase, K, "K"),
        ("write", write, V, "V"),
    ):
        if x is not None and (x.shape not in (head, (*head, width)) or not x.is_floating_point()):
            raise ValueError(
                f"{op}: {name} has shape {list(x.shape)} and dtype {x.dtype}; give floating-point {axes}HV] = "
                f"{list(head)} or {axes}HV, {letter}] = {[*head, width]}"
            )
    if write is None and erase.shape != head:
        raise ValueError(
            f"{op}: erase has one number per channel, {list(erase.shape)}, and write is None; give write {axes}HV] or "
            f"{axes}HV, V]"
        )
