"""The gradients of `linnet.ops.ssd.kernels` for Hopper GPUs, where the tiles of a value head come through descriptors
(TMA) while the products of the heads before run: bfloat16, keys of 64 or 128 that value heads of 64 share, sequences of
whole chunks of 64, no documents."""

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
