"""The sweeps of `linnet.ops.additive.hopper` that own columns of V, with LRPE: o and dv (see `hopper_turning`)."""

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

from linnet.ops.additive.hopper.kernels import LN_2, LOG2_E, NOTHING, TINY, _invert, _start
from linnet.ops.additive.hopper.rotation import (
    _begin_angles,
    _both_factors,
    _channels,
    _chunk_angles,
    _copy,
    _describe,
    _fetch,
    _fetch_sides,
    _four,
    _hand,
    _highest,
    _in_order,
    _invert_fast,
    _move,
    _ordered,
    _part_turns,
    _power,
    _put_rates,
    _quarters,
    _rates,
    _rows_layout,
    _scaled,
    _score,
    _sides,
    _stack,
    _sums,
    _tails,
    _take,
    _take_both,
    _take_rates,
    _take_sides,
    _token,
    _turn,
    _widen,
)


@gluon.jit
def _rotate_both(key, query, cos, sin):
    kc, ks = (key * cos).to(gl.bfloat16), (key * sin).to(gl.bfloat16)
    return kc, ks, (query * cos).to(gl.bfloat16), (query * sin).to(gl.bfloat16)


@gluon.jit
def _turn_part_for_values(
    from_q, from_k, raw_q, raw_k, xs, ys, keeps, turns, sides, loaded, empty, positions, row, place, hop, h, x, chunks,
    reference, mass, PART: gl.constexpr, FIRST: gl.constexpr, K: gl.constexpr, C: gl.constexpr, REVERSE: gl.constexpr,
    PLACED: gl.constexpr,
):  # fmt: skip
    """Keys and queries of 32 channels of chunk x; returns reference and mass after it."""
    ROWS: gl.constexpr = _rows_layout(C)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, ROWS)
    HALF: gl.constexpr = PART // 2
    slot = x & 1
    tk = raw_k.index(HALF)
    tq = raw_q.index(HALF)
    rates = _take_rates(turns, PART)
    angles = _begin_angles(place, rates, _rows_layout(8))
    if PART % 2 == 0:
        mbarrier.wait(loaded.index(HALF), x & 1)
    key = tk.slice(PART % 2 * 32, 32, dim=1).permute((1, 0)).load(ROWS)
    if REVERSE:
        now, before = _take_sides(sides, slot, PART, CHANNEL)
        keep = _power(now - reference)
    else:
        now = _move(reference, gl.convert_layout(_highest(key), CHANNEL, assert_trivial=True))
        keep = _power(reference - now)
        before = mass * keep
    key = _power(_widen(key) * LOG2_E - now[:, None])
    sums, mass = _sums(key, gl.maximum(before, TINY), 1.0)
    query = _widen(tq.slice(PART % 2 * 32, 32, dim=1).permute((1, 0)).load(ROWS)) * _invert_fast(sums)
    if PART % 2 == 1:
        at = h * K + HALF * 64
        mbarrier.expect(loaded.index(HALF), 4 * C * 64, pred=x + 1 < chunks)
        _copy(from_k, row + hop, at, loaded.index(HALF), tk, x + 1 < chunks)
        _copy(from_q, row + hop, at, loaded.index(HALF), tq, x + 1 < chunks)
    if PART == FIRST:
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
    keeps.index(slot).slice(64 * PART, 32).store(keep)
    keeps.index(slot).slice(64 * PART + 32, 32).store(keep)
    k0, k1, k2, k3 = _quarters(key)
    q0, q1, q2, q3 = _quarters(query)
    c, s, angles = _part_turns(angles, positions, row, rates, 0, PLACED)
    kc0, ks0, qc0, qs0 = _rotate_both(k0, q0, c, s)
    c, s, angles = _part_turns(angles, positions, row, rates, 1, PLACED)
    kc1, ks1, qc1, qs1 = _rotate_both(k1, q1, c, s)
    c, s, angles = _part_turns(angles, positions, row, rates, 2, PLACED)
    kc2, ks2, qc2, qs2 = _rotate_both(k2, q2, c, s)
    c, s, angles = _part_turns(angles, positions, row, rates, 3, PLACED)
    kc3, ks3, qc3, qs3 = _rotate_both(k3, q3, c, s)
    both = _stack(_four(kc0, kc1, kc2, kc3), _four(ks0, ks1, ks2, ks3))
    xs.index(slot).slice(64 * PART, 64, dim=1).permute((1, 0)).store(both)
    both = _stack(_four(qc0, qc1, qc2, qc3), _four(qs0, qs1, qs2, qs3))
    ys.index(slot).slice(64 * PART, 64, dim=1).permute((1, 0)).store(both)
    return now, gl.where(mass > 1.0, mass, 0.0)  # TINY alone is no mass


@gluon.jit
def _begin_for_values(
    entry_z, edges, nh, chunks, i, H: gl.constexpr, K: gl.constexpr, REVERSE: gl.constexpr, HAS_ENTRY: gl.constexpr
):  # fmt: skip
    """Reference and mass of channels before the sweep."""
    reference = gl.full_like(i.to(gl.float32), NOTHING)
    mass = gl.full_like(i.to(gl.float32), 0.0)
    if REVERSE:
        reference = gl.load(edges + i + chunks * (2 * H * K))
    else:
        if HAS_ENTRY:
            reference, mass = _start(gl.load(entry_z + nh * K + i))
    return reference, mass


@gluon.jit
def _leave(keeps, leave_z, nh, i, reference, mass, PART: gl.constexpr, K: gl.constexpr):
    """What normalises the final state, where the factors of one more chunk would be, and the log-sum."""
    keeps.slice(64 * PART, 32).store(_invert(mass))
    keeps.slice(64 * PART + 32, 32).store(_invert(mass))
    gl.store(leave_z + nh * K + i, _log_sum(reference, mass))


@gluon.jit
def _turn_for_values(
    from_q, from_k, raw_q, raw_k, xs, ys, keeps, turns, sides, loaded, full, empty, entry_z, leave_z, edges, theta,
    positions, row, place, hop, n, h, chunks, HALF: gl.constexpr, HALVES: gl.constexpr, H: gl.constexpr,
    K: gl.constexpr, C: gl.constexpr, REVERSE: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
    HAS_LEAVE: gl.constexpr,
):  # fmt: skip
    """What 4 turning warps do: the half HALF of the channels, or (HALVES 2) both, one after the other."""
    CHANNEL: gl.constexpr = gl.SliceLayout(1, _rows_layout(C))
    CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WIDTH: gl.constexpr = 64 * HALVES
    P: gl.constexpr = 2 * HALF
    nh = n.to(gl.int64) * H + h
    channels = HALF * 64 + gl.arange(0, WIDTH, CHANNELS)
    _put_rates(turns, HALF * 64, _rates(gl.load(theta + h * K + channels)))
    if REVERSE:
        edges += (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K)
        places = _sides(edges, HALF * 64, WIDTH, K)
        _fetch_sides(sides, places, 0, chunks - 1, HALF * 64, H, K)
    i = P * 32 + gl.arange(0, 32, CHANNEL)
    r0, m0 = _begin_for_values(entry_z, edges, nh, chunks, i, H, K, REVERSE, HAS_ENTRY)
    r1, m1 = _begin_for_values(entry_z, edges, nh, chunks, 32 + i, H, K, REVERSE, HAS_ENTRY)
    if HALVES == 2:
        r2, m2 = _begin_for_values(entry_z, edges, nh, chunks, 64 + i, H, K, REVERSE, HAS_ENTRY)
        r3, m3 = _begin_for_values(entry_z, edges, nh, chunks, 96 + i, H, K, REVERSE, HAS_ENTRY)
    for x in range(0, chunks):
        if REVERSE:
            async_copy.wait_group(0)
            _fetch_sides(sides, places, x & 1 ^ 1, gl.maximum(chunks - 2 - x, 0), HALF * 64, H, K)
        r0, m0 = _turn_part_for_values(
            from_q, from_k, raw_q, raw_k, xs, ys, keeps, turns, sides, loaded, empty, positions, row, place, hop, h, x,
            chunks, r0, m0, P, P, K, C, REVERSE, PLACED,
        )  # fmt: skip
        r1, m1 = _turn_part_for_values(
            from_q, from_k, raw_q, raw_k, xs, ys, keeps, turns, sides, loaded, empty, positions, row, place, hop, h, x,
            chunks, r1, m1, P + 1, P, K, C, REVERSE, PLACED,
        )  # fmt: skip
        if HALVES == 2:
            r2, m2 = _turn_part_for_values(
                from_q, from_k, raw_q, raw_k, xs, ys, keeps, turns, sides, loaded, empty, positions, row, place, hop, h,
                x, chunks, r2, m2, P + 2, P, K, C, REVERSE, PLACED,
            )  # fmt: skip
            r3, m3 = _turn_part_for_values(
                from_q, from_k, raw_q, raw_k, xs, ys, keeps, turns, sides, loaded, empty, positions, row, place, hop, h,
                x, chunks, r3, m3, P + 3, P, K, C, REVERSE, PLACED,
            )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(full.index(x & 1), count=1)
        row += hop
        place += hop
    if REVERSE:
        async_copy.wait_group(0)
    if HAS_LEAVE:
        slot = chunks & 1
        mbarrier.wait(empty.index(slot), (chunks >> 1) & 1 ^ 1)
        _leave(keeps.index(slot), leave_z, nh, i, r0, m0, P, K)
        _leave(keeps.index(slot), leave_z, nh, i + 32, r1, m1, P + 1, K)
        if HALVES == 2:
            _leave(keeps.index(slot), leave_z, nh, i + 64, r2, m2, P + 2, K)
            _leave(keeps.index(slot), leave_z, nh, i + 96, r3, m3, P + 3, K)
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _log_sum(reference, mass):
    return gl.where(mass > 0, (reference + gl.log2(gl.where(mass > 0, mass, 1.0))) * LN_2, -float("inf"))


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
def _multiply_for_values(
    from_c, to, xs, ys, sc, so, keeps, loaded, full, empty, entry, entry_z, leave, edges, scale, row,
    hop, n, h, block, chunks, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BC: gl.constexpr,
    REVERSE: gl.constexpr, HAS_ENTRY: gl.constexpr, HAS_LEAVE: gl.constexpr,
):  # fmt: skip
    """What the multiplying warps do. The state [BC, 256] has cosines of 32 channels, then their sines, and so on."""
    W: gl.constexpr = BC // 16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, W // 4], instr_shape=[16, C * 4 // W, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, 256, 16])
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, 64, 16])
    ALL: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([8, 1], [32, 1], [1, W], [0, 1]))
    at_c = h * V + block * BC
    down = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    inside = _token(down) >= _token(right) if REVERSE else _token(down) <= _token(right)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    nh = n.to(gl.int64) * H + h
    across = gl.arange(0, 2 * K, gl.SliceLayout(0, STATE))
    channel = across // 64 * 32 + across % 32
    across = across // 32 % 2 * K + channel
    j = block * BC + gl.arange(0, BC, gl.SliceLayout(1, STATE))
    state = gl.zeros([BC, 2 * K], gl.float32, STATE)
    if HAS_ENTRY:
        place = entry + nh * (2 * K * V) + across[None, :] * V + j[:, None]
        if REVERSE:
            edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + chunks * (2 * H * K) + K + channel
            state = gl.load(place) * (_invert(gl.load(edge)) / scale)[None, :]
        else:
            begin, mass = _start(gl.load(entry_z + nh * K + channel))
            state = gl.load(place) * mass[None, :]
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(full.index(slot), phase)
        ta = xs.index(slot) if REVERSE else ys.index(slot)
        tb = ys.index(slot) if REVERSE else xs.index(slot)
        tc = sc.index(slot).permute((1, 0))
        weights = so.slice(0, C, dim=1)
        factors = keeps.index(slot)
        # Seldom: references move in large steps. Factors, never negative, compare as integers; this is 1.0.
        if gl.min(factors.load(ALL).to(gl.int32, bitcast=True), 0) < 0x3F800000:
            state *= factors.load(gl.SliceLayout(0, STATE))[None, :]
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
        mbarrier.wait(loaded.index(slot), phase)
        out, _ = warpgroup_mma_wait(0, deps=[out, held])
        out, held = _read(q1, out, ta.slice(64, 64, dim=1), QUARTER, OUT)
        out = warpgroup_mma(tc, weights, out, is_async=True)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        out, held = _read(q2, out, ta.slice(128, 64, dim=1), QUARTER, OUT)
        out, _ = warpgroup_mma_wait(0, deps=[out, held])
        out, held = _read(q3, out, ta.slice(192, 64, dim=1), QUARTER, OUT)
        state = warpgroup_mma(tc, tb, state, is_async=True)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        so.permute((1, 0)).store((out * scale).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [0, (row + hop * x) // 16, 0, at_c], _ordered(so))
        state = warpgroup_mma_wait(0, deps=[state])
        mbarrier.arrive(empty.index(slot), count=1)
        _fetch(from_c, row + hop * (x + 2), at_c, loaded.index(slot), sc.index(slot), x + 2 < chunks)
    tma.store_wait(0)
    if HAS_LEAVE:
        slot = chunks & 1
        mbarrier.wait(full.index(slot), (chunks >> 1) & 1)
        state *= keeps.index(slot).load(gl.SliceLayout(0, STATE))[None, :]
        gl.store(leave + nh * (2 * K * V) + across[None, :] * V + j[:, None], state)


@gluon.jit
def hopper_turned_kernel(
    q, k, c, o, entry, entry_z, leave, leave_z, edges, theta, positions, scale, T, N, G, H: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, REVERSE: gl.constexpr, PLACED: gl.constexpr,
    HAS_ENTRY: gl.constexpr, HAS_LEAVE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """o from c = v, or (REVERSE) dv from c = do, in BC columns of V; a program walks several heads, one after another.
    The places of G sequences go on from one to the next.

    With 64 columns there are 4 multiplying warps, and two groups of turning ones; with 128 columns 8 and one.
    """
    BLOCKS: gl.constexpr = V // BC
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 2 * K], gl.bfloat16)
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    from_q = _describe(q, N * T, H * K, 64)
    from_k = _describe(k, N * T, H * K, 64)
    from_c = _describe(c, N * T, H * V, BC)
    to = _describe(o, N * T, H * V, BC)
    raw_q = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], HALF)
    raw_k = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], HALF)
    xs = gl.allocate_shared_memory(gl.bfloat16, [2, C, 2 * K], KEYS)
    ys = gl.allocate_shared_memory(gl.bfloat16, [2, C, 2 * K], KEYS)
    sc = gl.allocate_shared_memory(gl.bfloat16, [2, C, BC], COLUMNS)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], COLUMNS)  # weights, then the output
    keeps = gl.allocate_shared_memory(gl.float32, [2, 2 * K], LINE)
    turns = gl.allocate_shared_memory(gl.float32, [4, K], LINE)
    sides = gl.allocate_shared_memory(gl.float32, [2, 2 * K], LINE)
    from_memory = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    from_memory_c = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Few programs, each for many heads: the descriptors are made once.
    for program in range(gl.program_id(0), N * H * BLOCKS, gl.num_programs(0)):
        block = program % BLOCKS
        nh = program // BLOCKS
        n, h = nh // H, nh % H
        for slot in gl.static_range(2):
            mbarrier.init(from_memory.index(slot), count=1)
            mbarrier.init(from_memory_c.index(slot), count=1)
            mbarrier.init(full.index(slot), count=2 if BC == 64 else 1)
            mbarrier.init(empty.index(slot), count=1)
        chunks = T // C
        row = n * T
        place = n % G * T
        hop = h * 0 + C
        if REVERSE:
            row = n * T + T - C
            place += T - C
            hop = h * 0 - C
        for half in gl.static_range(2):
            at = h * K + half * 64
            mbarrier.expect(from_memory.index(half), 4 * C * 64)
            _copy(from_k, row, at, from_memory.index(half), raw_k.index(half), True)
            _copy(from_q, row, at, from_memory.index(half), raw_q.index(half), True)
        for x in gl.static_range(2):
            _fetch(from_c, row + hop * x, h * V + block * BC, from_memory_c.index(x), sc.index(x), x < chunks)
        fence_async_shared()
        if BC == 64:
            gl.warp_specialize(
                [
                    (_multiply_for_values, (
                        from_c, to, xs, ys, sc, so, keeps, from_memory_c, full, empty, entry, entry_z,
                        leave, edges, scale, row, hop, n, h, block, chunks, H, K, V, C, BC, REVERSE, HAS_ENTRY,
                        HAS_LEAVE,
                    )),
                    (_turn_for_values, (
                        from_q, from_k, raw_q, raw_k, xs, ys, keeps, turns, sides, from_memory, full, empty, entry_z,
                        leave_z, edges, theta, positions, row, place, hop, n, h, chunks, 0, 1, H, K, C, REVERSE,
                        PLACED, HAS_ENTRY, HAS_LEAVE,
                    )),
                    (_turn_for_values, (
                        from_q, from_k, raw_q, raw_k, xs, ys, keeps, turns, sides, from_memory, full, empty, entry_z,
                        leave_z, edges, theta, positions, row, place, hop, n, h, chunks, 1, 1, H, K, C, REVERSE,
                        PLACED, HAS_ENTRY, HAS_LEAVE,
                    )),
                ],
                [4, 4],
                [REGISTERS, REGISTERS],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_multiply_for_values, (
                        from_c, to, xs, ys, sc, so, keeps, from_memory_c, full, empty, entry, entry_z,
                        leave, edges, scale, row, hop, n, h, block, chunks, H, K, V, C, BC, REVERSE, HAS_ENTRY,
                        HAS_LEAVE,
                    )),
                    (_turn_for_values, (
                        from_q, from_k, raw_q, raw_k, xs, ys, keeps, turns, sides, from_memory, full, empty, entry_z,
                        leave_z, edges, theta, positions, row, place, hop, n, h, chunks, 0, 2, H, K, C, REVERSE,
                        PLACED, HAS_ENTRY, HAS_LEAVE,
                    )),
                ],
                [4],
                [REGISTERS],
            )  # fmt: skip
        for slot in gl.static_range(2):
            mbarrier.invalidate(empty.index(slot))
            mbarrier.invalidate(from_memory.index(slot))
            mbarrier.invalidate(from_memory_c.index(slot))
            mbarrier.invalidate(full.index(slot))


@gluon.jit
def _turn_part_for_queries(
    sk, xs, inverses, keeps, turns, loaded_k, empty, edges, positions, unit, row, place, x, reference, mass,
    PART: gl.constexpr, H: gl.constexpr, K: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr,
):  # fmt: skip
    """Keys of 32 channels of chunk x; returns reference and mass after it."""
    EIGHT: gl.constexpr = _rows_layout(8)
    slot = x & 1
    rates = _take_rates(turns, PART)
    angles = _begin_angles(place, rates, EIGHT)
    if PART == 0:
        mbarrier.wait(loaded_k.index(slot), (x >> 1) & 1)
    key = sk.index(slot).slice(32 * PART, 32, dim=1).permute((1, 0)).load(_rows_layout(C))
    now = _move(reference, gl.convert_layout(_highest(key), reference.type.layout, assert_trivial=True))
    keep = _power(reference - now)
    before = mass * keep
    edges += x * (2 * H * K)
    gl.store(edges, now)
    gl.store(edges + K, before)
    key = _power(_widen(key) * LOG2_E - now[:, None])
    sums, mass = _sums(key, gl.maximum(before, TINY), unit)
    inverse = _in_order(_invert_fast(sums))
    if PART == 0:
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
    keeps.index(slot).slice(32 * PART, 32).store(keep)
    _hand(inverses.index(slot), PART, inverse)
    both = _turn(key, angles, positions, row, rates, PLACED)
    xs.index(slot).slice(64 * PART, 64, dim=1).permute((1, 0)).store(both)
    return now, gl.where(mass > 1.0, mass, 0.0)  # TINY alone is no mass


@gluon.jit
def _begin_for_queries(entry_z, at, HAS_ENTRY: gl.constexpr):
    """Reference and mass of channels before the sweep."""
    reference = gl.full_like(at.to(gl.float32), NOTHING)
    mass = gl.full_like(at.to(gl.float32), 0.0)
    if HAS_ENTRY:
        reference, mass = _start(gl.load(entry_z + at))
    return reference, mass


@gluon.jit
def _turn_for_queries(
    from_k, sk, xs, inverses, keeps, turns, loaded_k, full, empty, entry_z, edges, theta, positions, scale, row, origin,
    n, h, block, chunks, H: gl.constexpr, K: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr,
    HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    """What 4 turning warps do: 32 channels, then the other 32, for few registers."""
    CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    _put_rates(turns, 0, _rates(gl.load(theta + h * K + block * 64 + gl.arange(0, 64, CHANNELS))))
    i = block * 64 + gl.arange(0, 32, gl.SliceLayout(1, _rows_layout(C)))
    nh = n.to(gl.int64) * H + h
    edges += (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    r0, m0 = _begin_for_queries(entry_z, nh * K + i, HAS_ENTRY)
    r1, m1 = _begin_for_queries(entry_z, nh * K + i + 32, HAS_ENTRY)
    unit = 1 / scale
    for x in range(0, chunks):
        slot = x & 1
        r0, m0 = _turn_part_for_queries(
            sk, xs, inverses, keeps, turns, loaded_k, empty, edges, positions, unit, row + C * x, origin + C * x, x, r0,
            m0, 0, H, K, C, PLACED,
        )  # fmt: skip
        r1, m1 = _turn_part_for_queries(
            sk, xs, inverses, keeps, turns, loaded_k, empty, edges + 32, positions, unit, row + C * x, origin + C * x,
            x, r1, m1, 1, H, K, C, PLACED,
        )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
        _fetch(from_k, row + C * (x + 2), h * K + block * 64, loaded_k.index(slot), sk.index(slot), x + 2 < chunks)
    edges += chunks * (2 * H * K)
    gl.store(edges, r0)
    gl.store(edges + 32, r1)
    gl.store(edges + K, m0)
    gl.store(edges + K + 32, m1)


@gluon.jit
def _score_for_queries(
    from_q, from_v, from_do, sq, sv, sd, weights, loaded, full, empty, row, at_k, at_v, chunks, V: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Loads what a chunk's products need, once what lies there was used, and makes its weights."""
    for x in range(0, chunks):
        slot = x & 1
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
        mbarrier.expect(loaded.index(slot), 2 * C * (2 * V + 64), pred=x >= 2)
        _copy(from_q, row + C * x, at_k, loaded.index(slot), sq.index(slot), x >= 2)
        _copy(from_v, row + C * x, at_v, loaded.index(slot), sv.index(slot), x >= 2)
        _copy(from_do, row + C * x, at_v, loaded.index(slot), sd.index(slot), x >= 2)
        mbarrier.wait(loaded.index(slot), (x >> 1) & 1)
        _score(sv, sd, weights, slot, C, False)
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _multiply_for_queries(
    to, sq, sv, sd, xs, inverses, keeps, so, weights, full, empty, entry, entry_z, theta, dtheta, positions, row,
    origin, n, h, block, chunks, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    TILE: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0])
    CHAIN: gl.constexpr = gl.BlockedLayout([1, 1, 16], [8, 4, 1], [8, 1, 1], [2, 1, 0])
    at_k = h * K + block * 64
    nh = n.to(gl.int64) * H + h
    i = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, TILE))
    rates = _rates(gl.load(theta + h * K + i))
    state = gl.zeros([128, V], gl.float32, STATE)
    slopes = gl.zeros([64, 4], gl.float32, gl.SliceLayout(2, CHAIN))
    if HAS_ENTRY:
        channel, half = _channels(gl.arange(0, 128, gl.SliceLayout(1, STATE)), block)
        at = (half * K + channel)[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, STATE))[None, :]
        begin, mass = _start(gl.load(entry_z + nh * K + channel))
        state += gl.load(entry + nh * (2 * K * V) + at) * mass[:, None]
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(full.index(slot), phase)
        tx = xs.index(slot).permute((1, 0))
        out = gl.zeros([128, C], gl.float32, OUT)
        out = warpgroup_mma(tx, weights.index(slot), out, is_async=True)
        # Without a question whether factors are 1, for which the warps would have to look at all of them.
        state *= _both_factors(keeps.index(slot), STATE)[:, None]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        out = warpgroup_mma(held, sd.index(slot).permute((1, 0)), out, is_async=True)
        state = warpgroup_mma(tx, sv.index(slot), state, is_async=True)
        place, cos, sin = _chunk_angles(positions, row + C * x, origin + C * x, rates, TILE, PLACED)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        first, second = _take_both(out, TILE)
        inverse = _take(inverses.index(slot), TILE)
        tma.store_wait(0)
        so.permute((1, 0)).store(((first * cos + second * sin) * inverse).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [0, (row + C * x) // 16, 0, at_k], _ordered(so))
        inverse *= _widen(sq.index(slot).permute((1, 0)).load(TILE))
        slopes += gl.sum(_in_order((second * cos - first * sin) * inverse * place[None, :]), 2)
        state = warpgroup_mma_wait(0, deps=[state])
        mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(0)
    slopes = gl.convert_layout(gl.sum(slopes, 1), gl.SliceLayout(1, TILE))
    gl.store(dtheta + nh * K + i, slopes)


@gluon.jit
def hopper_turned_queries_kernel(
    q, k, v, do, dq, entry, entry_z, edges, theta, dtheta, positions, scale, T, N, G, H: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
    REGISTERS: gl.constexpr, SCORING: gl.constexpr,
):  # fmt: skip
    """dq, `edges` and the share of dq in dtheta [N, H, K]; `entry` is the initial state. The places of G sequences go
    on from one to the next."""
    BLOCKS: gl.constexpr = K // 64
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    BOTH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 128], gl.bfloat16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    OWN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    from_q = _describe(q, N * T, H * K, 64)
    from_k = _describe(k, N * T, H * K, 64)
    from_v = _describe(v, N * T, H * V, V)
    from_do = _describe(do, N * T, H * V, V)
    to = _describe(dq, N * T, H * K, 64)
    sk = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    xs = gl.allocate_shared_memory(gl.bfloat16, [2, C, 128], BOTH)
    inverses = gl.allocate_shared_memory(gl.float32, [2, 4, 256, 4], OWN)
    keeps = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    turns = gl.allocate_shared_memory(gl.float32, [4, 64], LINE)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, 64], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], KEYS)
    loaded_k = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Few programs, each for many heads: the descriptors are made once.
    for program in range(gl.program_id(0), N * H * BLOCKS, gl.num_programs(0)):
        block = program % BLOCKS
        nh = program // BLOCKS
        n, h = nh // H, nh % H
        for slot in gl.static_range(2):
            mbarrier.init(loaded_k.index(slot), count=1)
            mbarrier.init(loaded.index(slot), count=1)
            mbarrier.init(full.index(slot), count=2)
            mbarrier.init(empty.index(slot), count=1)
        chunks = T // C
        row = n * T
        origin = n % G * T
        at_k = h * K + block * 64
        for x in gl.static_range(2):
            _fetch(from_k, row + C * x, at_k, loaded_k.index(x), sk.index(x), x < chunks)
            mbarrier.expect(loaded.index(x), 2 * C * (2 * V + 64), pred=x < chunks)
            _copy(from_q, row + C * x, at_k, loaded.index(x), sq.index(x), x < chunks)
            _copy(from_v, row + C * x, h * V, loaded.index(x), sv.index(x), x < chunks)
            _copy(from_do, row + C * x, h * V, loaded.index(x), sd.index(x), x < chunks)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_multiply_for_queries, (
                    to, sq, sv, sd, xs, inverses, keeps, so, weights, full, empty, entry, entry_z, theta, dtheta,
                    positions, row, origin, n, h, block, chunks, H, K, V, C, PLACED, HAS_ENTRY,
                )),
                (_turn_for_queries, (
                    from_k, sk, xs, inverses, keeps, turns, loaded_k, full, empty, entry_z, edges, theta, positions,
                    scale, row, origin, n, h, block, chunks, H, K, C, PLACED, HAS_ENTRY,
                )),
                (_score_for_queries, (
                    from_q, from_v, from_do, sq, sv, sd, weights, loaded, full, empty, row, at_k, h * V, chunks, V, C,
                )),
            ],
            [4, 4],
            [REGISTERS, SCORING],
        )  # fmt: skip
        for slot in gl.static_range(2):
            mbarrier.invalidate(empty.index(slot))
            mbarrier.invalidate(full.index(slot))
            mbarrier.invalidate(loaded.index(slot))
            mbarrier.invalidate(loaded_k.index(slot))


@gluon.jit
def _turn_part_for_keys(
    sq, sk, sg, keys, ys, tails, keeps, turns, sides, loaded_k, empty, positions, scale, row, place, x, reference, fall,
    PART: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr,
):  # fmt: skip
    """Queries of 32 channels of a chunk; returns its reference, and the sum of slopes from its first token on."""
    ROWS: gl.constexpr = _rows_layout(C)
    EIGHT: gl.constexpr = _rows_layout(8)
    slot = x & 1
    rates = _take_rates(turns, PART)
    angles = _begin_angles(place, rates, EIGHT)
    now, before = _take_sides(sides, slot, PART, gl.SliceLayout(1, ROWS))
    keep = _power(now - reference)
    if PART == 0:
        mbarrier.wait(loaded_k.index(slot), (x >> 1) & 1)
    key = _widen(sk.index(slot).slice(32 * PART, 32, dim=1).permute((1, 0)).load(ROWS))
    key = _power(key * LOG2_E - now[:, None])
    sums, _ = _sums(key, gl.maximum(before, TINY), 1.0)
    query = _widen(sq.index(slot).slice(32 * PART, 32, dim=1).permute((1, 0)).load(ROWS)) * _invert_fast(sums)
    slope = query * _widen(sg.index(slot).slice(32 * PART, 32, dim=1).permute((1, 0)).load(ROWS))
    # What is subtracted from the gradient: the slopes of a token and of all after it.
    tail, fall = _tails(slope, fall * keep)
    if PART == 0:
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
    keeps.index(slot).slice(32 * PART, 32).store(keep)
    _hand(keys.index(slot), PART, _in_order(key.to(gl.bfloat16)))
    _hand(tails.index(slot), PART, tail)
    if PLACED:
        query *= scale
    else:
        angles = _scaled(angles, scale)
    both = _turn(query, angles, positions, row, rates, PLACED)
    ys.index(slot).slice(64 * PART, 64, dim=1).permute((1, 0)).store(both)
    return now, fall


@gluon.jit
def _begin_for_keys(entry, entry_z, end, edge, nh, i, K: gl.constexpr, V: gl.constexpr, HAS_ENTRY: gl.constexpr):
    """Of 32 channels: the reference after the last chunk, and what the final state's gradients give to all slopes."""
    reference = gl.load(edge + i)
    fall = gl.full_like(reference, 0.0)
    if HAS_ENTRY:
        PIECE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
        rows = gl.convert_layout(i, gl.SliceLayout(1, PIECE))
        entry += nh * (2 * K * V)
        end += nh * (2 * K * V)
        at = rows[:, None] * V + gl.arange(0, 32, gl.SliceLayout(0, PIECE))[None, :]
        share = gl.zeros([32], gl.float32, gl.SliceLayout(1, PIECE))
        for _ in range(0, V // 32):
            share += gl.sum(gl.load(entry + at) * gl.load(end + at), 1)
            share += gl.sum(gl.load(entry + at + K * V) * gl.load(end + at + K * V), 1)
            at += 32
        fall = gl.convert_layout(share, reference.type.layout) - gl.load(entry_z + nh * K + i)
        fall *= _invert(gl.load(edge + K + i))
    return reference, fall


@gluon.jit
def _turn_for_keys(
    from_q, from_k, from_dq, sq, sk, sg, keys, ys, tails, keeps, turns, sides, loaded_k, full, empty, entry, entry_z,
    end, leave_z, edges, theta, positions, scale, row, origin, n, h, block, chunks, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr, HAS_LEAVE: gl.constexpr,
):  # fmt: skip
    """What 4 turning warps do: 32 channels, then the other 32, for few registers."""
    CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    channels = block * 64 + gl.arange(0, 64, CHANNELS)
    _put_rates(turns, 0, _rates(gl.load(theta + h * K + channels)))
    nh = n.to(gl.int64) * H + h
    edges += (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K)
    places = _sides(edges, block * 64, 64, K)
    _fetch_sides(sides, places, 0, chunks - 1, 0, H, K)
    _fetch_sides(sides, places, 1, gl.maximum(chunks - 2, 0), 0, H, K)
    i = block * 64 + gl.arange(0, 32, gl.SliceLayout(1, _rows_layout(C)))
    r0, f0 = _begin_for_keys(entry, entry_z, end, edges + chunks * (2 * H * K), nh, i, K, V, HAS_ENTRY)
    r1, f1 = _begin_for_keys(entry, entry_z, end, edges + chunks * (2 * H * K), nh, i + 32, K, V, HAS_ENTRY)
    at_k = h * K + block * 64
    for x in range(0, chunks):
        slot = x & 1
        place = origin + (chunks - 1 - x) * C
        async_copy.wait_group(1)
        r0, f0 = _turn_part_for_keys(
            sq, sk, sg, keys, ys, tails, keeps, turns, sides, loaded_k, empty, positions, scale, row - C * x, place, x,
            r0, f0, 0, C, PLACED,
        )  # fmt: skip
        r1, f1 = _turn_part_for_keys(
            sq, sk, sg, keys, ys, tails, keeps, turns, sides, loaded_k, empty, positions, scale, row - C * x, place, x,
            r1, f1, 1, C, PLACED,
        )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
        wanted = x + 2 < chunks
        mbarrier.expect(loaded_k.index(slot), 3 * 2 * C * 64, pred=wanted)
        _copy(from_q, row - C * (x + 2), at_k, loaded_k.index(slot), sq.index(slot), wanted)
        _copy(from_k, row - C * (x + 2), at_k, loaded_k.index(slot), sk.index(slot), wanted)
        _copy(from_dq, row - C * (x + 2), at_k, loaded_k.index(slot), sg.index(slot), wanted)
        _fetch_sides(sides, places, slot, gl.maximum(chunks - 3 - x, 0), 0, H, K)
    async_copy.wait_group(0)
    if HAS_LEAVE:
        gl.store(leave_z + nh * K + i, -f0 * gl.load(edges + K + i))
        gl.store(leave_z + nh * K + i + 32, -f1 * gl.load(edges + K + i + 32))


@gluon.jit
def _score_for_keys(
    from_v, from_do, sv, sd, weights, loaded, full, empty, row, at_v, chunks, V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Loads what a chunk's products need, once what lies there was used, and makes its weights."""
    for x in range(0, chunks):
        slot = x & 1
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
        mbarrier.expect(loaded.index(slot), 2 * 2 * C * V, pred=x >= 2)
        _copy(from_v, row - C * x, at_v, loaded.index(slot), sv.index(slot), x >= 2)
        _copy(from_do, row - C * x, at_v, loaded.index(slot), sd.index(slot), x >= 2)
        mbarrier.wait(loaded.index(slot), (x >> 1) & 1)
        _score(sd, sv, weights, slot, C, True)
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _multiply_for_keys(
    to, sv, sd, keys, ys, tails, keeps, so, weights, full, empty, entry, leave, edges, theta, dtheta, positions, row,
    origin, n, h, block, chunks, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr, HAS_LEAVE: gl.constexpr,
):  # fmt: skip
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    TILE: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0])
    CHANNEL: gl.constexpr = gl.SliceLayout(1, TILE)
    CHAIN: gl.constexpr = gl.BlockedLayout([1, 1, 16], [8, 4, 1], [8, 1, 1], [2, 1, 0])
    at_k = h * K + block * 64
    nh = n.to(gl.int64) * H + h
    i = block * 64 + gl.arange(0, 64, CHANNEL)
    rates = _rates(gl.load(theta + h * K + i))
    channel, half = _channels(gl.arange(0, 128, gl.SliceLayout(1, STATE)), block)
    at = (half * K + channel)[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, STATE))[None, :]
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + K + channel
    state = gl.zeros([128, V], gl.float32, STATE)
    slopes = gl.zeros([64, 4], gl.float32, gl.SliceLayout(2, CHAIN))
    if HAS_ENTRY:
        state += gl.load(entry + nh * (2 * K * V) + at) * _invert(gl.load(edge + chunks * (2 * H * K)))[:, None]
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(full.index(slot), phase)
        ty = ys.index(slot).permute((1, 0))
        out = gl.zeros([128, C], gl.float32, OUT)
        out = warpgroup_mma(ty, weights.index(slot), out, is_async=True)
        # Without a question whether factors are 1, for which the warps would have to look at all of them.
        state *= _both_factors(keeps.index(slot), STATE)[:, None]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        out = warpgroup_mma(held, sv.index(slot).permute((1, 0)), out, is_async=True)
        state = warpgroup_mma(ty, sd.index(slot), state, is_async=True)
        place = origin + (chunks - 1 - x) * C
        places, cos, sin = _chunk_angles(positions, row - C * x, place, rates, TILE, PLACED)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        first, second = _take_both(out, TILE)
        tail = _take(tails.index(slot), TILE)
        key = _take(keys.index(slot), TILE)
        tma.store_wait(0)
        so.permute((1, 0)).store((key * (first * cos + second * sin - tail)).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [0, (row - C * x) // 16, 0, at_k], _ordered(so))
        slopes += gl.sum(_in_order((second * cos - first * sin) * key * places[None, :]), 2)
        state = warpgroup_mma_wait(0, deps=[state])
        mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(0)
    gl.store(dtheta + nh * K + i, gl.convert_layout(gl.sum(slopes, 1), CHANNEL))
    if HAS_LEAVE:
        gl.store(leave + nh * (2 * K * V) + at, state * gl.load(edge)[:, None])


@gluon.jit
def hopper_turned_keys_kernel(
    q, k, v, do, dq, du, entry, entry_z, end, leave, leave_z, edges, theta, dtheta, positions, scale, T, N, G,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
    HAS_LEAVE: gl.constexpr, REGISTERS: gl.constexpr, SCORING: gl.constexpr,
):  # fmt: skip
    """The gradient of the logits and its share in dtheta; `entry`, `entry_z` are those of the final state `end`. The
    places of G sequences go on from one to the next."""
    BLOCKS: gl.constexpr = K // 64
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    BOTH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 128], gl.bfloat16)
    OWN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    from_q = _describe(q, N * T, H * K, 64)
    from_k = _describe(k, N * T, H * K, 64)
    from_dq = _describe(dq, N * T, H * K, 64)
    from_v = _describe(v, N * T, H * V, V)
    from_do = _describe(do, N * T, H * V, V)
    to = _describe(du, N * T, H * K, 64)
    sq = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sg = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, 2, 256, 8], OWN)
    ys = gl.allocate_shared_memory(gl.bfloat16, [2, C, 128], BOTH)
    tails = gl.allocate_shared_memory(gl.float32, [2, 4, 256, 4], OWN)
    keeps = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    turns = gl.allocate_shared_memory(gl.float32, [4, 64], LINE)
    sides = gl.allocate_shared_memory(gl.float32, [2, 128], LINE)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, 64], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], KEYS)
    loaded_k = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Few programs, each for many heads: the descriptors are made once.
    for program in range(gl.program_id(0), N * H * BLOCKS, gl.num_programs(0)):
        block = program % BLOCKS
        nh = program // BLOCKS
        n, h = nh // H, nh % H
        for slot in gl.static_range(2):
            mbarrier.init(loaded_k.index(slot), count=1)
            mbarrier.init(loaded.index(slot), count=1)
            mbarrier.init(full.index(slot), count=2)
            mbarrier.init(empty.index(slot), count=1)
        chunks = T // C
        row = n * T + T - C
        origin = n % G * T
        at_k = h * K + block * 64
        for x in gl.static_range(2):
            mbarrier.expect(loaded_k.index(x), 3 * 2 * C * 64, pred=x < chunks)
            _copy(from_q, row - C * x, at_k, loaded_k.index(x), sq.index(x), x < chunks)
            _copy(from_k, row - C * x, at_k, loaded_k.index(x), sk.index(x), x < chunks)
            _copy(from_dq, row - C * x, at_k, loaded_k.index(x), sg.index(x), x < chunks)
            mbarrier.expect(loaded.index(x), 2 * 2 * C * V, pred=x < chunks)
            _copy(from_v, row - C * x, h * V, loaded.index(x), sv.index(x), x < chunks)
            _copy(from_do, row - C * x, h * V, loaded.index(x), sd.index(x), x < chunks)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_multiply_for_keys, (
                    to, sv, sd, keys, ys, tails, keeps, so, weights, full, empty, entry, leave, edges, theta, dtheta,
                    positions, row, origin, n, h, block, chunks, H, K, V, C, PLACED, HAS_ENTRY, HAS_LEAVE,
                )),
                (_turn_for_keys, (
                    from_q, from_k, from_dq, sq, sk, sg, keys, ys, tails, keeps, turns, sides, loaded_k, full, empty,
                    entry, entry_z, end, leave_z, edges, theta, positions, scale, row, origin, n, h, block, chunks, H,
                    K, V, C, PLACED, HAS_ENTRY, HAS_LEAVE,
                )),
                (_score_for_keys, (
                    from_v, from_do, sv, sd, weights, loaded, full, empty, row, h * V, chunks, V, C,
                )),
            ],
            [4, 4],
            [REGISTERS, SCORING],
        )  # fmt: skip
        for slot in gl.static_range(2):
            mbarrier.invalidate(empty.index(slot))
            mbarrier.invalidate(full.index(slot))
            mbarrier.invalidate(loaded.index(slot))
            mbarrier.invalidate(loaded_k.index(slot))
