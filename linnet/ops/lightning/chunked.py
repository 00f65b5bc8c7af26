"""Lightning Attention in chunks: matrix products inside a chunk, the state between chunks (paper 001, section 3).

With C tokens a chunk, positions r = 1..C in it, S the state after the chunk before, and M_rs = lambda^(r-s) for r >= s:

    O = ((Q K^T) * M) V + diag(lambda^r) Q S,    S <- lambda^C S + (diag(lambda^(C-r)) K)^T V

The state is the one after the last token (eq. 17). The paper's kernels carry lambda times that, and its appendix
misprints several exponents (eq. 24-37); the backward here is derived from the two lines above:

    dA = (dO V^T) * M,   dQ = dA K + diag(lambda^r) dO S^T
    dK = dA^T Q + diag(lambda^(C-r)) V D^T,   dV = ((Q K^T) * M)^T dO + diag(lambda^(C-r)) K D
    D <- lambda^C D + (diag(lambda^r) Q)^T dO       D: gradient of the state after the chunk, carried from the end

The cut_segments and layouts are those of `linnet.ops.chunks`; time and memory are linear in T.
"""

import torch
from torch import Tensor

from linnet.ops.chunks import (
    carry,
    cut_rows,
    cut_tokens,
    fill_gradients,
    gather,
    multiply_add,
    scatter,
    start_states,
)
from linnet.ops.documents import Rows, documents

# On CPUs 64 has the least time for heads of 64 and 128: 32 doubles the states to carry, 128 the products in a chunk.
CHUNK = 64


def lightning_forward(
    q, k, v, log_decay, initial_state, cu_seqlens, scale, return_final_state=True
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, H, V] and the final state [N, H, K, V] or None; arguments as `lightning_attention`."""
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    final = start_states(initial_state, q, k, v, cu_seqlens)
    decay = Decay(log_decay, q.shape[2], final)
    for rows in _rows(q, v, cu_seqlens, return_final_state):
        state, buffer = final[rows.states], rows.buffer(o)
        _forward_span(*map(rows.take, (q, k, v)), decay, scale, state, buffer)
        rows.put(o, buffer)
    return o, final if return_final_state else None


def lightning_backward(q, k, v, log_decay, initial_state, cu_seqlens, scale, do, dfinal) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and of the initial state (given or not), from those of o and of the final state."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    state = start_states(initial_state, q, k, v, cu_seqlens)
    dstate = start_states(dfinal, q, k, v, cu_seqlens)
    decay = Decay(log_decay, q.shape[2], state)

    def fill(inputs, state, dstate, grads) -> None:
        _backward_span(*inputs, decay, scale, state, dstate, *grads)

    fill_gradients(_rows(q, v, cu_seqlens, dfinal is not None), fill, (q, k, v, do), state, dstate, grads)
    return *grads, dstate


def _rows(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, with_final: bool) -> list[Rows]:
    """The sequences of a call. Documents whose final state counts are not padded, since it decays with every token."""
    if cu_seqlens is None or with_final:
        return [Rows(states, slice(start, end)) for states, start, end in documents(cu_seqlens, *q.shape[:2])]
    return cut_rows(q, v, cu_seqlens)


def lightning_summary(q, k, log_decay, c, scale: float, reverse: bool) -> Tensor:
    """The final state [B, H, K, V] from zero, with c = v; `reverse`: the gradient of the initial one, with c = do."""
    state = start_states(None, q, k, c, None)
    decay = Decay(log_decay, q.shape[2], state)
    cut = cut_tokens(q, c, CHUNK)
    for segment in reversed(cut) if reverse else cut:
        x_nBHCK, c_nBHCV = (gather(x, segment, state.dtype) for x in (q if reverse else k, c))
        if reverse:
            decay.since_start_(x_nBHCK.mul_(scale))
            carry(x_nBHCK.mT @ c_nBHCV, decay.whole(segment.size), state, reverse=True)
        else:
            _carry_initials(decay.until_end_(x_nBHCK), c_nBHCV, decay, state)
    return state


class Decay:
    """The powers of lambda for a chunk, whole or cut to the ragged tail; all None where there is no decay."""

    def __init__(self, log_decay: Tensor | None, heads: int, like: Tensor):
        self.powers_HC = None
        if log_decay is None:
            return
        # The bound keeps a decay to zero (log_decay = -inf) exact: lambda^0 is 1, not exp(-inf * 0).
        rate_H = log_decay.to(like.dtype).clamp(min=-1e30)
        steps_C = torch.arange(CHUNK + 1, device=like.device)
        self.powers_HC = torch.exp(rate_H[:, None] * steps_C)
        self.inside_HCC = self.powers_HC[:, (steps_C[:CHUNK, None] - steps_C[:CHUNK]).clamp(min=0)].tril()

    def mask_(self, scores: Tensor) -> Tensor:
        """scores [n, B, H, C, C] * M in place."""
        if self.powers_HC is None:
            return scores.tril_()
        C = scores.shape[-1]
        return scores.mul_(self.inside_HCC[:, :C, :C])

    def since_start_(self, x: Tensor) -> Tensor:
        """x [n, B, H, C, D] * lambda^r in place."""
        return x if self.powers_HC is None else x.mul_(self.powers_HC[:, 1 : x.shape[-2] + 1, None])

    def until_end_(self, x: Tensor) -> Tensor:
        """x [n, B, H, C, D] * lambda^(C-r) in place."""
        return x if self.powers_HC is None else x.mul_(self.powers_HC[:, : x.shape[-2], None].flip(1))

    def whole(self, size: int) -> Tensor | None:
        """lambda^C [H, 1, 1]."""
        return None if self.powers_HC is None else self.powers_HC[:, size, None, None]


def _forward_span(q, k, v, decay: Decay, scale: float, state, o) -> None:
    """Fills o, and moves the state [B, H, K, V] in place to after the last token."""
    for segment in cut_tokens(q, v, CHUNK):
        q_nBHCK, k_nBHCK, v_nBHCV = (gather(x, segment, state.dtype) for x in (q, k, v))
        q_nBHCK.mul_(scale)
        o_nBHCV = decay.mask_(q_nBHCK @ k_nBHCK.mT) @ v_nBHCV
        initials_nBHKV = _carry_initials(decay.until_end_(k_nBHCK), v_nBHCV, decay, state)
        multiply_add(o_nBHCV, decay.since_start_(q_nBHCK), initials_nBHKV)
        scatter(o, segment, o_nBHCV)


def _backward_span(q, k, v, do, decay: Decay, scale: float, state, dstate, dq, dk, dv) -> None:
    """Fills dq, dk, dv, and moves dstate [B, H, K, V] in place from the final to the initial state."""
    cut = cut_tokens(q, v, CHUNK)
    initials = [state.clone()]
    for segment in cut[:-1]:
        k_nBHCK, v_nBHCV = (gather(x, segment, state.dtype) for x in (k, v))
        _carry_initials(decay.until_end_(k_nBHCK), v_nBHCV, decay, state)
        initials.append(state.clone())
    for segment in reversed(cut):
        q_nBHCK, k_nBHCK, v_nBHCV, do_nBHCV = (gather(x, segment, state.dtype) for x in (q, k, v, do))
        do_nBHCV.mul_(scale)
        scores_nBHCC = decay.mask_(q_nBHCK @ k_nBHCK.mT)
        dscores_nBHCC = decay.mask_(do_nBHCV @ v_nBHCV.mT)
        dq_nBHCK = dscores_nBHCC @ k_nBHCK
        dk_nBHCK = dscores_nBHCC.mT @ q_nBHCK
        dv_nBHCV = scores_nBHCC.mT @ do_nBHCV
        decay.until_end_(k_nBHCK)
        decay.since_start_(do_nBHCV)
        initials_nBHKV = _carry_initials(k_nBHCK, v_nBHCV, decay, initials.pop())
        dfinals_nBHKV = carry(q_nBHCK.mT @ do_nBHCV, decay.whole(segment.size), dstate, reverse=True)
        multiply_add(dq_nBHCK, do_nBHCV, initials_nBHKV.mT)
        multiply_add(dk_nBHCK, decay.until_end_(v_nBHCV), dfinals_nBHKV.mT)
        multiply_add(dv_nBHCV, k_nBHCK, dfinals_nBHKV)
        for out, value in ((dq, dq_nBHCK), (dk, dk_nBHCK), (dv, dv_nBHCV)):
            scatter(out, segment, value)


def _carry_initials(k_nBHCK: Tensor, v_nBHCV: Tensor, decay: Decay, state: Tensor) -> Tensor:
    """The states [n, B, H, K, V] that the chunks of a segment find, given keys decayed to the end of their chunks.

    Moves the state in place to after the segment.
    """
    return carry(k_nBHCK.mT @ v_nBHCV, decay.whole(k_nBHCK.shape[-2]), state)
