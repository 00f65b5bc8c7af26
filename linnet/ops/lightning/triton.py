"""Lightning Attention on a GPU: the chunked form in fused sweeps that keep the state in registers.

One kernel serves forward and backward, since each gradient is the same recurrence over other tensors. With LA(a, b, c)
the forward over q, k, v, and "reversed" meaning from the last token to the first:

    o = LA(q, k, v),   dq = LA(do, v, k),   dk = reversed LA(v, do, q),   dv = reversed LA(k, q, do)

A program owns one head of one sequence (or document) and a block of the columns of c. It walks the chunks with the
state (a's width x its columns, float32), so that no state but the first and last is ever stored; the three sweeps of a
backward share one launch, and what two of them read at the same time comes from the cache. A reversed sweep takes the
chunks, and the positions in them, from the end; beside that it differs in exponents alone, since the gradient of the
final state reaches the last token undecayed.

Where heads are few, a sequence is cut into segments: one launch sums each segment up (its state from zero), and the
sweep of a segment starts from the decayed sum of the summaries before it.

float64, mixed dtypes and widths that are no multiple of 8 or above 256 run in the chunked form.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import backend
from linnet.ops.documents import count_states, documents
from linnet.ops.lightning import chunked
from linnet.ops.lightning.kernels import summarise_kernel, sweep_kernel


class Tiles(NamedTuple):
    """How a sweep is cut: tokens a chunk, columns of the state a program, warps, chunks in flight, and whether the
    state is held with c's columns first (`turned`), which spares its way through shared memory."""

    chunk: int
    columns: int
    warps: int
    stages: int
    turned: bool


# Programs that a multiprocessor holds at a time, by their registers.
RESIDENT = 2


def choose_tiles(inner: int, outer: int, dtype: torch.dtype) -> Tiles:
    """Tiles for a state of padded sizes [inner, outer]: on an H200 the fastest of those in docs/negative-results.md.

    The sweeps of a backward need one chunk, since they share summaries: it depends on both sizes alike.
    """
    if dtype != torch.bfloat16:
        return Tiles(32, min(outer, 32), 4, 1, False)
    return Tiles(64 if max(inner, outer) <= 64 else 32, min(outer, 64), 4, 4, True)


def lightning_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] and the final state [N, H, K, V]; arguments as `lightning_attention`."""
    if not _supports(q, k, v):
        return chunked.lightning_forward(q, k, v, log_decay, initial_state, cu_seqlens, scale)
    _check_offsets(q, cu_seqlens)
    q, k, v = (x.contiguous() for x in (q, k, v))
    o = torch.empty_like(v)
    final = _empty_state(q, v, cu_seqlens)
    forward = Sweep(q, k, v, o, initial_state, final, (k, v), reverse=False, flip=False)
    _run([forward], log_decay, cu_seqlens, scale)
    return o, final


def lightning_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    do: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the initial state (given or not), from those of o and of the final state."""
    if not _supports(q, k, v, do):
        return chunked.lightning_backward(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal)
    _check_offsets(q, cu_seqlens)
    q, k, v, do = (x.contiguous() for x in (q, k, v, do))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dinitial = _empty_state(q, v, cu_seqlens)
    sweeps = [
        Sweep(do, v, k, dq, initial_state, None, (k, v), reverse=False, flip=True),
        Sweep(v, do, q, dk, dfinal, None, (q, do), reverse=True, flip=True),
        Sweep(k, q, do, dv, dfinal, dinitial, (q, do), reverse=True, flip=False),
    ]
    _run(sweeps, log_decay, cu_seqlens, scale)
    return dq, dk, dv, dinitial


class Sweep(NamedTuple):
    """out = LA(a, b, c) from the state `entry` (or zero) to `leave`, if wanted. `flip`: they are stored transposed.

    `summary` are the two tensors whose products, not transposed, sum a segment up.
    """

    a: Tensor
    b: Tensor
    c: Tensor
    out: Tensor
    entry: Tensor | None
    leave: Tensor | None
    summary: tuple[Tensor, Tensor]
    reverse: bool
    flip: bool


def _supports(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> bool:
    alike = all(x.dtype == q.dtype for x in (k, v, *more)) and q.dtype != torch.float64
    return alike and all(8 <= width <= 256 and width % 8 == 0 for width in (q.shape[-1], v.shape[-1]))


def _check_offsets(q: Tensor, cu_seqlens: Tensor | None) -> None:
    if backend.debugging():
        documents(cu_seqlens, *q.shape[:2])


def _empty_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    shape = (count_states(cu_seqlens, q.shape[0]), *q.shape[2:], v.shape[-1])
    return q.new_empty(shape, dtype=torch.float32)


def _run(sweeps: list[Sweep], log_decay: Tensor | None, cu_seqlens: Tensor | None, scale: float) -> None:
    """Fills what the sweeps write: in one launch where all states are square, and before it the segments' summaries."""
    with torch.cuda.device_of(sweeps[0].a):
        square = all(sweep.a.shape[-1] == sweep.c.shape[-1] for sweep in sweeps)
        groups = [sweeps] if square else [[sweep] for sweep in sweeps]
        rates = None if log_decay is None else log_decay.float()
        tiles = _tiles(sweeps[0])
        segments = _count_segments(sweeps, tiles, cu_seqlens)
        summaries = {}
        for sweep in sweeps:
            if segments > 1 and sweep.reverse not in summaries:
                summaries[sweep.reverse] = _summarise(sweep, rates, cu_seqlens, scale, segments)
        for group in groups:
            _launch(group, rates, cu_seqlens, scale, segments, summaries)


def _tiles(sweep: Sweep) -> Tiles:
    inner, outer = (max(16, triton.next_power_of_2(x.shape[-1])) for x in (sweep.a, sweep.c))
    return choose_tiles(inner, outer, sweep.a.dtype)


def _count_segments(sweeps: list[Sweep], tiles: Tiles, cu_seqlens: Tensor | None) -> int:
    """As many as let each sweep fill the GPU, but of at least 16 chunks on average. Documents are cut alike."""
    B, T, H, _ = sweeps[0].a.shape
    states = count_states(cu_seqlens, B)
    programs = states * H * min(-(-sweep.c.shape[-1] // _tiles(sweep).columns) for sweep in sweeps)
    places = RESIDENT * _count_processors(sweeps[0].a.device)
    return max(1, min(places // programs, B * T // states // (16 * tiles.chunk)))


def _count_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def _summarise(sweep: Sweep, rates, cu_seqlens, scale: float, segments: int) -> Tensor:
    """[N, H, segments - 1, K, V]: the state of every segment but the last in the order of the sweep, from zero."""
    b, c = sweep.summary
    B, T, H, K = b.shape
    V = c.shape[-1]
    tiles = _tiles(sweep)
    inner, columns = max(16, triton.next_power_of_2(K)), min(tiles.columns, max(16, triton.next_power_of_2(V)))
    states = count_states(cu_seqlens, B)
    summaries = b.new_empty(states, H, segments - 1, K, V, dtype=torch.float32)
    summarise_kernel[(triton.cdiv(V, columns) * states * H * (segments - 1),)](
        b, c, summaries, rates, cu_seqlens, scale, T, states, segments, H,
        K, V, tiles.chunk, inner, columns, sweep.reverse, rates is not None, cu_seqlens is not None,
        cu_seqlens is None and T % tiles.chunk == 0, *_arithmetic(b.dtype), tiles.stages,
        num_warps=tiles.warps,
    )  # fmt: skip
    return summaries


def _launch(group: list[Sweep], rates, cu_seqlens, scale: float, segments: int, summaries: dict[bool, Tensor]) -> None:
    first, last = group[0], group[-1]
    B, T, H, DA = first.a.shape
    DC = first.c.shape[-1]
    tiles = _tiles(first)
    states = count_states(cu_seqlens, B)
    tensors = [x for sweep in (group if len(group) == 3 else group * 3) for x in sweep[:4]]
    entries = [first.entry, last.entry]
    blank = (
        first.a.new_empty(1, dtype=torch.float32) if not (summaries and all(x is not None for x in entries)) else None
    )
    pick = [summaries.get(sweep.reverse, blank) for sweep in (first, last)]
    sweep_kernel[(triton.cdiv(DC, tiles.columns) * len(group) * states * H * segments,)](
        *tensors, *(blank if x is None else x.contiguous() for x in entries), last.leave, *pick, rates, cu_seqlens,
        scale, T, states, segments, H,
        DA, DC, tiles.chunk, max(16, triton.next_power_of_2(DA)), tiles.columns, len(group), first.reverse, first.flip,
        rates is not None, entries[0] is not None, entries[1] is not None, last.leave is not None,
        cu_seqlens is not None, cu_seqlens is None and T % tiles.chunk == 0, segments > 1,
        *_arithmetic(first.a.dtype), tiles.stages, tiles.turned, num_warps=tiles.warps,
    )  # fmt: skip


def _arithmetic(dtype: torch.dtype) -> tuple[tl.dtype, str]:
    """The operands of products: bfloat16, or float32 (float16 states could overflow) in one or three tf32 passes."""
    if dtype == torch.bfloat16:
        return tl.bfloat16, "tf32"
    return tl.float32, "tf32x3" if dtype == torch.float32 else "tf32"
