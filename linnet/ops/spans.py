"""How an op runs on this rank's span of a longer row (`linnet.ops.sequence`): state first, then the op as it is.

    forward:   (S, L) = summary of the span, from zero        entering = fold of the summaries of the ranks before
               o, final = op(..., entering)
    backward:  G = gradient of `entering` from this span      A = fold, from the last rank, of the G of the ranks after
               gradients = backward of the op(..., entering) with A added to the gradient of `final`

A is the gradient of the true state after the span, so one backward of the op gives all gradients, those through the
decays of the span too: no formula is added to those of the op, and nothing is corrected afterwards. A correction of o
by q L S would round o twice in bfloat16, and is wrong for additive attention, whose normaliser lies inside the sum.

A summary is what the op's own forward gives as its final state from zero, and G what its backward gives to the initial
state, unless the op has kernels that sum up a span alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linnet.ops import backend, sequence
from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states
from linnet.ops.registration import Op


def run_form(
    op: Op, on_span: Callable, reference: Callable, arguments: tuple, output_final_state: bool, asks: bool = True
):
    """Returns o and the final state, or None, of an op in the form that is asked for.

    Args:
        on_span: for a span of rows (`linnet.ops.spans`); takes the arguments of the op.
        reference: the definition; takes them without `return_final_state`.
        asks: whether the op has the argument `return_final_state`.
    """
    if sequence.span() is None and backend.use_reference():
        o, final_state = reference(*arguments)
    else:
        form = op.call if sequence.span() is None else on_span
        o, final_state = form(*arguments, *[output_final_state] * asks)
    return o, final_state if output_final_state else None


def split_rows(x: Tensor, rows: int) -> Tensor:
    """Returns x [B, T, ...], or flattened documents of several rows [1, B T, ...], as [B, T, ...]."""
    return x.unflatten(1, (rows, -1))[0] if rows else x


def cut_linear(
    op: Op,
    state: int,
    documents: int,
    decay: Callable[..., Tensor | None],
    pairs: int | None = None,
    matrices: bool = False,
    summary: Callable | None = None,
    summary_backward: Callable | None = None,
) -> Callable:
    """Returns `op.call` for a span: an op whose state passes a span as `S <- L S + (what the span adds)`.

    Args:
        state, documents: positions of the initial state and of cu_seqlens among the op's arguments. The final state is
            the op's second output.
        decay: (rows, *arguments) -> L over each row, [B or 1, ...] with the axes of the state, or None for 1; `rows` is
            the number of rows of flattened documents, else 0.
        pairs: the position of an argument with which the state is complex, in pairs of real numbers.
        matrices: whether L is a matrix [B or 1, H, K, K], which multiplies the state [B, H, K, V] from the left.
        summary: (*arguments) -> S and L, for rows without documents; given where that is faster than the op.
        summary_backward: (*arguments, do) -> G of do alone, for the same rows. The state is then not complex.
    """
    place_of_state = op.learned.index(state)

    def forward(ctx, *arguments):
        place = sequence.span()
        initial, cu_seqlens = arguments[state], arguments[documents]
        paired = pairs is not None and arguments[pairs] is not None
        kind: sequence.Decay = "matrices" if matrices else "pairs" if paired else "channels"
        rows = None if cu_seqlens is None else sequence.rows_of(cu_seqlens, arguments[0].shape[1])
        check_span(initial, cu_seqlens)
        inputs = list(arguments)
        inputs[state] = None

        def sum_up():
            if summary is not None and rows is None:
                return summary(*inputs)
            over = decay(0 if rows is None else rows.before.shape[0], *inputs)
            return op.call(*_asking(op, inputs))[1], over

        final, over = sequence.once(sum_up)
        if rows is not None:
            passing = sequence.match(rows.passing, final).to(final.dtype)
            final, over = rows.select_last(final), passing if over is None else over * passing
        if initial is not None:  # of the whole row: it enters on the first rank
            initial = initial * float(place.rank == 0)
            final = sequence.JOINS[kind]((initial, None), (final, over))[0]
        entering = sequence.linear.call(final, over, place.name, place.method, False, kind)
        if initial is not None:
            entering = entering + initial
        inputs[state] = entering if rows is None else rows.spread_first(entering, cu_seqlens.shape[0] - 1)
        outputs = op.call(*inputs)
        kept = [outputs[i] for i in op.kept]
        ctx.save_for_backward(*inputs[: op.tensors], *kept, over, *(rows or (None, None, None)))
        ctx.numbers = tuple(inputs[op.tensors : op.passed])
        ctx.place, ctx.kind = (place.rank, place.name, place.method), kind
        ctx.has_initial, ctx.asked = initial is not None, len(arguments) == op.passed or arguments[-1]
        ctx.count = len(arguments)
        return tuple(outputs[:2])

    def backward(ctx, do, dfinal):
        saved = ctx.saved_tensors
        rank, name, method = ctx.place
        inputs, kept = [*saved[: op.tensors], *ctx.numbers], saved[op.tensors : op.tensors + len(op.kept)]
        over, first, last, before = saved[-4:]
        rows = None if first is None else sequence.Rows(first, last, before)
        dfinal = dfinal if ctx.asked else None
        if summary_backward is not None and rows is None:
            dinitial = summary_backward(*inputs, do)
            if dfinal is not None:
                dinitial = dinitial + (dfinal if over is None else over * dfinal)
        else:
            dinitial = op.call_backward(*inputs, *kept, do, dfinal)[place_of_state]
        dinitial = dinitial if rows is None else rows.select_first(dinitial)
        later = sequence.linear.call(dinitial, sequence.adjoint(over, ctx.kind), name, method, True, ctx.kind)
        if rows is not None:
            later = rows.spread_last(later, inputs[documents].shape[0] - 1)
        grads = op.call_backward(*inputs, *kept, do, later if dfinal is None else dfinal + later)
        return _to_inputs(op, grads, inputs, ctx.count, {state: float(rank == 0) if ctx.has_initial else None})

    return _apply(op, forward, backward)


def transition(op: Op, state: int, documents: int, write: int | None = None) -> Callable[..., Tensor]:
    """Returns `decay` of `cut_linear` for an op of q, k and v whose state a span multiplies with a matrix.

    M [B, HV, K, K] is the state that a span makes of the identity where all values are 0, one column beside the other:
    it costs the op on values of the width of a key.

    Args:
        write: the position of an argument of the width of values, which may be None, and which values of 0 do not need.
    """

    def decay(rows: int, *arguments) -> Tensor:
        inputs, (q, k, v) = list(arguments), arguments[:3]
        cu_seqlens, K = arguments[documents], q.shape[-1]
        identity = torch.eye(K, dtype=state_dtype(q, k, v), device=v.device)
        inputs[2] = v.new_zeros(*v.shape[:3], K)
        inputs[state] = identity.repeat(count_states(cu_seqlens, v.shape[0]), v.shape[2], 1, 1)
        if write is not None:
            inputs[write] = None
        final = op.call(*_asking(op, inputs))[1]
        return sequence.rows_of(cu_seqlens, v.shape[1]).select_last(final) if rows else final

    return decay


def cut_normalised(
    op: Op, state: int, log_sum: int, documents: int, theta: int, positions: int, summary: Callable,
    span_backward: Callable,
) -> Callable:  # fmt: skip
    """Returns `op.call` for a span of additive attention, whose state is divided by the exponential of its log-sum.

    LRPE's products depend on the distance of two tokens alone. So if no positions are given, those of a span count
    from 0, and a state is rotated where it leaves or enters one: kernels are faster without positions, and angles of
    fewer tokens are more exact.

    Args:
        state, log_sum, documents, theta, positions: places among the op's arguments; the final state and log-sum are
            its second and third output.
        summary: (*arguments) -> S and z after the span, for rows without documents.
        span_backward: (*arguments, *kept, passed, do, dS, dz, group, method, first) -> the gradients of the op, with
            what later spans give (`sequence.later_shares`), for rows without documents; `first` is the position of the
            span's first token.
    """
    places = op.learned.index(state), op.learned.index(log_sum)

    def forward(ctx, *arguments):
        place = sequence.span()
        cu_seqlens, initial = arguments[documents], (arguments[state], arguments[log_sum])
        rows = None if cu_seqlens is None else sequence.rows_of(cu_seqlens, arguments[0].shape[1])
        check_span(initial[0], cu_seqlens)
        inputs = list(arguments)
        inputs[state] = inputs[log_sum] = None
        reset, frame, first = None, arguments[theta], place.rank * arguments[0].shape[1]
        if arguments[positions] is not None or rows is not None:
            frame = None
        S, z = sequence.once(lambda: summary(*inputs) if rows is None else op.call(*_asking(op, inputs))[1:])
        if rows is not None:
            S, z = rows.select_last(S), rows.select_last(z)
            reset = torch.zeros_like(z[:, :1, :1]).masked_fill(~sequence.match(rows.passing, z), -torch.inf)
        if frame is not None:
            S = rotate_state(S, frame, first)
        has_initial = initial[0] is not None
        if has_initial:  # of the whole row: it enters on the first rank
            initial = initial[0], initial[1] if place.rank == 0 else torch.full_like(initial[1], -torch.inf), None
            S, z, _ = sequence.join_normalised(initial, (S, z, None))
        entering = sequence.normalised.call(S, z, reset, place.name, place.method)
        if has_initial:
            entering = sequence.join_normalised(initial, (*entering, None))[:2]
        passed_z = entering[1] if reset is None else entering[1] + reset
        if frame is not None:
            entering = rotate_state(entering[0], frame, -first), entering[1]
        if rows is not None:
            count = cu_seqlens.shape[0] - 1
            entering = rows.spread_first(entering[0], count), rows.spread_first(entering[1], count, -torch.inf)
        inputs[state], inputs[log_sum] = entering
        outputs = op.call(*_asking(op, inputs))
        after = outputs[2] if rows is None else rows.select_last(outputs[2])
        kept = [outputs[i] for i in op.kept]
        ctx.save_for_backward(
            *inputs[: op.tensors], *kept, sequence.share(passed_z, after), *(rows or (None, None, None))
        )
        ctx.numbers = tuple(inputs[op.tensors : op.passed])
        ctx.place, ctx.has_initial = (place.rank, place.name, place.method), has_initial
        ctx.asked, ctx.count, ctx.first = arguments[-1], len(arguments), first
        if frame is not None and arguments[-1]:
            return outputs[0], rotate_state(outputs[1], frame, first), outputs[2]
        return tuple(outputs)

    def backward(ctx, do, dS, dz):
        saved = ctx.saved_tensors
        rank, name, method = ctx.place
        inputs, kept = [*saved[: op.tensors], *ctx.numbers], saved[op.tensors : op.tensors + len(op.kept)]
        passed, first, last, before = saved[-4:]
        if not ctx.asked:
            dS = dz = None
        weight = float(rank == 0) if ctx.has_initial else None
        if first is None:
            grads = span_backward(*inputs, *kept, passed, do, dS, dz, name, method, ctx.first)
            return _to_inputs(op, grads, inputs, ctx.count, {state: weight, log_sum: weight})
        rows, channels, count = sequence.Rows(first, last, before), passed.shape[-1], inputs[documents].shape[0] - 1
        local_grads = op.call_backward(*inputs, *kept, do, dS, dz)
        D, own_z, S = (rows.select_first(x) for x in (local_grads[places[0]], local_grads[places[1]], inputs[state]))
        D, delta = sequence.later_shares(D, sequence.dot(D, S, channels) - own_z, passed, name, method)
        later_z = sequence.dot(D, rows.select_last(kept[0]), channels) - delta
        later, later_z = rows.spread_last(D, count), rows.spread_last(later_z, count)
        if dS is not None:
            later, later_z = dS + later, dz + later_z
        grads = op.call_backward(*inputs, *kept, do, later, later_z)
        return _to_inputs(op, grads, inputs, ctx.count, {state: weight, log_sum: weight})

    return _apply(op, forward, backward)


def rotate_state(S: Tensor, theta: Tensor, tokens: int) -> Tensor:
    """Returns a state [N, H, 2 K, V] of keys that LRPE rotated, with their positions higher by `tokens`."""
    angle = theta.double() * tokens
    cos, sin = (x.to(S.dtype)[..., None] for x in (angle.cos(), angle.sin()))
    cosines, sines = S.chunk(2, 2)
    return torch.cat([cosines * cos - sines * sin, cosines * sin + sines * cos], 2)


def rotation_gradient(grad: Tensor, S: Tensor) -> Tensor:
    """Returns [H, K]: from the gradient of a rotated state, and that state, that of the angles by which it is."""
    (grad_cos, grad_sin), (cosines, sines) = grad.chunk(2, 2), S.chunk(2, 2)
    return (grad_sin * cosines - grad_cos * sines).sum((0, 3))


def _apply(op: Op, forward: Callable, backward: Callable) -> Callable:
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type("Span", (torch.autograd.Function,), members)

    def call(*arguments):
        if backend.use_reference():
            raise RuntimeError("sequence parallelism: the form 'reference' knows one rank; use the backend 'chunked'")
        return function.apply(*arguments)

    return call


def _asking(op: Op, arguments: Sequence) -> Sequence:
    """The arguments with `return_final_state`, where the op has it."""
    return arguments if len(arguments) == op.passed else [*arguments[:-1], True]


def check_span(initial: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raises ValueError for initial states of documents, which start anew or from the state of the rank before."""
    if initial is not None and cu_seqlens is not None:
        raise ValueError(
            "initial_state: documents that are cut over ranks start from the state of the rank before; give None"
        )


def _to_inputs(op: Op, grads: Sequence, inputs: Sequence, count: int, weights: dict[int, float | None]) -> tuple:
    """The gradient of each argument; an initial state's is `weights` times what was found, or None."""
    gradients: list[Tensor | None] = [None] * count
    for i, grad in zip(op.learned, grads, strict=True):
        if i in weights:
            gradients[i] = None if weights[i] is None else grad * weights[i]
        elif inputs[i] is not None:
            gradients[i] = grad
    return tuple(gradients)
