"""The sweeps of `linnet.ops.lightning.triton` for Hopper GPUs, where tiles come through descriptors (TMA) and products
of one chunk run beside each other: bfloat16, widths of 64, 128 or 256, sequences of whole chunks, no documents.

Names are those of `sweep_kernel`. S chunks are in flight. The code writes out which products run while others do: the
scores of the next chunk, which need no state, start before this chunk's output is done, so that of the chain from state
to state only one product is left.
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

from linnet.ops.device import KEEP_NAN


@gluon.constexpr_function
def product_layout(warps, columns, groups=1):
    """Registers of a product whose rows are split over `warps`, and columns over `groups` of these, `columns` each."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, groups], instr_shape=[16, columns, 16])


@gluon.jit
def make_barriers(S: gl.constexpr):
    """A barrier for each of S slots of shared memory."""
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    return barriers


@gluon.jit
def fetch(descriptors, row, columns, tiles, barriers, slot, wanted, BYTES: gl.constexpr):
    """Loads, if wanted, the chunk at `row` into a slot of the tiles, which are all of BYTES."""
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    for i in gl.static_range(len(descriptors)):
        tma.async_copy_global_to_shared(descriptors[i], [row, columns[i]], barrier, tiles[i].index(slot), pred=wanted)


@gluon.jit
def advance(slot, phase, S: gl.constexpr):
    """The slot of the next chunk, and the phase of its barrier."""
    slot += 1
    if slot == S:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def hopper_kernel(
    a, b, c, o, a1, b1, c1, o1, a2, b2, c2, o2, initial, initial2, final, sums, rates, offsets,
    scale, T, N, G, H: gl.constexpr,
    DA: gl.constexpr, DC: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, ROLES: gl.constexpr,
    REVERSE: gl.constexpr, FLIP: gl.constexpr, HAS_DECAY: gl.constexpr, HAS_INITIAL: gl.constexpr,
    HAS_INITIAL2: gl.constexpr, HAS_FINAL: gl.constexpr, SPLIT: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """States are transposed, [columns of c, width of a]."""
    pid = gl.program_id(0)
    BLOCKS: gl.constexpr = DC // BC
    block = pid % BLOCKS
    role = (pid // BLOCKS) % ROLES
    nh = (pid // (BLOCKS * ROLES)) % (N * H)
    g = pid // (BLOCKS * ROLES * N * H)
    n, h = nh // H, nh % H
    if ROLES == 3:
        if role == 1:
            a, b, c, o = a1, b1, c1, o1
        if role == 2:
            a, b, c, o = a2, b2, c2, o2
        if HAS_INITIAL or HAS_INITIAL2:
            if role > 0:
                initial = initial2
        reverse = (role > 0).to(gl.int32)
        flip = role < 2
        has_initial = (HAS_INITIAL & (role == 0)) | (HAS_INITIAL2 & (role > 0))
        has_final = HAS_FINAL & (role == 2)
    else:
        reverse = gl.to_tensor(REVERSE).to(gl.int32)
        flip = FLIP
        has_initial = HAS_INITIAL
        has_final = HAS_FINAL

    # Shared memory, and what each warp holds of a product: all rows of the state are split over the warps, 16 each.
    # A state of width 256 is split over two groups of warps, which pass it on through shared memory.
    SPLIT_STATE: gl.constexpr = 2 if DA > 128 else 1
    WARPS: gl.constexpr = BC // 16 * SPLIT_STATE
    AB: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, DA], gl.bfloat16)
    CO: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    CC: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    SCORES: gl.constexpr = product_layout(C // 16, C * C // 16 // WARPS, WARPS * 16 // C)
    OUT: gl.constexpr = product_layout(BC // 16, C // SPLIT_STATE, SPLIT_STATE)
    STATE: gl.constexpr = product_layout(BC // 16, DA // SPLIT_STATE, SPLIT_STATE)
    TO_OUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    TO_STATE: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=STATE, k_width=2)
    da = tma.make_tensor_descriptor(a, [N * T, H * DA], [H * DA, 1], [C, DA], AB)
    db = tma.make_tensor_descriptor(b, [N * T, H * DA], [H * DA, 1], [C, DA], AB)
    dc = tma.make_tensor_descriptor(c, [N * T, H * DC], [H * DC, 1], [C, BC], CO)
    do = tma.make_tensor_descriptor(o, [N * T, H * DC], [H * DC, 1], [C, BC], CO)
    sa = gl.allocate_shared_memory(gl.bfloat16, [S, C, DA], AB)
    sb = gl.allocate_shared_memory(gl.bfloat16, [S, C, DA], AB)
    sc = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], CO)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], CO)
    weights = gl.allocate_shared_memory(gl.bfloat16, [C, C], CC)
    if SPLIT_STATE > 1:
        SL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BC, DA], gl.bfloat16)
        states = gl.allocate_shared_memory(gl.bfloat16, [BC, DA], SL)
    barriers = make_barriers(S)

    at_ab = h * DA
    at_co = h * DC + block * BC
    chunks = T // C
    per = gl.cdiv(chunks, G)
    first = g * per
    last = gl.minimum(first + per, chunks)
    row = n * T + gl.where(reverse > 0, T - C, 0)
    hop = (1 - 2 * reverse) * C
    descriptors, columns, tiles = (da, db, dc), (at_ab, at_ab, at_co), (sa, sb, sc)
    BYTES: gl.constexpr = 2 * C * (2 * DA + BC)
    for x in gl.static_range(S):
        fetch(descriptors, row + hop * (first + x), columns, tiles, barriers, x, first + x < last, BYTES)

    rate = 0.0
    if HAS_DECAY:
        rate = gl.maximum(gl.load(rates + h).to(gl.float32), -1e30, KEEP_NAN) * 1.4426950408889634
    state = gl.zeros([BC, DA], gl.float32, STATE)
    j = block * BC + gl.arange(0, BC, gl.SliceLayout(1, STATE))
    i = gl.arange(0, DA, gl.SliceLayout(0, STATE))
    place = j[:, None] * gl.where(flip, DA, 1) + i[None, :] * gl.where(flip, 1, DC)
    if HAS_INITIAL or HAS_INITIAL2:
        if has_initial:
            state += gl.load(initial + nh.to(gl.int64) * (DA * DC) + place)
    if SPLIT:
        whole = gl.exp2(rate * per * C)
        for before in range(0, g):
            summary = sums + ((reverse * (N * H) + nh).to(gl.int64) * (G - 1) + before) * (DA * DC)
            state = state * whole + gl.load(summary + place)

    # Positions in the order of the sweep, in each layout that a product has them in.
    rj = gl.arange(0, C, gl.SliceLayout(1, SCORES))
    ri = gl.arange(0, C, gl.SliceLayout(0, SCORES))
    ro = gl.arange(0, C, gl.SliceLayout(0, OUT))
    rk = gl.arange(0, C, gl.SliceLayout(0, TO_STATE))
    ri = gl.where(reverse > 0, C - 1 - ri, ri)
    rj = gl.where(reverse > 0, C - 1 - rj, rj)
    ro = gl.where(reverse > 0, C - 1 - ro, ro)
    rk = gl.where(reverse > 0, C - 1 - rk, rk)
    apart = ri[None, :] - rj[:, None]
    inside = gl.where(apart >= 0, gl.exp2(rate * gl.maximum(apart, 0)) * scale, 0.0)
    since = gl.exp2(rate * (ro + 1 - reverse)) * gl.where(reverse > 0, 1.0, scale)
    until = gl.exp2(rate * gl.maximum(C - 1 - rk + reverse, 0)) * gl.where(reverse > 0, scale, 1.0)
    over = gl.exp2(rate * C)
    no_out = gl.zeros([BC, C], gl.float32, OUT)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    slot = 0
    phase = 0
    mbarrier.wait(barriers.index(0), 0, pred=first < last)
    scores = warpgroup_mma(sb.index(0), sa.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    for x in range(first, last):
        ta = sa.index(slot)
        tb = sb.index(slot)
        tc = sc.index(slot)
        # An operand in registers is named in the wait for its product, so that it is not overwritten too early.
        if SPLIT_STATE > 1:
            held = states
            states.store(state.to(gl.bfloat16))
            fence_async_shared()
        else:
            held = gl.convert_layout(state.to(gl.bfloat16), TO_OUT)
        out = warpgroup_mma(held, ta.permute((1, 0)), no_out, use_acc=False, is_async=True)
        decayed = (tc.permute((1, 0)).load(TO_STATE).to(gl.float32) * until[None, :]).to(gl.bfloat16)
        done = warpgroup_mma_wait(1, deps=[scores])
        state = warpgroup_mma(decayed, tb, state * over, is_async=True)
        tma.store_wait(0)
        weights.store((done * inside).to(gl.bfloat16))
        fence_async_shared()
        next_slot, next_phase = advance(slot, phase, S)
        if SPLIT_STATE > 1:
            out = warpgroup_mma_wait(1, deps=[out])
        else:
            out, _ = warpgroup_mma_wait(1, deps=[out, held])
        out = warpgroup_mma(tc.permute((1, 0)), weights, out * since[None, :], is_async=True)
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < last)
        # After the last chunk these are of what lies there, and unused.
        scores = warpgroup_mma(
            sb.index(next_slot), sa.index(next_slot).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        out, state, _ = warpgroup_mma_wait(1, deps=[out, state, decayed])
        fetch(descriptors, row + hop * (x + S), columns, tiles, barriers, slot, x + S < last, BYTES)
        so.permute((1, 0)).store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(do, [row + hop * x, at_co], so)
        slot = next_slot
        phase = next_phase
    warpgroup_mma_wait(0, deps=[scores])
    tma.store_wait(0)
    if HAS_FINAL:
        if has_final & (last >= chunks) & (first < chunks):
            gl.store(final + nh.to(gl.int64) * (DA * DC) + place, state)


@gluon.jit
def narrow_kernel(
    a, b, c, o, a1, b1, c1, o1, a2, b2, c2, o2, initial, initial2, final, sums, rates, offsets,
    scale, T, N, G, H: gl.constexpr,
    DA: gl.constexpr, DC: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, HAS_DECAY: gl.constexpr,
    HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, SPLIT: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """The forward sweep for so few heads of 64 that whole ones final multiprocessors idle: a program of 4 warps has 32
    of a head's columns. Arguments as `hopper_kernel`, without the other sweeps.

    Fewer than 64 columns cannot be the rows of an asynchronous product. So tokens are rows here, and states [width of
    a, columns] as in memory: weights stay in registers, states go through shared memory, which no product waits for.
    """
    pid = gl.program_id(0)
    BLOCKS: gl.constexpr = DC // BC
    block = pid % BLOCKS
    nh = (pid // BLOCKS) % (N * H)
    g = pid // (BLOCKS * N * H)
    n, h = nh // H, nh % H

    AB: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, DA], gl.bfloat16)
    CO: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DA, BC], gl.bfloat16)
    SCORES: gl.constexpr = product_layout(4, C)
    OUT: gl.constexpr = product_layout(4, BC)
    TO_OUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    da = tma.make_tensor_descriptor(a, [N * T, H * DA], [H * DA, 1], [C, DA], AB)
    db = tma.make_tensor_descriptor(b, [N * T, H * DA], [H * DA, 1], [C, DA], AB)
    dc = tma.make_tensor_descriptor(c, [N * T, H * DC], [H * DC, 1], [C, BC], CO)
    do = tma.make_tensor_descriptor(o, [N * T, H * DC], [H * DC, 1], [C, BC], CO)
    sa = gl.allocate_shared_memory(gl.bfloat16, [S, C, DA], AB)
    sb = gl.allocate_shared_memory(gl.bfloat16, [S, C, DA], AB)
    sc = gl.allocate_shared_memory(gl.bfloat16, [S, C, BC], CO)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BC], CO)
    states = gl.allocate_shared_memory(gl.bfloat16, [DA, BC], STATES)
    barriers = make_barriers(S)

    at_ab = h * DA
    at_co = h * DC + block * BC
    chunks = T // C
    per = gl.cdiv(chunks, G)
    first = g * per
    last = gl.minimum(first + per, chunks)
    row = n * T
    descriptors, columns, tiles = (da, db, dc), (at_ab, at_ab, at_co), (sa, sb, sc)
    BYTES: gl.constexpr = 2 * C * (2 * DA + BC)
    for x in gl.static_range(S):
        fetch(descriptors, row + C * (first + x), columns, tiles, barriers, x, first + x < last, BYTES)

    rate = 0.0
    if HAS_DECAY:
        rate = gl.maximum(gl.load(rates + h).to(gl.float32), -1e30, KEEP_NAN) * 1.4426950408889634
    state = gl.zeros([DA, BC], gl.float32, OUT)
    i = gl.arange(0, DA, gl.SliceLayout(1, OUT))
    j = block * BC + gl.arange(0, BC, gl.SliceLayout(0, OUT))
    place = i[:, None] * DC + j[None, :]
    if HAS_INITIAL:
        state += gl.load(initial + nh.to(gl.int64) * (DA * DC) + place)
    if SPLIT:
        whole = gl.exp2(rate * per * C)
        for before in range(0, g):
            state = state * whole + gl.load(sums + (nh.to(gl.int64) * (G - 1) + before) * (DA * DC) + place)

    apart = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None] - gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    inside = gl.where(apart >= 0, gl.exp2(rate * gl.maximum(apart, 0)) * scale, 0.0)
    since = gl.exp2(rate * (gl.arange(0, C, gl.SliceLayout(1, OUT)) + 1)) * scale
    until = gl.exp2(rate * (C - 1 - gl.arange(0, C, gl.SliceLayout(0, TO_OUT))))
    over = gl.exp2(rate * C)
    no_out = gl.zeros([C, BC], gl.float32, OUT)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    slot = 0
    phase = 0
    mbarrier.wait(barriers.index(0), 0, pred=first < last)
    scores = warpgroup_mma(sa.index(0), sb.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    for x in range(first, last):
        tb = sb.index(slot)
        tc = sc.index(slot)
        states.store(state.to(gl.bfloat16))
        decayed = (tb.permute((1, 0)).load(TO_OUT).to(gl.float32) * until[None, :]).to(gl.bfloat16)
        fence_async_shared()
        past = warpgroup_mma(sa.index(slot), states, no_out, use_acc=False, is_async=True)
        state = warpgroup_mma(decayed, tc, state * over, is_async=True)
        done = warpgroup_mma_wait(2, deps=[scores])
        weights = gl.convert_layout((done * inside).to(gl.bfloat16), TO_OUT)
        present = warpgroup_mma(weights, tc, no_out, use_acc=False, is_async=True)
        next_slot, next_phase = advance(slot, phase, S)
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < last)
        # After the last chunk these are of what lies there, and unused.
        scores = warpgroup_mma(
            sa.index(next_slot), sb.index(next_slot).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        # Operands in registers are named in the wait for their products, so that they are not overwritten too early.
        past, state, present, _, _ = warpgroup_mma_wait(1, deps=[past, state, present, decayed, weights])
        tma.store_wait(0)
        fetch(descriptors, row + C * (x + S), columns, tiles, barriers, slot, x + S < last, BYTES)
        so.store((past * since[:, None] + present).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(do, [row + C * x, at_co], so)
        slot = next_slot
        phase = next_phase
    warpgroup_mma_wait(0, deps=[scores])
    tma.store_wait(0)
    if HAS_FINAL:
        if (last >= chunks) & (first < chunks):
            gl.store(final + nh.to(gl.int64) * (DA * DC) + place, state)
