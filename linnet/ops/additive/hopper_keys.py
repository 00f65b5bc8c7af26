"""The sweeps of `linnet.ops.additive.hopper` whose programs own channels of K: dq, and the gradient of the logits.

States are [BC, V], as they are stored; names are those there.
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

from linnet.ops.additive.hopper import LOG2_E, NOTHING, SHIFT, _fetch3, _invert, _invert_tile, _start, _turn


@gluon.jit
def _fetch5(
    d0, d1, d2, d3, d4, row, at_k, at_v, s0, s1, s2, s3, s4, barriers, slot, wanted, BYTES: gl.constexpr
):  # fmt: skip
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(d0, [row, at_k], barrier, s0.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d1, [row, at_k], barrier, s1.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d2, [row, at_k], barrier, s2.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d3, [row, at_v], barrier, s3.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d4, [row, at_v], barrier, s4.index(slot), pred=wanted)


@gluon.jit
def hopper_queries_kernel(
    k, v, do, dq, entry, entry_z, edges, scale, T, N, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr, BC: gl.constexpr, HAS_ENTRY: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """dq and `edges`, with `entry` the initial state. A program has BC channels of one head: the state is [BC, V]."""
    W: gl.constexpr = BC // 16
    BLOCKS: gl.constexpr = K // BC
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    CC: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[C // 16, W * 16 // C], instr_shape=[16, C * C // 16 // W, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, OUT)
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    dk = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    dv = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    dd = tma.make_tensor_descriptor(do, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    dout = tma.make_tensor_descriptor(dq, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [C, C], CC)
    earlier = gl.allocate_shared_memory(gl.bfloat16, [C, C], CC)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    chunks = T // C
    row = n * T
    at_k = h * K + block * BC
    at_v = h * V
    BYTES: gl.constexpr = 2 * C * (2 * V + BC)
    for x in gl.static_range(S):
        _fetch3(dk, dv, dd, row + C * x, at_k, at_v, at_v, sk, sv, sd, barriers, x, x < chunks, BYTES)

    down = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    inside = down <= right
    earlier.store(gl.where(inside, 1.0, 0.0).to(gl.bfloat16))
    no_out = gl.zeros([BC, C], gl.float32, OUT)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    i = block * BC + gl.arange(0, BC, CHANNEL)
    place_i = block * BC + gl.arange(0, BC, ROW)
    j = gl.arange(0, V, gl.SliceLayout(0, STATE))
    place = nh.to(gl.int64) * (K * V) + place_i[:, None] * V + j[None, :]
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    state = gl.zeros([BC, V], gl.float32, STATE)
    reference = gl.full([BC], NOTHING, gl.float32, CHANNEL)
    mass = gl.zeros([BC], gl.float32, CHANNEL)
    if HAS_ENTRY:
        reference, mass = _start(gl.load(entry_z + nh.to(gl.int64) * K + i))
        state += gl.load(entry + place) * gl.convert_layout(mass, ROW)[:, None]

    mbarrier.wait(barriers.index(0), 0)
    raw = _turn(sk.index(0), OUT, OPERAND)
    top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
    keep = gl.exp2(reference - top)
    before = mass * keep
    key = gl.exp2(raw * LOG2_E - top[:, None])
    mass = before + gl.sum(key, 1)
    reference = top
    sk.index(0).permute((1, 0)).store(key.to(gl.bfloat16))
    fence_async_shared()
    slot = 0
    phase = 0
    for x in range(0, chunks):
        tk = sk.index(slot).permute((1, 0))
        tv = sv.index(slot)
        td = sd.index(slot).permute((1, 0))
        state *= gl.convert_layout(keep, ROW)[:, None]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        scores = warpgroup_mma(tv, td, no_scores, use_acc=False, is_async=True)
        masses = warpgroup_mma(tk, earlier, no_out, use_acc=False, is_async=True)
        out = warpgroup_mma(held, td, no_out, use_acc=False, is_async=True)
        done = warpgroup_mma_wait(2, deps=[scores])
        state = warpgroup_mma(tk, tv, state, is_async=True)
        gl.store(edge + x * (2 * H * K), reference)
        gl.store(edge + x * (2 * H * K) + K, before)
        tma.store_wait(0)
        weights.store(gl.where(inside, done, 0.0).to(gl.bfloat16))

        # The keys of the next chunk; after the last one, of what lies there, and unused.
        next_slot = slot + 1
        next_phase = phase
        if next_slot == S:
            next_slot = 0
            next_phase ^= 1
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < chunks)
        massed = before
        raw = _turn(sk.index(next_slot), OUT, OPERAND)
        top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
        keep = gl.exp2(reference - top)
        before = mass * keep
        key = gl.exp2(raw * LOG2_E - top[:, None])
        more = x + 1 < chunks
        mass = gl.where(more, before + gl.sum(key, 1), mass)
        reference = gl.where(more, top, reference)
        sk.index(next_slot).permute((1, 0)).store(key.to(gl.bfloat16))
        fence_async_shared()
        out, masses, _ = warpgroup_mma_wait(1, deps=[out, masses, held])
        out = warpgroup_mma(tk, weights, out, is_async=True)
        inverse = _invert_tile(masses + massed[:, None]) * scale
        out, state = warpgroup_mma_wait(0, deps=[out, state])
        _fetch3(dk, dv, dd, row + C * (x + S), at_k, at_v, at_v, sk, sv, sd, barriers, slot, x + S < chunks, BYTES)
        so.permute((1, 0)).store((out * inverse).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(dout, [row + C * x, at_k], so)
        slot = next_slot
        phase = next_phase
    tma.store_wait(0)
    gl.store(edge + chunks * (2 * H * K), reference)
    gl.store(edge + chunks * (2 * H * K) + K, mass)


@gluon.jit
def hopper_keys_kernel(
    q, k, v, do, dq, du, entry, entry_z, end, leave, leave_z, edges, scale, T, N, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, HAS_ENTRY: gl.constexpr, HAS_LEAVE: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """The gradient of the logits, backwards in time; `entry`, `entry_z` are those of the final state `end`."""
    W: gl.constexpr = BC // 16
    BLOCKS: gl.constexpr = K // BC
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    CC: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[C // 16, W * 16 // C], instr_shape=[16, C * C // 16 // W, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, OUT)
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    ddq = tma.make_tensor_descriptor(dq, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    dk = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    dqq = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    dv = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    dd = tma.make_tensor_descriptor(do, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    dout = tma.make_tensor_descriptor(du, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sg = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [C, C], CC)
    earlier = gl.allocate_shared_memory(gl.bfloat16, [C, C], CC)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    chunks = T // C
    row = n * T + T - C
    at_k = h * K + block * BC
    at_v = h * V
    BYTES: gl.constexpr = 2 * C * (2 * V + 3 * BC)
    for x in gl.static_range(S):
        _fetch5(dqq, dk, ddq, dv, dd, row - C * x, at_k, at_v, sq, sk, sg, sv, sd, barriers, x, x < chunks, BYTES)

    down = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    inside = down >= right
    earlier.store(gl.where(down <= right, 1.0, 0.0).to(gl.bfloat16))
    later = earlier.permute((1, 0))
    no_out = gl.zeros([BC, C], gl.float32, OUT)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    i = block * BC + gl.arange(0, BC, CHANNEL)
    place_i = block * BC + gl.arange(0, BC, ROW)
    j = gl.arange(0, V, gl.SliceLayout(0, STATE))
    place = nh.to(gl.int64) * (K * V) + place_i[:, None] * V + j[None, :]
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    state = gl.zeros([BC, V], gl.float32, STATE)
    fall = gl.zeros([BC], gl.float32, CHANNEL)
    reference = gl.load(edge + chunks * (2 * H * K))
    mass = gl.load(edge + chunks * (2 * H * K) + K)
    if HAS_ENTRY:
        state += gl.load(entry + place)
        fall += gl.convert_layout(gl.sum(state * gl.load(end + place), 1), CHANNEL)
        fall -= gl.load(entry_z + nh.to(gl.int64) * K + i)
        fall *= _invert(mass)
        state *= gl.convert_layout(_invert(mass), ROW)[:, None]

    top = gl.load(edge + (chunks - 1) * (2 * H * K))
    mass = gl.load(edge + (chunks - 1) * (2 * H * K) + K)
    keep = gl.exp2(top - reference)
    reference = top
    mbarrier.wait(barriers.index(0), 0)
    fence_async_shared()
    key = gl.exp2(_turn(sk.index(0), OUT, OPERAND) * LOG2_E - top[:, None])
    sk.index(0).permute((1, 0)).store(key.to(gl.bfloat16))
    fence_async_shared()
    slot = 0
    phase = 0
    for x in range(0, chunks):
        following = chunks - 1 - gl.minimum(x + 1, chunks - 1)
        before = mass
        top = gl.load(edge + following * (2 * H * K))
        mass = gl.load(edge + following * (2 * H * K) + K)
        tk = sk.index(slot)
        state *= gl.convert_layout(keep, ROW)[:, None]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        scores = warpgroup_mma(sd.index(slot), sv.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        masses = warpgroup_mma(tk.permute((1, 0)), earlier, no_out, use_acc=False, is_async=True)
        out = warpgroup_mma(held, sv.index(slot).permute((1, 0)), no_out, use_acc=False, is_async=True)
        done, masses = warpgroup_mma_wait(1, deps=[scores, masses])
        tma.store_wait(0)
        weights.store(gl.where(inside, done, 0.0).to(gl.bfloat16))
        fence_async_shared()
        query = _turn(sq.index(slot), OUT, OPERAND) * _invert_tile(masses + before[:, None])
        slope = query * _turn(sg.index(slot), OUT, OPERAND)
        fall *= keep
        fallen = fall + gl.sum(slope, 1)
        narrow = gl.convert_layout((query * scale).to(gl.bfloat16), OPERAND)
        slopes = gl.convert_layout((-slope).to(gl.bfloat16), OPERAND)
        out, _ = warpgroup_mma_wait(0, deps=[out, held])
        out = warpgroup_mma(narrow, weights, out, is_async=True)
        state = warpgroup_mma(narrow, sd.index(slot), state, is_async=True)
        out = warpgroup_mma_wait(1, deps=[out])
        out = warpgroup_mma(slopes, later, out, is_async=True)

        next_slot = slot + 1
        next_phase = phase
        if next_slot == S:
            next_slot = 0
            next_phase ^= 1
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < chunks)
        # The keys of the next chunk; after the last one, of what lies there, and unused.
        next_key = gl.exp2(_turn(sk.index(next_slot), OUT, OPERAND) * LOG2_E - top[:, None])
        sk.index(next_slot).permute((1, 0)).store(next_key.to(gl.bfloat16))
        key = _turn(tk, OUT, OPERAND)
        out, state, _, _ = warpgroup_mma_wait(0, deps=[out, state, narrow, slopes])
        _fetch5(
            dqq, dk, ddq, dv, dd, row - C * (x + S), at_k, at_v, sq, sk, sg, sv, sd, barriers, slot, x + S < chunks,
            BYTES,
        )  # fmt: skip
        so.permute((1, 0)).store((key * (out - fall[:, None])).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(dout, [row - C * x, at_k], so)
        fall = fallen
        keep = gl.exp2(top - reference)
        reference = top
        slot = next_slot
        phase = next_phase
    tma.store_wait(0)
    if HAS_LEAVE:
        mass = gl.load(edge + K)
        gl.store(leave + place, state * gl.convert_layout(mass, ROW)[:, None])
        gl.store(leave_z + nh.to(gl.int64) * K + i, -fall * mass)
