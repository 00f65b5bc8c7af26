"""The forward sweep and the gradients of `linnet.ops.ssd.kernels` for Hopper GPUs, where tiles come through descriptors
(TMA) while products run: bfloat16, keys of 64 or 128, sequences of whole chunks of 64, no documents. The sweep takes
values of 64 or 128, the gradients value heads of 64 that share keys."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from linnet.ops.delta.hopper import wait_for_warps
from linnet.ops.lightning.hopper import advance, make_barriers, product_layout

# Known when a kernel is compiled; S value heads are in flight.
Sizes = namedtuple("Sizes", "H HV K V C SLICES HAS_TIMES HAS_SKIP S")
# Shared memory: q, k and products of a chunk, and S slots of what belongs to a value head; a barrier of each slot, and
# one of q and k, is complete once it is full, another once it may be loaded again.
Tiles = namedtuple("Tiles", "q k weights dv v do state dstate decays full empty")


@gluon.jit
def load_heads(keys, heads, tiles, units, sizes):
    """Loads q and k of each unit of this program, and what belongs to its value heads, as soon as there is room."""
    H: gl.constexpr = sizes.H * sizes.SLICES
    GROUP: gl.constexpr = sizes.HV // H
    BYTES: gl.constexpr = 4 * (sizes.C + sizes.K) * sizes.V + 32 * sizes.C
    LAST: gl.constexpr = min(sizes.S, GROUP) - 1  # of the heads that there is room for before the keys are needed
    slot = 0
    phase = 1
    key_phase = 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        chunk, key = unit // H, unit % H // sizes.SLICES
        for member in range(GROUP):
            head = unit % H * GROUP + member
            number = chunk * sizes.HV + head
            full = tiles.full.index(slot)
            mbarrier.wait(tiles.empty.index(slot), phase)
            mbarrier.expect(full, BYTES)
            tma.async_copy_global_to_shared(heads[0], [chunk * sizes.C, head * sizes.V], full, tiles.v.index(slot))
            tma.async_copy_global_to_shared(heads[1], [chunk * sizes.C, head * sizes.V], full, tiles.do.index(slot))
            tma.async_copy_global_to_shared(heads[2], [number * sizes.K, 0], full, tiles.state.index(slot))
            tma.async_copy_global_to_shared(heads[3], [number * sizes.K, 0], full, tiles.dstate.index(slot))
            tma.async_copy_global_to_shared(heads[4], [number * 8, 0], full, tiles.decays.index(slot))
            if member == LAST:
                full = tiles.full.index(sizes.S)
                mbarrier.wait(tiles.empty.index(sizes.S), key_phase)
                mbarrier.expect(full, 4 * sizes.C * sizes.K)
                tma.async_copy_global_to_shared(keys[0], [chunk * sizes.C, key * sizes.K], full, tiles.q)
                tma.async_copy_global_to_shared(keys[1], [chunk * sizes.C, key * sizes.K], full, tiles.k)
                key_phase ^= 1
            slot, phase = advance(slot, phase, sizes.S)


@gluon.jit
def store_sums(pointer, x, down, across):
    """x [R, N] at `pointer` plus `down` for each row and `across` for each column."""
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(pointer + rows * down + columns * across, x)


@gluon.jit
def multiply_heads(to_dv, dq, dk, parts, through, tiles, scale, ROWS, CHUNKS, sizes):
    """The gradients of the units that `load_heads` loads, by eight warps, which halve the columns of every product."""
    HEADS: gl.constexpr = sizes.H * sizes.SLICES
    GROUP: gl.constexpr = sizes.HV // HEADS
    HV: gl.constexpr = sizes.HV
    K: gl.constexpr = sizes.K
    V: gl.constexpr = sizes.V
    C: gl.constexpr = sizes.C
    S: gl.constexpr = sizes.S
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    ACC: gl.constexpr = product_layout(4, K // 2, 2)
    PAIR: gl.constexpr = product_layout(4, C // 2, 2)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    order = gl.arange(0, C, gl.SliceLayout(1, PAIR))[:, None] - gl.arange(0, C, gl.SliceLayout(0, PAIR))[None, :]
    at_row = gl.arange(0, C, gl.SliceLayout(1, ACC))[:, None]
    at_column = gl.arange(0, K, gl.SliceLayout(0, ACC))[None, :]
    no_pairs = gl.zeros([C, C], gl.float32, PAIR)
    hop = (ROWS * 0 + CHUNKS).to(gl.int64) * (HV * C)
    slot = 0
    phase = 0
    key_phase = 0
    for unit in range(gl.program_id(0), CHUNKS * HEADS, gl.num_programs(0)):
        chunk, head = unit // HEADS, unit % HEADS * GROUP
        mbarrier.wait(tiles.full.index(S), key_phase)
        key_phase ^= 1
        raw = warpgroup_mma(tiles.q, tiles.k.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        raw = warpgroup_mma_wait(0, deps=[raw]) * scale
        pairs = no_pairs
        dq_sum = gl.zeros([C, K], gl.float32, ACC)
        dk_sum = gl.zeros([C, K], gl.float32, ACC)
        for member in range(GROUP):
            number = (chunk * HV + head + member).to(gl.int64)
            mbarrier.wait(tiles.full.index(slot), phase)
            tv, tdo = tiles.v.index(slot), tiles.do.index(slot)
            state, dstate = tiles.state.index(slot), tiles.dstate.index(slot)
            dscores = warpgroup_mma(tdo, tv.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
            of_k = warpgroup_mma(tiles.k, dstate, no_pairs, use_acc=False, is_async=True)
            of_q = warpgroup_mma(tiles.q, state, no_pairs, use_acc=False, is_async=True)
            # Row after row: Triton 3.6 takes transposed slices of such a tile for another order.
            sums = tiles.decays.index(slot)._reinterpret(gl.float32, [8 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            coarse, fine, since, until = sums.slice(0, C), sums.slice(C, C), sums.slice(2 * C, C), sums.slice(3 * C, C)
            factors = since.load(gl.SliceLayout(1, LEFT)) * scale
            late = (tdo.load(LEFT).to(gl.float32) * factors[:, None]).to(gl.bfloat16)
            dq_sum = warpgroup_mma(late, state.permute((1, 0)), dq_sum, is_async=True)
            factors = until.load(gl.SliceLayout(1, LEFT))
            if sizes.HAS_TIMES:
                factors *= sums.slice(4 * C, C).load(gl.SliceLayout(1, LEFT))
            early = (tv.load(LEFT).to(gl.float32) * factors[:, None]).to(gl.bfloat16)
            dk_sum = warpgroup_mma(early, dstate.permute((1, 0)), dk_sum, is_async=True)
            # The rest of the work runs beside these five products.
            both = state.load(FLAT).to(gl.float32) * dstate.load(FLAT).to(gl.float32)
            both = gl.sum(gl.sum(both.reshape([K // 32, 32, V]), 0), 1)
            gl.store(through + number * 32 + gl.arange(0, 32, both.type.layout), both)
            apart = coarse.load(gl.SliceLayout(1, PAIR))[:, None] - coarse.load(gl.SliceLayout(0, PAIR))[None, :]
            apart += fine.load(gl.SliceLayout(1, PAIR))[:, None] - fine.load(gl.SliceLayout(0, PAIR))[None, :]
            between = gl.exp2(gl.where(order >= 0, apart, -150.0))
            tma.store_wait(0)
            tiles.weights.store((raw * between).to(gl.bfloat16))
            fence_async_shared()
            wait_for_warps()
            dscores, of_k = warpgroup_mma_wait(3, deps=[dscores, of_k])
            of_k *= until.load(gl.SliceLayout(1, PAIR))[:, None]
            dvalue = warpgroup_mma(tiles.weights.permute((1, 0)), tdo, of_k, is_async=True)
            dscores *= between
            if sizes.HAS_TIMES:
                dscores *= sums.slice(4 * C, C).load(gl.SliceLayout(0, PAIR))[None, :]
            pairs += dscores
            passing = gl.where(order > 0, dscores * raw, 0.0)
            of_q = warpgroup_mma_wait(3, deps=[of_q])
            factors = since.load(gl.SliceLayout(1, PAIR)) * scale
            of_rows = passing + of_q * (tdo.load(PAIR).to(gl.float32) * factors[:, None])
            of_columns = of_k * tv.load(PAIR).to(gl.float32)
            # Each group of warps sums its own up: sums over all would wait for each other.
            at = parts + number * C
            store_sums(at, gl.sum(of_rows.reshape([C, 2, V // 2]), 2), 1, hop)
            store_sums(at + 2 * hop, -gl.sum(passing.reshape([4, C // 4, C]), 1), hop, 1)
            if sizes.HAS_TIMES:
                of_columns *= sums.slice(4 * C, C).load(gl.SliceLayout(1, PAIR))[:, None]
            store_sums(at + 6 * hop, gl.sum(of_columns.reshape([C, 2, V // 2]), 2), 1, hop)
            dvalue, dq_sum, dk_sum, _, _ = warpgroup_mma_wait(0, deps=[dvalue, dq_sum, dk_sum, late, early])
            if sizes.HAS_TIMES:
                of_times = dvalue * tv.load(PAIR).to(gl.float32)
                store_sums(at + 8 * hop, gl.sum(of_times.reshape([C, 2, V // 2]), 2), 1, hop)
                dvalue *= sums.slice(4 * C, C).load(gl.SliceLayout(1, PAIR))[:, None]
            if sizes.HAS_SKIP:
                passed = tdo.load(PAIR).to(gl.float32)
                of_skip = passed * tv.load(PAIR).to(gl.float32)
                store_sums(at + 10 * hop, gl.sum(of_skip.reshape([C, 2, V // 2]), 2), 1, hop)
                dvalue += passed * sums.slice(5 * C, C).load(gl.SliceLayout(1, PAIR))[:, None]
            tiles.dv.store(dvalue.to(gl.bfloat16))
            fence_async_shared()
            wait_for_warps()  # the other four have read the tiles too
            tma.async_copy_shared_to_global(to_dv, [chunk * C, (head + member) * V], tiles.dv)
            mbarrier.arrive(tiles.empty.index(slot), count=1)
            slot, phase = advance(slot, phase, S)
        tiles.weights.store((pairs * scale).to(gl.bfloat16))
        fence_async_shared()
        wait_for_warps()
        dq_sum = warpgroup_mma(tiles.weights, tiles.k, dq_sum, is_async=True)
        dk_sum = warpgroup_mma(tiles.weights.permute((1, 0)), tiles.q, dk_sum, is_async=True)
        dq_sum, dk_sum = warpgroup_mma_wait(0, deps=[dq_sum, dk_sum])
        wait_for_warps()
        mbarrier.arrive(tiles.empty.index(S), count=1)
        rows = (unit % sizes.SLICES * ROWS + chunk * C).to(gl.int64) + at_row
        at = rows * (sizes.H * K) + unit % HEADS // sizes.SLICES * K + at_column
        gl.store(dq + at, dq_sum.to(dq.dtype.element_ty))
        gl.store(dk + at, dk_sum.to(dk.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit
def gradients_hopper_kernel(
    q, k, v, decays, do, entering, leaving, dq, dk, dv, parts, through, scale, ROWS, CHUNKS, SLICES: gl.constexpr,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    HAS_TIMES: gl.constexpr, HAS_SKIP: gl.constexpr, S: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `linnet.ops.ssd.kernels.gradients_kernel`, all of a chunk.

    A program takes one unit, a slice of the value heads that share a key in a chunk, after another, since descriptors
    take long to make. One warp loads, and eight multiply.
    """
    gl.static_assert(V == C)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, V], gl.bfloat16)
    VECTORS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    keys = (
        tma.make_tensor_descriptor(q, [ROWS, H * K], [H * K, 1], [C, K], KEYS),
        tma.make_tensor_descriptor(k, [ROWS, H * K], [H * K, 1], [C, K], KEYS),
    )
    heads = (
        tma.make_tensor_descriptor(v, [ROWS, HV * V], [HV * V, 1], [C, V], VALUES),
        tma.make_tensor_descriptor(do, [ROWS, HV * V], [HV * V, 1], [C, V], VALUES),
        tma.make_tensor_descriptor(entering, [CHUNKS * (HV * K), V], [V, 1], [K, V], STATES),
        tma.make_tensor_descriptor(leaving, [CHUNKS * (HV * K), V], [V, 1], [K, V], STATES),
        tma.make_tensor_descriptor(decays, [CHUNKS * (HV * 8), C], [C, 1], [8, C], VECTORS),
    )
    to_dv = tma.make_tensor_descriptor(dv, [ROWS, HV * V], [HV * V, 1], [C, V], VALUES)
    tiles = Tiles(
        gl.allocate_shared_memory(gl.bfloat16, [C, K], KEYS),
        gl.allocate_shared_memory(gl.bfloat16, [C, K], KEYS),
        gl.allocate_shared_memory(gl.bfloat16, [C, C], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [C, V], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [S, C, V], VALUES),
        gl.allocate_shared_memory(gl.bfloat16, [S, K, V], STATES),
        gl.allocate_shared_memory(gl.bfloat16, [S, K, V], STATES),
        gl.allocate_shared_memory(gl.float32, [S, 8, C], VECTORS),
        make_barriers(S + 1),
        make_barriers(S + 1),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            # Sizes not by a name, which would make tensors of them.
            (
                multiply_heads,
                (
                    to_dv,
                    dq,
                    dk,
                    parts,
                    through,
                    tiles,
                    scale,
                    ROWS,
                    CHUNKS,
                    Sizes(H, HV, K, V, C, SLICES, HAS_TIMES, HAS_SKIP, S),
                ),
            ),
            (
                load_heads,
                (keys, heads, tiles, CHUNKS * (H * SLICES), Sizes(H, HV, K, V, C, SLICES, HAS_TIMES, HAS_SKIP, S)),
            ),
        ],
        [1],
        [REGISTERS],
    )


@gluon.jit
def fetch_chunk(keys, values, vectors, row, number, columns, tiles, slot, wanted, BYTES: gl.constexpr):
    """Loads, if wanted, the chunk at `row` into a slot; the decays have a `number` of chunk and head."""
    barrier = tiles.full.index(slot)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(keys[0], [row, columns[0]], barrier, tiles.q.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(keys[1], [row, columns[0]], barrier, tiles.k.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(values, [row, columns[1]], barrier, tiles.v.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(vectors, [number * 8, 0], barrier, tiles.decays.index(slot), pred=wanted)


# Shared memory of a sweep: S chunks in flight, and a barrier of each.
Chunks = namedtuple("Chunks", "q k v decays full")


@gluon.jit
def forward_hopper_kernel(
    q, k, v, decays, o, initial, final, sums, totals, scale, ROWS, T, N, SEGMENTS: gl.constexpr, H: gl.constexpr,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, HAS_TIMES: gl.constexpr,
    HAS_SKIP: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """As `linnet.ops.ssd.kernels.forward_kernel`.

    States and outputs are transposed, [values, keys] and [values, tokens], so that a state goes from registers into the
    product with queries. The scores of the next chunk, which need no state, start before this chunk's output is done.
    """
    BLOCKS: gl.constexpr = V // BV
    block, nh = gl.program_id(0) % BLOCKS, gl.program_id(0) // BLOCKS % (N * HV)
    n, h, s = nh // HV, nh % HV, gl.program_id(0) // (BLOCKS * N * HV)
    WARPS: gl.constexpr = BV // 16
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    VECTORS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    SCORES: gl.constexpr = product_layout(C // 16, C * C // 16 // WARPS, WARPS * 16 // C)
    OUT: gl.constexpr = product_layout(WARPS, C)
    STATE: gl.constexpr = product_layout(WARPS, K)
    TO_OUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    TO_STATE: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=STATE, k_width=2)
    keys = (
        tma.make_tensor_descriptor(q, [ROWS, H * K], [H * K, 1], [C, K], KEYS),
        tma.make_tensor_descriptor(k, [ROWS, H * K], [H * K, 1], [C, K], KEYS),
    )
    values = tma.make_tensor_descriptor(v, [ROWS, HV * V], [HV * V, 1], [C, BV], VALUES)
    to_o = tma.make_tensor_descriptor(o, [ROWS, HV * V], [HV * V, 1], [C, BV], VALUES)
    vectors = tma.make_tensor_descriptor(decays, [ROWS // C * (HV * 8), C], [C, 1], [8, C], VECTORS)
    tiles = Chunks(
        gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS),
        gl.allocate_shared_memory(gl.bfloat16, [S, C, K], KEYS),
        gl.allocate_shared_memory(gl.bfloat16, [S, C, BV], VALUES),
        gl.allocate_shared_memory(gl.float32, [S, 8, C], VECTORS),
        make_barriers(S),
    )
    outs = gl.allocate_shared_memory(gl.bfloat16, [C, BV], VALUES)
    weights = gl.allocate_shared_memory(gl.bfloat16, [C, C], PAIRS)

    BYTES: gl.constexpr = 2 * C * (2 * K + BV) + 32 * C
    per = (T // C + SEGMENTS - 1) // SEGMENTS
    first = gl.minimum(s * per, T // C)
    chunks, row = gl.minimum(per, T // C - first), n * T + first * C  # the last segments may have no chunk
    number = (row // C) * HV + h
    columns = (h // (HV // H) * K, h * V + block * BV)
    for x in gl.static_range(S):
        fetch_chunk(keys, values, vectors, row + C * x, number + HV * x, columns, tiles, x, x < chunks, BYTES)

    state = gl.zeros([BV, K], gl.float32, STATE)
    i = gl.arange(0, K, gl.SliceLayout(0, STATE))
    j = block * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    entries = nh.to(gl.int64) * (K * V) + i[None, :] * V + j[:, None]
    if HAS_INITIAL:
        state += gl.load(initial + entries)
    if SEGMENTS > 1:
        for x in range(0, s):
            before = nh.to(gl.int64) * SEGMENTS + x
            left = gl.load(sums + before * (K * V) + i[None, :] * V + j[:, None])
            state = state * gl.exp2(gl.load(totals + before)) + left
    later = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :] - gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    no_out = gl.zeros([BV, C], gl.float32, OUT)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    ends = decays + number.to(gl.int64) * (8 * C) + (3 * C - 1)  # the decay over each chunk
    over = gl.load(ends, mask=chunks > 0, other=1.0)
    slot = 0
    phase = 0
    mbarrier.wait(tiles.full.index(0), 0, pred=chunks > 0)
    scores = warpgroup_mma(tiles.k.index(0), tiles.q.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    for x in range(0, chunks):
        next_over = gl.load(ends + (x + 1).to(gl.int64) * (HV * 8 * C), mask=x + 1 < chunks, other=1.0)
        tq, tk, tv = tiles.q.index(slot), tiles.k.index(slot), tiles.v.index(slot)
        # An operand in registers is named in the wait for its product, so that it is not overwritten too early.
        held = gl.convert_layout(state.to(gl.bfloat16), TO_OUT)
        out = warpgroup_mma(held, tq.permute((1, 0)), no_out, use_acc=False, is_async=True)
        parts = tiles.decays.index(slot)._reinterpret(gl.float32, [8 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        coarse, fine, times = parts.slice(0, C), parts.slice(C, C), parts.slice(4 * C, C)
        until = parts.slice(3 * C, C).load(gl.SliceLayout(0, TO_STATE))
        if HAS_TIMES:
            until *= times.load(gl.SliceLayout(0, TO_STATE))
        decayed = (tv.permute((1, 0)).load(TO_STATE).to(gl.float32) * until[None, :]).to(gl.bfloat16)
        apart = coarse.load(gl.SliceLayout(0, SCORES))[None, :] - coarse.load(gl.SliceLayout(1, SCORES))[:, None]
        apart += fine.load(gl.SliceLayout(0, SCORES))[None, :] - fine.load(gl.SliceLayout(1, SCORES))[:, None]
        between = gl.where(later >= 0, gl.exp2(apart) * scale, 0.0)
        if HAS_TIMES:
            between *= times.load(gl.SliceLayout(1, SCORES))[:, None]
        since = parts.slice(2 * C, C).load(gl.SliceLayout(0, OUT)) * scale
        done = warpgroup_mma_wait(1, deps=[scores])
        state = warpgroup_mma(decayed, tk, state * over, is_async=True)
        done *= between
        if HAS_SKIP:
            done += gl.where(later == 0, parts.slice(5 * C, C).load(gl.SliceLayout(1, SCORES))[:, None], 0.0)
        tma.store_wait(0)
        weights.store(done.to(gl.bfloat16))
        fence_async_shared()
        next_slot, next_phase = advance(slot, phase, S)
        out, _ = warpgroup_mma_wait(1, deps=[out, held])
        out = warpgroup_mma(tv.permute((1, 0)), weights, out * since[None, :], is_async=True)
        mbarrier.wait(tiles.full.index(next_slot), next_phase, pred=x + 1 < chunks)
        # After the last chunk these are of what lies there, and unused.
        tk, tq = tiles.k.index(next_slot), tiles.q.index(next_slot)
        scores = warpgroup_mma(tk, tq.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        out, state, _ = warpgroup_mma_wait(1, deps=[out, state, decayed])
        at, ahead = row + C * (x + S), number + HV * (x + S)
        fetch_chunk(keys, values, vectors, at, ahead, columns, tiles, slot, x + S < chunks, BYTES)
        outs.permute((1, 0)).store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(to_o, [row + C * x, columns[1]], outs)
        over = next_over
        slot = next_slot
        phase = next_phase
    warpgroup_mma_wait(0, deps=[scores])
    tma.store_wait(0)
    if HAS_FINAL:
        # By the program of the last chunk.
        if (first + chunks == T // C) & (chunks > 0):
            gl.store(final + entries, state)
