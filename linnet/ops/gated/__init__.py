"""Gated linear attention: linear attention with data-dependent decays, one per channel of the key (002, 003)."""

from torch import Tensor

from linnet.ops import backend, sequence
from linnet.ops.arguments import check_decay_dtype, check_decay_values, check_devices, check_matrix_state
from linnet.ops.chunks import state_dtype
from linnet.ops.gated import chunked
from linnet.ops.gated.chunked import backward_flops, forward_flops
from linnet.ops.gated.forget import forget_gated_attention
from linnet.ops.gated.narrow import narrow_attention, takes
from linnet.ops.gated.reference import forget_gate, gated_reference
from linnet.ops.gated.step import forget_gated_pending_step, forget_gated_step, gated_step
from linnet.ops.gated.summary import summarise, summarise_backward
from linnet.ops.registration import register_matrix_state
from linnet.ops.spans import cut_linear, split_rows

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
    if backend.debugging():
        check_decay_values("gated_linear_attention", log_decay)
    arguments = (q, k, v, log_decay, initial_state, cu_seqlens, float(scale))
    if sequence.span() is not None:
        o, final_state = gated_span(*arguments, output_final_state)
    elif backend.use_reference():
        o, final_state = gated_reference(*arguments)
    elif takes(q):
        o, final_state = narrow_attention(*arguments)
    else:
        o, final_state = gated.call(*arguments, output_final_state)
    return o, final_state if output_final_state else None


gated = register_matrix_state(
    "gated",
    lambda q, *arguments: backend.choose_form("gated", q, chunked).gated_forward(q, *arguments),
    lambda q, *arguments: backend.choose_form("gated", q, chunked).gated_backward(q, *arguments),
    by_heads=lambda arguments, in_dims: False,
    gate_axes=(0, 2),
    flops=forward_flops,
    backward_flops=backward_flops,
)


def _decay(rows: int, q, k, v, log_decay, *_) -> Tensor:
    """[B, H, K, 1]: the decay over a span."""
    return split_rows(log_decay, rows).sum(1, dtype=state_dtype(q, k, v)).exp()[..., None]


gated_span = cut_linear(gated, 4, 5, _decay, summary=summarise, summary_backward=summarise_backward)
