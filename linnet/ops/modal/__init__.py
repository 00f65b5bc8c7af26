"""The modal convolution: a learned Toeplitz matrix a channel, in modes (TPE; papers 003 and 000)."""

import importlib

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linnet.ops import backend
from linnet.ops.arguments import check_decay_values, check_devices, check_state
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.direct import shorten
from linnet.ops.documents import check_documents, count_states
from linnet.ops.folding import fold_all, unfold
from linnet.ops.looping import each
from linnet.ops.modal import chunked
from linnet.ops.modal.reference import modal_reference
from linnet.ops.modal.step import modal_step

__all__ = ["modal_convolution", "modal_step"]

OP = "modal_convolution"


def modal_convolution(
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A causal convolution of each channel with a sum of E decaying exponentials.

        u_t[c, m] = exp(log_decay[c, m]) u_{t-1}[c, m] + x_t[c],   y_t[c] = sum_m weight[c, m] u_t[c, m]

    which is y_t = sum_j T_j x_{t-j} with T_j = sum_m weight exp(j log_decay). Time and memory are linear in T; computes
    in float32 (float64 for float64 inputs).

    Args:
        x: [B, T, D].
        log_decay, weight: [D, E]; log_decay at most 0, -inf for a mode that sees its own token only.
        initial_state: u [N, D, E], float32 (float64 for float64 inputs), the state after the token before the first;
            None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        y [B, T, D] in the dtype of x, and the final state or None. Gradients reach x, log_decay, weight and the state.

    Raises:
        ValueError: shapes or dtypes that do not go together, offsets that do not rise from 0 to T.

    Source: papers 003, section 4.2 (TPE, a Toeplitz matrix parametrised as a state space model) and 000, A.1.4; they
    give no formula, this is the form with real, learned modes.
    """
    _check(x, log_decay, weight, initial_state, cu_seqlens)
    if backend.debugging():
        check_decay_values(OP, log_decay)
    form = modal_reference if backend.use_reference() else _direct
    y, final_state = form(x, log_decay, weight, initial_state, cu_seqlens)
    return y, final_state if output_final_state else None


@torch.library.custom_op("linnet::modal", mutates_args=())
def modal(
    x: Tensor, log_decay: Tensor, weight: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    with exact(x):
        return _form(x).modal_forward(x, log_decay, weight, initial_state, cu_seqlens)


@torch.library.custom_op("linnet::modal_backward", mutates_args=())
def modal_backward(
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with exact(x):
        return _form(x).modal_backward(x, log_decay, weight, initial_state, cu_seqlens, dy, dfinal)


def _form(x: Tensor):
    return importlib.import_module("linnet.ops.modal.triton") if backend.use_triton("modal", x.is_cuda) else chunked


@modal.register_fake
def _(x, log_decay, weight, initial_state, cu_seqlens):
    return x.new_empty(x.shape), _empty_state(x, log_decay, weight, cu_seqlens)


@modal_backward.register_fake
def _(x, log_decay, weight, initial_state, cu_seqlens, dy, dfinal):
    grads = (y.new_empty(y.shape) for y in (x, log_decay, weight))
    return *grads, _empty_state(x, log_decay, weight, cu_seqlens)


def _empty_state(x: Tensor, log_decay: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    shape = (count_states(cu_seqlens, x.shape[0]), *log_decay.shape)
    return x.new_empty(shape, dtype=state_dtype(x, log_decay, weight))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dfinal):
    x, log_decay, weight, initial_state, cu_seqlens = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    *grads, dinitial = _direct_backward(x, log_decay, weight, initial_state, cu_seqlens, dy, dfinal)
    return *grads, None if initial_state is None else dinitial, None


modal.register_autograd(_backward, setup_context=_setup_context)
_direct = shorten(modal, _setup_context, _backward)
_direct_backward = shorten(modal_backward)


@modal.register_vmap
def _(info, in_dims, *tensors):
    if in_dims[4] is not None:
        return each(modal, info.batch_size, in_dims, tensors)
    by_channel = in_dims[1] is not None or in_dims[2] is not None or tensors[4] is not None
    outputs = modal(*_fold(info.batch_size, in_dims, tensors, by_channel))
    axes = (2, 1) if by_channel else (0, 0)
    return tuple(unfold(x, info.batch_size, axis) for x, axis in zip(outputs, axes, strict=True)), axes


@modal_backward.register_vmap
def _(info, in_dims, *tensors):
    if in_dims[4] is not None:
        return each(modal_backward, info.batch_size, in_dims, tensors)
    # Always by channel: a model has gradients of its own also where the parameters are shared.
    grads, axes = modal_backward(*_fold(info.batch_size, in_dims, tensors, True)), (2, 0, 0, 1)
    return tuple(unfold(x, info.batch_size, axis) for x, axis in zip(grads, axes, strict=True)), axes


def _fold(size: int, dims: tuple, tensors: tuple, by_channel: bool) -> list[Tensor | None]:
    axes = (2, 0, 0, 1, None, 2, 1) if by_channel else (0, None, None, 0, None)
    return fold_all(tensors, dims, size, axes)


# FLOPs: 2 a multiply-add, matrix products of the chunked form only, in chunks of 32 whatever form runs; the empty half
# of a chunk's Toeplitz matrix is counted because it is computed. The tables do not depend on T and are free.


def _pairs(x_shape) -> int:
    """Pairs of tokens that share a chunk, over batch and channels."""
    B, T, D = x_shape
    full, tail = divmod(T, chunked.CHUNK)
    return B * D * (full * chunked.CHUNK**2 + tail**2)


@register_flop_formula(torch.ops.linnet.modal)
def modal_flops(x_shape, log_decay_shape, *_, **__) -> int:
    """2 C + 4 E a token and channel; the 4 E are the 4 n d e of paper 000, A.1.4."""
    B, T, D = x_shape
    return 2 * _pairs(x_shape) + 4 * B * T * D * log_decay_shape[1]


@register_flop_formula(torch.ops.linnet.modal_backward)
def modal_backward_flops(x_shape, log_decay_shape, *_, **__) -> int:
    """4 C + 10 E a token and channel: two Toeplitz products, five with modes (one of them the forward's again)."""
    B, T, D = x_shape
    return 4 * _pairs(x_shape) + 10 * B * T * D * log_decay_shape[1]


def _check(x, log_decay, weight, initial_state, cu_seqlens) -> None:
    if x.ndim != 3 or log_decay.ndim != 2 or log_decay.shape != weight.shape or x.shape[2] != log_decay.shape[0]:
        raise ValueError(
            f"{OP}: x {list(x.shape)}, log_decay {list(log_decay.shape)}, weight {list(weight.shape)}; "
            "give x [B, T, D] and log_decay, weight [D, E]"
        )
    if 0 in x.shape or 0 in log_decay.shape:
        raise ValueError(f"{OP}: x {list(x.shape)}, log_decay {list(log_decay.shape)}; every size must be at least 1")
    if not all(y.is_floating_point() for y in (x, log_decay, weight)):
        raise ValueError(
            f"{OP}: x, log_decay, weight have dtypes {x.dtype}, {log_decay.dtype}, {weight.dtype}; "
            "give floating-point tensors"
        )
    check_devices(OP, x=x, log_decay=log_decay, weight=weight, initial_state=initial_state, cu_seqlens=cu_seqlens)
    check_documents(cu_seqlens, x.shape[0])
    shape = (count_states(cu_seqlens, x.shape[0]), *log_decay.shape)
    check_state(OP, initial_state, shape, state_dtype(x, log_decay, weight))
