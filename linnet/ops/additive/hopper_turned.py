"""The sweeps of `linnet.ops.additive.hopper` that own columns of V, with LRPE: o and dv (see `hopper_turning`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from linnet.ops.additive.hopper import LN_2, LOG2_E, NOTHING, TINY, _invert, _start
from linnet.ops.additive.hopper_turning import (
    _begin_angles,
    _beside,
    _fetch1,
    _fetch2,
    _frequencies,
    _invert_fast,
    _load,
    _move,
    _part_angles,
    _power,
    _put,
    _sum_up,
)


@gluon.jit
def _turn_half(
    from_q, from_k, raw_q, raw_k, x1, x2, y1, y2, keeps, loaded, empty, edges, high, low, positions, row, place, hop, h,
    x, chunks, reference, mass, top, before, HALF: gl.constexpr, WAIT: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    C: gl.constexpr, REVERSE: gl.constexpr, PLACED: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """Keys and queries of 64 channels of chunk x, 16 tokens at a time, for few registers.

    Returns reference and mass after the chunk, and (REVERSE) those of the chunk to come.
    """
    slot = x & 1
    i = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, TURNED))
    at_k = h * K + HALF * 64
    tk = raw_k.index(HALF)
    tq = raw_q.index(HALF)
    next_top = top
    next_before = before
    if REVERSE:
        next_row = chunks - 1 - gl.minimum(x + 1, chunks - 1)
        next_top = gl.load(edges + i + next_row * (2 * H * K))
        next_before = gl.load(edges + i + next_row * (2 * H * K) + K)
    angles = _begin_angles(place, high, low, TURNED)
    mbarrier.wait(loaded.index(HALF), x & 1)
    if REVERSE:
        keep = _power(top - reference)
        now = top
    else:
        now = _move(reference, gl.max(_load(tk, TURNED), 1))
        keep = _power(reference - now)
        before = mass * keep
    if WAIT:
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
    keeps.index(slot).slice(HALF * 64, 64).store(keep)
    total = gl.zeros([64, 16], gl.float32, TURNED) + gl.maximum(before, TINY)[:, None]
    for part in gl.static_range(C // 16):
        key = _power(_load(tk.slice(16 * part, 16), TURNED) * LOG2_E - now[:, None])
        masses, total = _sum_up(key, total, TURNED, False)
        c, s, angles = _part_angles(angles, positions, row, high, low, part, TURNED, PLACED)
        query = _load(tq.slice(16 * part, 16), TURNED) * _invert_fast(masses)
        k1, k2 = (key * c).to(gl.bfloat16), (key * s).to(gl.bfloat16)
        q1, q2 = (query * c).to(gl.bfloat16), (query * s).to(gl.bfloat16)
        # Two parts at once: the compiler puts a barrier between stores to the same memory.
        if part % 2 == 0:
            even_k1, even_k2, even_q1, even_q2 = k1, k2, q1, q2
        else:
            _put(x1.index(slot), HALF, part // 2, _beside(even_k1, k1, TURNED))
            _put(x2.index(slot), HALF, part // 2, _beside(even_k2, k2, TURNED))
            _put(y1.index(slot), HALF, part // 2, _beside(even_q1, q1, TURNED))
            _put(y2.index(slot), HALF, part // 2, _beside(even_q2, q2, TURNED))
    _fetch2(from_k, from_q, row + hop, at_k, at_k, tk, tq, loaded.index(HALF), x + 1 < chunks, 4 * C * 64)
    mass = gl.max(total, 1)
    return now, gl.where(mass > 1.0, mass, 0.0), next_top, next_before


@gluon.jit
def _begin(entry_z, edges, nh, chunks, i, H: gl.constexpr, K: gl.constexpr, REVERSE: gl.constexpr,
           HAS_ENTRY: gl.constexpr):  # fmt: skip
    """Reference and mass of channels before the sweep, and (REVERSE) those of the first chunk."""
    reference = gl.full_like(i.to(gl.float32), NOTHING)
    mass = gl.full_like(i.to(gl.float32), 0.0)
    top = reference
    before = mass
    if REVERSE:
        reference = gl.load(edges + i + chunks * (2 * H * K))
        top = gl.load(edges + i + (chunks - 1) * (2 * H * K))
        before = gl.load(edges + i + (chunks - 1) * (2 * H * K) + K)
    else:
        if HAS_ENTRY:
            reference, mass = _start(gl.load(entry_z + nh * K + i))
    return reference, mass, top, before


@gluon.jit
def _turn_tiles(
    from_q, from_k, raw_q, raw_k, x1, x2, y1, y2, keeps, loaded, full, empty, entry_z, leave_z, edges, theta,
    positions, row, place, hop, n, h, chunks, FIRST: gl.constexpr, HALVES: gl.constexpr, H: gl.constexpr,
    K: gl.constexpr, C: gl.constexpr, REVERSE: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
    HAS_LEAVE: gl.constexpr,
):  # fmt: skip
    """What 4 turning warps do: the half FIRST of the channels, or (HALVES 2) both, one after the other."""
    TURNED: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    i = FIRST * 64 + gl.arange(0, 64, gl.SliceLayout(1, TURNED))
    nh = n.to(gl.int64) * H + h
    if REVERSE:
        edges += (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K)
    high0, low0 = _frequencies(gl.load(theta + h * K + i))
    r0, m0, top0, before0 = _begin(entry_z, edges, nh, chunks, i, H, K, REVERSE, HAS_ENTRY)
    if HALVES == 2:
        high1, low1 = _frequencies(gl.load(theta + h * K + 64 + i))
        r1, m1, top1, before1 = _begin(entry_z, edges, nh, chunks, 64 + i, H, K, REVERSE, HAS_ENTRY)
    for x in range(0, chunks):
        r0, m0, top0, before0 = _turn_half(
            from_q, from_k, raw_q, raw_k, x1, x2, y1, y2, keeps, loaded, empty, edges, high0, low0, positions, row,
            place, hop, h, x, chunks, r0, m0, top0, before0, FIRST, True, H, K, C, REVERSE, PLACED, TURNED,
        )  # fmt: skip
        if HALVES == 2:
            r1, m1, top1, before1 = _turn_half(
                from_q, from_k, raw_q, raw_k, x1, x2, y1, y2, keeps, loaded, empty, edges, high1, low1, positions, row,
                place, hop, h, x, chunks, r1, m1, top1, before1, 1, False, H, K, C, REVERSE, PLACED, TURNED,
            )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(full.index(x & 1), count=1)
        row += hop
        place += hop
    if HAS_LEAVE:
        # What normalises the final state goes where the factors of one more chunk would.
        slot = chunks & 1
        mbarrier.wait(empty.index(slot), (chunks >> 1) & 1 ^ 1)
        keeps.index(slot).slice(FIRST * 64, 64).store(_invert(m0))
        if HALVES == 2:
            keeps.index(slot).slice(64, 64).store(_invert(m1))
        mbarrier.arrive(full.index(slot), count=1)
        gl.store(leave_z + nh * K + i, _log_sum(r0, m0))
        if HALVES == 2:
            gl.store(leave_z + nh * K + 64 + i, _log_sum(r1, m1))


@gluon.jit
def _log_sum(reference, mass):
    return gl.where(mass > 0, (reference + gl.log2(gl.where(mass > 0, mass, 1.0))) * LN_2, -float("inf"))


@gluon.jit
def _scale(state, factors):
    return state * factors.load(gl.SliceLayout(0, state.type.layout))[None, :]


@gluon.jit
def _use(state, out, tile, c, more, OUT: gl.constexpr):
    """64 channels of the state, rounded, times those of queries (or keys), added to `out`; and the state moves on by c
    times those of keys (or queries). Both are in flight."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
    out = warpgroup_mma(held, tile.permute((1, 0)), out, is_async=True)
    state = warpgroup_mma(c, more, state, is_async=True)
    return state, out, held


@gluon.jit
def _multiply(
    from_c, to, x1, x2, y1, y2, sc, so, keeps, loaded, full, empty, entry, entry_z, leave, edges, scale, row,
    hop, n, h, block, chunks, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BC: gl.constexpr,
    REVERSE: gl.constexpr, HAS_ENTRY: gl.constexpr, HAS_LEAVE: gl.constexpr,
):  # fmt: skip
    """What the other warps do. The state is in quarters, [BC, 64]: cosines of either half of channels, then sines."""
    W: gl.constexpr = BC // 16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, W // 4], instr_shape=[16, C * 4 // W, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, 64, 16])
    ALL: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([4, 1], [32, 1], [1, W], [0, 1]))
    at_c = h * V + block * BC
    down = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    inside = down >= right if REVERSE else down <= right
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    nh = n.to(gl.int64) * H + h
    across = gl.arange(0, 64, gl.SliceLayout(0, STATE))
    j = block * BC + gl.arange(0, BC, gl.SliceLayout(1, STATE))
    s0 = gl.zeros([BC, 64], gl.float32, STATE)
    s1 = gl.zeros([BC, 64], gl.float32, STATE)
    s2 = gl.zeros([BC, 64], gl.float32, STATE)
    s3 = gl.zeros([BC, 64], gl.float32, STATE)
    if HAS_ENTRY:
        place = entry + nh * (2 * K * V) + across[None, :] * V + j[:, None]
        if REVERSE:
            edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + chunks * (2 * H * K) + K + across
            factor0 = (_invert(gl.load(edge)) / scale)[None, :]
            factor1 = (_invert(gl.load(edge + 64)) / scale)[None, :]
        else:
            begin, mass0 = _start(gl.load(entry_z + nh * K + across))
            begin, mass1 = _start(gl.load(entry_z + nh * K + 64 + across))
            factor0 = mass0[None, :]
            factor1 = mass1[None, :]
        s0 = gl.load(place) * factor0
        s1 = gl.load(place + 64 * V) * factor1
        s2 = gl.load(place + K * V) * factor0
        s3 = gl.load(place + (K + 64) * V) * factor1
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(full.index(slot), phase)
        ta = x1.index(slot) if REVERSE else y1.index(slot)
        ta2 = x2.index(slot) if REVERSE else y2.index(slot)
        tb = y1.index(slot) if REVERSE else x1.index(slot)
        tb2 = y2.index(slot) if REVERSE else x2.index(slot)
        tc = sc.index(slot).permute((1, 0))
        weights = so.slice(0, C, dim=1)
        factors = keeps.index(slot)
        scores = warpgroup_mma(tb, ta.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(tb2, ta2.permute((1, 0)), scores, is_async=True)
        moved = gl.min(factors.load(ALL), 0) < 1.0  # seldom: references move in large steps
        out = gl.zeros([BC, C], gl.float32, OUT)
        mbarrier.wait(loaded.index(slot), phase)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if moved:
            s0 = _scale(s0, factors.slice(0, 64))
            s1 = _scale(s1, factors.slice(64, 64))
            s2 = _scale(s2, factors.slice(0, 64))
            s3 = _scale(s3, factors.slice(64, 64))
        tma.store_wait(0)
        weights.store(gl.where(inside, scores, 0.0).to(gl.bfloat16))
        s0, out, held = _use(s0, out, ta.slice(0, 64, dim=1), tc, tb.slice(0, 64, dim=1), OUT)
        fence_async_shared()
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        out = warpgroup_mma(tc, weights, out, is_async=True)
        s1, out, held = _use(s1, out, ta.slice(64, 64, dim=1), tc, tb.slice(64, 64, dim=1), OUT)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        s2, out, held = _use(s2, out, ta2.slice(0, 64, dim=1), tc, tb2.slice(0, 64, dim=1), OUT)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        s3, out, held = _use(s3, out, ta2.slice(64, 64, dim=1), tc, tb2.slice(64, 64, dim=1), OUT)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        so.permute((1, 0)).store((out * scale).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [row + hop * x, at_c], so)
        s0, s1, s2, s3 = warpgroup_mma_wait(0, deps=[s0, s1, s2, s3])
        mbarrier.arrive(empty.index(slot), count=1)
        _fetch1(
            from_c, row + hop * (x + 2), at_c, loaded.index(slot), sc.index(slot), x + 2 < chunks, 2 * C * BC
        )  # fmt: skip
    tma.store_wait(0)
    if HAS_LEAVE:
        slot = chunks & 1
        mbarrier.wait(full.index(slot), (chunks >> 1) & 1)
        factor0 = keeps.index(slot).slice(0, 64).load(gl.SliceLayout(0, STATE))[None, :]
        factor1 = keeps.index(slot).slice(64, 64).load(gl.SliceLayout(0, STATE))[None, :]
        to_state = leave + nh * (2 * K * V) + across[None, :] * V + j[:, None]
        gl.store(to_state, s0 * factor0)
        gl.store(to_state + 64 * V, s1 * factor1)
        gl.store(to_state + K * V, s2 * factor0)
        gl.store(to_state + (K + 64) * V, s3 * factor1)


@gluon.jit
def hopper_turned_kernel(
    q, k, c, o, entry, entry_z, leave, leave_z, edges, theta, positions, scale, T, N, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, REVERSE: gl.constexpr, PLACED: gl.constexpr,
    HAS_ENTRY: gl.constexpr, HAS_LEAVE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """o from c = v, or (REVERSE) dv from c = do, in BC columns of V of one head a program.

    With 64 columns there are 4 multiplying warps, and two groups of turning ones; with 128 columns 8 and one.
    """
    BLOCKS: gl.constexpr = V // BC
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    from_q = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, 64], HALF)
    from_k = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, 64], HALF)
    from_c = tma.make_tensor_descriptor(c, [N * T, H * V], [H * V, 1], [C, BC], COLUMNS)
    to = tma.make_tensor_descriptor(o, [N * T, H * V], [H * V, 1], [C, BC], COLUMNS)
    raw_q = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], HALF)
    raw_k = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], HALF)
    x1 = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], KEYS)
    x2 = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], KEYS)
    y1 = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], KEYS)
    y2 = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], KEYS)
    sc = gl.allocate_shared_memory(gl.bfloat16, [2, C, BC], COLUMNS)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], COLUMNS)  # scores, then the output
    keeps = gl.allocate_shared_memory(gl.float32, [2, K], LINE)
    from_memory = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    from_memory_c = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(from_memory.index(slot), count=1)
        mbarrier.init(from_memory_c.index(slot), count=1)
        mbarrier.init(full.index(slot), count=2 if BC == 64 else 1)
        mbarrier.init(empty.index(slot), count=1)
    chunks = T // C
    row = n * T
    place = h * 0
    hop = h * 0 + C
    if REVERSE:
        row = n * T + T - C
        place = h * 0 + T - C
        hop = h * 0 - C
    for half in gl.static_range(2):
        at = h * K + half * 64
        _fetch2(
            from_k, from_q, row, at, at, raw_k.index(half), raw_q.index(half), from_memory.index(half), True, 4 * C * 64
        )  # fmt: skip
    for x in gl.static_range(2):
        _fetch1(
            from_c, row + hop * x, h * V + block * BC, from_memory_c.index(x), sc.index(x), x < chunks, 2 * C * BC
        )  # fmt: skip
    fence_async_shared()
    if BC == 64:
        gl.warp_specialize(
            [
                (_multiply, (
                    from_c, to, x1, x2, y1, y2, sc, so, keeps, from_memory_c, full, empty, entry, entry_z,
                    leave, edges, scale, row, hop, n, h, block, chunks, H, K, V, C, BC, REVERSE, HAS_ENTRY,
                    HAS_LEAVE,
                )),
                (_turn_tiles, (
                    from_q, from_k, raw_q, raw_k, x1, x2, y1, y2, keeps, from_memory, full, empty, entry_z,
                    leave_z, edges, theta, positions, row, place, hop, n, h, chunks, 0, 1, H, K, C, REVERSE,
                    PLACED, HAS_ENTRY, HAS_LEAVE,
                )),
                (_turn_tiles, (
                    from_q, from_k, raw_q, raw_k, x1, x2, y1, y2, keeps, from_memory, full, empty, entry_z,
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
                (_multiply, (
                    from_c, to, x1, x2, y1, y2, sc, so, keeps, from_memory_c, full, empty, entry, entry_z,
                    leave, edges, scale, row, hop, n, h, block, chunks, H, K, V, C, BC, REVERSE, HAS_ENTRY,
                    HAS_LEAVE,
                )),
                (_turn_tiles, (
                    from_q, from_k, raw_q, raw_k, x1, x2, y1, y2, keeps, from_memory, full, empty, entry_z,
                    leave_z, edges, theta, positions, row, place, hop, n, h, chunks, 0, 2, H, K, C, REVERSE,
                    PLACED, HAS_ENTRY, HAS_LEAVE,
                )),
            ],
            [4],
            [REGISTERS],
        )  # fmt: skip
