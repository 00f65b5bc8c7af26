"""The kernels of `linnet.ops.delta.triton` for Hopper GPUs, where the tiles of sweeps and gradients come through
descriptors (TMA) and products run beside what is not a product: bfloat16, keys of 64 to 128, values of a multiple of
64, sequences of whole chunks, no documents.

Names are those of `linnet.ops.delta.kernels`. S chunks of a sweep are in flight; states are transposed, [columns of v,
PK], and held by four warps, 16 columns each. Tiles of keys have PK channels, 64 or 128: TMA reads zeros behind the K
channels in memory, and does not write there.
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
from linnet.ops.lightning.hopper import advance

wait_for_warps = getattr(gl, "barrier", None) or gl.thread_barrier  # its name until Triton 3.6


@gluon.jit
def take_blocks(x, mask, SIZE: gl.constexpr):
    """The one block in each SIZE rows of x [C, C] where the mask is set, as [C, SIZE]."""
    C: gl.constexpr = x.shape[0]
    return gl.sum(gl.where(mask, x, 0.0).reshape([C, C // SIZE, SIZE]), 1)


@gluon.jit
def put_blocks(x, mask, blocks):
    """x [C, C] with `blocks` where the mask is set: the inverse of `take_blocks`."""
    SIZE: gl.constexpr = blocks.shape[1]
    chosen = mask.reshape([x.shape[0], x.shape[0] // SIZE, SIZE])
    rows = gl.convert_layout(blocks, gl.SliceLayout(1, chosen.type.layout))
    joined = gl.where(chosen, rows[:, None, :], x.reshape(chosen.shape))
    return gl.convert_layout(joined.reshape(x.shape), x.type.layout)


@gluon.jit
def split(x):
    """x as the sum of two tensors of bfloat16, to 2^-16 of it."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def multiply_blocks(a, b, shared):
    """a [C, C] b [C, N] in three products of bfloat16, to 2^-16; b passes through `shared` [2, C, N]."""
    N: gl.constexpr = b.shape[1]
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    b_high, b_low = split(b)
    a_high, a_low = split(a)
    shared.index(0).store(b_high)
    shared.index(1).store(b_low)
    a_high, a_low = gl.convert_layout(a_high, LEFT), gl.convert_layout(a_low, LEFT)
    fence_async_shared()
    wait_for_warps()
    out = gl.zeros(b.shape, gl.float32, OUT)
    out = warpgroup_mma(a_low, shared.index(0), out, use_acc=False, is_async=True)
    out = warpgroup_mma(a_high, shared.index(1), out, is_async=True)
    out = warpgroup_mma(a_high, shared.index(0), out, is_async=True)
    return warpgroup_mma_wait(0, deps=[out, a_low, a_high])[0]


@gluon.jit
def join_blocks(overlaps, inverse, r, c, SIZE: gl.constexpr, shared):
    """Joins pairs of inverted blocks on the diagonal; r and c count blocks."""
    lower = c == gl.where(r % 2 == 1, r - 1, -1)
    below = multiply_blocks(gl.where(lower, overlaps, 0.0), take_blocks(inverse, r == c, SIZE), shared)
    return put_blocks(inverse, lower, -multiply_blocks(inverse, below, shared))


@gluon.jit
def invert(overlaps, r, c, zeros, narrow, half):
    """(1 + A)^-1 of the overlaps A [C, C], as `linnet.ops.delta.kernels.invert_kernel`; C is 64."""
    C: gl.constexpr = zeros.shape[0]
    FLAT: gl.constexpr = gl.BlockedLayout([1, 16, 1], [1, 1, 32], [4, 1, 1], [2, 1, 0])  # a thread has a column
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    diagonal = r // 16 == c // 16
    blocks = take_blocks(overlaps, diagonal, 16).reshape([C // 16, 16, 16]).permute((1, 0, 2))
    shared = gl.allocate_shared_memory(gl.float32, blocks.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), blocks)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, FLAT)))[None, :, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, FLAT)))[None, None, :]
    x = gl.where(row == column, 1.0, gl.zeros([C // 16, 16, 16], gl.float32, FLAT))
    for at in gl.static_range(1, 16):
        factors = gl.convert_layout(shared.slice(at, 1).load(LINE).permute((1, 2, 0)), FLAT)
        x = gl.where(row == at, x - gl.sum(factors * x, 1)[:, None, :], x)
    shared.store(x.permute((1, 0, 2)))
    x = shared.load(blocks.type.layout).permute((1, 0, 2)).reshape([C, 16])
    inverse = join_blocks(overlaps, put_blocks(zeros, diagonal, x), r // 16, c // 16, 16, narrow)
    return join_blocks(overlaps, inverse, r // 32, c // 32, 32, half)


@gluon.jit
def store_rows(pointer, x, WIDTH: gl.constexpr):
    """The first WIDTH columns of x [R, N] in the dtype of the pointer, 16 bytes per thread."""
    N: gl.constexpr = x.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, ROWS))[:, None]
    columns = gl.arange(0, N, gl.SliceLayout(0, ROWS))[None, :]
    x = gl.convert_layout(x.to(pointer.dtype.element_ty), ROWS)
    gl.store(pointer + rows * WIDTH + columns, x, mask=columns < WIDTH)


@gluon.jit
def prepare_hopper_kernel(
    q, k, log_decay, erase, inverses, scores, factors, rest, scale, T, N, H: gl.constexpr, HV: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, HAS_DECAY: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """Of the chunk of each slot and value head: the inverse [C, C] and P, and decays since its start, to its end and
    over it. FOLDED: (1 + A)^-T times the keys, decayed to the end [C, K], and P (1 + A)^-1 instead."""
    PK: gl.constexpr = 64 if K <= 64 else 128
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PK], gl.bfloat16)
    PAIR: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PK, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PK, PK // 8], [4, 1], [1, 0])
    LATER: gl.constexpr = gl.SliceLayout(1, PAIR)
    EARLIER: gl.constexpr = gl.SliceLayout(0, PAIR)
    pid = gl.program_id(0)
    tile, row, h = pid.to(gl.int64), (pid // HV * C).to(gl.int64), pid % HV
    at = (row + gl.arange(0, C, gl.SliceLayout(1, ROWS)))[:, None] * (H * K) + h // (HV // H) * K
    channel = gl.arange(0, PK, gl.SliceLayout(0, ROWS))[None, :]
    tk = gl.load(k + at + channel, mask=channel < K, other=0.0)
    tq = gl.load(q + at + channel, mask=channel < K, other=0.0)
    later, earlier = gl.arange(0, C, LATER), gl.arange(0, C, EARLIER)
    r, c = later[:, None], earlier[None, :]
    zeros = gl.zeros([C, C], gl.float32, PAIR)
    strength = gl.load(erase + (row + later) * HV + h).to(gl.float32)
    decay = gl.zeros([C], gl.float32, EARLIER)
    if HAS_DECAY:
        decay = gl.load(log_decay + (row + earlier) * HV + h).to(gl.float32) * 1.4426950408889634
        decay = gl.maximum(decay, -160.0, KEEP_NAN)
    total = gl.sum(gl.where(c <= r, decay[None, :] + zeros, 0.0), 1)
    whole = gl.sum(decay, 0)
    ahead = gl.exp2(whole - total)
    apart = total[:, None] - gl.convert_layout(total, EARLIER)[None, :]
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 16], gl.bfloat16)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 32], gl.bfloat16)
    # All live at once: where one takes the place of another, ptxas 12.8 reads a register that nothing wrote.
    sk = gl.allocate_shared_memory(gl.bfloat16, [C, PK], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [C, PK], KEYS)
    narrow = gl.allocate_shared_memory(gl.bfloat16, [2, C, 16], NARROW)
    half = gl.allocate_shared_memory(gl.bfloat16, [2, C, 32], HALF)
    sides = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16))
    sk.store(tk)
    sq.store(tq)
    fence_async_shared()
    wait_for_warps()
    # Until they are waited for, nothing else may take their shared memory.
    overlaps = warpgroup_mma(sk, sk.permute((1, 0)), zeros, use_acc=False, is_async=True)
    pairs = warpgroup_mma(sq, sk.permute((1, 0)), zeros, use_acc=False, is_async=True)
    between = gl.exp2(gl.where(r > c, apart, 0.0))
    vectors = factors + tile * (4 * C) + later
    gl.store(vectors, gl.exp2(total))
    gl.store(vectors + C, ahead)
    gl.store(vectors + 2 * C, strength)
    gl.store(vectors + 3 * C, total)
    # Packed as by `linnet.ops.gated.kernels.pack_decay`.
    less = whole * (0.69314718 + whole * (0.24022651 + whole * 0.05550411)) - 1.2e-38
    gl.store(rest + tile, gl.where(whole > -0.03125, less, gl.exp2(whole)))
    overlaps, pairs = warpgroup_mma_wait(0, deps=[overlaps, pairs])
    pairs = gl.where(r >= c, pairs * (between * scale), 0.0).to(gl.bfloat16)
    inverse = invert(gl.where(r > c, overlaps * between * strength[:, None], 0.0), r, c, zeros, narrow, half)
    if FOLDED:
        sides.index(0).store(inverse.to(gl.bfloat16))
        sides.index(1).store((inverse * ahead[:, None]).to(gl.bfloat16))
        left = gl.convert_layout(pairs, gl.DotOperandLayout(operand_index=0, parent=PAIR, k_width=2))
        fence_async_shared()
        wait_for_warps()
        folded = warpgroup_mma(left, sides.index(0), zeros, use_acc=False, is_async=True)
        keys = gl.zeros([C, PK], gl.float32, WIDE)
        keys = warpgroup_mma(sides.index(1).permute((1, 0)), sk, keys, use_acc=False, is_async=True)
        folded, keys, left = warpgroup_mma_wait(0, deps=[folded, keys, left])
        store_rows(scores + tile * (C * C), folded, C)
        store_rows(inverses + tile * (C * K), keys, K)
    else:
        store_rows(scores + tile * (C * C), pairs, C)
        store_rows(inverses + tile * (C * C), inverse, C)


@gluon.jit
def fetch(descriptors, tiles, barriers, slot, row, j, tile, wanted, C: gl.constexpr, BYTES: gl.constexpr,
          WITH_Q: gl.constexpr, CHANNELS: gl.constexpr):  # fmt: skip
    """Of a chunk: k, values, inverse, factors; q and scores; with CHANNELS the keys that go to the state after it."""
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(descriptors[0], [row, 0], barrier, tiles[0].index(slot), pred=wanted)
    tma.async_copy_global_to_shared(descriptors[1], [row, j], barrier, tiles[1].index(slot), pred=wanted)
    tma.async_copy_global_to_shared(descriptors[2], [tile * C, 0], barrier, tiles[2].index(slot), pred=wanted)
    tma.async_copy_global_to_shared(descriptors[3], [tile * 4, 0], barrier, tiles[3].index(slot), pred=wanted)
    if WITH_Q:
        tma.async_copy_global_to_shared(descriptors[4], [row, 0], barrier, tiles[4].index(slot), pred=wanted)
        tma.async_copy_global_to_shared(descriptors[5], [tile * C, 0], barrier, tiles[5].index(slot), pred=wanted)
    if CHANNELS:
        tma.async_copy_global_to_shared(descriptors[6], [row, 0], barrier, tiles[6].index(slot), pred=wanted)


@gluon.jit
def load_rest(rest, tile, i, K: gl.constexpr, CHANNELS: gl.constexpr):
    """The packed decay of a chunk: of the head, or a row of channels."""
    if CHANNELS:
        return gl.load(rest + tile * K + i, mask=i < K, other=0.0)[None, :]
    else:
        return gl.load(rest + tile)


@gluon.jit
def decay_state(state, decay):
    """`linnet.ops.delta.kernels.decay_state`."""
    return gl.where(decay < 0, state, 0.0) + state * decay


@gluon.jit
def sweep_hopper_kernel(
    q, k, v, inverses, scores, factors, rest, initial, o, final, early, scale, T, N, H: gl.constexpr,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, HAS_INITIAL: gl.constexpr,
    HAS_FINAL: gl.constexpr, CHANNELS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    sweep_forward(
        gl.program_id(0), q, k, v, inverses, scores, factors, rest, initial, o, final, o, early, scale, T, N, H, HV, K,
        V, C, BV, HAS_INITIAL, HAS_FINAL, False, CHANNELS, S,
    )  # fmt: skip


@gluon.jit
def both_sweeps_hopper_kernel(
    q, k, v, inverses, scores, factors, rest, initial, states, corrections, do, dfinal, dinitial, dstates, dvalues,
    early, scale, T, N, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    BV: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_DFINAL: gl.constexpr, CHANNELS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    pid = gl.program_id(0)
    half = gl.num_programs(0) // 2
    if pid < half:
        sweep_backward(
            pid, q, k, do, inverses, scores, factors, rest, dfinal, dvalues, dinitial, dstates, early, scale, T, N, H,
            HV, K, V, C, BV, HAS_DFINAL, HAS_INITIAL, CHANNELS, S,
        )  # fmt: skip
    else:
        sweep_forward(
            pid - half, q, k, v, inverses, scores, factors, rest, initial, corrections, dinitial, states, early, scale,
            T, N, H, HV, K, V, C, BV, HAS_INITIAL, False, True, CHANNELS, S,
        )  # fmt: skip


@gluon.jit
def sweep_forward(
    pid, q, k, v, inverses, scores, factors, rest, initial, out, final, states, early, scale, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr,
    HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, KEEP: gl.constexpr, CHANNELS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """`out` is o; of KEEP it takes the corrections, and `states` those before each chunk. FOLDED: `inverses` and
    `scores` are the keys and scores with the inverse in them."""
    FOLDED: gl.constexpr = not KEEP and not CHANNELS
    PK: gl.constexpr = 64 if K <= 64 else 128
    WIDTH: gl.constexpr = K if FOLDED else C
    SIDE: gl.constexpr = PK if FOLDED else C
    BLOCKS: gl.constexpr = V // BV
    block, nh = pid % BLOCKS, pid // BLOCKS
    n, h = nh // HV, nh % HV
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PK], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    SIDES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, SIDE], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, PK], gl.bfloat16)
    VECTORS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PK, 16])
    TO_OUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    TO_STATE: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=STATE, k_width=2)
    chunks = T // C
    tiles = N * chunks * HV
    at_k = h // (HV // H) * K
    dk = tma.make_tensor_descriptor(k + at_k, [N * T, K], [H * K, 1], [C, PK], KEYS)
    dq = tma.make_tensor_descriptor(q + at_k, [N * T, K], [H * K, 1], [C, PK], KEYS)
    dv = tma.make_tensor_descriptor(v, [N * T, HV * V], [HV * V, 1], [C, BV], VALUES)
    do = tma.make_tensor_descriptor(out, [N * T, HV * V], [HV * V, 1], [C, BV], VALUES)
    di = tma.make_tensor_descriptor(inverses, [tiles * C, WIDTH], [WIDTH, 1], [C, SIDE], SIDES)
    dp = tma.make_tensor_descriptor(scores, [tiles * C, C], [C, 1], [C, C], PAIRS)
    df = tma.make_tensor_descriptor(factors, [tiles * 4, C], [C, 1], [4, C], VECTORS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, PK], KEYS)
    sv = gl.allocate_shared_memory(gl.bfloat16, [S, C, BV], VALUES)
    si = gl.allocate_shared_memory(gl.bfloat16, [S, C, SIDE], SIDES)
    sf = gl.allocate_shared_memory(gl.float32, [S, 4, C], VECTORS)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BV], VALUES)
    if KEEP:
        sq, sp = sk, si
        ds = tma.make_tensor_descriptor(states, [tiles * V, K], [K, 1], [BV, PK], STATES)
        ss = gl.allocate_shared_memory(gl.bfloat16, [BV, PK], STATES)
    else:
        sq = gl.allocate_shared_memory(gl.bfloat16, [S, C, PK], KEYS)
        sp = gl.allocate_shared_memory(gl.bfloat16, [S, C, C], PAIRS)
    if CHANNELS:
        de = tma.make_tensor_descriptor(early + at_k, [N * T, K], [H * K, 1], [C, PK], KEYS)
        se = gl.allocate_shared_memory(gl.bfloat16, [S, C, PK], KEYS)
    else:
        de, se = dk, sk
    descriptors, rings = (dk, dv, di, df, dq, dp, de), (sk, sv, si, sf, sq, sp, se)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    BYTES: gl.constexpr = (
        2 * C * (PK + BV + SIDE) + 16 * C + (0 if KEEP else 2 * C * (PK + C)) + (2 * C * PK if CHANNELS else 0)
    )
    at_v = h * V + block * BV
    tile = n * chunks * HV + h
    row = n * T
    for x in gl.static_range(S):
        fetch(descriptors, rings, barriers, x, row + x * C, at_v, tile + x * HV, x < chunks, C, BYTES, not KEEP,
              CHANNELS)  # fmt: skip
    state = gl.zeros([BV, PK], gl.float32, STATE)
    j = block * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    i = gl.arange(0, PK, gl.SliceLayout(0, STATE))
    at_state = nh.to(gl.int64) * (K * V) + i[None, :] * V + j[:, None]
    if HAS_INITIAL:
        state += gl.load(initial + at_state, mask=i[None, :] < K, other=0.0)
    no_out = gl.zeros([BV, C], gl.float32, OUT)
    slot, phase, previous = 0, 0, 0
    decay = load_rest(rest, tile, i, K, CHANNELS)
    finished = gl.zeros([BV, C], gl.bfloat16, OUT)  # o or corrections of the chunk before, stored beside products
    held = gl.convert_layout(state.to(gl.bfloat16), TO_OUT)
    for x in range(chunks):
        tk = sk.index(slot)
        tf = sf.index(slot)
        next_decay = load_rest(rest, tile + gl.minimum(x + 1, chunks - 1) * HV, i, K, CHANNELS)
        mbarrier.wait(barriers.index(slot), phase)
        read = warpgroup_mma(held, tk.permute((1, 0)), no_out, use_acc=False, is_async=True)
        if not KEEP:
            o = warpgroup_mma(held, sq.index(slot).permute((1, 0)), no_out, use_acc=False, is_async=True)
        if not CHANNELS:  # of the chunk before, beside the products: each copy waits for all warps
            fetch(descriptors, rings, barriers, previous, row + (x - 1 + S) * C, at_v, tile + (x - 1 + S) * HV,
                  (x > 0) & (x - 1 + S < chunks), C, BYTES, not KEEP, False)  # fmt: skip
        tma.store_wait(0)
        so.permute((1, 0)).store(finished)
        if KEEP:
            ss.store(state.to(gl.bfloat16))
        fence_async_shared()
        if x > 0:
            tma.async_copy_shared_to_global(do, [row + (x - 1) * C, at_v], so)
        if KEEP:
            tma.async_copy_shared_to_global(ds, [(tile + x * HV) * V + block * BV, 0], ss)
        past = tf.slice(0, 1).load(OUT)
        strength = tf.slice(2, 1).load(OUT)
        value = sv.index(slot).permute((1, 0)).load(OUT).to(gl.float32) * strength
        state = decay_state(state, decay)
        if KEEP:
            read, held = warpgroup_mma_wait(0, deps=[read, held])
        else:
            read = warpgroup_mma_wait(1, deps=[read])
        given = gl.convert_layout((value - read * (past * strength)).to(gl.bfloat16), TO_OUT)
        if FOLDED:
            update = gl.convert_layout(given, TO_STATE)
            state = warpgroup_mma(update, si.index(slot), state, is_async=True)
            o, held = warpgroup_mma_wait(1, deps=[o, held])
            o = warpgroup_mma(given, sp.index(slot).permute((1, 0)), o * (past * scale), is_async=True)
            state, update = warpgroup_mma_wait(1, deps=[state, update])
            held = gl.convert_layout(state.to(gl.bfloat16), TO_OUT)
            o, given = warpgroup_mma_wait(0, deps=[o, given])
            finished = o.to(gl.bfloat16)
        else:
            correction = warpgroup_mma(given, si.index(slot).permute((1, 0)), no_out, use_acc=False, is_async=True)
            ahead = tf.slice(1, 1).load(OUT)
            if not KEEP:
                o, held = warpgroup_mma_wait(1, deps=[o, held])
                o = o * (past * scale)
            correction, given = warpgroup_mma_wait(0, deps=[correction, given])
            update = gl.convert_layout((correction * ahead).to(gl.bfloat16), TO_STATE)
            state = warpgroup_mma(update, se.index(slot), state, is_async=True)
            if KEEP:
                finished = correction.to(gl.bfloat16)
                state, update = warpgroup_mma_wait(0, deps=[state, update])
            else:
                written = gl.convert_layout(correction.to(gl.bfloat16), TO_OUT)
                o = warpgroup_mma(written, sp.index(slot).permute((1, 0)), o, is_async=True)
                state, o, update, written = warpgroup_mma_wait(0, deps=[state, o, update, written])
                finished = o.to(gl.bfloat16)
            held = gl.convert_layout(state.to(gl.bfloat16), TO_OUT)
        if CHANNELS:
            fetch(descriptors, rings, barriers, slot, row + (x + S) * C, at_v, tile + (x + S) * HV,
                  x + S < chunks, C, BYTES, not KEEP, True)  # fmt: skip
        decay = next_decay
        previous = slot
        slot, phase = advance(slot, phase, S)
    tma.store_wait(0)
    so.permute((1, 0)).store(finished)
    fence_async_shared()
    tma.async_copy_shared_to_global(do, [row + (chunks - 1) * C, at_v], so)
    tma.store_wait(0)
    if HAS_FINAL:
        gl.store(final + at_state, state, mask=i[None, :] < K)


@gluon.jit
def sweep_backward(
    pid, q, k, do, inverses, scores, factors, rest, dfinal, dvalues, dinitial, dstates, early, scale, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr,
    HAS_DFINAL: gl.constexpr, HAS_DINITIAL: gl.constexpr, CHANNELS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = V // BV
    block, nh = pid % BLOCKS, pid // BLOCKS
    n, h = nh // HV, nh % HV
    PK: gl.constexpr = 64 if K <= 64 else 128
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PK], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, PK], gl.bfloat16)
    VECTORS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PK, 16])
    TO_OUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    TO_STATE: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=STATE, k_width=2)
    chunks = T // C
    tiles = N * chunks * HV
    at_k = h // (HV // H) * K
    dk = tma.make_tensor_descriptor(k + at_k, [N * T, K], [H * K, 1], [C, PK], KEYS)
    dq = tma.make_tensor_descriptor(q + at_k, [N * T, K], [H * K, 1], [C, PK], KEYS)
    dc = tma.make_tensor_descriptor(do, [N * T, HV * V], [HV * V, 1], [C, BV], VALUES)
    dout = tma.make_tensor_descriptor(dvalues, [N * T, HV * V], [HV * V, 1], [C, BV], VALUES)
    di = tma.make_tensor_descriptor(inverses, [tiles * C, C], [C, 1], [C, C], PAIRS)
    dp = tma.make_tensor_descriptor(scores, [tiles * C, C], [C, 1], [C, C], PAIRS)
    df = tma.make_tensor_descriptor(factors, [tiles * 4, C], [C, 1], [4, C], VECTORS)
    ds = tma.make_tensor_descriptor(dstates, [tiles * V, K], [K, 1], [BV, PK], STATES)
    sk = gl.allocate_shared_memory(gl.bfloat16, [S, C, PK], KEYS)
    sq = gl.allocate_shared_memory(gl.bfloat16, [S, C, PK], KEYS)
    sc = gl.allocate_shared_memory(gl.bfloat16, [S, C, BV], VALUES)
    si = gl.allocate_shared_memory(gl.bfloat16, [S, C, C], PAIRS)
    sp = gl.allocate_shared_memory(gl.bfloat16, [S, C, C], PAIRS)
    sf = gl.allocate_shared_memory(gl.float32, [S, 4, C], VECTORS)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BV], VALUES)
    ss = gl.allocate_shared_memory(gl.bfloat16, [BV, PK], STATES)
    if CHANNELS:
        de = tma.make_tensor_descriptor(early + at_k, [N * T, K], [H * K, 1], [C, PK], KEYS)
        se = gl.allocate_shared_memory(gl.bfloat16, [S, C, PK], KEYS)
    else:
        de, se = dk, sk
    descriptors, rings = (dk, dc, di, df, dq, dp, de), (sk, sc, si, sf, sq, sp, se)
    barriers = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S):
        mbarrier.init(barriers.index(slot), count=1)
    BYTES: gl.constexpr = 2 * C * (2 * PK + BV + 2 * C) + 16 * C + (2 * C * PK if CHANNELS else 0)
    at_v = h * V + block * BV
    tile = (n * chunks + chunks - 1) * HV + h
    row = n * T + T - C
    for x in gl.static_range(S):
        fetch(descriptors, rings, barriers, x, row - x * C, at_v, tile - x * HV, x < chunks, C, BYTES, True,
              CHANNELS)  # fmt: skip
    dstate = gl.zeros([BV, PK], gl.float32, STATE)
    j = block * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    i = gl.arange(0, PK, gl.SliceLayout(0, STATE))
    at_state = nh.to(gl.int64) * (K * V) + i[None, :] * V + j[:, None]
    if HAS_DFINAL:
        dstate += gl.load(dfinal + at_state, mask=i[None, :] < K, other=0.0)
    no_out = gl.zeros([BV, C], gl.float32, OUT)
    slot, phase, previous = 0, 0, 0
    decay = load_rest(rest, tile, i, K, CHANNELS)
    finished = gl.zeros([BV, C], gl.bfloat16, OUT)
    for x in range(chunks):
        tk = sk.index(slot)
        tc = sc.index(slot).permute((1, 0))
        tf = sf.index(slot)
        held = gl.convert_layout(dstate.to(gl.bfloat16), TO_OUT)
        next_decay = load_rest(rest, tile - gl.minimum(x + 1, chunks - 1) * HV, i, K, CHANNELS)
        mbarrier.wait(barriers.index(slot), phase)
        change = warpgroup_mma(held, se.index(slot).permute((1, 0)), no_out, use_acc=False, is_async=True)
        if not CHANNELS:
            fetch(descriptors, rings, barriers, previous, row - (x - 1 + S) * C, at_v, tile - (x - 1 + S) * HV,
                  (x > 0) & (x - 1 + S < chunks), C, BYTES, True, False)  # fmt: skip
        past = tf.slice(0, 1).load(TO_STATE)
        late = (tc.load(TO_STATE).to(gl.float32) * (past * scale)).to(gl.bfloat16)
        tma.store_wait(0)
        ss.store(dstate.to(gl.bfloat16))
        so.permute((1, 0)).store(finished)
        fence_async_shared()
        dstate = decay_state(dstate, decay)
        dstate = warpgroup_mma(late, sq.index(slot), dstate, is_async=True)
        tma.async_copy_shared_to_global(ds, [(tile - x * HV) * V + block * BV, 0], ss)
        if x > 0:
            tma.async_copy_shared_to_global(dout, [row - (x - 1) * C, at_v], so)
        ahead = tf.slice(1, 1).load(OUT)
        taken = tf.slice(0, 1).load(OUT) * -tf.slice(2, 1).load(OUT)
        change, held = warpgroup_mma_wait(1, deps=[change, held])
        change = warpgroup_mma(tc, sp.index(slot), change * ahead, is_async=True)
        dstate, change, late = warpgroup_mma_wait(0, deps=[dstate, change, late])
        given = gl.convert_layout(change.to(gl.bfloat16), TO_OUT)
        dvalue = warpgroup_mma(given, si.index(slot), no_out, use_acc=False, is_async=True)
        dvalue, given = warpgroup_mma_wait(0, deps=[dvalue, given])
        erased = gl.convert_layout((dvalue * taken).to(gl.bfloat16), TO_STATE)
        dstate = warpgroup_mma(erased, tk, dstate, is_async=True)
        finished = dvalue.to(gl.bfloat16)
        dstate, erased = warpgroup_mma_wait(0, deps=[dstate, erased])
        if CHANNELS:
            fetch(descriptors, rings, barriers, slot, row - (x + S) * C, at_v, tile - (x + S) * HV,
                  x + S < chunks, C, BYTES, True, True)  # fmt: skip
        decay = next_decay
        previous = slot
        slot, phase = advance(slot, phase, S)
    tma.store_wait(0)
    so.permute((1, 0)).store(finished)
    fence_async_shared()
    tma.async_copy_shared_to_global(dout, [row - (chunks - 1) * C, at_v], so)
    tma.store_wait(0)
    if HAS_DINITIAL:
        gl.store(dinitial + at_state, dstate, mask=i[None, :] < K)


@gluon.jit
def fetch_values(descriptors, tiles, barriers, slot, unit, units, x, C: gl.constexpr, H: gl.constexpr,
                 HV: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, BYTES: gl.constexpr):  # fmt: skip
    """Block x of the values of the heads that share the key of a unit: do, v, X, dR [C, BV] and the states [BV, K]."""
    BLOCKS: gl.constexpr = V // BV
    h = unit % H * (HV // H) + x // BLOCKS
    row = unit // H * C
    column = h * V + x % BLOCKS * BV
    state = (unit // H * HV + h) * V + x % BLOCKS * BV
    barrier = barriers.index(slot)
    wanted = unit < units
    mbarrier.expect(barrier, BYTES, pred=wanted)
    for i in gl.static_range(4):
        tma.async_copy_global_to_shared(descriptors[i], [row, column], barrier, tiles[i].index(slot), pred=wanted)
    for i in gl.static_range(4, 6):
        tma.async_copy_global_to_shared(descriptors[i], [state, 0], barrier, tiles[i].index(slot), pred=wanted)


@gluon.jit
def fetch_keys(qs, ks, sq, sk, barriers, slot, unit, units, C: gl.constexpr, H: gl.constexpr, PK: gl.constexpr,
               S: gl.constexpr):  # fmt: skip
    barrier = barriers.index(S + slot)
    wanted = unit < units
    mbarrier.expect(barrier, 4 * C * PK, pred=wanted)
    tma.async_copy_global_to_shared(qs, [unit // H * C, unit % H, 0], barrier, sq.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(ks, [unit // H * C, unit % H, 0], barrier, sk.index(slot), pred=wanted)


@gluon.jit
def fetch_factors(fs, sf, barriers, slot, unit, units, member, C: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
                  S: gl.constexpr):  # fmt: skip
    barrier = barriers.index(S + 2 + slot)
    wanted = unit < units
    tile = unit // H * HV + unit % H * (HV // H) + member
    mbarrier.expect(barrier, 16 * C, pred=wanted)
    tma.async_copy_global_to_shared(fs, [tile * 4, 0], barrier, sf.index(slot), pred=wanted)


@gluon.jit
def gradients_hopper_kernel(
    q, k, v, do, states, dstates, corrections, dvalues, factors, dq, dk, dv, ddecay, derase, scale, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr,
    HAS_DECAY: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """As `linnet.ops.delta.kernels.gradients_kernel`, by eight warps, which halve the columns of every product.

    A program takes one unit, a chunk of a head of keys, after another, since descriptors take long to make.
    """
    units = N * (T // C) * H
    programs = gl.num_programs(0)
    GROUP: gl.constexpr = HV // H
    BLOCKS: gl.constexpr = V // BV
    PK: gl.constexpr = 64 if K <= 64 else 128
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 1, PK], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, PK], gl.bfloat16)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, PK // 2, 16])
    PAIR: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, C // 2, 16])
    VECTORS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    tiles_v = N * (T // C) * HV * V
    qs = tma.make_tensor_descriptor(q, [N * T, H, K], [H * K, K, 1], [C, 1, PK], KEYS)
    ks = tma.make_tensor_descriptor(k, [N * T, H, K], [H * K, K, 1], [C, 1, PK], KEYS)
    dqs = tma.make_tensor_descriptor(dq, [N * T, H, K], [H * K, K, 1], [C, 1, PK], KEYS)
    dks = tma.make_tensor_descriptor(dk, [N * T, H, K], [H * K, K, 1], [C, 1, PK], KEYS)
    fs = tma.make_tensor_descriptor(factors, [N * (T // C) * HV * 4, C], [C, 1], [4, C], VECTORS)
    dvs = tma.make_tensor_descriptor(dv, [N * T, HV * V], [HV * V, 1], [C, BV], VALUES)
    descriptors = (
        tma.make_tensor_descriptor(do, [N * T, HV * V], [HV * V, 1], [C, BV], VALUES),
        tma.make_tensor_descriptor(v, [N * T, HV * V], [HV * V, 1], [C, BV], VALUES),
        tma.make_tensor_descriptor(corrections, [N * T, HV * V], [HV * V, 1], [C, BV], VALUES),
        tma.make_tensor_descriptor(dvalues, [N * T, HV * V], [HV * V, 1], [C, BV], VALUES),
        tma.make_tensor_descriptor(states, [tiles_v, K], [K, 1], [BV, PK], STATES),
        tma.make_tensor_descriptor(dstates, [tiles_v, K], [K, 1], [BV, PK], STATES),
    )
    sq = gl.allocate_shared_memory(gl.bfloat16, [2, C, 1, PK], KEYS)
    sk = gl.allocate_shared_memory(gl.bfloat16, [2, C, 1, PK], KEYS)
    tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [S, C, BV], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [S, C, BV], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [S, C, BV], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [S, C, BV], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [S, BV, PK], STATES),
        gl.allocate_shared_memory(gl.bfloat16, [S, BV, PK], STATES),
    )
    sf = gl.allocate_shared_memory(gl.float32, [2, 4, C], VECTORS)
    so = gl.allocate_shared_memory(gl.bfloat16, [C, BV], VALUES)
    sa = gl.allocate_shared_memory(gl.bfloat16, [C, C], PAIRS)
    sb = gl.allocate_shared_memory(gl.bfloat16, [C, C], PAIRS)
    barriers = gl.allocate_shared_memory(gl.int64, [S + 4, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S + 4):
        mbarrier.init(barriers.index(slot), count=1)
    BYTES: gl.constexpr = 2 * BV * (4 * C + 2 * PK)
    EACH: gl.constexpr = GROUP * BLOCKS
    begin = gl.program_id(0)
    for x in gl.static_range(2):
        fetch_keys(qs, ks, sq, sk, barriers, x, begin + x * programs, units, C, H, PK, S)
        fetch_factors(fs, sf, barriers, x, begin + x // GROUP * programs, units, x % GROUP, C, H, HV, S)
    for x in gl.static_range(S):
        fetch_values(
            descriptors, tiles, barriers, x, begin + x // EACH * programs, units, x % EACH, C, H, HV, V, BV, BYTES
        )  # fmt: skip
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    r = gl.arange(0, C, gl.SliceLayout(1, ACC))
    later = gl.arange(0, C, gl.SliceLayout(1, PAIR))
    earlier = gl.arange(0, C, gl.SliceLayout(0, PAIR))
    order = later[:, None] - earlier[None, :]
    no_pairs = gl.zeros([C, C], gl.float32, PAIR)
    slot = 0
    phase = 0
    key_slot = 0
    key_phase = 0
    factor_slot = 0
    factor_phase = 0
    for unit in range(begin, units, programs):
        chunk, kh = unit // H, unit % H
        row = chunk * C
        tq = sq.index(key_slot).reshape([C, PK])
        tk = sk.index(key_slot).reshape([C, PK])
        dq_sum = gl.zeros([C, PK], gl.float32, ACC)
        dk_sum = gl.zeros([C, PK], gl.float32, ACC)
        # Of the heads so far: what keys pass on to the state after the chunk, and all of q dq less k dk.
        keys = gl.zeros([C], gl.float32, gl.SliceLayout(1, ACC))
        total = gl.zeros([C], gl.float32, gl.SliceLayout(1, ACC))
        mbarrier.wait(barriers.index(S + key_slot), key_phase)
        for member in range(GROUP):
            h = kh * GROUP + member
            whole = gl.load(factors + (chunk * HV + h + 1) * (4 * C) - 1)
            mbarrier.wait(barriers.index(S + 2 + factor_slot), factor_phase)
            # Row after row: Triton 3.6 takes transposed slices of such a tile for another order.
            tf = sf.index(factor_slot)._reinterpret(gl.float32, [4 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            late = (tf.slice(0, C).load(gl.SliceLayout(1, LEFT)) * scale)[:, None]
            ahead = tf.slice(C, C).load(gl.SliceLayout(1, LEFT))[:, None]
            strength_flat = tf.slice(2 * C, C).load(gl.SliceLayout(1, FLAT))[:, None]
            dscores = no_pairs
            doverlaps = no_pairs
            derased = gl.zeros([C, PK], gl.float32, ACC)
            through = gl.zeros([BV], gl.float32, gl.SliceLayout(1, FLAT))
            written = gl.zeros([C], gl.float32, gl.SliceLayout(1, FLAT))
            for block in range(BLOCKS):
                mbarrier.wait(barriers.index(slot), phase)
                tdo = tiles[0].index(slot)
                correction = tiles[2].index(slot)
                dvalue = tiles[3].index(slot)
                state = tiles[4].index(slot)
                dstate = tiles[5].index(slot)
                dscores = warpgroup_mma(tdo, correction.permute((1, 0)), dscores, is_async=True)
                doverlaps = warpgroup_mma(dvalue, correction.permute((1, 0)), doverlaps, is_async=True)
                of_q = (tdo.load(LEFT).to(gl.float32) * late).to(gl.bfloat16)
                dq_sum = warpgroup_mma(of_q, state, dq_sum, is_async=True)
                of_k = (correction.load(LEFT).to(gl.float32) * ahead).to(gl.bfloat16)
                dk_sum = warpgroup_mma(of_k, dstate, dk_sum, is_async=True)
                derased = warpgroup_mma(dvalue, state, derased, is_async=True)
                wide = dvalue.load(FLAT).to(gl.float32)
                written += gl.sum(wide * tiles[1].index(slot).load(FLAT).to(gl.float32), 1)
                tma.store_wait(0)
                so.store((wide * strength_flat).to(gl.bfloat16))
                fence_async_shared()
                dscores, doverlaps, dq_sum, dk_sum, derased, of_q, of_k = warpgroup_mma_wait(
                    0, deps=[dscores, doverlaps, dq_sum, dk_sum, derased, of_q, of_k]
                )
                through += gl.sum(state.load(FLAT).to(gl.float32) * dstate.load(FLAT).to(gl.float32), 1)
                wait_for_warps()  # the other four have read the tiles too
                tma.async_copy_shared_to_global(dvs, [row, h * V + block * BV], so)
                following = member * BLOCKS + block + S
                fetch_values(
                    descriptors, tiles, barriers, slot, unit + following // EACH * programs, units, following % EACH, C,
                    H, HV, V, BV, BYTES,
                )  # fmt: skip
                slot, phase = advance(slot, phase, S)
            apart = tf.slice(3 * C, C).load(gl.SliceLayout(1, PAIR))[:, None]
            apart -= tf.slice(3 * C, C).load(gl.SliceLayout(0, PAIR))[None, :]
            between = gl.exp2(gl.where(order > 0, apart, 0.0))
            doverlaps = gl.where(order > 0, doverlaps * -between, 0.0)
            sa.store(gl.where(order >= 0, dscores * (between * scale), 0.0).to(gl.bfloat16))
            sb.store(doverlaps.to(gl.bfloat16))
            tma.store_wait(0)
            so.store((doverlaps * tf.slice(2 * C, C).load(gl.SliceLayout(1, PAIR))[:, None]).to(gl.bfloat16))
            strength = tf.slice(2 * C, C).load(gl.SliceLayout(1, ACC))
            past = tf.slice(0, C).load(gl.SliceLayout(1, ACC))
            fence_async_shared()
            wait_for_warps()
            derased = warpgroup_mma(sb, tk, derased * -past[:, None], is_async=True)
            if HAS_DECAY:
                leaving = gl.sum(gl.sum(dk_sum * tk.load(ACC).to(gl.float32), 1) - keys, 0)
            dq_sum = warpgroup_mma(sa, tk, dq_sum, is_async=True)
            dk_sum = warpgroup_mma(sa.permute((1, 0)), tq, dk_sum, is_async=True)
            dk_sum = warpgroup_mma(so.permute((1, 0)), tk, dk_sum, is_async=True)
            dq_sum, dk_sum, derased = warpgroup_mma_wait(0, deps=[dq_sum, dk_sum, derased])
            erased = gl.sum(derased * tk.load(ACC).to(gl.float32), 1)
            at = (row + r).to(gl.int64) * HV + h
            written = gl.convert_layout(written, gl.SliceLayout(1, ACC))
            gl.store(derase + at, (written + erased).to(derase.dtype.element_ty))
            if HAS_DECAY:
                before = total
                of_keys = dk_sum * tk.load(ACC).to(gl.float32)
                total = gl.sum(dq_sum * tq.load(ACC).to(gl.float32) - of_keys, 1)
                inside = gl.convert_layout(total - before + erased * strength, gl.SliceLayout(1, PAIR))
                inside = gl.sum(gl.where(order >= 0, inside[:, None] + no_pairs, 0.0), 0)
                inside += leaving + gl.sum(through, 0) * gl.exp2(whole)
                gl.store(ddecay + (row + earlier).to(gl.int64) * HV + h, inside.to(ddecay.dtype.element_ty))
                keys = gl.sum(of_keys, 1) + erased * strength
                total -= erased * strength
            dk_sum += derased * strength[:, None]
            following = member + 2
            fetch_factors(
                fs, sf, barriers, factor_slot, unit + following // GROUP * programs, units, following % GROUP, C, H, HV,
                S,
            )  # fmt: skip
            factor_slot, factor_phase = advance(factor_slot, factor_phase, 2)
        wait_for_warps()
        tq.store(dq_sum.to(gl.bfloat16))
        tk.store(dk_sum.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(dqs, [row, kh, 0], sq.index(key_slot))
        tma.async_copy_shared_to_global(dks, [row, kh, 0], sk.index(key_slot))
        tma.store_wait(0)
        fetch_keys(qs, ks, sq, sk, barriers, key_slot, unit + 2 * programs, units, C, H, PK, S)
        key_slot, key_phase = advance(key_slot, key_phase, 2)
    tma.store_wait(0)
