"""The sweeps of `linnet.ops.additive.hopper` that own channels of K, with LRPE: dq and the gradient of the logits.

A program has 64 channels; the tiles of keys and queries are turned into a cosine and a sine half beside each other in
shared memory, and the state has two halves. Two groups of warps share the columns of every product.
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

from linnet.ops.additive.hopper import LOG2_E, NOTHING, SHIFT, _invert, _invert_tile, _start
from linnet.ops.additive.hopper_keys import _fetch5
from linnet.ops.additive.hopper_turned import _advance, _cosine_sine, _frequencies, _places, _turns


@gluon.jit
def _fetch4(d0, d1, d2, d3, row, at_k, at_v, s0, s1, s2, s3, barriers, slot, wanted, BYTES: gl.constexpr):
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(d0, [row, at_k], barrier, s0.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d1, [row, at_k], barrier, s1.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d2, [row, at_v], barrier, s2.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d3, [row, at_v], barrier, s3.index(slot), pred=wanted)


@gluon.jit
def hopper_turned_queries_kernel(
    q, k, v, do, dq, entry, entry_z, edges, theta, dtheta, positions, scale, T, N, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    """dq, `edges` and the share of dq in dtheta [N, H, K]; `entry` is the initial state."""
    S: gl.constexpr = 2
    BC: gl.constexpr = 64
    BLOCKS: gl.constexpr = K // BC
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BC, V], gl.bfloat16)
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, C // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, V // 2, 16])
    CHANNEL: gl.constexpr = gl.SliceLayout(1, SQUARE)
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    from_q = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    from_k = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    from_v = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    from_do = tma.make_tensor_descriptor(do, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    to = tma.make_tensor_descriptor(dq, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    cosines = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sines = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    held = gl.allocate_shared_memory(gl.bfloat16, [2, BC, V], STATES)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [C, C], KEYS)
    earlier = gl.allocate_shared_memory(gl.bfloat16, [C, C], KEYS)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    chunks = T // C
    row = n * T
    at_k = h * K + block * BC
    at_v = h * V
    BYTES: gl.constexpr = 2 * C * (2 * V + 2 * BC)
    for x in gl.static_range(S):
        _fetch4(
            from_q, from_k, from_v, from_do, row + C * x, at_k, at_v, sq, sk, sv, sd, barriers, x, x < chunks, BYTES
        )  # fmt: skip

    down = gl.arange(0, C, CHANNEL)[:, None]
    tokens = gl.arange(0, C, gl.SliceLayout(0, SQUARE))
    inside = down <= tokens[None, :]
    earlier.store(gl.where(inside, 1.0, 0.0).to(gl.bfloat16))
    empty = gl.zeros([BC, C], gl.float32, SQUARE)
    i = block * BC + gl.arange(0, BC, CHANNEL)
    high, low = _frequencies(gl.load(theta + h * K + i))
    step_cos, step_sin = _cosine_sine(gl.full_like(high, C), high, low)
    place_i = block * BC + gl.arange(0, BC, ROW)
    j = gl.arange(0, V, gl.SliceLayout(0, STATE))
    at = nh.to(gl.int64) * (2 * K * V) + place_i[:, None] * V + j[None, :]
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    state = gl.zeros([BC, V], gl.float32, STATE)
    state2 = gl.zeros([BC, V], gl.float32, STATE)
    slopes = gl.zeros([BC, C], gl.float32, SQUARE)
    reference = gl.full([BC], NOTHING, gl.float32, CHANNEL)
    mass = gl.zeros([BC], gl.float32, CHANNEL)
    if HAS_ENTRY:
        reference, mass = _start(gl.load(entry_z + nh.to(gl.int64) * K + i))
        factor = gl.convert_layout(mass, ROW)[:, None]
        state += gl.load(entry + at) * factor
        state2 += gl.load(entry + at + K * V) * factor

    mbarrier.wait(barriers.index(0), 0)
    raw = sk.index(0).permute((1, 0)).load(SQUARE).to(gl.float32)
    top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
    keep = gl.exp2(reference - top)
    before = mass * keep
    key = gl.exp2(raw * LOG2_E - top[:, None])
    mass = before + gl.sum(key, 1)
    reference = top
    place = _places(positions, row, 0, tokens, PLACED)
    cos, sin = _turns(place, high, low, empty)
    sk.index(0).permute((1, 0)).store(key.to(gl.bfloat16))
    cosines.index(0).permute((1, 0)).store((key * cos).to(gl.bfloat16))
    sines.index(0).permute((1, 0)).store((key * sin).to(gl.bfloat16))
    fence_async_shared()
    slot = 0
    phase = 0
    for x in range(0, chunks):
        tk = cosines.index(slot).permute((1, 0))
        tk2 = sines.index(slot).permute((1, 0))
        tv = sv.index(slot)
        td = sd.index(slot).permute((1, 0))
        factor = gl.convert_layout(keep, ROW)[:, None]
        state *= factor
        state2 *= factor
        held.index(0).store(state.to(gl.bfloat16))
        held.index(1).store(state2.to(gl.bfloat16))
        fence_async_shared()
        scores = warpgroup_mma(tv, td, empty, use_acc=False, is_async=True)
        masses = warpgroup_mma(sk.index(slot).permute((1, 0)), earlier, empty, use_acc=False, is_async=True)
        out = warpgroup_mma(held.index(0), td, empty, use_acc=False, is_async=True)
        out2 = warpgroup_mma(held.index(1), td, empty, use_acc=False, is_async=True)
        done = warpgroup_mma_wait(3, deps=[scores])
        state = warpgroup_mma(tk, tv, state, is_async=True)
        state2 = warpgroup_mma(tk2, tv, state2, is_async=True)
        gl.store(edge + x * (2 * H * K), reference)
        gl.store(edge + x * (2 * H * K) + K, before)
        tma.store_wait(0)
        weights.store(gl.where(inside, done, 0.0).to(gl.bfloat16))

        # The keys of the next chunk; after the last one, of what lies there, and unused.
        following = gl.minimum(x + 1, chunks - 1)
        next_slot = slot ^ 1
        next_phase = phase ^ slot
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < chunks)
        massed = before
        raw = sk.index(next_slot).permute((1, 0)).load(SQUARE).to(gl.float32)
        top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
        keep = gl.exp2(reference - top)
        before = mass * keep
        key = gl.exp2(raw * LOG2_E - top[:, None])
        more = x + 1 < chunks
        mass = gl.where(more, before + gl.sum(key, 1), mass)
        reference = gl.where(more, top, reference)
        if PLACED:
            next_place = _places(positions, row + C * following, 0, tokens, PLACED)
            next_cos, next_sin = _turns(next_place, high, low, empty)
        else:
            next_place = place + C
            next_cos, next_sin = _advance(cos, sin, step_cos, step_sin)
        sk.index(next_slot).permute((1, 0)).store(key.to(gl.bfloat16))
        cosines.index(next_slot).permute((1, 0)).store((key * next_cos).to(gl.bfloat16))
        sines.index(next_slot).permute((1, 0)).store((key * next_sin).to(gl.bfloat16))
        fence_async_shared()
        masses, out, out2 = warpgroup_mma_wait(2, deps=[masses, out, out2])
        out = warpgroup_mma(tk, weights, out, is_async=True)
        out2 = warpgroup_mma(tk2, weights, out2, is_async=True)
        inverse = _invert_tile(masses + massed[:, None]) * scale
        query = sq.index(slot).permute((1, 0)).load(SQUARE).to(gl.float32) * inverse
        out, out2, state, state2 = warpgroup_mma_wait(0, deps=[out, out2, state, state2])
        _fetch4(
            from_q, from_k, from_v, from_do, row + C * (x + S), at_k, at_v, sq, sk, sv, sd, barriers, slot,
            x + S < chunks, BYTES,
        )  # fmt: skip
        so.permute((1, 0)).store(((out * cos + out2 * sin) * inverse).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [row + C * x, at_k], so)
        slopes += query * (out2 * cos - out * sin) * place[None, :]
        if PLACED:
            cos, sin = _turns(next_place, high, low, empty)  # again, rather than held all the while
        else:
            cos, sin = _advance(cos, sin, step_cos, step_sin)
        place = next_place
        slot = next_slot
        phase = next_phase
    tma.store_wait(0)
    gl.store(edge + chunks * (2 * H * K), reference)
    gl.store(edge + chunks * (2 * H * K) + K, mass)
    gl.store(dtheta + nh.to(gl.int64) * K + i, gl.sum(slopes, 1))


@gluon.jit
def hopper_turned_keys_kernel(
    q, k, v, do, dq, du, entry, entry_z, end, leave, leave_z, edges, theta, dtheta, positions, scale, T, N,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
):  # fmt: skip
    """The gradient of the logits and its share in dtheta; `entry`, `entry_z` are those of the final state `end`."""
    S: gl.constexpr = 2
    BC: gl.constexpr = 64
    BLOCKS: gl.constexpr = K // BC
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BC, V], gl.bfloat16)
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, C // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, V // 2, 16])
    CHANNEL: gl.constexpr = gl.SliceLayout(1, SQUARE)
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    from_q = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    from_k = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    from_dq = tma.make_tensor_descriptor(dq, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    from_v = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    from_do = tma.make_tensor_descriptor(do, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    to = tma.make_tensor_descriptor(du, [N * T, H * K], [H * K, 1], [C, BC], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sg = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    sd = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    cosines = gl.allocate_shared_memory(gl.bfloat16, [C, BC], KEYS)
    sines = gl.allocate_shared_memory(gl.bfloat16, [C, BC], KEYS)
    held = gl.allocate_shared_memory(gl.bfloat16, [2, BC, V], STATES)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [C, C], KEYS)
    earlier = gl.allocate_shared_memory(gl.bfloat16, [C, C], KEYS)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    chunks = T // C
    row = n * T + T - C
    at_k = h * K + block * BC
    at_v = h * V
    BYTES: gl.constexpr = 2 * C * (2 * V + 3 * BC)
    for x in gl.static_range(S):
        _fetch5(
            from_q, from_k, from_dq, from_v, from_do, row - C * x, at_k, at_v, sq, sk, sg, sv, sd, barriers, x,
            x < chunks, BYTES,
        )  # fmt: skip

    down = gl.arange(0, C, CHANNEL)[:, None]
    tokens = gl.arange(0, C, gl.SliceLayout(0, SQUARE))
    inside = down >= tokens[None, :]
    earlier.store(gl.where(down <= tokens[None, :], 1.0, 0.0).to(gl.bfloat16))
    later = earlier.permute((1, 0))
    empty = gl.zeros([BC, C], gl.float32, SQUARE)
    i = block * BC + gl.arange(0, BC, CHANNEL)
    high, low = _frequencies(gl.load(theta + h * K + i))
    step_cos, step_sin = _cosine_sine(gl.full_like(high, -C), high, low)
    place = _places(positions, row, T - C, tokens, PLACED)
    cos, sin = _turns(place, high, low, empty)
    place_i = block * BC + gl.arange(0, BC, ROW)
    j = gl.arange(0, V, gl.SliceLayout(0, STATE))
    at = nh.to(gl.int64) * (2 * K * V) + place_i[:, None] * V + j[None, :]
    edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    state = gl.zeros([BC, V], gl.float32, STATE)
    state2 = gl.zeros([BC, V], gl.float32, STATE)
    slopes = gl.zeros([BC, C], gl.float32, SQUARE)
    fall = gl.zeros([BC], gl.float32, CHANNEL)
    reference = gl.load(edge + chunks * (2 * H * K))
    mass = gl.load(edge + chunks * (2 * H * K) + K)
    if HAS_ENTRY:
        state += gl.load(entry + at)
        state2 += gl.load(entry + at + K * V)
        share = gl.sum(state * gl.load(end + at) + state2 * gl.load(end + at + K * V), 1)
        fall += gl.convert_layout(share, CHANNEL) - gl.load(entry_z + nh.to(gl.int64) * K + i)
        fall *= _invert(mass)
        factor = gl.convert_layout(_invert(mass), ROW)[:, None]
        state *= factor
        state2 *= factor
    top = gl.load(edge + (chunks - 1) * (2 * H * K))
    mass = gl.load(edge + (chunks - 1) * (2 * H * K) + K)
    keep = gl.exp2(top - reference)
    reference = top
    mbarrier.wait(barriers.index(0), 0)
    raw = sk.index(0).permute((1, 0)).load(SQUARE).to(gl.float32)
    sk.index(0).permute((1, 0)).store(gl.exp2(raw * LOG2_E - top[:, None]).to(gl.bfloat16))
    fence_async_shared()
    slot = 0
    phase = 0
    for x in range(0, chunks):
        following = chunks - 1 - gl.minimum(x + 1, chunks - 1)
        before = mass
        top = gl.load(edge + following * (2 * H * K))
        mass = gl.load(edge + following * (2 * H * K) + K)
        tk = sk.index(slot).permute((1, 0))
        tv = sv.index(slot).permute((1, 0))
        td = sd.index(slot)
        factor = gl.convert_layout(keep, ROW)[:, None]
        state *= factor
        state2 *= factor
        held.index(0).store(state.to(gl.bfloat16))
        held.index(1).store(state2.to(gl.bfloat16))
        fence_async_shared()
        scores = warpgroup_mma(td, tv, empty, use_acc=False, is_async=True)
        masses = warpgroup_mma(tk, earlier, empty, use_acc=False, is_async=True)
        out = warpgroup_mma(held.index(0), tv, empty, use_acc=False, is_async=True)
        out2 = warpgroup_mma(held.index(1), tv, empty, use_acc=False, is_async=True)
        done, masses = warpgroup_mma_wait(2, deps=[scores, masses])
        tma.store_wait(0)
        weights.store(gl.where(inside, done, 0.0).to(gl.bfloat16))
        query = sq.index(slot).permute((1, 0)).load(SQUARE).to(gl.float32) * _invert_tile(masses + before[:, None])
        slope = query * sg.index(slot).permute((1, 0)).load(SQUARE).to(gl.float32)
        query *= scale
        cosines.permute((1, 0)).store((query * cos).to(gl.bfloat16))
        sines.permute((1, 0)).store((query * sin).to(gl.bfloat16))
        sg.index(slot).permute((1, 0)).store((-slope).to(gl.bfloat16))
        fall *= keep
        fallen = fall + gl.sum(slope, 1)
        fence_async_shared()
        out, out2 = warpgroup_mma_wait(0, deps=[out, out2])
        out = warpgroup_mma(cosines.permute((1, 0)), weights, out, is_async=True)
        out2 = warpgroup_mma(sines.permute((1, 0)), weights, out2, is_async=True)
        tail = warpgroup_mma(sg.index(slot).permute((1, 0)), later, empty, use_acc=False, is_async=True)
        state = warpgroup_mma(cosines.permute((1, 0)), td, state, is_async=True)
        state2 = warpgroup_mma(sines.permute((1, 0)), td, state2, is_async=True)

        # The keys of the next chunk; after the last one, of what lies there, and unused.
        next_slot = slot ^ 1
        next_phase = phase ^ slot
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < chunks)
        raw = sk.index(next_slot).permute((1, 0)).load(SQUARE).to(gl.float32)
        sk.index(next_slot).permute((1, 0)).store(gl.exp2(raw * LOG2_E - top[:, None]).to(gl.bfloat16))
        fence_async_shared()
        key = tk.load(SQUARE).to(gl.float32)
        out, out2, tail, state, state2 = warpgroup_mma_wait(0, deps=[out, out2, tail, state, state2])
        _fetch5(
            from_q, from_k, from_dq, from_v, from_do, row - C * (x + S), at_k, at_v, sq, sk, sg, sv, sd, barriers, slot,
            x + S < chunks, BYTES,
        )  # fmt: skip
        so.permute((1, 0)).store((key * (out * cos + out2 * sin + tail - fall[:, None])).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to, [row - C * x, at_k], so)
        slopes += key * (out2 * cos - out * sin) * place[None, :]
        if PLACED:
            place = _places(positions, row - C * gl.minimum(x + 1, chunks - 1), 0, tokens, PLACED)
            cos, sin = _turns(place, high, low, empty)
        else:
            place -= C
            cos, sin = _advance(cos, sin, step_cos, step_sin)
        fall = fallen
        keep = gl.exp2(top - reference)
        reference = top
        slot = next_slot
        phase = next_phase
    tma.store_wait(0)
    gl.store(dtheta + nh.to(gl.int64) * K + i, gl.sum(slopes, 1))
    mass = gl.load(edge + K)
    factor = gl.convert_layout(mass, ROW)[:, None]
    gl.store(leave + at, state * factor)
    gl.store(leave + at + K * V, state2 * factor)
    gl.store(leave_z + nh.to(gl.int64) * K + i, -fall * mass)
