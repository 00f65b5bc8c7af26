"""Additive decay attention, chunked: dense matrix products in PyTorch, on any device, with a hand-written backward.

With the factors of `factors.py` (a for queries, b for keys, a token and channel) a chunk is ordinary linear attention,

    O = tril((Q a) b^T) V + (Q a) (enter S)         S <- keep S + leave (b^T V)

where S is normalised by exp(-z) at the chunk's boundaries, and LRPE turns Q a and b. The sequence goes by in segments
of a few chunks, so that temporaries stay small (memory is linear in T) and in the cache. The backward repeats the sweep
over the states alone and then goes through the segments in reverse.
"""

import torch
from torch import Tensor

from linnet.ops.additive import whole
from linnet.ops.additive.factors import Factors, factorise, fold_keys
from linnet.ops.additive.turn import Turn
from linnet.ops.chunks import multiply_add, state_dtype
from linnet.ops.documents import count_states, documents

CHUNK = 64
# Elements of a segment's largest temporary.
SEGMENT_CPU, SEGMENT_GPU = 2**19, 2**26


def forward(
    q, k, v, theta, positions, S, z, scale, causal, cu_seqlens, wants_final=True
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, H, V] and S, z after the last token, wanted or not; arguments as in `additive_attention`."""
    S, z = _first_state(q, k, v, theta, S, z, cu_seqlens)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    for rows, start, end in documents(cu_seqlens, q.shape[0], q.shape[1]):
        for begin, stop, chunk in _segments(q, v, theta, start, end, causal):
            part = _load(q, k, v, theta, positions, start, begin, stop, chunk, S.dtype)
            if causal:
                out, S[rows], z[rows] = _segment(*part, S[rows], z[rows])
            else:
                out, S[rows], z[rows] = whole.forward(*part)
            _store(o, out if scale == 1.0 else out * scale, begin, stop)
    return o, S, z


def backward(do, dS, dz, q, k, v, theta, positions, S, z, S_end, scale, causal, cu_seqlens) -> tuple[Tensor, ...]:
    """Gradients to q, k, v, theta (empty without it), S and z (given or not); `S_end` is the forward's final S.

    Those to the final state, dS and dz, may be None, and then S_end, but not without causality, where z is the log-sum
    after the last token.
    """
    S, z = _first_state(q, k, v, theta, S, z if causal else None, cu_seqlens)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dtheta = S.new_zeros(theta.shape if theta is not None else 0)
    once = Turn(cos=theta).once
    # At a boundary: the gradient to S with z held, and minus the gradient to z, by which S was divided.
    if dS is None:
        D, decline = torch.zeros_like(S), torch.zeros_like(z)
    else:
        D = dS.to(S.dtype, copy=True, memory_format=torch.contiguous_format)
        decline = once((S_end.to(S.dtype) * D).sum(-1))
    if dz is not None:
        decline -= dz.to(S.dtype)
    for rows, start, end in documents(cu_seqlens, q.shape[0], q.shape[1]):
        segments = _segments(q, v, theta, start, end, causal)
        checkpoints = [(S[rows], z[rows])]
        for begin, stop, chunk in segments[:-1]:
            _, u, v_, turn = _load(None, k, v, theta, positions, start, begin, stop, chunk, S.dtype)
            key, leave, keep, z_next = fold_keys(u, checkpoints[-1][1])
            new = turn.twice(leave) * torch.matmul(turn.apply(key).mT, v_)
            checkpoints.append((_sweep(new, turn.twice(keep), checkpoints[-1][0])[1], z_next))
        for (begin, stop, chunk), (S_in, z_in) in zip(reversed(segments), reversed(checkpoints), strict=False):
            part = _load(q, k, v, theta, positions, start, begin, stop, chunk, S.dtype)
            do_ = _cut(do, begin, stop, chunk, S.dtype)
            if scale != 1.0:
                do_ = do_ * scale
            if causal:
                *grads, D[rows], decline[rows] = _segment_backward(do_, *part, S_in, z_in, D[rows], decline[rows])
            else:
                grads = whole.backward(do_, D[rows], decline[rows], *part, S_end[rows].to(S.dtype))
                D[rows], decline[rows] = 0.0, 0.0
            for out, grad in zip((dq, dk, dv), grads, strict=False):
                _store(out, grad, begin, stop)
            if theta is not None:
                dtheta += part[3].theta_gradient(grads[3])
    return dq, dk, dv, dtheta if theta is None else dtheta.to(theta.dtype), D, once((S * D).sum(-1)) - decline


def _segment(q, u, v, turn, S, z):
    f = factorise(u, z)
    keys, queries = turn.apply(f.key), turn.apply(q * f.query)
    entering, S = _sweep(turn.twice(f.leave) * torch.matmul(keys.mT, v), turn.twice(f.keep), S)
    o = torch.matmul(_scores(q, queries, keys, f, turn), v)
    multiply_add(o, queries, turn.twice(f.enter) * entering)
    return o, S, f.z


def _segment_backward(do, q, u, v, turn, S, z, D, decline):
    f = factorise(u, z)
    q_hat = q * f.query
    keys, queries = turn.apply(f.key), turn.apply(q_hat)
    enter, leave, keep = turn.twice(f.enter), turn.twice(f.leave), turn.twice(f.keep)
    entering, _ = _sweep(leave * torch.matmul(keys.mT, v), keep, S)
    D_after, D = _sweep(enter * torch.matmul(queries.mT, do), keep, D, reverse=True)
    D_after *= leave

    scores, dscores = _scores(q, queries, keys, f, turn), torch.matmul(do, v.mT).tril_()
    dv = torch.matmul(scores.mT, do)
    multiply_add(dv, keys, D_after)
    dqueries = torch.matmul(do, (entering * enter).mT)
    dkeys = torch.matmul(v, D_after.mT)
    if f.blocks is None:
        multiply_add(dqueries, dscores, keys)
        multiply_add(dkeys, dscores.mT, queries)
    dq, dangle = turn.transpose(q_hat, dqueries)
    du, dangle_k = turn.transpose(f.key, dkeys)
    dq.mul_(f.query)
    du = du * f.key if f.blocks is not None else du
    for block in f.blocks or ():
        pairs, row_q = block.pairs(dscores), block.rows(q) * block.row
        grad, angle = turn.transpose(row_q, torch.matmul(pairs, turn.apply(block.column, block.columns)), block.rows)
        block.rows(dq).add_(grad * block.row)
        grad_k = torch.matmul(pairs.mT, turn.apply(row_q, block.rows))
        grad_k, angle_k = turn.transpose(block.column, grad_k, block.columns)
        block.columns(du).add_(grad_k * block.column)
        if angle is not None:
            block.rows(dangle).add_(angle)
            block.columns(dangle_k).add_(angle_k)

    # z_t divides o_t channel by channel, so its gradient is -q_t dq_t; it spreads over u_s with weight exp(u_s - z_t).
    fall = q * dq
    weighted = f.query * fall
    after, decline = _sweep(f.enter * weighted.sum(-2), f.keep, decline, reverse=True)
    outside = (f.leave * after)[..., None, :]
    if f.blocks is None:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=q.dtype, device=q.device).triu_()
        du = du.sub_(torch.matmul(later, weighted)).sub_(outside).mul_(f.key)
    else:
        du.addcmul_(f.key, outside, value=-1)
        for block in f.blocks:
            block.columns(du).addcmul_(block.column, (block.row * block.rows(fall)).sum(-2, keepdim=True), value=-1)
    return dq, du, dv, None if dangle is None else dangle.add_(dangle_k), D, decline


def _scores(q, queries, keys, f: Factors, turn: Turn):
    """[B, H, n, C, C]: query . key with the weights of a running softmax, zero above the diagonal."""
    if f.blocks is None:
        return torch.matmul(queries, keys.mT).tril_()
    scores = q.new_zeros(*q.shape[:-1], q.shape[-2])
    for block in f.blocks:
        row = turn.apply(block.rows(q) * block.row, block.rows)
        block.pairs(scores).copy_(torch.matmul(row, turn.apply(block.column, block.columns).mT))
    return scores


def _sweep(new, keep, x, reverse=False):
    """x <- keep_i x + new_i over the chunks (dim 2). Returns x before each chunk took part, stacked, and the last x."""
    met, end = torch.empty_like(new), torch.empty_like(new[:, :, 0])
    chunks = range(new.shape[2] - 1, -1, -1) if reverse else range(new.shape[2])
    met[:, :, chunks[0]] = x
    for i, following in zip(chunks, [*(met[:, :, j] for j in chunks[1:]), end], strict=True):
        torch.addcmul(new[:, :, i], keep[:, :, i], met[:, :, i], out=following)
    return met, end


def _first_state(q, k, v, theta, S, z, cu_seqlens):
    dtype = state_dtype(q, k, v)
    if S is not None:
        return tuple(x.to(dtype, copy=True, memory_format=torch.contiguous_format) for x in (S, z))
    shape = (count_states(cu_seqlens, q.shape[0]), *q.shape[2:])
    S = v.new_zeros(*shape[:2], shape[2] * (1 if theta is None else 2), v.shape[3], dtype=dtype)
    return S, v.new_full(shape, -torch.inf, dtype=dtype)


def _segments(q, v, theta, start, end, causal):
    """(begin, stop, chunk) of each segment of a document; chunks are a power of two, one chunk if not causal."""
    if start == end:
        return []
    if not causal:
        return [(start, end, end - start)]
    chunk = min(CHUNK, 1 << (end - start - 1).bit_length())
    widest = max(chunk, q.shape[3] * (1 if theta is None else 2), v.shape[3])
    budget = SEGMENT_CPU if q.device.type == "cpu" else SEGMENT_GPU
    step = max(1, budget // (q.shape[0] * q.shape[2] * widest * chunk)) * chunk
    return [(begin, min(begin + step, end), chunk) for begin in range(start, end, step)]


def _load(q, k, v, theta, positions, start, begin, stop, chunk, dtype):
    """q, u, v as [B, H, n, C, .] in the dtype of the state, filled up with masked tokens, and their turn."""
    # q None: only the state is wanted.
    q = None if q is None else _cut(q, begin, stop, chunk, dtype)
    u = _cut(k, begin, stop, chunk, dtype, -torch.inf)
    count = u.shape[2] * chunk
    if positions is None:
        at = torch.arange(begin - start, begin - start + count, device=k.device)[None]
    else:
        at = positions.new_zeros(positions.shape[0], count)
        at[:, : stop - begin] = positions[:, begin:stop]
    turn = Turn.of(theta, at.unflatten(1, (-1, chunk)), dtype)
    return q, u, _cut(v, begin, stop, chunk, dtype), turn


def _cut(x, begin, stop, chunk, dtype, fill=0.0):
    """x[:, begin:stop] of [B, T, H, F] as contiguous [B, H, n, C, F]."""
    piece = x[:, begin:stop].transpose(1, 2)
    missing = -(stop - begin) % chunk
    if missing:
        full = piece.new_full((*piece.shape[:2], stop - begin + missing, piece.shape[3]), fill, dtype=dtype)
        full[:, :, : stop - begin] = piece
    else:
        full = piece.to(dtype).contiguous()
    return full.unflatten(2, (-1, chunk))


def _store(out, x, begin, stop):
    out[:, begin:stop] = x.flatten(2, 3)[:, :, : stop - begin].transpose(1, 2)
