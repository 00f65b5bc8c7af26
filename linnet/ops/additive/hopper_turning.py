"""What the sweeps with LRPE for Hopper GPUs have in common: angles, and tiles of keys and queries [channel, token].

Keys and queries are turned by warps of their own, into a cosine and a sine half in shared memory, two chunks deep; they
do all that is worked out number by number, 16 tokens at a time for few registers, and the other warps multiply
matrices.

References move in steps of at least 2^ROOM, so that a state is seldom scaled. TINY beside each mass keeps its inverse
finite; it is felt where a logit rises by more than 90 in a chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from linnet.ops.additive.hopper import LOG2_E, SHIFT

TURN_HIGH = gl.constexpr(0.15915493667125702)  # as in `linnet.ops.angles`
TURN_LOW = gl.constexpr(6.420638326565253e-09)
TWO_PI = gl.constexpr(6.283185307179586)
ROOM = gl.constexpr(12.0)


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
def _power(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _invert_fast(mass):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [mass], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _move(reference, highest):
    """The reference of a chunk: moved only where keys would pass 2^(SHIFT + ROOM), and then down to 2^SHIFT."""
    highest *= LOG2_E
    return gl.where(highest - reference > SHIFT + ROOM, highest - SHIFT, reference)


@gluon.jit
def _beside(x, y, LAYOUT: gl.constexpr):
    """Two tiles [channel, token], one after the other."""
    both = gl.join(x, y).permute((0, 2, 1)).reshape((x.shape[0], 2 * x.shape[1]))
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def _begin_angles(place, high, low, LAYOUT: gl.constexpr):
    """What `_next_angles` begins with.

    Cosine and sine [channel, 8] of 8 tokens from `place` on, those of the 8 next, and twice the cosine of 8 tokens.
    """
    token = place.to(gl.float32) + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT)).to(gl.float32)
    cos, sin = _turns(token, high, low, gl.zeros([high.shape[0], 8], gl.float32, LAYOUT))
    step_cos, step_sin = _cosine_sine(gl.full_like(high, 8.0), high, low)
    c = step_cos[:, None]
    s = step_sin[:, None]
    return cos, sin, cos * c - sin * s, sin * c + cos * s, (2 * step_cos)[:, None]


@gluon.jit
def _next_angles(angles, LAYOUT: gl.constexpr):
    """Cosine and sine [channel, 16] of 16 tokens, and what those of the next ones come from.

    cos(x + 8) = 2 cos(8) cos(x) - cos(x - 8), and so for the sine, is two operations where a turn would be four.
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
def _part_angles(
    angles, positions, row, high, low, PART: gl.constexpr, LAYOUT: gl.constexpr, PLACED: gl.constexpr
):  # fmt: skip
    """As `_next_angles`, of a part of 16 tokens of the chunk at `row`, wherever they are."""
    if PLACED:
        tokens = row.to(gl.int64) + 16 * PART + gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
        across = gl.load(positions + tokens).to(gl.float32)
        cosines, sines = _turns(across, high, low, gl.zeros([high.shape[0], 16], gl.float32, LAYOUT))
    else:
        cosines, sines, angles = _next_angles(angles, LAYOUT)
    return cosines, sines, angles


@gluon.jit
def _chunk_angles(positions, row, place, high, low, LAYOUT: gl.constexpr, PLACED: gl.constexpr):
    """Places [64] of a chunk's tokens, and cosine and sine [channel, 64]."""
    ACROSS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    if PLACED:
        tokens = gl.load(positions + row.to(gl.int64) + gl.arange(0, 64, ACROSS)).to(gl.float32)
        cosines, sines = _turns(tokens, high, low, gl.zeros([high.shape[0], 64], gl.float32, LAYOUT))
    else:
        tokens = (place + gl.arange(0, 64, ACROSS)).to(gl.float32)
        c0, s0, angles = _next_angles(_begin_angles(place, high, low, LAYOUT), LAYOUT)
        c1, s1, angles = _next_angles(angles, LAYOUT)
        c2, s2, angles = _next_angles(angles, LAYOUT)
        c3, s3, angles = _next_angles(angles, LAYOUT)
        cosines = _beside(_beside(c0, c1, LAYOUT), _beside(c2, c3, LAYOUT), LAYOUT)
        sines = _beside(_beside(s0, s1, LAYOUT), _beside(s2, s3, LAYOUT), LAYOUT)
    return tokens, cosines, sines


@gluon.jit
def _load(tile, LAYOUT: gl.constexpr):
    """A tile [token, channel] of shared memory as [channel, token] in the registers of a product's result."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    return gl.convert_layout(tile.permute((1, 0)).load(OPERAND), LAYOUT).to(gl.float32)


@gluon.jit
def _put(tile, HALF: gl.constexpr, PART: gl.constexpr, values):
    """Stores 64 channels of 16 tokens (or as many as `values` has)."""
    TOKENS: gl.constexpr = values.shape[1]
    tile.slice(HALF * 64, 64, dim=1).slice(TOKENS * PART, TOKENS).permute((1, 0)).store(values.to(gl.bfloat16))


@gluon.jit
def _put_both(tile, PART: gl.constexpr, cosines, sines):
    """Stores what belongs to the cosines and sines of 64 channels, of 32 tokens: 8 channels of one, then of the other.

    A thread that has a channel's row of a product's result so has both.
    """
    both = gl.join(cosines, sines).reshape((8, 8, 32, 2)).permute((0, 3, 1, 2)).reshape((128, 32))
    tile.slice(32 * PART, 32).permute((1, 0)).store(both)


@gluon.jit
def _take_both(both, LAYOUT: gl.constexpr):
    """A product's result whose rows are such columns: those of cosines, and those of sines."""
    cosines, sines = both.reshape((8, 2, 8, both.shape[1])).permute((0, 2, 3, 1)).split()
    cosines = gl.convert_layout(cosines.reshape((64, both.shape[1])), LAYOUT, assert_trivial=True)
    return cosines, gl.convert_layout(sines.reshape((64, both.shape[1])), LAYOUT, assert_trivial=True)


@gluon.jit
def _moved(keeps):
    """Whether a state must be scaled, in 8 warps: as soon as each has seen all factors of its channels."""
    ALL: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([2, 1], [32, 1], [1, 8], [0, 1]))
    return gl.min(keeps.load(ALL), 0) < 1.0


@gluon.jit
def _both_factors(keeps, LAYOUT: gl.constexpr):
    """Factors of the rows of a state."""
    factors = keeps.load(gl.SliceLayout(1, gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0])))
    both = gl.join(factors, factors).reshape((8, 8, 2)).permute((0, 2, 1)).reshape((128,))
    return gl.convert_layout(both, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def _channels(rows, block):
    """Channels of the rows of a state, and which of them are of sines."""
    return block * 64 + rows // 16 * 8 + rows % 8, rows // 8 % 2


@gluon.jit
def _sum_up(key, total, LAYOUT: gl.constexpr, REVERSE: gl.constexpr):
    """Sums [channel, 16] of rounded keys up to each token (REVERSE: from it on) and of all, both beside `total`.

    These are products of single warps: they do not wait for the other ones' products.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=LAYOUT, k_width=2)
    down = gl.arange(0, 16, gl.SliceLayout(1, RIGHT))[:, None]
    right = gl.arange(0, 16, gl.SliceLayout(0, RIGHT))[None, :]
    inside = down >= right if REVERSE else down <= right
    key = gl.convert_layout(key.to(gl.bfloat16), LEFT)
    sums = mma_v2(key, gl.where(inside, 1.0, 0.0).to(gl.bfloat16), total)
    return sums, mma_v2(key, gl.full([16, 16], 1.0, gl.bfloat16, RIGHT), total)


@gluon.jit
def _score(a, b, weights, slot, C: gl.constexpr, REVERSE: gl.constexpr):
    """Weights by 4 warps: a b^T up to the row's token (REVERSE: from it on)."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    down = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None]
    right = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    inside = down >= right if REVERSE else down <= right
    no_scores = gl.zeros([C, C], gl.float32, SCORES)
    scores = warpgroup_mma(a.index(slot), b.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    weights.index(slot).store(gl.where(inside, scores, 0.0).to(gl.bfloat16))


@gluon.jit
def _fetch1(descriptor, row, column, barrier, to, wanted, BYTES: gl.constexpr):
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(descriptor, [row, column], barrier, to, pred=wanted)


@gluon.jit
def _fetch2(d0, d1, row, at0, at1, s0, s1, barrier, wanted, BYTES: gl.constexpr):
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(d0, [row, at0], barrier, s0, pred=wanted)
    tma.async_copy_global_to_shared(d1, [row, at1], barrier, s1, pred=wanted)


@gluon.jit
def _fetch3(d0, d1, d2, row, at0, at1, at2, s0, s1, s2, barrier, wanted, BYTES: gl.constexpr):
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(d0, [row, at0], barrier, s0, pred=wanted)
    tma.async_copy_global_to_shared(d1, [row, at1], barrier, s1, pred=wanted)
    tma.async_copy_global_to_shared(d2, [row, at2], barrier, s2, pred=wanted)
