"""What the sweeps with LRPE for Hopper GPUs have in common: angles, and tiles of keys and queries [channel, token].

Keys and queries are turned by warps of their own, into a cosine and a sine half beside each other in shared memory, two
chunks deep; they do all that is worked out number by number, and the other warps multiply matrices.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from linnet.ops.additive.hopper import TINY

TURN_HIGH = gl.constexpr(0.15915493667125702)  # as in `linnet.ops.angles`
TURN_LOW = gl.constexpr(6.420638326565253e-09)
TWO_PI = gl.constexpr(6.283185307179586)


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
def _inverse(mass):
    mass = gl.maximum(mass, TINY)
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [mass], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _double(x, y):
    """[channel, parts, n] and as much again to [channel, parts, 2 n]."""
    return gl.join(x, y).permute((0, 1, 3, 2)).reshape((x.shape[0], x.shape[1], 2 * x.shape[2]))


@gluon.jit
def _sweep_angles(place, high, low, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Cosine and sine [channel, C] of C tokens from `place` on, in a layout of products of 4 by 1 or 4 by 2 warps.

    Those of 8 tokens are worked out; the rest are these, turned by 8, 16 and 32 tokens.
    """
    PARTS: gl.constexpr = LAYOUT.warps_per_cta[1]
    SEED: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=LAYOUT.warps_per_cta, instr_shape=[16, 8, 16]
    )
    high = gl.convert_layout(high, gl.SliceLayout(1, SEED))
    low = gl.convert_layout(low, gl.SliceLayout(1, SEED))
    token = gl.arange(0, 8 * PARTS, gl.SliceLayout(0, SEED))
    place += (token // 8 * (C // PARTS) + token % 8).to(gl.float32)
    cos, sin = _turns(place, high, low, gl.zeros([high.shape[0], 8 * PARTS], gl.float32, SEED))
    step_cos, step_sin = _cosine_sine(gl.full_like(high, 8.0), high, low)
    cos = cos.reshape((high.shape[0], PARTS, 8))
    sin = sin.reshape((high.shape[0], PARTS, 8))
    for doubling in gl.static_range(3):
        if 8 << doubling < C // PARTS:
            c = gl.convert_layout(step_cos, _rows(cos))[:, None, None]
            s = gl.convert_layout(step_sin, _rows(cos))[:, None, None]
            more_cos = cos * c - sin * s
            sin = _double(sin, sin * c + cos * s)
            cos = _double(cos, more_cos)
            step_cos, step_sin = 1 - 2 * step_sin * step_sin, 2 * step_sin * step_cos
    cos = gl.convert_layout(cos.reshape((high.shape[0], C)), LAYOUT, assert_trivial=True)
    return cos, gl.convert_layout(sin.reshape((high.shape[0], C)), LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def _rows(x):
    """The layout of [channel] of a tile [channel, parts, tokens]."""
    return gl.SliceLayout(1, gl.SliceLayout(2, x.type.layout))


@gluon.jit
def _load(tile, LAYOUT: gl.constexpr):
    """A tile [token, channel] of shared memory as [channel, token] in the registers of a product's result."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    return gl.convert_layout(tile.permute((1, 0)).load(OPERAND), LAYOUT).to(gl.float32)


@gluon.jit
def _angles(positions, row, place, high, low, LAYOUT: gl.constexpr, C: gl.constexpr, PLACED: gl.constexpr):
    """Places [C] of a chunk's tokens, and cosine and sine [channel, C]."""
    ACROSS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    if PLACED:
        tokens = gl.load(positions + row.to(gl.int64) + gl.arange(0, C, ACROSS)).to(gl.float32)
        cos, sin = _turns(tokens, high, low, gl.zeros([high.shape[0], C], gl.float32, LAYOUT))
    else:
        tokens = (place + gl.arange(0, C, ACROSS)).to(gl.float32)
        cos, sin = _sweep_angles(place.to(gl.float32), high, low, LAYOUT, C)
    return tokens, cos, sin


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
