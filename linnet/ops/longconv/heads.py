"""Products convolved with a filter shared by a head, read at once: linear attention whose decay is a long filter.

With z_t = k_t (x) v_t, one filter h a head, and y_t = q_t (h conv z)_t (multi-head Hyena), nothing of z's size need be
formed: y_t = sum_{s <= t} h_{t-s} (q_t k_s) v_s. In chunks of C tokens, with the modes S of what was before a chunk,

    Y = ((Q K^T) * Toeplitz(h)) V + sum_n Re(R_n lambda_n^{t+1} q_t S_n)
    S_n <- lambda_n^C S_n + sum_s lambda_n^{C-1-s} z_s

and because the lambda do not depend on the input, S at all chunks is one product with a Toeplitz matrix of chunks.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from linnet.ops import backend, sequence
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.longconv import chunked
from linnet.ops.longconv.chunked import ModalFilter, kernel_of, make_toeplitz, powers, read_table, write_table
from linnet.ops.longconv.reference import kernel_reference, modal_reference
from linnet.ops.registration import register

OP = "longconv"
# Forward and backward of a layer (width 128, 16 heads, 4,096 tokens) on one CPU core, in ms at T = 32, 128, 256, 1024:
# 167, 117, 180, 1353 where products are formed; 49, 101, 102, 219 in chunks of 32; 49, 123, 133, 277 in chunks of 64.
CHUNK = 32
# Tokens up to which a GPU takes all pairs of them, in kernels; and channels of a head. Forward and backward of 65,536
# tokens and 16 heads on an H200, all pairs against chunks, in ms: 2.2, 10.4 (T = 1,024, 8 channels per head); 7.1, 7.4
# (T = 4,096); 3.3, 45 and 10.9, 35 with 64 channels per head.
LONGEST, WIDEST = 4096, 64


def filtered_attention(q: Tensor, k: Tensor, v: Tensor, filter: ModalFilter | Tensor) -> Tensor:
    """y_t = sum_{s <= t} h_{t-s} (q_t k_s) v_s in every head.

    It is `long_convolution` of the products, for training: it takes and returns no state and knows no documents. On a
    GPU up to 4,096 tokens and 64 channels per head run in kernels, in all pairs; all else in plain PyTorch, near linear
    in T. Of rows that are cut into spans (`linnet.ops.sequence`) every rank takes some of the heads over the whole row.

    Args:
        q, k, v: [B, T, H, D].
        filter: H filters, in modes or by their values h [H, K] of the first K lags (0 after them), in all pairs.

    Returns:
        y [B, T, H, D] in the dtype of q, computed in float32 (float64 for float64 inputs); the kernels round scores to
        bfloat16 for bfloat16 inputs.

    Raises:
        ValueError: q, k, v differ in shape, their heads are not as many as the filters or not a multiple of the spans,
            or rows are cut into spans and the filters are given by their values.

    Source: multi-head Hyena (arXiv:2310.18780, section 4; paper 004, section 3.2).
    """
    count = filter.shape[0] if isinstance(filter, Tensor) else filter.theta.shape[0]
    if q.ndim != 4 or not q.shape == k.shape == v.shape or q.shape[2] != count or 0 in q.shape:
        raise ValueError(
            f"filtered_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, {count} "
            "filters; give q, k, v [B, T, H, D], nothing empty, and one filter per head"
        )
    if (here := sequence.span()) is not None:
        if isinstance(filter, Tensor):
            raise ValueError("filtered_attention: rows cut into spans need filters in modes; give a ModalFilter")
        heads = q.shape[2] // here.size
        q, k, v = (sequence.all_to_all(x, 1, 2) for x in (q, k, v))  # [B, T, H / ranks, D]
        parts = (None if x is None else x.narrow(0, here.rank * heads, heads) for x in filter)
        return sequence.all_to_all(_attend(q, k, v, ModalFilter(*parts)), 2, 1)
    return _attend_values(q, k, v, filter) if isinstance(filter, Tensor) else _attend(q, k, v, filter)


def _attend_values(q: Tensor, k: Tensor, v: Tensor, filter: Tensor) -> Tensor:
    """`filtered_attention` of whole rows with filters that are given by their values."""
    if backend.use_reference():
        products = (k[..., :, None] * v[..., None, :]).flatten(2)
        matrices = kernel_reference(products, filter, None).view(*q.shape, q.shape[3])
        return (q[..., None] * matrices).sum(-2)
    values = filter[:, : q.shape[1]].to(state_dtype(q, filter))
    return attend.call(q, *(x.to(q.dtype) for x in (k, v)), pad(values, (0, q.shape[1] - values.shape[1]))[None])


def _attend(q: Tensor, k: Tensor, v: Tensor, filter: ModalFilter) -> Tensor:
    """`filtered_attention` of whole rows."""
    if backend.use_reference():
        products = (k[..., :, None] * v[..., None, :]).flatten(2)
        matrices = modal_reference(products, filter, None, None)[0].view(*q.shape, q.shape[3])
        return (q[..., None] * matrices).sum(-2)
    dtype, (batch, length) = state_dtype(q, filter.theta), q.shape[:2]
    if length <= LONGEST and q.shape[3] <= WIDEST and dtype == torch.float32 and backend.use_triton(OP, q.is_cuda):
        with exact(q):
            filters = kernel_of(filter.to(dtype), length)
        return attend.call(q, *(x.to(q.dtype) for x in (k, v)), filters[None])
    size = min(length, max(CHUNK, 1 << (length.bit_length() // 2)))
    count = -(-length // size)
    with exact(q):
        filter = filter.to(dtype)
        q_, k_, v_ = (
            pad(x.to(dtype), (0, 0, 0, 0, 0, count * size - length)).unflatten(1, (count, size)).permute(3, 0, 1, 2, 4)
            for x in (q, k, v)
        )  # [H, B, chunks, C, D]
        near = make_toeplitz(kernel_of(filter, size))
        y = torch.matmul(torch.matmul(q_, k_.mT) * near[:, None, None], v_)
        if count > 1:
            keys = _outer(k_, write_table(filter, size).flip(1))
            queries = _outer(q_, read_table(filter, size))
            y = y + torch.matmul(queries, _found(torch.matmul(keys.mT, v_), filter, size))
    return y.permute(1, 2, 3, 0, 4).reshape(batch, count * size, *q.shape[2:])[:, :length].to(q.dtype)


# FLOPs of all pairs, 2 per multiply-add: two products forward; backward the scores, their gradients, and three more.


def _flops(q_shape, *_, **__) -> int:
    rows, length, heads, width = q_shape
    return 4 * rows * heads * width * length**2


def _backward_flops(q_shape, *_, **__) -> int:
    rows, length, heads, width = q_shape
    return 10 * rows * heads * width * length**2


# The registered op has an axis of models in the filters [M, H, T], for vmap: the rows of q, k, v [R, T, H, D] belong to
# the models in turn, R / M each.
attend = register(
    "filtered_attention",
    "Tensor q, Tensor k, Tensor v, Tensor filters",
    *backend.forms(OP, chunked, "attend_forward", "attend_backward"),
    learned=range(4),
    axes=lambda arguments, in_dims: ((0, 0, 0, 0), (0,)),
    flops=_flops,
    backward_flops=_backward_flops,
)


def _outer(x: Tensor, table: Tensor) -> Tensor:
    """x [H, B, chunks, C, D] by table [H, C, N, 2] -> [H, B, chunks, C, N 2 D]."""
    return (x.unsqueeze(-2) * table.flatten(2)[:, None, None, :, :, None]).flatten(-2)


def _found(written: Tensor, filter: ModalFilter, size: int) -> Tensor:
    """Of what each chunk writes to the modes, [H, B, chunks, N 2 D, V]: what each chunk finds in them."""
    heads, batch, count = written.shape[:3]
    modes = filter.theta.shape[1]
    times = size * torch.arange(count - 1, device=written.device)  # a mode reaches the next chunk at the earliest
    # One chunk later at the least.
    real, imaginary = (make_toeplitz(pad(part, (1, 0))) for part in powers(filter, times))
    turn = torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)  # [H, N, 2 n, 2 n]
    parts = written.unflatten(3, (modes, 2, -1)).permute(0, 3, 4, 2, 1, 5, 6)  # [H, N, 2, n, B, D, V]
    states = torch.matmul(turn, parts.reshape(heads, modes, 2 * count, -1)).view(parts.shape)
    return states.permute(0, 4, 3, 1, 2, 5, 6).flatten(3, 5)
