"""The sweep of `linnet.ops.additive.hopper` for the gradient of the logits, with LRPE, cut as that for dq."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from linnet.ops.additive.hopper import LOG2_E, TINY, _invert
from linnet.ops.additive.hopper_turning import (
    _begin_angles,
    _beside,
    _both_factors,
    _channels,
    _chunk_angles,
    _fetch2,
    _fetch3,
    _frequencies,
    _invert_fast,
    _load,
    _moved,
    _part_angles,
    _power,
    _put,
    _put_both,
    _score,
    _sum_up,
    _take_both,
)


@gluon.jit
def _turn_for_keys(
    from_q, from_k, from_dq, sq, sk, sg, keys, ys, tails, keeps, loaded_k, full, empty, entry, entry_z, end, leave_z,
    edges, theta, positions, scale, row, n, h, block, chunks, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    TURNED: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    CHANNEL: gl.constexpr = gl.SliceLayout(1, TURNED)
    i = block * 64 + gl.arange(0, 64, CHANNEL)
    high, low = _frequencies(gl.load(theta + h * K + i))
    nh = n.to(gl.int64) * H + h
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    fall = gl.zeros([64, 16], gl.float32, TURNED)
    reference = gl.load(edge + chunks * (2 * H * K))
    if HAS_ENTRY:
        STATE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        rows = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, STATE))
        at = nh * (2 * K * V) + rows[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, STATE))[None, :]
        share = gl.sum(gl.load(entry + at) * gl.load(end + at), 1)
        share += gl.sum(gl.load(entry + at + K * V) * gl.load(end + at + K * V), 1)
        fall += (gl.convert_layout(share, CHANNEL) - gl.load(entry_z + nh * K + i))[:, None]
        fall *= _invert(gl.load(edge + chunks * (2 * H * K) + K))[:, None]
    top = gl.load(edge + (chunks - 1) * (2 * H * K))
    before = gl.load(edge + (chunks - 1) * (2 * H * K) + K)
    at_k = h * K + block * 64
    for x in range(0, chunks):
        slot = x & 1
        tq = sq.index(slot)
        tk = sk.index(slot)
        tg = sg.index(slot)
        next_row = chunks - 1 - gl.minimum(x + 1, chunks - 1)
        next_top = gl.load(edge + next_row * (2 * H * K))
        next_before = gl.load(edge + next_row * (2 * H * K) + K)
        angles = _begin_angles((chunks - 1 - x) * C, high, low, TURNED)
        keep = _power(top - reference)
        total = gl.zeros([64, 16], gl.float32, TURNED) + gl.maximum(before, TINY)[:, None]
        mbarrier.wait(loaded_k.index(slot), (x >> 1) & 1)
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
        keeps.index(slot).store(keep)
        fall *= keep[:, None]
        for part in gl.static_range(4):
            key = _power(_load(tk.slice(16 * part, 16), TURNED) * LOG2_E - top[:, None])
            masses, total = _sum_up(key, total, TURNED, False)
            c, s, angles = _part_angles(angles, positions, row - C * x, high, low, part, TURNED, PLACED)
            query = _load(tq.slice(16 * part, 16), TURNED) * _invert_fast(masses)
            slope = (query * _load(tg.slice(16 * part, 16), TURNED)).to(gl.bfloat16)
            if part == 0:
                slope0 = slope
            elif part == 1:
                slope1 = slope
            elif part == 2:
                slope2 = slope
            query *= scale
            cosines, sines = (query * c).to(gl.bfloat16), (query * s).to(gl.bfloat16)
            key = key.to(gl.bfloat16)
            if part % 2 == 0:
                even_cosines, even_sines, even_key = cosines, sines, key
            else:
                cosines, sines = _beside(even_cosines, cosines, TURNED), _beside(even_sines, sines, TURNED)
                _put_both(ys.index(slot), part // 2, cosines, sines)
                _put(keys.index(slot), 0, part // 2, _beside(even_key, key, TURNED))
        _fetch3(
            from_q, from_k, from_dq, row - C * (x + 2), at_k, at_k, at_k, tq, tk, tg, loaded_k.index(slot),
            x + 2 < chunks, 2 * C * 3 * 64,
        )  # fmt: skip
        # What is subtracted from the gradient: the slopes of a token and of all after it.
        tail3, fall = _sum_up(slope, fall, TURNED, True)
        tail2, fall = _sum_up(slope2, fall, TURNED, True)
        tail1, fall = _sum_up(slope1, fall, TURNED, True)
        tail0, fall = _sum_up(slope0, fall, TURNED, True)
        tail = _beside(_beside(tail0, tail1, TURNED), _beside(tail2, tail3, TURNED), TURNED)
        tails.index(slot).permute((1, 0)).store(tail)
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
        reference = top
        top = next_top
        before = next_before
    gl.store(leave_z + nh * K + i, -gl.sum(fall, 1) / 16 * before)


@gluon.jit
def _score_for_keys(
    from_v, from_do, sv, sd, weights, loaded, full, empty, row, at_v, chunks, V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Loads what a chunk's products need, once what lies there was used, and makes its weights."""
    for x in range(0, chunks):
        slot = x & 1
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
        _fetch2(
            from_v, from_do, row - C * x, at_v, at_v, sv.index(slot), sd.index(slot), loaded.index(slot), x >= 2,
            2 * C * 2 * V,
        )  # fmt: skip
        mbarrier.wait(loaded.index(slot), (x >> 1) & 1)
        _score(sd, sv, weights, slot, C, True)
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _multiply_for_keys(
    to, sv, sd, keys, ys, tails, keeps, so, weights, full, empty, entry, leave, edges, theta, dtheta, positions, row, n,
    h, block, chunks, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr,
    HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    TILE: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0])
    CHANNEL: gl.constexpr = gl.SliceLayout(1, TILE)
    at_k = h * K + block * 64
    nh = n.to(gl.int64) * H + h
    i = block * 64 + gl.arange(0, 64, CHANNEL)
    high, low = _frequencies(gl.load(theta + h * K + i))
    channel, half = _channels(gl.arange(0, 128, gl.SliceLayout(1, STATE)), block)
    at = nh * (2 * K * V) + (half * K + channel)[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, STATE))[None, :]
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + K + channel
    state = gl.zeros([128, V], gl.float32, STATE)
    slopes = gl.zeros([64, C], gl.float32, TILE)
    if HAS_ENTRY:
        state += gl.load(entry + at) * _invert(gl.load(edge + chunks * (2 * H * K)))[:, None]
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(full.index(slot), phase)
        ty = ys.index(slot).permute((1, 0))
        out = gl.zeros([128, C], gl.float32, OUT)
        out = warpgroup_mma(ty, weights.index(slot), out, is_async=True)
        moved = _moved(keeps.index(slot))
        out = warpgroup_mma_wait(0, deps=[out])
        if moved:  # seldom: references move in large steps
            state *= _both_factors(keeps.index(slot), STATE)[:, None]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        out = warpgroup_mma(held, sv.index(slot).permute((1, 0)), out, is_async=True)
        state = warpgroup_mma(ty, sd.index(slot), state, is_async=True)
        place, cos, sin = _chunk_angles(positions, row - C * x, (chunks - 1 - x) * C, high, low, TILE, PLACED)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        first, second = _take_both(out, TILE)
        tail = tails.index(slot).permute((1, 0)).load(TILE)
        key = keys.index(slot).permute((1, 0)).load(TILE).to(gl.float32)
        tma.store_wait(0)
        so.permute((1, 0)).store((key * (first * cos + second * sin - tail)).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [row - C * x, at_k], so)
        slopes += key * ((second * cos - first * sin) * place[None, :])
        state = warpgroup_mma_wait(0, deps=[state])
        mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(0)
    gl.store(dtheta + nh * K + i, gl.sum(slopes, 1))
    gl.store(leave + at, state * gl.load(edge)[:, None])


@gluon.jit
def hopper_turned_keys_kernel(
    q, k, v, do, dq, du, entry, entry_z, end, leave, leave_z, edges, theta, dtheta, positions, scale, T, N,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
    REGISTERS: gl.constexpr, SCORING: gl.constexpr,
):  # fmt: skip
    """The gradient of the logits and its share in dtheta; `entry`, `entry_z` are those of the final state `end`."""
    BLOCKS: gl.constexpr = K // 64
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    BOTH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 128], gl.bfloat16)
    TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    from_q = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_k = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_dq = tma.make_tensor_descriptor(dq, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_v = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    from_do = tma.make_tensor_descriptor(do, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    to = tma.make_tensor_descriptor(du, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sg = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    ys = gl.allocate_shared_memory(gl.bfloat16, [2, C, 128], BOTH)
    tails = gl.allocate_shared_memory(gl.float32, [2, C, 64], TILE)
    keeps = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, 64], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], KEYS)
    loaded_k = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(loaded_k.index(slot), count=1)
        mbarrier.init(loaded.index(slot), count=1)
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(empty.index(slot), count=1)
    chunks = T // C
    row = n * T + T - C
    at_k = h * K + block * 64
    for x in gl.static_range(2):
        _fetch3(
            from_q, from_k, from_dq, row - C * x, at_k, at_k, at_k, sq.index(x), sk.index(x), sg.index(x),
            loaded_k.index(x), x < chunks, 2 * C * 3 * 64,
        )  # fmt: skip
        _fetch2(
            from_v, from_do, row - C * x, h * V, h * V, sv.index(x), sd.index(x), loaded.index(x), x < chunks,
            2 * C * 2 * V,
        )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_for_keys, (
                to, sv, sd, keys, ys, tails, keeps, so, weights, full, empty, entry, leave, edges, theta, dtheta,
                positions, row, n, h, block, chunks, H, K, V, C, PLACED, HAS_ENTRY,
            )),
            (_turn_for_keys, (
                from_q, from_k, from_dq, sq, sk, sg, keys, ys, tails, keeps, loaded_k, full, empty, entry, entry_z, end,
                leave_z, edges, theta, positions, scale, row, n, h, block, chunks, H, K, V, C, PLACED, HAS_ENTRY,
            )),
            (_score_for_keys, (
                from_v, from_do, sv, sd, weights, loaded, full, empty, row, h * V, chunks, V, C,
            )),
        ],
        [4, 4],
        [REGISTERS, SCORING],
    )  # fmt: skip
