"""The modal convolution without causality: along each axis of a grid, in both directions (MD-TPE, paper 003, eq. 8-9).

Two forms. On a short axis the Toeplitz matrix of a whole axis [D, S, S] is built, and one matrix product per channel
does both directions. On a long one, and on packed rows, `modal_convolution` runs once with a reversed copy of the rows
as further channels. On a CPU core (float32, 32 modes) the product takes an eighth of the time at 14 x 14 and 16 x 16, a
third at 128 x 128, the same for rows of 128, and five times the time for rows of 256.
"""

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import documents
from linnet.ops.modal import modal_convolution

LONGEST_PRODUCT = 128  # tokens of an axis

OP = "modal_grid_convolution"


def modal_grid_convolution(x: Tensor, log_decay: Tensor, weight: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """A convolution of each channel along each axis, with kernels that are sums of E decaying exponentials.

        y[s] = sum_a ( sum_{j >= 0} T[a, 0, j] x[s - j 1_a] + sum_{j >= 1} T[a, 1, j] x[s + j 1_a] )
        T[a, r, j] = sum_m weight[a, r, c, m] exp(j log_decay[a, r, c, m])   for channel c

    Each axis reads x. Tokens outside the grid are zero. Time is linear in the tokens, times the side of short axes.

    Args:
        x: [B, s_1, ..., s_A, D]; one axis is a sequence.
        log_decay, weight: [A, R, D, E]; log_decay at most 0. R = 2: along the axis, then against it; R = 1: along it
            only, the causal convolution.
        cu_seqlens: int32 [N+1] with B = 1 and one axis: where documents start, then T. Documents do not see each other.

    Returns:
        y in the shape and dtype of x. Gradients reach x, log_decay and weight.

    Raises:
        ValueError: shapes that do not go together.
    """
    axes = log_decay.shape[0] if log_decay.ndim == 4 else 0
    fits = x.ndim == axes + 2 and log_decay.shape == weight.shape and log_decay.shape[2] == x.shape[-1]
    if axes == 0 or not fits or log_decay.shape[1] not in (1, 2) or (cu_seqlens is not None and axes > 1):
        raise ValueError(
            f"{OP}: x {list(x.shape)}, log_decay {list(log_decay.shape)}, weight {list(weight.shape)}"
            f"{'' if cu_seqlens is None else ', cu_seqlens'}; give x [B, s_1, ..., s_A, D], log_decay and weight "
            "[A, 1 or 2, D, E], and cu_seqlens only with one axis"
        )
    with exact(x):
        if backend.use_reference():
            return reference(x, log_decay, weight, cu_seqlens)
        sides = x.shape[1:-1]
        short = [cu_seqlens is None and 0 < side <= LONGEST_PRODUCT for side in sides]
        parts = [modal_form(x, log_decay, weight, axis, cu_seqlens) for axis in range(axes) if not short[axis]]
        if any(short):
            parts.append(product_form(x, log_decay, weight, [axis for axis in range(axes) if short[axis]]))
        return sum(parts[1:], parts[0])


def reference(x: Tensor, log_decay: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The definition: one offset after another. Arguments as in `modal_grid_convolution`."""
    dtype = state_dtype(x, log_decay, weight)
    values, outputs = x.to(dtype), []
    for _, start, end in documents(cu_seqlens, *x.shape[:2]) if cu_seqlens is not None else [(None, 0, x.shape[1])]:
        part = values[:, start:end]
        y = torch.zeros_like(part)
        for axis, side in enumerate(part.shape[1:-1]):
            kernels = kernel(log_decay[axis].to(dtype), weight[axis].to(dtype), side)
            for j in range(side):
                late, early = (part.new_zeros(part.shape).movedim(1 + axis, 0) for _ in range(2))
                line = part.movedim(1 + axis, 0)
                late[j:] = kernels[0, :, j] * line[: side - j]
                y = y + late.movedim(0, 1 + axis)
                if j and len(kernels) == 2:
                    early[: side - j] = kernels[1, :, j] * line[j:]
                    y = y + early.movedim(0, 1 + axis)
        outputs.append(y)
    return torch.cat(outputs, 1).to(x.dtype)


def kernel(log_decay: Tensor, weight: Tensor, size: int) -> Tensor:
    """T [R, D, size] for parameters [R, D, E]."""
    exponents = torch.arange(1, max(size, 1), dtype=log_decay.dtype, device=log_decay.device)
    powers = (log_decay[:, :, None] * exponents[:, None]).exp()  # from 1 on: 0 times log 0 is not a number
    return torch.cat([weight.sum(-1, keepdim=True), (powers * weight[:, :, None]).sum(-1)], -1)


def toeplitz(log_decay: Tensor, weight: Tensor, side: int) -> Tensor:
    """The matrix of an axis [D, S, S], for parameters [R, D, E]."""
    taps = kernel(log_decay, weight, side)
    behind = taps[1, :, 1:].flip(1) if len(taps) == 2 else taps.new_zeros(taps.shape[1], side - 1)
    # Row s is T_{s - u} for u = 0 .. S - 1: a window of the kernel, reversed.
    return torch.cat([behind, taps[0]], 1).unfold(1, side, 1).flip(2)


def product_form(x: Tensor, log_decay: Tensor, weight: Tensor, axes: list[int]) -> Tensor:
    """The sum over `axes` of products with the Toeplitz matrix of a whole axis."""
    dtype, sides = state_dtype(x, log_decay, weight), x.shape[1:-1]
    if len(sides) == 1:  # a flat transpose, for which PyTorch has a fast copy
        flat = x.flatten(0, 1).t().contiguous().view(x.shape[-1], x.shape[0], *sides)
    else:
        # [D, s_1, B, s_2, ..., s_A]: products along the first and the last axis need no matrices for each image.
        flat = x.movedim(-1, 0).transpose(1, 2).contiguous()
    parts = []
    for axis in axes:
        side = sides[axis]
        matrix = toeplitz(log_decay[axis].to(dtype), weight[axis].to(dtype), side).to(x.dtype)
        if axis == len(sides) - 1:
            y = torch.bmm(flat.flatten(1, -2), matrix.mT)
        elif axis == 0:
            y = torch.bmm(matrix, flat.flatten(2))
        else:
            y = torch.matmul(matrix[:, None], flat.flatten(1, 1 + axis).flatten(3))
        parts.append(y.reshape(flat.shape))
    y = sum(parts[1:], parts[0])
    if len(sides) == 1:
        return y.flatten(1).t().contiguous().view(x.shape)
    return y.transpose(1, 2).movedim(0, -1).contiguous()


def modal_form(x: Tensor, log_decay: Tensor, weight: Tensor, axis: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """The share of one axis by `modal_convolution`: both directions in one call, as channels."""
    lines = x.movedim(1 + axis, -2)
    rows, (log_decay, weight) = lines.flatten(0, -3), (log_decay[axis], weight[axis])
    if len(log_decay) == 1:
        y, _ = modal_convolution(rows, log_decay[0], weight[0], cu_seqlens=cu_seqlens)
    else:
        both = torch.cat([rows, _reverse(rows, cu_seqlens)], -1)
        both, _ = modal_convolution(both, log_decay.flatten(0, 1), weight.flatten(0, 1), cu_seqlens=cu_seqlens)
        ahead, behind = both.chunk(2, -1)
        # Against the axis the convolution begins at the next token.
        y = ahead + _reverse(behind, cu_seqlens) - (weight[1].sum(-1) * rows).to(x.dtype)
    return y.view(lines.shape).movedim(-2, 1 + axis)


def _reverse(rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Rows [R, S, D] from the last token to the first, each document in its place."""
    if cu_seqlens is None:
        return rows.flip(1)
    offsets, index = cu_seqlens.to(torch.int64), torch.arange(rows.shape[1], device=rows.device)
    document = torch.searchsorted(offsets[1:], index, right=True)
    return rows[:, offsets[document] + offsets[document + 1] - 1 - index]
