"""Functions inside Triton kernels that the kernels of several ops share."""

import triton
import triton.language as tl
from triton.language.extra import cuda, libdevice

KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)  # else maximum and minimum of NaN are the other operand
LOG2_E = tl.constexpr(1.4426950408889634)
TURN_HIGH = tl.constexpr(0.15915493667125702)  # 1 / (2 pi) in float32, and the rest of it
TURN_LOW = tl.constexpr(6.420638326565253e-09)
TWO_PI = tl.constexpr(6.283185307179586)
ROUNDS = tl.constexpr(12582912.0)  # 1.5 x 2^23: float32 has whole numbers only around it


@triton.jit
def after_previous(OVERLAPS: tl.constexpr):
    """What follows may read the results of the kernel before, and the next kernel may start.

    A kernel that is started with `launch_pdl` (programmatic dependent launch) may begin before the one before it has
    ended, so it calls this before it reads or writes anything that a kernel before may have written.
    """
    if OVERLAPS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def span(offsets, n, T, DOCUMENTS: tl.constexpr):
    """The first row of [B*T] of sequence or document n, and its length."""
    if DOCUMENTS:
        begin = tl.minimum(tl.maximum(tl.load(offsets + n), 0), T).to(tl.int64)
        end = tl.maximum(tl.minimum(tl.load(offsets + n + 1), T), begin).to(tl.int64)
    else:
        begin = n.to(tl.int64) * T
        end = begin + T
    return begin, (end - begin).to(tl.int32)


@triton.jit
def identify(pid, N, H: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROLES: tl.constexpr):
    """Of a program, of which there are N H for each block of columns, role and segment: its block, its role, its
    sequence and head in one number and each alone, and its segment."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    nh = (pid // (BLOCKS * ROLES)) % (N * H)
    return pid % BLOCKS, (pid // BLOCKS) % ROLES, nh, nh // H, nh % H, pid // (BLOCKS * ROLES * N * H)


@triton.jit
def take_columns(state, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a program of a step, which has some columns of the state [K, V] of a head: its block of columns, its head over
    the batch, the sequence and the head in it; rows and columns, where they begin in memory, and which exist."""
    BLOCKS: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    i, j = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    state += head.to(tl.int64) * (K * V) + i[:, None] * V
    return block, head, (head // H).to(tl.int64), head % H, i, j, state, (i < K)[:, None] & (j < V)[None, :]


@triton.jit
def load_tile(pointer, offsets, rows, columns, left, other, WIDTH: tl.constexpr, PADDED: tl.constexpr,
              EVEN: tl.constexpr):  # fmt: skip
    """A tile of a chunk: `other` in rows from `left` on, unless EVEN, and if PADDED in columns from WIDTH on."""
    if EVEN:
        if PADDED:
            tile = tl.load(pointer + offsets, mask=(columns < WIDTH)[None, :], other=other)
        else:
            tile = tl.load(pointer + offsets)
    else:
        if PADDED:
            tile = tl.load(pointer + offsets, mask=(rows < left)[:, None] & (columns < WIDTH)[None, :], other=other)
        else:
            tile = tl.load(pointer + offsets, mask=(rows < left)[:, None], other=other)
    return tile


@triton.jit
def load_masked(pointer, at, mask, MASKED: tl.constexpr):
    """What is at `pointer + at`; if MASKED, with zeros outside the mask."""
    if MASKED:
        return tl.load(pointer + at, mask=mask, other=0.0)
    else:
        return tl.load(pointer + at)


@triton.jit
def store_masked(pointer, at, x, mask, MASKED: tl.constexpr):
    """Stores x in the dtype of the pointer; if MASKED, inside the mask."""
    if MASKED:
        tl.store(pointer + at, x.to(pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer + at, x.to(pointer.dtype.element_ty))


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, sigmoid or relu of x; x itself for another name."""
    if ACTIVATION == "silu":
        x *= tl.sigmoid(x)
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    elif ACTIVATION == "relu":
        x = tl.where(x <= 0.0, 0.0, x)
    return x


@triton.jit
def activate_and_differentiate(x, ACTIVATION: tl.constexpr):
    """As `activate`, and the derivative."""
    slope = 1.0
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        slope = share * (1.0 + x * (1.0 - share))
        x *= share
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
        slope = x * (1.0 - x)
    elif ACTIVATION == "relu":
        slope = tl.where(x <= 0.0, 0.0, 1.0)
        x *= slope
    return x, slope


@triton.jit
def cosine_sine(place, frequency, FAST: tl.constexpr):
    """cos and sin of place x frequency (radians, float32).

    With FAST 0 and 1 to about 1e-6 for whole places below 2^24 and products of at most 2.6e7.

    The product is taken in turns (1 turn = 2 pi), in two parts: t theta in float32 is off by 0.01 radian near
    t = 131,072. FAST: 1, by the hardware's functions, good to 5e-7 on the reduced angle. 2, by the same functions of
    the product itself, off by about 1e-7 of the angle, which is below bfloat16's rounding for angles under 30,000
    radians. 0, in float64, for the interpreter.
    """
    if not FAST:
        angle = place.to(tl.float64) * frequency
        return tl.cos(angle).to(tl.float32), tl.sin(angle).to(tl.float32)
    if FAST == 2:
        angle = place * frequency
        return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)
    high = frequency * TURN_HIGH
    low = tl.fma(frequency, tl.full([], TURN_HIGH, tl.float32), -high) + frequency * TURN_LOW
    # Not by a rounded product and its rest: ptxas fuses that product into the difference, and the rest counts twice.
    # Rounded by adding and subtracting a large number: a floor takes the slow unit that sines and exponentials need.
    whole = tl.fma(place, high, tl.full([], ROUNDS, tl.float32)) - ROUNDS
    angle = (tl.fma(place, high, -whole) + place * low) * TWO_PI
    return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)


@triton.jit
def log1p(x):
    """log(1 + x) of x >= 0: the logarithm of the rounded sum, and what rounding took."""
    whole = 1.0 + x
    return tl.log(whole) + (x - (whole - 1.0)) / whole


@triton.jit
def clamp(x, low, high):
    """x, but at least `low` and at most `high`. NaN stays, which minimum and maximum of a GPU would lose."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in float32; x itself from 20 on, as PyTorch's."""
    return tl.where(x > 20.0, x, log1p(tl.exp(tl.where(x > 20.0, 20.0, x))))
