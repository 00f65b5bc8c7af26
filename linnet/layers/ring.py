"""Mixers that know nothing of spans: their state is passed from rank to rank, with gradients.

In `linnet.ops.sequence.sequence_parallel` rows are cut into spans, one per rank. A mixer with `sequence_parallel` set
computes its span itself. Any other one, such as a plugin's, runs `forward` with the state that the rank before has
sent, as a prefill in parts does, and sends the state after its span on. The result is that of the whole row. The ranks
work one after the other in a layer, and each is one layer behind the one before it.

`receive` takes a state before a span and `send` passes one on after it: two registered ops, each with its gradient.
What `receive` gets from the rank before, its backward gives back; `send` gets the gradient in its own backward. Both
are in the graph of every rank, the first and the last too, so that all ranks run the same backward. A send cannot be
repeated, since no rank would receive it: every mode of recomputation keeps the results of these ops (`sequence.once`,
`sequence.KEPT_NAMES`), which are one state and one number.
"""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from linnet.layers.base import Mixer, State
from linnet.ops import sequence


def mix(
    mixer: Mixer, x: Tensor, state: State | None, cu_seqlens: Tensor | None, *values: list[Tensor]
) -> tuple[Tensor, State | None]:
    """Calls a mixer as `Mixer.forward` says, on whole rows or on this rank's span of them.

    Args:
        values: the list of `Mixer.shares_values`, for a mixer that has it.

    Raises:
        RuntimeError: a state on a span. States of generation are those of whole rows.
    """
    here = sequence.span()
    if here is None:
        return mixer(x, state, cu_seqlens, *values)
    if state is not None:
        raise RuntimeError(
            f"{mixer.name}: a state was given inside sequence_parallel, where the state before a span comes from the "
            "rank before; call the model outside of it (prefill and generation use whole rows)"
        )
    if mixer.sequence_parallel and (cu_seqlens is not None or not here.ring):
        return mixer(x, None, cu_seqlens, *values)
    return _pass_on(mixer, x, cu_seqlens, here, *values), None


def passes_states(mixer: Mixer | None, method: str) -> bool:
    """Returns whether a mixer's state goes from rank to rank inside `sequence_parallel(group, method)`."""
    return mixer is not None and any(method == "ring" or not part.sequence_parallel for part in mixer.parts())


def _pass_on(mixer: Mixer, x: Tensor, cu_seqlens: Tensor | None, here: sequence.Span, *values: list[Tensor]) -> Tensor:
    batch, length = x.shape[:2]
    rows = None if cu_seqlens is None else sequence.rows_of(cu_seqlens, batch * length)
    context, dtype = length * here.size, x.dtype if x.dtype == torch.float64 else None
    crossing = batch if rows is None else rows.first.shape[0]  # of the documents of a row, one may cross to a span
    start = mixer.init_state(crossing, context, x.device, dtype)
    first, counts = _pack(start, start, mixer)
    received, counts = receive(_anchor(mixer, x), first, counts, here.group)
    state = _unpack(received, counts, start)
    with sequence.sequence_parallel(None):
        if rows is not None and cu_seqlens is not None:
            fresh = mixer.init_state(cu_seqlens.shape[0] - 1, context, x.device, dtype)
            state = {name: rows.enter(state[name], fresh[name]) for name in state}
        y, after = mixer(x, state, cu_seqlens, *values)
        if rows is not None:
            after = {name: rows.select_last(tensor) for name, tensor in after.items()}
    sent, counts = _pack(after, start, mixer)
    return y + send(sent, counts, received, here.group)


def _anchor(mixer: Mixer, x: Tensor) -> Tensor:
    """Returns one number that requires a gradient wherever the mixer's output does."""
    parameters = () if x.requires_grad else (p for p in mixer.parameters() if p.requires_grad)
    anchor = next(iter(parameters), x)
    return anchor[(0,) * anchor.ndim]


def _pack(state: State, like: State, mixer: Mixer) -> tuple[Tensor, Tensor]:
    """Returns the floating-point numbers of a state, in its widest dtype, and its whole numbers: [n] and int64 [m]."""
    shapes, wanted = ({name: list(x.shape) for name, x in tensors.items()} for tensors in (state, like))
    if shapes != wanted:
        raise ValueError(f"{mixer.name}: forward returned the state {shapes}; return that of `state_spec`, {wanted}")
    real = [torch.view_as_real(x) if x.is_complex() else x for x in (state[name] for name in like)]
    floats = [x for x in real if x.is_floating_point()]
    wide = torch.float32
    for x in floats:
        wide = torch.promote_types(wide, x.dtype)
    whole = [x.flatten().to(torch.int64) for x in real if not x.is_floating_point()]
    device = next(mixer.parameters()).device if not real else real[0].device
    return (
        torch.cat([x.flatten().to(wide) for x in floats]) if floats else torch.zeros(0, device=device),
        torch.cat(whole) if whole else torch.zeros(0, dtype=torch.int64, device=device),
    )


def _unpack(floats: Tensor, whole: Tensor, like: State) -> State:
    state, done = {}, {True: 0, False: 0}
    for name, x in like.items():
        kind = x.is_floating_point() or x.is_complex()
        shape = (*x.shape, 2) if x.is_complex() else tuple(x.shape)
        part = (floats if kind else whole).narrow(0, done[kind], prod(shape)).view(shape)
        done[kind] += prod(shape)
        state[name] = torch.view_as_complex(part.to(x.real.dtype)) if x.is_complex() else part.to(x.dtype)
    return state


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
    received = grad.new_zeros(size, dtype=dtype)
    if ranks.rank() + 1 < ranks.size():
        _pull(received, ranks, ranks.rank() + 1)
    return received


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
