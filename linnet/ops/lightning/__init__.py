"""Lightning Attention: linear attention with one constant decay per head, or none (papers 001 and 000)."""

from torch import Tensor

from linnet.ops import backend, sequence
from linnet.ops.arguments import check_decay_values, check_devices, check_matrix_state
from linnet.ops.chunks import count_pairs, state_dtype
from linnet.ops.lightning import chunked
from linnet.ops.lightning.reference import lightning_reference
from linnet.ops.lightning.step import lightning_pending_step, lightning_step
from linnet.ops.registration import empty_state, register_matrix_state, register_plain
from linnet.ops.spans import cut_linear

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
    if backend.debugging():
        check_decay_values("lightning_attention", log_decay)
    arguments = (q, k, v, log_decay, initial_state, cu_seqlens, float(scale))
    if sequence.span() is not None:
        o, final_state = lightning_span(*arguments, output_final_state)
    elif backend.use_reference():
        o, final_state = lightning_reference(*arguments)
    else:
        o, final_state = lightning.call(*arguments, output_final_state)
    return o, final_state if output_final_state else None


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
    lambda q, *arguments: backend.choose_form("lightning", q, chunked).lightning_forward(q, *arguments),
    lambda q, *arguments: backend.choose_form("lightning", q, chunked).lightning_backward(q, *arguments),
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
    lambda q, *arguments: backend.choose_form("lightning", q, chunked).lightning_summary(q, *arguments),
    lambda q, k, log_decay, c, scale, reverse: empty_state(q, k, c, None),
)


def _summarise(q, k, v, log_decay, initial, cu_seqlens, scale: float, *_) -> tuple[Tensor, Tensor | None]:
    return _summary(q, k, log_decay, v, scale, False), _decay(0, q, k, v, log_decay)


def _summarise_backward(q, k, v, log_decay, initial, cu_seqlens, scale: float, do: Tensor) -> Tensor:
    return _summary(q, k, log_decay, do, scale, True)


lightning_span = cut_linear(lightning, 4, 5, _decay, summary=_summarise, summary_backward=_summarise_backward)
