"""How a chunk's tokens lie in shared memory in the sweeps with LRPE for Hopper GPUs, and sums over them.

Row r of a tile has token 16 (r / 2 % 4) + 2 (r / 8) + r % 2 of its chunk. A thread, whose part of a tile [channel, row]
is what ldmatrix gives it, then has 16 consecutive tokens of a channel, so that running sums are its own additions and
three shuffles. Products over a chunk are the same in any order, if all of its tiles have it; masks and angles ask
`_token`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.constexpr_function
def _rows_layout(rows, stacks=1):
    """Registers of a tile [32 channels, rows] of 4 warps: 8 channels a warp; `stacks` of them, one below the other."""
    registers = [[0, 1]]
    r = 8
    while r < rows:
        registers.append([0, r])
        r *= 2
    if stacks == 2:
        registers.append([32, 0])
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [32 * stacks, rows])


@gluon.jit
def _token(row):
    """The token of a chunk that is in a row of shared memory."""
    return _run(row) + _within(row)


@gluon.jit
def _run(row):
    """The first of the 16 consecutive tokens among which that of a row is."""
    return row // 2 % 4 * 16


@gluon.jit
def _within(row):
    return row // 8 * 2 + row % 2


@gluon.jit
def _widen(x):
    """A bfloat16 tile in float32: one instruction a number."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a;
        shl.b32 a, $2, 16;
        mov.b32 $0, a;
        and.b32 a, $2, 0xffff0000;
        mov.b32 $1, a;
        }""",
        "=f,=f,r", [x], gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _larger(x, y):
    """The larger of two bfloat16 tiles, number by number."""
    return gl.inline_asm_elementwise(
        "max.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.bfloat16, is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def _highest(x):
    """The highest number of each channel of a bfloat16 tile [32 channels, 64 rows]."""
    first, last = _halves(x)
    first, last = _halves(_larger(first, last))
    first, last = _halves(_larger(first, last))
    return gl.max(_widen(_larger(first, last)), 1)


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _in_order(x):
    """Of a tile [channel, row] the tokens: [channel, 4, 16], each 16 those of a thread."""
    CHAIN: gl.constexpr = gl.BlockedLayout([1, 1, 16], [8, 4, 1], [x.shape[0] // 8, 1, 1], [2, 1, 0])
    x = x.reshape((x.shape[0], 8, 4, 2)).permute((0, 2, 1, 3)).reshape((x.shape[0], 4, 16))
    return gl.convert_layout(x, CHAIN, assert_trivial=True)


@gluon.jit
def _in_rows(x, LAYOUT: gl.constexpr):
    """`_in_order` undone."""
    x = x.reshape((x.shape[0], 4, 8, 2)).permute((0, 2, 1, 3)).reshape((x.shape[0], 64))
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _hand(tile, PART: gl.constexpr, x):
    """Stores a tile [32 channels, 4, 16 tokens] for `_take`: a thread's 16 bytes beside those of its neighbours."""
    x = x.reshape((128, tile.shape[0], tile.shape[2])).permute((1, 0, 2))
    tile.slice(128 * PART, 128, dim=1).store(x)


@gluon.jit
def _take(tile, LAYOUT: gl.constexpr):
    """All of what `_hand` stored, by 8 warps, as [64 channels, row]."""
    OWN: gl.constexpr = gl.BlockedLayout([tile.shape[0], 1, tile.shape[2]], [1, 32, 1], [1, 8, 1], [2, 1, 0])
    x = tile.load(OWN)
    if x.dtype == gl.bfloat16:
        x = _widen(x)
    return _in_rows(x.permute((1, 0, 2)).reshape((64, 4, 16)), LAYOUT)


@gluon.jit
def _last(x):
    """Of [channel, 4, 16] the last of 16."""
    _, x = x.reshape((x.shape[0], 4, 8, 2)).split()
    _, x = x.reshape((x.shape[0], 4, 4, 2)).split()
    _, x = x.reshape((x.shape[0], 4, 2, 2)).split()
    _, x = x.split()
    return x


@gluon.jit
def _backwards(x):
    """[channel, 4, 16], the 16 tokens of a thread from the last one on: other names of registers."""
    LAYOUT: gl.constexpr = x.type.layout
    for _ in gl.static_range(4):  # the first bit of a token's number becomes the last one, inverted
        first, last = x.reshape((x.shape[0], 4, 2, 8)).permute((0, 1, 3, 2)).split()
        x = gl.join(last, first).reshape((x.shape[0], 4, 16))
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def _shuffles(direction, bounds):
    """Assembly: the sum of what the lanes 1, 2 and 3 away have, as far as `bounds` says that there are any."""
    lanes = "".join(
        f"""
        .reg .pred p{away};
        .reg .f32 x{away};
        shfl.sync.{direction}.b32 x{away}|p{away}, $1, {away}, {bounds}, 0xffffffff;
        @!p{away} mov.f32 x{away}, 0f00000000;"""
        for away in (1, 2, 3)
    )
    return "{" + lanes + "add.f32 x1, x1, x2; add.f32 $0, x1, x3; }"


@gluon.jit
def _lanes_beside(x, AFTER: gl.constexpr):
    """Sums over the runs of tokens before (AFTER: after) each of a channel's four, which are in four lanes in turn."""
    TEXT: gl.constexpr = _shuffles("down", "0x1c03") if AFTER else _shuffles("up", "0x1c00")
    return gl.inline_asm_elementwise(TEXT, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _sums(x, start, unit):
    """Sums [channel, row] of x up to each token, with `start`, times `unit`; and the sum of all, not times it."""
    chain = gl.associative_scan(_in_order(x), 2, _add)
    own = _last(chain)
    ROW: gl.constexpr = gl.SliceLayout(1, own.type.layout)
    begin = _lanes_beside(own, False) + gl.convert_layout(start, ROW, assert_trivial=True)[:, None]
    begin = gl.convert_layout(begin * unit, gl.SliceLayout(2, chain.type.layout), assert_trivial=True)
    LAYOUT: gl.constexpr = x.type.layout
    sums = _in_rows(chain * unit + begin[:, :, None], LAYOUT)
    return sums, start + gl.convert_layout(gl.sum(own, 1), start.type.layout, assert_trivial=True)


@gluon.jit
def _tails(x, end):
    """Sums [channel, 4, 16] of x from each token on, with `end`; and the sum of all."""
    chain = gl.associative_scan(_backwards(_in_order(x)), 2, _add)  # `reverse` would shuffle
    own = _last(chain)
    ROW: gl.constexpr = gl.SliceLayout(1, own.type.layout)
    begin = _lanes_beside(own, True) + gl.convert_layout(end, ROW, assert_trivial=True)[:, None]
    begin = gl.convert_layout(begin, gl.SliceLayout(2, chain.type.layout), assert_trivial=True)
    end += gl.convert_layout(gl.sum(own, 1), end.type.layout, assert_trivial=True)
    return _backwards(chain + begin[:, :, None]), end


@gluon.jit
def _beside(x, y, LAYOUT: gl.constexpr):
    """Two tiles [channel, row], one after the other."""
    both = gl.join(x, y).permute((0, 2, 1)).reshape((x.shape[0], 2 * x.shape[1]))
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def _halves(x):
    """The first and the last half of a tile's rows."""
    HALF: gl.constexpr = _rows_layout(x.shape[1] // 2)
    first, last = x.reshape((32, 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
    return gl.convert_layout(first, HALF, assert_trivial=True), gl.convert_layout(last, HALF, assert_trivial=True)


@gluon.jit
def _quarters(x):
    first, last = _halves(x)
    a, b = _halves(first)
    c, d = _halves(last)
    return a, b, c, d


@gluon.jit
def _four(a, b, c, d):
    """`_quarters` undone."""
    return _beside(_beside(a, b, _rows_layout(32)), _beside(c, d, _rows_layout(32)), _rows_layout(64))


@gluon.jit
def _stack(cosines, sines):
    """[32 channels of cosines, then of sines, row]."""
    both = gl.join(cosines, sines).permute((2, 0, 1)).reshape((64, 64))
    return gl.convert_layout(both, _rows_layout(64, 2), assert_trivial=True)


@gluon.jit
def _alternate(cosines, sines):
    """[8 channels of cosines, then their sines, and so on for 32, row]."""
    return gl.join(cosines, sines).reshape((4, 8, 64, 2)).permute((0, 3, 1, 2)).reshape((64, 64))


@gluon.constexpr_function
def _ordered_layout():
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@gluon.jit
def _describe(x, tokens, width, COLUMNS: gl.constexpr):
    """A descriptor of chunks [64, COLUMNS] of [tokens, width], in the order of rows above."""
    LAYOUT: gl.constexpr = _ordered_layout()
    return tma.make_tensor_descriptor(
        x, [8, tokens // 16, 2, width], [2 * width, 16 * width, width, 1], [8, 4, 2, COLUMNS], LAYOUT
    )


@gluon.jit
def _ordered(tile):
    return tile._reinterpret(gl.bfloat16, [8, 4, 2, tile.shape[1]], _ordered_layout())


@gluon.jit
def _copy(descriptor, row, column, barrier, to, wanted):
    """Loads the chunk of tokens at `row`, a multiple of 64, and columns from `column` on."""
    tma.async_copy_global_to_shared(descriptor, [0, row // 16, 0, column], barrier, _ordered(to), pred=wanted)


@gluon.jit
def _fetch(descriptor, row, column, barrier, to, wanted):
    mbarrier.expect(barrier, 2 * to.shape[0] * to.shape[1], pred=wanted)
    _copy(descriptor, row, column, barrier, to, wanted)
