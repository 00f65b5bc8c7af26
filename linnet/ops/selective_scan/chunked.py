"""The selective scan on any device, with a hand-written backward: states are spread out for a chunk at a time.

Every state has its own decay at every token, so no matrix product spans tokens: a chunk is the diagonal recurrence
over [Bt, C, N, D] (channels last, where they are most), and C keeps that small beside [Bt, T, D] or in the
cache. Decays are only ever multiplied, so nothing overflows and one that underflows to 0 is a reset. The forward keeps
nothing but its inputs; the backward runs the states once more for what enters each chunk and again inside it, and then

    g_t = C_t dy_t + a_{t+1} g_{t+1},  l_t = a_t g_t s_{t-1}   (a = exp(delta A); l is the gradient of delta A)
    dx = delta (B g) + D dy,  ddelta = x (B g) + sum_n A l,  dA = sum_t delta l,  dB = sum_d delta x g,  dC = sum_d dy s
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from linnet.ops import backend
from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states, documents
from linnet.ops.scan.chunked import recur

# Elements of one tensor of a chunk: on a CPU the few that a chunk has stay near the outer cache, elsewhere large
# enough that launches do not count.
CPU_ELEMENTS, DEVICE_ELEMENTS = 2**20, 2**24
SHORTEST, LONGEST = 16, 256  # tokens


def chunk_length(batch: int, channels: int, states: int, is_cpu: bool) -> int:
    """Tokens per chunk: at least 16, so that the initial states of chunks are at most 1/16 of all states."""
    elements = CPU_ELEMENTS if is_cpu else DEVICE_ELEMENTS
    return max(SHORTEST, min(LONGEST, elements // (batch * channels * states)))


# Sizes that the registered op and its kernels share.

MOST_STATES = 64  # per channel, in the kernels


class Shape(NamedTuple):
    """Rows of [R, T, D], their tokens and channels; states per channel, models, and documents per row (0 for none)."""

    rows: int
    length: int
    channels: int
    states: int
    models: int
    documents: int

    @classmethod
    def of(cls, x: Tensor, A: Tensor, cu_seqlens: Tensor | None) -> "Shape":
        documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return cls(*x.shape, A.shape[2], A.shape[0], documents)

    @property
    def sequences(self) -> int:
        """Sequences or documents, each with its own state."""
        return self.rows * max(1, self.documents)

    def starts(self) -> tuple[int, int, int]:
        """[slots, N, D]: the states that are kept of each sequence; each row has the same number."""
        every = tokens_between(self.states)
        slots = self.length // every + self.documents if self.documents else -(-self.length // every)
        return self.rows * slots, self.states, self.channels


def tokens_between(states: int) -> int:
    """Tokens between the states that are kept for the backward: 2 bytes per token and channel at 4 or 16 states."""
    return 8 if states <= 4 else 32


def runs_in_kernels(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether the Triton kernels take a call; warns if not."""
    if A.shape[2] > MOST_STATES:
        backend.warn_slow("selective_scan", f"{A.shape[2]} states per channel", f"use at most {MOST_STATES}")
        return False
    return not backend.is_wide("selective_scan", x, delta, A, B, C)


class Chunk(NamedTuple):
    """C tokens in the dtype of states, in shapes that broadcast."""

    x: Tensor  # [Bt, C, 1, D]
    delta: Tensor
    B: Tensor  # [Bt, C, N, 1]
    C: Tensor
    decay: Tensor  # [Bt, C, N, D]
    states: Tensor  # after each token


def selective_forward(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens) -> tuple[Tensor, Tensor, Tensor]:
    """y [Bt, T, D], the final states [Nseq, D, N] and nothing for the backward; arguments as in the registered op."""
    if delta_bias is not None:
        delta = softplus(_shift(delta, delta_bias))
    modes, skip, carried, size = _prepare(x, delta, A, B, C, D, initial_state, cu_seqlens)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows, start, end in documents(cu_seqlens, x.shape[0] // A.shape[0], x.shape[1]):
        state = carried[:, rows].flatten(0, 1).clone()
        for begin in range(start, end, size):
            stop = min(begin + size, end)
            chunk = _run((x, delta, B, C), modes, state, begin, stop)
            y_ = _contract_states(chunk.C, chunk.states)
            if skip is not None:
                y_.addcmul_(chunk.x.flatten(2), skip)
            y[:, begin:stop] = y_
            state = chunk.states[:, -1]
        carried[:, rows] = state.unflatten(0, (A.shape[0], -1))
    return y, _to_public(carried), modes.new_empty(0)


def selective_backward(
    x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens, starts, dy, dfinal
) -> tuple[Tensor, ...]:
    """Gradients to x, delta, A, B, C, D and delta_bias (empty without them) and the initial states."""
    if delta_bias is not None:
        shifted = _shift(delta, delta_bias)
        dx, dstep, *grads, _, dinitial = selective_backward(
            x, softplus(shifted), A, B, C, D, None, initial_state, cu_seqlens, starts, dy, dfinal
        )
        # 1 and 20 as PyTorch's softplus has them.
        dstep = torch.ops.aten.softplus_backward(dstep.to(shifted.dtype), shifted, 1, 20)
        dbias = dstep.sum(1).unflatten(0, (A.shape[0], -1)).sum(1).to(delta_bias.dtype)
        return dx, dstep.to(delta.dtype).contiguous(), *grads, dbias, dinitial
    modes, skip, carried, size = _prepare(x, delta, A, B, C, D, initial_state, cu_seqlens)
    dmodes = modes.new_zeros(x.shape[0], *modes.shape[2:])
    dskip = modes.new_zeros(x.shape[0], x.shape[2])
    dx, ddelta, dB, dC = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, delta, B, C))
    dcarried = torch.zeros_like(carried) if dfinal is None else _to_internal(dfinal, A.shape[0], modes.dtype)
    for rows, start, end in documents(cu_seqlens, x.shape[0] // A.shape[0], x.shape[1]):
        state, entering = carried[:, rows].flatten(0, 1).clone(), []
        for begin in range(start, end, size):
            entering.append((begin, min(begin + size, end), state))
            if begin + size < end:
                state = _run((x, delta, B, C), modes, state, begin, begin + size).states[:, -1].clone()
        met = dcarried[:, rows].flatten(0, 1).clone()
        for begin, stop, state in reversed(entering):
            chunk = _run((x, delta, B, C), modes, state, begin, stop)
            dy_ = _load(dy, begin, stop, modes.dtype)
            dC[:, begin:stop] = _contract_channels(chunk.states, dy_)
            g = _adjoint(chunk, dy_, met)
            written = chunk.delta * chunk.x
            dB[:, begin:stop] = _contract_channels(g, written)
            read = _contract_states(chunk.B, g)
            # From here on `decay` holds a g, then its product with the state before.
            product = chunk.decay.mul_(g)
            met = product[:, 0].clone()
            product[:, 1:] *= chunk.states[:, :-1]
            product[:, 0] *= state
            dx_ = chunk.delta.flatten(2) * read
            if skip is not None:
                dy_ = dy_.flatten(2)
                dx_.addcmul_(dy_, skip)
                dskip += (dy_ * chunk.x.flatten(2)).sum(1)
            dx[:, begin:stop] = dx_
            torch.mul(product, modes, out=g)
            ddelta[:, begin:stop] = g.sum(2).addcmul_(chunk.x.flatten(2), read)
            torch.mul(product, chunk.delta, out=g)
            dmodes += g.sum(1)
        dcarried[:, rows] = met.unflatten(0, (A.shape[0], -1))
    of_model = (A.shape[0], -1)
    dA = dmodes.unflatten(0, of_model).sum(1).mT.to(A.dtype).contiguous()
    dD = dskip.new_empty(0) if D is None else dskip.unflatten(0, of_model).sum(1).to(D.dtype)
    return dx, ddelta, dA, dB, dC, dD, dskip.new_empty(0), _to_public(dcarried)


def _shift(delta: Tensor, delta_bias: Tensor) -> Tensor:
    """delta + delta_bias of the row's model, at least float32."""
    dtype = state_dtype(delta, delta_bias)
    return delta.to(dtype) + delta_bias.to(dtype).repeat_interleave(delta.shape[0] // delta_bias.shape[0], 0)[:, None]


def _prepare(x, delta, A, B, C, D, initial_state, cu_seqlens) -> tuple[Tensor, Tensor | None, Tensor, int]:
    """A as [1 or Bt, 1, N, D], D as [1 or Bt, 1, D], the states to carry along [M, Nseq / M, N, D], and the tokens of
    a chunk."""
    dtype, models = state_dtype(x, delta, A, B, C), A.shape[0]
    modes, skip = A.to(dtype).mT.contiguous()[:, None], None if D is None else D.to(dtype)[:, None]
    if initial_state is None:
        carried = modes.new_zeros(models, count_states(cu_seqlens, x.shape[0] // models), *modes.shape[2:])
    else:
        carried = _to_internal(initial_state, models, dtype)
    if models > 1:
        modes, skip = (None if y is None else y.repeat_interleave(x.shape[0] // models, 0) for y in (modes, skip))
    return modes, skip, carried, chunk_length(x.shape[0], *A.shape[1:], x.device.type == "cpu")


def _run(inputs, modes, state, begin, stop) -> Chunk:
    dtype = modes.dtype
    x, delta = (_load(y, begin, stop, dtype) for y in inputs[:2])
    B, C = (y[:, begin:stop].to(dtype).contiguous().unsqueeze(-1) for y in inputs[2:])
    decay, states = (x.new_empty(*x.shape[:2], *modes.shape[2:]) for _ in range(2))
    torch.mul(delta, modes, out=decay).exp_()
    torch.mul(delta * x, B, out=states)
    recur(decay.flatten(2), states.flatten(2), state.flatten(1), states.flatten(2))
    return Chunk(x, delta, B, C, decay, states)


def _adjoint(chunk: Chunk, dy: Tensor, after: Tensor) -> Tensor:
    """g of each token; `after` is what the tokens after the chunk give to its last state."""
    g = torch.mul(chunk.C, dy, out=torch.empty_like(chunk.states))
    g[:, -1] += after
    flat = g.flatten(2)
    recur(chunk.decay.flatten(2)[:, 1:], flat[:, :-1], flat[:, -1], flat[:, :-1], reverse=True)
    return g


def _load(x, begin, stop, dtype) -> Tensor:
    """[Bt, T, D] -> [Bt, C, 1, D]."""
    return x[:, begin:stop].to(dtype).contiguous().unsqueeze(2)


def _contract_states(weight: Tensor, states: Tensor) -> Tensor:
    """sum_n weight [Bt, C, N, 1] states [Bt, C, N, D], as [Bt, C, D]."""
    return torch.bmm(weight.flatten(0, 1).mT, states.flatten(0, 1)).view(*states.shape[:2], -1)


def _contract_channels(states: Tensor, weight: Tensor) -> Tensor:
    """sum_d states [Bt, C, N, D] weight [Bt, C, 1, D], as [Bt, C, N]."""
    return torch.bmm(states.flatten(0, 1), weight.flatten(0, 1).mT).view(states.shape[:3])


def _to_internal(state: Tensor, models: int, dtype: torch.dtype) -> Tensor:
    """A copy of [Nseq, D, N] as [M, Nseq / M, N, D]."""
    view = state.mT.unflatten(0, (models, -1))
    return view.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _to_public(state: Tensor) -> Tensor:
    return state.flatten(0, 1).mT.contiguous()
