"""One token of the gated delta rule, or of a sum with a scalar decay (`ssd`), in one launch: every element of the state
is read once, and written once or, with pending tokens, every few tokens. What layers do to q, k and gates before it can
be part of the launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import LOG2_E, after_previous, clamp, load_masked, softplus, store_masked
from linnet.ops.gated.kernels import decayed, pack_decay
from linnet.ops.launching import launch
from linnet.ops.stepping import as_heads, choose_columns

NONE, HEAD, CHANNEL = 0, 1, 2  # the numbers that a gate has


def step(
    q, k, v, decay, rates, bias, erase, write, skip, state, number, keys, updates, decays, scale, most, least_step,
    most_step, logits,
) -> Tensor:  # fmt: skip
    """As `linnet.ops.delta.token_step`, `number` to `decays` being those of `Pending` or None; all contiguous, and the
    state float32 or bfloat16."""
    (B, H, K), (HV, V) = q.shape, v.shape[1:]
    q, k, v = as_heads(q), as_heads(k), as_heads(v)
    gates = [x if x is None or x.stride(-1) == 1 and (x.ndim == 2 or x.stride(1) == x.shape[2]) else x.contiguous()
             for x in (decay, erase, write)]  # fmt: skip
    kinds = [NONE if x is None else HEAD if x.ndim == 2 else CHANNEL for x in gates]
    strides = [0 if x is None else x.stride(0) for x in (q, k, v, *gates)]
    rates, bias, skip = (None if x is None else x.contiguous() for x in (rates, bias, skip))
    o = torch.empty((B, HV, V), dtype=v.dtype, device=v.device)
    room = 0 if keys is None else keys.shape[2]
    # With pending tokens a program has sums over keys beside the state, which in one warp need no barriers.
    rows, columns, blocks, warps = choose_columns(K, V, B * HV, 16 if room else 64)
    even = rows == K and columns * blocks == V
    constants = (
        *strides, *kinds, H, HV, K, V, room, rows, columns, even, logits, rates is not None, bias is not None,
        skip is not None,
    )  # fmt: skip
    tensors = q, k, v, gates[0], rates, bias, gates[1], gates[2], skip, state, number, keys, updates, decays, o
    numbers = scale, most, least_step, most_step
    launch(step_kernel, B * HV * blocks, tensors, numbers, constants, num_warps=warps)
    return o


@triton.jit
def step_kernel(
    q, k, v, decay, rates, bias, erase, write, skip, state, pending, keys, updates, decays, o, scale, most, least_step,
    most_step, q_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr, decay_stride: tl.constexpr,
    erase_stride: tl.constexpr, write_stride: tl.constexpr, DECAY: tl.constexpr, ERASE: tl.constexpr,
    WRITE: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROOM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, LOGITS: tl.constexpr, RATED: tl.constexpr,
    BIASED: tl.constexpr, SKIPPED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    b, h = (head // HV).to(tl.int64), head % HV
    group = h // (HV // H)
    i, j = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    state += head.to(tl.int64) * (K * V) + i[:, None] * V
    at, inside = j[None, :], (i < K)[:, None] & (j < V)[None, :]
    after_previous(OVERLAPS)
    S = load_masked(state, at, inside, not EVEN).to(tl.float32)
    value = load_masked(v + b * v_stride + h * V, j, j < V, not EVEN).to(tl.float32)
    query = load_masked(q + b * q_stride + group * K, i, i < K, not EVEN)
    key = load_masked(k + b * k_stride + group * K, i, i < K, not EVEN)
    if LOGITS and ERASE > 0:
        query, key = _normalised(query), _normalised(key)
    query, key = query.to(tl.float32), key.to(tl.float32)
    seen = value
    if DECAY > 0:
        if DECAY == 1:
            gate = tl.load(decay + b * decay_stride + h).to(tl.float32)
            gate += tl.load(bias + h).to(tl.float32) if BIASED else 0.0
        else:
            gate = load_masked(decay + b * decay_stride + h * K, i, i < K, not EVEN).to(tl.float32)
            gate += load_masked(bias + h * K, i, i < K, not EVEN).to(tl.float32) if BIASED else 0.0
        if RATED:
            time = clamp(softplus(gate), least_step, most_step)
            gate = -tl.exp(tl.load(rates + h).to(tl.float32)) * time
            if ERASE == 0:  # rounded as the values of the parallel form are
                value = (time * value).to(v.dtype.element_ty).to(tl.float32)
    if ERASE > 0:
        if ERASE == 1:
            strength = tl.load(erase + b * erase_stride + h).to(tl.float32)
        else:
            strength = load_masked(erase + b * erase_stride + h * K, i, i < K, not EVEN).to(tl.float32)
        if LOGITS:
            strength = most / (1.0 + tl.exp(-strength))
        if WRITE == 0:
            value *= strength
        elif WRITE == 1:
            value *= tl.load(write + b * write_stride + h).to(tl.float32)
        else:
            value *= load_masked(write + b * write_stride + h * V, j, j < V, not EVEN).to(tl.float32)
        erased = strength * key
    if ROOM == 0:
        if DECAY > 0:
            S = _decay_state(S, gate, DECAY)
        if ERASE > 0:
            value -= tl.sum(S * erased[:, None], 0)
        S += key[:, None] * value[None, :]
        out = tl.sum(S * query[:, None], 0)
        store_masked(state, at, S, inside, not EVEN)
    else:
        number = tl.load(pending + b)
        keys += (b * H + group) * (ROOM * K)
        updates += head.to(tl.int64) * (ROOM * V)
        out = tl.zeros([COLUMNS], tl.float32)
        if DECAY > 0:
            decays += head.to(tl.int64) * (ROOM * (K if DECAY == 2 else 1))
            behind = gate  # the log-decays behind a token, this one's too
        for m in tl.static_range(ROOM - 1, -1, -1):
            earlier = m < number
            old_key = tl.load(keys + m * K + i, mask=(i < K) & earlier, other=0.0).to(tl.float32)
            update = tl.load(updates + m * V + j, mask=(j < V) & earlier, other=0.0)
            if DECAY > 0:
                old_key *= tl.exp(behind)
                behind += _load_decay(decays, m, earlier, i, K, DECAY)
            if ERASE > 0:
                value -= tl.sum(old_key * erased, 0) * update
            out += tl.sum(old_key * query, 0) * update
        past = tl.exp(behind) if DECAY > 0 else 1.0
        if ERASE > 0:
            value -= tl.sum(S * (erased * past)[:, None], 0)
        out += tl.sum(S * (query * past)[:, None], 0) + tl.sum(key * query, 0) * value
        if number == ROOM:  # all pending tokens, and this one, go into the state
            if DECAY > 0:
                S = _decay_state(S, behind, DECAY)
                behind = gate
            for m in tl.static_range(ROOM - 1, -1, -1):
                old_key = load_masked(keys + m * K, i, i < K, not EVEN).to(tl.float32)
                if DECAY > 0:
                    old_key *= tl.exp(behind)
                    behind += _load_decay(decays, m, True, i, K, DECAY)
                S += old_key[:, None] * load_masked(updates + m * V, j, j < V, not EVEN)[None, :]
            S += key[:, None] * value[None, :]
            store_masked(state, at, S, inside, not EVEN)
        else:  # programs of the same head, and of heads with the same key, read other places than this one
            store_masked(updates + number * V, j, value, j < V, not EVEN)
            if block == 0:
                if h % (HV // H) == 0:
                    store_masked(keys + number * K, i, key, i < K, not EVEN)
                if DECAY == 1:
                    tl.store(decays + number, gate)
                elif DECAY == 2:
                    store_masked(decays + number * K, i, gate, i < K, not EVEN)
    out *= scale
    if SKIPPED:
        out += tl.load(skip + h).to(tl.float32) * seen
    store_masked(o + head * V, j, out, j < V, not EVEN)


@triton.jit
def _decay_state(S, log_decay, DECAY: tl.constexpr):
    packed = pack_decay(log_decay * LOG2_E, tl.float32)
    return decayed(S, packed if DECAY == 1 else packed[:, None], 0.0)


@triton.jit
def _load_decay(decays, m, there, i, K: tl.constexpr, DECAY: tl.constexpr):
    """The log-decay of pending token m, a number or one per channel; 0 unless it is `there`."""
    if DECAY == 1:
        decay = tl.load(decays + m, mask=there, other=0.0)
    else:
        decay = tl.load(decays + m * K + i, mask=(i < K) & there, other=0.0)
    return decay


@triton.jit
def _normalised(x):
    """x / sqrt(sum x^2 + 1e-6), rounded to the dtype of x."""
    wide = x.to(tl.float32)
    return (wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) + 1e-6))).to(x.dtype)
