"""Additive decay attention on a GPU: a plain chunked linear attention with the running log-sum-exp fused into it.

Since the decays telescope, the weight of token s at token t is exp(u_s - z_t), a product of a factor of s and one of t,
and no product of matrices meets a decay. With LA(a, b, c) for linear attention of queries a, keys b and values c,
keys x_s = exp(u_s), queries y_t = q_t exp(-z_t) (both relative to a reference that moves with the chunks; see
`kernels.py`), and "reversed" meaning from the last token to the first:

    o  = LA(y, x, v)                         dq = exp(-z) LA(do, v, x)
    dv = reversed LA(x, y, do)               du = x (reversed LA(v, do, y) - sum_{t >= s} y_t dq_t)

A program owns one head of one sequence (or document) and a block of columns, and walks the chunks with the state in
registers. The sweep for dq leaves the references and denominators of the chunks for the reversed ones. LRPE is applied
to the tiles, so that the doubled keys are never in memory.

Where heads are few, a sequence is cut into segments: one launch sums each segment up (its state from zero, and its
log-sum), and the sweep of a segment starts from the summaries before it.

Where the sum of a channel grows by more than e^97 inside a chunk of at most 64 tokens (padding with -1e4 and not -inf),
the chunk's tokens before lose that channel: their outputs there go to 0. All else is exact to rounding.

On a Hopper GPU the usual shapes (`linnet.ops.additive.hopper.suits`) run in kernels of their own. float64, mixed dtypes
and widths that are not a multiple of 8, or above 256 with LRPE's doubling, run in the chunked form.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.additive import chunked, hopper
from linnet.ops.additive.chunked import Later, add_later
from linnet.ops.additive.launch import NOTHING, Call
from linnet.ops.launching import align
from linnet.ops.sequence import widen


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor | None,
    positions: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    scale: float,
    causal: bool,
    cu_seqlens: Tensor | None,
    return_final: bool = True,
    silu: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o [B, T, H, V] and S, z after the last token; arguments as in `additive_attention`, the state as two tensors.

    A causal call without `return_final` gives None for S and z. `silu`: of q, without causality.
    """
    if not supports(q, k, v, theta):
        return chunked.forward(q, k, v, theta, positions, S, z, scale, causal, cu_seqlens)
    call = Call.of(q, k, v, theta, positions, cu_seqlens, scale, silu)
    if hopper.suits(call, causal):
        call = call._replace(q=F.silu(call.q)) if silu else call
        return hopper.forward(call, S, z, return_final) if causal else hopper.forward_non_causal(call)
    if not causal:
        return _forward_non_causal(call)
    o, segments = torch.empty_like(call.v), call.count_segments("o")
    final = call.empty_state() if return_final else NOTHING
    boundaries, sums = _boundaries(call, "o", segments, z)
    call.values("o", segments, out=o, boundaries=boundaries, initial=(S, z), final=final, sums=sums)
    return o, *final


def backward(
    do: Tensor,
    dS: Tensor | None,
    dz: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor | None,
    positions: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    S_end: Tensor | None,
    scale: float,
    causal: bool,
    cu_seqlens: Tensor | None,
    later: Later | None = None,
    silu: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients to q, k, v, theta (empty without it), S and z (None without them); `S_end` is the forward's final S.

    Those to the final state, dS and dz, may be None, and then S_end, but not without causality, where z is the log-sum
    after the last token. `later`: what tokens after these give, for causal calls that the kernels take, with S, z and
    S_end and without documents: from (D, delta) of the initial state, for these tokens alone, to that of the final one.
    """
    if not supports(q, k, v, theta, do):
        return chunked.backward(do, dS, dz, q, k, v, theta, positions, S, z, S_end, scale, causal, cu_seqlens)
    call = Call.of(q, k, v, theta, positions, cu_seqlens, scale, silu)
    do = align(do)
    if (dS is None) != (dz is None):
        dS, dz = (torch.zeros_like(y) if x is None else x for x, y in ((dS, S_end), (dz, S_end[:, :, : k.shape[3], 0])))
    if not causal:
        return _backward_non_causal(call, do, dS, dz, S_end, z, theta)
    sweep = hopper.backward if hopper.suits(call, backward=True) else _backward_causal
    *gradients, dS_start, dz_start = sweep(call, do, dS, dz, S, z, S_end, theta, later)
    if S is not None:
        dz_start += call.dot(S, dS_start)
    return *gradients, dS_start, dz_start


def _boundaries(call: Call, kind: str, segments: int, z: Tensor | None) -> tuple[Tensor, tuple | None]:
    """References and denominators of all chunks, and states of the segments, if there are several."""
    boundaries, ends = call.boundaries(kind, segments, z)
    if segments == 1:
        return boundaries, None
    sums = call.summarise(segments, kind, boundaries=boundaries)
    call.link(kind, segments, boundaries, ends, z)
    return boundaries, sums


def summarise(k: Tensor, v: Tensor, theta: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """S and z after the last token, from nothing, without documents."""
    if not supports(k, k, v, theta):
        return chunked.summarise(k, v, theta, positions)
    call = Call.of(k, k, v, theta, positions, None, 1.0)
    if hopper.suits(call, causal=theta is not None):
        return hopper.summarise(call)
    return _summarise(call)


def _summarise(call: Call) -> tuple[Tensor, Tensor]:
    segments = call.count_segments("o", 4, 4)
    boundaries, _ = call.boundaries("o", segments, None)
    sums = call.summarise(segments, "o", boundaries=boundaries, every=True)
    return tuple(x.squeeze(2) for x in sums) if segments == 1 else call.combine(segments, sums)


def _backward_causal(
    call: Call, do: Tensor, dS, dz, S, z, S_end, theta, later: Later | None = None
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, theta and the initial state, without what the state itself adds to that of z."""
    segments = call.count_segments("dq")
    dq, dk, dv = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    final = NOTHING if S is None else call.empty_state()
    dtheta = call.empty_dtheta(segments)
    boundaries, sums = _boundaries(call, "dq", segments, z)
    call.keys("dq", segments, do, dq, dq, boundaries, dtheta[0], initial=(S, z), sums=sums)
    ends = NOTHING[0] if sums is None else sums[1][:, :, :-1]
    if segments > 1 or later is not None:
        sums = call.summarise(segments, "dv", do, dq, boundaries, every=later is not None)
    if later is not None:
        ends = z[:, :, None] if ends is None else torch.cat([z[:, :, None], ends], 2)
        # The share of the initial state in the one before each segment.
        weights = (z[:, :, None] - torch.logcumsumexp(ends, 2)).exp().nan_to_num(0.0)
        D = (widen(weights, sums[0]) * sums[0]).sum(2)
        dS, dz = add_later(later, D, (weights * sums[1]).sum(2), dS, dz, S_end)
    last = {"initial": (dS, dz), "sums": sums}
    call.keys("dk", segments, do, dq, dk, boundaries, dtheta[1], end=S_end, final=final, **last)
    call.values("dv", segments, do=do, out=dv, boundaries=boundaries, **last)
    return dq, dk, dv, call.sum_dtheta(dtheta, segments, theta), *final


def _forward_non_causal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    S, z = _summarise(call)
    o = torch.empty_like(call.v)
    call.use_values(call.count_segments("use", 8, 4), o, S, None)
    return o, S, z


def _backward_non_causal(call: Call, do: Tensor, dS, dz, S: Tensor, z: Tensor, theta) -> tuple[Tensor, ...]:
    dq, dk, dv = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    segments = call.count_segments("sum", 4, 4)
    S = align(S)
    D, delta = call.combine(segments, (call.sum_products(segments, do), None), S, (dS, dz))
    segments = call.count_segments("use", 8, 4)
    dtheta = call.empty_dtheta(segments)
    call.use_keys(segments, do, dq, S, None, None, dtheta[0])
    call.use_keys(segments, call.v, dk, D, z, delta, dtheta[1])
    call.use_values(segments, dv, D, z)
    return dq, dk, dv, call.sum_dtheta(dtheta, segments, theta), None, None


def supports(q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None, *more: Tensor) -> bool:
    """Whether the kernels take these tensors; warns once per reason if not."""
    dtypes, K = tuple(x.dtype for x in (q, k, v, *more)), q.shape[-1]
    if theta is not None and theta.dtype == torch.float64:
        dtypes = (*dtypes, theta.dtype)
    if q.shape[1] * q.shape[2] >= 2**31:  # the kernels count the rows of a sequence in 32 bits
        return False
    return backend.takes_kernels("additive_attention", dtypes, (K, K * (1 if theta is None else 2), v.shape[-1]))
