"""The Gluon sweeps of `linnet.ops.additive.hopper.kernels` with LRPE (see `rotation`): o and dv, dq, the gradient of k.

Warps of a program have different work: some rotate keys and queries, some multiply, and for dq and the gradient of k
some load what is not rotated and make the scores, which need no state. They meet at barriers: `full` once a slot of
shared memory is written, `empty` once it was read, `loaded` once a descriptor brought it. A program walks several
heads, one after another, so that descriptors are made once; positions continue over the G segments of a sequence.

The functions of a program take what they share as named tuples, which cost nothing: their members are what the compiled
code would have as single arguments. The kernels themselves take single arguments, since `Launcher` passes addresses.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from linnet.ops.additive.hopper.kernels import LOG2_E, NOTHING, TINY, _invert, _log_sum, _start
from linnet.ops.additive.hopper.rotation import (
    _angles_of_quarter,
    _begin_angles,
    _boundary_pointers,
    _channels,
    _chunk_angles,
    _copy,
    _decays_of_rows,
    _describe,
    _fetch,
    _fetch_boundaries,
    _four,
    _hand,
    _highest,
    _in_order,
    _invert_fast,
    _move,
    _ordered,
    _power,
    _put_rates,
    _quarters,
    _rates,
    _rotate,
    _rows_layout,
    _scaled,
    _score,
    _stack,
    _sums,
    _tails,
    _take,
    _take_both,
    _take_boundaries,
    _take_rates,
    _times,
    _token,
    _widen,
)
from linnet.ops.device import KEEP_NAN
from linnet.ops.lightning.hopper import product_layout

# Known when a kernel is compiled. BC: the columns of V of a program that makes o or dv.
Sizes = namedtuple("Sizes", "H K V C BC REVERSE HAS_POSITIONS HAS_INITIAL HAS_FINAL")
# The first row of a program's sweep and its position, rows from one chunk to the next, the program's sequence, head and
# block of columns or channels, and the chunks of the sweep.
Place = namedtuple("Place", "row position hop n h block chunks")
# Global memory beside the sequences, and the scale.
Pointers = namedtuple("Pointers", "initial initial_z end final final_z boundaries theta dtheta positions scale")
# Shared memory, two slots each: raw tiles, rotated ones, and (`out`) weights, then the output.
ValueBuffers = namedtuple(
    "ValueBuffers", "raw_q raw_k keys queries columns out decays rates boundaries loaded loaded_columns full empty"
)
# The same for dq and the gradient of k. `handed*` are tiles that `_hand` stores for `_take`: of dq what divides it, of
# the gradient of k what is subtracted from it, and the keys.
KeyBuffers = namedtuple(
    "KeyBuffers",
    "q k dq v do handed_keys rotated handed decays rates boundaries out weights loaded_k loaded full empty",
)


@gluon.jit
def _two_barriers():
    return gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())


@gluon.jit
def _begin(initial_z, at, HAS_INITIAL: gl.constexpr):
    """Reference and denominator of channels before the sweep."""
    reference = gl.full_like(at.to(gl.float32), NOTHING)
    denominator = gl.full_like(at.to(gl.float32), 0.0)
    if HAS_INITIAL:
        reference, denominator = _start(gl.load(initial_z + at))
    return reference, denominator


# o and dv: programs own columns of V.


@gluon.jit
def _rotate_part_for_values(
    from_q, from_k, shared, positions, row, position, place, x, reference, denominator, PART: gl.constexpr,
    FIRST: gl.constexpr, sizes,
):  # fmt: skip
    """Keys and queries of 32 channels of chunk x; returns reference and denominator after it."""
    ROWS: gl.constexpr = _rows_layout(sizes.C)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, ROWS)
    HALF: gl.constexpr = PART // 2
    slot = x & 1
    tk = shared.raw_k.index(HALF)
    tq = shared.raw_q.index(HALF)
    loaded = shared.loaded.index(HALF)
    rates = _take_rates(shared.rates, PART)
    angles = _begin_angles(position, rates, _rows_layout(8))
    if PART % 2 == 0:
        mbarrier.wait(loaded, x & 1)
    key = tk.slice(PART % 2 * 32, 32, dim=1).permute((1, 0)).load(ROWS)
    if sizes.REVERSE:
        now, before = _take_boundaries(shared.boundaries, slot, PART, CHANNEL)
        decay = _power(now - reference)
    else:
        now = _move(reference, gl.convert_layout(_highest(key), CHANNEL, assert_trivial=True))
        decay = _power(reference - now)
        before = denominator * decay
    key = _power(_widen(key) * LOG2_E - now[:, None])
    sums, denominator = _sums(key, gl.maximum(before, TINY, KEEP_NAN), 1.0)
    query = _widen(tq.slice(PART % 2 * 32, 32, dim=1).permute((1, 0)).load(ROWS)) * _invert_fast(sums)
    if PART % 2 == 1:
        at = place.h * sizes.K + HALF * 64
        more = x + 1 < place.chunks
        mbarrier.expect(loaded, 4 * sizes.C * 64, pred=more)
        _copy(from_k, row + place.hop, at, loaded, tk, more)
        _copy(from_q, row + place.hop, at, loaded, tq, more)
    if PART == FIRST:
        mbarrier.wait(shared.empty.index(slot), (x >> 1) & 1 ^ 1)
    shared.decays.index(slot).slice(64 * PART, 32).store(decay)
    shared.decays.index(slot).slice(64 * PART + 32, 32).store(decay)
    k0, k1, k2, k3 = _quarters(key)
    q0, q1, q2, q3 = _quarters(query)
    c, s, angles = _angles_of_quarter(angles, positions, row, rates, 0, sizes.HAS_POSITIONS)
    kc0, ks0 = _times(k0, c, s)
    qc0, qs0 = _times(q0, c, s)
    c, s, angles = _angles_of_quarter(angles, positions, row, rates, 1, sizes.HAS_POSITIONS)
    kc1, ks1 = _times(k1, c, s)
    qc1, qs1 = _times(q1, c, s)
    c, s, angles = _angles_of_quarter(angles, positions, row, rates, 2, sizes.HAS_POSITIONS)
    kc2, ks2 = _times(k2, c, s)
    qc2, qs2 = _times(q2, c, s)
    c, s, angles = _angles_of_quarter(angles, positions, row, rates, 3, sizes.HAS_POSITIONS)
    kc3, ks3 = _times(k3, c, s)
    qc3, qs3 = _times(q3, c, s)
    both = _stack(_four(kc0, kc1, kc2, kc3), _four(ks0, ks1, ks2, ks3))
    shared.keys.index(slot).slice(64 * PART, 64, dim=1).permute((1, 0)).store(both)
    both = _stack(_four(qc0, qc1, qc2, qc3), _four(qs0, qs1, qs2, qs3))
    shared.queries.index(slot).slice(64 * PART, 64, dim=1).permute((1, 0)).store(both)
    return now, gl.where(denominator > 1.0, denominator, 0.0)  # TINY alone: there was no key


@gluon.jit
def _begin_for_values(pointers, boundaries, nh, chunks, i, sizes):
    if sizes.REVERSE:
        reference = gl.load(boundaries + i + chunks * (2 * sizes.H * sizes.K))
        denominator = gl.full_like(reference, 0.0)
    else:
        reference, denominator = _begin(pointers.initial_z, nh * sizes.K + i, sizes.HAS_INITIAL)
    return reference, denominator


@gluon.jit
def _finish_for_values(decays, final_z, reference, denominator, PART: gl.constexpr):
    """Stores what normalises the final state, where the decays of one more chunk would be, and the log-sum."""
    decays.slice(64 * PART, 32).store(_invert(denominator))
    decays.slice(64 * PART + 32, 32).store(_invert(denominator))
    gl.store(final_z, _log_sum(reference, denominator))


@gluon.jit
def _rotate_for_values(from_q, from_k, shared, pointers, place, HALF: gl.constexpr, HALVES: gl.constexpr, sizes):
    """The work of 4 rotating warps: the half HALF of the channels, or (HALVES 2) both, one after the other."""
    H: gl.constexpr = sizes.H
    K: gl.constexpr = sizes.K
    WIDTH: gl.constexpr = 64 * HALVES
    P: gl.constexpr = 2 * HALF
    CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row, position, hop, n, h, block, chunks = place
    positions = pointers.positions
    nh = n.to(gl.int64) * H + h
    channels = HALF * 64 + gl.arange(0, WIDTH, CHANNELS)
    _put_rates(shared.rates, HALF * 64, _rates(gl.load(pointers.theta + h * K + channels)))
    boundaries = pointers.boundaries
    if sizes.REVERSE:
        boundaries += (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K)
        at = _boundary_pointers(boundaries, HALF * 64, WIDTH, K)
        _fetch_boundaries(shared.boundaries, at, 0, chunks - 1, HALF * 64, H, K)
    i = P * 32 + gl.arange(0, 32, gl.SliceLayout(1, _rows_layout(sizes.C)))
    r0, d0 = _begin_for_values(pointers, boundaries, nh, chunks, i, sizes)
    r1, d1 = _begin_for_values(pointers, boundaries, nh, chunks, 32 + i, sizes)
    if HALVES == 2:
        r2, d2 = _begin_for_values(pointers, boundaries, nh, chunks, 64 + i, sizes)
        r3, d3 = _begin_for_values(pointers, boundaries, nh, chunks, 96 + i, sizes)
    for x in range(0, chunks):
        if sizes.REVERSE:
            async_copy.wait_group(0)
            _fetch_boundaries(shared.boundaries, at, x & 1 ^ 1, gl.maximum(chunks - 2 - x, 0), HALF * 64, H, K)
        r0, d0 = _rotate_part_for_values(
            from_q, from_k, shared, positions, row, position, place, x, r0, d0, P, P, sizes
        )  # fmt: skip
        r1, d1 = _rotate_part_for_values(
            from_q, from_k, shared, positions, row, position, place, x, r1, d1, P + 1, P, sizes
        )  # fmt: skip
        if HALVES == 2:
            r2, d2 = _rotate_part_for_values(
                from_q, from_k, shared, positions, row, position, place, x, r2, d2, P + 2, P, sizes
            )  # fmt: skip
            r3, d3 = _rotate_part_for_values(
                from_q, from_k, shared, positions, row, position, place, x, r3, d3, P + 3, P, sizes
            )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(shared.full.index(x & 1), count=1)
        row += hop
        position += hop
    if sizes.REVERSE:
        async_copy.wait_group(0)
    if sizes.HAS_FINAL:
        slot = chunks & 1
        mbarrier.wait(shared.empty.index(slot), (chunks >> 1) & 1 ^ 1)
        decays, z = shared.decays.index(slot), pointers.final_z + nh * K + i
        _finish_for_values(decays, z, r0, d0, P)
        _finish_for_values(decays, z + 32, r1, d1, P + 1)
        if HALVES == 2:
            _finish_for_values(decays, z + 64, r2, d2, P + 2)
            _finish_for_values(decays, z + 96, r3, d3, P + 3)
        mbarrier.arrive(shared.full.index(slot), count=1)


@gluon.jit
def _split_columns(state):
    return state.reshape((state.shape[0], 2, state.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def _read(quarter, out, tile, QUARTER: gl.constexpr, OUT: gl.constexpr):
    """64 channels of the state, rounded, times those of queries (or keys), added to `out`."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    held = gl.convert_layout(quarter, QUARTER, assert_trivial=True).to(gl.bfloat16)
    held = gl.convert_layout(held, OPERAND)
    return warpgroup_mma(held, tile.permute((1, 0)), out, is_async=True), held


@gluon.jit
def _multiply_for_values(from_columns, to, shared, pointers, place, sizes):
    """The work of the multiplying warps. The state [BC, 256] has cosines of 32 channels, then their sines, in turn."""
    H: gl.constexpr = sizes.H
    K: gl.constexpr = sizes.K
    C: gl.constexpr = sizes.C
    BC: gl.constexpr = sizes.BC
    W: gl.constexpr = BC // 16
    SCORES: gl.constexpr = product_layout(4, C * 4 // W, W // 4)
    OUT: gl.constexpr = product_layout(W, C)
    STATE: gl.constexpr = product_layout(W, 256)
    QUARTER: gl.constexpr = product_layout(W, 64)
    ALL: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([8, 1], [32, 1], [1, W], [0, 1]))
    row, position, hop, n, h, block, chunks = place
    scale = pointers.scale
    at_c = h * sizes.V + block * BC
    down = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    inside = _token(down) >= _token(right) if sizes.REVERSE else _token(down) <= _token(right)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    nh = n.to(gl.int64) * H + h
    across = gl.arange(0, 2 * K, gl.SliceLayout(0, STATE))
    channel = across // 64 * 32 + across % 32
    across = across // 32 % 2 * K + channel
    j = block * BC + gl.arange(0, BC, gl.SliceLayout(1, STATE))
    state = gl.zeros([BC, 2 * K], gl.float32, STATE)
    if sizes.HAS_INITIAL:
        at = pointers.initial + nh * (2 * K * sizes.V) + across[None, :] * sizes.V + j[:, None]
        if sizes.REVERSE:
            boundary = pointers.boundaries + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K)
            boundary = boundary + chunks * (2 * H * K) + K + channel
            state = gl.load(at) * (_invert(gl.load(boundary)) / scale)[None, :]
        else:
            reference, denominator = _start(gl.load(pointers.initial_z + nh * K + channel))
            state = gl.load(at) * denominator[None, :]
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(shared.full.index(slot), phase)
        ta = shared.keys.index(slot) if sizes.REVERSE else shared.queries.index(slot)
        tb = shared.queries.index(slot) if sizes.REVERSE else shared.keys.index(slot)
        tc = shared.columns.index(slot).permute((1, 0))
        weights = shared.out.slice(0, C, dim=1)
        decays = shared.decays.index(slot)
        # Seldom: references move in large steps. Decays, never negative, compare as integers; this is 1.0.
        if gl.min(decays.load(ALL).to(gl.int32, bitcast=True), 0) < 0x3F800000:
            state *= decays.load(gl.SliceLayout(0, STATE))[None, :]
        scores = warpgroup_mma(tb, ta.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        out = gl.zeros([BC, C], gl.float32, OUT)
        first, last = _split_columns(state)
        q0, q1 = _split_columns(first)
        q2, q3 = _split_columns(last)
        out, held = _read(q0, out, ta.slice(0, 64, dim=1), QUARTER, OUT)
        scores = warpgroup_mma_wait(1, deps=[scores])
        tma.store_wait(0)
        weights.store(gl.where(inside, scores, 0.0).to(gl.bfloat16))
        fence_async_shared()
        mbarrier.wait(shared.loaded_columns.index(slot), phase)
        out, _ = warpgroup_mma_wait(0, deps=[out, held])
        out, held = _read(q1, out, ta.slice(64, 64, dim=1), QUARTER, OUT)
        out = warpgroup_mma(tc, weights, out, is_async=True)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        out, held = _read(q2, out, ta.slice(128, 64, dim=1), QUARTER, OUT)
        out, _ = warpgroup_mma_wait(0, deps=[out, held])
        out, held = _read(q3, out, ta.slice(192, 64, dim=1), QUARTER, OUT)
        state = warpgroup_mma(tc, tb, state, is_async=True)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        shared.out.permute((1, 0)).store((out * scale).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [0, (row + hop * x) // 16, 0, at_c], _ordered(shared.out))
        state = warpgroup_mma_wait(0, deps=[state])
        mbarrier.arrive(shared.empty.index(slot), count=1)
        following, barrier = row + hop * (x + 2), shared.loaded_columns.index(slot)
        _fetch(from_columns, following, at_c, barrier, shared.columns.index(slot), x + 2 < chunks)
    tma.store_wait(0)
    if sizes.HAS_FINAL:
        slot = chunks & 1
        mbarrier.wait(shared.full.index(slot), (chunks >> 1) & 1)
        state *= shared.decays.index(slot).load(gl.SliceLayout(0, STATE))[None, :]
        gl.store(pointers.final + nh * (2 * K * sizes.V) + across[None, :] * sizes.V + j[:, None], state)


@gluon.jit
def _sweep_values(q, k, c, o, pointers, T, N, G, sizes, REGISTERS: gl.constexpr):
    """o or dv in BC columns of V.

    With 64 columns there are 4 multiplying warps, and two groups of rotating ones; with 128 columns 8 and one.
    """
    H: gl.constexpr = sizes.H
    K: gl.constexpr = sizes.K
    V: gl.constexpr = sizes.V
    C: gl.constexpr = sizes.C
    BC: gl.constexpr = sizes.BC
    BLOCKS: gl.constexpr = V // BC
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 2 * K], gl.bfloat16)
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    from_q = _describe(q, N * T, H * K, 64)
    from_k = _describe(k, N * T, H * K, 64)
    from_c = _describe(c, N * T, H * V, BC)
    to = _describe(o, N * T, H * V, BC)
    shared = ValueBuffers(
        gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], HALF),
        gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], HALF),
        gl.allocate_shared_memory(gl.bfloat16, [2, C, 2 * K], KEYS),
        gl.allocate_shared_memory(gl.bfloat16, [2, C, 2 * K], KEYS),
        gl.allocate_shared_memory(gl.bfloat16, [2, C, BC], COLUMNS),
        gl.allocate_shared_memory(gl.bfloat16, [C, BC], COLUMNS),
        gl.allocate_shared_memory(gl.float32, [2, 2 * K], LINE),
        gl.allocate_shared_memory(gl.float32, [4, K], LINE),
        gl.allocate_shared_memory(gl.float32, [2, 2 * K], LINE),
        _two_barriers(), _two_barriers(), _two_barriers(), _two_barriers(),
    )  # fmt: skip
    for program in range(gl.program_id(0), N * H * BLOCKS, gl.num_programs(0)):
        block = program % BLOCKS
        nh = program // BLOCKS
        n, h = nh // H, nh % H
        for slot in gl.static_range(2):
            mbarrier.init(shared.loaded.index(slot), count=1)
            mbarrier.init(shared.loaded_columns.index(slot), count=1)
            mbarrier.init(shared.full.index(slot), count=2 if BC == 64 else 1)
            mbarrier.init(shared.empty.index(slot), count=1)
        chunks = T // C
        row = n * T
        position = n % G * T
        hop = h * 0 + C
        if sizes.REVERSE:
            row = n * T + T - C
            position += T - C
            hop = h * 0 - C
        for half in gl.static_range(2):
            at, barrier = h * K + half * 64, shared.loaded.index(half)
            mbarrier.expect(barrier, 4 * C * 64)
            _copy(from_k, row, at, barrier, shared.raw_k.index(half), True)
            _copy(from_q, row, at, barrier, shared.raw_q.index(half), True)
        for x in gl.static_range(2):
            at, barrier = h * V + block * BC, shared.loaded_columns.index(x)
            _fetch(from_c, row + hop * x, at, barrier, shared.columns.index(x), x < chunks)
        fence_async_shared()
        place = Place(row, position, hop, n, h, block, chunks)
        if BC == 64:
            gl.warp_specialize(
                [
                    (_multiply_for_values, (from_c, to, shared, pointers, place, sizes)),
                    (_rotate_for_values, (from_q, from_k, shared, pointers, place, 0, 1, sizes)),
                    (_rotate_for_values, (from_q, from_k, shared, pointers, place, 1, 1, sizes)),
                ],
                [4, 4],
                [REGISTERS, REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (_multiply_for_values, (from_c, to, shared, pointers, place, sizes)),
                    (_rotate_for_values, (from_q, from_k, shared, pointers, place, 0, 2, sizes)),
                ],
                [4],
                [REGISTERS],
            )  # fmt: skip
        for slot in gl.static_range(2):
            mbarrier.invalidate(shared.empty.index(slot))
            mbarrier.invalidate(shared.loaded.index(slot))
            mbarrier.invalidate(shared.loaded_columns.index(slot))
            mbarrier.invalidate(shared.full.index(slot))


@gluon.jit
def hopper_rotated_values_kernel(
    q, k, c, o, initial, initial_z, final, final_z, boundaries, theta, positions, scale, T, N, G, H: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, REVERSE: gl.constexpr,
    HAS_POSITIONS: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """o from c = v, or (REVERSE) dv from c = do."""
    pointers = Pointers(initial, initial_z, None, final, final_z, boundaries, theta, None, positions, scale)
    # Not by a name: a name would make tensors of the sizes.
    _sweep_values(
        q, k, c, o, pointers, T, N, G, Sizes(H, K, V, C, BC, REVERSE, HAS_POSITIONS, HAS_INITIAL, HAS_FINAL), REGISTERS
    )  # fmt: skip


# dq and the gradient of k: programs own 64 channels. Their state [128, V] has cosines of 8 channels, then their sines.


@gluon.jit
def _load_and_score(from_q, from_v, from_do, shared, begin, at_k, at_v, chunks, sizes):
    """Loads what the products of a chunk need, once what lies there was used, and makes its weights."""
    C: gl.constexpr = sizes.C
    V: gl.constexpr = sizes.V
    for x in range(0, chunks):
        slot = x & 1
        mbarrier.wait(shared.empty.index(slot), (x >> 1) & 1 ^ 1)
        if sizes.REVERSE:
            mbarrier.expect(shared.loaded.index(slot), 2 * 2 * C * V, pred=x >= 2)
            row = begin - C * x
        else:
            mbarrier.expect(shared.loaded.index(slot), 2 * C * (2 * V + 64), pred=x >= 2)
            row = begin + C * x
            _copy(from_q, row, at_k, shared.loaded.index(slot), shared.q.index(slot), x >= 2)
        loaded = shared.loaded.index(slot)
        _copy(from_v, row, at_v, loaded, shared.v.index(slot), x >= 2)
        _copy(from_do, row, at_v, loaded, shared.do.index(slot), x >= 2)
        mbarrier.wait(loaded, (x >> 1) & 1)
        if sizes.REVERSE:
            _score(shared.do, shared.v, shared.weights, slot, C, True)
        else:
            _score(shared.v, shared.do, shared.weights, slot, C, False)
        fence_async_shared()
        mbarrier.arrive(shared.full.index(slot), count=1)


@gluon.jit
def _rotate_part_for_queries(
    shared, boundaries, positions, unit, row, position, x, reference, denominator, PART: gl.constexpr, sizes
):
    """Keys of 32 channels of chunk x; returns reference and denominator after it."""
    slot = x & 1
    rates = _take_rates(shared.rates, PART)
    angles = _begin_angles(position, rates, _rows_layout(8))
    if PART == 0:
        mbarrier.wait(shared.loaded_k.index(slot), (x >> 1) & 1)
    key = shared.k.index(slot).slice(32 * PART, 32, dim=1).permute((1, 0)).load(_rows_layout(sizes.C))
    now = _move(reference, gl.convert_layout(_highest(key), reference.type.layout, assert_trivial=True))
    decay = _power(reference - now)
    before = denominator * decay
    boundaries += x * (2 * sizes.H * sizes.K)
    gl.store(boundaries, now)
    gl.store(boundaries + sizes.K, before)
    key = _power(_widen(key) * LOG2_E - now[:, None])
    sums, denominator = _sums(key, gl.maximum(before, TINY, KEEP_NAN), unit)
    inverse = _in_order(_invert_fast(sums))
    if PART == 0:
        mbarrier.wait(shared.empty.index(slot), (x >> 1) & 1 ^ 1)
    shared.decays.index(slot).slice(32 * PART, 32).store(decay)
    _hand(shared.handed.index(slot), PART, inverse)
    both = _rotate(key, angles, positions, row, rates, sizes.HAS_POSITIONS)
    shared.rotated.index(slot).slice(64 * PART, 64, dim=1).permute((1, 0)).store(both)
    return now, gl.where(denominator > 1.0, denominator, 0.0)  # TINY alone: there was no key


@gluon.jit
def _rotate_for_queries(from_k, shared, pointers, place, sizes):
    """The work of 4 rotating warps: 32 channels, then the other 32, for few registers."""
    H: gl.constexpr = sizes.H
    K: gl.constexpr = sizes.K
    C: gl.constexpr = sizes.C
    CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row, origin, hop, n, h, block, chunks = place
    _put_rates(shared.rates, 0, _rates(gl.load(pointers.theta + h * K + block * 64 + gl.arange(0, 64, CHANNELS))))
    i = block * 64 + gl.arange(0, 32, gl.SliceLayout(1, _rows_layout(C)))
    nh = n.to(gl.int64) * H + h
    boundaries = pointers.boundaries + ((n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i)
    r0, d0 = _begin(pointers.initial_z, nh * K + i, sizes.HAS_INITIAL)
    r1, d1 = _begin(pointers.initial_z, nh * K + i + 32, sizes.HAS_INITIAL)
    unit = 1 / pointers.scale
    for x in range(0, chunks):
        slot = x & 1
        now, position = row + C * x, origin + C * x
        r0, d0 = _rotate_part_for_queries(
            shared, boundaries, pointers.positions, unit, now, position, x, r0, d0, 0, sizes
        )  # fmt: skip
        r1, d1 = _rotate_part_for_queries(
            shared, boundaries + 32, pointers.positions, unit, now, position, x, r1, d1, 1, sizes
        )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(shared.full.index(slot), count=1)
        following, at_k = row + C * (x + 2), h * K + block * 64
        _fetch(from_k, following, at_k, shared.loaded_k.index(slot), shared.k.index(slot), x + 2 < chunks)
    boundaries += chunks * (2 * H * K)
    gl.store(boundaries, r0)
    gl.store(boundaries + 32, r1)
    gl.store(boundaries + K, d0)
    gl.store(boundaries + K + 32, d1)


@gluon.jit
def _rotate_part_for_keys(
    shared, positions, scale, row, position, x, reference, delta, PART: gl.constexpr, sizes
):  # fmt: skip
    """Queries of 32 channels of a chunk; returns its reference, and the sum of q dq from its first token on."""
    ROWS: gl.constexpr = _rows_layout(sizes.C)
    slot = x & 1
    rates = _take_rates(shared.rates, PART)
    angles = _begin_angles(position, rates, _rows_layout(8))
    now, before = _take_boundaries(shared.boundaries, slot, PART, gl.SliceLayout(1, ROWS))
    decay = _power(now - reference)
    if PART == 0:
        mbarrier.wait(shared.loaded_k.index(slot), (x >> 1) & 1)
    key = _widen(shared.k.index(slot).slice(32 * PART, 32, dim=1).permute((1, 0)).load(ROWS))
    key = _power(key * LOG2_E - now[:, None])
    sums, _ = _sums(key, gl.maximum(before, TINY, KEEP_NAN), 1.0)
    query = _widen(shared.q.index(slot).slice(32 * PART, 32, dim=1).permute((1, 0)).load(ROWS)) * _invert_fast(sums)
    q_dq = query * _widen(shared.dq.index(slot).slice(32 * PART, 32, dim=1).permute((1, 0)).load(ROWS))
    # The gradient loses this sum: q dq of a token and of all after it.
    tail, delta = _tails(q_dq, delta * decay)
    if PART == 0:
        mbarrier.wait(shared.empty.index(slot), (x >> 1) & 1 ^ 1)
    shared.decays.index(slot).slice(32 * PART, 32).store(decay)
    _hand(shared.handed_keys.index(slot), PART, _in_order(key.to(gl.bfloat16)))
    _hand(shared.handed.index(slot), PART, tail)
    if sizes.HAS_POSITIONS:
        query *= scale
    else:
        angles = _scaled(angles, scale)
    both = _rotate(query, angles, positions, row, rates, sizes.HAS_POSITIONS)
    shared.rotated.index(slot).slice(64 * PART, 64, dim=1).permute((1, 0)).store(both)
    return now, delta


@gluon.jit
def _begin_for_keys(pointers, boundary, nh, i, sizes):
    """Of 32 channels: the reference after the last chunk, and what the final state's gradients add to sums of q dq."""
    K: gl.constexpr = sizes.K
    V: gl.constexpr = sizes.V
    reference = gl.load(boundary + i)
    delta = gl.full_like(reference, 0.0)
    if sizes.HAS_INITIAL:
        PIECE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
        rows = gl.convert_layout(i, gl.SliceLayout(1, PIECE))
        initial = pointers.initial + nh * (2 * K * V)
        end = pointers.end + nh * (2 * K * V)
        at = rows[:, None] * V + gl.arange(0, 32, gl.SliceLayout(0, PIECE))[None, :]
        share = gl.zeros([32], gl.float32, gl.SliceLayout(1, PIECE))
        for _ in range(0, V // 32):
            share += gl.sum(gl.load(initial + at) * gl.load(end + at), 1)
            share += gl.sum(gl.load(initial + at + K * V) * gl.load(end + at + K * V), 1)
            at += 32
        delta = gl.convert_layout(share, reference.type.layout) - gl.load(pointers.initial_z + nh * K + i)
        delta *= _invert(gl.load(boundary + K + i))
    return reference, delta


@gluon.jit
def _fetch_for_keys(from_q, from_k, from_dq, shared, slot, row, x, chunks, at_k, C: gl.constexpr):
    """Loads what the rotating warps need for chunk x, if there is one, into a slot."""
    wanted = x < chunks
    mbarrier.expect(shared.loaded_k.index(slot), 3 * 2 * C * 64, pred=wanted)
    loaded = shared.loaded_k.index(slot)
    _copy(from_q, row - C * x, at_k, loaded, shared.q.index(slot), wanted)
    _copy(from_k, row - C * x, at_k, loaded, shared.k.index(slot), wanted)
    _copy(from_dq, row - C * x, at_k, loaded, shared.dq.index(slot), wanted)


@gluon.jit
def _rotate_for_keys(from_q, from_k, from_dq, shared, pointers, place, sizes):
    """The work of 4 rotating warps: 32 channels, then the other 32, for few registers."""
    H: gl.constexpr = sizes.H
    K: gl.constexpr = sizes.K
    C: gl.constexpr = sizes.C
    CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row, origin, hop, n, h, block, chunks = place
    positions, scale = pointers.positions, pointers.scale
    channels = block * 64 + gl.arange(0, 64, CHANNELS)
    _put_rates(shared.rates, 0, _rates(gl.load(pointers.theta + h * K + channels)))
    nh = n.to(gl.int64) * H + h
    boundaries = pointers.boundaries + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K)
    at = _boundary_pointers(boundaries, block * 64, 64, K)
    _fetch_boundaries(shared.boundaries, at, 0, chunks - 1, 0, H, K)
    _fetch_boundaries(shared.boundaries, at, 1, gl.maximum(chunks - 2, 0), 0, H, K)
    i = block * 64 + gl.arange(0, 32, gl.SliceLayout(1, _rows_layout(C)))
    r0, d0 = _begin_for_keys(pointers, boundaries + chunks * (2 * H * K), nh, i, sizes)
    r1, d1 = _begin_for_keys(pointers, boundaries + chunks * (2 * H * K), nh, i + 32, sizes)
    at_k = h * K + block * 64
    for x in range(0, chunks):
        slot = x & 1
        position = origin + (chunks - 1 - x) * C
        async_copy.wait_group(1)
        r0, d0 = _rotate_part_for_keys(shared, positions, scale, row - C * x, position, x, r0, d0, 0, sizes)
        r1, d1 = _rotate_part_for_keys(shared, positions, scale, row - C * x, position, x, r1, d1, 1, sizes)
        fence_async_shared()
        mbarrier.arrive(shared.full.index(slot), count=1)
        _fetch_for_keys(from_q, from_k, from_dq, shared, slot, row, x + 2, chunks, at_k, C)
        _fetch_boundaries(shared.boundaries, at, slot, gl.maximum(chunks - 3 - x, 0), 0, H, K)
    async_copy.wait_group(0)
    if sizes.HAS_FINAL:
        final_z = pointers.final_z + nh * K + i
        gl.store(final_z, -d0 * gl.load(boundaries + K + i))
        gl.store(final_z + 32, -d1 * gl.load(boundaries + K + i + 32))


@gluon.jit
def _multiply_for_channels(to, shared, pointers, place, sizes):
    """The work of the multiplying warps: dq and its share in dtheta, or (REVERSE) the gradient of k and its share."""
    H: gl.constexpr = sizes.H
    K: gl.constexpr = sizes.K
    V: gl.constexpr = sizes.V
    C: gl.constexpr = sizes.C
    OUT: gl.constexpr = product_layout(8, C)
    STATE: gl.constexpr = product_layout(8, V)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    TILE: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0])
    CHANNEL: gl.constexpr = gl.SliceLayout(1, TILE)
    CHAIN: gl.constexpr = gl.BlockedLayout([1, 1, 16], [8, 4, 1], [8, 1, 1], [2, 1, 0])
    begin, origin, hop, n, h, block, chunks = place
    at_k = h * K + block * 64
    nh = n.to(gl.int64) * H + h
    i = block * 64 + gl.arange(0, 64, CHANNEL)
    rates = _rates(gl.load(pointers.theta + h * K + i))
    channel, half = _channels(gl.arange(0, 128, gl.SliceLayout(1, STATE)), block)
    at = (half * K + channel)[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, STATE))[None, :]
    boundary = pointers.boundaries + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + K + channel
    state = gl.zeros([128, V], gl.float32, STATE)
    angle_sums = gl.zeros([64, 4], gl.float32, gl.SliceLayout(2, CHAIN))
    if sizes.HAS_INITIAL:
        if sizes.REVERSE:
            initial = gl.load(pointers.initial + nh * (2 * K * V) + at)
            state += initial * _invert(gl.load(boundary + chunks * (2 * H * K)))[:, None]
        else:
            reference, denominator = _start(gl.load(pointers.initial_z + nh * K + channel))
            state += gl.load(pointers.initial + nh * (2 * K * V) + at) * denominator[:, None]
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(shared.full.index(slot), phase)
        rotated = shared.rotated.index(slot).permute((1, 0))
        ta = shared.v if sizes.REVERSE else shared.do
        tb = shared.do if sizes.REVERSE else shared.v
        out = gl.zeros([128, C], gl.float32, OUT)
        out = warpgroup_mma(rotated, shared.weights.index(slot), out, is_async=True)
        # Without asking whether decays are 1, for which the warps would have to look at all of them.
        state *= _decays_of_rows(shared.decays.index(slot), STATE)[:, None]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        out = warpgroup_mma(held, ta.index(slot).permute((1, 0)), out, is_async=True)
        state = warpgroup_mma(rotated, tb.index(slot), state, is_async=True)
        position = origin + (chunks - 1 - x) * C if sizes.REVERSE else origin + C * x
        now = begin - C * x if sizes.REVERSE else begin + C * x
        tokens, cos, sin = _chunk_angles(pointers.positions, now, position, rates, TILE, sizes.HAS_POSITIONS)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        first, second = _take_both(out, TILE)
        if sizes.REVERSE:
            tail = _take(shared.handed.index(slot), TILE)
            factor = _take(shared.handed_keys.index(slot), TILE)
        else:
            factor = _take(shared.handed.index(slot), TILE)
        tma.store_wait(0)
        if sizes.REVERSE:
            shared.out.permute((1, 0)).store((factor * (first * cos + second * sin - tail)).to(gl.bfloat16))
        else:
            shared.out.permute((1, 0)).store(((first * cos + second * sin) * factor).to(gl.bfloat16))
        fence_async_shared()
        row = begin - C * x if sizes.REVERSE else begin + C * x  # anew, so that it need not live through the products
        tma.async_copy_shared_to_global(to, [0, row // 16, 0, at_k], _ordered(shared.out))
        if not sizes.REVERSE:
            factor *= _widen(shared.q.index(slot).permute((1, 0)).load(TILE))
        angle_sums += gl.sum(_in_order((second * cos - first * sin) * factor * tokens[None, :]), 2)
        state = warpgroup_mma_wait(0, deps=[state])
        mbarrier.arrive(shared.empty.index(slot), count=1)
    tma.store_wait(0)
    if sizes.REVERSE:  # the address before the sum: for ptxas the order is not the same
        gl.store(pointers.dtheta + nh * K + i, gl.convert_layout(gl.sum(angle_sums, 1), CHANNEL))
    else:
        angle_sums = gl.convert_layout(gl.sum(angle_sums, 1), CHANNEL)
        gl.store(pointers.dtheta + nh * K + i, angle_sums)
    if sizes.HAS_FINAL:
        gl.store(pointers.final + nh * (2 * K * V) + at, state * gl.load(boundary)[:, None])


@gluon.jit
def _sweep_channels(q, k, v, do, dq, out, pointers, T, N, G, sizes, REGISTERS: gl.constexpr, SCORING: gl.constexpr):
    """dq into `out`, or (REVERSE) the gradient of k, in 64 channels."""
    H: gl.constexpr = sizes.H
    K: gl.constexpr = sizes.K
    V: gl.constexpr = sizes.V
    C: gl.constexpr = sizes.C
    BLOCKS: gl.constexpr = K // 64
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    BOTH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 128], gl.bfloat16)
    OWN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    from_q = _describe(q, N * T, H * K, 64)
    from_k = _describe(k, N * T, H * K, 64)
    if sizes.REVERSE:
        from_dq = _describe(dq, N * T, H * K, 64)
    from_v = _describe(v, N * T, H * V, V)
    from_do = _describe(do, N * T, H * V, V)
    to = _describe(out, N * T, H * K, 64)
    first = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    second = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    shared = KeyBuffers(
        first if sizes.REVERSE else second,
        second if sizes.REVERSE else first,
        gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS) if sizes.REVERSE else None,
        gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [2, 2, 256, 8], OWN) if sizes.REVERSE else None,
        gl.allocate_shared_memory(gl.bfloat16, [2, C, 128], BOTH),
        gl.allocate_shared_memory(gl.float32, [2, 4, 256, 4], OWN),
        gl.allocate_shared_memory(gl.float32, [2, 64], LINE),
        gl.allocate_shared_memory(gl.float32, [4, 64], LINE),
        gl.allocate_shared_memory(gl.float32, [2, 128], LINE) if sizes.REVERSE else None,
        gl.allocate_shared_memory(gl.bfloat16, [C, 64], KEYS),
        gl.allocate_shared_memory(gl.bfloat16, [2, C, C], KEYS),
        _two_barriers(), _two_barriers(), _two_barriers(), _two_barriers(),
    )  # fmt: skip
    for program in range(gl.program_id(0), N * H * BLOCKS, gl.num_programs(0)):
        block = program % BLOCKS
        nh = program // BLOCKS
        n, h = nh // H, nh % H
        for slot in gl.static_range(2):
            mbarrier.init(shared.loaded_k.index(slot), count=1)
            mbarrier.init(shared.loaded.index(slot), count=1)
            mbarrier.init(shared.full.index(slot), count=2)
            mbarrier.init(shared.empty.index(slot), count=1)
        chunks = T // C
        row = n * T
        if sizes.REVERSE:
            row = n * T + T - C
        origin = n % G * T
        at_k = h * K + block * 64
        for x in gl.static_range(2):
            if sizes.REVERSE:
                _fetch_for_keys(from_q, from_k, from_dq, shared, x, row, x, chunks, at_k, C)
                mbarrier.expect(shared.loaded.index(x), 2 * 2 * C * V, pred=x < chunks)
                at = row - C * x
            else:
                at = row + C * x
                _fetch(from_k, at, at_k, shared.loaded_k.index(x), shared.k.index(x), x < chunks)
                mbarrier.expect(shared.loaded.index(x), 2 * C * (2 * V + 64), pred=x < chunks)
                _copy(from_q, at, at_k, shared.loaded.index(x), shared.q.index(x), x < chunks)
            _copy(from_v, at, h * V, shared.loaded.index(x), shared.v.index(x), x < chunks)
            _copy(from_do, at, h * V, shared.loaded.index(x), shared.do.index(x), x < chunks)
        fence_async_shared()
        place = Place(row, origin, None, n, h, block, chunks)
        if sizes.REVERSE:
            gl.warp_specialize(
                [
                    (_multiply_for_channels, (to, shared, pointers, place, sizes)),
                    (_rotate_for_keys, (from_q, from_k, from_dq, shared, pointers, place, sizes)),
                    (_load_and_score, (None, from_v, from_do, shared, row, None, h * V, chunks, sizes)),
                ],
                [4, 4],
                [REGISTERS, SCORING],
            )
        else:
            gl.warp_specialize(
                [
                    (_multiply_for_channels, (to, shared, pointers, place, sizes)),
                    (_rotate_for_queries, (from_k, shared, pointers, place, sizes)),
                    (_load_and_score, (from_q, from_v, from_do, shared, row, at_k, h * V, chunks, sizes)),
                ],
                [4, 4],
                [REGISTERS, SCORING],
            )
        for slot in gl.static_range(2):
            mbarrier.invalidate(shared.empty.index(slot))
            mbarrier.invalidate(shared.full.index(slot))
            mbarrier.invalidate(shared.loaded.index(slot))
            mbarrier.invalidate(shared.loaded_k.index(slot))


@gluon.jit
def hopper_rotated_queries_kernel(
    q, k, v, do, dq, initial, initial_z, boundaries, theta, dtheta, positions, scale, T, N, G, H: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, HAS_POSITIONS: gl.constexpr, HAS_INITIAL: gl.constexpr,
    REGISTERS: gl.constexpr, SCORING: gl.constexpr,
):  # fmt: skip
    """dq, `boundaries` and the share of dq in dtheta [N, H, K]; `initial` is the initial state."""
    pointers = Pointers(initial, initial_z, None, None, None, boundaries, theta, dtheta, positions, scale)
    _sweep_channels(
        q, k, v, do, None, dq, pointers, T, N, G, Sizes(H, K, V, C, None, False, HAS_POSITIONS, HAS_INITIAL, False),
        REGISTERS, SCORING,
    )  # fmt: skip


@gluon.jit
def hopper_rotated_keys_kernel(
    q, k, v, do, dq, du, initial, initial_z, end, final, final_z, boundaries, theta, dtheta, positions, scale, T, N, G,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, HAS_POSITIONS: gl.constexpr,
    HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, REGISTERS: gl.constexpr, SCORING: gl.constexpr,
):  # fmt: skip
    """The gradient of the logits and its share in dtheta; `initial`, `initial_z` are those of the final state `end`."""
    pointers = Pointers(initial, initial_z, end, final, final_z, boundaries, theta, dtheta, positions, scale)
    _sweep_channels(
        q, k, v, do, dq, du, pointers, T, N, G, Sizes(H, K, V, C, None, True, HAS_POSITIONS, HAS_INITIAL, HAS_FINAL),
        REGISTERS, SCORING,
    )  # fmt: skip
