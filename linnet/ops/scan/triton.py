"""The diagonal recurrence on a GPU: one launch that reads everything once.

The sequences are cut into tiles of P rows of L consecutive tokens by BD channels. A program loads a tile into
registers, walks its rows thread by thread to compute the decay over the tile and its end from a zero state, gets the
initial state of the tile from the tiles before it, and walks the rows again from there. Tiles are handed out by a
ticket, so a tile only waits for tiles that have started. They exchange states through the outer cache, about 1 % of the
traffic. Tiles come in groups of G: inside a group all summaries are published at once, so that only one step in G waits
for the one before. Where channels times sequences fill the GPU no tile waits, and G is 1.

The backward is the same sweep from the last token, over w_t = conj(a_t) (dh_t + w_{t+1}), and reads h as the forward
wrote it: in 16 bits, so the gradient of the decay has the precision of its inputs. A mark at the first and the last
token of each document replaces the state of the token before by the initial state of the document.

Values are pairs (real, imaginary); in a real scan the second is ignored. Tiles communicate through `slots`, 64-bit
words that start as EMPTY: slot 0 counts the tickets, then come the summaries of tiles, then the carries into groups.
A word is written once and whole, so reading it until it is not EMPTY needs no fence.

float64 runs in the chunked form.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import backend
from linnet.ops.device import LOG2_E, load_masked, store_masked
from linnet.ops.documents import count_states
from linnet.ops.launching import Launcher, align, cdiv, launch, next_power_of_2
from linnet.ops.scan import chunked


class Tiles(NamedTuple):
    """Rows per tile (one per warp), tokens per row, channels, and tiles per group."""

    rows: int
    length: int
    channels: int
    group: int


def choose_tiles(sequences: int, channels: int, is_complex: bool, backward: bool) -> Tiles:
    """On an H200 the fastest of those in docs/negative-results.md."""
    chains = sequences * cdiv(channels, 64)
    group = 1 if chains >= 512 else 8
    if is_complex:
        return Tiles(4, 8, 64, group)
    if chains >= 512 or (backward and chains >= 64):
        return Tiles(4, 16, 64, group)
    return Tiles(8, 16, 64, group) if backward else Tiles(4, 32, 64, group)


def scan_forward(x, log_decay, theta, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """h like x, and the final state; arguments as in `diagonal_scan`."""
    if backend.is_wide("diagonal_scan", x, log_decay):
        return chunked.scan_forward(x, log_decay, theta, initial_state, cu_seqlens)
    x, log_decay, theta, initial_state = (align(y) for y in (x, log_decay, theta, initial_state))
    h, final = torch.empty_like(x), _empty_state(x, cu_seqlens)
    plan = _plan(False, x.dtype, *_describe(log_decay, theta, cu_seqlens), (initial_state is not None,))
    marks = _mark(log_decay, initial_state, final, cu_seqlens)
    plan.launch(x, log_decay, theta, h, initial_state, final, _make_slots(x, plan), *marks)
    return h, final


def scan_backward(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal) -> tuple[Tensor, ...]:
    """Gradients to x, log_decay, theta (empty without it) and the initial state; `h` is the forward's output."""
    if backend.is_wide("diagonal_scan", x, log_decay):
        return chunked.scan_backward(x, log_decay, theta, initial_state, cu_seqlens, h, dh, dfinal)
    log_decay, theta, initial_state = (align(y) for y in (log_decay, theta, initial_state))
    h, dh, dfinal = (align(y) for y in (h, dh, dfinal))
    dx, dlog_decay, dinitial = torch.empty_like(h), torch.empty_like(log_decay), _empty_state(x, cu_seqlens)
    flags = initial_state is not None, dfinal is not None
    plan = _plan(True, x.dtype, *_describe(log_decay, theta, cu_seqlens), flags)
    marks = _mark(log_decay, dfinal, dinitial, cu_seqlens)
    turns = None if theta is None else x.new_empty(plan.tiles, *log_decay.shape[::2], dtype=torch.float32)
    plan.launch(
        log_decay, theta, h, dh, dx, dlog_decay, turns, initial_state, dfinal, dinitial, _make_slots(x, plan),
        *marks,
    )  # fmt: skip
    dtheta = dinitial.new_empty(0) if theta is None else turns.sum((0, 1)).to(theta.dtype)
    return dx, dlog_decay, dtheta, dinitial


class Plan(NamedTuple):
    """A launch, its tiles per sequence, and the words of `slots`."""

    launch: Launcher
    tiles: int
    words: int


@functools.lru_cache(1024)
def _plan(backward, dtype, shape, decay_dtype, theta_dtype, has_documents, device, given) -> Plan:
    B, T, D = shape
    is_complex = theta_dtype is not None
    tiles = choose_tiles(B, D, is_complex, backward)
    size = tiles.rows * tiles.length
    count, blocks = cdiv(T, size), cdiv(D, tiles.channels)
    masked = T % size > 0 or D % tiles.channels > 0
    constants = (B, T, count, D, *tiles, is_complex, *given, has_documents, masked)
    kernel = backward_kernel if backward else forward_kernel
    summaries = 0 if tiles.group == 1 else count * (1 + is_complex)
    return Plan(
        Launcher(kernel, count * blocks * B, constants, num_warps=tiles.rows),
        count,
        HEAD.value + (summaries + cdiv(count, tiles.group)) * B * D,
    )


def _describe(log_decay: Tensor, theta: Tensor | None, cu_seqlens: Tensor | None) -> tuple:
    theta_dtype = None if theta is None else theta.dtype
    return log_decay.shape, log_decay.dtype, theta_dtype, cu_seqlens is not None, log_decay.device


def _make_slots(x: Tensor, plan: Plan) -> Tensor:
    return torch.full((plan.words,), EMPTY.value, dtype=torch.int64, device=x.device)


def _mark(
    log_decay: Tensor, initial: Tensor | None, final: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """For each token the document that starts there, or -1, and the one that ends; settles those without tokens."""
    if cu_seqlens is None:
        return None, None
    T, width = log_decay.shape[1], final[0].numel()
    marks = torch.full((2, T), -1, dtype=torch.int32, device=log_decay.device)
    constants = T, width, next_power_of_2(min(width, 1024)), initial is not None
    launch(mark_kernel, final.shape[0], (cu_seqlens.contiguous(), marks, initial, final), (), constants, num_warps=1)
    return marks[0], marks[1]


def _empty_state(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty((count_states(cu_seqlens, x.shape[0]), *x.shape[2:]), dtype=torch.float32)


EMPTY = tl.constexpr(-1)
HEAD = tl.constexpr(16)  # words before the first summary
ONE_ZERO = tl.constexpr(0x3F800000)  # the pair (1.0, 0.0), packed


@triton.jit
def _times(ar, ai, br, bi, COMPLEX: tl.constexpr):
    if COMPLEX:
        return ar * br - ai * bi, ar * bi + ai * br
    return ar * br, ai


@triton.jit
def _follow(a, h, b, g):
    return a * b, g + b * h


@triton.jit
def _follow_complex(ar, ai, hr, hi, br, bi, gr, gi):
    return ar * br - ai * bi, ar * bi + ai * br, gr + br * hr - bi * hi, gi + br * hi + bi * hr


@triton.jit
def _extend(a, h, pa, ph, b, g, qa, qh):
    return a * b, g + b * h, a * qa, qh + qa * h


@triton.jit
def _extend_complex(ar, ai, hr, hi, par, pai, phr, phi, br, bi, gr, gi, qar, qai, qhr, qhi):
    ir, ii, jr, ji = _follow_complex(ar, ai, hr, hi, br, bi, gr, gi)
    kr, ki, lr, li = _follow_complex(ar, ai, hr, hi, qar, qai, qhr, qhi)
    return ir, ii, jr, ji, kr, ki, lr, li


@triton.jit
def _scan_rows(ar, ai, hr, hi, COMPLEX: tl.constexpr):
    """For each row p, decay and end of rows 0 to p together, and of the rows before p."""
    one = tl.full(hr.shape, 1.0, tl.float32)
    zero = tl.zeros_like(hr)
    if COMPLEX:
        ar, ai, hr, hi, par, pai, phr, phi = tl.associative_scan(
            (ar, ai, hr, hi, one, zero, zero, zero), 0, _extend_complex
        )
    else:
        ar, hr, par, phr = tl.associative_scan((ar, hr, one, zero), 0, _extend)
        pai, phi = zero, zero
    return ar, ai, hr, hi, par, pai, phr, phi


@triton.jit
def _pack(low, high):
    low, high = low.to(tl.int32, bitcast=True).to(tl.int64), high.to(tl.int32, bitcast=True).to(tl.int64)
    word = (low & 0xFFFFFFFF) | (high << 32)
    return tl.where(word == EMPTY, 0x7FC000007FC00000, word)  # no NaN may look like nothing


@triton.jit
def _unpack(word):
    low, high = (word & 0xFFFFFFFF).to(tl.int32), (word >> 32).to(tl.int32)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def _load(pointer, rows, channel, mask, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, COMPLEX: tl.constexpr):
    """Pairs [P, BD] from the rows [P, 1], counted in numbers, in the dtype of memory; zero where not `mask` [P, 1]."""
    PARTS: tl.constexpr = 2 if COMPLEX else 1
    d = channel * PARTS + tl.arange(0, BD * PARTS)[None, :]
    value = load_masked(pointer, rows * PARTS + d, mask & (d < D * PARTS), MASKED)
    if COMPLEX:
        return tl.split(tl.reshape(value, [rows.shape[0], BD, 2]))
    else:
        return value, value


@triton.jit
def _store(pointer, rows, channel, re, im, mask, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr,
           COMPLEX: tl.constexpr):  # fmt: skip
    PARTS: tl.constexpr = 2 if COMPLEX else 1
    d = channel * PARTS + tl.arange(0, BD * PARTS)[None, :]
    value = tl.reshape(tl.join(re, im), [rows.shape[0], BD * 2]) if COMPLEX else re
    store_masked(pointer, rows * PARTS + d, value, mask & (d < D * PARTS), MASKED)


@triton.jit
def _decay(log_decay, cos, sin, valid, MASKED: tl.constexpr, COMPLEX: tl.constexpr):
    """exp(log_decay) turned by theta; 1 beyond the end."""
    decay = tl.exp2(log_decay.to(tl.float32) * LOG2_E)
    if COMPLEX:
        if MASKED:
            return tl.where(valid, decay * cos, 1.0), tl.where(valid, decay * sin, 0.0)
        return decay * cos, decay * sin
    return decay, decay


@triton.jit
def _take_tile(slots, B, D: tl.constexpr, BD: tl.constexpr):
    """The next tile: its place in its sequence, the sequence and the first channel. Early places come first."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    ticket = (tl.atomic_add(slots, 1, sem="relaxed") + 1).to(tl.int32)
    return ticket // (BLOCKS * B), (ticket // BLOCKS) % B, (ticket % BLOCKS) * BD


@triton.jit
def _carry_in(ar, ai, hr, hi, initial, final, slots, i, tiles, b, B, channel, P: tl.constexpr, D: tl.constexpr,
              BD: tl.constexpr, G: tl.constexpr, COMPLEX: tl.constexpr, HAS_INITIAL: tl.constexpr,
              HAS_FINAL: tl.constexpr):  # fmt: skip
    """What enters each row, from the decay and end of the rows; the last tile writes what leaves the sequence.

    Summaries of the tiles before this one in its group are folded in order, and onto them comes the carry into the
    group, which the last tile of the group before it publishes: so all sums are the same in every run.
    """
    PLANES: tl.constexpr = 2 if COMPLEX else 1
    p = tl.arange(0, P)[:, None]
    d = channel + tl.arange(0, BD)[None, :]
    inside = d < D
    last = (p == P - 1) & inside
    word = slots + HEAD + b.to(tl.int64) * D + d + p * 0
    plane = (b * 0 + B).to(tl.int64) * D  # B = 1 is a constant
    ar, ai, hr, hi, par, pai, phr, phi = _scan_rows(ar, ai, hr, hi, COMPLEX)
    first = (i // G) * G
    if G > 1:
        mine = word + plane * PLANES * i
        if (i + 1) % G != 0:
            if COMPLEX:
                tl.store(mine, _pack(ar, ai), mask=last)
                tl.store(mine + plane, _pack(hr, hi), mask=last)
            else:
                tl.store(mine, _pack(ar, hr), mask=last)

    cr = tl.zeros_like(hr)
    ci = tl.zeros_like(hr)
    place = b.to(tl.int64) * D + p * 0
    carries = word
    if G > 1:
        carries += plane * PLANES * tiles
        EACH: tl.constexpr = G // P if G > P else 1
        fr = tl.full(hr.shape, 1.0, tl.float32)
        fi = tl.zeros_like(hr)
        gr = tl.zeros_like(hr)
        gi = tl.zeros_like(hr)
        missing = (i > first).to(tl.int32)
        while missing > 0:
            empty = (p + d) * 0
            fr = tl.full(hr.shape, 1.0, tl.float32)
            fi = tl.zeros_like(hr)
            gr = tl.zeros_like(hr)
            gi = tl.zeros_like(hr)
            for k in tl.static_range(EACH):
                tile = first + p * EACH + k
                known = word + plane * PLANES * tile
                if COMPLEX:
                    decay = tl.load(known, mask=(tile < i) & inside, other=ONE_ZERO, volatile=True)
                    end = tl.load(known + plane, mask=(tile < i) & inside, other=0, volatile=True)
                    empty |= ((decay == EMPTY) | (end == EMPTY)).to(tl.int32)
                    kr, ki = _unpack(decay)
                    er, ei = _unpack(end)
                    fr, fi, gr, gi = _follow_complex(fr, fi, gr, gi, kr, ki, er, ei)
                else:
                    end = tl.load(known, mask=(tile < i) & inside, other=ONE_ZERO, volatile=True)
                    empty |= (end == EMPTY).to(tl.int32)
                    kr, er = _unpack(end)
                    fr, gr = _follow(fr, gr, kr, er)
            missing = tl.max(empty)
        if COMPLEX:
            fr, fi, gr, gi = tl.associative_scan((fr, fi, gr, gi), 0, _follow_complex)
        else:
            fr, gr = tl.associative_scan((fr, gr), 0, _follow)

    if first > 0:
        found = tl.load(carries + plane * (i // G - 1), mask=last, other=0, volatile=True)
        while tl.max((found == EMPTY).to(tl.int32)) > 0:
            found = tl.load(carries + plane * (i // G - 1), mask=last, other=0, volatile=True)
        cr, ci = _unpack(found)
    else:
        if HAS_INITIAL:
            cr, ci = _load(initial, place, channel, p == P - 1, D, BD, True, COMPLEX)
    if G > 1:
        cr, ci = _times(cr, ci, fr, fi, COMPLEX)
        cr += gr
        ci += gi

    outr, outi = _times(cr, ci, ar, ai, COMPLEX)
    outr += hr
    outi += hi
    if (i + 1) % G == 0:
        if i + 1 < tiles:
            tl.store(carries + plane * (i // G), _pack(outr, outi), mask=last)
    if HAS_FINAL:
        if i + 1 == tiles:
            _store(final, place, channel, outr, outi, p == P - 1, D, BD, True, COMPLEX)

    # What enters the tile, to all rows.
    cr = tl.sum(tl.where(p == P - 1, cr, 0.0), 0)[None, :] + tl.zeros_like(hr)
    ci = tl.sum(tl.where(p == P - 1, ci, 0.0), 0)[None, :] + tl.zeros_like(hr)
    cr, ci = _times(cr, ci, par, pai, COMPLEX)
    return cr + phr, ci + phi


@triton.jit
def forward_kernel(
    x, log_decay, theta, h, initial, final, slots, starts, ends, B, T, tiles, D: tl.constexpr,
    P: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
    COMPLEX: tl.constexpr, HAS_INITIAL: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    i, b, channel = _take_tile(slots, B, D, BD)
    p = tl.arange(0, P)[:, None]
    d = channel + tl.arange(0, BD)[None, :]
    begin = i * (P * L) + p * L
    place = (b.to(tl.int64) * T + begin) * D
    cos = 1.0
    sin = 0.0
    if COMPLEX:
        angle = tl.load(theta + d, mask=d < D, other=0.0).to(tl.float32)
        cos, sin = tl.cos(angle), tl.sin(angle)

    # Down each row from a zero state. Loaded values stay in registers.
    ar = tl.full([P, BD], 1.0, tl.float32)
    ai = tl.zeros([P, BD], tl.float32)
    hr = tl.zeros([P, BD], tl.float32)
    hi = tl.zeros([P, BD], tl.float32)
    reals, imaginaries, decays = (), (), ()
    for j in tl.static_range(L):
        valid = begin + j < T
        re, im = _load(x, place + j * D, channel, valid, D, BD, MASKED, COMPLEX)
        decay, _ = _load(log_decay, place + j * D, channel, valid, D, BD, MASKED, False)
        reals, imaginaries, decays = reals + (re,), imaginaries + (im,), decays + (decay,)
    for j in tl.static_range(L):
        valid = begin + j < T
        dr, di = _decay(decays[j], cos, sin, valid, MASKED, COMPLEX)
        if DOCUMENTS:
            start, er, ei = _enter(initial, starts, begin + j, valid, channel, hr, D, BD, COMPLEX, HAS_INITIAL)
            ar = tl.where(start >= 0, 0.0, ar)
            ai = tl.where(start >= 0, 0.0, ai)
            hr = tl.where(start >= 0, er, hr)
            hi = tl.where(start >= 0, ei, hi)
        ar, ai = _times(ar, ai, dr, di, COMPLEX)
        hr, hi = _times(hr, hi, dr, di, COMPLEX)
        hr += reals[j].to(tl.float32)
        hi += imaginaries[j].to(tl.float32)

    hr, hi = _carry_in(ar, ai, hr, hi, initial, final, slots, i, tiles, b, B, channel, P, D, BD, G, COMPLEX,
                       HAS_INITIAL and not DOCUMENTS, not DOCUMENTS)  # fmt: skip
    for j in tl.static_range(L):
        valid = begin + j < T
        dr, di = _decay(decays[j], cos, sin, valid, MASKED, COMPLEX)
        if DOCUMENTS:
            start, er, ei = _enter(initial, starts, begin + j, valid, channel, hr, D, BD, COMPLEX, HAS_INITIAL)
            hr = tl.where(start >= 0, er, hr)
            hi = tl.where(start >= 0, ei, hi)
        hr, hi = _times(hr, hi, dr, di, COMPLEX)
        hr += reals[j].to(tl.float32)
        hi += imaginaries[j].to(tl.float32)
        _store(h, place + j * D, channel, hr, hi, valid, D, BD, MASKED, COMPLEX)
        if DOCUMENTS:
            end = tl.load(ends + begin + j, mask=begin + j < T, other=-1)
            _store(final, end.to(tl.int64) * D, channel, hr, hi, end >= 0, D, BD, True, COMPLEX)


@triton.jit
def _enter(initial, marks, token, valid, channel, like, D: tl.constexpr, BD: tl.constexpr, COMPLEX: tl.constexpr,
           HAS_INITIAL: tl.constexpr):  # fmt: skip
    """The document that a mark names at this token, or -1, and the state that enters there; zero where none does."""
    document = tl.load(marks + token, mask=valid, other=-1)
    re, im = tl.zeros_like(like), tl.zeros_like(like)
    if HAS_INITIAL:
        re, im = _load(initial, document.to(tl.int64) * D, channel, document >= 0, D, BD, True, COMPLEX)
    return document, re, im


@triton.jit
def backward_kernel(
    log_decay, theta, h, dh, dx, dlog_decay, dtheta, initial, dfinal, dinitial, slots, starts, ends, B, T, tiles,
    D: tl.constexpr, P: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
    COMPLEX: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DFINAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    i, b, channel = _take_tile(slots, B, D, BD)
    p = tl.arange(0, P)[:, None]
    d = channel + tl.arange(0, BD)[None, :]
    token = T - 1 - i * (P * L) - p * L  # of the row's first in the order of the sweep; negative after the first token
    place = (b.to(tl.int64) * T + token) * D
    cos = 1.0
    sin = 0.0
    if COMPLEX:
        angle = tl.load(theta + d, mask=d < D, other=0.0).to(tl.float32)
        cos, sin = tl.cos(angle), -tl.sin(angle)  # of the conjugate

    # The carry is w_t = conj(a_t) (dh_t + w_{t+1}), the gradient of h_{t-1}.
    ar = tl.full([P, BD], 1.0, tl.float32)
    ai = tl.zeros([P, BD], tl.float32)
    wr = tl.zeros([P, BD], tl.float32)
    wi = tl.zeros([P, BD], tl.float32)
    reals, imaginaries, decays = (), (), ()
    for j in tl.static_range(L):
        valid = token >= j
        re, im = _load(dh, place - j * D, channel, valid, D, BD, MASKED, COMPLEX)
        decay, _ = _load(log_decay, place - j * D, channel, valid, D, BD, MASKED, False)
        reals, imaginaries, decays = reals + (re,), imaginaries + (im,), decays + (decay,)
    hreals, himaginaries = (), ()
    for j in tl.static_range(L):
        before = token > j
        # Without a mask only the very first token has none before it, and it is the last of a row.
        re, im = _load(h, place - (j + 1) * D, channel, before, D, BD, MASKED or j == L - 1, COMPLEX)
        hreals, himaginaries = hreals + (re,), himaginaries + (im,)
    for j in tl.static_range(L):
        valid = token >= j
        dr, di = _decay(decays[j], cos, sin, valid, MASKED, COMPLEX)
        if DOCUMENTS:
            end, er, ei = _enter(dfinal, ends, token - j, valid, channel, wr, D, BD, COMPLEX, HAS_DFINAL)
            ar = tl.where(end >= 0, 0.0, ar)
            ai = tl.where(end >= 0, 0.0, ai)
            wr = tl.where(end >= 0, er, wr)
            wi = tl.where(end >= 0, ei, wi)
        ar, ai = _times(ar, ai, dr, di, COMPLEX)
        wr += reals[j].to(tl.float32)
        wi += imaginaries[j].to(tl.float32)
        wr, wi = _times(wr, wi, dr, di, COMPLEX)

    wr, wi = _carry_in(ar, ai, wr, wi, dfinal, dinitial, slots, i, tiles, b, B, channel, P, D, BD, G, COMPLEX,
                       HAS_DFINAL and not DOCUMENTS, not DOCUMENTS)  # fmt: skip
    turn = tl.zeros([P, BD], tl.float32)
    for j in tl.static_range(L):
        valid = token >= j
        dr, di = _decay(decays[j], cos, sin, valid, MASKED, COMPLEX)
        if DOCUMENTS:
            end, er, ei = _enter(dfinal, ends, token - j, valid, channel, wr, D, BD, COMPLEX, HAS_DFINAL)
            wr = tl.where(end >= 0, er, wr)
            wi = tl.where(end >= 0, ei, wi)
        wr += reals[j].to(tl.float32)
        wi += imaginaries[j].to(tl.float32)
        _store(dx, place - j * D, channel, wr, wi, valid, D, BD, MASKED, COMPLEX)
        wr, wi = _times(wr, wi, dr, di, COMPLEX)
        br = hreals[j].to(tl.float32)
        bi = himaginaries[j].to(tl.float32)
        if DOCUMENTS:
            start, er, ei = _enter(initial, starts, token - j, valid, channel, wr, D, BD, COMPLEX, HAS_INITIAL)
            br = tl.where(start >= 0, er, br)
            bi = tl.where(start >= 0, ei, bi)
            _store(dinitial, start.to(tl.int64) * D, channel, wr, wi, start >= 0, D, BD, True, COMPLEX)
        elif HAS_INITIAL and (MASKED or j == L - 1):
            er, ei = _load(initial, b.to(tl.int64) * D + p * 0, channel, token == j, D, BD, True, COMPLEX)
            br += er  # zero elsewhere, and zero was read before the first token
            bi += ei
        product = wr * br
        if COMPLEX:
            product += wi * bi
            turn += tl.where(token >= j, wi * br - wr * bi, 0.0)
        _store(dlog_decay, place - j * D, channel, product, product, valid, D, BD, MASKED, False)
    if COMPLEX:
        total = tl.sum(turn, 0)[None, :]
        tl.store(dtheta + (i.to(tl.int64) * B + b) * D + d, total, mask=d < D)


@triton.jit
def mark_kernel(offsets, marks, initial, final, T, D: tl.constexpr, BD: tl.constexpr, HAS_INITIAL: tl.constexpr):
    """Writes each document's number where it starts and where it ends; what enters an empty one leaves it."""
    n = tl.program_id(0)
    start = tl.minimum(tl.maximum(tl.load(offsets + n), 0), T)
    end = tl.maximum(tl.minimum(tl.load(offsets + n + 1), T), start)
    if end > start:
        tl.store(marks + start, n)
        tl.store(marks + T + end - 1, n)
    else:
        for channel in tl.range(0, D, BD):
            d = channel + tl.arange(0, BD)
            value = tl.zeros([BD], tl.float32)
            if HAS_INITIAL:
                value = tl.load(initial + n.to(tl.int64) * D + d, mask=d < D, other=0.0)
            tl.store(final + n.to(tl.int64) * D + d, value, mask=d < D)


BLOCK = 256


def step(x: Tensor, log_decay: Tensor, state: Tensor, theta: Tensor | None) -> Tensor:
    """As `diagonal_step`: log_decay [B, D], x and state [B, D], with theta [D] both [B, D, 2]; the state is float32."""
    x, log_decay = x.contiguous(), log_decay.contiguous()
    h = torch.empty_like(x)
    count = log_decay.numel()
    theta = None if theta is None else theta.contiguous()
    constants = count, log_decay.shape[1], BLOCK, theta is not None
    launch(step_kernel, cdiv(count, BLOCK), (x, log_decay, state, h, theta), (), constants, num_warps=2)
    return h


@triton.jit
def step_kernel(x, log_decay, state, h, theta, count, D, BLOCK: tl.constexpr, COMPLEX: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    decay = tl.exp(tl.load(log_decay + i, mask=inside, other=0.0).to(tl.float32))
    if COMPLEX:
        angle = tl.load(theta + i % D, mask=inside, other=0.0).to(tl.float32)
        real, imaginary = decay * tl.cos(angle), decay * tl.sin(angle)
        re = tl.load(state + 2 * i, mask=inside, other=0.0)
        im = tl.load(state + 2 * i + 1, mask=inside, other=0.0)
        new_re = real * re - imaginary * im + tl.load(x + 2 * i, mask=inside, other=0.0).to(tl.float32)
        new_im = imaginary * re + real * im + tl.load(x + 2 * i + 1, mask=inside, other=0.0).to(tl.float32)
        tl.store(state + 2 * i, new_re, mask=inside)
        tl.store(state + 2 * i + 1, new_im, mask=inside)
        tl.store(h + 2 * i, new_re.to(h.dtype.element_ty), mask=inside)
        tl.store(h + 2 * i + 1, new_im.to(h.dtype.element_ty), mask=inside)
    else:
        new = decay * tl.load(state + i, mask=inside, other=0.0)
        new += tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(state + i, new, mask=inside)
        tl.store(h + i, new.to(h.dtype.element_ty), mask=inside)
