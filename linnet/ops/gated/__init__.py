"""Gated linear attention: linear attention with data-dependent decays, one a channel of the key (papers 002, 003)."""

import importlib

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.arguments import check_decay_values, check_devices, check_matrix_state
from linnet.ops.chunks import exact
from linnet.ops.direct import no_state
from linnet.ops.gated import chunked
from linnet.ops.gated.forget import forget_gate, forget_gated_attention
from linnet.ops.gated.reference import gated_reference
from linnet.ops.gated.registration import register
from linnet.ops.gated.step import forget_gated_step, gated_step
from linnet.ops.gated.waiting import forget_gated_waiting_step

__all__ = [
    "forget_gate",
    "forget_gated_attention",
    "forget_gated_step",
    "forget_gated_waiting_step",
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

    Time and memory are linear in T. Products are taken in float32 (float64 for float64 inputs). No decay overflows:
    exp(log_decay) may be anything from 1 down to 0, -inf included.

    Args:
        q, k, log_decay: [B, T, H, K]; log_decay at most 0. Keep it in float32: bfloat16 rounds decays near 1 to 1.
        v: [B, T, H, V].
        scale: multiplies o.
        initial_state: [N, H, K, V], float32 (float64 for float64 inputs), the state after the token before the first;
            None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [N, H, K, V] or None. All tensors have gradients.

    Raises:
        ValueError: shapes or dtypes that do not go together, offsets that do not rise from 0 to T.
    """
    check_matrix_state("gated_linear_attention", q, k, v, initial_state, cu_seqlens)
    if log_decay.shape != q.shape or not log_decay.is_floating_point():
        raise ValueError(
            f"gated_linear_attention: log_decay has shape {list(log_decay.shape)} and dtype {log_decay.dtype}; "
            f"give floating-point {list(q.shape)}, one a channel of the key"
        )
    check_devices("gated_linear_attention", q=q, log_decay=log_decay)
    if backend.debugging():
        check_decay_values("gated_linear_attention", log_decay)
    arguments = (q, k, v, log_decay, initial_state, cu_seqlens, float(scale))
    if backend.use_reference():
        o, final_state = gated_reference(*arguments)
    else:
        o, final_state = _direct(*arguments, output_final_state)
    return o, final_state if output_final_state else None


@torch.library.custom_op("linnet::gated", mutates_args=())
def gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    wants_final: bool = True,
) -> tuple[Tensor, Tensor]:
    o, final = _forward(q, k, v, log_decay, initial_state, cu_seqlens, scale, wants_final)
    return o, final if wants_final else no_state(q)


@torch.library.custom_op("linnet::gated_backward", mutates_args=())
def gated_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    do: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *gradients, dinitial = _gradients(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal)
    return *gradients, no_state(q) if initial_state is None else dinitial


def _forward(q, *arguments):
    with exact(q):
        return _form(q).gated_forward(q, *arguments)


def _gradients(q, *arguments):
    with exact(q):
        return _form(q).gated_backward(q, *arguments)


def _form(q: Tensor):
    return importlib.import_module("linnet.ops.gated.triton") if backend.use_triton("gated", q.is_cuda) else chunked


def _choose_axes(arguments, in_dims):
    """Models fold into the batch; with packed documents (B = 1) into the heads."""
    return (0, 0, 0, 0, 0, None, 0, 0) if arguments[5] is None else (2, 2, 2, 2, 1, None, 2, 1)


_direct = register(gated, gated_backward, _choose_axes, _forward, _gradients)
