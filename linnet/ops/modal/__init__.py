"""The modal convolution: a learned Toeplitz matrix per channel, in modes (TPE; papers 003 and 000)."""

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.arguments import check_decay_values, check_sequence
from linnet.ops.chunks import count_pairs, state_dtype
from linnet.ops.documents import count_states
from linnet.ops.modal import chunked
from linnet.ops.modal.reference import modal_reference
from linnet.ops.registration import empty_like, register, register_step
from linnet.ops.spans import cut_linear, run_form
from linnet.ops.stepping import use_kernel

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
    check_decay_values(OP, log_decay)
    arguments = (x, log_decay, weight, initial_state, cu_seqlens)
    return run_form(modal, modal_span, modal_reference, arguments, output_final_state, asks=False)


def _shapes(x, log_decay, weight, initial_state, cu_seqlens):
    states = (count_states(cu_seqlens, x.shape[0]), *log_decay.shape)
    return empty_like(x), x.new_empty(states, dtype=state_dtype(x, log_decay, weight))


def _axes(arguments, in_dims):
    """Models fold into the channels: each has gradients of its own for parameters, also for shared ones."""
    return None if in_dims[4] is not None else ((2, 0, 0, 1, None), (2, 1))


# FLOPs: 2 per multiply-add, matrix products of the chunked form only, in chunks of 32 whatever form runs; the empty
# half of a chunk's Toeplitz matrix is counted because it is computed. The tables do not depend on T and are free.


def _flops(x_shape, log_decay_shape, *_, **__) -> int:
    """2 C + 4 E per token and channel; the 4 E are the 4 n d e of paper 000, A.1.4."""
    B, T, D = x_shape
    return B * D * (2 * count_pairs(T, chunked.CHUNK) + 4 * T * log_decay_shape[1])


def _backward_flops(x_shape, log_decay_shape, *_, **__) -> int:
    """4 C + 10 E per token and channel: two Toeplitz products, five with modes (one of them the forward's again)."""
    B, T, D = x_shape
    return B * D * (4 * count_pairs(T, chunked.CHUNK) + 10 * T * log_decay_shape[1])


modal = register(
    "modal",
    "Tensor x, Tensor log_decay, Tensor weight, Tensor? initial_state, Tensor? cu_seqlens",
    *backend.forms("modal", chunked, "modal_forward", "modal_backward"),
    outputs=2,
    learned=range(4),
    shapes=_shapes,
    axes=_axes,
    flops=_flops,
    backward_flops=_backward_flops,
)


def _decay(rows: int, x, log_decay, weight, *_) -> Tensor:
    """[1, D, E]: the decay over a span."""
    return (log_decay.to(state_dtype(x, log_decay, weight)) * (x.shape[1] // max(1, rows))).exp()[None]


modal_span = cut_linear(modal, 3, 4, _decay)


def _check(x, log_decay, weight, initial_state, cu_seqlens) -> None:
    if x.ndim != 3 or log_decay.ndim != 2 or log_decay.shape != weight.shape or x.shape[2] != log_decay.shape[0]:
        raise ValueError(
            f"{OP}: x {list(x.shape)}, log_decay {list(log_decay.shape)}, weight {list(weight.shape)}; "
            "give x [B, T, D] and log_decay, weight [D, E]"
        )
    inputs = {"x": x, "log_decay": log_decay, "weight": weight}
    check_sequence(OP, inputs, initial_state, log_decay.shape, state_dtype(*inputs.values()), cu_seqlens)


def modal_step(x: Tensor, log_decay: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """One token of `modal_convolution`: state <- exp(log_decay) state + x, in place.

    Args:
        x: [B, D].
        log_decay, weight: [D, E].
        state: [B, D, E], float32 or float64.

    Returns:
        y [B, D] in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if x.ndim != 2 or log_decay.shape != weight.shape or tuple(state.shape) != (x.shape[0], *log_decay.shape):
        raise ValueError(
            f"modal_step: x {list(x.shape)}, log_decay {list(log_decay.shape)}, weight {list(weight.shape)}, state "
            f"{list(state.shape)}; give x [B, D], log_decay and weight [D, E] and the state [B, D, E]"
        )
    if x.shape[1] != log_decay.shape[0]:
        raise ValueError(f"modal_step: x {list(x.shape)} has not the channels of log_decay {list(log_decay.shape)}")
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"modal_step: state has dtype {state.dtype}; give float32 or float64")
    if use_kernel("modal", state, x, log_decay, weight):
        return _step(x, log_decay, weight, state)
    state.mul_(log_decay.to(state.dtype).exp()).add_(x.to(state.dtype)[..., None])
    return (state * weight.to(state.dtype)).sum(-1).to(x.dtype)


_step = register_step("modal_step", "Tensor x, Tensor log_decay, Tensor weight, Tensor(a!) state", "modal.triton.step")
