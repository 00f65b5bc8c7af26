"""The Triton kernels of lightning attention; `linnet.ops.lightning.triton` says what they compute and launches them.

DA and DC are the widths of a and c, PA the first one padded to a power of two, BC the columns of a program. A state is
[DA, DC] in memory, or [DC, DA] where `flip` says so.
"""

import triton
import triton.language as tl

from linnet.ops.device import LOG2_E, load_tile


@triton.jit
def _first_row(offsets, n, T, C: tl.constexpr, DOCUMENTS: tl.constexpr, reverse):
    """The row of [B*T] where the first chunk of a sweep begins, and the length of the sequence or document."""
    begin, end = n.to(tl.int64) * 0, n.to(tl.int64) * 0 + T
    if DOCUMENTS:
        begin = tl.minimum(tl.maximum(tl.load(offsets + n), 0), T).to(tl.int64)
        end = tl.maximum(tl.minimum(tl.load(offsets + n + 1), T), begin).to(tl.int64)
        row = tl.where(reverse, end - C, begin)
    else:
        row = n.to(tl.int64) * T + tl.where(reverse, end - C, begin)
    return row, (end - begin).to(tl.int32)


@triton.jit
def _rate(rates, h, HAS_DECAY: tl.constexpr):
    """log2 of the decay per token; the bound keeps a decay to zero exact, as in the chunked form."""
    if HAS_DECAY:
        return tl.maximum(tl.load(rates + h).to(tl.float32), -1e30) * LOG2_E
    return 0.0


@triton.jit
def _load_state(pointer, i, j, flip, DA: tl.constexpr, DC: tl.constexpr, TRANSPOSED: tl.constexpr):
    """[i, j] of a state stored as [DA, DC], or as [DC, DA] if `flip`; [j, i] if TRANSPOSED."""
    mask = (i < DA)[:, None] & (j < DC)[None, :]
    mask_transposed = (j < DC)[:, None] & (i < DA)[None, :]
    if flip:
        transposed = tl.load(pointer + j[:, None] * DA + i[None, :], mask=mask_transposed, other=0.0)
        if TRANSPOSED:
            state = transposed
        else:
            state = tl.trans(transposed)
    else:
        straight = tl.load(pointer + i[:, None] * DC + j[None, :], mask=mask, other=0.0)
        if TRANSPOSED:
            state = tl.trans(straight)
        else:
            state = straight
    return state


@triton.jit
def summarise_kernel(
    b, c, b1, c1, sums, rates, offsets, scale, T, N, G, H: tl.constexpr,
    DA: tl.constexpr, DC: tl.constexpr, C: tl.constexpr, PA: tl.constexpr, BC: tl.constexpr, ROLES: tl.constexpr,
    HAS_DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[ROLES, N, H, G - 1, DA, DC]: of b and c from the first token on, of b1 and c1 from the last."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (DC + BC - 1) // BC
    block = pid % BLOCKS
    reverse = (pid // BLOCKS) % ROLES
    nh = (pid // (BLOCKS * ROLES)) % (N * H)
    g = pid // (BLOCKS * ROLES * N * H)
    n, h = nh // H, nh % H
    if ROLES == 2:
        if reverse > 0:
            b, c = b1, c1
    row, length = _first_row(offsets, n, T, C, DOCUMENTS, reverse > 0)
    rate = _rate(rates, h, HAS_DECAY)
    r, i, j = tl.arange(0, C), tl.arange(0, PA), block * BC + tl.arange(0, BC)
    b += (row * H + h) * DA
    c += (row * H + h) * DC
    b_tile = r[:, None] * (H * DA) + i[None, :]
    c_tile = r[:, None] * (H * DC) + j[None, :]
    r = tl.where(reverse > 0, C - 1 - r, r)
    key = tl.exp2(rate * (C - 1 - r + reverse)) * tl.where(reverse > 0, scale, 1.0)
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    hop = row * 0 + (1 - 2 * reverse) * (H * C)
    state = tl.zeros([PA, BC], tl.float32)
    # A segment that another follows consists of whole chunks; the summaries of the others are not read.
    for x in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = hop * x
        left = length - x * C
        tb = load_tile(b + move * DA, b_tile, r, i, left, 0.0, DA, PA != DA, EVEN).to(OPERAND)
        tc = load_tile(c + move * DC, c_tile, r, j, left, 0.0, DC, DC % BC != 0, EVEN).to(OPERAND)
        tc = (tc * key[:, None]).to(OPERAND)
        state = tl.dot(tl.trans(tb), tc, state * tl.exp2(rate * C), input_precision=PRECISION)
    to = sums + ((reverse * (N * H) + nh).to(tl.int64) * (G - 1) + g) * (DA * DC)
    tl.store(to + i[:, None] * DC + j[None, :], state, mask=(i < DA)[:, None] & (j < DC)[None, :])


@triton.jit
def sweep_kernel(
    a, b, c, o, a1, b1, c1, o1, a2, b2, c2, o2, entry, entry2, leave, sums, rates, offsets,
    scale, T, N, G, H: tl.constexpr,
    DA: tl.constexpr, DC: tl.constexpr, C: tl.constexpr, PA: tl.constexpr, BC: tl.constexpr, ROLES: tl.constexpr,
    REVERSE: tl.constexpr, FLIP: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_ENTRY: tl.constexpr,
    HAS_ENTRY2: tl.constexpr, HAS_LEAVE: tl.constexpr, DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (DC + BC - 1) // BC
    block = pid % BLOCKS
    role = (pid // BLOCKS) % ROLES
    nh = (pid // (BLOCKS * ROLES)) % (N * H)
    g = pid // (BLOCKS * ROLES * N * H)
    n, h = nh // H, nh % H
    # Of three sweeps, the first runs forward, the others back; the last alone has its states as they are stored.
    if ROLES == 3:
        if role == 1:
            a, b, c, o = a1, b1, c1, o1
        if role == 2:
            a, b, c, o = a2, b2, c2, o2
        if HAS_ENTRY or HAS_ENTRY2:
            if role > 0:
                entry = entry2
        reverse = (role > 0).to(tl.int32)
        flip = role < 2
        has_entry = (HAS_ENTRY & (role == 0)) | (HAS_ENTRY2 & (role > 0))
        has_leave = HAS_LEAVE & (role == 2)
    else:
        reverse = tl.full([], REVERSE, tl.int32)
        flip = FLIP
        has_entry = HAS_ENTRY
        has_leave = HAS_LEAVE
    row, length = _first_row(offsets, n, T, C, DOCUMENTS, reverse > 0)
    rate = _rate(rates, h, HAS_DECAY)
    r, i, j = tl.arange(0, C), tl.arange(0, PA), block * BC + tl.arange(0, BC)
    a += (row * H + h) * DA
    b += (row * H + h) * DA
    c += (row * H + h) * DC
    o += (row * H + h) * DC
    ab_tile = r[:, None] * (H * DA) + i[None, :]
    co_tile = r[:, None] * (H * DC) + j[None, :]
    r = tl.where(reverse > 0, C - 1 - r, r)  # from here on in the order of the sweep
    chunks = tl.cdiv(length, C)
    per = tl.cdiv(chunks, G)
    hop = row * 0 + (1 - 2 * reverse) * (H * C)

    if TRANSPOSED:
        state = tl.zeros([BC, PA], tl.float32)
        apart = r[None, :] - r[:, None]
    else:
        state = tl.zeros([PA, BC], tl.float32)
        apart = r[:, None] - r[None, :]
    if HAS_ENTRY or HAS_ENTRY2:
        if has_entry:
            state += _load_state(entry + nh.to(tl.int64) * (DA * DC), i, j, flip, DA, DC, TRANSPOSED)
    if SPLIT:
        whole = tl.exp2(rate * per * C)
        for before in tl.range(0, g):
            summary = sums + ((reverse * (N * H) + nh).to(tl.int64) * (G - 1) + before) * (DA * DC)
            state = state * whole + _load_state(summary, i, j, flip, DA, DC, TRANSPOSED)

    # The scale belongs to o or to do: to what leaves the state in a plain sweep, to what enters it in a reversed one.
    inside = tl.where(apart >= 0, tl.exp2(rate * tl.maximum(apart, 0)) * scale, 0.0)
    since = tl.exp2(rate * (r + 1 - reverse)) * tl.where(reverse > 0, 1.0, scale)
    key_scale = tl.where(reverse > 0, scale, 1.0)
    for x in tl.range(g * per, tl.minimum((g + 1) * per, chunks), num_stages=STAGES):
        move = hop * x
        left = length - x * C
        size = tl.minimum(left, C)
        ta = load_tile(a + move * DA, ab_tile, r, i, left, 0.0, DA, PA != DA, EVEN).to(OPERAND)
        tb = load_tile(b + move * DA, ab_tile, r, i, left, 0.0, DA, PA != DA, EVEN).to(OPERAND)
        tc = load_tile(c + move * DC, co_tile, r, j, left, 0.0, DC, DC % BC != 0, EVEN).to(OPERAND)
        until = tl.exp2(rate * tl.maximum(size - 1 - r + reverse, 0)) * key_scale
        over = tl.exp2(rate * size)
        if TRANSPOSED:
            scores = tl.dot(tb, tl.trans(ta), input_precision=PRECISION)
            out = tl.dot(state.to(OPERAND), tl.trans(ta), input_precision=PRECISION) * since[None, :]
            out = tl.dot(tl.trans(tc), (scores * inside).to(OPERAND), out, input_precision=PRECISION)
            decayed = (tl.trans(tc) * until[None, :]).to(OPERAND)
            state = tl.dot(decayed, tb, state * over, input_precision=PRECISION)
            out = tl.trans(out)
        else:
            scores = tl.dot(ta, tl.trans(tb), input_precision=PRECISION)
            out = tl.dot(ta, state.to(OPERAND), input_precision=PRECISION) * since[:, None]
            out = tl.dot((scores * inside).to(OPERAND), tc, out, input_precision=PRECISION)
            decayed = (tc * until[:, None]).to(OPERAND)
            state = tl.dot(tl.trans(tb), decayed, state * over, input_precision=PRECISION)
        to = o + move * DC + co_tile
        if EVEN and DC % BC == 0:
            tl.store(to, out.to(o.dtype.element_ty))
        else:
            tl.store(to, out.to(o.dtype.element_ty), mask=(r < left)[:, None] & (j < DC)[None, :])

    if HAS_LEAVE:
        # By the program of the last chunk; for an empty document by the first.
        if has_leave & ((g + 1) * per >= chunks) & ((g * per < chunks) | (g == 0)):
            to = leave + nh.to(tl.int64) * (DA * DC)
            if TRANSPOSED:
                tl.store(to + i[None, :] * DC + j[:, None], state, mask=(j < DC)[:, None] & (i < DA)[None, :])
            else:
                tl.store(to + i[:, None] * DC + j[None, :], state, mask=(i < DA)[:, None] & (j < DC)[None, :])
