"""Lightning Attention: linear attention with one constant decay a head, or none (papers 001 and 000)."""

import importlib

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linnet.ops import backend
from linnet.ops.arguments import check_decay_values, check_devices, check_matrix_state
from linnet.ops.chunks import count_pairs, exact, state_dtype
from linnet.ops.direct import no_state, shorten
from linnet.ops.documents import count_states
from linnet.ops.folding import register_folding
from linnet.ops.lightning import chunked
from linnet.ops.lightning.reference import lightning_reference
from linnet.ops.lightning.step import lightning_step
from linnet.ops.lightning.waiting import lightning_waiting_step

__all__ = ["lightning_attention", "lightning_step", "lightning_waiting_step"]


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

    Time and memory are linear in T. Products are taken in float32 (float64 for float64 inputs).

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
        ValueError: shapes or dtypes that do not go together, a log_decay that asks for a gradient, offsets that do not
            rise from 0 to T.
    """
    check_matrix_state("lightning_attention", q, k, v, initial_state, cu_seqlens)
    if log_decay is not None and (log_decay.shape != q.shape[2:3] or log_decay.requires_grad):
        raise ValueError(
            f"lightning_attention: log_decay has shape {list(log_decay.shape)} and "
            f"requires_grad={log_decay.requires_grad}; give a constant [{q.shape[2]}], one a head"
        )
    check_devices("lightning_attention", q=q, log_decay=log_decay)
    if backend.debugging():
        check_decay_values("lightning_attention", log_decay)
    arguments = (q, k, v, log_decay, initial_state, cu_seqlens, float(scale))
    if backend.use_reference():
        o, final_state = lightning_reference(*arguments)
    else:
        o, final_state = _direct(*arguments, output_final_state)
    return o, final_state if output_final_state else None


@torch.library.custom_op("linnet::lightning", mutates_args=())
def lightning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    wants_final: bool = True,
) -> tuple[Tensor, Tensor]:
    o, final = _forward(q, k, v, log_decay, initial_state, cu_seqlens, scale, wants_final)
    return o, final if wants_final else no_state(q)


@torch.library.custom_op("linnet::lightning_backward", mutates_args=())
def lightning_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    do: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dinitial = _gradients(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal)
    return dq, dk, dv, no_state(q) if initial_state is None else dinitial


def _forward(q, *arguments):
    with exact(q):
        return _form(q).lightning_forward(q, *arguments)


def _gradients(q, *arguments):
    with exact(q):
        return _form(q).lightning_backward(q, *arguments)


def _form(q: Tensor):
    return (
        importlib.import_module("linnet.ops.lightning.triton")
        if backend.use_triton("lightning", q.is_cuda)
        else chunked
    )


@lightning.register_fake
def _(q, k, v, log_decay, initial_state, cu_seqlens, scale, wants_final=True):
    final = _empty_state(q, k, v, cu_seqlens) if wants_final else no_state(q)
    return torch.empty_like(v, memory_format=torch.contiguous_format), final


@lightning_backward.register_fake
def _(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal):
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, no_state(q) if initial_state is None else _empty_state(q, k, v, cu_seqlens)


def _empty_state(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    shape = (count_states(cu_seqlens, q.shape[0]), *q.shape[2:], v.shape[-1])
    return q.new_empty(shape, dtype=state_dtype(q, k, v))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.wants_final = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dfinal):
    saved = ctx.saved_tensors  # once: recomputation gives them out only once
    v, initial_state = saved[2], saved[4]
    do = torch.zeros_like(v) if do is None else do
    # A sum over all results gives an empty gradient to the empty one.
    *grads, dinitial = _direct_backward(*saved, ctx.scale, do, dfinal if ctx.wants_final else None)
    return *grads, None, None if initial_state is None else dinitial, None, None, None


lightning.register_autograd(_backward, setup_context=_setup_context)
_direct = shorten(lightning, _setup_context, _backward, implementation=_forward)
_direct_backward = shorten(lightning_backward, implementation=_gradients)


def _choose_axes(arguments, in_dims):
    """Models fold into the batch; where decays differ by model or documents are packed (B = 1), into the heads."""
    heads = in_dims[3] is not None or arguments[5] is not None
    return (2, 2, 2, 0, 1, None, 2, 1) if heads else (0, 0, 0, None, 0, None, 0, 0)


register_folding(lightning, lightning_backward, _choose_axes, gradients=(0, 1, 2, 4))

# FLOPs: 2 a multiply-add, in chunks of 64 whatever form runs, matrix products only; the masked half of a chunk's scores
# is computed, and so counted.


@register_flop_formula(torch.ops.linnet.lightning)
def lightning_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """2 C (K + V) + 4 K V a token and head: scores, scores with v, the state's update and use."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * H * (count_pairs(T, chunked.CHUNK) * 2 * (K + V) + 4 * T * K * V)


@register_flop_formula(torch.ops.linnet.lightning_backward)
def lightning_backward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """2 C (3 K + 2 V) + 10 K V a token and head: two scores, three products with them, five with states."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * H * (count_pairs(T, chunked.CHUNK) * 2 * (3 * K + 2 * V) + 10 * T * K * V)
