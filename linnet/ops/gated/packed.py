"""Gated linear attention over packed documents with keys of a few channels, on a CPU: one step for all documents.

Products of small matrices cost more than the K V numbers of a state where keys are narrow. So the state of each token
is formed, with documents in the order of time (`linnet.ops.documents.Waves`). Channels come first and heads last in
memory, so that q, k, v and decays broadcast over whole runs of numbers.

    S_t = a_t S_{t-1} + k_t v_t,  o_t = q_t S_t
    G_t = q_t do_t + a_{t+1} G_{t+1},  dq_t = S_t do_t,  dk_t = G_t v_t,  dv_t = k_t G_t,  d log a_t = a_t G_t S_{t-1}
"""

import torch
from torch import Tensor

from linnet.ops.chunks import start_states, state_dtype
from linnet.ops.documents import Waves, in_waves

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
