"""States passed along the ranks of a row that is cut into spans: `receive` before a span, `send` after it.

Two registered ops, each with its gradient: what `receive` gets from the rank before, its backward gives back; `send`
gets the gradient in its own backward. Both are in the graph of every rank, the first and the last too, so that all
ranks run the same backward. A send cannot be repeated, since no rank would receive it: every mode of recomputation
keeps the results of these ops (`sequence.once`, `sequence.KEPT_NAMES`), which are one state and one number.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from linnet.ops import sequence


def receive(anchor: Tensor, start: Tensor, counts: Tensor, group: "dist.ProcessGroup") -> tuple[Tensor, Tensor]:
    """Returns the state that the rank before has sent, and on the first rank the given one.

    Args:
        anchor: any tensor that the span depends on; ties this call to the graph if it requires a gradient.
        start: the state before the row, floating point [n], contiguous. counts: its whole numbers, int64 [m].
    """
    return _receive(anchor, start, counts, group.group_name)


def send(state: Tensor, counts: Tensor, received: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """Sends the state after the span to the next rank; returns a zero, which must be added to the output of the span.

    Args:
        state, counts: as in `receive`. received: what `receive` returned, so that its backward always runs.
    """
    return _send(state.contiguous(), counts.contiguous(), received, group.group_name)


@torch.library.custom_op("linnet::ring_receive", mutates_args=())
def _receive(anchor: Tensor, start: Tensor, counts: Tensor, group: str) -> tuple[Tensor, Tensor]:
    ranks = sequence.group_of(group)

    def compute():
        state, whole = start.clone(), counts.clone()
        if ranks.rank():
            _pull(state, ranks, ranks.rank() - 1)
            _pull(whole, ranks, ranks.rank() - 1)
        return state, whole

    return sequence.once(compute)


@_receive.register_fake
def _(anchor, start, counts, group):
    return torch.empty_like(start), torch.empty_like(counts)


@torch.library.custom_op("linnet::ring_send", mutates_args=())
def _send(state: Tensor, counts: Tensor, received: Tensor, group: str) -> Tensor:
    ranks = sequence.group_of(group)

    def compute():
        if ranks.rank() + 1 < ranks.size():
            _push(state, ranks, ranks.rank() + 1)
            _push(counts, ranks, ranks.rank() + 1)
        return (state.new_zeros(()),)

    return sequence.once(compute)[0]


@_send.register_fake
def _(state, counts, received, group):
    return state.new_empty(())


@torch.library.custom_op("linnet::ring_receive_backward", mutates_args=())
def _give_back(grad: Tensor, anchor: Tensor, group: str) -> Tensor:
    """Sends the gradient of the received state to the rank before; returns zeros, the gradient of the anchor."""
    ranks = sequence.group_of(group)
    if ranks.rank():
        _push(grad.contiguous(), ranks, ranks.rank() - 1)
    return torch.zeros_like(anchor)


@_give_back.register_fake
def _(grad, anchor, group):
    return torch.empty_like(anchor)


@torch.library.custom_op("linnet::ring_send_backward", mutates_args=())
def _take_back(grad: Tensor, size: int, dtype: torch.dtype, group: str) -> Tensor:
    """Returns the gradient of the state that was sent; zeros on the last rank."""
    ranks = sequence.group_of(group)
    found = grad.new_zeros(size, dtype=dtype)
    if ranks.rank() + 1 < ranks.size():
        _pull(found, ranks, ranks.rank() + 1)
    return found


@_take_back.register_fake
def _(grad, size, dtype, group):
    return grad.new_empty(size, dtype=dtype)


def _keep_anchor(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.group = inputs[3]


def _differentiate_receive(ctx, grad, _):
    (anchor,) = ctx.saved_tensors
    return _give_back(grad, anchor, ctx.group), None, None, None


def _keep_size(ctx, inputs, output):
    state, _, received, group = inputs
    ctx.of_state, ctx.of_received, ctx.group = (state.numel(), state.dtype), (received.numel(), received.dtype), group


def _differentiate_send(ctx, grad):
    (size, dtype) = ctx.of_received
    return _take_back(grad, *ctx.of_state, ctx.group), None, grad.new_zeros(size, dtype=dtype), None


_receive.register_autograd(_differentiate_receive, setup_context=_keep_anchor)
_send.register_autograd(_differentiate_send, setup_context=_keep_size)


def _push(x: Tensor, ranks: "dist.ProcessGroup", rank: int) -> None:
    if x.numel():
        dist.send(x, group=ranks, group_dst=rank)


def _pull(x: Tensor, ranks: "dist.ProcessGroup", rank: int) -> None:
    if x.numel():
        dist.recv(x, group=ranks, group_src=rank)
