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

from linnet.ops.additive.hopper import LOG2_E, _invert
from linnet.ops.additive.hopper_turning import _angles, _fetch2, _fetch3, _frequencies, _inverse, _load, _power


@gluon.jit
def _turn_for_keys(
    from_q, from_k, from_dq, sq, sk, sg, sv, sd, keys, y1, y2, negative, weights, keeps, falls, earlier, loaded_k,
    loaded, full, empty, entry, entry_z, end, leave_z, edges, theta, positions, scale, row, n, h, block, chunks,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    TURNED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TURNED, k_width=2)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, TURNED)
    empty_tile = gl.zeros([64, C], gl.float32, TURNED)
    i = block * 64 + gl.arange(0, 64, CHANNEL)
    high, low = _frequencies(gl.load(theta + h * K + i))
    inside = gl.arange(0, C, CHANNEL)[:, None] >= gl.arange(0, C, gl.SliceLayout(0, TURNED))[None, :]
    nh = n.to(gl.int64) * H + h
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    fall = gl.zeros([64], gl.float32, CHANNEL)
    reference = gl.load(edge + chunks * (2 * H * K))
    if HAS_ENTRY:
        STATE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        rows = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, STATE))
        at = nh * (2 * K * V) + rows[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, STATE))[None, :]
        share = gl.sum(gl.load(entry + at) * gl.load(end + at), 1)
        share += gl.sum(gl.load(entry + at + K * V) * gl.load(end + at + K * V), 1)
        fall += gl.convert_layout(share, CHANNEL) - gl.load(entry_z + nh * K + i)
        fall *= _invert(gl.load(edge + chunks * (2 * H * K) + K))
    top = gl.load(edge + (chunks - 1) * (2 * H * K))
    before = gl.load(edge + (chunks - 1) * (2 * H * K) + K)
    at_k = h * K + block * 64
    for x in range(0, chunks):
        slot = x & 1
        mbarrier.wait(loaded_k, x & 1)
        raw = _load(sk, TURNED)
        keep = _power(top - reference)
        key = _power(raw * LOG2_E - top[:, None]).to(gl.bfloat16)
        wide = gl.convert_layout(key, OPERAND)
        masses = warpgroup_mma(wide, earlier, empty_tile, use_acc=False, is_async=True)
        next_row = chunks - 1 - gl.minimum(x + 1, chunks - 1)
        next_top = gl.load(edge + next_row * (2 * H * K))
        next_before = gl.load(edge + next_row * (2 * H * K) + K)
        query = _load(sq, TURNED)
        slope = query * _load(sg, TURNED)
        _fetch3(
            from_q, from_k, from_dq, row - C * (x + 1), at_k, at_k, at_k, sq, sk, sg, loaded_k, x + 1 < chunks,
            2 * C * 3 * 64,
        )  # fmt: skip
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
        keeps.index(slot).store(keep)
        keys.index(slot).permute((1, 0)).store(key)
        fall *= keep
        falls.index(slot).store(fall)
        masses, _ = warpgroup_mma_wait(0, deps=[masses, wide])
        inverse = _inverse(masses + before[:, None])
        slope *= inverse
        negative.index(slot).permute((1, 0)).store((-slope).to(gl.bfloat16))
        fall += gl.sum(slope, 1)
        query *= inverse * scale
        _, cos, sin = _angles(positions, row - C * x, (chunks - 1 - x) * C, high, low, TURNED, C, PLACED)
        y1.index(slot).permute((1, 0)).store((query * cos).to(gl.bfloat16))
        y2.index(slot).permute((1, 0)).store((query * sin).to(gl.bfloat16))
        mbarrier.wait(loaded.index(slot), (x >> 1) & 1)
        scores = warpgroup_mma(sd.index(slot), sv.index(slot).permute((1, 0)), empty_tile, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        weights.index(slot).store(gl.where(inside, scores, 0.0).to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
        reference = top
        top = next_top
        before = next_before
    gl.store(leave_z + nh * K + i, -fall * before)


@gluon.jit
def _multiply_for_keys(
    from_v, from_do, to, sv, sd, keys, y1, y2, negative, keeps, falls, held, so, weights, earlier, loaded, full, empty,
    entry, leave, edges, theta, dtheta, positions, row, n, h, block, chunks, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, C // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, V // 2, 16])
    CHANNEL: gl.constexpr = gl.SliceLayout(1, SQUARE)
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    at_k = h * K + block * 64
    at_v = h * V
    nh = n.to(gl.int64) * H + h
    empty_tile = gl.zeros([64, C], gl.float32, SQUARE)
    i = block * 64 + gl.arange(0, 64, CHANNEL)
    high, low = _frequencies(gl.load(theta + h * K + i))
    place_i = block * 64 + gl.arange(0, 64, ROW)
    at = nh * (2 * K * V) + place_i[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, STATE))[None, :]
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + K + place_i
    state = gl.zeros([64, V], gl.float32, STATE)
    state2 = gl.zeros([64, V], gl.float32, STATE)
    slopes = gl.zeros([64, C], gl.float32, SQUARE)
    if HAS_ENTRY:
        factor = _invert(gl.load(edge + chunks * (2 * H * K)))[:, None]
        state += gl.load(entry + at) * factor
        state2 += gl.load(entry + at + K * V) * factor
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(full.index(slot), phase)
        ty = y1.index(slot).permute((1, 0))
        ty2 = y2.index(slot).permute((1, 0))
        tv = sv.index(slot).permute((1, 0))
        td = sd.index(slot)
        factor = keeps.index(slot).load(ROW)[:, None]
        state *= factor
        state2 *= factor
        held.index(0).store(state.to(gl.bfloat16))
        held.index(1).store(state2.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.wait(loaded.index(slot), phase)
        out = warpgroup_mma(held.index(0), tv, empty_tile, use_acc=False, is_async=True)
        out = warpgroup_mma(ty, weights.index(slot), out, is_async=True)
        out2 = warpgroup_mma(held.index(1), tv, empty_tile, use_acc=False, is_async=True)
        out2 = warpgroup_mma(ty2, weights.index(slot), out2, is_async=True)
        tail = warpgroup_mma(
            negative.index(slot).permute((1, 0)), earlier.permute((1, 0)), empty_tile, use_acc=False, is_async=True
        )
        state = warpgroup_mma(ty, td, state, is_async=True)
        state2 = warpgroup_mma(ty2, td, state2, is_async=True)
        place, cos, sin = _angles(positions, row - C * x, (chunks - 1 - x) * C, high, low, SQUARE, C, PLACED)
        out, out2, tail = warpgroup_mma_wait(2, deps=[out, out2, tail])
        slope = (out2 * cos - out * sin) * place[None, :]
        out = out * cos + out2 * sin + (tail - falls.index(slot).load(CHANNEL)[:, None])
        key = keys.index(slot).permute((1, 0)).load(SQUARE).to(gl.float32)
        tma.store_wait(0)
        so.permute((1, 0)).store((key * out).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [row - C * x, at_k], so)
        slopes += key * slope
        state, state2 = warpgroup_mma_wait(0, deps=[state, state2])
        mbarrier.arrive(empty.index(slot), count=1)
        _fetch2(
            from_v, from_do, row - C * (x + 2), at_v, at_v, sv.index(slot), sd.index(slot), loaded.index(slot),
            x + 2 < chunks, 2 * C * 2 * V,
        )  # fmt: skip
    tma.store_wait(0)
    gl.store(dtheta + nh * K + i, gl.sum(slopes, 1))
    factor = gl.load(edge)[:, None]
    gl.store(leave + at, state * factor)
    gl.store(leave + at + K * V, state2 * factor)


@gluon.jit
def hopper_turned_keys_kernel(
    q, k, v, do, dq, du, entry, entry_z, end, leave, leave_z, edges, theta, dtheta, positions, scale, T, N,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradient of the logits and its share in dtheta; `entry`, `entry_z` are those of the final state `end`."""
    BLOCKS: gl.constexpr = K // 64
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, V], gl.bfloat16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    from_q = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_k = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_dq = tma.make_tensor_descriptor(dq, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_v = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    from_do = tma.make_tensor_descriptor(do, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    to = tma.make_tensor_descriptor(du, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [C, 64], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [C, 64], KEYS)
    sg = gl.allocate_shared_memory(gl.bfloat16, [C, 64], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    y1 = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    y2 = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    negative = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    keeps = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    falls = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    held = gl.allocate_shared_memory(gl.bfloat16, [2, 64, V], STATES)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, 64], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], KEYS)
    earlier = gl.allocate_shared_memory(gl.bfloat16, [C, C], KEYS)
    loaded_k = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded_k.index(0), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(loaded.index(slot), count=1)
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    chunks = T // C
    row = n * T + T - C
    at_k = h * K + block * 64
    _fetch3(from_q, from_k, from_dq, row, at_k, at_k, at_k, sq, sk, sg, loaded_k.index(0), True, 2 * C * 3 * 64)
    for x in gl.static_range(2):
        _fetch2(
            from_v, from_do, row - C * x, h * V, h * V, sv.index(x), sd.index(x), loaded.index(x), x < chunks,
            2 * C * 2 * V,
        )  # fmt: skip
    MASK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    before = gl.arange(0, C, gl.SliceLayout(1, MASK))[:, None] <= gl.arange(0, C, gl.SliceLayout(0, MASK))[None, :]
    earlier.store(gl.where(before, 1.0, 0.0).to(gl.bfloat16))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_for_keys, (
                from_v, from_do, to, sv, sd, keys, y1, y2, negative, keeps, falls, held, so, weights, earlier, loaded,
                full, empty, entry, leave, edges, theta, dtheta, positions, row, n, h, block, chunks, H, K, V, C,
                PLACED, HAS_ENTRY,
            )),
            (_turn_for_keys, (
                from_q, from_k, from_dq, sq, sk, sg, sv, sd, keys, y1, y2, negative, weights, keeps, falls, earlier,
                loaded_k.index(0), loaded, full, empty, entry, entry_z, end, leave_z, edges, theta, positions, scale,
                row, n, h, block, chunks, H, K, V, C, PLACED, HAS_ENTRY,
            )),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip
