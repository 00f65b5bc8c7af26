"""Gated linear attention on a GPU: decays are taken into q and k first, then sweeps keep the state in registers.

In the forward, `prepare` works on all chunks at once: it sums the log-decays g of a chunk (and makes them, and k, from
gate logits, for HGRN2), and writes what needs them: q exp(g since the chunk's start), k exp(g until its end), the
scores of the chunk and its whole decay. `sweep` walks the chunks with the state: it has but matrix products. The scores
of a chunk are one product of q exp(g_r - g_m) and k exp(g_m - g_s) around its middle m. Where a channel decays by more
than 2^-LIMIT in half a chunk these factors might overflow. Such a chunk is `strong`, and left to a kernel of its own,
which halves it down to single tokens, as the chunked form does: slower, and exact for any decay. It mostly finds none.

The backward prepares anew; one launch sweeps forward for the states that the chunks find (kept in the dtype of
products), and backward for those that their ends' gradients find, with dv on the way; then `gradients` has dq, dk and
dlog_decay of all chunks at once, and turns the latter two into those of the gate's logits and lower bound.

Where heads are few, a sequence is cut into segments: one launch sums each segment up (its state from zero, its decay),
and the sweep of a segment starts from the decayed sum of the summaries before it.

float64, mixed dtypes and widths that are no multiple of 8 or above 256 run in the chunked form.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from linnet.ops import backend
from linnet.ops.documents import count_states, documents
from linnet.ops.gated import chunked
from linnet.ops.gated.kernels import (
    gradients_kernel,
    gradients_strong_kernel,
    pairs_kernel,
    prepare_kernel,
    prepare_strong_kernel,
    sweep_kernel,
)
from linnet.ops.launching import choose_operands, count_processors, has_little_shared_memory, launch, pad


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
    return Tiles(32, min(V, 64), 4, 3, 2, K, 16, 1, 2)


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
        if backend.debugging():
            documents(cu_seqlens, *q.shape[:2])
        self.q, self.gate, self.v = q.contiguous(), gate.contiguous(), v.contiguous()
        self.k = None if k is None else k.contiguous()
        self.bound = None if bound is None else bound.contiguous()
        self.initial_state = None if initial_state is None else initial_state.contiguous()
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.scale = scale
        self.B, self.T, self.H, self.K = q.shape
        self.V = v.shape[-1]
        self.states = count_states(cu_seqlens, self.B)
        self.PK, self.PV = pad(self.K), pad(self.V)
        self.tiles = choose_tiles(self.PK, self.PV, q.dtype)
        C = self.tiles.chunk
        self.slots = self.B * triton.cdiv(self.T, C) if cu_seqlens is None else self.T // C + self.states
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
    do = do.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    dv = torch.empty_like(call.v)
    dinitial = None if call.initial_state is None else call.empty_state()
    entries, exits = (call.empty(call.slots, call.H, call.V, call.K) for _ in range(2))
    prepared = _prepare(call)
    _sweep(call, prepared, do, dfinal, dv, dinitial, exits, beside=(call.v, call.initial_state, entries))
    strong = prepared.strong
    del prepared  # its memory may serve for the gradients
    return *_gradients(call, do, entries, exits, strong, dv), dinitial


class Prepared(NamedTuple):
    """q decayed since the start of its chunk, k until its end [slots, H, C, K], scores [slots, H, C, C], decays of
    chunks [slots, H, K], and whether one is `strong` [slots, H]: too strong to be factored around the middle."""

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
        call.T, call.states, call.H, call.K, C, min(call.tiles.prepare_channels, call.PK), *call.gate_flags,
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
    launch(prepare_strong_kernel, triton.cdiv(programs, GROUP), tensors, (call.scale,), constants, num_warps=2)
    return prepared


def _sweep(
    call: Call, prepared: Prepared, c: Tensor, entry: Tensor | None, out: Tensor, leave: Tensor | None, keep=None,
    beside=None,
) -> None:  # fmt: skip
    """Fills `out` (o, or dv) and, if wanted, `leave`, the state after the last chunk of the sweep.

    Args:
        keep: takes the states before each chunk, in a sweep from the last chunk to the first.
        beside: c, entry and `keep` of a sweep from the first chunk to the last, which runs beside that one.
    """
    tiles, both = call.tiles, beside is not None
    since, until, scores, decays, _ = prepared
    c2, entry2, keep2 = beside or (None, None, None)
    programs = triton.cdiv(call.V, tiles.columns) * call.states * call.H * (1 + both)
    segments = _count_segments(call, programs)
    sums = sum_decays = None

    def walk(summary: bool) -> None:
        if summary:
            tensors = since, until, scores, decays, c, None, None, None, None, c2, None, None
        else:
            tensors = since, until, scores, decays, c, out, entry, leave, keep, c2, entry2, keep2
        constants = (
            call.T, call.states, segments, call.H, call.K, call.V, tiles.chunk, call.PK, tiles.columns, both,
            tensors[6] is not None, tensors[10] is not None, tensors[7] is not None, summary,
            segments > 1 and not summary, *call.shape_flags, *call.arithmetic,
            _count_stages(call, programs * segments),
        )  # fmt: skip
        tensors = *tensors, sums, sum_decays, call.cu_seqlens
        launch(sweep_kernel, programs * (segments - summary), tensors, (), constants, num_warps=tiles.warps)

    if segments > 1:
        shape = 1 + both, call.states, call.H, segments - 1
        sums = call.empty(*shape, call.V, call.K, dtype=torch.float32)
        sum_decays = call.empty(*shape, call.K, dtype=torch.float32)
        walk(True)
    walk(False)


def _gradients(call: Call, do: Tensor, entries: Tensor, exits: Tensor, strong: Tensor, dv: Tensor):
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
        call.q, call.k, call.gate, call.bound, call.v, do, entries, exits, dscores, same, strong,
        _choices(tiles.chunk, call.operand, do.device), dq, dk, dgate, parts, call.cu_seqlens,
    )  # fmt: skip
    constants = (
        call.T, call.states, call.H, call.K, call.V, tiles.chunk, tiles.channels, min(64, call.PV), *call.gate_flags,
        *call.shape_flags, *call.arithmetic, tiles.gradient_stages,
    )  # fmt: skip
    programs = triton.cdiv(call.K, tiles.channels) * chunks
    launch(gradients_kernel, programs, tensors, (call.scale,), constants, num_warps=tiles.gradient_warps)
    constants = (
        call.T, call.states, chunks, call.H, call.K, call.V, tiles.chunk, min(32, call.PK), min(64, call.PV),
        *call.gate_flags, *call.shape_flags, *call.arithmetic, GROUP,
    )  # fmt: skip
    programs = triton.cdiv(chunks, GROUP)
    launch(gradients_strong_kernel, programs, tensors, (call.scale,), constants, num_warps=4)
    return dq, dk, dv, dgate, None if parts is None else parts.sum(0).to(call.bound.dtype)


def _choices(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[4, C, C], right factors that make of a row of tokens: itself, its sums up to each token, from it on, before it.

    Loaded, since what Triton makes of them in a kernel goes to shared memory number by number. Kept for the next call,
    but not what a CUDA graph is captured with: that is memory of the graph.
    """
    found = _CHOICES.get((C, dtype, device))
    if found is None:
        one = torch.ones(C, C, dtype=dtype, device=device)
        found = torch.stack([torch.eye(C, dtype=dtype, device=device), one.triu(), one.tril(), one.triu(1)])
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _CHOICES[C, dtype, device] = found
    return found


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
