"""The sweeps of `linnet.ops.additive.kernels` without LRPE for Hopper GPUs, in Gluon: tiles come through descriptors
(TMA), and products of one chunk run beside each other and beside the exponentials of the next. bfloat16, widths of 64
or 128, sequences of whole chunks, no documents.

Tiles of keys and queries are [channel, token] in registers: a warp owns 16 channels, so that the largest logit and the
sum of a chunk are found without the other warps, and exp(k) goes into products right from the registers. References are
in powers of two here, with SHIFT in them: key_s = 2^(u_s log2 e - r). `boundaries` [N, chunks + 1, H, 2, K] holds r and
the denominator before each chunk, then those of the end; the sweep for dq leaves them for the reversed ones.

S chunks are in flight. The steps of a chunk that need no state are done one chunk ahead.

Programs of `hopper_values_kernel` own columns of V; those of `hopper_queries_kernel` and `hopper_keys_kernel` own
channels of K, and their states are [BC, V], as they are stored. `hopper_sums_kernel` and `hopper_product_kernel` are
the forward without causality, in one launch each; the first also sums up segments for the causal forward.
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
from linnet.ops.lightning.hopper import advance, fetch, make_barriers, product_layout

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
SHIFT = gl.constexpr(60.0)
ONE = gl.constexpr(2.0**60)
TINY = gl.constexpr(2.0**-80)
NOTHING = gl.constexpr(-1e30)


@gluon.jit
def _load_transposed(tile, LAYOUT: gl.constexpr, OPERAND: gl.constexpr):
    """A tile [token, channel] of shared memory as [channel, token] in registers."""
    return gl.convert_layout(tile.permute((1, 0)).load(OPERAND), LAYOUT).to(gl.float32)


@gluon.jit
def _invert(denominator):
    """1 / denominator in the range of float32, 0 for none."""
    return gl.where(denominator == 0, 0.0, 1.0 / gl.where(denominator == 0, 1.0, denominator))


@gluon.jit
def _invert_tile(denominator):
    root = gl.rsqrt(gl.maximum(denominator, TINY, KEEP_NAN))
    return root * root


@gluon.jit
def _start(z):
    """Reference and denominator of a state normalised by exp(-z)."""
    return gl.maximum(z * LOG2_E - SHIFT, NOTHING, KEEP_NAN), gl.where(z > NOTHING, ONE, 0.0)


@gluon.jit
def _log_sum(reference, denominator):
    """The log-sum of the logits of a channel, of which `_start` makes reference and denominator."""
    z = (reference + gl.log2(gl.where(denominator == 0, 1.0, denominator))) * LN_2
    return gl.where(denominator == 0, -float("inf"), z)


@gluon.jit
def hopper_values_kernel(
    q, k, c, o, initial, initial_z, final, final_z, sums, sums_z, boundaries, scale, T, N, G, F, H: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, REVERSE: gl.constexpr,
    HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, SPLIT: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """o from c = v, or (REVERSE) dv from c = do. A program has BC columns of V of one head; its state is [BC, K].

    SPLIT, which cannot be reversed: a program sweeps one of G segments. `sums` and `sums_z` are the states and log-sums
    from zero of F equal shares of each segment.
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
    SCORES: gl.constexpr = product_layout(C // 16, C * C // 16 // W, W * 16 // C)
    OUT: gl.constexpr = product_layout(W, C)
    STATE: gl.constexpr = product_layout(W, K)
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
    barriers = make_barriers(S)
    all_chunks = T // C
    per = gl.cdiv(all_chunks, G * F) * F
    chunks = gl.minimum(per, all_chunks - g * per)
    row = n * T + g * per * C
    hop = C
    if REVERSE:
        row = n * T + T - C
        hop = -C
    at_k = h * K
    at_c = h * V + block * BC
    descriptors, columns, tiles = (dq, dk, dc), (at_k, at_k, at_c), (sq, sk, sc)
    BYTES: gl.constexpr = 2 * C * (2 * K + BC)
    for x in gl.static_range(S):
        fetch(descriptors, row + hop * x, columns, tiles, barriers, x, x < chunks, BYTES)

    down = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    earlier.store(gl.where(down <= right, 1.0, 0.0).to(gl.bfloat16))
    inside = down >= right if REVERSE else down <= right
    no_out = gl.zeros([BC, C], gl.float32, OUT)
    no_denominators = gl.zeros([K, C], gl.float32, OUT)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    i = gl.arange(0, K, CHANNEL)
    across = gl.arange(0, K, ACROSS)
    j = block * BC + gl.arange(0, BC, gl.SliceLayout(1, STATE))
    place = nh.to(gl.int64) * (K * V) + across[None, :] * V + j[:, None]
    if REVERSE:
        boundary = boundaries + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    state = gl.zeros([BC, K], gl.float32, STATE)
    reference = gl.full([K], NOTHING, gl.float32, CHANNEL)
    denominator = gl.zeros([K], gl.float32, CHANNEL)  # after the chunk, but before it in a reversed sweep
    if HAS_INITIAL:
        state += gl.load(initial + place)
    if REVERSE:
        reference = gl.load(boundary + chunks * (2 * H * K))
        denominator = gl.load(boundary + chunks * (2 * H * K) + K)
        state *= gl.convert_layout(_invert(denominator), ACROSS)[None, :]
        top = gl.load(boundary + (chunks - 1) * (2 * H * K))
        denominator = gl.load(boundary + (chunks - 1) * (2 * H * K) + K)
        decay = gl.exp2(top - reference)
    else:
        if HAS_INITIAL:
            reference, denominator = _start(gl.load(initial_z + nh.to(gl.int64) * K + i))
            state *= gl.convert_layout(denominator, ACROSS)[None, :]

    if SPLIT:
        for past in range(0, g * F):
            at = nh.to(gl.int64) * (G * F) + past
            z = gl.load(sums_z + at * K + i) * LOG2_E
            top = gl.maximum(reference, z - SHIFT)
            decay = gl.exp2(reference - top)
            take = gl.exp2(z - top)
            denominator = denominator * decay + take
            reference = top
            share = gl.load(sums + at * (K * V) + across[None, :] * V + j[:, None])
            state = state * gl.convert_layout(decay, ACROSS)[None, :] + share * gl.convert_layout(take, ACROSS)[None, :]

    # The keys and queries of the first chunk.
    mbarrier.wait(barriers.index(0), 0)
    raw = _load_transposed(sk.index(0), OUT, OPERAND)
    if not REVERSE:
        top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
        decay = gl.exp2(reference - top)
        denominator *= decay
    key = gl.exp2(raw * LOG2_E - top[:, None])
    operand = key.to(gl.bfloat16)
    sk.index(0).permute((1, 0)).store(operand)
    reference = top
    denominators = warpgroup_mma(
        gl.convert_layout(operand, OPERAND), earlier, no_denominators, use_acc=False, is_async=True
    )
    denominators = warpgroup_mma_wait(0, deps=[denominators]) + denominator[:, None]
    if not REVERSE:
        denominator += gl.sum(key, 1)
    raw = _load_transposed(sq.index(0), OUT, OPERAND) * (_invert_tile(denominators) * scale)
    sq.index(0).permute((1, 0)).store(raw.to(gl.bfloat16))
    fence_async_shared()
    slot = 0
    phase = 0
    for x in range(0, chunks):
        following = gl.minimum(x + 1, chunks - 1)
        if REVERSE:
            top = gl.load(boundary + (chunks - 1 - following) * (2 * H * K))
            denominator = gl.load(boundary + (chunks - 1 - following) * (2 * H * K) + K)
        ta = sk.index(slot) if REVERSE else sq.index(slot)
        tb = sq.index(slot) if REVERSE else sk.index(slot)
        tc = sc.index(slot)
        scores = warpgroup_mma(tb, ta.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        state *= gl.convert_layout(decay, ACROSS)[None, :]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        out = warpgroup_mma(held, ta.permute((1, 0)), no_out, use_acc=False, is_async=True)
        done = warpgroup_mma_wait(1, deps=[scores])
        state = warpgroup_mma(tc.permute((1, 0)), tb, state, is_async=True)
        tma.store_wait(0)
        weights.store(gl.where(inside, done, 0.0).to(gl.bfloat16))
        fence_async_shared()

        # The keys of the next chunk. After the last chunk they come from whatever the slot holds, and are not used.
        next_slot, next_phase = advance(slot, phase, S)
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < chunks)
        tk = sk.index(next_slot)
        tq = sq.index(next_slot)
        raw = _load_transposed(tk, OUT, OPERAND)
        before = denominator
        if REVERSE:
            decay = gl.exp2(top - reference)
        else:
            top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
            decay = gl.exp2(reference - top)
            before = denominator * decay
        key = gl.exp2(raw * LOG2_E - top[:, None])
        if not REVERSE:
            more = x + 1 < chunks
            denominator = gl.where(more, before + gl.sum(key, 1), denominator)
            top = gl.where(more, top, reference)
        reference = top
        operand = key.to(gl.bfloat16)
        tk.permute((1, 0)).store(operand)
        wide = gl.convert_layout(operand, OPERAND)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        out = warpgroup_mma(tc.permute((1, 0)), weights, out, is_async=True)
        denominators = warpgroup_mma(wide, earlier, no_denominators, use_acc=False, is_async=True)
        out, state = warpgroup_mma_wait(1, deps=[out, state])
        fetch(descriptors, row + hop * (x + S), columns, tiles, barriers, slot, x + S < chunks, BYTES)
        so.permute((1, 0)).store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(do, [row + hop * x, at_c], so)
        denominators, _ = warpgroup_mma_wait(0, deps=[denominators, wide])
        raw = _load_transposed(tq, OUT, OPERAND) * (_invert_tile(denominators + before[:, None]) * scale)
        tq.permute((1, 0)).store(raw.to(gl.bfloat16))
        fence_async_shared()
        slot = next_slot
        phase = next_phase
    tma.store_wait(0)
    if HAS_FINAL:
        factor = gl.convert_layout(_invert(denominator), ACROSS)[None, :]
        if g * per + chunks == all_chunks:
            gl.store(final + place, state * factor)
        if (g * per + chunks == all_chunks) & (block == 0):
            z = _log_sum(reference, denominator)
            gl.store(final_z + nh.to(gl.int64) * K + i, z)


@gluon.jit
def hopper_queries_kernel(
    k, v, do, dq, initial, initial_z, boundaries, scale, T, N, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr, BC: gl.constexpr, HAS_INITIAL: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """dq and `boundaries`; `initial` is the initial state. A program has BC channels of one head."""
    W: gl.constexpr = BC // 16
    BLOCKS: gl.constexpr = K // BC
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    CC: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    SCORES: gl.constexpr = product_layout(C // 16, C * C // 16 // W, W * 16 // C)
    OUT: gl.constexpr = product_layout(W, C)
    STATE: gl.constexpr = product_layout(W, V)
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
    barriers = make_barriers(S)
    chunks = T // C
    row = n * T
    at_k = h * K + block * BC
    at_v = h * V
    descriptors, columns, tiles = (dk, dv, dd), (at_k, at_v, at_v), (sk, sv, sd)
    BYTES: gl.constexpr = 2 * C * (2 * V + BC)
    for x in gl.static_range(S):
        fetch(descriptors, row + C * x, columns, tiles, barriers, x, x < chunks, BYTES)

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
    boundary = boundaries + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    state = gl.zeros([BC, V], gl.float32, STATE)
    reference = gl.full([BC], NOTHING, gl.float32, CHANNEL)
    denominator = gl.zeros([BC], gl.float32, CHANNEL)
    if HAS_INITIAL:
        reference, denominator = _start(gl.load(initial_z + nh.to(gl.int64) * K + i))
        state += gl.load(initial + place) * gl.convert_layout(denominator, ROW)[:, None]

    mbarrier.wait(barriers.index(0), 0)
    raw = _load_transposed(sk.index(0), OUT, OPERAND)
    top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
    decay = gl.exp2(reference - top)
    before = denominator * decay
    key = gl.exp2(raw * LOG2_E - top[:, None])
    denominator = before + gl.sum(key, 1)
    reference = top
    sk.index(0).permute((1, 0)).store(key.to(gl.bfloat16))
    fence_async_shared()
    slot = 0
    phase = 0
    for x in range(0, chunks):
        tk = sk.index(slot).permute((1, 0))
        tv = sv.index(slot)
        td = sd.index(slot).permute((1, 0))
        state *= gl.convert_layout(decay, ROW)[:, None]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        scores = warpgroup_mma(tv, td, no_scores, use_acc=False, is_async=True)
        denominators = warpgroup_mma(tk, earlier, no_out, use_acc=False, is_async=True)
        out = warpgroup_mma(held, td, no_out, use_acc=False, is_async=True)
        done = warpgroup_mma_wait(2, deps=[scores])
        state = warpgroup_mma(tk, tv, state, is_async=True)
        gl.store(boundary + x * (2 * H * K), reference)
        gl.store(boundary + x * (2 * H * K) + K, before)
        tma.store_wait(0)
        weights.store(gl.where(inside, done, 0.0).to(gl.bfloat16))

        # The keys of the next chunk. After the last chunk they come from whatever the slot holds, and are not used.
        next_slot, next_phase = advance(slot, phase, S)
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < chunks)
        denominator_before = before
        raw = _load_transposed(sk.index(next_slot), OUT, OPERAND)
        top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
        decay = gl.exp2(reference - top)
        before = denominator * decay
        key = gl.exp2(raw * LOG2_E - top[:, None])
        more = x + 1 < chunks
        denominator = gl.where(more, before + gl.sum(key, 1), denominator)
        reference = gl.where(more, top, reference)
        sk.index(next_slot).permute((1, 0)).store(key.to(gl.bfloat16))
        fence_async_shared()
        out, denominators, _ = warpgroup_mma_wait(1, deps=[out, denominators, held])
        out = warpgroup_mma(tk, weights, out, is_async=True)
        inverse = _invert_tile(denominators + denominator_before[:, None]) * scale
        out, state = warpgroup_mma_wait(0, deps=[out, state])
        fetch(descriptors, row + C * (x + S), columns, tiles, barriers, slot, x + S < chunks, BYTES)
        so.permute((1, 0)).store((out * inverse).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(dout, [row + C * x, at_k], so)
        slot = next_slot
        phase = next_phase
    tma.store_wait(0)
    gl.store(boundary + chunks * (2 * H * K), reference)
    gl.store(boundary + chunks * (2 * H * K) + K, denominator)


@gluon.jit
def hopper_keys_kernel(
    q, k, v, do, dq, du, initial, initial_z, end, final, final_z, boundaries, scale, T, N, H: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BC: gl.constexpr, HAS_INITIAL: gl.constexpr,
    HAS_FINAL: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """The gradient of the logits, backwards in time; `initial`, `initial_z` are those of the final state `end`."""
    W: gl.constexpr = BC // 16
    BLOCKS: gl.constexpr = K // BC
    block = gl.program_id(0) % BLOCKS
    nh = gl.program_id(0) // BLOCKS
    n, h = nh // H, nh % H
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BC], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    CC: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    SCORES: gl.constexpr = product_layout(C // 16, C * C // 16 // W, W * 16 // C)
    OUT: gl.constexpr = product_layout(W, C)
    STATE: gl.constexpr = product_layout(W, V)
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
    barriers = make_barriers(S)
    chunks = T // C
    row = n * T + T - C
    at_k = h * K + block * BC
    at_v = h * V
    descriptors, tiles = (dqq, dk, ddq, dv, dd), (sq, sk, sg, sv, sd)
    columns = (at_k, at_k, at_k, at_v, at_v)
    BYTES: gl.constexpr = 2 * C * (2 * V + 3 * BC)
    for x in gl.static_range(S):
        fetch(descriptors, row - C * x, columns, tiles, barriers, x, x < chunks, BYTES)

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
    boundary = boundaries + (n.to(gl.int64) * (chunks + 1) * H + h) * (2 * K) + i
    state = gl.zeros([BC, V], gl.float32, STATE)
    delta = gl.zeros([BC], gl.float32, CHANNEL)
    reference = gl.load(boundary + chunks * (2 * H * K))
    denominator = gl.load(boundary + chunks * (2 * H * K) + K)
    if HAS_INITIAL:
        state += gl.load(initial + place)
        delta += gl.convert_layout(gl.sum(state * gl.load(end + place), 1), CHANNEL)
        delta -= gl.load(initial_z + nh.to(gl.int64) * K + i)
        delta *= _invert(denominator)
        state *= gl.convert_layout(_invert(denominator), ROW)[:, None]

    top = gl.load(boundary + (chunks - 1) * (2 * H * K))
    denominator = gl.load(boundary + (chunks - 1) * (2 * H * K) + K)
    decay = gl.exp2(top - reference)
    reference = top
    mbarrier.wait(barriers.index(0), 0)
    fence_async_shared()
    key = gl.exp2(_load_transposed(sk.index(0), OUT, OPERAND) * LOG2_E - top[:, None])
    sk.index(0).permute((1, 0)).store(key.to(gl.bfloat16))
    fence_async_shared()
    slot = 0
    phase = 0
    for x in range(0, chunks):
        following = chunks - 1 - gl.minimum(x + 1, chunks - 1)
        before = denominator
        top = gl.load(boundary + following * (2 * H * K))
        denominator = gl.load(boundary + following * (2 * H * K) + K)
        tk = sk.index(slot)
        state *= gl.convert_layout(decay, ROW)[:, None]
        held = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        scores = warpgroup_mma(sd.index(slot), sv.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        denominators = warpgroup_mma(tk.permute((1, 0)), earlier, no_out, use_acc=False, is_async=True)
        out = warpgroup_mma(held, sv.index(slot).permute((1, 0)), no_out, use_acc=False, is_async=True)
        done, denominators = warpgroup_mma_wait(1, deps=[scores, denominators])
        tma.store_wait(0)
        weights.store(gl.where(inside, done, 0.0).to(gl.bfloat16))
        fence_async_shared()
        query = _load_transposed(sq.index(slot), OUT, OPERAND) * _invert_tile(denominators + before[:, None])
        q_dq = query * _load_transposed(sg.index(slot), OUT, OPERAND)
        delta *= decay
        next_delta = delta + gl.sum(q_dq, 1)
        narrow = gl.convert_layout((query * scale).to(gl.bfloat16), OPERAND)
        minus_q_dq = gl.convert_layout((-q_dq).to(gl.bfloat16), OPERAND)
        out, _ = warpgroup_mma_wait(0, deps=[out, held])
        out = warpgroup_mma(narrow, weights, out, is_async=True)
        state = warpgroup_mma(narrow, sd.index(slot), state, is_async=True)
        out = warpgroup_mma_wait(1, deps=[out])
        out = warpgroup_mma(minus_q_dq, later, out, is_async=True)

        next_slot, next_phase = advance(slot, phase, S)
        mbarrier.wait(barriers.index(next_slot), next_phase, pred=x + 1 < chunks)
        # The keys of the next chunk. After the last chunk they come from whatever the slot holds, and are not used.
        next_key = gl.exp2(_load_transposed(sk.index(next_slot), OUT, OPERAND) * LOG2_E - top[:, None])
        sk.index(next_slot).permute((1, 0)).store(next_key.to(gl.bfloat16))
        key = _load_transposed(tk, OUT, OPERAND)
        out, state, _, _ = warpgroup_mma_wait(0, deps=[out, state, narrow, minus_q_dq])
        fetch(descriptors, row - C * (x + S), columns, tiles, barriers, slot, x + S < chunks, BYTES)
        so.permute((1, 0)).store((key * (out - delta[:, None])).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(dout, [row - C * x, at_k], so)
        delta = next_delta
        decay = gl.exp2(top - reference)
        reference = top
        slot = next_slot
        phase = next_phase
    tma.store_wait(0)
    if HAS_FINAL:
        denominator = gl.load(boundary + K)
        gl.store(final + place, state * gl.convert_layout(denominator, ROW)[:, None])
        gl.store(final_z + nh.to(gl.int64) * K + i, -delta * denominator)


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
    TRANSPOSED: gl.constexpr = product_layout(W, C)
    STATE: gl.constexpr = product_layout(W, V)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TRANSPOSED, k_width=2)
    CHANNEL: gl.constexpr = gl.SliceLayout(1, TRANSPOSED)
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    dk = tma.make_tensor_descriptor(k, [N * T, H * K], [H * K, 1], [C, K], KEYS)
    dv = tma.make_tensor_descriptor(v, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES)
    barriers = make_barriers(S)
    chunks = T // C
    per = gl.cdiv(chunks, G)
    first = g * per
    last = gl.minimum(first + per, chunks)
    row = n * T
    BYTES: gl.constexpr = 2 * C * (K + V)
    for x in gl.static_range(S):
        fetch((dk, dv), row + C * (first + x), (h * K, h * V), (sk, sv), barriers, x, first + x < last, BYTES)
    state = gl.zeros([K, V], gl.float32, STATE)
    reference = gl.full([K], NOTHING, gl.float32, CHANNEL)
    denominator = gl.zeros([K], gl.float32, CHANNEL)
    slot = 0
    phase = 0
    for x in range(first, last):
        mbarrier.wait(barriers.index(slot), phase)
        tk = sk.index(slot).permute((1, 0))
        raw = _load_transposed(sk.index(slot), TRANSPOSED, OPERAND)
        top = gl.maximum(reference, gl.max(raw, 1) * LOG2_E - SHIFT)
        decay = gl.exp2(reference - top)
        key = gl.exp2(raw * LOG2_E - top[:, None])
        denominator = denominator * decay + gl.sum(key, 1)
        reference = top
        tk.store(key.to(gl.bfloat16))
        fence_async_shared()
        state *= gl.convert_layout(decay, ROW)[:, None]
        state = warpgroup_mma(tk, sv.index(slot), state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
        fetch((dk, dv), row + C * (x + S), (h * K, h * V), (sk, sv), barriers, slot, x + S < last, BYTES)
        slot, phase = advance(slot, phase, S)
    i = gl.arange(0, K, CHANNEL)
    rows = gl.arange(0, K, ROW)
    j = gl.arange(0, V, gl.SliceLayout(0, STATE))
    at = nh.to(gl.int64) * G + g
    place = at * (K * V) + rows[:, None] * V + j[None, :]
    gl.store(sums + place, state * gl.convert_layout(_invert(denominator), ROW)[:, None])
    z = _log_sum(reference, denominator)
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
    OUT: gl.constexpr = product_layout(4, V)
    dq = tma.make_tensor_descriptor(q, [N * T, H * K], [H * K, 1], [C, K], KEYS)
    do = tma.make_tensor_descriptor(o, [N * T, H * V], [H * V, 1], [C, V], VALUES)
    sq = gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, V], VALUES)
    ss = gl.allocate_shared_memory(gl.bfloat16, [K, V], STATES)
    barriers = make_barriers(S)
    chunks = T // C
    per = gl.cdiv(chunks, G)
    first = g * per
    last = gl.minimum(first + per, chunks)
    row = n * T
    for x in gl.static_range(S):
        fetch((dq,), row + C * (first + x), (h * K,), (sq,), barriers, x, first + x < last, 2 * C * K)
    i = gl.arange(0, K, gl.SliceLayout(1, OUT))
    j = gl.arange(0, V, gl.SliceLayout(0, OUT))
    held = gl.load(state + nh.to(gl.int64) * (K * V) + i[:, None] * V + j[None, :])
    ss.store((held * scale).to(gl.bfloat16))
    fence_async_shared()
    no_out = gl.zeros([C, V], gl.float32, OUT)
    slot = 0
    phase = 0
    for x in range(first, last):
        mbarrier.wait(barriers.index(slot), phase)
        out = warpgroup_mma(sq.index(slot), ss, no_out, use_acc=False, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        fetch((dq,), row + C * (x + S), (h * K,), (sq,), barriers, slot, x + S < last, 2 * C * K)
        tma.store_wait(0)
        so.store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(do, [row + C * x, h * V], so)
        slot, phase = advance(slot, phase, S)
    tma.store_wait(0)
