"""The sweep of `linnet.ops.additive.hopper` for dq, with LRPE (see `hopper_turning`).

A program has 64 channels; its state has a cosine and a sine half, [64, V] each. Two groups of warps share the columns
of every product. The scores v do^T, which want no state, are made by the warps that turn.
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

from linnet.ops.additive.hopper import LOG2_E, NOTHING, SHIFT, _start
from linnet.ops.additive.hopper_turning import _angles, _fetch1, _fetch3, _frequencies, _inverse, _load, _power


@gluon.jit
def _turn_for_queries(
    from_k, sk, sv, sd, x1, x2, weights, inverses, keeps, earlier, loaded_k, loaded, full, empty, entry_z, edges, theta,
    positions, scale, row, n, h, block, chunks, H: gl.constexpr, K: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr,
    HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    TURNED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TURNED, k_width=2)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, TURNED)
    empty_tile = gl.zeros([64, C], gl.float32, TURNED)
    i = block * 64 + gl.arange(0, 64, CHANNEL)
    high, low = _frequencies(gl.load(theta + h * K + i))
    inside = gl.arange(0, C, CHANNEL)[:, None] <= gl.arange(0, C, gl.SliceLayout(0, TURNED))[None, :]
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    reference = gl.full([64], NOTHING, gl.float32, CHANNEL)
    mass = gl.zeros([64], gl.float32, CHANNEL)
    if HAS_ENTRY:
        reference, mass = _start(gl.load(entry_z + (n.to(gl.int64) * H + h) * K + i))
    for x in range(0, chunks):
        slot = x & 1
        mbarrier.wait(loaded_k, x & 1)
        raw = _load(sk, TURNED)
        more = x + 1 < chunks
        _fetch1(from_k, row + C * (x + 1), h * K + block * 64, loaded_k, sk, more, 2 * C * 64)
        top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
        keep = _power(reference - top)
        before = mass * keep
        key = _power(raw * LOG2_E - top[:, None])
        wide = gl.convert_layout(key.to(gl.bfloat16), OPERAND)
        masses = warpgroup_mma(wide, earlier, empty_tile, use_acc=False, is_async=True)
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
        keeps.index(slot).store(keep)
        masses, _ = warpgroup_mma_wait(0, deps=[masses, wide])
        inverses.index(slot).store(_inverse(masses + before[:, None]) * scale)
        mass = before + gl.sum(key, 1)
        _, cos, sin = _angles(positions, row + C * x, x * C, high, low, TURNED, C, PLACED)
        x1.index(slot).permute((1, 0)).store((key * cos).to(gl.bfloat16))
        x2.index(slot).permute((1, 0)).store((key * sin).to(gl.bfloat16))
        gl.store(edge + x * (2 * H * K), top)
        gl.store(edge + x * (2 * H * K) + K, before)
        mbarrier.wait(loaded.index(slot), (x >> 1) & 1)
        scores = warpgroup_mma(sv.index(slot), sd.index(slot).permute((1, 0)), empty_tile, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        weights.index(slot).store(gl.where(inside, scores, 0.0).to(gl.bfloat16))
        reference = top
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
    gl.store(edge + chunks * (2 * H * K), reference)
    gl.store(edge + chunks * (2 * H * K) + K, mass)


@gluon.jit
def _multiply_for_queries(
    from_q, from_v, from_do, to, sq, sv, sd, x1, x2, inverses, keeps, held, so, weights, loaded, full, empty, entry,
    entry_z, theta, dtheta, positions, row, n, h, block, chunks, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
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
    state = gl.zeros([64, V], gl.float32, STATE)
    state2 = gl.zeros([64, V], gl.float32, STATE)
    slopes = gl.zeros([64, C], gl.float32, SQUARE)
    if HAS_ENTRY:
        place_i = block * 64 + gl.arange(0, 64, ROW)
        at = nh * (2 * K * V) + place_i[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, STATE))[None, :]
        _, mass = _start(gl.load(entry_z + nh * K + place_i))
        state += gl.load(entry + at) * mass[:, None]
        state2 += gl.load(entry + at + K * V) * mass[:, None]
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(full.index(slot), phase)
        tk = x1.index(slot).permute((1, 0))
        tk2 = x2.index(slot).permute((1, 0))
        tv = sv.index(slot)
        td = sd.index(slot).permute((1, 0))
        factor = keeps.index(slot).load(ROW)[:, None]
        state *= factor
        state2 *= factor
        held.index(0).store(state.to(gl.bfloat16))
        held.index(1).store(state2.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.wait(loaded.index(slot), phase)
        out = warpgroup_mma(held.index(0), td, empty_tile, use_acc=False, is_async=True)
        out = warpgroup_mma(tk, weights.index(slot), out, is_async=True)
        out2 = warpgroup_mma(held.index(1), td, empty_tile, use_acc=False, is_async=True)
        out2 = warpgroup_mma(tk2, weights.index(slot), out2, is_async=True)
        state = warpgroup_mma(tk, tv, state, is_async=True)
        state2 = warpgroup_mma(tk2, tv, state2, is_async=True)
        place, cos, sin = _angles(positions, row + C * x, x * C, high, low, SQUARE, C, PLACED)
        out, out2 = warpgroup_mma_wait(2, deps=[out, out2])
        slope = (out2 * cos - out * sin) * place[None, :]
        inverse = inverses.index(slot).load(SQUARE)
        tma.store_wait(0)
        so.permute((1, 0)).store(((out * cos + out2 * sin) * inverse).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [row + C * x, at_k], so)
        slopes += slope * inverse * sq.index(slot).permute((1, 0)).load(SQUARE).to(gl.float32)
        state, state2 = warpgroup_mma_wait(0, deps=[state, state2])
        mbarrier.arrive(empty.index(slot), count=1)
        _fetch3(
            from_q, from_v, from_do, row + C * (x + 2), at_k, at_v, at_v, sq.index(slot), sv.index(slot),
            sd.index(slot), loaded.index(slot), x + 2 < chunks, 2 * C * (2 * V + 64),
        )  # fmt: skip
    tma.store_wait(0)
    gl.store(dtheta + nh * K + i, gl.sum(slopes, 1))


@gluon.jit
def hopper_turned_queries_kernel(
    q, k, v, do, dq, entry, entry_z, edges, theta, dtheta, positions, scale, T, N, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq, `edges` and the share of dq in dtheta [N, H, K]; `entry` is the initial state."""
    BLOCKS: gl.constexpr = K // 64
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, V], gl.bfloat16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    from_q = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_k = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_v = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    from_do = tma.make_tensor_descriptor(do, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    to = tma.make_tensor_descriptor(dq, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [C, 64], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    x1 = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    x2 = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    inverses = gl.allocate_shared_memory(gl.float32, [2, 64, C], TILE)
    keeps = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
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
    row = n * T
    at_k = h * K + block * 64
    _fetch1(from_k, row, at_k, loaded_k.index(0), sk, True, 2 * C * 64)
    for x in gl.static_range(2):
        _fetch3(
            from_q, from_v, from_do, row + C * x, at_k, h * V, h * V, sq.index(x), sv.index(x), sd.index(x),
            loaded.index(x), x < chunks, 2 * C * (2 * V + 64),
        )  # fmt: skip
    MASK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    before = gl.arange(0, C, gl.SliceLayout(1, MASK))[:, None] <= gl.arange(0, C, gl.SliceLayout(0, MASK))[None, :]
    earlier.store(gl.where(before, 1.0, 0.0).to(gl.bfloat16))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_for_queries, (
                from_q, from_v, from_do, to, sq, sv, sd, x1, x2, inverses, keeps, held, so, weights, loaded, full,
                empty, entry, entry_z, theta, dtheta, positions, row, n, h, block, chunks, H, K, V, C, PLACED,
                HAS_ENTRY,
            )),
            (_turn_for_queries, (
                from_k, sk, sv, sd, x1, x2, weights, inverses, keeps, earlier, loaded_k.index(0), loaded, full, empty,
                entry_z, edges, theta, positions, scale, row, n, h, block, chunks, H, K, C, PLACED, HAS_ENTRY,
            )),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip
