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

On a Hopper GPU the usual shapes (bfloat16, widths of 64, 128 or 256, whole chunks, no documents) run in the kernels of
`linnet.ops.lightning.hopper`. float64, mixed dtypes and widths that are no multiple of 8 or above
256 run in the chunked form.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from linnet.ops import backend
from linnet.ops.documents import count_states, documents
from linnet.ops.launching import (
    Launcher,
    align,
    choose_operands,
    count_processors,
    has_little_shared_memory,
    is_hopper,
    pad,
)
from linnet.ops.lightning import chunked
from linnet.ops.lightning.kernels import summarise_kernel, sweep_kernel
from linnet.ops.registration import empty_state

try:
    from linnet.ops.lightning.hopper import hopper_kernel, narrow_kernel
except ImportError:  # a Triton without Gluon
    hopper_kernel = narrow_kernel = None


class Tiles(NamedTuple):
    """How a sweep is cut: tokens a chunk, columns of the state a program, warps, chunks in flight, and whether the
    state is held with c's columns first (`transposed`), so that it need not pass through shared memory."""

    chunk: int
    columns: int
    warps: int
    stages: int
    transposed: bool


# Tokens a chunk of the kernel for Hopper GPUs.
HOPPER_CHUNK = 64

# Programs that a multiprocessor holds at a time, by their registers.
RESIDENT = 2


def choose_tiles(inner: int, outer: int, dtype: torch.dtype, wide: bool = False) -> Tiles:
    """Tiles for a state of padded sizes [inner, outer]: on an H200 the fastest of those in docs/negative-results.md.

    The sweeps of a backward need one chunk, since they share summaries: it depends on both sizes alike. `wide`: for so
    many heads of 256 that reading a and b less often counts for more than programs side by side.
    """
    if wide:
        return Tiles(32, 128, 8, 4, True)
    if dtype != torch.bfloat16:
        return Tiles(32, min(outer, 32), 4, 1, False)
    if max(inner, outer) == 16:
        return Tiles(32, 16, 1, 3, True)
    return Tiles(64 if max(inner, outer) <= 64 else 32, min(outer, 64), 4, 4, True)


def lightning_forward(
    q, k, v, log_decay, initial_state, cu_seqlens, scale, return_final_state=True
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, H, V] and the final state [N, H, K, V], None if not requested; arguments as `lightning_attention`."""
    plan = _find_plan(q, k, v, None, log_decay, cu_seqlens, initial_state is not None, False, return_final_state)
    if plan is None:
        return chunked.lightning_forward(q, k, v, log_decay, initial_state, cu_seqlens, scale, return_final_state)
    q, k, v, initial_state = align(q), align(k), align(v), align(initial_state)
    o = torch.empty_like(v)
    final = empty_state(q, k, v, cu_seqlens) if return_final_state else None
    _run(plan, (q, k, v, o), [(k, v)], initial_state, None, final, log_decay, cu_seqlens, scale)
    return o, final


def lightning_backward(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and of the initial state if there is one, from those of o and of the final state."""
    has_state = initial_state is not None
    plan = _find_plan(q, k, v, do, log_decay, cu_seqlens, has_state, dfinal is not None, has_state)
    if plan is None:
        return chunked.lightning_backward(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal)
    q, k, v, do, initial_state, dfinal = align(q), align(k), align(v), align(do), align(initial_state), align(dfinal)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dinitial = empty_state(q, k, v, cu_seqlens) if has_state else None
    sweeps = (do, v, k, dq, v, do, q, dk, k, q, do, dv)
    _run(plan, sweeps, [(k, v), (q, do)], initial_state, dfinal, dinitial, log_decay, cu_seqlens, scale)
    return dq, dk, dv, dinitial


class Shape(NamedTuple):
    """What all sweeps of a forward or backward share."""

    batch: int
    length: int
    heads: int
    states: int
    dtype: torch.dtype
    rates: bool
    documents: bool
    wide: bool
    device: torch.device


class Form(NamedTuple):
    """How one sweep runs: the widths of a and c, backwards, with states stored transposed, and which states it has."""

    inner: int
    outer: int
    reverse: bool
    flip: bool
    entry: bool
    leave: bool


def _run(plan, sweeps, summaries, entry, last_entry, leave, rates, cu_seqlens, scale) -> None:
    """Fills what the sweeps write: in one launch where all states are square, and before it the segments' summaries.

    Args:
        sweeps: a, b, c and out of out = LA(a, b, c), four tensors for each sweep.
        summaries: for each direction the two whose products sum a segment up, in the order that states have.
        entry, last_entry: the states (None for zero) that the first sweep and the reversed ones start from.
        leave: takes the state after the last sweep, if requested.
    """
    rates, cu_seqlens = align(rates), align(cu_seqlens)
    sums = None
    if plan.summarise:
        (b, c), last = summaries[0], summaries[-1] if len(summaries) > 1 else (None, None)
        shape = len(summaries), plan.states, b.shape[2], plan.segments - 1, b.shape[3], c.shape[3]
        sums = b.new_empty(shape, dtype=torch.float32)
        plan.summarise(b, c, *last, sums, rates, cu_seqlens, scale)
    if len(plan.launches) == 3:
        for i, launch in enumerate(plan.launches):
            leaves = leave if i == 2 else None
            launch(
                *sweeps[4 * i : 4 * i + 4], *_NONE, last_entry if i else entry, None, leaves, sums, rates, cu_seqlens,
                scale,
            )  # fmt: skip
    elif len(sweeps) == 4:
        plan.launches[0](*sweeps, *_NONE, entry, None, leave, sums, rates, cu_seqlens, scale)
    else:
        # `entry` and `last_entry` must both be None or both be tensors; a dummy stands for the missing one.
        if (entry is None) != (last_entry is None):
            entry, last_entry = (_blank(sweeps[0].device) if x is None else x for x in (entry, last_entry))
        plan.launches[0](*sweeps, entry, last_entry, leave, sums, rates, cu_seqlens, scale)


_NONE = (None,) * 8  # the tensors of two more sweeps


class Plan(NamedTuple):
    """The launches of a forward or backward: what sums segments up, if there are more than one, then the sweeps."""

    states: int
    segments: int
    summarise: Launcher | None
    launches: list[Launcher]


def _find_plan(q, k, v, do, rates, cu_seqlens, entry, last_entry, leave) -> Plan | None:
    """None for what the kernels do not take: float64, mixed dtypes, widths that are no multiple of 8 or above 256."""
    if backend.debugging():
        documents(cu_seqlens, *q.shape[:2])
    dtypes = (q.dtype, k.dtype, v.dtype) if do is None else (q.dtype, k.dtype, v.dtype, do.dtype)
    return _plan(
        q.shape, v.shape[3], dtypes, None if rates is None else rates.dtype, cu_seqlens is not None,
        count_states(cu_seqlens, q.shape[0]), q.device, entry, last_entry, leave,
    )  # fmt: skip


@functools.lru_cache(1024)
def _plan(sizes, outer, dtypes, rates, documents, states, device, entry, last_entry, leave) -> Plan | None:
    B, T, H, inner = sizes
    dtype = dtypes[0]
    if not backend.takes_kernels("lightning_attention", dtypes, (inner, outer)):
        return None
    backward = len(dtypes) > 3
    if backward:
        # The first sweep, do with v and k, has a's width of the values.
        inner, outer = outer, inner
    # A backward of longer sequences is faster in the Hopper kernel, which takes longer to begin.
    heads_of_256 = inner == outer == 256 and dtype == torch.bfloat16 and (not backward or B * T <= 1024 * states)
    # Its 184 KiB of shared memory are there on Hopper GPUs, not on those before.
    wide = heads_of_256 and _has_hopper_kernels(device) and 2 * states * H >= 3 * count_processors(device)
    shape = Shape(B, T, H, states, dtype, rates is not None, documents, wide, device)
    forms = [Form(inner, outer, False, backward, entry, leave and not backward)]
    if backward:
        forms.append(Form(inner, outer, True, True, last_entry, False))
        forms.append(Form(outer, inner, True, False, last_entry, leave))
    segments = _count_segments(shape, forms)
    hopper = _suits_hopper(shape, forms)
    if dtype == torch.bfloat16 and _has_hopper_kernels(device) and (odd := [D for D in (inner, outer) if _is_odd(D)]):
        backend.warn_slow("lightning_attention", f"a head width of {odd[0]}", "use 64, 128 or 256 on a Hopper GPU")
    prepare = _prepare_hopper if hopper else _prepare_sweeps
    summarise = _prepare_summary(shape, forms, segments, hopper) if segments > 1 else None
    groups = [forms] if inner == outer else [[form] for form in forms]
    return Plan(states, segments, summarise, [prepare(shape, group, segments) for group in groups])


def _count_segments(shape: Shape, forms: list[Form]) -> int:
    """As many as let each sweep fill the GPU, but of at least 16 chunks on average. Documents are cut alike."""
    programs = shape.states * shape.heads
    places = count_processors(shape.device)
    if _suits_hopper(shape, forms):
        # Programs of all columns, one a multiprocessor; where they are half as many, those of 64 columns each fill it.
        if programs >= 0.45 * places:
            return 1
        chunk = HOPPER_CHUNK
    else:
        programs *= min(-(-form.outer // _tiles(form, shape).columns) for form in forms)
        places *= RESIDENT
        chunk = _tiles(forms[0], shape).chunk
    return max(1, min(places // programs, shape.batch * shape.length // shape.states // (16 * chunk)))


@functools.cache
def _blank(device: torch.device) -> Tensor:
    """A dummy for a state that does not exist."""
    return torch.zeros(1, device=device)


def _tiles(form: Form, shape: Shape) -> Tiles:
    sizes = pad(form.inner), pad(form.outer)
    tiles = choose_tiles(*sizes, shape.dtype, shape.wide)
    if max(sizes) > 128 and has_little_shared_memory(shape.device):
        return tiles._replace(stages=min(tiles.stages, 2))  # 68 KiB of them instead of 140
    return tiles


def _prepare_summary(shape: Shape, forms: list[Form], segments: int, hopper: bool) -> Launcher:
    """[directions, N, H, segments - 1, K, V]: the state of every segment but the last, in order, from zero."""
    first, directions = forms[0], min(2, len(forms))
    tiles = _tiles(first, shape)
    if hopper:
        tiles = tiles._replace(chunk=HOPPER_CHUNK, stages=3)  # the sweeps cut segments in whole chunks
    K, V = (first.outer, first.inner) if first.flip else (first.inner, first.outer)
    columns = min(tiles.columns, pad(V))
    programs = triton.cdiv(V, columns) * directions * shape.states * shape.heads * (segments - 1)
    constants = (
        shape.length, shape.states, segments, shape.heads,
        K, V, tiles.chunk, pad(K), columns, directions, shape.rates, shape.documents,
        not shape.documents and shape.length % tiles.chunk == 0, *choose_operands(shape.dtype), tiles.stages,
    )  # fmt: skip
    return Launcher(summarise_kernel, programs, constants, num_warps=tiles.warps)


def _prepare_sweeps(shape: Shape, group: list[Form], segments: int) -> Launcher:
    first, last = group[0], group[-1]
    tiles = _tiles(first, shape)
    programs = triton.cdiv(first.outer, tiles.columns) * len(group) * shape.states * shape.heads * segments
    constants = (
        shape.length, shape.states, segments, shape.heads,
        first.inner, first.outer, tiles.chunk, pad(first.inner), tiles.columns, len(group), first.reverse, first.flip,
        shape.rates, first.entry, last.entry, last.leave,
        shape.documents, not shape.documents and shape.length % tiles.chunk == 0, segments > 1,
        *choose_operands(shape.dtype), tiles.stages, tiles.transposed,
    )  # fmt: skip
    return Launcher(sweep_kernel, programs, constants, num_warps=tiles.warps)


def _suits_hopper(shape: Shape, forms: list[Form]) -> bool:
    widths = all(width in (64, 128, 256) for form in forms for width in (form.inner, form.outer))
    even = not shape.documents and shape.length % HOPPER_CHUNK == 0 and not shape.wide
    return widths and even and shape.dtype == torch.bfloat16 and _has_hopper_kernels(shape.device)


def _is_odd(width: int) -> bool:
    """Whether the kernels pad a width that those for Hopper GPUs do not take; narrow heads have tiles of their own."""
    return width > 32 and width not in (64, 128, 256)


def _has_hopper_kernels(device: torch.device) -> bool:
    return hopper_kernel is not None and is_hopper(device)


def choose_hopper_tiles(inner: int, outer: int, programs: int, processors: int, sweeps: int) -> tuple[int, int]:
    """Columns of a program and chunks in flight. One of 128 columns (8 warps) reads a and b once; where so few leave
    multiprocessors idle, two of 64 columns do better; of a forward's heads of 64, two of 32. More chunks of width 256
    do not fit into shared memory."""
    if inner == 256:
        return 64, 2
    if inner == outer == 64 and sweeps == 1 and 2 * programs <= processors:
        return 32, 8
    if outer == 64:
        return 64, 3
    return (128, 3) if programs * outer // 128 >= 0.9 * processors else (64, 4)


def _prepare_hopper(shape: Shape, group: list[Form], segments: int) -> Launcher:
    first, last = group[0], group[-1]
    programs = shape.states * shape.heads * segments
    columns, stages = choose_hopper_tiles(
        first.inner, first.outer, programs, count_processors(shape.device), len(group)
    )
    programs *= first.outer // columns * len(group)
    sizes = (
        shape.length, shape.states, segments, shape.heads, first.inner, first.outer, HOPPER_CHUNK, columns,
    )  # fmt: skip
    if columns == 32:
        constants = *sizes, shape.rates, first.entry, last.leave, segments > 1, stages
        return Launcher(narrow_kernel, programs, constants, scratch=True, num_warps=4)
    constants = (
        *sizes, len(group), first.reverse, first.flip, shape.rates, first.entry, last.entry, last.leave, segments > 1,
        stages,
    )  # fmt: skip
    warps = columns // 16 * (1 + (first.inner == 256))
    return Launcher(hopper_kernel, programs, constants, scratch=True, num_warps=warps)
