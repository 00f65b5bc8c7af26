"""The modal convolution, chunked: per channel a Toeplitz product inside a chunk, and the modes across chunks.

With p_j = exp(j log_decay) [D, E], a chunk of C tokens and the modes u before it, for each channel

    y_t = sum_{s <= t} T_{t-s} x_s + sum_m weight p_{t+1} u         T_j = sum_m weight p_j
    u <- p_C u + sum_s p_{C-1-s} x_s

are four matrix products with the channel as the batch; nothing of size [B, T, D, E] is formed. The tables are built
once a call. The backward makes the transposed products, collects gradients of the tables, and from them those of
log_decay (d p_j / d log_decay = j p_j) and weight.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states, documents

CHUNK = 32


class Tables:
    """Tables of the parameters for chunks of up to C tokens: powers [D, C+1, E], the Toeplitz matrix [D, C, C]."""

    def __init__(self, log_decay: Tensor, weight: Tensor, size: int):
        exponents = torch.arange(size + 1, dtype=log_decay.dtype, device=log_decay.device)
        self.size, self.weight = size, weight
        self.powers = (log_decay[:, None] * exponents[:, None]).exp_()
        self.powers[:, 0] = 1.0  # 0 times log 0 is not a number
        self.kernel = torch.bmm(self.powers[:, :size], weight[:, :, None])[..., 0]
        # Row i of the unfolded kernel is row size - 1 - i of the matrix.
        self.matrix = pad(self.kernel.flip(1), (0, size - 1)).unfold(1, size, 1).flip(1)
        self.read = self.powers[:, 1:] * weight[:, None]
        self.write = self.powers[:, :size].flip(1)

    def of(self, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(matrix, read, write, decay) of a chunk of `length` tokens."""
        first = slice(0, length)
        return self.matrix[:, first, first], self.read[:, first], self.write[:, -length:], self.powers[:, length]


class TableGradients:
    """Collects the gradients of the tables and turns them into those of log_decay and weight."""

    def __init__(self, tables: Tables):
        self.tables = tables
        self.powers = torch.zeros_like(tables.powers)
        self.read = torch.zeros_like(tables.read)
        self.kernel = torch.zeros_like(tables.kernel)

    def add(self, length: int, matrix: Tensor, read: Tensor, write: Tensor, decay: Tensor) -> None:
        # Diagonals become columns: with `length` zeros before each row, a row step of one column more walks along one.
        rows = pad(matrix, (length, 0)).contiguous()
        skewed = rows.as_strided((rows.shape[0], length, length), (2 * length**2, 2 * length + 1, 1), 1)
        self.kernel[:, :length] += skewed.sum(1).flip(1)
        self.read[:, :length] += read
        self.powers[:, :length] += write.flip(1)
        self.powers[:, length] += decay

    def parameters(self) -> tuple[Tensor, Tensor]:
        powers, weight, size = self.tables.powers, self.tables.weight, self.tables.size
        dweight = torch.bmm(self.kernel[:, None], powers[:, :size])[:, 0] + (self.read * powers[:, 1:]).sum(1)
        self.powers[:, :size].addcmul_(self.kernel[..., None], weight[:, None])
        self.powers[:, 1:].addcmul_(self.read, weight[:, None])
        exponents = torch.arange(size + 1, dtype=powers.dtype, device=powers.device)[:, None]
        return (self.powers * powers * exponents).sum(1), dweight


def modal_forward(x, log_decay, weight, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the final modes; arguments as in `modal_convolution`."""
    log_decay, weight, u = _prepare(x, log_decay, weight, initial_state, cu_seqlens)
    tables = Tables(log_decay, weight, min(CHUNK, x.shape[1]))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows, start, end in documents(cu_seqlens, *x.shape[:2]):
        state = u[rows].transpose(0, 1)
        for begin, stop, length in _pieces(start, end, tables.size):
            x_ = _load(x, begin, stop, length, u.dtype)
            matrix, read, write, decay = tables.of(length)
            modes, state = _sweep(_multiply(x_, write), decay, state)
            y_ = _multiply(x_, matrix.mT)
            y_.flatten(1, 2).baddbmm_(modes.flatten(1, 2), read.mT)
            _store(y, y_, begin, stop)
        u[rows] = state.transpose(0, 1)
    return y, u


def modal_backward(x, log_decay, weight, initial_state, cu_seqlens, dy, dfinal) -> tuple[Tensor, ...]:
    """Gradients to x, log_decay, weight and the initial state."""
    dtypes = log_decay.dtype, weight.dtype
    log_decay, weight, u = _prepare(x, log_decay, weight, initial_state, cu_seqlens)
    tables = Tables(log_decay, weight, min(CHUNK, x.shape[1]))
    gradients = TableGradients(tables)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dinitial = (
        torch.zeros_like(u) if dfinal is None else dfinal.to(u.dtype, copy=True, memory_format=torch.contiguous_format)
    )
    for rows, start, end in documents(cu_seqlens, *x.shape[:2]):
        state, kept = u[rows].transpose(0, 1), []
        for begin, stop, length in _pieces(start, end, tables.size):
            x_ = _load(x, begin, stop, length, u.dtype)
            _, _, write, decay = tables.of(length)
            modes, state = _sweep(_multiply(x_, write), decay, state)
            kept.append((begin, stop, length, x_, modes))
        grad = dinitial[rows].transpose(0, 1)
        for begin, stop, length, x_, modes in reversed(kept):
            dy_ = _load(dy, begin, stop, length, u.dtype)
            matrix, read, write, decay = tables.of(length)
            met, grad = _sweep(_multiply(dy_, read), decay, grad, reverse=True)
            dx_ = _multiply(dy_, matrix)
            dx_.flatten(1, 2).baddbmm_(met.flatten(1, 2), write.mT)
            _store(dx, dx_, begin, stop)
            gradients.add(
                length, _contract(dy_, x_).tril_(), _contract(dy_, modes), _contract(x_, met), (modes * met).sum((1, 2))
            )
        dinitial[rows] = grad.transpose(0, 1)
    dlog_decay, dweight = gradients.parameters()
    return dx, dlog_decay.to(dtypes[0]), dweight.to(dtypes[1]), dinitial


def _prepare(x, log_decay, weight, initial_state, cu_seqlens):
    dtype = state_dtype(x, log_decay, weight)
    if initial_state is None:
        u = x.new_zeros(count_states(cu_seqlens, x.shape[0]), *log_decay.shape, dtype=dtype)
    else:
        u = initial_state.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return log_decay.to(dtype), weight.to(dtype), u


def _pieces(start, end, size):
    """(begin, stop, chunk length): all whole chunks at once, then the ragged tail."""
    tail = (end - start) % size
    pieces = [(start, end - tail, size), (end - tail, end, tail)]
    return [(begin, stop, length) for begin, stop, length in pieces if begin < stop]


def _sweep(new, decay, state, reverse=False):
    """state <- decay state + new_i over the chunks (dim 2). Returns the state that each chunk met, and the last."""
    met, decay, end = torch.empty_like(new), decay[:, None], torch.empty_like(new[:, :, 0])
    chunks = range(new.shape[2] - 1, -1, -1) if reverse else range(new.shape[2])
    met[:, :, chunks[0]] = state
    for i, following in zip(chunks, [*(met[:, :, j] for j in chunks[1:]), end], strict=True):
        torch.addcmul(new[:, :, i], decay, met[:, :, i], out=following)
    return met, end


def _multiply(x, matrix):
    """[D, B, n, F] by [D, F, G]."""
    return torch.bmm(x.flatten(1, 2), matrix).unflatten(1, x.shape[1:3])


def _contract(x, y):
    """[D, B, n, F], [D, B, n, G] -> [D, F, G]."""
    return torch.bmm(x.flatten(1, 2).mT, y.flatten(1, 2))


def _load(x, begin, stop, length, dtype):
    """x[:, begin:stop] of [B, T, D] as [D, B, n, C]. As one flat transpose, for which PyTorch has a fast copy."""
    flat = x[:, begin:stop].to(dtype).reshape(-1, x.shape[2])
    return flat.t().contiguous().view(x.shape[2], x.shape[0], -1, length)


def _store(out, value, begin, stop):
    out[:, begin:stop] = value.flatten(1).t().contiguous().view(out.shape[0], stop - begin, -1)
