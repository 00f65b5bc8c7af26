"""Gated linear attention: linear attention with data-dependent decays, one a channel of the key (papers 002, 003)."""

import importlib

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linnet.ops import backend
from linnet.ops.arguments import check_decay_values, check_devices, check_matrix_state
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.direct import shorten
from linnet.ops.documents import count_states
from linnet.ops.folding import register_folding
from linnet.ops.gated import chunked
from linnet.ops.gated.flops import gated_backward_flops, gated_flops
from linnet.ops.gated.forget import forget_gate, forget_gated_attention
from linnet.ops.gated.reference import gated_reference
from linnet.ops.gated.step import forget_gated_step, gated_step

__all__ = ["forget_gate", "forget_gated_attention", "forget_gated_step", "gated_linear_attention", "gated_step"]


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
    form = gated_reference if backend.use_reference() else _direct
    o, final_state = form(q, k, v, log_decay, initial_state, cu_seqlens, float(scale))
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
) -> tuple[Tensor, Tensor]:
    with exact(q):
        return _form(q).gated_forward(q, k, v, log_decay, initial_state, cu_seqlens, scale)


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
    with exact(q):
        return _form(q).gated_backward(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal)


def _form(q: Tensor):
    return importlib.import_module("linnet.ops.gated.triton") if backend.use_triton("gated", q.is_cuda) else chunked


@gated.register_fake
def _(q, k, v, log_decay, initial_state, cu_seqlens, scale):
    return torch.empty_like(v, memory_format=torch.contiguous_format), _empty_state(q, k, v, cu_seqlens)


@gated_backward.register_fake
def _(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal):
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, log_decay))
    return *grads, _empty_state(q, k, v, cu_seqlens)


def _empty_state(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    shape = (count_states(cu_seqlens, q.shape[0]), *q.shape[2:], v.shape[-1])
    return q.new_empty(shape, dtype=state_dtype(q, k, v))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dfinal):
    saved = ctx.saved_tensors  # once: recomputation gives them out only once
    v, initial_state = saved[2], saved[4]
    do = torch.zeros_like(v) if do is None else do
    *grads, dinitial = _direct_backward(*saved, ctx.scale, do, dfinal)
    return *grads, None if initial_state is None else dinitial, None, None


gated.register_autograd(_backward, setup_context=_setup_context)
_direct = shorten(gated, _setup_context, _backward)
_direct_backward = shorten(gated_backward)


def _choose_axes(arguments, in_dims):
    """Models fold into the batch; with packed documents (B = 1) into the heads."""
    return (0, 0, 0, 0, 0, None, 0, 0) if arguments[5] is None else (2, 2, 2, 2, 1, None, 2, 1)


register_folding(gated, gated_backward, _choose_axes, gradients=range(5))
register_flop_formula(torch.ops.linnet.gated)(gated_flops)
register_flop_formula(torch.ops.linnet.gated_backward)(gated_backward_flops)
