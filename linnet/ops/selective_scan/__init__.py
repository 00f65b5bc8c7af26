"""The selective scan: the recurrence of Mamba (paper 004, C.4), with decays and writes that depend on the token."""

import importlib

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linnet.ops import backend
from linnet.ops.arguments import check_devices, check_state
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.direct import shorten
from linnet.ops.documents import check_documents, count_states
from linnet.ops.folding import fold_all, unfold
from linnet.ops.looping import each
from linnet.ops.selective_scan import chunked
from linnet.ops.selective_scan.reference import selective_reference
from linnet.ops.selective_scan.shapes import Shape, runs_in_kernels
from linnet.ops.selective_scan.step import selective_step

__all__ = ["selective_scan", "selective_step"]

OP = "selective_scan"


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    delta_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """s_t = exp(delta_t A) s_{t-1} + delta_t B_t x_t,  y_t = C_t s_t + D x_t, with N states a channel.

    Time is linear in T, and states exist for a chunk of tokens at a time; on a GPU one in 8 is kept for the backward.
    Computes in float32 (float64 for float64 inputs).

    Args:
        x, delta: [Bt, T, D]; delta at least 0, the step of each channel (after its softplus).
        A: [D, N], finite and at most 0.
        B, C: [Bt, T, N], what a token writes and reads, the same for all channels.
        D: [D], the skip from x to y, or None.
        delta_bias: [D]; with it delta is what it is before its softplus: softplus(delta + delta_bias) is the step,
            which a GPU makes as it goes.
        initial_state: [Nseq, D, N], float32 (float64 for float64 inputs), the state after the token before the first;
            None for zeros. Nseq is Bt, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [Nseq+1] with Bt = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        y [Bt, T, D] in the dtype of x, and the final state or None. Gradients reach every floating-point argument.

    Raises:
        ValueError: shapes or dtypes that do not go together, offsets that do not rise from 0 to T.

    Source: Gu and Dao 2023 (arXiv:2312.00752), Algorithm 2 with its simplified discretisation of B, as in paper 004.
    """
    _check(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens)
    if backend.debugging():
        _check_values(None if delta_bias is not None else delta, A)
    if backend.use_reference():
        y, final_state = selective_reference(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens)
    else:
        skip, bias = (None if y is None else y[None] for y in (D, delta_bias))
        y, final_state, _ = _direct(x, delta, A[None], B, C, skip, bias, initial_state, cu_seqlens)
    return y, final_state if output_final_state else None


# The registered op has an axis of models before those of A [M, D, N], D and delta_bias [M, D], for vmap: the rows of
# x [R, T, D] (with documents M rows) belong to the models in turn, R / M each. `starts` is what its backward wants.


@torch.library.custom_op("linnet::selective", mutates_args=())
def selective(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    with exact(x):
        return _form(x).selective_forward(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens)


@torch.library.custom_op("linnet::selective_backward", mutates_args=())
def selective_backward(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with exact(x):
        form = _form(x).selective_backward
        return form(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens, starts, dy, dfinal)


def _form(x: Tensor):
    return importlib.import_module(f"linnet.ops.{OP}.triton") if backend.use_triton(OP, x.is_cuda) else chunked


@selective.register_fake
def _(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens):
    in_kernels = backend.use_triton(OP, x.is_cuda) and runs_in_kernels(x, delta, A, B, C)
    starts = Shape.of(x, A, cu_seqlens).starts() if in_kernels else (0,)
    final = _empty_state(x, delta, A, B, C, cu_seqlens)
    return x.new_empty(x.shape), final, final.new_empty(starts)


@selective_backward.register_fake
def _(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens, starts, dy, dfinal):
    dinitial = _empty_state(x, delta, A, B, C, cu_seqlens)
    more = (dinitial.new_empty(0) if y is None else y.new_empty(y.shape) for y in (D, delta_bias))
    return *(y.new_empty(y.shape) for y in (x, delta, A, B, C)), *more, dinitial


def _empty_state(x, delta, A, B, C, cu_seqlens) -> Tensor:
    shape = (Shape.of(x, A, cu_seqlens).sequences, *A.shape[1:])
    return x.new_empty(shape, dtype=state_dtype(x, delta, A, B, C))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dfinal, _):
    inputs = ctx.saved_tensors
    dy = torch.zeros_like(inputs[0]) if dy is None else dy
    grads = _direct_backward(*inputs, dy, dfinal)
    return *(None if x is None else grad for x, grad in zip(inputs, grads, strict=False)), None


selective.register_autograd(_backward, setup_context=_setup_context)
_direct = shorten(selective, _setup_context, _backward)
_direct_backward = shorten(selective_backward)

# Of models under vmap: theirs come first in all axes, which copies nothing.
_AXES = (0, 0, 0, 0, 0, 0, 0, 0, None, 0, 0, 0)


@selective.register_vmap
def _(info, in_dims, *tensors):
    if in_dims[8] is not None:
        return each(selective, info.batch_size, in_dims, tensors)
    outputs = selective(*fold_all(tensors, in_dims, info.batch_size, _AXES))
    return tuple(unfold(x, info.batch_size, 0) for x in outputs), (0, 0, 0)


@selective_backward.register_vmap
def _(info, in_dims, *tensors):
    if in_dims[8] is not None:
        return each(selective_backward, info.batch_size, in_dims, tensors)
    grads = selective_backward(*fold_all(tensors, in_dims, info.batch_size, _AXES))
    axes = tuple(None if i in (5, 6) and tensors[i] is None else 0 for i in range(8))
    return tuple(
        x if axis is None else unfold(x, info.batch_size, 0) for x, axis in zip(grads, axes, strict=True)
    ), axes


# FLOPs of a token, channel and state, 2 a multiply-add; exponentials are free.


@register_flop_formula(torch.ops.linnet.selective)
def selective_flops(x_shape, delta_shape, A_shape, *_, **__) -> int:
    """6: delta A, delta x B, a s + u, C s."""
    B, T, D = x_shape
    return 6 * B * T * D * A_shape[2]


@register_flop_formula(torch.ops.linnet.selective_backward)
def selective_backward_flops(x_shape, delta_shape, A_shape, *_, **__) -> int:
    """23: the states twice again (4 each), g (3), dB, dC, B g (2 each), l (2), its sums with A and delta (2 each)."""
    B, T, D = x_shape
    return 23 * B * T * D * A_shape[2]


def _check(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens) -> None:
    more = {name: y for name, y in (("D", D), ("delta_bias", delta_bias)) if y is not None}
    inputs = {"x": x, "delta": delta, "A": A, "B": B, "C": C} | more
    if (
        x.ndim != 3
        or delta.shape != x.shape
        or A.ndim != 2
        or A.shape[0] != x.shape[2]
        or B.shape != C.shape
        or tuple(B.shape) != (*x.shape[:2], A.shape[1])
        or any(y.shape != x.shape[2:] for y in more.values())
    ):
        raise ValueError(
            f"{OP}: {', '.join(f'{name} {list(y.shape)}' for name, y in inputs.items())}; "
            "give x, delta [Bt, T, D], A [D, N], B, C [Bt, T, N], D and delta_bias [D] or None"
        )
    if 0 in x.shape or 0 in A.shape:
        raise ValueError(f"{OP}: x {list(x.shape)}, A {list(A.shape)}; every size must be at least 1")
    if not all(y.is_floating_point() for y in inputs.values()):
        dtypes = ", ".join(f"{name} {y.dtype}" for name, y in inputs.items())
        raise ValueError(f"{OP}: dtypes are {dtypes}; give floating-point tensors")
    check_devices(OP, **inputs, initial_state=initial_state, cu_seqlens=cu_seqlens)
    check_documents(cu_seqlens, x.shape[0])
    shape = (count_states(cu_seqlens, x.shape[0]), *A.shape)
    check_state(OP, initial_state, shape, state_dtype(x, delta, A, B, C))


def _check_values(delta: Tensor | None, A: Tensor) -> None:
    if (delta is not None and not bool((delta >= 0).all())) or not bool(((A <= 0) & A.isfinite()).all()):
        low, high = 0.0 if delta is None else delta.detach().min().item(), A.detach().max().item()
        raise ValueError(
            f"{OP}: delta must be at least 0 and A finite and at most 0, but delta reaches {low} and A {high}; "
            "give delta after its softplus and A = -exp(A_log)"
        )
