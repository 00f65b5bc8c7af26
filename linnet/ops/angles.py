"""Cosine and sine of a position times a frequency, inside a Triton kernel."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

TURN_HIGH = tl.constexpr(0.15915493667125702)  # 1 / (2 pi) in float32, and what is left of it
TURN_LOW = tl.constexpr(6.420638326565253e-09)
TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def cosine_sine(place, frequency, FAST: tl.constexpr):
    """cos and sin of place x frequency (radians, float32), to about 1e-6 for any whole place below 2^24.

    The product is taken in turns, in two parts, because t theta in float32 is off by 0.01 radian near t = 131,072.
    FAST: by the hardware's functions, good to 5e-7 on the reduced angle. False: in float64, for the interpreter.
    """
    if not FAST:
        angle = place.to(tl.float64) * frequency
        return tl.cos(angle).to(tl.float32), tl.sin(angle).to(tl.float32)
    high = frequency * TURN_HIGH
    low = tl.fma(frequency, tl.full([], TURN_HIGH, tl.float32), -high) + frequency * TURN_LOW
    # Not by a rounded product and its rest: ptxas fuses that product into the difference, and the rest counts twice.
    whole = tl.floor(place * high + 0.5)
    angle = (tl.fma(place, high, -whole) + place * low) * TWO_PI
    return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)
