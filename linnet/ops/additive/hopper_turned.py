"""The sweeps of `linnet.ops.additive.hopper` that own columns of V, with LRPE: keys and queries are turned on the way,
into a cosine half where they lay and a sine half beside it, and the state has two halves.
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

from linnet.ops.additive.hopper import LN_2, LOG2_E, NOTHING, SHIFT, _fetch3, _invert, _invert_tile, _start, _turn

TURN_HIGH = gl.constexpr(0.15915493667125702)  # as in `linnet.ops.angles`
TURN_LOW = gl.constexpr(6.420638326565253e-09)
TWO_PI = gl.constexpr(6.283185307179586)


@gluon.jit
def _frequencies(theta):
    """Turns a token, in two parts."""
    high = theta * TURN_HIGH
    return high, gl.fma(theta, gl.full_like(theta, TURN_HIGH), -high) + theta * TURN_LOW


@gluon.jit
def _cosine_sine(place, high, low):
    """Cosine and sine of tensors of one shape, as `linnet.ops.angles.cosine_sine`."""
    whole = gl.floor(gl.fma(place, high, gl.full_like(place, 0.5)))
    angle = (gl.fma(place, high, -whole) + place * low) * TWO_PI
    cos = gl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], gl.float32, is_pure=True, pack=1)
    sin = gl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], gl.float32, is_pure=True, pack=1)
    return cos, sin


@gluon.jit
def _turns(place, high, low, empty):
    """Cosine and sine [channel, token]."""
    return _cosine_sine(empty + place[None, :], empty + high[:, None], empty + low[:, None])


@gluon.jit
def _advance(cos, sin, step_cos, step_sin):
    """Cosine and sine one chunk further: off by some 1e-7 a chunk, against 1e-3 that bfloat16 is off."""
    return cos * step_cos[:, None] - sin * step_sin[:, None], sin * step_cos[:, None] + cos * step_sin[:, None]


@gluon.jit
def _places(positions, row, start, tokens, PLACED: gl.constexpr):
    if PLACED:
        place = gl.load(positions + row.to(gl.int64) + tokens).to(gl.float32)
    else:
        place = (start + tokens).to(gl.float32)
    return place


@gluon.jit
def hopper_turned_kernel(
    q, k, c, o, entry, entry_z, leave, leave_z, edges, theta, positions, scale, T, N, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, REVERSE: gl.constexpr, PLACED: gl.constexpr, HAS_ENTRY: gl.constexpr,
    HAS_LEAVE: gl.constexpr,
):  # fmt: skip
    """o from c = v, or (REVERSE) dv from c = do, in 64 columns of V of one head a program; two chunks are in flight."""
    S: gl.constexpr = 2
    W: gl.constexpr = 8
    BC: gl.constexpr = 64
    BLOCKS: gl.constexpr = V // BC
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    CC: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BC, K], gl.bfloat16)
    # Channels by tokens: a warp has 16 channels. Products are of 64 rows, and two groups of warps halve their columns.
    TURNED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, C, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, C // 2, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, K // 2, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TURNED, k_width=2)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, TURNED)
    ACROSS: gl.constexpr = gl.SliceLayout(0, STATE)
    dq = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, K], KEYS)
    dk = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, K], KEYS)
    dc = tma.make_tensor_descriptor(c, [N * T, H * V], [H * V, 1], [C, BC], COLUMNS)
    do = tma.make_tensor_descriptor(o, [N * T, H * V], [H * V, 1], [C, BC], COLUMNS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    sines_q = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    sines_k = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    sc = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], COLUMNS)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], COLUMNS)
    held = gl.allocate_shared_memory(gl.bfloat16, [2, BC, K], STATES)
    weights = gl.allocate_shared_memory(gl.bfloat16, [C, C], CC)
    earlier = gl.allocate_shared_memory(gl.bfloat16, [C, C], CC)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    chunks = T // C
    row = n * T
    hop = C
    start = 0
    if REVERSE:
        row = n * T + T - C
        hop = -C
        start = T - C
    at_k = h * K
    at_c = h * V + block * BC
    BYTES: gl.constexpr = 2 * C * (2 * K + BC)
    for x in gl.static_range(S):
        _fetch3(dq, dk, dc, row + hop * x, at_k, at_k, at_c, sq, sk, sc, barriers, x, x < chunks, BYTES)

    down = gl.arange(0, C, gl.SliceLayout(1, OUT))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, OUT))[None, :]
    earlier.store(gl.where(down <= right, 1.0, 0.0).to(gl.bfloat16))
    inside = down >= right if REVERSE else down <= right
    tokens = gl.arange(0, C, gl.SliceLayout(0, TURNED))
    no_out = gl.zeros([BC, C], gl.float32, OUT)
    no_masses = gl.zeros([K, C], gl.float32, TURNED)
    i = gl.arange(0, K, CHANNEL)
    high, low = _frequencies(gl.load(theta + h * K + i))
    step_cos, step_sin = _cosine_sine(gl.full_like(high, hop), high, low)
    across = gl.arange(0, K, ACROSS)
    j = block * BC + gl.arange(0, BC, gl.SliceLayout(1, STATE))
    place = nh.to(gl.int64) * (2 * K * V) + across[None, :] * V + j[:, None]
    state = gl.zeros([BC, K], gl.float32, STATE)
    state2 = gl.zeros([BC, K], gl.float32, STATE)
    reference = gl.full([K], NOTHING, gl.float32, CHANNEL)
    mass = gl.zeros([K], gl.float32, CHANNEL)
    if HAS_ENTRY:
        state += gl.load(entry + place)
        state2 += gl.load(entry + place + K * V)
    if REVERSE:
        edge = edges + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
        reference = gl.load(edge + chunks * (2 * H * K))
        factor = gl.convert_layout(_invert(gl.load(edge + chunks * (2 * H * K) + K)), ACROSS)[None, :]
        state *= factor
        state2 *= factor
        top = gl.load(edge + (chunks - 1) * (2 * H * K))
        mass = gl.load(edge + (chunks - 1) * (2 * H * K) + K)
        keep = gl.exp2(top - reference)
    else:
        if HAS_ENTRY:
            reference, mass = _start(gl.load(entry_z + nh.to(gl.int64) * K + i))
            factor = gl.convert_layout(mass, ACROSS)[None, :]
            state *= factor
            state2 *= factor

    mbarrier.wait(barriers.index(0), 0)
    raw = _turn(sk.index(0), TURNED, OPERAND)
    if not REVERSE:
        top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
        keep = gl.exp2(reference - top)
        mass *= keep
    key = gl.exp2(raw * LOG2_E - top[:, None])
    wide = gl.convert_layout(key.to(gl.bfloat16), OPERAND)
    masses = warpgroup_mma(wide, earlier, no_masses, use_acc=False, is_async=True)
    cos, sin = _turns(_places(positions, row, start, tokens, PLACED), high, low, no_masses)
    sk.index(0).permute((1, 0)).store((key * cos).to(gl.bfloat16))
    sines_k.index(0).permute((1, 0)).store((key * sin).to(gl.bfloat16))
    reference = top
    masses, _ = warpgroup_mma_wait(0, deps=[masses, wide])
    query = _turn(sq.index(0), TURNED, OPERAND) * (_invert_tile(masses + mass[:, None]) * scale)
    if not REVERSE:
        mass += gl.sum(key, 1)
    sq.index(0).permute((1, 0)).store((query * cos).to(gl.bfloat16))
    sines_q.index(0).permute((1, 0)).store((query * sin).to(gl.bfloat16))
    slot = 0
    phase = 0
    for x in range(0, chunks):
        following = gl.minimum(x + 1, chunks - 1)
        if REVERSE:
            top = gl.load(edge + (chunks - 1 - following) * (2 * H * K))
            mass = gl.load(edge + (chunks - 1 - following) * (2 * H * K) + K)
        ta = sk.index(slot) if REVERSE else sq.index(slot)
        tb = sq.index(slot) if REVERSE else sk.index(slot)
        ta2 = sines_k.index(slot) if REVERSE else sines_q.index(slot)
        tb2 = sines_q.index(slot) if REVERSE else sines_k.index(slot)
        tc = sc.index(slot)
        factor = gl.convert_layout(keep, ACROSS)[None, :]
        state *= factor
        state2 *= factor
        held.index(0).store(state.to(gl.bfloat16))
        held.index(1).store(state2.to(gl.bfloat16))
        fence_async_shared()
        scores = warpgroup_mma(tb, ta.permute((1, 0)), no_out, use_acc=False, is_async=True)
        scores = warpgroup_mma(tb2, ta2.permute((1, 0)), scores, is_async=True)
        out = warpgroup_mma(held.index(0), ta.permute((1, 0)), no_out, use_acc=False, is_async=True)
        out = warpgroup_mma(held.index(1), ta2.permute((1, 0)), out, is_async=True)
        done = warpgroup_mma_wait(2, deps=[scores])
        state = warpgroup_mma(tc.permute((1, 0)), tb, state, is_async=True)
        state2 = warpgroup_mma(tc.permute((1, 0)), tb2, state2, is_async=True)
        tma.store_wait(0)
        weights.store(gl.where(inside, done, 0.0).to(gl.bfloat16))

        # The keys of the next chunk; after the last one, of what lies there, and unused.
        next_slot = slot ^ 1
        next_phase = phase ^ slot
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < chunks)
        tk = sk.index(next_slot)
        tq = sq.index(next_slot)
        raw = _turn(tk, TURNED, OPERAND)
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
        if PLACED:
            cos, sin = _turns(_places(positions, row + hop * following, 0, tokens, PLACED), high, low, no_masses)
        else:
            cos, sin = _advance(cos, sin, step_cos, step_sin)
        tk.permute((1, 0)).store((key * cos).to(gl.bfloat16))
        sines_k.index(next_slot).permute((1, 0)).store((key * sin).to(gl.bfloat16))
        fence_async_shared()
        wide = gl.convert_layout(key.to(gl.bfloat16), OPERAND)
        out = warpgroup_mma_wait(2, deps=[out])
        out = warpgroup_mma(tc.permute((1, 0)), weights, out, is_async=True)
        masses = warpgroup_mma(wide, earlier, no_masses, use_acc=False, is_async=True)
        out, state, state2 = warpgroup_mma_wait(1, deps=[out, state, state2])
        _fetch3(dq, dk, dc, row + hop * (x + S), at_k, at_k, at_c, sq, sk, sc, barriers, slot, x + S < chunks, BYTES)
        so.permute((1, 0)).store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(do, [row + hop * x, at_c], so)
        masses, _ = warpgroup_mma_wait(0, deps=[masses, wide])
        query = _turn(tq, TURNED, OPERAND) * (_invert_tile(masses + before[:, None]) * scale)
        tq.permute((1, 0)).store((query * cos).to(gl.bfloat16))
        sines_q.index(next_slot).permute((1, 0)).store((query * sin).to(gl.bfloat16))
        slot = next_slot
        phase = next_phase
    tma.store_wait(0)
    if HAS_LEAVE:
        factor = gl.convert_layout(_invert(mass), ACROSS)[None, :]
        gl.store(leave + place, state * factor)
        gl.store(leave + place + K * V, state2 * factor)
        if block == 0:
            z = gl.where(mass > 0, (reference + gl.log2(gl.where(mass > 0, mass, 1.0))) * LN_2, -float("inf"))
            gl.store(leave_z + nh.to(gl.int64) * K + i, z)
