"""The sweep of `linnet.ops.additive.hopper` for the gradient of the logits, with LRPE, cut as that for dq."""

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

from linnet.ops.additive.hopper import LOG2_E, TINY, _invert
from linnet.ops.additive.hopper_rows import (
    _copy,
    _describe,
    _hand,
    _in_order,
    _ordered,
    _rows_layout,
    _sums,
    _tails,
    _take,
    _widen,
)
from linnet.ops.additive.hopper_turning import (
    _begin_angles,
    _both_factors,
    _channels,
    _chunk_angles,
    _fetch_sides,
    _invert_fast,
    _power,
    _put_rates,
    _rates,
    _scaled,
    _score,
    _sides,
    _take_both,
    _take_rates,
    _take_sides,
    _turn,
)


@gluon.jit
def _turn_part(
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
def _begin(entry, entry_z, end, edge, nh, i, K: gl.constexpr, V: gl.constexpr, HAS_ENTRY: gl.constexpr):
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
    r0, f0 = _begin(entry, entry_z, end, edges + chunks * (2 * H * K), nh, i, K, V, HAS_ENTRY)
    r1, f1 = _begin(entry, entry_z, end, edges + chunks * (2 * H * K), nh, i + 32, K, V, HAS_ENTRY)
    at_k = h * K + block * 64
    for x in range(0, chunks):
        slot = x & 1
        place = origin + (chunks - 1 - x) * C
        async_copy.wait_group(1)
        r0, f0 = _turn_part(
            sq, sk, sg, keys, ys, tails, keeps, turns, sides, loaded_k, empty, positions, scale, row - C * x, place, x,
            r0, f0, 0, C, PLACED,
        )  # fmt: skip
        r1, f1 = _turn_part(
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
