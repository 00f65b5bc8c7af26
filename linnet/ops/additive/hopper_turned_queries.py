"""The sweep of `linnet.ops.additive.hopper` for dq, with LRPE (see `hopper_turning`).

A program has 64 channels and walks several heads, one after another. Its state [128, V] has cosines of 8 channels, then
their sines, and so on. The scores v do^T, which want no state, are made by warps of their own, which also load what is
not turned.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from linnet.ops.additive.hopper import LOG2_E, NOTHING, TINY, _start
from linnet.ops.additive.hopper_rows import (
    _copy,
    _describe,
    _fetch,
    _hand,
    _highest,
    _in_order,
    _ordered,
    _rows_layout,
    _sums,
    _take,
    _widen,
)
from linnet.ops.additive.hopper_turning import (
    _begin_angles,
    _both_factors,
    _channels,
    _chunk_angles,
    _invert_fast,
    _move,
    _power,
    _put_rates,
    _rates,
    _score,
    _take_both,
    _take_rates,
    _turn,
)


@gluon.jit
def _turn_part(
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
def _begin(entry_z, at, HAS_ENTRY: gl.constexpr):
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
    r0, m0 = _begin(entry_z, nh * K + i, HAS_ENTRY)
    r1, m1 = _begin(entry_z, nh * K + i + 32, HAS_ENTRY)
    unit = 1 / scale
    for x in range(0, chunks):
        slot = x & 1
        r0, m0 = _turn_part(
            sk, xs, inverses, keeps, turns, loaded_k, empty, edges, positions, unit, row + C * x, origin + C * x, x, r0,
            m0, 0, H, K, C, PLACED,
        )  # fmt: skip
        r1, m1 = _turn_part(
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
