"""The causal sweeps of `linnet.ops.additive.kernels` for Hopper GPUs, where tiles come through descriptors (TMA) and
products of one chunk run beside each other and beside the exponentials of the next: bfloat16, widths of 64 or 128,
sequences of whole chunks, no documents.

Tiles of keys and queries are [channel, token] in registers: a warp owns 16 channels, so that the largest logit and the
sum of a chunk are found without the other warps, and exp(k) goes into products right from the registers. References are
in powers of two here, with SHIFT in them: key_s = 2^(u_s log2 e - r). `edges` [N, chunks + 1, H, 2, K] holds r and the
mass before each chunk, then those of the end; the sweep for dq leaves them for the reversed ones.

S chunks are in flight. The steps of a chunk that need no state are done one chunk ahead.
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

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
SHIFT = gl.constexpr(60.0)
ONE = gl.constexpr(2.0**60)
TINY = gl.constexpr(2.0**-80)
NOTHING = gl.constexpr(-1e30)


@gluon.jit
def _turn(tile, LAYOUT: gl.constexpr, OPERAND: gl.constexpr):
    """A tile [token, channel] of shared memory as [channel, token] in registers."""
    return gl.convert_layout(tile.permute((1, 0)).load(OPERAND), LAYOUT).to(gl.float32)


@gluon.jit
def _invert(mass):
    """1 / mass in the range of float32, 0 for none."""
    return gl.where(mass > 0, 1.0 / gl.where(mass > 0, mass, 1.0), 0.0)


@gluon.jit
def _invert_tile(mass):
    root = gl.rsqrt(gl.maximum(mass, TINY))
    return root * root


@gluon.jit
def _start(z):
    """Reference and mass of a state normalised by exp(-z)."""
    return gl.maximum(z * LOG2_E - SHIFT, NOTHING), gl.where(z > NOTHING, ONE, 0.0)


@gluon.jit
def _fetch3(d0, d1, d2, row, i0, i1, i2, s0, s1, s2, barriers, slot, wanted, BYTES: gl.constexpr):
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(d0, [row, i0], barrier, s0.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d1, [row, i1], barrier, s1.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d2, [row, i2], barrier, s2.index(slot), pred=wanted)


@gluon.jit
def hopper_values_kernel(
    q, k, c, o, entry, entry_z, leave, leave_z, sums, sums_z, edges, scale, T, N, G, F, H: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, REVERSE: gl.constexpr, HAS_ENTRY: gl.constexpr,
    HAS_LEAVE: gl.constexpr, SPLIT: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """o from c = v, or (REVERSE) dv from c = do. A program has BC columns of V of one head, turned: [BC, K].

    SPLIT, which cannot be reversed: of one of G segments; `sums`, `sums_z` are those of F pieces of each, from zero.
    """
    W: gl.constexpr = BC // 16
    BLOCKS: gl.constexpr = V // BC
    block = gl.program_id(0) % BLOCKS
    g = gl.program_id(0) // BLOCKS % G
    nh = gl.program_id(0) // (BLOCKS * G)
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    CC: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[C // 16, W * 16 // C], instr_shape=[16, C * C // 16 // W, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, K, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, OUT)
    ACROSS: gl.constexpr = gl.SliceLayout(0, STATE)
    dq = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, K], KEYS)
    dk = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, K], KEYS)
    dc = tma.make_tensor_descriptor(c, [N * T, H * V], [H * V, 1], [C, BC], COLUMNS)
    do = tma.make_tensor_descriptor(o, [N * T, H * V], [H * V, 1], [C, BC], COLUMNS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    sc = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], COLUMNS)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], COLUMNS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [C, C], CC)
    earlier = gl.allocate_shared_memory(gl.bfloat16, [C, C], CC)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    whole = T // C
    per = gl.cdiv(whole, G * F) * F
    chunks = gl.minimum(per, whole - g * per)
    row = n * T + g * per * C
    hop = C
    if REVERSE:
        row = n * T + T - C
        hop = -C
    at_k = h * K
    at_c = h * V + block * BC
    BYTES: gl.constexpr = 2 * C * (2 * K + BC)
    for x in gl.static_range(S):
        _fetch3(dq, dk, dc, row + hop * x, at_k, at_k, at_c, sq, sk, sc, barriers, x, x < chunks, BYTES)

    down = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    earlier.store(gl.where(down <= right, 1.0, 0.0).to(gl.bfloat16))
    inside = down >= right if REVERSE else down <= right
    no_out = gl.zeros([BC, C], gl.float32, OUT)
    no_masses = gl.zeros([K, C], gl.float32, OUT)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    i = gl.arange(0, K, CHANNEL)
    across = gl.arange(0, K, ACROSS)
    j = block * BC + gl.arange(0, BC, gl.SliceLayout(1, STATE))
    place = nh.to(gl.int64) * (K * V) + across[None, :] * V + j[:, None]
    if REVERSE:
        edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    state = gl.zeros([BC, K], gl.float32, STATE)
    reference = gl.full([K], NOTHING, gl.float32, CHANNEL)
    mass = gl.zeros([K], gl.float32, CHANNEL)  # after the chunk, but before it in a reversed sweep
    if HAS_ENTRY:
        state += gl.load(entry + place)
    if REVERSE:
        reference = gl.load(edge + chunks * (2 * H * K))
        mass = gl.load(edge + chunks * (2 * H * K) + K)
        state *= gl.convert_layout(_invert(mass), ACROSS)[None, :]
        top = gl.load(edge + (chunks - 1) * (2 * H * K))
        mass = gl.load(edge + (chunks - 1) * (2 * H * K) + K)
        keep = gl.exp2(top - reference)
    else:
        if HAS_ENTRY:
            reference, mass = _start(gl.load(entry_z + nh.to(gl.int64) * K + i))
            state *= gl.convert_layout(mass, ACROSS)[None, :]

    if SPLIT:
        for past in range(0, g * F):
            at = nh.to(gl.int64) * (G * F) + past
            z = gl.load(sums_z + at * K + i) * LOG2_E
            top = gl.maximum(reference, z - SHIFT)
            keep = gl.exp2(reference - top)
            take = gl.exp2(z - top)
            mass = mass * keep + take
            reference = top
            piece = gl.load(sums + at * (K * V) + across[None, :] * V + j[:, None])
            state = state * gl.convert_layout(keep, ACROSS)[None, :] + piece * gl.convert_layout(take, ACROSS)[None, :]

    # The keys and queries of the first chunk.
    mbarrier.wait(barriers.index(0), 0)
    raw = _turn(sk.index(0), OUT, OPERAND)
    if not REVERSE:
        top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
        keep = gl.exp2(reference - top)
        mass *= keep
    key = gl.exp2(raw * LOG2_E - top[:, None])
    operand = key.to(gl.bfloat16)
    sk.index(0).permute((1, 0)).store(operand)
    reference = top
    masses = warpgroup_mma(gl.convert_layout(operand, OPERAND), earlier, no_masses, use_acc=False, is_async=True)
    masses = warpgroup_mma_wait(0, deps=[masses]) + mass[:, None]
    if not REVERSE:
        mass += gl.sum(key, 1)
    raw = _turn(sq.index(0), OUT, OPERAND) * (_invert_tile(masses) * scale)
    sq.index(0).permute((1, 0)).store(raw.to(gl.bfloat16))
    fence_async_shared()
    slot = 0
    phase = 0
    for x in range(0, chunks):
        following = gl.minimum(x + 1, chunks - 1)
        if REVERSE:
            top = gl.load(edge + (chunks - 1 - following) * (2 * H * K))
            mass = gl.load(edge + (chunks - 1 - following) * (2 * H * K) + K)
        ta = sk.index(slot) if REVERSE else sq.index(slot)
        tb = sq.index(slot) if REVERSE else sk.index(slot)
        tc = sc.index(slot)
        scores = warpgroup_mma(tb, ta.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        state *= gl.convert_layout(keep, ACROSS)[None, :]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        out = warpgroup_mma(held, ta.permute((1, 0)), no_out, use_acc=False, is_async=True)
        done = warpgroup_mma_wait(1, deps=[scores])
        state = warpgroup_mma(tc.permute((1, 0)), tb, state, is_async=True)
        tma.store_wait(0)
        weights.store(gl.where(inside, done, 0.0).to(gl.bfloat16))
        fence_async_shared()

        # The keys of the next chunk; after the last one, of what lies there, and unused.
        next_slot = slot + 1
        next_phase = phase
        if next_slot == S:
            next_slot = 0
            next_phase ^= 1
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < chunks)
        tk = sk.index(next_slot)
        tq = sq.index(next_slot)
        raw = _turn(tk, OUT, OPERAND)
        before = mass
        if REVERSE:
            keep = gl.exp2(top - reference)
        else:
            top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
            keep = gl.exp2(reference - top)
            before = mass * keep
        key = gl.exp2(raw * LOG2_E - top[:, None])
        if not REVERSE:
            more = x + 1 < chunks
            mass = gl.where(more, before + gl.sum(key, 1), mass)
            top = gl.where(more, top, reference)
        reference = top
        operand = key.to(gl.bfloat16)
        tk.permute((1, 0)).store(operand)
        wide = gl.convert_layout(operand, OPERAND)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        out = warpgroup_mma(tc.permute((1, 0)), weights, out, is_async=True)
        masses = warpgroup_mma(wide, earlier, no_masses, use_acc=False, is_async=True)
        out, state = warpgroup_mma_wait(1, deps=[out, state])
        _fetch3(dq, dk, dc, row + hop * (x + S), at_k, at_k, at_c, sq, sk, sc, barriers, slot, x + S < chunks, BYTES)
        so.permute((1, 0)).store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(do, [row + hop * x, at_c], so)
        masses, _ = warpgroup_mma_wait(0, deps=[masses, wide])
        raw = _turn(tq, OUT, OPERAND) * (_invert_tile(masses + before[:, None]) * scale)
        tq.permute((1, 0)).store(raw.to(gl.bfloat16))
        fence_async_shared()
        slot = next_slot
        phase = next_phase
    tma.store_wait(0)
    if HAS_LEAVE:
        factor = gl.convert_layout(_invert(mass), ACROSS)[None, :]
        if g * per + chunks == whole:
            gl.store(leave + place, state * factor)
        if (g * per + chunks == whole) & (block == 0):
            z = gl.where(mass > 0, (reference + gl.log2(gl.where(mass > 0, mass, 1.0))) * LN_2, -float("inf"))
            gl.store(leave_z + nh.to(gl.int64) * K + i, z)


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


@gluon.jit
def _fetch2(d0, d1, row, i0, i1, s0, s1, barriers, slot, wanted, BYTES: gl.constexpr):
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(d0, [row, i0], barrier, s0.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(d1, [row, i1], barrier, s1.index(slot), pred=wanted)


@gluon.jit
def hopper_sums_kernel(
    k, v, sums, sums_z, T, N, G, count, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """sums [N, H, G, K, V] = softmax(k)^T v of the first `count` segments, and their log-sums, sums_z [N, H, G, K]."""
    W: gl.constexpr = K // 16
    nh = gl.program_id(0) // count
    g = gl.program_id(0) % count
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    TURNED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TURNED, k_width=2)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, TURNED)
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    dk = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, K], KEYS)
    dv = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    chunks = T // C
    per = gl.cdiv(chunks, G)
    first = g * per
    last = gl.minimum(first + per, chunks)
    row = n * T
    BYTES: gl.constexpr = 2 * C * (K + V)
    for x in gl.static_range(S):
        _fetch2(dk, dv, row + C * (first + x), h * K, h * V, sk, sv, barriers, x, first + x < last, BYTES)
    state = gl.zeros([K, V], gl.float32, STATE)
    reference = gl.full([K], NOTHING, gl.float32, CHANNEL)
    mass = gl.zeros([K], gl.float32, CHANNEL)
    slot = 0
    phase = 0
    for x in range(first, last):
        mbarrier.wait(barriers.index(slot), phase)
        tk = sk.index(slot).permute((1, 0))
        raw = _turn(sk.index(slot), TURNED, OPERAND)
        top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
        keep = gl.exp2(reference - top)
        key = gl.exp2(raw * LOG2_E - top[:, None])
        mass = mass * keep + gl.sum(key, 1)
        reference = top
        tk.store(key.to(gl.bfloat16))
        fence_async_shared()
        state *= gl.convert_layout(keep, ROW)[:, None]
        state = warpgroup_mma(tk, sv.index(slot), state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
        _fetch2(dk, dv, row + C * (x + S), h * K, h * V, sk, sv, barriers, slot, x + S < last, BYTES)
        slot += 1
        if slot == S:
            slot = 0
            phase ^= 1
    i = gl.arange(0, K, CHANNEL)
    rows = gl.arange(0, K, ROW)
    j = gl.arange(0, V, gl.SliceLayout(0, STATE))
    at = nh.to(gl.int64) * G + g
    place = at * (K * V) + rows[:, None] * V + j[None, :]
    gl.store(sums + place, state * gl.convert_layout(_invert(mass), ROW)[:, None])
    z = gl.where(mass > 0, (reference + gl.log2(gl.where(mass > 0, mass, 1.0))) * LN_2, -float("inf"))
    gl.store(sums_z + at * K + i, z)


@gluon.jit
def hopper_product_kernel(
    q, o, state, scale, T, N, G, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """o = scale q S."""
    nh = gl.program_id(0) // G
    g = gl.program_id(0) % G
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, V], gl.bfloat16)
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V, 16])
    dq = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, K], KEYS)
    do = tma.make_tensor_descriptor(o, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    sq = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, V], VALUES)
    ss = gl.allocate_shared_memory(gl.bfloat16, [K, V], STATES)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    chunks = T // C
    per = gl.cdiv(chunks, G)
    first = g * per
    last = gl.minimum(first + per, chunks)
    row = n * T
    for x in gl.static_range(S):
        barrier = barriers.index(x)
        mbarrier.expect(barrier, 2 * C * K, pred=first + x < last)
        tma.async_copy_global_to_shared(
            dq, [row + C * (first + x), h * K], barrier, sq.index(x), pred=first + x < last
        )  # fmt: skip
    i = gl.arange(0, K, gl.SliceLayout(1, OUT))
    j = gl.arange(0, V, gl.SliceLayout(0, OUT))
    whole = gl.load(state + nh.to(gl.int64) * (K * V) + i[:, None] * V + j[None, :])
    ss.store((whole * scale).to(gl.bfloat16))
    fence_async_shared()
    no_out = gl.zeros([C, V], gl.float32, OUT)
    slot = 0
    phase = 0
    for x in range(first, last):
        mbarrier.wait(barriers.index(slot), phase)
        out = warpgroup_mma(sq.index(slot), ss, no_out, use_acc=False, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        barrier = barriers.index(slot)
        mbarrier.expect(barrier, 2 * C * K, pred=x + S < last)
        tma.async_copy_global_to_shared(dq, [row + C * (x + S), h * K], barrier, sq.index(slot), pred=x + S < last)
        tma.store_wait(0)
        so.store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(do, [row + C * x, h * V], so)
        slot += 1
        if slot == S:
            slot = 0
            phase ^= 1
    tma.store_wait(0)
