"""The long convolution: a causal filter as long as the sequence, given in modes or by its values (Hyena; paper 004)."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from linnet.ops import backend
from linnet.ops.arguments import check_decay_values, check_devices, check_state
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.direct import shorten
from linnet.ops.documents import check_documents, count_states
from linnet.ops.folding import fold, unfold
from linnet.ops.longconv import chunked
from linnet.ops.longconv.filter import ModalFilter, kernel_of, powers, read_table, turn, write_table
from linnet.ops.longconv.heads import filtered_attention
from linnet.ops.longconv.reference import kernel_reference, modal_reference
from linnet.ops.longconv.step import long_convolution_step
from linnet.ops.looping import each

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
    if isinstance(filter, Tensor):
        if backend.use_reference():
            return kernel_reference(x, filter, cu_seqlens), None
        kernel = filter[:, : x.shape[1]]
        return _convolve(x, pad(kernel, (0, x.shape[1] - kernel.shape[1])), cu_seqlens), None
    if backend.debugging():
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
    return _direct(x.unflatten(2, (kernel.shape[0], -1))[None], kernel[None], cu_seqlens)[0].flatten(2)


# What a state adds: the response of the filter to what came before, and the modes after the last token.


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


@torch.library.custom_op("linnet::convolve", mutates_args=())
def convolve(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """x [M, B, T, F, P], kernel [M, F, T]: an axis of models before those of `chunked`, for vmap."""
    with exact(x):
        return chunked.convolve_forward(x, kernel, cu_seqlens)


@torch.library.custom_op("linnet::convolve_backward", mutates_args=())
def convolve_backward(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor]:
    with exact(x):
        return chunked.convolve_backward(x, kernel, cu_seqlens, dy)


@convolve.register_fake
def _(x, kernel, cu_seqlens):
    return x.new_empty(x.shape)


@convolve_backward.register_fake
def _(x, kernel, cu_seqlens, dy):
    return x.new_empty(x.shape), kernel.new_empty(kernel.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    x, kernel, cu_seqlens = ctx.saved_tensors
    return *_direct_backward(x, kernel, cu_seqlens, dy), None


convolve.register_autograd(_backward, setup_context=_setup_context)
_direct = shorten(convolve, _setup_context, _backward)
_direct_backward = shorten(convolve_backward)


@convolve.register_vmap
def _(info, in_dims, *tensors):
    if in_dims[2] is not None:
        outputs, dims = each(lambda *call: (convolve(*call),), info.batch_size, in_dims, tensors)
        return outputs[0], dims[0]
    x, kernel, cu_seqlens = tensors
    return unfold(convolve(*_fold(info.batch_size, in_dims, x, kernel), cu_seqlens), info.batch_size, 0), 0


@convolve_backward.register_vmap
def _(info, in_dims, *tensors):
    if in_dims[2] is not None:
        return each(convolve_backward, info.batch_size, in_dims, tensors)
    x, kernel, cu_seqlens, dy = tensors
    x, kernel, dy = _fold(info.batch_size, (*in_dims[:2], in_dims[3]), x, kernel, dy)
    grads = convolve_backward(x, kernel, cu_seqlens, dy)
    return tuple(unfold(grad, info.batch_size, 0) for grad in grads), (0, 0)


def _fold(size: int, dims: tuple, *tensors: Tensor) -> list[Tensor]:
    return [fold(x, dim, size, 0) for x, dim in zip(tensors, dims, strict=False)]


# FLOPs, 2 a multiply-add: the whole Toeplitz matrix, zeros included, because it is multiplied; or transforms of length
# n at 2.5 n log2 n (half of a complex one's 5 n log2 n) and a complex product a frequency. Documents count as one.


def _transforms(x_shape, of_x: int, of_kernel: int, products: int) -> int:
    models, batch, length, filters, shared = x_shape
    size, rows = chunked.fft_size(length), models * filters * batch * shared
    transforms = of_x * rows + of_kernel * models * filters
    return round(transforms * 2.5 * size * math.log2(size)) + products * rows * 3 * size


@register_flop_formula(torch.ops.linnet.convolve)
def convolve_flops(x_shape, kernel_shape, *_, **__) -> int:
    """2 T a token and channel, or two transforms a channel and one a filter."""
    models, batch, length, filters, shared = x_shape
    if chunked.is_short(length, batch * shared):
        return 2 * models * batch * filters * shared * length**2
    return _transforms(x_shape, 2, 1, 1)


@register_flop_formula(torch.ops.linnet.convolve_backward)
def convolve_backward_flops(x_shape, kernel_shape, *_, **__) -> int:
    """4 T a token and channel, or three transforms a channel and two a filter."""
    models, batch, length, filters, shared = x_shape
    if chunked.is_short(length, batch * shared):
        return 4 * models * batch * filters * shared * length**2
    return _transforms(x_shape, 3, 2, 2)


def _check(x, filter, initial_state, output_final_state, cu_seqlens) -> None:
    first = filter if isinstance(filter, Tensor) else filter.theta
    if x.ndim != 3 or first.ndim != 2 or 0 in x.shape or 0 in first.shape or x.shape[2] % first.shape[0]:
        raise ValueError(
            f"{OP}: x {list(x.shape)}, filter {list(first.shape)}; give x [B, T, D] and filters [F, modes] or "
            "[F, lags], nothing empty, where F divides D"
        )
    if not (x.is_floating_point() and first.is_floating_point()):
        raise ValueError(f"{OP}: x and filter have dtypes {x.dtype}, {first.dtype}; give floating-point tensors")
    parts = {"filter": filter} if isinstance(filter, Tensor) else filter._asdict()
    check_devices(OP, x=x, **parts, initial_state=initial_state, cu_seqlens=cu_seqlens)
    check_documents(cu_seqlens, x.shape[0])
    if isinstance(filter, Tensor):
        if initial_state is not None or output_final_state:
            raise ValueError(f"{OP}: a filter given by its values has no state; give a ModalFilter")
        return
    if filter.log_decay.shape != first.shape or filter.residue.shape != (*first.shape, 2):
        raise ValueError(
            f"{OP}: theta {list(first.shape)}, log_decay {list(filter.log_decay.shape)}, residue "
            f"{list(filter.residue.shape)}; give [F, modes], the same, and [F, modes, 2]"
        )
    if filter.skip is not None and filter.skip.shape != first.shape[:1]:
        raise ValueError(f"{OP}: skip {list(filter.skip.shape)} beside {first.shape[0]} filters; give one a filter")
    states = count_states(cu_seqlens, x.shape[0])
    check_state(OP, initial_state, (states, x.shape[2], first.shape[1], 2), state_dtype(x, first))
