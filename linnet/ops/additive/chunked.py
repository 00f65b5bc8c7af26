"""Additive decay attention, chunked: dense matrix products in PyTorch, on any device, with a hand-written backward.

The decays telescope: between token s and token t >= s they multiply to exp(z_s - z_t). The weight of s at t is then
exp(u_s - z_t) <= 1, the product of a factor a of t and a factor b of s, and a chunk is ordinary linear attention,

    O = tril((Q a) b^T) V + (Q a) (initial S)         S <- decay S + final (b^T V)

where S is normalised by exp(-z) at the boundaries of chunks, and LRPE rotates Q a and b. The sequence is walked in
segments of a few chunks, so that temporaries stay small (memory is linear in T) and in the cache. The backward repeats
the sweep over the states alone and then goes through the segments in reverse.

The factors are in linear space, with one reference per chunk and channel, r = max(largest logit of the chunk, z before
the chunk):

    P_t = exp(z_t - r) = exp(z_before - r) + cumsum_t exp(u - r)          exp(u_s - z_t) = exp(u_s - r) / P_t

This costs one exponential and one division per element. It is exact to rounding unless P_t comes near the smallest
number: a key factor that underflows belongs to a weight below 1e-38 / FLOOR (float32: 1e-12). Where a channel grows by
more than that inside a chunk (early logits 60 below a later one) the chunk is halved repeatedly instead: for rows in a
right half and columns in the left half before it, with r = z at the end of the left half, exp(u_s - r) <= 1 and
exp(r - z_t) <= 1, so nothing overflows for any input, and what underflows is truly that small.

Without causality keys are the softmax over the sequence, and one pass is enough:

    k = softmax_t(u),  S = k^T V,  O = Q S      (paper 003, section 4.1; the last token equals that of the causal form)
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.ops.chunks import multiply_add, state_dtype
from linnet.ops.documents import count_states, documents
from linnet.ops.rotation import spread
from linnet.ops.sequence import dot

CHUNK = 64
# Elements of a segment's largest temporary.
SEGMENT_CPU, SEGMENT_GPU = 2**19, 2**26
# The same for a pass without causality, whose segment is the sequence: a CPU takes a few rows of the batch at a time,
# so that temporaries stay in its cache and are not fresh pages of the system at every operation.
ROWS_CPU = 2**20


# From (D, delta) of the state before some tokens, D the gradient to S with z held and delta = sum_V D S - (the gradient
# to z), for these tokens alone, to what the tokens after them give to (D, delta) of the state after them.
Later = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def add_later(
    later: Later, D: Tensor, delta: Tensor, dS: Tensor | None, dz: Tensor | None, S_end: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of S and z after the last token with what later tokens give; dS and dz without it, or None."""
    D, delta = later(D, delta)
    D, more = D.contiguous(), dot(D, S_end, delta.shape[-1]) - delta
    return (D, more) if dS is None else (dS + D, dz + more)


def forward(
    q, k, v, theta, positions, S, z, scale, causal, cu_seqlens, return_final=True
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, H, V] and S, z after the last token, wanted or not; arguments as in `additive_attention`."""
    if not causal and S is None and (cuts := _cuts(q, v, theta, cu_seqlens)):
        parts = [
            forward(q[cut], k[cut], v[cut], theta, _own(positions, cut), None, None, scale, False, None) for cut in cuts
        ]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))
    S, z = _first_state(q, k, v, theta, S, z, cu_seqlens)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    for rows, start, end in documents(cu_seqlens, q.shape[0], q.shape[1]):
        for begin, stop, chunk in _segments(q, v, theta, start, end, causal):
            segment = _load(q, k, v, theta, positions, start, begin, stop, chunk, S.dtype)
            if causal:
                out, S[rows], z[rows] = _segment(*segment, S[rows], z[rows])
            else:
                out, S[rows], z[rows] = _non_causal(*segment)
            _store(o, out if scale == 1.0 else out * scale, begin, stop)
    return o, S, z


def summarise(k, v, theta, positions) -> tuple[Tensor, Tensor]:
    """S and z after the last token, from nothing, without documents."""
    S, z = _first_state(k, k, v, theta, None, None, None)
    for begin, stop, chunk in _segments(k, v, theta, 0, k.shape[1], True):
        _, u, v_, rotation = _load(None, k, v, theta, positions, 0, begin, stop, chunk, S.dtype)
        S, z = _pass(u, v_, rotation, S, z)
    return S, z


def backward(do, dS, dz, q, k, v, theta, positions, S, z, S_end, scale, causal, cu_seqlens) -> tuple[Tensor, ...]:
    """Gradients to q, k, v, theta (empty without it), S and z (given or not); `S_end` is the forward's final S.

    Those to the final state, dS and dz, may be None, and then S_end, but not without causality, where z is the log-sum
    after the last token.
    """
    if not causal and S is None and (cuts := _cuts(q, v, theta, cu_seqlens)):
        parts = []
        for cut in cuts:
            grads = (_own_rows(x, cut) for x in (do, dS, dz))
            state = (None, _own_rows(z, cut), _own_rows(S_end, cut))
            more = (q[cut], k[cut], v[cut], theta, _own(positions, cut), *state, scale, False, None)
            parts.append(backward(*grads, *more))
        *by_row, dtheta, dS_own, dz_own = ([part[i] for part in parts] for i in range(6))
        return (*map(torch.cat, by_row), sum(dtheta[1:], dtheta[0]), torch.cat(dS_own), torch.cat(dz_own))
    S, z = _first_state(q, k, v, theta, S, z if causal else None, cu_seqlens)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dtheta = S.new_zeros(theta.shape if theta is not None else 0)
    once = Rotation(cos=theta).once
    # At a boundary: the gradient to S with z held, and minus the gradient to z, by which S was divided.
    if dS is None:
        D, delta = torch.zeros_like(S), torch.zeros_like(z)
    else:
        D = dS.to(S.dtype, copy=True, memory_format=torch.contiguous_format)
        delta = once((S_end.to(S.dtype) * D).sum(-1))
    if dz is not None:
        delta -= dz.to(S.dtype)
    for rows, start, end in documents(cu_seqlens, q.shape[0], q.shape[1]):
        segments = _segments(q, v, theta, start, end, causal)
        checkpoints = [(S[rows], z[rows])]
        for begin, stop, chunk in segments[:-1]:
            _, u, v_, rotation = _load(None, k, v, theta, positions, start, begin, stop, chunk, S.dtype)
            checkpoints.append(_pass(u, v_, rotation, *checkpoints[-1]))
        for (begin, stop, chunk), (S_in, z_in) in zip(reversed(segments), reversed(checkpoints), strict=False):
            segment = _load(q, k, v, theta, positions, start, begin, stop, chunk, S.dtype)
            do_ = _cut(do, begin, stop, chunk, S.dtype)
            if scale != 1.0:
                do_ = do_ * scale
            if causal:
                *grads, D[rows], delta[rows] = _segment_backward(do_, *segment, S_in, z_in, D[rows], delta[rows])
            else:
                grads = _non_causal_backward(do_, D[rows], delta[rows], *segment, S_end[rows].to(S.dtype))
                D[rows], delta[rows] = 0.0, 0.0
            for out, grad in zip((dq, dk, dv), grads, strict=False):
                _store(out, grad, begin, stop)
            if theta is not None:
                dtheta += segment[3].theta_gradient(grads[3])
    return dq, dk, dv, dtheta if theta is None else dtheta.to(theta.dtype), D, once((S * D).sum(-1)) - delta


def _cuts(q, v, theta, cu_seqlens) -> list[slice]:
    """The rows of a batch without causality that a CPU takes at a time; none if it takes all."""
    if cu_seqlens is not None or q.device.type != "cpu":
        return []
    batch, length, heads, width = q.shape
    row = length * heads * max(width * (1 if theta is None else 2), v.shape[3])
    count = min(batch, -(-batch * row // ROWS_CPU))
    ends = [batch * number // count for number in range(count + 1)] if count > 1 else []
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _own(positions: Tensor | None, rows: slice) -> Tensor | None:
    return positions if positions is None or len(positions) == 1 else positions[rows]


def _own_rows(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


def _pass(u, v, rotation, S, z) -> tuple[Tensor, Tensor]:
    """S and z after a segment, without its outputs."""
    key, final, decay, z_after = fold_keys(u, z)
    new = rotation.twice(final) * torch.matmul(rotation.apply(key).mT, v)
    return _sweep(new, rotation.twice(decay), S)[1], z_after


def _segment(q, u, v, rotation, S, z):
    f = factorise(u, z)
    keys, queries = rotation.apply(f.key), rotation.apply(q * f.query)
    initial_states, S = _sweep(rotation.twice(f.final) * torch.matmul(keys.mT, v), rotation.twice(f.decay), S)
    o = torch.matmul(_scores(q, queries, keys, f, rotation), v)
    multiply_add(o, queries, rotation.twice(f.initial) * initial_states)
    return o, S, f.z


def _segment_backward(do, q, u, v, rotation, S, z, D, delta):
    f = factorise(u, z)
    q_hat = q * f.query
    keys, queries = rotation.apply(f.key), rotation.apply(q_hat)
    initial, final, decay = rotation.twice(f.initial), rotation.twice(f.final), rotation.twice(f.decay)
    initial_states, _ = _sweep(final * torch.matmul(keys.mT, v), decay, S)
    D_after, D = _sweep(initial * torch.matmul(queries.mT, do), decay, D, reverse=True)
    D_after *= final

    scores, dscores = _scores(q, queries, keys, f, rotation), torch.matmul(do, v.mT).tril_()
    dv = torch.matmul(scores.mT, do)
    multiply_add(dv, keys, D_after)
    dqueries = torch.matmul(do, (initial_states * initial).mT)
    dkeys = torch.matmul(v, D_after.mT)
    if f.blocks is None:
        multiply_add(dqueries, dscores, keys)
        multiply_add(dkeys, dscores.mT, queries)
    dq, dangle = rotation.transpose(q_hat, dqueries)
    du, dangle_k = rotation.transpose(f.key, dkeys)
    dq.mul_(f.query)
    du = du * f.key if f.blocks is not None else du
    for block in f.blocks or ():
        pairs, row_q = block.pairs(dscores), block.rows(q) * block.row
        grad, angle = rotation.transpose(
            row_q, torch.matmul(pairs, rotation.apply(block.column, block.columns)), block.rows
        )
        block.rows(dq).add_(grad * block.row)
        grad_k = torch.matmul(pairs.mT, rotation.apply(row_q, block.rows))
        grad_k, angle_k = rotation.transpose(block.column, grad_k, block.columns)
        block.columns(du).add_(grad_k * block.column)
        if angle is not None:
            block.rows(dangle).add_(angle)
            block.columns(dangle_k).add_(angle_k)

    # exp(z_t) divides o_t per channel, so the gradient of z_t is -q_t dq_t; that of u_s gets exp(u_s - z_t) of it.
    q_dq = q * dq
    weighted = f.query * q_dq
    after, delta = _sweep(f.initial * weighted.sum(-2), f.decay, delta, reverse=True)
    outside = (f.final * after)[..., None, :]
    if f.blocks is None:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=q.dtype, device=q.device).triu_()
        du = du.sub_(torch.matmul(later, weighted)).sub_(outside).mul_(f.key)
    else:
        du.addcmul_(f.key, outside, value=-1)
        for block in f.blocks:
            block.columns(du).addcmul_(block.column, (block.row * block.rows(q_dq)).sum(-2, keepdim=True), value=-1)
    return dq, du, dv, None if dangle is None else dangle.add_(dangle_k), D, delta


def _scores(q, queries, keys, f: "Factors", rotation: "Rotation"):
    """[B, H, n, C, C]: query . key with the weights of a running softmax, zero above the diagonal."""
    if f.blocks is None:
        return torch.matmul(queries, keys.mT).tril_()
    scores = q.new_zeros(*q.shape[:-1], q.shape[-2])
    for block in f.blocks:
        row = rotation.apply(block.rows(q) * block.row, block.rows)
        block.pairs(scores).copy_(torch.matmul(row, rotation.apply(block.column, block.columns).mT))
    return scores


def _sweep(new, decay, x, reverse=False):
    """x <- decay_i x + new_i over the chunks (dim 2). Returns x before each chunk, stacked, and the last x."""
    met, end = torch.empty_like(new), torch.empty_like(new[:, :, 0])
    chunks = range(new.shape[2] - 1, -1, -1) if reverse else range(new.shape[2])
    met[:, :, chunks[0]] = x
    for i, following in zip(chunks, [*(met[:, :, j] for j in chunks[1:]), end], strict=True):
        torch.addcmul(new[:, :, i], decay[:, :, i], met[:, :, i], out=following)
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
    """q, u, v as [B, H, n, C, .] in the dtype of the state, filled up with masked tokens, and their rotation."""
    # q is None where only the state is needed.
    q = None if q is None else _cut(q, begin, stop, chunk, dtype)
    u = _cut(k, begin, stop, chunk, dtype, -torch.inf)
    count = u.shape[2] * chunk
    if positions is None:
        at = torch.arange(begin - start, begin - start + count, device=k.device)[None]
    else:
        at = positions.new_zeros(positions.shape[0], count, *positions.shape[2:])
        at[:, : stop - begin] = positions[:, begin:stop]
    rotation = Rotation.of(theta, at.unflatten(1, (-1, chunk)), dtype)
    return q, u, _cut(v, begin, stop, chunk, dtype), rotation


def _cut(x, begin, stop, chunk, dtype, fill=0.0):
    """x[:, begin:stop] of [B, T, H, F] as contiguous [B, H, n, C, F]."""
    rows = x[:, begin:stop].transpose(1, 2)
    missing = -(stop - begin) % chunk
    if missing:
        full = rows.new_full((*rows.shape[:2], stop - begin + missing, rows.shape[3]), fill, dtype=dtype)
        full[:, :, : stop - begin] = rows
    else:
        full = rows.to(dtype).contiguous()
    return full.unflatten(2, (-1, chunk))


def _store(out, x, begin, stop):
    out[:, begin:stop] = x.flatten(2, 3)[:, :, : stop - begin].transpose(1, 2)


@dataclass(frozen=True)
class Rotation:
    """The rotation of a run of tokens [B, H, n, C, K]; without tables (no theta) everything passes unchanged.

    cos, sin: [1 or B, H, n, C, K]; positions: [1 or B, 1, n, C, 1], on several axes [1 or B, 1, n, C, K].
    A `view` picks tokens out of tables and tensors alike (the rows or columns of a block).
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    positions: Tensor | None = None

    @staticmethod
    def of(theta: Tensor | None, positions: Tensor, dtype: torch.dtype) -> "Rotation":
        """For theta [H, K] and positions [1 or B, n, C], or [1 or B, n, C, A] on several axes.

        Angles are formed in float64: t theta needs the digits.
        """
        if theta is None:
            return Rotation()
        places = (positions[..., None] if positions.ndim == 3 else spread(positions, theta.shape[1]))[:, None]
        if positions.ndim == 4 and theta.device.type == "cpu":
            tables = _look_up(theta, positions, dtype)
            if tables is not None:
                return Rotation(*tables, places.to(dtype))
        angle = places.double() * theta.double()[:, None, None]
        return Rotation(angle.cos().to(dtype), angle.sin().to(dtype), places.to(dtype))

    def apply(self, x: Tensor, view=lambda x: x) -> Tensor:
        if self.cos is None:
            return x
        both = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
        for half, table in zip(both.chunk(2, -1), (self.cos, self.sin), strict=True):
            torch.mul(x, view(table), out=half)
        return both

    def transpose(self, x: Tensor, grad: Tensor, view=lambda x: x) -> tuple[Tensor, Tensor | None]:
        """From the gradient to `apply(x)`: those to x and to x's angles (None without tables)."""
        if self.cos is None:
            return grad, None
        cos, sin = view(self.cos), view(self.sin)
        first, second = grad.chunk(2, -1)
        angle = (second * cos).addcmul_(first, sin, value=-1).mul_(x)
        return (first * cos).addcmul_(second, sin), angle

    def twice(self, x: Tensor) -> Tensor:
        """A factor per channel [..., K], made to multiply rows of the state: [..., K or 2K, 1]."""
        return (x if self.cos is None else torch.cat([x, x], -1))[..., None]

    def once(self, x: Tensor) -> Tensor:
        """The transpose of doubling: [..., K or 2K] -> [..., K]."""
        return x if self.cos is None else x.unflatten(-1, (2, -1)).sum(-2)

    def theta_gradient(self, angle: Tensor) -> Tensor:
        return (angle * self.positions).sum((0, 2, 3))


def _look_up(theta: Tensor, positions: Tensor, dtype: torch.dtype) -> list[Tensor] | None:
    """Cosines and sines [1 or B, H, n, C, K] for positions [1 or B, n, C, A]; None if most coordinates differ.

    A grid has few coordinates per axis. On a CPU a cosine in float64 takes ten times as long as a copy.
    """
    first, last = (int(end) for end in positions.aminmax())
    if 2 * (last - first + 1) > positions[..., 0].numel():
        return None
    K, axes = theta.shape[1], positions.shape[-1]
    angle = torch.arange(first, last + 1, device=theta.device).double()[:, None] * theta.double()[:, None]  # [H, M, K]
    rows, width = (positions - first).flatten(0, 2).unbind(-1), -(-K // axes)
    tables = []
    for table in (angle.cos().to(dtype), angle.sin().to(dtype)):
        groups = [table[..., a * width : (a + 1) * width].index_select(1, rows[a]) for a in range(axes)]
        tables.append(torch.cat(groups, -1).unflatten(1, positions.shape[:3]).transpose(0, 1))
    return tables


# Smallest P_t of the linear form.
FLOOR = {torch.float32: 1e-26, torch.float64: 1e-200}


@dataclass
class Block:
    """Pairs of tokens with weight `row` x `column`, each [B, H, n, m, size, K].

    `halves`: of each 2 x size tokens the right half are the rows, the left half the columns.
    Otherwise rows and columns are the same tokens (size 1: the diagonal).
    """

    size: int
    halves: bool
    row: Tensor
    column: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """[..., C, F] -> [..., m, size, F]: a view on the row tokens."""
        return x.unflatten(-2, (-1, 2, self.size))[..., 1, :, :] if self.halves else x.unflatten(-2, (-1, self.size))

    def columns(self, x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, 2, self.size))[..., 0, :, :] if self.halves else x.unflatten(-2, (-1, self.size))

    def pairs(self, matrix: Tensor) -> Tensor:
        """[..., C, C] -> [..., m, size, size]: a view on the entries of these pairs."""
        count = 2 if self.halves else 1
        grid = matrix.unflatten(-1, (-1, count, self.size)).unflatten(-4, (-1, count, self.size))
        grid = grid[..., count - 1, :, :, 0, :]
        return grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


@dataclass
class Factors:
    """Weights of a run of n chunks of C tokens, with S normalised (by exp(-z)) at the chunk boundaries.

    query, key [B, H, n, C, K]: factors of a token towards the state before its chunk and the state after it.
    initial, final [B, H, n, K]: complete them: the state before the chunk has weight query_t x initial at token t, and
        token s has weight key_s x final in the state after the chunk.
    decay [B, H, n, K]: weight of the state before the chunk in the state after it.
    z [B, H, K]: log-sum after the last token,
    blocks: None if query x key is also the weight inside a chunk, else where that weight is to be had.
    """

    query: Tensor
    key: Tensor
    initial: Tensor
    final: Tensor
    decay: Tensor
    z: Tensor
    blocks: list[Block] | None


def factorise(u: Tensor, z: Tensor) -> Factors:
    """Factors for logits u [B, H, n, C, K] that follow a log-sum z [B, H, K]; C is a power of two.

    The linear form is taken when a look at the values allows it. Only on the CPU: a GPU would have to wait for the
    answer, so there it is always halves.
    """
    key, denominator, peak, before, after = _linear(u, z)
    decay = (before - _finite(after)).exp_()
    reference = torch.maximum(peak, before)
    initial = (before - _finite(reference)).exp_()
    if u.device.type == "cpu":
        shift = (peak - _finite(reference)).exp_()
        denominator = torch.addcmul(initial[..., None, :], denominator, shift[..., None, :])
        smallest = float(denominator.amin())
        if smallest >= FLOOR[u.dtype] or _only_masked_below(FLOOR[u.dtype], denominator, u, before):
            query = denominator.reciprocal_()
            if smallest == 0.0:
                query.masked_fill_(query == torch.inf, 0.0)
            key *= shift[..., None, :]
            final = (reference - _finite(after)).exp_()
            return Factors(query, key, initial, final, decay, after[:, :, -1], None)
    z_t = torch.cat([before[..., None, :], u], -2).logcumsumexp(-2)[..., 1:, :]
    ones = torch.ones_like(initial)
    query = (before[..., None, :] - _finite(z_t)).exp_()
    key = (u - _finite(after)[..., None, :]).exp_()
    return Factors(query, key, ones, ones, decay, after[:, :, -1], _halves(u, z_t))


def fold_keys(u: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The part of `factorise` that the state alone needs: key, final, decay, z."""
    key, _, peak, before, after = _linear(u, z)
    return key, (peak - _finite(after)).exp_(), (before - _finite(after)).exp_(), after[:, :, -1]


def _linear(u, z):
    peak = u.amax(-2)
    key = (u - _finite(peak)[..., None, :]).exp_()
    denominator = key.cumsum(-2)
    total = peak + denominator[..., -1, :].log()
    # A loop over chunks: torch.logcumsumexp goes element by element on the CPU and takes ten times longer.
    boundaries = [z]
    for chunk in total.unbind(2):
        boundaries.append(torch.logaddexp(boundaries[-1], chunk))
    boundaries = torch.stack(boundaries, 2)
    return key, denominator, peak, boundaries[:, :, :-1], boundaries[:, :, 1:]


def _only_masked_below(floor, denominator, u, before) -> bool:
    nothing_yet = ((u > -torch.inf).cumsum(-2) == 0) & (before == -torch.inf)[..., None, :]
    return bool((nothing_yet | (denominator >= floor)).all())


def _halves(u, z_t) -> list[Block]:
    diagonal = (u - _finite(z_t)).exp_().unflatten(-2, (-1, 1))
    blocks = [Block(1, False, torch.ones_like(diagonal), diagonal)]
    size = u.shape[-2] // 2
    while size:
        z_left, z_right = z_t.unflatten(-2, (-1, 2, size)).unbind(-3)
        end = z_left[..., -1:, :]
        column = u.unflatten(-2, (-1, 2, size))[..., 0, :, :]
        blocks.append(Block(size, True, (end - _finite(z_right)).exp_(), (column - _finite(end)).exp_()))
        size //= 2
    return blocks


def _finite(x: Tensor) -> Tensor:
    """x with 0 for -inf: subtracted from -inf, that leaves the weight exp(-inf) = 0 of what is not there."""
    return x.masked_fill(x == -torch.inf, 0.0)


def _non_causal(q: Tensor, u: Tensor, v: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """o, S, z for [B, H, 1, T, .] tensors: the whole sequence is one chunk."""
    key, z = _softmax(u)
    S = torch.matmul(rotation.apply(key).mT, v)
    return torch.matmul(rotation.apply(q), S), S[:, :, 0], z[:, :, 0]


def _non_causal_backward(
    do: Tensor, D: Tensor, delta: Tensor, q: Tensor, u: Tensor, v: Tensor, rotation: Rotation, S: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients to q, u, v and the angles; D is the gradient to S with z held, `delta` minus the one to z."""
    key, _ = _softmax(u)
    queries, keys, S = rotation.apply(q), rotation.apply(key), S[:, :, None]
    from_o = torch.matmul(queries.mT, do)
    D = D[:, :, None] + from_o
    dq, dangle = rotation.transpose(q, torch.matmul(do, S.mT))
    dkey, dangle_k = rotation.transpose(key, torch.matmul(v, D.mT))
    # z normalises S, so it also takes what o gives to S.
    delta = delta[:, :, None] + rotation.once((from_o * S).sum(-1))
    du = key * (dkey - delta[..., None, :])
    return dq, du, torch.matmul(keys, D), None if dangle is None else dangle + dangle_k


def _softmax(u: Tensor) -> tuple[Tensor, Tensor]:
    peak = u.amax(-2)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    key = (u - peak[..., None, :]).exp_()
    denominator = key.sum(-2)
    z = peak + denominator.log()
    return key * denominator.masked_fill(denominator == 0, 1.0).reciprocal()[..., None, :], z
