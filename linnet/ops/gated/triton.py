"""Gated linear attention on a GPU: decays are multiplied into q and k first, then sweeps keep the state in registers.

In the forward, `prepare` works on all chunks at once: it sums the log-decays g of a chunk (for HGRN2 it also makes them
and k from gate logits), and writes q exp(g since the chunk's start), k exp(g until its end), the scores of the chunk
and its whole decay. `sweep` walks the chunks with the state and has only matrix products. The scores of a chunk are one
product of q exp(g_r - g_m) and k exp(g_m - g_s) around its middle m. If a channel decays by more than 2^-LIMIT in half
a chunk, these factors might overflow. Such a chunk is `strong`, and a separate kernel halves it down to single tokens,
as the chunked form does: slower, and exact for any decay. Most calls have no such chunk.

The backward prepares anew; one launch sweeps forward for the initial states of the chunks (kept in the dtype of
products), and backward for the gradients of their final states, with dv on the way; then `gradients` computes dq, dk
and dlog_decay of all chunks at once, and converts the latter two to those of the gate's logits and lower bound.

Where heads are few, a sequence is cut into segments: one launch computes each segment's state from zero and its decay,
and the sweep of a segment starts from the decayed sum of the states before it.

Float32 holds no number between 1 - 6e-8 and 1: a state that is multiplied by thousands of weak decays, each rounded,
ends up with another decay. A weak decay is therefore `packed` as itself less 1, which is negative, and what a chunk
changes is added to the state in one piece (`pack_decay`, `decayed`).

Tiles are [C, K] or [C, V], those of gradients transposed, [channels, tokens]: then the product of one warp is an
operand of the next without a change of layout. Decays are exponents of 2. A chunk has a slot, the same in all scratch
memory, where tiles are contiguous: chunk c of sequence n has slot n ceil(T / C) + c; that of a document which begins at
row b has slot floor(b / C) + n + c, so that slots do not depend on the other documents; some stay empty.

float64, mixed dtypes, and widths that are above 256 or not multiples of 8 run in the chunked form.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.documents import count_states
from linnet.ops.gated import chunked
from linnet.ops.gated.kernels import (
    gradients_kernel,
    gradients_strong_kernel,
    pairs_kernel,
    prepare_kernel,
    prepare_strong_kernel,
    sweep_kernel,
)
from linnet.ops.launching import align, cdiv, choose_operands, count_processors, has_little_shared_memory, launch, pad


class Tiles(NamedTuple):
    """Tokens a chunk; columns of the state and warps of a sweep, and its chunks in flight; warps of `prepare`, and the
    channels it takes at a time; channels and warps of `gradients`, and its blocks of values in flight."""

    chunk: int
    columns: int
    warps: int
    stages: int
    prepare_warps: int
    prepare_channels: int
    channels: int
    gradient_warps: int
    gradient_stages: int


# Programs of a sweep that a multiprocessor holds at a time.
RESIDENT = 2
# Chunks that a program for strong decays looks at; mostly there are none, and it ends at once.
GROUP = 16

_CHOICES: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def choose_tiles(K: int, V: int, dtype: torch.dtype) -> Tiles:
    """Tiles for padded widths: on an H200 the fastest of those in docs/negative-results.md."""
    if dtype != torch.bfloat16:
        return Tiles(16, min(V, 32), 4, 1, 4, K, min(K, 32), 4, 1)
    if (K, V) == (128, 128):
        # Programs of one warp: what sums over tokens then never waits for another warp.
        return Tiles(32, 64, 4, 3, 1, 32, 16, 1, 2)
    if (K, V) == (16, 16):
        return Tiles(32, 16, 1, 2, 1, 16, 16, 1, 2)
    # Gradients by one warp: four would take asynchronous products, which Triton 3.6 gets wrong in some such kernels.
    columns = 64 if K <= 128 else 32  # of wider keys, states and what changes them take half of the registers each
    return Tiles(32, min(V, columns), 4, 3, 2, K, 16, 1, 2)


def gated_forward(
    q, k, v, log_decay, initial_state, cu_seqlens, scale, return_final_state=True
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, H, V] and the final state [N, H, K, V], None if not requested; arguments as `gated_linear_attention`."""
    if not supports("gated_linear_attention", q, k, v):
        return chunked.gated_forward(q, k, v, log_decay, initial_state, cu_seqlens, scale, return_final_state)
    return forward(Call(q, k, log_decay, None, v, initial_state, cu_seqlens, scale), return_final_state)


def gated_backward(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, log_decay and the initial state if there is one, from those of o and of the final state."""
    if not supports("gated_linear_attention", q, k, v, do):
        return chunked.gated_backward(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal)
    dq, dk, dv, dlog_decay, _, dinitial = backward(
        Call(q, k, log_decay, None, v, initial_state, cu_seqlens, scale), do, dfinal
    )
    return dq, dk, dv, dlog_decay, dinitial


def supports(op: str, q: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take tensors of the widths of the keys q and of the values, the last of `others`."""
    dtypes = q.dtype, *(x.dtype for x in others)
    return backend.takes_kernels(op, dtypes, (q.shape[-1], others[-1].shape[-1]))


class Call:
    """The arguments of a call, contiguous, and its sizes. k is None where `gate` has logits instead of log-decays;
    then `bound` [H, K] is the lower bound of the forget gate, or None for 0."""

    def __init__(self, q, k, gate, bound, v, initial_state, cu_seqlens, scale: float):
        self.q, self.k, self.gate, self.bound, self.v = align(q), align(k), align(gate), align(bound), align(v)
        self.initial_state, self.cu_seqlens, self.scale = align(initial_state), align(cu_seqlens), scale
        self.B, self.T, self.H, self.K = q.shape
        self.V = v.shape[-1]
        self.states = count_states(cu_seqlens, self.B)
        self.PK, self.PV = pad(self.K), pad(self.V)
        self.tiles = choose_tiles(self.PK, self.PV, q.dtype)
        C = self.tiles.chunk
        self.slots = self.B * cdiv(self.T, C) if cu_seqlens is None else self.T // C + self.states
        self.arithmetic = choose_operands(q.dtype)
        self.operand = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        self.limit = 100.0 if q.dtype == torch.bfloat16 else 30.0
        self.gate_flags = k is None, bound is not None
        self.shape_flags = cu_seqlens is not None, cu_seqlens is None and self.T % C == 0

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype or self.operand)

    def empty_state(self) -> Tensor:
        return self.empty(self.states, self.H, self.K, self.V, dtype=torch.float32)


def forward(call: Call, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """o and the final state, or None."""
    o = torch.empty_like(call.v)
    final = call.empty_state() if return_final_state else None
    prepared = _prepare(call)
    _sweep(call, prepared, call.v, call.initial_state, o, final)
    return o, final


def backward(call: Call, do: Tensor, dfinal: Tensor | None):
    """Gradients of q, k (or None), v, the gate, its bound (or None) and the initial state (or None)."""
    do, dfinal = align(do), align(dfinal)
    dv = torch.empty_like(call.v)
    dinitial = None if call.initial_state is None else call.empty_state()
    initials, dfinals = (call.empty(call.slots, call.H, call.V, call.K) for _ in range(2))
    prepared = _prepare(call)
    _sweep(call, prepared, do, dfinal, dv, dinitial, dfinals, beside=(call.v, call.initial_state, initials))
    strong = prepared.strong
    del prepared  # its memory may serve for the gradients
    return *_gradients(call, do, initials, dfinals, strong, dv), dinitial


class Prepared(NamedTuple):
    """q decayed since the start of its chunk, k until its end [slots, H, C, K], scores [slots, H, C, C], packed
    decays of chunks [slots, H, K], and whether one is `strong` [slots, H]: too strong to be factored in the middle."""

    since_q: Tensor
    until_k: Tensor
    scores: Tensor
    decays: Tensor
    strong: Tensor


def _prepare(call: Call) -> Prepared:
    C = call.tiles.chunk
    prepared = Prepared(
        call.empty(call.slots, call.H, C, call.K),
        call.empty(call.slots, call.H, C, call.K),
        call.empty(call.slots, call.H, C, C),
        call.empty(call.slots, call.H, call.K, dtype=torch.float32),
        call.empty(call.slots, call.H, dtype=torch.int32),
    )
    inputs = call.q, call.k, call.gate, call.bound, call.cu_seqlens
    constants = (
        call.T, call.states, call.H, call.K, C, call.PK, min(call.tiles.prepare_channels, call.PK), *call.gate_flags,
        *call.shape_flags, *call.arithmetic, call.limit,
    )  # fmt: skip
    programs, warps = call.slots * call.H, call.tiles.prepare_warps
    launch(prepare_kernel, programs, (*inputs, *prepared), (call.scale,), constants, num_warps=warps)
    since_q, until_k, scores, _, strong = prepared
    constants = (
        call.T, call.states, call.slots * call.H, call.H, call.K, C, min(32, call.PK), *call.gate_flags,
        *call.shape_flags, *call.arithmetic, GROUP,
    )  # fmt: skip
    tensors = *inputs, since_q, until_k, scores, strong
    launch(prepare_strong_kernel, cdiv(programs, GROUP), tensors, (call.scale,), constants, num_warps=2)
    return prepared


def _sweep(
    call: Call, prepared: Prepared, c: Tensor, initial: Tensor | None, out: Tensor, final: Tensor | None, keep=None,
    beside=None,
) -> None:  # fmt: skip
    """Fills `out` (o, or dv) and, if wanted, `final`, the state after the last chunk of the sweep.

    Args:
        keep: takes the states before each chunk, in a sweep from the last chunk to the first.
        beside: c, initial and `keep` of a sweep from the first chunk to the last, which runs beside that one.
    """
    both = beside is not None
    c2, initial2, keep2 = beside or (None, None, None)
    segments = _count_segments(call, _count_programs(call, both))
    sums = None, None
    if segments > 1:
        sums = _summarise(call, prepared, segments, segments - 1, c, c2)
    tensors = *prepared[:4], c, out, initial, final, keep, c2, initial2, keep2, *sums
    _walk(call, tensors, segments, segments, both, False)


def _count_programs(call: Call, both: bool) -> int:
    return cdiv(call.V, call.tiles.columns) * call.states * call.H * (1 + both)


def _summarise(
    call: Call, prepared: Prepared, segments: int, count: int, c: Tensor, c2: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[directions, N, H, segments, V, K] and [directions, N, H, segments, K]: states from zero of the first `count`
    segments, in the order of the sweep, and their packed decays."""
    both = c2 is not None
    shape = 1 + both, call.states, call.H, segments
    sums = call.empty(*shape, call.V, call.K, dtype=torch.float32)
    decays = call.empty(*shape, call.K, dtype=torch.float32)
    since, until, scores, chunk_decays, _ = prepared
    ends = (until, since) if reverse else (since, until)
    tensors = *ends, scores, chunk_decays, c, None, None, None, None, c2, None, None, sums, decays
    _walk(call, tensors, segments, count, both, True, reverse)
    return sums, decays


def _walk(
    call: Call, tensors: tuple, segments: int, count: int, both: bool, summary: bool, reverse: bool = False
) -> None:
    """Starts a sweep of `count` of the segments, or only sums them up."""
    tiles, programs = call.tiles, _count_programs(call, both)
    constants = (
        call.T, call.states, segments, call.H, call.K, call.V, tiles.chunk, call.PK, tiles.columns, both, reverse,
        tensors[6] is not None, tensors[10] is not None, tensors[7] is not None, summary,
        segments > 1 and not summary, *call.shape_flags, *call.arithmetic, _count_stages(call, programs * segments),
    )  # fmt: skip
    launch(sweep_kernel, programs * count, (*tensors, call.cu_seqlens), (), constants, num_warps=tiles.warps)


def summarise(call: Call, c: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """The state [N, H, K, V] after the sequence from zero, from c = v, and the decay over it [N, H, K, 1].

    `reverse`: of c = do, the gradient of the initial state, and the same decay.
    """
    segments = _count_segments(call, _count_programs(call, False))
    sums, packed = _summarise(call, _prepare(call), segments, segments, align(c), reverse=reverse)
    decays = torch.where(packed < 0, 1.0 + packed.double(), packed.double())[0]
    # The decay over the segments that follow, in the order of the sweep, and over all.
    over = torch.cat([decays, torch.ones_like(decays[:, :, :1])], 2).flip(2).cumprod(2).flip(2)
    state = (sums[0] * over[:, :, 1:, None].float()).sum(2)
    return state.mT.contiguous(), over[:, :, 0, :, None].float()


def _gradients(call: Call, do: Tensor, initials: Tensor, dfinals: Tensor, strong: Tensor, dv: Tensor):
    dq, dgate = torch.empty_like(call.q), torch.empty_like(call.gate)
    dk = None if call.k is None else torch.empty_like(call.k)
    parts = None if call.bound is None else call.empty(call.slots, call.H, call.K, dtype=torch.float32)
    tiles, chunks = call.tiles, call.slots * call.H
    dscores, same = call.empty(chunks, tiles.chunk, tiles.chunk), call.empty(chunks, tiles.chunk, dtype=torch.float32)
    constants = (
        call.T, call.states, call.H, call.V, tiles.chunk, min(128, call.PV), *call.shape_flags, *call.arithmetic,
    )  # fmt: skip
    launch(pairs_kernel, chunks, (do, call.v, dscores, same, call.cu_seqlens), (), constants, num_warps=1)
    tensors = (
        call.q, call.k, call.gate, call.bound, call.v, do, initials, dfinals, dscores, same, strong,
        _choices(tiles.chunk, call.operand, do.device), dq, dk, dgate, parts, call.cu_seqlens,
    )  # fmt: skip
    constants = (
        call.T, call.states, call.H, call.K, call.V, tiles.chunk, tiles.channels, min(64, call.PV), *call.gate_flags,
        *call.shape_flags, *call.arithmetic, tiles.gradient_stages,
    )  # fmt: skip
    programs = cdiv(call.K, tiles.channels) * chunks
    launch(gradients_kernel, programs, tensors, (call.scale,), constants, num_warps=tiles.gradient_warps)
    constants = (
        call.T, call.states, chunks, call.H, call.K, call.V, tiles.chunk, min(32, call.PK), min(64, call.PV),
        *call.gate_flags, *call.shape_flags, *call.arithmetic, GROUP,
    )  # fmt: skip
    programs = cdiv(chunks, GROUP)
    launch(gradients_strong_kernel, programs, tensors, (call.scale,), constants, num_warps=4)
    return dq, dk, dv, dgate, None if parts is None else parts.sum(0).to(call.bound.dtype)


def _choices(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[4, C, C], right factors that make of a row of tokens: itself, its sums up to each token, from it on, before it.

    Loaded, since what Triton makes of them in a kernel goes to shared memory number by number. Kept for the next call,
    but not what a CUDA graph is captured with: that is memory of the graph.
    """
    choices = _CHOICES.get((C, dtype, device))
    if choices is None:
        ones = torch.ones(C, C, dtype=dtype, device=device)
        choices = torch.stack([torch.eye(C, dtype=dtype, device=device), ones.triu(), ones.tril(), ones.triu(1)])
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _CHOICES[C, dtype, device] = choices
    return choices


def _count_segments(call: Call, programs: int) -> int:
    """As many as let a sweep fill the GPU, but of at least 16 chunks on average. Documents are cut alike.

    A program on each multiprocessor with more chunks in flight does better than two of them and the summaries.
    """
    processors = count_processors(call.q.device)
    if programs >= 0.9 * processors:
        return 1
    return max(1, min(RESIDENT * processors // programs, call.slots // (16 * call.states)))


def _count_stages(call: Call, programs: int) -> int:
    """Chunks in flight of a sweep. More of wider keys do not fit into shared memory, nor do three where it is small."""
    if call.PK > 128 and has_little_shared_memory(call.q.device):
        return min(call.tiles.stages, 2)
    alone = programs <= count_processors(call.q.device)
    return 5 if alone and call.tiles.stages == 3 and call.PK <= 128 else call.tiles.stages
