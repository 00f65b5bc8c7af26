"""The long convolution: a causal filter as long as the sequence, given in modes or by its values (Hyena; paper 004)."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from linnet.ops import backend, sequence
from linnet.ops.arguments import check_decay_values, check_sequence
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.longconv import chunked
from linnet.ops.longconv.chunked import ModalFilter, kernel_of, powers, read_table, turn, write_table
from linnet.ops.longconv.heads import filtered_attention
from linnet.ops.longconv.reference import kernel_reference, modal_reference
from linnet.ops.registration import register
from linnet.ops.spans import check_span

__all__ = ["ModalFilter", "filtered_attention", "long_convolution", "long_convolution_step"]

OP = "long_convolution"


def long_convolution(
    x: Tensor,
    filter: ModalFilter | Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y_t = sum_{s <= t} h_{t-s} x_s, with a filter as long as the sequence.

    In modes, h_t = skip [t = 0] + sum_n Re(R_n lambda_n^t), which is the recurrence u_t = lambda u_{t-1} + x_t,
    y_t = sum_n Re(R_n u_t) + skip x_t. Computes in float32 (float64 for float64 inputs).

    What is registered is the convolution of x with a kernel; making a kernel of modes, and what a state adds, are a few
    small matrix products in plain PyTorch (with documents and a state, of size [T, D, N, 2]). So training pays for
    nothing but the convolution, and everything is differentiable, batches, compiles and is counted.

    Args:
        x: [B, T, D].
        filter: F filters, each shared by D / F neighbouring channels: a `ModalFilter`, or the values h [F, K] of the
            first K lags (0 after them).
        initial_state: u [N, D, modes, 2] (real, imaginary), float32 (float64 for float64 inputs), the state after the
            token before the first; None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        y [B, T, D] in the dtype of x, and the final state or None. Gradients reach x, the filter and the state.

    Raises:
        ValueError: shapes or dtypes that do not go together, a state asked of a filter that is given by its values,
            offsets that do not rise from 0 to T.

    Source: Hyena, in paper 004, section 3 and appendix C; the modal form of its filter as in Laughing Hyena
    (arXiv:2310.18780).
    """
    _check(x, filter, initial_state, output_final_state, cu_seqlens)
    if sequence.span() is not None:
        return _convolve_span(x, filter, initial_state, output_final_state, cu_seqlens)
    if isinstance(filter, Tensor):
        if backend.use_reference():
            return kernel_reference(x, filter, cu_seqlens), None
        kernel = filter[:, : x.shape[1]]
        return _convolve(x, pad(kernel, (0, x.shape[1] - kernel.shape[1])), cu_seqlens), None
    check_decay_values(OP, filter.log_decay)
    if backend.use_reference():
        y, final_state = modal_reference(x, filter, initial_state, cu_seqlens)
        return y, final_state if output_final_state else None
    with exact(x):
        filter = filter.to(state_dtype(x, filter.theta))
        y = _convolve(x, kernel_of(filter, x.shape[1]), cu_seqlens)
        if initial_state is not None:
            y = y + _read(x, filter, initial_state, cu_seqlens).to(x.dtype)
        return y, _last(x, filter, initial_state, cu_seqlens) if output_final_state else None


def _convolve(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return convolve.call(x.unflatten(2, (kernel.shape[0], -1))[None], kernel[None], cu_seqlens)[0].flatten(2)


def _convolve_span(x, filter, initial_state, output_final_state, cu_seqlens) -> tuple[Tensor, Tensor | None]:
    """`long_convolution` of a span of longer rows (`linnet.ops.sequence`): with the state that enters it."""
    if isinstance(filter, Tensor):
        raise ValueError(
            f"{OP}: a filter given by its values has no state to pass from rank to rank; give a ModalFilter, or whole "
            "rows of some channels (linnet.ops.sequence.all_to_all)"
        )
    check_span(initial_state, cu_seqlens)
    with exact(x):
        filter = filter.to(state_dtype(x, filter.theta))
        y = _convolve(x, kernel_of(filter, x.shape[1]), cu_seqlens)
        rows = None if cu_seqlens is None else sequence.rows_of(cu_seqlens, x.shape[1])
        length = x.shape[1] if rows is None else x.shape[1] // rows.before.shape[0]
        over = torch.stack(powers(filter, torch.full((1,), length, device=x.device)), -1).transpose(1, 2)
        # From [F, 1, N, 2].
        over = over.expand(-1, x.shape[2] // filter.theta.shape[0], -1, -1).flatten(0, 1)[None]
        if rows is None:
            state = _sum_up(x, filter)
        else:
            state = rows.select_last(_last(x, filter, None, cu_seqlens))
            over = over * sequence.match(rows.passing, over)
        if initial_state is not None:  # of the whole row: it enters on the first rank
            initial_state = initial_state * float(sequence.span().rank == 0)
            state = sequence.join_pairs((initial_state, None), (state, over))[0]
        state = sequence.exchange(state, over, kind="pairs")
        if initial_state is not None:
            state = state + initial_state
        if rows is None:
            y = y + _read_far(x, filter, state).to(x.dtype)
        else:
            state = rows.spread_first(state, cu_seqlens.shape[0] - 1)
            y = y + _read(x, filter, state, cu_seqlens).to(x.dtype)
        return y, _last(x, filter, state, cu_seqlens) if output_final_state else None


# `_read` and `_last` of long rows: in two levels, so that tables have about sqrt(T) entries.


def _sum_up(x: Tensor, filter: ModalFilter) -> Tensor:
    """[B, D, modes, 2]: the modes after the last token, from zero."""
    filters, length = filter.theta.shape[0], x.shape[1]
    size = max(1, round(length**0.5))
    count = -(-length // size)
    values = pad(x.to(filter.theta.dtype), (0, 0, count * size - length, 0)).unflatten(1, (count, size))
    table = write_table(filter, size).flip(1)
    chunks = torch.einsum("fsnc,bksfp->bkfpnc", table, values.unflatten(3, (filters, -1)))
    far = size * torch.arange(count - 1, -1, -1, device=x.device)
    real, imaginary = (part.permute(2, 0, 1)[:, :, None] for part in powers(filter, far))
    return turn(chunks, real, imaginary).sum(1).flatten(1, 2)


def _read_far(x: Tensor, filter: ModalFilter, state: Tensor) -> Tensor:
    """[B, T, D]: what the tokens read of the state before the first."""
    filters, length = filter.theta.shape[0], x.shape[1]
    size = max(1, round(length**0.5))
    count = -(-length // size)
    far = size * torch.arange(count, device=x.device)
    real, imaginary = (part.permute(2, 0, 1)[:, :, None] for part in powers(filter, far))
    chunks = turn(state.unflatten(1, (filters, -1))[:, None], real, imaginary)  # [B, count, F, P, N, 2]
    y = torch.einsum("ftnc,bkfpnc->bktfp", read_table(filter, size), chunks)
    return y.flatten(1, 2)[:, :length].flatten(2)


# The part of a state: the response of the filter to what came before, and the modes after the last token.


def _read(x: Tensor, filter: ModalFilter, state: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[B, T, D]: what the tokens read of the state before the first."""
    table, state = read_table(filter, x.shape[1]), state.unflatten(1, (filter.theta.shape[0], -1))
    if cu_seqlens is None:
        return torch.einsum("ftnc,bfpnc->btfp", table, state).flatten(2)
    document, passed, _ = _places(x, cu_seqlens)
    return (table[:, passed].transpose(0, 1)[:, :, None] * state[document]).sum((-2, -1)).flatten(1)[None]


def _last(x: Tensor, filter: ModalFilter, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """[N, D, modes, 2]: the modes after the last token."""
    filters, length = filter.theta.shape[0], x.shape[1]
    table = write_table(filter, length)
    values = x.to(table.dtype).unflatten(2, (filters, -1))
    if cu_seqlens is None:
        last = torch.einsum("fsnc,bsfp->bfpnc", table.flip(1), values)
        lengths = torch.full((1,), length, device=x.device)
    else:
        document, _, left = _places(x, cu_seqlens)
        terms = table[:, left].transpose(0, 1)[:, :, None] * values[0][..., None, None]
        last = terms.new_zeros(cu_seqlens.shape[0] - 1, *terms.shape[1:]).index_add(0, document, terms)
        lengths = cu_seqlens.diff()
    if state is not None:
        real, imaginary = (part.permute(2, 0, 1)[:, :, None] for part in powers(filter, lengths))
        last = last + turn(state.unflatten(1, (filters, -1)), real, imaginary)
    return last.flatten(1, 2)


def _places(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token: its document, and how many of the document's tokens are before and after it. Each [T]."""
    index, offsets = torch.arange(x.shape[1], device=x.device), cu_seqlens.to(torch.int64)
    document = (index[:, None] >= offsets[1:]).sum(1)
    return document, index - offsets[document], offsets[document + 1] - 1 - index


# FLOPs, 2 per multiply-add: the whole Toeplitz matrix, zeros too, because it is multiplied; or transforms of length
# n at 2.5 n log2 n (half of a complex one's 5 n log2 n) and a complex product per frequency. Documents count as one.


def _transforms(x_shape, of_x: int, of_kernel: int, products: int) -> int:
    models, batch, length, filters, shared = x_shape
    size, rows = chunked.fft_size(length), models * filters * batch * shared
    transforms = of_x * rows + of_kernel * models * filters
    return round(transforms * 2.5 * size * math.log2(size)) + products * rows * 3 * size


def _flops(x_shape, kernel_shape, *_, **__) -> int:
    """2 T per token and channel, or two transforms per channel and one per filter."""
    models, batch, length, filters, shared = x_shape
    if chunked.is_short(length, batch * shared):
        return 2 * models * batch * filters * shared * length**2
    return _transforms(x_shape, 2, 1, 1)


def _backward_flops(x_shape, kernel_shape, *_, **__) -> int:
    """4 T per token and channel, or three transforms per channel and two per filter."""
    models, batch, length, filters, shared = x_shape
    if chunked.is_short(length, batch * shared):
        return 4 * models * batch * filters * shared * length**2
    return _transforms(x_shape, 3, 2, 2)


# x [M, B, T, F, P], kernel [M, F, T]: an axis of models before those of `chunked`, for vmap.
convolve = register(
    "convolve",
    "Tensor x, Tensor kernel, Tensor? cu_seqlens",
    chunked.convolve_forward,
    chunked.convolve_backward,
    learned=range(2),
    axes=lambda arguments, in_dims: None if in_dims[2] is not None else ((0, 0, None), (0,)),
    flops=_flops,
    backward_flops=_backward_flops,
)


def _check(x, filter, initial_state, output_final_state, cu_seqlens) -> None:
    first = filter if isinstance(filter, Tensor) else filter.theta
    if x.ndim != 3 or first.ndim != 2 or 0 in x.shape or 0 in first.shape or x.shape[2] % first.shape[0]:
        raise ValueError(
            f"{OP}: x {list(x.shape)}, filter {list(first.shape)}; give x [B, T, D] and filters [F, modes] or "
            "[F, lags], nothing empty, where F divides D"
        )
    parameters = {"filter": filter} if isinstance(filter, Tensor) else filter._asdict()
    if isinstance(filter, Tensor) and (initial_state is not None or output_final_state):
        raise ValueError(f"{OP}: a filter given by its values has no state; give a ModalFilter")
    inputs = {"x": x} | {name: y for name, y in parameters.items() if y is not None}
    state_shape = x.shape[2], first.shape[1], 2
    check_sequence(OP, inputs, initial_state, state_shape, state_dtype(x, first), cu_seqlens)
    if isinstance(filter, Tensor):
        return
    if filter.log_decay.shape != first.shape or filter.residue.shape != (*first.shape, 2):
        raise ValueError(
            f"{OP}: theta {list(first.shape)}, log_decay {list(filter.log_decay.shape)}, residue "
            f"{list(filter.residue.shape)}; give [F, modes], the same, and [F, modes, 2]"
        )
    if filter.skip is not None and filter.skip.shape != first.shape[:1]:
        raise ValueError(f"{OP}: skip {list(filter.skip.shape)} for {first.shape[0]} filters; give one per filter")


def long_convolution_step(x: Tensor, filter: ModalFilter, state: Tensor, *, channels: Tensor | None = None) -> Tensor:
    """One token of `long_convolution`: state <- lambda state + x, in place.

    Args:
        x: [B, D].
        filter: F filters of N modes; F divides D.
        state: [B, D, N, 2], float32 or float64.
        channels: int64 [B, C], the channels of each sequence whose output is computed (all states are written); None
            for all of them.

    Returns:
        y [B, D] or [B, C] in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    filters, modes = filter.theta.shape
    if x.ndim != 2 or x.shape[1] % filters or tuple(state.shape) != (*x.shape, modes, 2):
        raise ValueError(
            f"long_convolution_step: x {list(x.shape)}, {filters} filters of {modes} modes, state {list(state.shape)}; "
            "give x [B, D] with D a multiple of the filters, and the state [B, D, modes, 2]"
        )
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"long_convolution_step: state has dtype {state.dtype}; give float32 or float64")
    filter, shared, values = filter.to(state.dtype), x.shape[1] // filters, x.to(state.dtype)
    size = filter.log_decay.exp()
    decay = ((size * part).repeat_interleave(shared, 0) for part in (filter.theta.cos(), filter.theta.sin()))
    modes = turn(state, *decay)
    modes[..., 0] += values[..., None]
    state.copy_(modes)
    if channels is None:
        of_filter = torch.arange(x.shape[1], device=x.device) // shared
    else:
        of_filter = channels // shared
        modes = modes.gather(1, channels[..., None, None].expand(-1, -1, *modes.shape[2:]))
        values = values.gather(1, channels)
    residue = filter.residue[of_filter]
    y = (modes[..., 0] * residue[..., 0] - modes[..., 1] * residue[..., 1]).sum(-1)
    return (y if filter.skip is None else y + filter.skip[of_filter] * values).to(x.dtype)
