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
