"""The gated delta rule on a GPU: chunks are inverted first, then sweeps keep the state in registers.

With the matrices of `linnet.ops.delta.chunked`: `prepare` works on all chunks at once and writes A and P of each, and
the decays of its tokens since its start and to its end; `invert` makes (1 + A)^-1 of A. `sweep` walks the chunks with
the state S:

    R = erase (v - g k S),  X = (1 + A)^-1 R,  o = scale g q S + P X,  S <- g_C S + (k exp(G_C - G))^T X

so that U and W are never written: one product more on the way from state to state takes less time than their bytes. The
forward on Hopper does write (1 + A)^-T (k exp(G_C - G)) and P (1 + A)^-1, which take R itself to the next state and to
o: that is one product less on the way.

The backward prepares anew; one launch sweeps forward for the states before the chunks and X, and beside it backward for
the gradients of the states after the chunks and dR; then `gradients` computes the rest of all chunks at once.

States are held and kept transposed, [V, K], and tiles of values [V, C]: the result of one product is an operand of the
next without passing through shared memory. Decays are exponents of 2; slots and packed decays are those of
`linnet.ops.gated.triton`.

With a decay per channel, `prepare` takes the decays into copies of q and k, and the sweeps are those of one decay per
head with a row of decays for the state. Inside a chunk every pair of tokens is decayed by two factors, from and to the
middle of a block of tokens: mostly the chunk, and fewer tokens, down to one, where decays are too strong for the
exponents of the operands. So any decay is safe, -inf included.

Where `write` is apart from `erase` (GDN-2), the values are multiplied by it first, and the copies of k that read from
the state by `erase`; their gradients are those of the products. The sweeps are again the same. Gates and decays per
head or of none are spread over the channels for that.

Decays per channel and `write` in float16, float64, mixed dtypes, and widths that are above 256 or not multiples of 8
run in the chunked form.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.delta import chunked
from linnet.ops.delta.kernels import (
    both_sweeps_kernel,
    gradients_channels_kernel,
    gradients_kernel,
    invert_kernel,
    prepare_channels_kernel,
    prepare_kernel,
    sweep_kernel,
)
from linnet.ops.documents import count_states
from linnet.ops.launching import Launches, align, cdiv, choose_operands, count_processors, is_hopper, pad


class Tiles(NamedTuple):
    """Tokens of a chunk; warps of `prepare`; columns of the state, warps and chunks in flight of a sweep; columns,
    warps and blocks in flight of `gradients`; channels of `prepare` and of `gradients` if each has a decay."""

    chunk: int
    prepare_warps: int
    columns: int
    warps: int
    stages: int
    gradient_columns: int
    gradient_warps: int
    gradient_stages: int
    channels: int
    gradient_channels: int


# From so many tokens on, a forward with few heads is cut at these shares (by whether a decay is per channel): each part
# takes as long to prepare as the one before to sweep.
OVERLAPPED = 32_768  # of fewer the host takes longer to start the parts than they save
PARTS = {False: (0.45, 0.77), True: (0.55, 0.85)}
REGISTERS = {"prepare_hopper_kernel": 168}  # a thread: so a multiprocessor takes three programs


def choose_tiles(K: int, V: int, dtype: torch.dtype) -> Tiles:
    """Tiles for padded widths."""
    if dtype != torch.bfloat16:
        return Tiles(32, 4, min(V, 32), 4, 1, min(V, 32), 4, 1, min(K, 32), min(K, 32))
    return Tiles(
        64, 4, min(V, 64), 4, 3 if K <= 128 else 2, min(V, 64), 8, 2 if K <= 128 else 1, min(K, 32), min(K, 32)
    )


def delta_forward(
    q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, return_final_state=True
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] and the final state [N, HV, K, V] or None; arguments as `gated_delta_rule`."""
    if not _supports(q, k, v, log_decay, erase, write):
        return chunked.delta_forward(
            q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, return_final_state
        )
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    call = _Call(q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale)
    if edges := _cut(call):
        final = _forward_parts(call, edges, o)
    else:
        final = _sweep(call, _prepare(call, call.folds), o, call.empty_state() if return_final_state else None)
        call.launches.start()
    return o, final if return_final_state else None


def delta_backward(
    q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, do, dfinal
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay, erase, write and the initial state."""
    if not _supports(q, k, v, log_decay, erase, write, do):
        return chunked.delta_backward(
            q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, do, dfinal
        )  # fmt: skip
    grads = _backward(_Call(q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale), do, dfinal)
    if write is None:
        return grads
    inputs = q, k, v, log_decay, erase, write, initial_state
    spread = zip(inputs, grads, strict=True)  # gates that were spread over the channels
    return tuple(None if x is None else grad if grad.ndim == x.ndim else grad.sum(-1) for x, grad in spread)


def _suits_hopper(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    K, V = q.shape[-1], v.shape[-1]
    whole = cu_seqlens is None and q.shape[1] % choose_tiles(pad(K), pad(V), q.dtype).chunk == 0
    return is_hopper(q.device) and q.dtype == torch.bfloat16 and whole and 64 <= K <= 128 and V % 64 == 0


def _supports(q, k, v, log_decay, erase, write, *others: Tensor) -> bool:
    if q.dtype == torch.float16 and (write is not None or (log_decay is not None and log_decay.ndim == 4)):
        return False  # one pass of TF32 rounds the sums of decays
    dtypes = q.dtype, k.dtype, v.dtype, *(x.dtype for x in others)
    return backend.takes_kernels("gated_delta_rule", dtypes, (q.shape[-1], v.shape[-1]))


class _Call:
    """The arguments of a call, contiguous, and its sizes."""

    def __init__(self, q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale: float):
        self.apart = write is not None
        if self.apart:
            log_decay, erase = (
                x if x.ndim == 4 else x[..., None].expand(*x.shape, q.shape[-1])
                for x in (v.new_zeros(v.shape[:3]) if log_decay is None else log_decay, erase)
            )
            write = write if write.ndim == 4 else write[..., None]
        self.q, self.k, self.v, self.log_decay, self.erase = (align(x) for x in (q, k, v, log_decay, erase))
        self.write = write
        self.initial_state, self.cu_seqlens, self.scale = align(initial_state), align(cu_seqlens), scale
        self.B, self.T, self.H, self.K = q.shape
        self.HV, self.V = v.shape[2:]
        self.states = count_states(cu_seqlens, self.B)
        self.PK, self.PV = pad(self.K), pad(self.V)
        self.tiles = choose_tiles(self.PK, self.PV, q.dtype)
        C = self.tiles.chunk
        self.slots = self.B * cdiv(self.T, C) if cu_seqlens is None else self.T // C + self.states
        self.operand = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        self.arithmetic = choose_operands(q.dtype)
        self.exact = self.operand == torch.float32
        self.shape_flags = cu_seqlens is not None, cu_seqlens is None and self.T % C == 0
        self.channels = log_decay is not None and log_decay.ndim == 4
        self.limit = 100.0 if self.operand == torch.bfloat16 else 30.0  # exponents of 2 of the factors of a decay
        self.on_hopper = _suits_hopper(q, v, cu_seqlens)
        self.folds = self.on_hopper and not self.channels
        self.launches = Launches()

    def part(self, start: int, end: int, state: Tensor) -> "_Call":
        """The same of the tokens from start to end, after a state."""
        gates = self.log_decay, self.erase, self.write
        parts = (None if x is None else x[:, start:end] for x in (self.q, self.k, self.v, *gates))
        return _Call(*parts, state, None, self.scale)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype or self.operand)

    def empty_state(self) -> Tensor:
        return self.empty(self.states, self.HV, self.K, self.V, dtype=torch.float32)


class _Prepared(NamedTuple):
    """(1 + A)^-1 and P [slots, HV, C, C]; of each token the decays since the start and to the end of its chunk, the
    strength, and the exponent of the first, [slots, HV, 4, C]; packed decays of chunks [slots, HV]. For a
    forward on Hopper the first two are (1 + A)^-T (k exp(G_C - G)) [slots, HV, C, K] and P (1 + A)^-1.

    With decays per channel q, k and `early` [B, T, HV, K] are decayed since the start of the chunk and, the last, to
    its end; decays of tokens are 1, and `rest` is [slots, HV, K]. `values` are v, or v times what is written of it."""

    inverses: Tensor
    scores: Tensor
    factors: Tensor
    rest: Tensor
    q: Tensor
    k: Tensor
    early: Tensor | None
    values: Tensor


def _prepare(call: _Call, folded: bool = False) -> _Prepared:
    C = call.tiles.chunk
    inverses = call.empty(call.slots, call.HV, C, call.K if folded else C)
    scores = call.empty(call.slots, call.HV, C, C)
    factors = call.empty(call.slots, call.HV, 4, C, dtype=torch.float32)
    rest = call.empty(call.slots, call.HV, *[call.K] * call.channels, dtype=torch.float32)
    if call.on_hopper and not call.channels:
        prepared = _Prepared(inverses, scores, factors, rest, call.q, call.k, None, call.v)
        tensors = call.q, call.k, call.log_decay, call.erase, *prepared[:4]
        _launch_hopper("prepare_hopper_kernel", call.slots * call.HV, tensors, call, call.log_decay is not None, folded)
        return prepared
    overlaps = call.empty(call.slots, call.HV, C, C, dtype=torch.float32)
    tensors = call.q, call.k, call.log_decay, call.erase, call.cu_seqlens, overlaps, scores, factors, rest
    sizes = call.T, call.states, call.H, call.HV, call.K, C
    programs, warps = call.slots * call.HV, call.tiles.prepare_warps
    if call.channels:
        keys = tuple(torch.empty_like(call.log_decay, dtype=call.operand) for _ in range(3))
        constants = *sizes, call.tiles.channels, call.limit, call.apart, *call.shape_flags, *call.arithmetic
        call.launches.add(
            prepare_channels_kernel, programs, (*tensors, *keys), (call.scale,), constants, num_warps=warps
        )  # fmt: skip
    else:
        keys = call.q, call.k, None
        constants = (
            *sizes, call.PK, call.log_decay is not None, *call.shape_flags, *call.arithmetic, call.exact,
        )  # fmt: skip
        call.launches.add(prepare_kernel, programs, tensors, (call.scale,), constants, num_warps=warps)
    call.launches.add(invert_kernel, programs, (overlaps, inverses), (), (C, call.arithmetic[0]), num_warps=1)
    values = torch.mul(call.v, call.write, out=torch.empty_like(call.v)) if call.apart else call.v
    return _Prepared(inverses, scores, factors, rest, *keys, values)


def _sweep(call: _Call, prepared: _Prepared, o: Tensor, final: Tensor | None) -> Tensor | None:
    """Fills o and the final state, and returns the latter."""
    *prepared, q, k, early, values = prepared
    tensors = q, k, values, *prepared, call.initial_state, o, final, early
    kinds = call.initial_state is not None, final is not None
    programs = call.states * call.HV
    if call.on_hopper:
        kinds = *kinds, call.channels, 2 if call.channels else 3
        _launch_hopper("sweep_hopper_kernel", programs * (call.V // 64), tensors, call, *kinds)
    else:
        _launch_sweeps(sweep_kernel, programs, tensors, call, kinds)
    return final


def _cut(call: _Call) -> list[int]:
    """Edges of parts of a sequence that are prepared while the part before is swept; [] for one part.

    A sweep has a program for 64 columns of each head, and so leaves multiprocessors idle where heads are few.
    """
    if not call.on_hopper or call.B > 1 or call.T < OVERLAPPED:
        return []
    if call.HV * call.V // 64 > count_processors(call.q.device) // 2:
        return []
    chunks, C = call.T // call.tiles.chunk, call.tiles.chunk
    return [round(chunks * share) * C for share in (0.0, *PARTS[call.channels], 1.0)]


def _forward_parts(call: _Call, edges: list[int], o: Tensor) -> Tensor:
    """Fills o, and returns the final state. The parts are swept on a stream of their own, whose programs go first."""
    state = call.empty_state().zero_() if call.initial_state is None else call.initial_state.clone()
    stream, sweeps = torch.cuda.current_stream(state.device), _make_stream(state.device)
    kept = []  # until all sweeps are waited for, no other tensor may take their memory
    for start, end in itertools.pairwise(edges):
        part = call.part(start, end, state)
        kept.append((part, _prepare(part, part.folds)))
        part.launches.start()
        sweeps.wait_stream(stream)
        with torch.cuda.stream(sweeps):
            _sweep(*kept[-1], o[:, start:end], state)
            part.launches.start()
    stream.wait_stream(sweeps)
    return state


@functools.cache
def _make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _backward(call: _Call, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    do, dfinal = align(do), align(dfinal)
    *prepared, q, k, early, values = _prepare(call)
    dinitial = None if call.initial_state is None else call.empty_state()
    states, dstates = (call.empty(call.slots, call.HV, call.V, call.K) for _ in range(2))
    corrections, dvalues = (torch.empty_like(call.v, dtype=call.operand) for _ in range(2))
    tensors = (
        q, k, values, *prepared, call.initial_state, states, corrections, do, dfinal, dinitial, dstates, dvalues,
        early,
    )  # fmt: skip
    kinds = dinitial is not None, dfinal is not None
    programs = 2 * call.states * call.HV
    if call.on_hopper:
        # Chunks in flight: decays per channel have more tiles, and two programs of narrow keys fit a multiprocessor.
        kinds = *kinds, call.channels, 2 if call.channels or call.K == 64 else 3
        _launch_hopper("both_sweeps_hopper_kernel", programs * (call.V // 64), tensors, call, *kinds)
    else:
        _launch_sweeps(both_sweeps_kernel, programs, tensors, call, kinds)

    dq, dk, dv, derase = (torch.empty_like(x) for x in (call.q, call.k, call.v, call.erase))
    ddecay = None if call.log_decay is None else torch.empty_like(call.log_decay)
    tensors = do, states, dstates, corrections, dvalues, prepared[2]
    if call.channels:
        return *_channel_gradients(call, tensors, prepared, (q, k, early), dv, ddecay), dinitial
    grads, programs = (dq, dk, dv, ddecay, derase), call.slots * call.H
    if call.on_hopper:
        tensors, programs = (call.q, call.k, call.v, *tensors, *grads), min(programs, count_processors(call.q.device))
        _launch_hopper("gradients_hopper_kernel", programs, tensors, call, ddecay is not None, 2, num_warps=8)
    else:
        _launch_gradients((call.q, call.k, call.v, call.log_decay, *tensors, call.cu_seqlens, *grads), call)
    call.launches.start()
    return *grads, None, dinitial


def _channel_gradients(call: _Call, tensors: tuple, prepared: list[Tensor], keys: tuple, dv: Tensor, ddecay: Tensor):
    """Of q, k, v, the log-decays, erase and write. Prepared tensors are no longer needed, so their memory takes the
    results that one kernel leaves to the next."""
    overlaps, scores, factors, rest = prepared
    of_q, of_erased, of_k = keys
    written = call.empty(*call.v.shape[:3], dtype=torch.float32)
    left = of_q, of_k, dv, None, written, of_erased, scores, overlaps, rest
    _launch_gradients((call.q, call.k, call.v, None, *tensors, call.cu_seqlens, *left[:5]), call, left[5:])
    dq, dk = (torch.empty_like(ddecay, dtype=torch.float32 if call.HV > call.H else call.q.dtype) for _ in range(2))
    blocks = cdiv(call.K, call.tiles.gradient_channels)
    derase = torch.empty_like(call.erase) if call.apart else call.empty(*written.shape, blocks, dtype=torch.float32)
    constants = (
        call.T, call.states, call.H, call.HV, call.K, call.tiles.chunk, call.tiles.gradient_channels, call.limit,
        call.apart, *call.shape_flags, *call.arithmetic,
    )  # fmt: skip
    tensors = (
        call.q, call.k, call.log_decay, call.erase, factors, of_q, of_erased, of_k, scores, overlaps, rest,
        call.cu_seqlens, dq, dk, ddecay, derase,
    )  # fmt: skip
    call.launches.add(gradients_channels_kernel, call.slots * call.HV * blocks, tensors, (), constants, num_warps=4)
    call.launches.start()
    if call.HV > call.H:
        dq, dk = (x.unflatten(2, (call.H, -1)).sum(3).to(call.q.dtype) for x in (dq, dk))
    if not call.apart:
        return dq, dk, dv, ddecay, (derase.sum(-1) + written).to(call.erase.dtype), None
    dwrite = torch.empty_like(call.write, memory_format=torch.contiguous_format)
    if dwrite.shape[-1] == 1:
        dwrite.copy_(written[..., None])
    else:
        torch.mul(dv, call.v, out=dwrite)
    return dq, dk, dv.mul_(call.write), ddecay, derase, dwrite


def _launch_gradients(tensors: tuple, call: _Call, left: tuple = (None,) * 4) -> None:
    tiles, heads = call.tiles, call.HV if call.channels else call.H
    constants = (
        call.T, call.states, heads, call.HV, call.K, call.V, tiles.chunk, call.PK, tiles.gradient_columns,
        tensors[3] is not None, call.channels, *call.shape_flags, *call.arithmetic, call.exact,
        tiles.gradient_stages if call.channels else 1,
    )  # fmt: skip
    programs = call.slots * heads
    call.launches.add(
        gradients_kernel, programs, (*tensors, *left), (call.scale,), constants, num_warps=tiles.gradient_warps
    )


def _launch_sweeps(kernel, programs: int, tensors: tuple, call: _Call, kinds: tuple) -> None:
    tiles = call.tiles
    constants = (
        call.T, call.states, call.HV if call.channels else call.H, call.HV, call.K, call.V, tiles.chunk, call.PK,
        tiles.columns, *kinds, call.channels, *call.shape_flags, *call.arithmetic,
        max(1, tiles.stages - call.channels),  # a third tile of keys
    )  # fmt: skip
    programs *= cdiv(call.V, tiles.columns)
    call.launches.add(kernel, programs, (*tensors, call.cu_seqlens), (call.scale,), constants, num_warps=tiles.warps)


def _launch_hopper(name: str, programs: int, tensors: tuple, call: _Call, *kinds, num_warps: int = 4) -> None:
    from linnet.ops.delta import hopper  # Gluon may be missing from a release of Triton

    heads = call.HV if call.channels else call.H
    constants = call.T, call.states, heads, call.HV, call.K, call.V, call.tiles.chunk, 64, *kinds
    options = {"num_warps": num_warps, "maxnreg": REGISTERS.get(name), "scratch": True}
    call.launches.add(getattr(hopper, name), programs, tensors, (call.scale,), constants, **options)
