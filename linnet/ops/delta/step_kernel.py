"""One token of the gated delta rule, or of a sum with a scalar decay (`ssd`), in one launch: every element of the state
is read and written once. What layers do to q, k and gates before it can be part of the launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.device import LOG2_E, after_previous, load_masked, softplus, store_masked
from linnet.ops.gated.kernels import decayed, pack_decay
from linnet.ops.launching import launch
from linnet.ops.stepping import as_heads, choose_columns

NONE, HEAD, CHANNEL = 0, 1, 2  # the numbers that a gate has


def step(q, k, v, decay, rates, bias, erase, write, skip, state, scale, most, least_step, most_step, logits) -> Tensor:
    """As `linnet.ops.delta.token_step`; the state float32 or bfloat16, contiguous."""
    (B, H, K), (HV, V) = q.shape, v.shape[1:]
    q, k, v = as_heads(q), as_heads(k), as_heads(v)
    gates = [x if x is None or x.stride(-1) == 1 and (x.ndim == 2 or x.stride(1) == x.shape[2]) else x.contiguous()
             for x in (decay, erase, write)]  # fmt: skip
    kinds = [NONE if x is None else HEAD if x.ndim == 2 else CHANNEL for x in gates]
    strides = [0 if x is None else x.stride(0) for x in (q, k, v, *gates)]
    rates, bias, skip = (None if x is None else x.contiguous() for x in (rates, bias, skip))
    o = torch.empty((B, HV, V), dtype=v.dtype, device=v.device)
    rows, columns, blocks, warps = choose_columns(K, V, B * HV)
    even = rows == K and columns * blocks == V
    constants = (
        *strides, *kinds, H, HV, K, V, rows, columns, even, logits, rates is not None, bias is not None,
        skip is not None,
    )  # fmt: skip
    tensors = q, k, v, gates[0], rates, bias, gates[1], gates[2], skip, state, o
    numbers = scale, most, least_step, most_step
    launch(step_kernel, B * HV * blocks, tensors, numbers, constants, num_warps=warps)
    return o


@triton.jit
def step_kernel(
    q, k, v, decay, rates, bias, erase, write, skip, state, o, scale, most, least_step, most_step,
    q_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr, decay_stride: tl.constexpr,
    erase_stride: tl.constexpr, write_stride: tl.constexpr, DECAY: tl.constexpr, ERASE: tl.constexpr,
    WRITE: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr, LOGITS: tl.constexpr, RATED: tl.constexpr, BIASED: tl.constexpr,
    SKIPPED: tl.constexpr, OVERLAPS: tl.constexpr,
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
            time = tl.minimum(tl.maximum(softplus(gate), least_step), most_step)
            gate = -tl.exp(tl.load(rates + h).to(tl.float32)) * time
            if ERASE == 0:  # rounded as the values of the parallel form are
                value = (time * value).to(v.dtype.element_ty).to(tl.float32)
        packed = pack_decay(gate * LOG2_E, tl.float32)
        S = decayed(S, packed if DECAY == 1 else packed[:, None], 0.0)
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
        value -= tl.sum(S * (strength * key)[:, None], 0)
    S += key[:, None] * value[None, :]
    out = tl.sum(S * query[:, None], 0) * scale
    if SKIPPED:
        out += tl.load(skip + h).to(tl.float32) * seen
    store_masked(state, at, S, inside, not EVEN)
    store_masked(o + head * V, j, out, j < V, not EVEN)


@triton.jit
def _normalised(x):
    """x / sqrt(sum x^2 + 1e-6), rounded to the dtype of x."""
    wide = x.to(tl.float32)
    return (wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) + 1e-6))).to(x.dtype)
