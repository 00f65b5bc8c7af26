"""The forward without causality, k = softmax_t(u), S = k^T v, o = q S, for Hopper GPUs: one launch reads k and v, the
other reads q and writes o, each for G segments of a sequence. Names are those of `linnet.ops.additive.hopper`.
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

from linnet.ops.additive.hopper import LN_2, LOG2_E, NOTHING, SHIFT, _invert, _turn


@gluon.jit
def _fetch(d0, d1, row, i0, i1, s0, s1, barriers, slot, wanted, BYTES: gl.constexpr):
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
        _fetch(dk, dv, row + C * (first + x), h * K, h * V, sk, sv, barriers, x, first + x < last, BYTES)
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
        _fetch(dk, dv, row + C * (x + S), h * K, h * V, sk, sv, barriers, slot, x + S < last, BYTES)
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
