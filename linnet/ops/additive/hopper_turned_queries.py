"""The sweep of `linnet.ops.additive.hopper` for dq, with LRPE (see `hopper_turning`).

A program has 64 channels; its state [128, V] has cosines and sines of 8 channels in turn. The scores v do^T, which want
no state, are made by warps of their own, which also load.
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
from linnet.ops.additive.hopper_turning import (
    _begin_angles,
    _beside,
    _both_factors,
    _channels,
    _chunk_angles,
    _fetch1,
    _fetch3,
    _frequencies,
    _invert_fast,
    _load,
    _move,
    _moved,
    _part_angles,
    _power,
    _put_both,
    _score,
    _sum_up,
    _take_both,
)


@gluon.jit
def _turn_for_queries(
    from_k, sk, xs, inverses, keeps, loaded_k, full, empty, entry_z, edges, theta, positions, scale, row, n, h, block,
    chunks, H: gl.constexpr, K: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    TURNED: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    i = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, TURNED))
    high, low = _frequencies(gl.load(theta + h * K + i))
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    reference = gl.full([64], NOTHING, gl.float32, gl.SliceLayout(1, TURNED))
    mass = gl.zeros([64], gl.float32, gl.SliceLayout(1, TURNED))
    if HAS_ENTRY:
        reference, mass = _start(gl.load(entry_z + (n.to(gl.int64) * H + h) * K + i))
    for x in range(0, chunks):
        slot = x & 1
        tk = sk.index(slot)
        angles = _begin_angles(x * C, high, low, TURNED)
        mbarrier.wait(loaded_k.index(slot), (x >> 1) & 1)
        top = _move(reference, gl.max(_load(tk, TURNED), 1))
        keep = _power(reference - top)
        before = mass * keep
        gl.store(edge + x * (2 * H * K), top)
        gl.store(edge + x * (2 * H * K) + K, before)
        total = gl.zeros([64, 16], gl.float32, TURNED) + gl.maximum(before, TINY)[:, None]
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
        keeps.index(slot).store(keep)
        for part in gl.static_range(C // 16):
            key = _power(_load(tk.slice(16 * part, 16), TURNED) * LOG2_E - top[:, None])
            masses, total = _sum_up(key, total, TURNED, False)
            c, s, angles = _part_angles(angles, positions, row + C * x, high, low, part, TURNED, PLACED)
            cosines, sines = (key * c).to(gl.bfloat16), (key * s).to(gl.bfloat16)
            inverse = _invert_fast(masses) * scale
            if part % 2 == 0:
                even_cosines, even_sines, even_inverse = cosines, sines, inverse
            else:
                cosines, sines = _beside(even_cosines, cosines, TURNED), _beside(even_sines, sines, TURNED)
                _put_both(xs.index(slot), part // 2, cosines, sines)
                inverse = _beside(even_inverse, inverse, TURNED)
                inverses.index(slot).slice(16 * part - 16, 32).permute((1, 0)).store(inverse)
        _fetch1(
            from_k, row + C * (x + 2), h * K + block * 64, loaded_k.index(slot), tk, x + 2 < chunks, 2 * C * 64
        )  # fmt: skip
        mass = gl.max(total, 1)
        mass = gl.where(mass > 1.0, mass, 0.0)
        reference = top
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
    gl.store(edge + chunks * (2 * H * K), reference)
    gl.store(edge + chunks * (2 * H * K) + K, mass)


@gluon.jit
def _score_for_queries(
    from_q, from_v, from_do, sq, sv, sd, weights, loaded, full, empty, row, at_k, at_v, chunks, V: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Loads what a chunk's products need, once what lies there was used, and makes its weights."""
    for x in range(0, chunks):
        slot = x & 1
        mbarrier.wait(empty.index(slot), (x >> 1) & 1 ^ 1)
        _fetch3(
            from_q, from_v, from_do, row + C * x, at_k, at_v, at_v, sq.index(slot), sv.index(slot), sd.index(slot),
            loaded.index(slot), x >= 2, 2 * C * (2 * V + 64),
        )  # fmt: skip
        mbarrier.wait(loaded.index(slot), (x >> 1) & 1)
        _score(sv, sd, weights, slot, C, False)
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _multiply_for_queries(
    to, sq, sv, sd, xs, inverses, keeps, so, weights, full, empty, entry, entry_z, theta, dtheta, positions, row, n, h,
    block, chunks, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr,
    HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    TILE: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0])
    at_k = h * K + block * 64
    nh = n.to(gl.int64) * H + h
    i = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, TILE))
    high, low = _frequencies(gl.load(theta + h * K + i))
    state = gl.zeros([128, V], gl.float32, STATE)
    slopes = gl.zeros([64, C], gl.float32, TILE)
    if HAS_ENTRY:
        channel, half = _channels(gl.arange(0, 128, gl.SliceLayout(1, STATE)), block)
        at = nh * (2 * K * V) + (half * K + channel)[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, STATE))[None, :]
        begin, mass = _start(gl.load(entry_z + nh * K + channel))
        state += gl.load(entry + at) * mass[:, None]
    for x in range(0, chunks):
        slot = x & 1
        phase = (x >> 1) & 1
        mbarrier.wait(full.index(slot), phase)
        tx = xs.index(slot).permute((1, 0))
        out = gl.zeros([128, C], gl.float32, OUT)
        out = warpgroup_mma(tx, weights.index(slot), out, is_async=True)
        moved = _moved(keeps.index(slot))
        out = warpgroup_mma_wait(0, deps=[out])
        if moved:  # seldom: references move in large steps
            state *= _both_factors(keeps.index(slot), STATE)[:, None]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        out = warpgroup_mma(held, sd.index(slot).permute((1, 0)), out, is_async=True)
        state = warpgroup_mma(tx, sv.index(slot), state, is_async=True)
        place, cos, sin = _chunk_angles(positions, row + C * x, x * C, high, low, TILE, PLACED)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        first, second = _take_both(out, TILE)
        inverse = inverses.index(slot).permute((1, 0)).load(TILE)
        tma.store_wait(0)
        so.permute((1, 0)).store(((first * cos + second * sin) * inverse).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [row + C * x, at_k], so)
        slope = (second * cos - first * sin) * place[None, :]
        slopes += slope * inverse * sq.index(slot).permute((1, 0)).load(TILE).to(gl.float32)
        state = warpgroup_mma_wait(0, deps=[state])
        mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(0)
    gl.store(dtheta + nh * K + i, gl.sum(slopes, 1))


@gluon.jit
def hopper_turned_queries_kernel(
    q, k, v, do, dq, entry, entry_z, edges, theta, dtheta, positions, scale, T, N, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr, REGISTERS: gl.constexpr,
    SCORING: gl.constexpr,
):  # fmt: skip
    """dq, `edges` and the share of dq in dtheta [N, H, K]; `entry` is the initial state."""
    BLOCKS: gl.constexpr = K // 64
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 64], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    BOTH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 128], gl.bfloat16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    from_q = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_k = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    from_v = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    from_do = tma.make_tensor_descriptor(do, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    to = tma.make_tensor_descriptor(dq, [N * T, H * K], [H * K, 1], [C, 64], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], VALUES)
    xs = gl.allocate_shared_memory(gl.bfloat16, [2, C, 128], BOTH)
    inverses = gl.allocate_shared_memory(gl.float32, [2, C, 64], TILE)
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
    row = n * T
    at_k = h * K + block * 64
    for x in gl.static_range(2):
        _fetch1(from_k, row + C * x, at_k, loaded_k.index(x), sk.index(x), x < chunks, 2 * C * 64)
        _fetch3(
            from_q, from_v, from_do, row + C * x, at_k, h * V, h * V, sq.index(x), sv.index(x), sd.index(x),
            loaded.index(x), x < chunks, 2 * C * (2 * V + 64),
        )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_for_queries, (
                to, sq, sv, sd, xs, inverses, keeps, so, weights, full, empty, entry, entry_z, theta, dtheta, positions,
                row, n, h, block, chunks, H, K, V, C, PLACED, HAS_ENTRY,
            )),
            (_turn_for_queries, (
                from_k, sk, xs, inverses, keeps, loaded_k, full, empty, entry_z, edges, theta, positions, scale, row, n,
                h, block, chunks, H, K, C, PLACED, HAS_ENTRY,
            )),
            (_score_for_queries, (
                from_q, from_v, from_do, sq, sv, sd, weights, loaded, full, empty, row, at_k, h * V, chunks, V, C,
            )),
        ],
        [4, 4],
        [REGISTERS, SCORING],
    )  # fmt: skip
