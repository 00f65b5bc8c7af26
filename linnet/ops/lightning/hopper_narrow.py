"""The forward sweep of `linnet.ops.lightning.hopper` for so few heads of 64 that whole ones leave multiprocessors idle:
a program has 32 of a head's columns.

Fewer than 64 cannot be the rows of an asynchronous product. So tokens are rows here, and states [width of a, columns]
as in memory: weights stay in registers, states go through shared memory, which no other product waits for.
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

from linnet.ops.lightning.hopper import fetch


@gluon.jit
def narrow_kernel(
    a, b, c, o, a1, b1, c1, o1, a2, b2, c2, o2, entry, entry2, leave, sums, rates, offsets,
    scale, T, N, G, H: gl.constexpr,
    DA: gl.constexpr, DC: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, HAS_DECAY: gl.constexpr,
    HAS_ENTRY: gl.constexpr, HAS_LEAVE: gl.constexpr, SPLIT: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Arguments as `hopper_kernel`, whose other sweeps are not there. By 4 warps."""
    pid = gl.program_id(0)
    BLOCKS: gl.constexpr = DC // BC
    block = pid % BLOCKS
    nh = (pid // BLOCKS) % (N * H)
    g = pid // (BLOCKS * N * H)
    n, h = nh // H, nh % H

    AB: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, DA], gl.bfloat16)
    CO: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DA, BC], gl.bfloat16)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BC, 16])
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
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)

    at_ab = h * DA
    at_co = h * DC + block * BC
    chunks = T // C
    per = gl.cdiv(chunks, G)
    first = g * per
    last = gl.minimum(first + per, chunks)
    row = n * T
    BYTES: gl.constexpr = 2 * C * (2 * DA + BC)
    for x in gl.static_range(S):
        fetch(da, db, dc, row + C * (first + x), at_ab, at_co, sa, sb, sc, barriers, x, first + x < last, BYTES)

    rate = 0.0
    if HAS_DECAY:
        rate = gl.maximum(gl.load(rates + h).to(gl.float32), -1e30) * 1.4426950408889634
    state = gl.zeros([DA, BC], gl.float32, OUT)
    i = gl.arange(0, DA, gl.SliceLayout(1, OUT))
    j = block * BC + gl.arange(0, BC, gl.SliceLayout(0, OUT))
    place = i[:, None] * DC + j[None, :]
    if HAS_ENTRY:
        state += gl.load(entry + nh.to(gl.int64) * (DA * DC) + place)
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
        next_slot = slot + 1
        next_phase = phase
        if next_slot == S:
            next_slot = 0
            next_phase ^= 1
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < last)
        # After the last chunk these are of what lies there, and unused.
        scores = warpgroup_mma(
            sa.index(next_slot), sb.index(next_slot).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        # Operands in registers are named in the wait for their products, lest they be used anew too early.
        past, state, present, _, _ = warpgroup_mma_wait(1, deps=[past, state, present, decayed, weights])
        tma.store_wait(0)
        fetch(da, db, dc, row + C * (x + S), at_ab, at_co, sa, sb, sc, barriers, slot, x + S < last, BYTES)
        so.store((past * since[:, None] + present).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(do, [row + C * x, at_co], so)
        slot = next_slot
        phase = next_phase
    warpgroup_mma_wait(0, deps=[scores])
    tma.store_wait(0)
    if HAS_LEAVE:
        if (last >= chunks) & (first < chunks):
            gl.store(leave + nh.to(gl.int64) * (DA * DC) + place, state)
