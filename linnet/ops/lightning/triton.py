"""Lightning Attention on a GPU: the chunked form in fused sweeps that keep the state in registers.

One kernel serves forward and backward, since each gradient is the same recurrence over other tensors. With LA(a, b, c)
the forward over q, k, v, and "reversed" meaning from the last token to the first:

    o = LA(q, k, v),   dq = LA(do, v, k),   dk = reversed LA(v, do, q),   dv = reversed LA(k, q, do)

A program owns one head of one sequence (or document) and BC columns of c. It walks the chunks with the state [DA, BC]
in float32, so that only the first and last states are stored; DA and DC are the widths of a and c, PA is DA padded to a
power of two. The three sweeps of a backward share one launch, and tensors that two of them read at the same time come
from the cache. A reversed sweep takes the chunks, and the positions in them, from the end; otherwise it differs in
exponents only, since the gradient of the final state reaches the last token without decay. A state is [DA, DC] in
memory, or [DC, DA] if `flip`.

Where heads are few, a sequence is cut into segments: one launch computes the state of each segment from zero, and the
sweep of a segment starts from the decayed sum of the states before it.

On a Hopper GPU the usual shapes (bfloat16, widths of 64, 128 or 256, whole chunks, no documents) run in the kernels of
`linnet.ops.lightning.hopper`. float64, mixed dtypes, and widths that are above 256 or not multiples of 8 run in the
chunked form.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import backend
from linnet.ops.device import KEEP_NAN, LOG2_E, identify, load_tile, span, store_masked
from linnet.ops.documents import count_states
from linnet.ops.launching import (
    Launcher,
    align,
    cdiv,
    choose_operands,
    count_processors,
    has_little_shared_memory,
    is_hopper,
    pad,
)
from linnet.ops.lightning import chunked
from linnet.ops.registration import empty_state

try:
    from linnet.ops.lightning.hopper import hopper_kernel, narrow_kernel
except ImportError:  # a Triton without Gluon
    hopper_kernel = narrow_kernel = None


class Tiles(NamedTuple):
    """How a sweep is cut: tokens per chunk, columns of the state per program, warps, chunks in flight, and whether the
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


def lightning_summary(q, k, log_decay, c, scale: float, reverse: bool) -> Tensor:
    """The final state [B, H, K, V] from zero, with c = v; `reverse`: the gradient of the initial one, with c = do."""
    x = q if reverse else k
    plan = _plan_summary(
        x.shape, c.shape[3], (x.dtype, c.dtype), None if log_decay is None else log_decay.dtype, x.device, reverse
    )
    if plan is None:
        return chunked.lightning_summary(q, k, log_decay, c, scale, reverse)
    launch, segments, chunk = plan
    x, c, rates, (B, T, H, K) = align(x), align(c), align(log_decay), x.shape
    sums = x.new_empty((B, H, segments, K, c.shape[3]), dtype=torch.float32)
    launch(x, c, None, None, sums, rates, None, scale)
    if rates is None or segments == 1:
        return sums.sum(2)
    # Each segment's state decays over the tokens that follow it, in the order of the sweep.
    per = cdiv(cdiv(T, chunk), segments) * chunk
    later = T - (per * torch.arange(1, segments + 1, device=x.device)).clamp(max=T)
    weights = torch.exp(rates.float().clamp(min=-1e30)[:, None] * later)
    return (sums * weights[:, :, None, None]).sum(2)


@functools.lru_cache(1024)
def _plan_summary(sizes, outer, dtypes, rates, device, reverse) -> tuple[Launcher, int, int] | None:
    """The launch, the segments and the tokens of a chunk; None for what the kernels do not take."""
    B, T, H, inner = sizes
    if not backend.takes_kernels("lightning_attention", dtypes, (inner, outer)):
        return None
    shape = Shape(B, T, H, B, dtypes[0], rates is not None, False, False, device)
    form = Form(inner, outer, False, False, False, False)
    tiles = _tiles(form, shape)
    places = RESIDENT * count_processors(device) // (B * H * cdiv(outer, min(tiles.columns, pad(outer))))
    segments = max(1, min(places, T // (16 * tiles.chunk)))
    return _prepare_summary(shape, [form], segments, segments, False, reverse), segments, tiles.chunk


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
    initial: bool
    final: bool


def _run(plan, sweeps, summaries, initial, last_initial, final, rates, cu_seqlens, scale) -> None:
    """Fills what the sweeps write: in one launch where all states are square, and before it the segments' summaries.

    Args:
        sweeps: a, b, c and out of out = LA(a, b, c), four tensors for each sweep.
        summaries: for each direction the two whose products sum a segment up, in the order that states have.
        initial, last_initial: the states (None for zero) that the first sweep and the reversed ones start from.
        final: takes the state after the last sweep, if requested.
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
            launch(
                *sweeps[4 * i : 4 * i + 4], *_NONE, last_initial if i else initial, None,
                final if i == 2 else None, sums, rates, cu_seqlens, scale,
            )  # fmt: skip
    elif len(sweeps) == 4:
        plan.launches[0](*sweeps, *_NONE, initial, None, final, sums, rates, cu_seqlens, scale)
    else:
        # `initial` and `last_initial` must both be None or both be tensors; a dummy stands for the missing one.
        if (initial is None) != (last_initial is None):
            initial, last_initial = (_blank(sweeps[0].device) if x is None else x for x in (initial, last_initial))
        plan.launches[0](*sweeps, initial, last_initial, final, sums, rates, cu_seqlens, scale)


_NONE = (None,) * 8  # the tensors of two more sweeps


class Plan(NamedTuple):
    """The launches of a forward or backward: what sums segments up, if there are more than one, then the sweeps."""

    states: int
    segments: int
    summarise: Launcher | None
    launches: list[Launcher]


def _find_plan(q, k, v, do, rates, cu_seqlens, initial, last_initial, final) -> Plan | None:
    """None for what the kernels do not take: float64, mixed dtypes, widths above 256 or not a multiple of 8."""
    dtypes = (q.dtype, k.dtype, v.dtype) if do is None else (q.dtype, k.dtype, v.dtype, do.dtype)
    return _plan(
        q.shape, v.shape[3], dtypes, None if rates is None else rates.dtype, cu_seqlens is not None,
        count_states(cu_seqlens, q.shape[0]), q.device, initial, last_initial, final,
    )  # fmt: skip


@functools.lru_cache(1024)
def _plan(sizes, outer, dtypes, rates, documents, states, device, initial, last_initial, final) -> Plan | None:
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
    forms = [Form(inner, outer, False, backward, initial, final and not backward)]
    if backward:
        forms.append(Form(inner, outer, True, True, last_initial, False))
        forms.append(Form(outer, inner, True, False, last_initial, final))
    segments = _count_segments(shape, forms)
    hopper = _suits_hopper(shape, forms)
    if dtype == torch.bfloat16 and _has_hopper_kernels(device) and (odd := [D for D in (inner, outer) if _is_odd(D)]):
        backend.warn_slow("lightning_attention", f"a head width of {odd[0]}", "use 64, 128 or 256 on a Hopper GPU")
    prepare = _prepare_hopper if hopper else _prepare_sweeps
    summarise = _prepare_summary(shape, forms, segments, segments - 1, hopper) if segments > 1 else None
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


def _prepare_summary(
    shape: Shape, forms: list[Form], segments: int, count: int, hopper: bool, reverse: bool = False
) -> Launcher:
    """[directions, N, H, count, K, V]: the states of the first `count` segments, in the order of the sweep, from zero.

    `reverse`: of one direction, the one from the last token to the first.
    """
    first, directions = forms[0], min(2, len(forms))
    tiles = _tiles(first, shape)
    if hopper:
        tiles = tiles._replace(chunk=HOPPER_CHUNK, stages=3)  # the sweeps cut segments in whole chunks
    K, V = (first.outer, first.inner) if first.flip else (first.inner, first.outer)
    columns = min(tiles.columns, pad(V))
    programs = cdiv(V, columns) * directions * shape.states * shape.heads * count
    constants = (
        shape.length, shape.states, segments, count, shape.heads,
        K, V, tiles.chunk, pad(K), columns, directions, int(reverse), shape.rates, shape.documents,
        not shape.documents and shape.length % tiles.chunk == 0, *choose_operands(shape.dtype), tiles.stages,
    )  # fmt: skip
    return Launcher(summarise_kernel, programs, constants, num_warps=tiles.warps)


def _prepare_sweeps(shape: Shape, group: list[Form], segments: int) -> Launcher:
    first, last = group[0], group[-1]
    tiles = _tiles(first, shape)
    programs = cdiv(first.outer, tiles.columns) * len(group) * shape.states * shape.heads * segments
    constants = (
        shape.length, shape.states, segments, shape.heads,
        first.inner, first.outer, tiles.chunk, pad(first.inner), tiles.columns, len(group), first.reverse, first.flip,
        shape.rates, first.initial, last.initial, last.final,
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
    """Columns of a program and chunks in flight. One of 128 columns (8 warps) reads a and b once; where so few final
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
        constants = *sizes, shape.rates, first.initial, last.final, segments > 1, stages
        return Launcher(narrow_kernel, programs, constants, scratch=True, num_warps=4)
    constants = (
        *sizes, len(group), first.reverse, first.flip, shape.rates, first.initial, last.initial, last.final,
        segments > 1, stages,
    )  # fmt: skip
    warps = columns // 16 * (1 + (first.inner == 256))
    return Launcher(hopper_kernel, programs, constants, scratch=True, num_warps=warps)


@triton.jit
def _first_row(offsets, n, T, C: tl.constexpr, DOCUMENTS: tl.constexpr, reverse):
    """The row of [B*T] where the first chunk of a sweep begins, and the length of the sequence or document."""
    begin, length = span(offsets, n, T, DOCUMENTS)
    return begin + tl.where(reverse, length - C, 0), length


@triton.jit
def _rate(rates, h, HAS_DECAY: tl.constexpr):
    """log2 of the decay per token; the bound keeps a decay to zero exact, as in the chunked form."""
    if HAS_DECAY:
        return tl.maximum(tl.load(rates + h).to(tl.float32), -1e30, KEEP_NAN) * LOG2_E
    return 0.0


@triton.jit
def _load_state(pointer, i, j, flip, DA: tl.constexpr, DC: tl.constexpr, TRANSPOSED: tl.constexpr):
    """[i, j] of a state stored as [DA, DC], or as [DC, DA] if `flip`; [j, i] if TRANSPOSED."""
    mask = (i < DA)[:, None] & (j < DC)[None, :]
    mask_transposed = (j < DC)[:, None] & (i < DA)[None, :]
    if flip:
        transposed = tl.load(pointer + j[:, None] * DA + i[None, :], mask=mask_transposed, other=0.0)
        state = transposed if TRANSPOSED else tl.trans(transposed)
    else:
        straight = tl.load(pointer + i[:, None] * DC + j[None, :], mask=mask, other=0.0)
        state = tl.trans(straight) if TRANSPOSED else straight
    return state


@triton.jit
def summarise_kernel(
    b, c, b1, c1, sums, rates, offsets, scale, T, N, G, COUNT, H: tl.constexpr,
    DA: tl.constexpr, DC: tl.constexpr, C: tl.constexpr, PA: tl.constexpr, BC: tl.constexpr, ROLES: tl.constexpr,
    REVERSE: tl.constexpr, HAS_DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[ROLES, N, H, COUNT, DA, DC]: of b and c from the first token on (REVERSE: from the last), of b1 and c1 from the
    last; for COUNT of the G segments."""
    block, role, nh, n, h, g = identify(tl.program_id(0), N, H, DC, BC, ROLES)
    reverse = role + REVERSE
    if ROLES == 2:
        if role > 0:
            b, c = b1, c1
    row, length = _first_row(offsets, n, T, C, DOCUMENTS, reverse > 0)
    rate = _rate(rates, h, HAS_DECAY)
    r, i, j = tl.arange(0, C), tl.arange(0, PA), block * BC + tl.arange(0, BC)
    b += (row * H + h) * DA
    c += (row * H + h) * DC
    b_tile = r[:, None] * (H * DA) + i[None, :]
    c_tile = r[:, None] * (H * DC) + j[None, :]
    r = tl.where(reverse > 0, C - 1 - r, r)
    key = tl.exp2(rate * (C - 1 - r + reverse)) * tl.where(reverse > 0, scale, 1.0)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    hop = row * 0 + (1 - 2 * reverse) * (H * C)
    state = tl.zeros([PA, BC], tl.float32)
    for x in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = hop * x
        left = length - x * C
        over = C
        if not EVEN:  # the last chunk of the last segment
            over = tl.minimum(left, C)
            key = tl.exp2(rate * tl.maximum(over - 1 - r + reverse, 0)) * tl.where(reverse > 0, scale, 1.0)
        tb = load_tile(b + move * DA, b_tile, r, i, left, 0.0, DA, PA != DA, EVEN).to(OPERAND)
        tc = load_tile(c + move * DC, c_tile, r, j, left, 0.0, DC, DC % BC != 0, EVEN).to(OPERAND)
        tc = (tc * key[:, None]).to(OPERAND)
        state = tl.dot(tl.trans(tb), tc, state * tl.exp2(rate * over), input_precision=PRECISION)
    to = sums + ((role * (N * H) + nh).to(tl.int64) * COUNT + g) * (DA * DC)
    tl.store(to + i[:, None] * DC + j[None, :], state, mask=(i < DA)[:, None] & (j < DC)[None, :])


@triton.jit
def sweep_kernel(
    a, b, c, o, a1, b1, c1, o1, a2, b2, c2, o2, initial, initial2, final, sums, rates, offsets,
    scale, T, N, G, H: tl.constexpr,
    DA: tl.constexpr, DC: tl.constexpr, C: tl.constexpr, PA: tl.constexpr, BC: tl.constexpr, ROLES: tl.constexpr,
    REVERSE: tl.constexpr, FLIP: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_INITIAL2: tl.constexpr, HAS_FINAL: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    block, role, nh, n, h, g = identify(tl.program_id(0), N, H, DC, BC, ROLES)
    # Of three sweeps, the first runs forward, the others back; the last alone has its states as they are stored.
    if ROLES == 3:
        if role == 1:
            a, b, c, o = a1, b1, c1, o1
        if role == 2:
            a, b, c, o = a2, b2, c2, o2
        if HAS_INITIAL or HAS_INITIAL2:
            if role > 0:
                initial = initial2
        reverse = (role > 0).to(tl.int32)
        flip = role < 2
        has_initial = (HAS_INITIAL & (role == 0)) | (HAS_INITIAL2 & (role > 0))
        has_final = HAS_FINAL & (role == 2)
    else:
        reverse = tl.full([], REVERSE, tl.int32)
        flip = FLIP
        has_initial = HAS_INITIAL
        has_final = HAS_FINAL
    row, length = _first_row(offsets, n, T, C, DOCUMENTS, reverse > 0)
    rate = _rate(rates, h, HAS_DECAY)
    r, i, j = tl.arange(0, C), tl.arange(0, PA), block * BC + tl.arange(0, BC)
    a += (row * H + h) * DA
    b += (row * H + h) * DA
    c += (row * H + h) * DC
    o += (row * H + h) * DC
    ab_tile = r[:, None] * (H * DA) + i[None, :]
    co_tile = r[:, None] * (H * DC) + j[None, :]
    r = tl.where(reverse > 0, C - 1 - r, r)  # from here on in the order of the sweep
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    hop = row * 0 + (1 - 2 * reverse) * (H * C)

    if TRANSPOSED:
        state = tl.zeros([BC, PA], tl.float32)
        apart = r[None, :] - r[:, None]
    else:
        state = tl.zeros([PA, BC], tl.float32)
        apart = r[:, None] - r[None, :]
    if HAS_INITIAL or HAS_INITIAL2:
        if has_initial:
            state += _load_state(initial + nh.to(tl.int64) * (DA * DC), i, j, flip, DA, DC, TRANSPOSED)
    if SPLIT:
        whole = tl.exp2(rate * per * C)
        for before in tl.range(0, g):
            summary = sums + ((reverse * (N * H) + nh).to(tl.int64) * (G - 1) + before) * (DA * DC)
            state = state * whole + _load_state(summary, i, j, flip, DA, DC, TRANSPOSED)

    # The scale belongs to o or to do: to what last the state in a plain sweep, to what enters it in a reversed one.
    inside = tl.where(apart >= 0, tl.exp2(rate * tl.maximum(apart, 0)) * scale, 0.0)
    since = tl.exp2(rate * (r + 1 - reverse)) * tl.where(reverse > 0, 1.0, scale)
    key_scale = tl.where(reverse > 0, scale, 1.0)
    for x in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = hop * x
        left = length - x * C
        size = tl.minimum(left, C)
        ta = load_tile(a + move * DA, ab_tile, r, i, left, 0.0, DA, PA != DA, EVEN).to(OPERAND)
        tb = load_tile(b + move * DA, ab_tile, r, i, left, 0.0, DA, PA != DA, EVEN).to(OPERAND)
        tc = load_tile(c + move * DC, co_tile, r, j, left, 0.0, DC, DC % BC != 0, EVEN).to(OPERAND)
        until = tl.exp2(rate * tl.maximum(size - 1 - r + reverse, 0)) * key_scale
        over = tl.exp2(rate * size)
        if TRANSPOSED:
            scores = tl.dot(tb, tl.trans(ta), input_precision=PRECISION)
            out = tl.dot(state.to(OPERAND), tl.trans(ta), input_precision=PRECISION) * since[None, :]
            out = tl.dot(tl.trans(tc), (scores * inside).to(OPERAND), out, input_precision=PRECISION)
            decayed = (tl.trans(tc) * until[None, :]).to(OPERAND)
            state = tl.dot(decayed, tb, state * over, input_precision=PRECISION)
            out = tl.trans(out)
        else:
            scores = tl.dot(ta, tl.trans(tb), input_precision=PRECISION)
            out = tl.dot(ta, state.to(OPERAND), input_precision=PRECISION) * since[:, None]
            out = tl.dot((scores * inside).to(OPERAND), tc, out, input_precision=PRECISION)
            decayed = (tc * until[:, None]).to(OPERAND)
            state = tl.dot(tl.trans(tb), decayed, state * over, input_precision=PRECISION)
        inside_row = (r < left)[:, None] & (j < DC)[None, :]
        store_masked(o + move * DC, co_tile, out, inside_row, not EVEN or DC % BC != 0)

    if HAS_FINAL:
        # By the program of the last chunk; for an empty document by the first.
        if has_final & ((g + 1) * per >= chunks) & ((g * per < chunks) | (g == 0)):
            to = final + nh.to(tl.int64) * (DA * DC)
            if TRANSPOSED:
                tl.store(to + i[None, :] * DC + j[:, None], state, mask=(j < DC)[:, None] & (i < DA)[None, :])
            else:
                tl.store(to + i[:, None] * DC + j[None, :], state, mask=(i < DA)[:, None] & (j < DC)[None, :])
