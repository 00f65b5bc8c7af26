"""What the sweeps with LRPE for Hopper GPUs have in common: the order of tokens in shared memory, angles, references.

Keys and queries are rotated by warps of their own, into cosines and sines in shared memory, two chunks deep; these
warps do everything that is elementwise, 32 channels at a time for few registers, and the other warps multiply matrices.

Row r of a tile has token 16 (r / 2 % 4) + 2 (r / 8) + r % 2 of its chunk. A thread, whose part of a tile [channel, row]
is what ldmatrix gives it, then has 16 consecutive tokens of a channel, so that running sums are its own additions and
three shuffles. Products over a chunk are the same in any order, if all of its tiles have it; masks and angles ask
`_token`.

References move in steps of at least 2^ROOM, so that a state is seldom scaled (dq and dk: mostly by 1). A denominator
begins a chunk with at least TINY, which keeps its inverse finite; that is felt where a logit rises by more than 90 in a
chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from linnet.ops.additive.hopper.kernels import LOG2_E, SHIFT

TURN_HIGH = gl.constexpr(0.15915493667125702)  # as in `linnet.ops.angles`
TURN_LOW = gl.constexpr(6.420638326565253e-09)
TWO_PI = gl.constexpr(6.283185307179586)
ROOM = gl.constexpr(12.0)


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


@gluon.jit
def _frequencies(theta):
    """Turns a token, in two parts."""
    high = theta * TURN_HIGH
    return high, gl.fma(theta, gl.full_like(theta, TURN_HIGH), -high) + theta * TURN_LOW


@gluon.jit
def _cosine_sine(position, high, low):
    """Cosine and sine of tensors of one shape, as `linnet.ops.angles.cosine_sine`."""
    whole = gl.floor(gl.fma(position, high, gl.full_like(position, 0.5)))
    angle = (gl.fma(position, high, -whole) + position * low) * TWO_PI
    cos = gl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], gl.float32, is_pure=True, pack=1)
    sin = gl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], gl.float32, is_pure=True, pack=1)
    return cos, sin


@gluon.jit
def _angle_tile(position, high, low, empty):
    """Cosine and sine [channel, token]."""
    return _cosine_sine(empty + position[None, :], empty + high[:, None], empty + low[:, None])


@gluon.jit
def _power(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _invert_fast(denominator):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _move(reference, highest):
    """The reference of a chunk: moved only where keys would pass 2^(SHIFT + ROOM), and then down to 2^SHIFT."""
    highest *= LOG2_E
    return gl.where(highest - reference > SHIFT + ROOM, highest - SHIFT, reference)


@gluon.jit
def _rates(theta):
    """Turns a token in two parts, and cosine and sine of two tokens."""
    high, low = _frequencies(theta)
    cos, sin = _cosine_sine(gl.full_like(high, 2.0), high, low)
    return high, low, cos, sin


@gluon.jit
def _put_rates(rates_of_channels, AT: gl.constexpr, rates):
    for i in gl.static_range(4):
        rates_of_channels.index(i).slice(AT, rates[i].shape[0]).store(rates[i])


@gluon.jit
def _take_rates(rates_of_channels, PART: gl.constexpr):
    """`_rates` of 32 channels."""
    CHANNEL: gl.constexpr = gl.SliceLayout(1, _rows_layout(8))
    high = rates_of_channels.index(0).slice(32 * PART, 32).load(CHANNEL)
    low = rates_of_channels.index(1).slice(32 * PART, 32).load(CHANNEL)
    cos = rates_of_channels.index(2).slice(32 * PART, 32).load(CHANNEL)
    return high, low, cos, rates_of_channels.index(3).slice(32 * PART, 32).load(CHANNEL)


@gluon.jit
def _begin_angles(position, rates, LAYOUT: gl.constexpr):
    """Where `_next_angles` begins: cosine and sine [channel, 8 rows] of the chunk at `position`, those of the next 8
    rows, and twice the cosine of the two tokens between them."""
    high, low, step_cos, step_sin = rates
    token = position.to(gl.float32) + _token(gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))).to(gl.float32)
    cos, sin = _angle_tile(token, high, low, gl.zeros([high.shape[0], 8], gl.float32, LAYOUT))
    c = step_cos[:, None]
    s = step_sin[:, None]
    return cos, sin, cos * c - sin * s, sin * c + cos * s, (2 * step_cos)[:, None]


@gluon.jit
def _scaled(angles, scale):
    cos, sin, next_cos, next_sin, twice = angles
    return cos * scale, sin * scale, next_cos * scale, next_sin * scale, twice


@gluon.jit
def _next_angles(angles, LAYOUT: gl.constexpr):
    """Cosine and sine [channel, 16] of 16 rows, and what those of the next ones come from.

    cos(x + 2) = 2 cos(2) cos(x) - cos(x - 2), and so for the sine, is two operations where a turn would be four.
    """
    cos, sin, next_cos, next_sin, twice = angles
    cosines = _beside(cos, next_cos, LAYOUT)
    sines = _beside(sin, next_sin, LAYOUT)
    cos = twice * next_cos - cos
    sin = twice * next_sin - sin
    next_cos = twice * cos - next_cos
    next_sin = twice * sin - next_sin
    return cosines, sines, (cos, sin, next_cos, next_sin, twice)


@gluon.jit
def _chunk_angles(positions, row, position, rates, LAYOUT: gl.constexpr, HAS_POSITIONS: gl.constexpr):
    """Places [64] of a chunk's rows, and cosine and sine [channel, 64]."""
    rows = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    if HAS_POSITIONS:
        tokens = gl.load(positions + row.to(gl.int64) + _token(rows)).to(gl.float32)
        cosines, sines = _angle_tile(tokens, rates[0], rates[1], gl.zeros([rates[0].shape[0], 64], gl.float32, LAYOUT))
    else:
        # The first part is one number of a thread, the second one is known when compiled.
        tokens = (position + _run(rows)).to(gl.float32) + _within(rows).to(gl.float32)
        c0, s0, angles = _next_angles(_begin_angles(position, rates, LAYOUT), LAYOUT)
        c1, s1, angles = _next_angles(angles, LAYOUT)
        c2, s2, angles = _next_angles(angles, LAYOUT)
        c3, s3, angles = _next_angles(angles, LAYOUT)
        cosines = _beside(_beside(c0, c1, LAYOUT), _beside(c2, c3, LAYOUT), LAYOUT)
        sines = _beside(_beside(s0, s1, LAYOUT), _beside(s2, s3, LAYOUT), LAYOUT)
    return tokens, cosines, sines


@gluon.jit
def _take_both(both, LAYOUT: gl.constexpr):
    """Of a product whose rows are as those of `_alternate`: the ones of cosines, and the ones of sines."""
    cosines, sines = both.reshape((8, 2, 8, both.shape[1])).permute((0, 2, 3, 1)).split()
    cosines = gl.convert_layout(cosines.reshape((64, both.shape[1])), LAYOUT, assert_trivial=True)
    return cosines, gl.convert_layout(sines.reshape((64, both.shape[1])), LAYOUT, assert_trivial=True)


@gluon.jit
def _decays_of_rows(decays, LAYOUT: gl.constexpr):
    """Factors of the rows of a state, which are as those of `_alternate`."""
    factors = decays.load(gl.SliceLayout(1, gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0])))
    both = gl.join(factors, factors).reshape((8, 8, 2)).permute((0, 2, 1)).reshape((128,))
    return gl.convert_layout(both, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def _channels(rows, block):
    """Channels of the rows of a state, and which of them are of sines."""
    return block * 64 + rows // 16 * 8 + rows % 8, rows // 8 % 2


@gluon.jit
def _score(a, b, weights, slot, C: gl.constexpr, REVERSE: gl.constexpr):
    """Weights by 4 warps: a b^T up to the row's token (REVERSE: from it on)."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    down = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    ahead = _token(down) - _run(right)  # few numbers of a thread; `_within` is known when compiled
    inside = ahead >= _within(right) if REVERSE else ahead <= _within(right)
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    scores = warpgroup_mma(a.index(slot), b.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    weights.index(slot).store(gl.where(inside, scores, 0.0).to(gl.bfloat16))


@gluon.jit
def _angles_of_quarter(angles, positions, row, rates, PART: gl.constexpr, HAS_POSITIONS: gl.constexpr):
    """As `_next_angles`, of 16 rows of the chunk at `row`, wherever their tokens are."""
    PARTS: gl.constexpr = _rows_layout(16)
    if HAS_POSITIONS:
        tokens = row.to(gl.int64) + _token(16 * PART + gl.arange(0, 16, gl.SliceLayout(0, PARTS)))
        across = gl.load(positions + tokens).to(gl.float32)
        high = gl.convert_layout(rates[0], gl.SliceLayout(1, PARTS), assert_trivial=True)
        low = gl.convert_layout(rates[1], gl.SliceLayout(1, PARTS), assert_trivial=True)
        cosines, sines = _angle_tile(across, high, low, gl.zeros([32, 16], gl.float32, PARTS))
    else:
        cosines, sines, angles = _next_angles(angles, PARTS)
    return cosines, sines, angles


@gluon.jit
def _times(x, cos, sin):
    return (x * cos).to(gl.bfloat16), (x * sin).to(gl.bfloat16)


@gluon.jit
def _rotate(x, angles, positions, row, rates, HAS_POSITIONS: gl.constexpr):
    """A tile [32 channels, row] times its cosines and sines, 8 channels of these and of those in turn."""
    x0, x1, x2, x3 = _quarters(x)
    c, s, angles = _angles_of_quarter(angles, positions, row, rates, 0, HAS_POSITIONS)
    c0, s0 = _times(x0, c, s)
    c, s, angles = _angles_of_quarter(angles, positions, row, rates, 1, HAS_POSITIONS)
    c1, s1 = _times(x1, c, s)
    c, s, angles = _angles_of_quarter(angles, positions, row, rates, 2, HAS_POSITIONS)
    c2, s2 = _times(x2, c, s)
    c, s, angles = _angles_of_quarter(angles, positions, row, rates, 3, HAS_POSITIONS)
    c3, s3 = _times(x3, c, s)
    return _alternate(_four(c0, c1, c2, c3), _four(s0, s1, s2, s3))


@gluon.jit
def _boundary_pointers(boundaries, first, CHANNELS: gl.constexpr, K: gl.constexpr):
    """Places of references of 32 channels from `first` on, then of their denominators, and so on."""
    at = gl.arange(0, 2 * CHANNELS, gl.BlockedLayout([1], [32], [4], [0]))
    return boundaries + first + at // 64 * 32 + at // 32 % 2 * K + at % 32


@gluon.jit
def _fetch_boundaries(boundary_buffer, boundaries, slot, chunk, AT: gl.constexpr, H: gl.constexpr, K: gl.constexpr):
    """What `_boundary_pointers` says of a chunk: a load into registers would be waited for at once."""
    to = boundary_buffer.index(slot).slice(2 * AT, boundaries.shape[0])
    async_copy.async_copy_global_to_shared(to, boundaries + chunk * (2 * H * K))
    async_copy.commit_group()


@gluon.jit
def _take_boundaries(boundary_buffer, slot, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """Reference and denominator of 32 channels."""
    return boundary_buffer.index(slot).slice(64 * PART, 32).load(LAYOUT), boundary_buffer.index(slot).slice(
        64 * PART + 32, 32
    ).load(LAYOUT)
