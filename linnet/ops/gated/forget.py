"""HGRN2's recurrence from the logits of its forget gate (paper 002, 3.2): gated linear attention with k = 1 - f.

On a GPU neither k nor the log-decays reach memory; elsewhere they are made as HGRN2 always made them.
"""

import importlib

from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend, sequence
from linnet.ops.arguments import check_devices, check_matrix_state
from linnet.ops.chunks import state_dtype
from linnet.ops.gated import chunked
from linnet.ops.gated.narrow import narrow_attention, takes
from linnet.ops.gated.reference import forget_gate, gated_reference
from linnet.ops.registration import register_matrix_state, register_plain
from linnet.ops.spans import cut_linear, split_rows


def forget_gated_attention(
    q: Tensor,
    x: Tensor,
    v: Tensor,
    *,
    lower_bound: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = diag(f_t) S_{t-1} + (1 - f_t)^T v_t, o_t = scale q_t S_t, f = beta + (1 - beta) sigmoid(x) (002, 3.2).

    The gate is float32 arithmetic (float64 for float64 inputs), products are as in `gated_linear_attention`.

    Args:
        q, x: [B, T, H, K]; x are the logits of the forget gate.
        v: [B, T, H, V].
        lower_bound: beta [H, K] in (0, 1); None for 0.
        scale: multiplies o.
        initial_state: [N, H, K, V], float32 (float64 for float64 inputs), the state after the token before the first;
            None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [N, H, K, V] or None. All tensors have gradients.

    Raises:
        ValueError: shapes or dtypes that do not go together, float16 on a GPU, offsets that do not rise from 0 to T.
    """
    check_matrix_state("forget_gated_attention", q, x, v, initial_state, cu_seqlens, key="x")
    if lower_bound is not None and (lower_bound.shape != q.shape[2:] or not lower_bound.is_floating_point()):
        raise ValueError(
            f"forget_gated_attention: lower_bound has shape {list(lower_bound.shape)} and dtype {lower_bound.dtype}; "
            f"give floating-point {list(q.shape[2:])}, one per channel of the key, or None"
        )
    check_devices("forget_gated_attention", q=q, lower_bound=lower_bound)
    arguments = (q, x, v, lower_bound, initial_state, cu_seqlens, float(scale))
    if sequence.span() is None and (backend.use_reference() or takes(q)):
        log_decay, k = forget_gate(x, lower_bound)
        form = gated_reference if backend.use_reference() else narrow_attention
        o, final_state = form(q, k, v, log_decay, initial_state, cu_seqlens, scale)
    else:
        form = forget_gated.call if sequence.span() is None else forget_gated_span
        o, final_state = form(*arguments, output_final_state)
    return o, final_state if output_final_state else None


def _forward(q, x, v, lower_bound, initial_state, cu_seqlens, scale: float, return_final_state: bool):
    kernels = _kernels(q, x, v)
    if kernels is not None:
        call = kernels.Call(q, None, x, lower_bound, v, initial_state, cu_seqlens, scale)
        return kernels.forward(call, return_final_state)
    log_decay, k = forget_gate(x, lower_bound)
    return chunked.gated_forward(q, k.to(q.dtype), v, log_decay, initial_state, cu_seqlens, scale, return_final_state)


def _backward(q, x, v, lower_bound, initial_state, cu_seqlens, scale: float, do, dfinal):
    kernels = _kernels(q, x, v, do)
    if kernels is not None:
        call = kernels.Call(q, None, x, lower_bound, v, initial_state, cu_seqlens, scale)
        dq, _, dv, dx, dlower, dinitial = kernels.backward(call, do, dfinal)
        return dq, dx, dv, dlower, dinitial
    log_decay, k = forget_gate(x, lower_bound)
    dq, dk, dv, dlog_decay, dinitial = chunked.gated_backward(
        q, k.to(q.dtype), v, log_decay, initial_state, cu_seqlens, scale, do, dfinal
    )
    dx, dlower = _gate_backward(x, lower_bound, log_decay, dlog_decay, dk)
    return dq, dx, dv, dlower, dinitial


def _gate_backward(x: Tensor, beta: Tensor | None, log_f: Tensor, dlog_f: Tensor, dk: Tensor):
    """Gradients of x and beta: with s = sigmoid(x) df/dx = (1 - beta) s (1 - s), df/dbeta = 1 - s, d log f = df / f."""
    z, dk = x.to(log_f.dtype), dk.to(log_f.dtype)
    s, rest = z.sigmoid(), (-z).sigmoid()
    if beta is None:
        return (rest * (dlog_f - s * dk)).to(x.dtype), None
    share = (F.logsigmoid(z) - log_f).exp()  # s / f, which is at most 1
    dx = (1.0 - beta) * rest * (dlog_f * share - dk * s)
    return dx.to(x.dtype), (rest * (dlog_f * (-log_f).exp() - dk)).sum((0, 1)).to(beta.dtype)


def _kernels(q: Tensor, *others: Tensor):
    """The Triton form, where it serves a call."""
    if not backend.use_triton("gated", q.is_cuda):
        return None
    form = importlib.import_module("linnet.ops.gated.triton")
    return form if form.supports("forget_gated_attention", q, *others) else None


# A lower bound has one gradient per model, so that its models fold into the heads.
forget_gated = register_matrix_state(
    "forget_gated",
    _forward,
    _backward,
    by_heads=lambda arguments, in_dims: arguments[3] is not None,
    gate_axes=(None, 0),
    flops=chunked.forward_flops,
    backward_flops=chunked.backward_flops,
)


# The state and the decay over a span of rows, for other ranks (`linnet.ops.spans`), without running the op.


def _summarise(q, k, gate, bound, c, scale: float, reverse: bool) -> tuple[Tensor, Tensor]:
    if backend.use_triton("gated", q.is_cuda):
        kernels = importlib.import_module("linnet.ops.gated.triton")
        if kernels.supports("gated_linear_attention", q, gate if k is None else k, c):
            return kernels.summarise(kernels.Call(q, k, gate, bound, c, None, None, scale), c, reverse)
    if k is None:
        gate, k = forget_gate(gate, bound)
    return chunked.gated_summary(q, k, gate, c, scale, reverse)


def _summary_shapes(q, k, gate, bound, c, scale, reverse):
    sizes, dtype = (q.shape[0], *q.shape[2:]), state_dtype(q, gate if k is None else k, c)
    return q.new_empty((*sizes, c.shape[-1]), dtype=dtype), q.new_empty((*sizes, 1), dtype=dtype)


# With k None, `gate` are logits and `bound` the lower bound of the forget gate, else log-decays. c = v gives the state
# [B, H, K, V] after the span, from zero, and the decay over it [B, H, K, 1]; `reverse` and c = do the gradient of the
# state before the span.
_summary = register_plain(
    "summary_gated",
    "Tensor q, Tensor? k, Tensor gate, Tensor? bound, Tensor c, float scale, bool reverse",
    2,
    _summarise,
    _summary_shapes,
)


def summarise(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial, cu_seqlens, scale: float, *_):
    """State and decay of a span, from the arguments of the op."""
    return _summary(q, k, log_decay, None, v, scale, False)


def summarise_backward(q, k, v, log_decay, initial, cu_seqlens, scale: float, do: Tensor) -> Tensor:
    """The gradient of the initial state from that of o."""
    return _summary(q, k, log_decay, None, do, scale, True)[0]


def summarise_forget(q: Tensor, x: Tensor, v: Tensor, bound: Tensor | None, initial, cu_seqlens, scale: float, *_):
    """As `summarise`, from the arguments of `forget_gated_attention`."""
    return _summary(q, None, x, bound, v, scale, False)


def summarise_forget_backward(q, x, v, bound, initial, cu_seqlens, scale: float, do: Tensor) -> Tensor:
    """As `summarise_backward`."""
    return _summary(q, None, x, bound, do, scale, True)[0]


def _decay(rows: int, q, x, v, lower_bound, *_) -> Tensor:
    """[B, H, K, 1]: the decay over a span."""
    log_f, _ = forget_gate(split_rows(x, rows), lower_bound)
    return log_f.sum(1).exp()[..., None]


forget_gated_span = cut_linear(
    forget_gated, 4, 5, _decay, summary=summarise_forget, summary_backward=summarise_forget_backward
)
