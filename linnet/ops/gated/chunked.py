"""Gated linear attention in chunks: every decay is a product of factors at most 1, so nothing can overflow.

Inside a chunk the score of a query r and a key s <= r is sum_d q_rd k_sd (a_{s+1} ... a_r)_d. Split as exp(G_r) times
exp(-G_s), with G the cumulative log-decay, it overflows as soon as decays are strong. Here a chunk is halved, down to
single tokens: a query in the second half of a block and a key in the first half meet at the middle, and

    a_{s+1} ... a_r = (a_{s+1} ... a_middle) (a_{middle+1} ... a_r)

so each block of scores is one matrix product of queries and keys that have decayed to its middle. From the smallest
blocks upwards, q and k are multiplied in place by the decay of the other half as blocks merge: one exponential an
element, one pass a level, half the products of a full score matrix, no difference of large sums, and exp(-inf) = 0 is
as good as any decay. At the top they stand at the two ends of the chunk, as the products with the states need them.

The backward has lightning's form (see there) with per-channel decays. The gradient of log a_t is the sum of all that
passes through step t: over pairs inside a chunk by X_t = q_t dq_t - k_t dk_t summed over s >= t (paper 002's and 001's
authors' identity), without the pairs r = s, which no decay touches; and over pairs with the states, term by term, so
that rounding never grows with T.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from linnet.ops.chunks import (
    Segment,
    carry,
    count_pairs,
    cut_rows,
    cut_tokens,
    decay_rest,
    fill_gradients,
    gather,
    multiply_add,
    scatter,
    start_states,
    state_dtype,
    states_before,
)
from linnet.ops.documents import Waves, in_waves, longest

# Gated linear attention over packed documents with keys of a few channels, on a CPU: one step for all documents.
#
# Products of small matrices cost more than the K V numbers of a state where keys are narrow. So the state of each
# token is formed, with documents in the order of time (`linnet.ops.documents.Waves`). Channels come first and heads
# last in memory, so that q, k, v and decays broadcast over whole runs of numbers.
#
#     S_t = a_t S_{t-1} + k_t v_t,  o_t = q_t S_t
#     G_t = q_t do_t + a_{t+1} G_{t+1},  dq_t = S_t do_t,  dk_t = G_t v_t,  dv_t = k_t G_t,  d log a_t = a_t G_t S_{t-1}

# Channels of a key. One thread, forward and backward of 256 channels in 32 documents of 60 to 130 tokens, in chunks and
# here: heads of 4 335 and 73 ms, of 8 240 and 113, of 16 156 and 162, of 32 128 and 347.
WIDEST = 8


def packed_forward(
    q, k, v, log_decay, initial_state, cu_seqlens, scale, return_final_state
) -> tuple[Tensor, Tensor | None]:
    """o [1, T, H, V] and the final state [N, H, K, V] or None; arguments as `gated_linear_attention`."""
    waves, dtype = in_waves(cu_seqlens, q.shape[1]), state_dtype(q, k, v)
    q_KTH, k_KTH, v_VTH, decay_KTH = _channels(waves, dtype, q, k, v, log_decay)
    states_VKTH = _states(waves, k_KTH, v_VTH, decay_KTH.exp_(), initial_state)
    o = _tokens(waves, _contract(q_KTH, states_VKTH.unbind(1)).mul_(scale), v)
    if not return_final_state:
        return o, None
    final = start_states(initial_state, q, k, v, cu_seqlens)
    final[waves.states] = states_VKTH.index_select(2, waves.last).permute(2, 3, 1, 0)
    return o, final


def packed_backward(
    q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay and the initial state (given or not)."""
    waves, dtype = in_waves(cu_seqlens, q.shape[1]), state_dtype(q, k, v)
    q_KTH, k_KTH, v_VTH, decay_KTH, do_VTH = _channels(waves, dtype, q, k, v, log_decay, do)
    states_VKTH = _states(waves, k_KTH, v_VTH, decay_KTH.exp_(), initial_state)
    do_VTH.mul_(scale)
    dq_KTH = _contract(do_VTH, states_VKTH.unbind(0))

    dstates_VKTH = do_VTH[:, None] * q_KTH
    dinitial = start_states(dfinal, q, k, v, cu_seqlens)
    if dfinal is not None:
        dstates_VKTH.index_add_(2, waves.last, _of_documents(dinitial, waves))
    through_VKTH, first = states_VKTH, slice(0, waves.sizes[0])  # G_t S_{t-1}
    waves.recur_back(decay_KTH[None], dstates_VKTH, 2, through_VKTH)
    entered = None if initial_state is None else _of_documents(initial_state.to(dtype), waves)
    through_VKTH[:, :, first] = 0.0 if entered is None else dstates_VKTH[:, :, first] * entered
    dinitial[waves.states] = (dstates_VKTH[:, :, first] * decay_KTH[:, first]).permute(2, 3, 1, 0)

    dk_KTH, dv_VTH = _contract(v_VTH, dstates_VKTH.unbind(0)), _contract(k_KTH, dstates_VKTH.unbind(1))
    dlog_KTH = through_VKTH.sum(0).mul_(decay_KTH)
    grads = ((dq_KTH, q), (dk_KTH, k), (dv_VTH, v), (dlog_KTH, log_decay))
    return *(_tokens(waves, grad, like) for grad, like in grads), dinitial


def _channels(waves: Waves, dtype: torch.dtype, *inputs: Tensor) -> list[Tensor]:
    """Returns each of x [1, T, H, C] as a fresh [C, T, H], in the order of time."""
    return [waves.take(x).permute(2, 0, 1).to(dtype, copy=True, memory_format=torch.contiguous_format) for x in inputs]


def _tokens(waves: Waves, x: Tensor, like: Tensor) -> Tensor:
    """Returns [C, T, H] as [1, T, H, C], in the order of the row and the dtype of `like`."""
    return waves.put(x.permute(1, 2, 0).contiguous()).to(like.dtype)


def _states(waves: Waves, k: Tensor, v: Tensor, decay: Tensor, initial_state: Tensor | None) -> Tensor:
    """Returns the states [V, K, T, H] after each token."""
    states = v[:, None] * k
    if initial_state is not None:
        first = waves.sizes[0]
        states[:, :, :first].addcmul_(decay[:, :first], _of_documents(initial_state.to(states.dtype), waves))
    waves.recur(decay[None], states, 2)
    return states


def _of_documents(state: Tensor, waves: Waves) -> Tensor:
    """Returns states [N, H, K, V] as [V, K, documents, H], those of the documents that have tokens."""
    return state.index_select(0, waves.states).permute(3, 2, 0, 1)


def _contract(factors: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
    """Returns sum_i factors_i matrices_i, for factors [C, T, H] and C matrices [., T, H]."""
    total = factors[0] * matrices[0]
    for factor, matrix in zip(factors[1:], matrices[1:], strict=True):
        total.addcmul_(factor, matrix)
    return total


CHUNK = 64  # a power of two


def gated_forward(
    q, k, v, log_decay, initial_state, cu_seqlens, scale, return_final_state=True
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, H, V] and the final state [N, H, K, V] or None; arguments as `gated_linear_attention`."""
    if _is_packed(q, cu_seqlens):
        return packed_forward(q, k, v, log_decay, initial_state, cu_seqlens, scale, return_final_state)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    # In here states are [N, H, V, K], so that decays, which vary along K, multiply them row by row.
    state = start_states(initial_state, q, k, v, cu_seqlens).mT.contiguous()
    for rows in cut_rows(q, v, cu_seqlens):
        state_rows, buffer = state[rows.states], rows.buffer(o)
        _forward_span(*map(rows.take, (q, k, v, log_decay)), scale, state_rows, buffer)
        rows.put_state(state, state_rows)
        rows.put(o, buffer)
    return o, state.mT.contiguous() if return_final_state else None


def gated_backward(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, log_decay and the initial state (given or not), from those of o and of the final state."""
    if _is_packed(q, cu_seqlens):
        return packed_backward(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, log_decay)]
    state = start_states(initial_state, q, k, v, cu_seqlens).mT.contiguous()
    dstate = start_states(dfinal, q, k, v, cu_seqlens).mT.contiguous()

    def fill(inputs, state, dstate, grads) -> None:
        _backward_span(*inputs, scale, state, dstate, *grads)

    fill_gradients(cut_rows(q, v, cu_seqlens), fill, (q, k, v, log_decay, do), state, dstate, grads)
    return *grads, dstate.mT.contiguous()


def _is_packed(q: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether `linnet.ops.gated.chunked` takes a call: narrow keys on a CPU, unless one document is most of the row."""
    if cu_seqlens is None or q.is_cuda or q.shape[-1] > WIDEST or not q.shape[1]:
        return False
    return 2 * longest(cu_seqlens, q.shape[1]) <= q.shape[1]


def _forward_span(q, k, v, log_decay, scale: float, state, o) -> None:
    """Fills o, and moves the state [B, H, V, K] in place to after the last token."""
    for segment in cut_tokens(q, v, CHUNK):
        q_nBHCK, k_nBHCK, v_nBHCV, log_decay_nBHCK = gather_padded(segment, state.dtype, q, k, v, log_decay)
        q_nBHCK.mul_(scale)
        decays, rest = block_decays(log_decay_nBHCK)
        scores_nBHCC = diagonal_scores(q_nBHCK, k_nBHCK)
        q_nBHCK.mul_(decays[0])
        for half in halvings(decays, since=[q_nBHCK], until=[k_nBHCK]):
            scores_between(scores_nBHCC, half).copy_(late_halves(q_nBHCK, half) @ early_halves(k_nBHCK, half).mT)
        o_nBHCV = scores_nBHCC @ v_nBHCV
        initials_nBHVK = carry(v_nBHCV.mT @ k_nBHCK, decays[-1], state, rest=rest)
        multiply_add(o_nBHCV, q_nBHCK, initials_nBHVK.mT)
        scatter(o, segment, o_nBHCV)


def _backward_span(q, k, v, log_decay, do, scale: float, state, dstate, dq, dk, dv, dlog_decay) -> None:
    """Fills dq, dk, dv, dlog_decay, and moves dstate [B, H, V, K] in place from the final to the initial state."""
    cut = cut_tokens(q, v, CHUNK)
    initials = states_before(cut, lambda segment: _pass(k, v, log_decay, segment, state), state)
    for segment in reversed(cut):
        q_nBHCK, k_nBHCK, v_nBHCV, log_decay_nBHCK, do_nBHCV = gather_padded(
            segment, state.dtype, q, k, v, log_decay, do
        )
        do_nBHCV.mul_(scale)
        decays, rest = block_decays(log_decay_nBHCK)

        # Inside the chunks. `since` and `until` become the decays from the start and to the end of the chunk.
        scores_nBHCC = diagonal_scores(q_nBHCK, k_nBHCK)
        dscores_nBHCC = do_nBHCV @ v_nBHCV.mT
        since_nBHCK, until_nBHCK = decays[0].clone(), torch.ones_like(k_nBHCK)
        late_q_nBHCK, early_k_nBHCK = q_nBHCK * since_nBHCK, k_nBHCK.clone()
        dq_nBHCK, dk_nBHCK = torch.zeros_like(q_nBHCK), torch.zeros_like(k_nBHCK)
        for half in halvings(decays, since=[late_q_nBHCK, since_nBHCK], until=[early_k_nBHCK, until_nBHCK]):
            late_q, early_k = late_halves(late_q_nBHCK, half), early_halves(early_k_nBHCK, half)
            scores_between(scores_nBHCC, half).copy_(late_q @ early_k.mT)
            dscores = scores_between(dscores_nBHCC, half).contiguous()
            late_halves(dq_nBHCK, half).addcmul_(dscores @ early_k, late_halves(since_nBHCK, half))
            early_halves(dk_nBHCK, half).addcmul_(dscores.mT @ late_q, early_halves(until_nBHCK, half))
        same_nBHC1 = dscores_nBHCC.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dv_nBHCV = scores_nBHCC.mT @ do_nBHCV

        # Between the chunks.
        initials_nBHVK = carry(v_nBHCV.mT @ early_k_nBHCK, decays[-1], initials.pop(), rest=rest)
        dfinals_nBHVK = carry(do_nBHCV.mT @ late_q_nBHCK, decays[-1], dstate, reverse=True, rest=rest)
        dq_initial_nBHCK = (do_nBHCV @ initials_nBHVK).mul_(since_nBHCK)
        dk_final_nBHCK = (v_nBHCV @ dfinals_nBHVK).mul_(until_nBHCK)
        multiply_add(dv_nBHCV, early_k_nBHCK, dfinals_nBHVK.mT)

        # What passes through step t: pairs (r >= t, s < t) in the chunk, queries from t on that read the entry state,
        # keys before t that the exit state holds, and the entry state as far as the exit state holds it.
        from_here_nBHCK = (dq_nBHCK + dq_initial_nBHCK).mul_(q_nBHCK).addcmul_(k_nBHCK, dk_nBHCK, value=-1)
        through_nBH1K = (initials_nBHVK * dfinals_nBHVK).sum(-2, keepdim=True).mul_(decays[-1])
        dlog_decay_nBHCK = through_nBH1K.expand_as(k_nBHCK).contiguous()
        ones_CC = torch.ones_like(scores_nBHCC[0, 0, 0])
        multiply_add(dlog_decay_nBHCK, ones_CC.triu().expand_as(scores_nBHCC), from_here_nBHCK)
        multiply_add(dlog_decay_nBHCK, ones_CC.tril(-1).expand_as(scores_nBHCC), k_nBHCK * dk_final_nBHCK)

        scatter(dq, segment, dq_nBHCK.add_(dq_initial_nBHCK).addcmul_(same_nBHC1, k_nBHCK))
        scatter(dk, segment, dk_nBHCK.add_(dk_final_nBHCK).addcmul_(same_nBHC1, q_nBHCK))
        scatter(dv, segment, dv_nBHCV)
        scatter(dlog_decay, segment, dlog_decay_nBHCK)


def gated_summary(q, k, log_decay, c, scale: float, reverse: bool) -> tuple[Tensor, Tensor]:
    """The final state [B, H, K, V] from zero, with c = v, and the decay of the whole sequence [B, H, K, 1].

    `reverse`: the gradient of the initial state, with c = do, and the same decay.
    """
    state = start_states(None, q, k, c, None).mT.contiguous()
    cut = cut_tokens(q, c, CHUNK)
    for segment in reversed(cut) if reverse else cut:
        if reverse:
            _pass_back(q, c, log_decay, segment, scale, state)
        else:
            _pass(k, c, log_decay, segment, state)
    return state.mT.contiguous(), log_decay.sum(1, dtype=state.dtype).exp()[..., None]


def _pass_back(q, do, log_decay, segment: Segment, scale: float, dstate) -> None:
    """Moves the gradient of the state [B, H, V, K] in place to before the segment, from its outputs alone."""
    q_nBHCK, do_nBHCV, log_decay_nBHCK = gather_padded(segment, dstate.dtype, q, do, log_decay)
    decays, rest = block_decays(log_decay_nBHCK)
    q_nBHCK.mul_(scale).mul_(decays[0])
    for _ in halvings(decays, since=[q_nBHCK], until=[]):
        pass
    carry(do_nBHCV.mT @ q_nBHCK, decays[-1], dstate, reverse=True, rest=rest)


def _pass(k, v, log_decay, segment: Segment, state) -> None:
    """Moves the state [B, H, V, K] in place to after the segment."""
    k_nBHCK, v_nBHCV, log_decay_nBHCK = gather_padded(segment, state.dtype, k, v, log_decay)
    decays, rest = block_decays(log_decay_nBHCK)
    for _ in halvings(decays, since=[], until=[k_nBHCK]):
        pass
    carry(v_nBHCV.mT @ k_nBHCK, decays[-1], state, rest=rest)


def gather_padded(segment: Segment, dtype: torch.dtype, *inputs: Tensor) -> list[Tensor]:
    """Gathers inputs, padded to a power of two of tokens that neither decay nor add: zeros, log-decays too."""
    missing = (1 << (segment.size - 1).bit_length()) - segment.size
    gathered = [gather(x, segment, dtype) for x in inputs]
    return [pad(x, (0, 0, 0, missing)) for x in gathered] if missing else gathered


def block_decays(log_decay: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of log-decays [..., C, D], the decays over blocks of 1, 2, 4, ... C tokens, [..., C / size, D] each, and the
    `rest` of the last one.

    Each is the exponential of a sum: a product of exponentials would round every factor, and float32 has no number
    between 1 - 6e-8 and 1, so that a log-decay of 1e-8 would be lost.
    """
    sums = [log_decay]
    while sums[-1].shape[-2] > 1:
        first, second = sums[-1].unflatten(-2, (-1, 2)).unbind(-2)
        sums.append(first + second)
    decays = [x.exp() for x in sums]
    return decays, decay_rest(sums[-1], decays[-1])


def halvings(decays: list[Tensor], since: list[Tensor], until: list[Tensor]) -> Iterator[int]:
    """Yields 1, 2, 4, ... C/2, the size of the halves that meet; in between, merges them in place.

    Args:
        decays: from `block_decays`.
        since: tensors [..., C, D] that start as x_t a_t, and end as x_t a_1 ... a_t.
        until: tensors [..., C, D] that start as x_t, and end as x_t a_{t+1} ... a_C.
    """
    for level, of_halves in enumerate(decays[:-1]):
        half = 1 << level
        yield half
        first, second = of_halves.unflatten(-2, (-1, 2, 1)).unbind(-3)
        for x in since:
            late_halves(x, half).mul_(first)
        for x in until:
            early_halves(x, half).mul_(second)


def pair_decays(decays: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of decays [..., 1] from `block_decays`, those between the tokens of a chunk.

    Returns:
        [..., C, C]: a_{s+1} ... a_r of a query r and a key s <= r, 0 above the diagonal; [..., C, 1] each: a_1 ... a_t
        from the start of the chunk to a token, and a_{t+1} ... a_C from a token to its end.
    """
    since, until = decays[0].clone(), torch.ones_like(decays[0])
    between = since.new_zeros(*since.shape[:-1], since.shape[-2])
    between.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    for half in halvings(decays, [since], [until]):
        scores_between(between, half).copy_(late_halves(since, half) * early_halves(until, half).mT)
    return between, since, until


def early_halves(x: Tensor, half: int) -> Tensor:
    """First halves of the blocks of x [..., C, D], as a view [..., C / (2 half), half, D]."""
    return x.unflatten(-2, (-1, 2, half))[..., 0, :, :]


def late_halves(x: Tensor, half: int) -> Tensor:
    """Second halves of the blocks."""
    return x.unflatten(-2, (-1, 2, half))[..., 1, :, :]


def scores_between(scores: Tensor, half: int) -> Tensor:
    """Scores [..., C, C] of second-half queries with first-half keys, as a view [..., C / (2 half), half, half]."""
    blocks = scores.unflatten(-2, (-1, 2, half)).unflatten(-1, (-1, 2, half))[..., 1, :, :, 0, :]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def diagonal_scores(q: Tensor, k: Tensor) -> Tensor:
    """Returns [..., C, C]: q_t k_t on the diagonal, where no decay applies, and zeros elsewhere."""
    scores = q.new_zeros(*q.shape[:-1], q.shape[-2])
    scores.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    return scores


# FLOPs from shapes: 2 per multiply-add, in chunks of 64 whatever form runs, matrix products only. Halving computes half
# of the scores; the products with ones that sum log-decays or their gradients are sums, and left out.


def forward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """C (K + 2 V) + 4 K V per token and head: half the scores, scores with v, the state's update and use."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * H * (count_pairs(T, CHUNK) * (K + 2 * V) + 4 * T * K * V)


def backward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """C (3 K + 4 V) + 10 K V per token and head: scores, gradients of scores, q, k and v, five products with states."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * H * (count_pairs(T, CHUNK) * (3 * K + 4 * V) + 10 * T * K * V)
