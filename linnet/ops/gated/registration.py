"""What PyTorch needs to know of an op beside what it computes: alike for gated attention from decays and gates."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

from linnet.ops.chunks import state_dtype
from linnet.ops.direct import no_state, shorten
from linnet.ops.documents import count_states
from linnet.ops.folding import register_folding
from linnet.ops.gated.flops import gated_backward_flops, gated_flops


def register(
    op: CustomOpDef,
    op_backward: CustomOpDef,
    choose_axes: Callable[[Sequence, Sequence], Sequence[int | None]],
    forward: Callable,
    gradients: Callable,
) -> Callable:
    """Registers fake results, gradients, vmap and FLOPs; returns `op` as a function that skips the dispatcher.

    Args:
        op: o and the final state of q, k (or logits), v, decays (or a lower bound or None), initial state or None,
            cu_seqlens or None, scale, whether the final state is wanted (else it is empty).
        op_backward: the gradients of the first five of these, from the first seven and those of o and of the final
            state or None; empty for what is None.
        choose_axes: what the models of a vmap fold into, as in `register_folding`.
        forward, gradients: as `op` and `op_backward`, where any state may be there or None that is not asked for.
    """
    direct_backward = shorten(op_backward, implementation=gradients)

    @op.register_fake
    def _(q, k, v, gate, initial_state, cu_seqlens, scale, wants_final=True):
        return _empty_like(v), _empty_state(q, k, v, cu_seqlens) if wants_final else no_state(q)

    @op_backward.register_fake
    def _(q, k, v, gate, initial_state, cu_seqlens, scale, do, dfinal):
        dgate = q.new_empty(0) if gate is None else _empty_like(gate)
        dinitial = no_state(q) if initial_state is None else _empty_state(q, k, v, cu_seqlens)
        return _empty_like(q), _empty_like(k), _empty_like(v), dgate, dinitial

    def setup_context(ctx, inputs, output):
        *tensors, ctx.scale, ctx.wants_final = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    def backward(ctx, do, dfinal):
        saved = ctx.saved_tensors  # once: recomputation gives them out only once
        do = torch.zeros_like(saved[2]) if do is None else do
        # A sum over all results gives an empty gradient to the empty one.
        found = direct_backward(*saved, ctx.scale, do, dfinal if ctx.wants_final else None)
        return *(None if x is None else y for x, y in zip(saved, found, strict=False)), None, None, None

    op.register_autograd(backward, setup_context=setup_context)
    register_folding(op, op_backward, choose_axes, gradients=range(5))
    register_flop_formula(op._opoverload.overloadpacket)(gated_flops)
    register_flop_formula(op_backward._opoverload.overloadpacket)(gated_backward_flops)
    return shorten(op, setup_context, backward, implementation=forward)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_state(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    shape = (count_states(cu_seqlens, q.shape[0]), *q.shape[2:], v.shape[-1])
    return q.new_empty(shape, dtype=state_dtype(q, k, v))
