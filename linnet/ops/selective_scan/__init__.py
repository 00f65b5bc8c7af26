"""The selective scan: the recurrence of Mamba (paper 004, C.4), with decays and writes that depend on the token."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from linnet.ops import backend, sequence
from linnet.ops.arguments import check_sequence
from linnet.ops.chunks import state_dtype
from linnet.ops.registration import empty_like, register, register_step
from linnet.ops.selective_scan import chunked
from linnet.ops.selective_scan.chunked import Shape, runs_in_kernels
from linnet.ops.selective_scan.reference import selective_reference
from linnet.ops.spans import cut_linear, split_rows
from linnet.ops.stepping import use_kernel

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
    """s_t = exp(delta_t A) s_{t-1} + delta_t B_t x_t,  y_t = C_t s_t + D x_t, with N states per channel.

    Time is linear in T, and states exist for a chunk of tokens at a time; on a GPU one in 8 is kept for the backward.
    Computes in float32 (float64 for float64 inputs). Weak decays drift in float32: over 100,000 tokens on a CPU the
    error is 6e-6 of the largest output where delta A is -1e-3, 1.8e-4 at -1e-4, and at most 7e-4 at weaker ones
    (docs/kernels.md has the command).

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
    if backend.debugging(delta, A):
        _check_values(None if delta_bias is not None else delta, A)
    if backend.use_reference() and sequence.span() is None:
        y, final_state = selective_reference(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens)
    else:
        skip, bias = (None if y is None else y[None] for y in (D, delta_bias))
        form = selective.call if sequence.span() is None else selective_span
        y, final_state, *_ = form(x, delta, A[None], B, C, skip, bias, initial_state, cu_seqlens)
    return y, final_state if output_final_state else None


# The registered op has an axis of models before those of A [M, D, N], D and delta_bias [M, D], for vmap: the rows of
# x [R, T, D] (with documents M rows) belong to the models in turn, R / M each. The third output, `starts`, are the
# states from which the backward runs the recurrence again.


def _shapes(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens):
    shape = Shape.of(x, A, cu_seqlens)
    final = x.new_empty((shape.sequences, *A.shape[1:]), dtype=state_dtype(x, delta, A, B, C))
    in_kernels = backend.use_triton(OP, x.is_cuda) and runs_in_kernels(x, delta, A, B, C)
    return empty_like(x), final, final.new_empty(shape.starts() if in_kernels else (0,))


def _axes(arguments, in_dims):
    """The axis of models is the first of all tensors, which copies nothing."""
    return None if in_dims[8] is not None else ((0, 0, 0, 0, 0, 0, 0, 0, None), (0, 0, 0))


# FLOPs of a token, channel and state, 2 per multiply-add; exponentials are free.


def _flops(x_shape, delta_shape, A_shape, *_, **__) -> int:
    """6: delta A, delta x B, a s + u, C s."""
    B, T, D = x_shape
    return 6 * B * T * D * A_shape[2]


def _backward_flops(x_shape, delta_shape, A_shape, *_, **__) -> int:
    """23: the states twice again (4 each), g (3), dB, dC, B g (2 each), l (2), its sums with A and delta (2 each)."""
    B, T, D = x_shape
    return 23 * B * T * D * A_shape[2]


selective = register(
    "selective",
    "Tensor x, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? delta_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens",
    *backend.forms(OP, chunked, "selective_forward", "selective_backward"),
    outputs=3,
    learned=range(8),
    kept=(2,),
    auxiliary=1,
    shapes=_shapes,
    axes=_axes,
    flops=_flops,
    backward_flops=_backward_flops,
)


def _decay(rows: int, x, delta, A, B, C, D, delta_bias, *_) -> Tensor:
    """[B, D, N]: the decay over a span."""
    dtype = state_dtype(x, delta, A, B, C)
    delta = split_rows(delta, rows).to(dtype)
    if delta_bias is not None:
        delta = softplus(delta + delta_bias)
    return (delta.sum(1)[..., None] * A.to(dtype)).exp()


selective_span = cut_linear(selective, 7, 8, _decay)


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
    check_sequence(OP, inputs, initial_state, A.shape, state_dtype(x, delta, A, B, C), cu_seqlens)


def _check_values(delta: Tensor | None, A: Tensor) -> None:
    if (delta is not None and not bool((delta >= 0).all())) or not bool(((A <= 0) & A.isfinite()).all()):
        low, high = 0.0 if delta is None else delta.detach().min().item(), A.detach().max().item()
        raise ValueError(
            f"{OP}: delta must be at least 0 and A finite and at most 0, but delta reaches {low} and A {high}; "
            "give delta after its softplus and A = -exp(A_log)"
        )


def selective_step(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor
) -> Tensor:
    """One token of `selective_scan`: state <- exp(delta A) state + delta B x in place, y = C state + D x.

    Args:
        x, delta: [Bt, D].
        A: [D, N], finite and at most 0.
        B, C: [Bt, N].
        D: [D] or None.
        state: [Bt, D, N], float32 or float64.

    Returns:
        y [Bt, D] in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if (
        x.ndim != 2
        or delta.shape != x.shape
        or A.ndim != 2
        or B.shape != C.shape
        or tuple(B.shape) != (x.shape[0], A.shape[1])
        or tuple(state.shape) != (*x.shape, A.shape[1])
        or (D is not None and D.shape != x.shape[1:])
    ):
        raise ValueError(
            f"selective_step: x {list(x.shape)}, delta {list(delta.shape)}, A {list(A.shape)}, B {list(B.shape)}, "
            f"C {list(C.shape)}, state {list(state.shape)}; "
            "give x, delta [Bt, D], A [D, N], B, C [Bt, N], D [D] or None, state [Bt, D, N]"
        )
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"selective_step: state has dtype {state.dtype}; give float32 or float64")
    if use_kernel("selective_scan", state, x, delta, A, B, C, D):
        return _step(x, delta, A, B, C, D, state)
    values, delta = x.to(state.dtype), delta.to(state.dtype)
    state.mul_((delta[..., None] * A.to(state.dtype)).exp_())
    state.addcmul_((delta * values)[..., None], B.to(state.dtype)[:, None])
    y = (state * C.to(state.dtype)[:, None]).sum(-1)
    if D is not None:
        y = y + D.to(state.dtype) * values
    return y.to(x.dtype)


_step = register_step(
    "selective_step",
    "Tensor x, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor(a!) state",
    "selective_scan.triton.step",
)
