"""The short convolution: a few taps per channel on the tokens before, and an activation (Mamba, Hyena)."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend, sequence
from linnet.ops.arguments import check_devices
from linnet.ops.chunks import state_dtype
from linnet.ops.documents import check_documents, count_states
from linnet.ops.registration import register, register_step
from linnet.ops.shortconv import chunked
from linnet.ops.shortconv.chunked import convolve_documents, last_inputs
from linnet.ops.stepping import use_kernel

__all__ = ["short_convolution", "short_convolution_step", "short_convolution_steps"]

OP = "shortconv"


@overload
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    offset: Tensor | None = None,
    silu: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor: ...


@overload
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    offset: Tensor | None = None,
    silu: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: Literal[True],
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    offset: Tensor | None = None,
    silu: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y_t = act(sum_j w_j (x_{t - (W - 1) + j} + a) + b), each channel on its own; zeros are before the first token.

    It computes in float32 (float64 for float64 inputs), whatever autocast says, and rounds once; with a state or
    documents it rounds x + a first. Without them it is one launch on a GPU and one for the backward, which keep nothing
    but the inputs. Of rows that are cut into spans (`linnet.ops.sequence`), a rank gets the last W - 1 inputs of the
    rank before.

    Args:
        x: [B, T, D].
        weight: [D, W], the newest token's last.
        bias: b, [D] or None.
        offset: a, [D] or None: the bias of a linear layer that x comes from, which costs no pass of its own here.
        silu: whether the activation is x sigmoid(x); else there is none.
        initial_state: [N, W - 1, D], the inputs (x + a) before the first token of each sequence or document, oldest
            first; None for zeros.
        output_final_state: also return the state after the last token.
        cu_seqlens: int32 [N+1] document boundaries with B = 1; a document does not see the tokens before it.

    Returns:
        y [B, T, D] in the dtype of x; with `output_final_state` also the state [N, W - 1, D], in the dtype of
        `initial_state` (float32 or float64 without one). Gradients reach every argument.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    more = {name: y for name, y in (("bias", bias), ("offset", offset)) if y is not None}
    parts = {"x": x, "weight": weight} | more
    if (
        x.ndim != 3
        or weight.ndim != 2
        or weight.shape[0] != x.shape[2]
        or any(y.shape != x.shape[2:] for y in more.values())
        or 0 in weight.shape
        or not all(y.is_floating_point() for y in parts.values())
    ):
        shapes = ", ".join(f"{name} {list(y.shape)} {y.dtype}" for name, y in parts.items())
        raise ValueError(
            f"short_convolution: {shapes}; give floating-point x [B, T, D], weight [D, W], and bias and offset [D] "
            "or None, with at least one channel and tap"
        )
    check_devices("short_convolution", **parts)
    if sequence.span() is not None and weight.shape[1] > 1:
        x, offset = x if offset is None else x + offset.to(x.dtype), None
        initial_state = _inputs_before(x, weight, initial_state, cu_seqlens)
    if initial_state is None and not output_final_state and cu_seqlens is None:
        return _convolve(x, weight, bias, offset, silu)
    check_documents(cu_seqlens, *x.shape[:2])
    size = (count_states(cu_seqlens, x.shape[0]), weight.shape[1] - 1, x.shape[2])
    if initial_state is not None and (tuple(initial_state.shape) != size or not initial_state.is_floating_point()):
        raise ValueError(
            f"short_convolution: initial_state {list(initial_state.shape)} {initial_state.dtype}; give floating-point "
            f"{list(size)}, the inputs before each sequence or document"
        )
    if offset is not None:
        x = x + offset.to(x.dtype)
    if initial_state is None and output_final_state:
        initial_state = x.new_zeros(size, dtype=state_dtype(x, weight))
    if cu_seqlens is not None:
        y = convolve_documents(x, weight, bias, initial_state if size[1] else None, cu_seqlens)
        y = (F.silu(y) if silu else y).to(x.dtype)
        return (y, last_inputs(x, initial_state, cu_seqlens)) if output_final_state else y
    line = torch.cat([initial_state.to(x.dtype), x], 1)
    y = _convolve(line, weight, bias, None, silu)[:, size[1] :]
    return (y, line[:, x.shape[1] :].to(initial_state.dtype)) if output_final_state else y


def _inputs_before(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the inputs before this span [N, W - 1, D]: of the rank before, or the given ones on the first rank."""
    before = sequence.halo(x, weight.shape[1] - 1)
    before = before.to(state_dtype(x, weight) if state is None else state.dtype)
    if cu_seqlens is not None:
        documents = cu_seqlens.shape[0] - 1
        before = sequence.rows_of(cu_seqlens, x.shape[1]).spread_first(before, documents)
    return before if state is None else before + state * float(sequence.span().rank == 0)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | None, silu: bool) -> Tensor:
    """Returns the convolution of x [B, T, D] with zeros before the first token."""
    if x.numel() == 0:
        return x.clone()
    if backend.use_reference():
        taps = weight.to(state_dtype(x, weight))[:, None]
        line = x.to(taps.dtype) if offset is None else x.to(taps.dtype) + offset
        past = F.pad(line.mT, (weight.shape[1] - 1, 0))
        y = F.conv1d(past, taps, None if bias is None else bias.to(taps.dtype), groups=x.shape[2]).mT
        return (F.silu(y) if silu else y).to(x.dtype)
    return convolve.call(x, weight[None], *(None if y is None else y[None] for y in (bias, offset)), silu)


# The registered op has an axis of models, for vmap: weight [M, D, W], bias and offset [M, D], each for R / M rows.
convolve = register(
    "short_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? offset, bool silu",
    *backend.forms(OP, chunked, "forward", "backward"),
    learned=range(4),
    axes=lambda arguments, in_dims: ((0, 0, 0, 0), (0,)),
)


def short_convolution_step(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    bias: Tensor | None = None,
    *,
    offset: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """One token of `short_convolution`: the state drops its oldest input and gets x + a, in place.

    Args:
        x: [B, D].
        weight: [D, W], the newest token's last.
        state: [B, W - 1, D], the inputs before this one, oldest first.
        bias, offset: b and a, [D] or None.
        silu: whether the activation is x sigmoid(x); else there is none.

    Returns:
        y [B, D] in the dtype of x.

    Raises:
        ValueError: shapes do not fit together.
    """
    if (
        x.ndim != 2
        or weight.ndim != 2
        or weight.shape[0] != x.shape[1]
        or tuple(state.shape) != (x.shape[0], weight.shape[1] - 1, x.shape[1])
        or any(y is not None and y.shape != x.shape[1:] for y in (bias, offset))
    ):
        raise ValueError(
            f"short_convolution_step: x {list(x.shape)}, weight {list(weight.shape)}, state {list(state.shape)}; "
            "give x [B, D], weight [D, W], state [B, W - 1, D], and bias and offset [D] or None"
        )
    if offset is None and _has_step_kernel([x], [weight], [state], [bias]):
        return _steps(x, None, None, weight, None, None, bias, None, None, state, None, None, silu)
    if offset is not None:
        x = x + offset.to(x.dtype)
    line = torch.cat([state.to(x.dtype), x[:, None]], 1)
    state.copy_(line[:, 1:])
    y = (line * weight.mT.to(state_dtype(x, weight))).sum(1)
    y = y if bias is None else y + bias
    return (F.silu(y) if silu else y).to(x.dtype)


def short_convolution_steps(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    silu: bool = False,
) -> Sequence[Tensor]:
    """`short_convolution_step` of up to three inputs with as many taps each, in one launch on a GPU."""
    if not _has_step_kernel(inputs, weights, states, biases):
        rows = zip(inputs, weights, states, biases, strict=True)
        return [short_convolution_step(x, weight, state, bias, silu=silu) for x, weight, state, bias in rows]
    several = [[*tensors, None, None][:3] for tensors in (inputs, weights, biases, states)]
    return _steps(*(x for tensors in several for x in tensors), silu).split([x.shape[1] for x in inputs], 1)


def _has_step_kernel(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], states: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> bool:
    kinds = {(x.dtype, w.dtype, w.shape[1], b is None) for x, w, b in zip(inputs, weights, biases, strict=True)}
    alike, x, weight = len(kinds) == 1, inputs[0], weights[0]
    if not alike or len(inputs) > 3 or x.dtype == torch.float64 or not 2 <= weight.shape[1] <= 8:
        return False
    return all(use_kernel(OP, state, *inputs, *weights, *biases) for state in states)


_steps = register_step(
    "short_convolution_steps",
    "Tensor x0, Tensor? x1, Tensor? x2, Tensor weight0, Tensor? weight1, Tensor? weight2, Tensor? bias0, "
    "Tensor? bias1, Tensor? bias2, Tensor(a!) state0, Tensor(b!)? state1, Tensor(c!)? state2, bool silu",
    "shortconv.step_kernel.steps",
    like=lambda x, y, z, *_: x.new_empty(x.shape[0], sum(0 if u is None else u.shape[1] for u in (x, y, z))),
)
