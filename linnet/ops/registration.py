"""How an op is registered with PyTorch, once for all ops: schema, fake results, gradient, vmap, FLOPs and fast path.

An op is a forward and a backward function on tensors. Its arguments are tensors first (some may be None), then numbers.
The backward takes the arguments of the forward, the outputs that `kept` names, and the gradients of all outputs, and
returns the gradients of the arguments that `learned` names. An output that does not exist, because it was not requested
or its argument is None, is None in these functions and an empty tensor (`no_state`) in the registered op.

An op obeys `torch.vmap` by folding the axis of models into an axis that it has, and runs once.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from linnet.ops import compat_torch
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import count_states
from linnet.ops.fast_path import make_dispatch, make_fast_path, no_state


class Op(NamedTuple):
    """A registered op: `torch.ops.linnet.<name>`, its backward, and the functions that bypass the dispatcher.

    `tensors` of its arguments are tensors, `passed` go to the backward, and `kept` and `learned` are as in `register`.
    """

    forward: CustomOpDef
    backward: CustomOpDef
    call: Callable
    call_backward: Callable
    tensors: int
    passed: int
    kept: Sequence[int]
    learned: Sequence[int]


def register(
    name: str,
    arguments: str,
    forward: Callable,
    backward: Callable,
    *,
    outputs: int = 1,
    learned: Sequence[int],
    shapes: Callable[..., Tensor | Sequence[Tensor | None]] | None = None,
    like: int = 0,
    axes: Callable[[Sequence, Sequence], tuple[Sequence, Sequence] | None] = lambda arguments, in_dims: None,
    kept: Sequence[int] = (),
    auxiliary: int = 0,
    flops: Callable | None = None,
    backward_flops: Callable | None = None,
) -> Op:
    """Registers `linnet::<name>` and `linnet::<name>_backward`.

    Args:
        name: in the namespace `linnet`.
        arguments: the schema, such as "Tensor q, Tensor? state, float scale"; tensors first. A last argument
            `bool return_final_state=True` is not passed to the backward.
        forward: (*arguments) -> a tuple of outputs, or a tensor.
        backward: (*arguments, *kept outputs, *gradients of the outputs that have one; None where not given, except for
            the first) -> a tuple of gradients. Both run with autocast off.
        outputs: the number of outputs.
        learned: the positions of the arguments that have gradients, in the order of the backward's results.
        shapes: (*arguments) -> empty tensors like the outputs, for fake and meta tensors; None for one output that is
            like the argument `like`.
        like: the position of the argument whose shape and dtype the first output has.
        axes: (arguments, in_dims) -> the axes that models fold into, of the arguments and of the outputs (see
            `run_folded`); None to run the op once for each model.
        kept: the positions of the outputs that the backward reads.
        auxiliary: how many of the last outputs have no gradient, since only the backward reads them.
        flops, backward_flops: formulas as for `flop_formula`, from the shapes of the arguments.
    """
    declared = [part.strip() for part in arguments.split(",")]
    tensors = sum(part.startswith("Tensor") for part in declared)
    passed = len(declared) - declared[-1].startswith("bool return_final_state")
    results = ", ".join(["Tensor"] * outputs)
    parameters = [*declared[:passed], *(f"Tensor kept{i}" for i in kept), "Tensor grad0"]
    parameters += [f"Tensor? grad{i}" for i in range(1, outputs - auxiliary)]

    def forward_exactly(*arguments):
        with exact(arguments[0]):
            return forward(*arguments)

    def backward_exactly(*arguments):
        with exact(arguments[0]):
            return backward(*arguments)

    def complete(arguments: tuple) -> tuple:  # the dispatcher leaves out what equals its default
        return arguments if len(arguments) == len(declared) else (*arguments, True)

    def fill(returned: Tensor | Sequence[Tensor | None], first: Tensor):
        if isinstance(returned, Tensor):
            return returned
        return tuple(no_state(first) if x is None else x for x in returned)

    def forward_filled(*arguments):
        return fill(forward_exactly(*complete(arguments)), arguments[0])

    def backward_filled(*arguments):
        pairs = zip(learned, backward_exactly(*arguments), strict=True)
        return join(fill([None if arguments[i] is None else x for i, x in pairs], arguments[0]))

    def join(filled: tuple[Tensor, ...]):  # a schema with one result returns a tensor
        return filled if len(filled) > 1 else filled[0]

    op = torch.library.custom_op(
        f"linnet::{name}",
        forward_filled,
        mutates_args=(),
        schema=f"({arguments}) -> {results if outputs == 1 else f'({results})'}",
    )
    op_backward = torch.library.custom_op(
        f"linnet::{name}_backward",
        backward_filled,
        mutates_args=(),
        schema=f"({', '.join(parameters)}) -> "
        + ("Tensor" if len(learned) == 1 else f"({', '.join(['Tensor'] * len(learned))})"),
    )

    def refuse(ctx, *grads):
        raise NotImplementedError(
            f"{name} has no second derivative; call it under linnet.ops.use_backend('reference'), which has all"
        )

    def keep_nothing(ctx, inputs, output):
        pass

    op_backward.register_autograd(refuse)
    dispatch_backward = make_dispatch(op_backward, keep_nothing, refuse)
    call_backward = make_fast_path(op_backward, keep_nothing, refuse, backward_exactly, dispatch_backward)

    @op.register_fake
    def _(*arguments):
        return fill(empty_like(arguments[like]) if shapes is None else shapes(*complete(arguments)), arguments[0])

    @op_backward.register_fake
    def _(*arguments):
        return join(fill([None if arguments[i] is None else empty_like(arguments[i]) for i in learned], arguments[0]))

    def setup_context(ctx, inputs, output):
        output = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*inputs[:tensors], *(output[i] for i in kept))
        ctx.numbers = inputs[tensors:passed]
        ctx.exists = [x is not None and x.shape != (0,) for x in output]
        ctx.set_materialize_grads(False)

    def differentiate(ctx, *grads):
        saved = ctx.saved_tensors  # read once: recomputation gives them out only once
        # A sum over all results gives an empty gradient to an empty one.
        grads = [grad if exists else None for grad, exists in zip(grads, ctx.exists, strict=True)]
        grads = grads[: outputs - auxiliary]
        if grads[0] is None:
            grads[0] = torch.zeros_like(saved[like])
        gradients = call_backward(*saved[:tensors], *ctx.numbers, *saved[tensors:], *grads)
        gradients = (gradients,) if isinstance(gradients, Tensor) else gradients
        inputs: list[Tensor | None] = [None] * len(declared)
        for i, grad in zip(learned, gradients, strict=True):
            inputs[i] = None if saved[i] is None else grad
        return tuple(inputs)

    op.register_autograd(differentiate, setup_context=setup_context)
    dispatch = make_dispatch(op, setup_context, differentiate)

    @op.register_vmap
    def _(info, in_dims, *arguments):
        chosen = axes(arguments, in_dims)
        if chosen is None:
            return unpack(run_each(dispatch, info.batch_size, in_dims, arguments))
        into, of_outputs = chosen
        into = (*into, *[None] * (len(arguments) - len(into)))
        return unpack(run_folded(dispatch, info.batch_size, in_dims, arguments, into, of_outputs))

    @op_backward.register_vmap
    def _(info, in_dims, *arguments):
        chosen = axes(arguments[:passed], in_dims[:passed])
        if chosen is None:
            return run_each(dispatch_backward, info.batch_size, in_dims, arguments)
        into, of_outputs = chosen
        of_grads = of_outputs[: outputs - auxiliary]
        into = (*into, *[None] * (passed - len(into)), *(of_outputs[i] for i in kept), *of_grads)
        return run_folded(dispatch_backward, info.batch_size, in_dims, arguments, into, [into[i] for i in learned])

    def unpack(pair):
        return pair if outputs > 1 else (pair[0][0], pair[1][0])

    if flops is not None:
        flop_formula(compat_torch.packet_of(op))(flops)
        flop_formula(compat_torch.packet_of(op_backward))(backward_flops)
    call = make_fast_path(op, setup_context, differentiate, forward_exactly, dispatch)
    return Op(op, op_backward, call, call_backward, tensors, passed, tuple(kept), tuple(learned))


COUNTER = "torch.utils.flop_counter"


class _Formulas(MetaPathFinder):
    """Formulas that wait for PyTorch's FLOP counter, whose import brings Triton with it: a tenth of a second.

    Nobody can count before that import, which this finder sees: it stands first in `sys.meta_path` until then.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[object, Callable]] = []

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_register(module) -> None:
            load(module)
            for op, formula in self.pending:
                module.register_flop_formula(op)(formula)

        spec.loader.exec_module = load_and_register
        return spec


_formulas = _Formulas()
if COUNTER not in sys.modules:
    sys.meta_path.insert(0, _formulas)


def flop_formula(op: object) -> Callable[[Callable], Callable]:
    """Registers the decorated function as the FLOPs of `torch.ops.linnet.<name>`, from the shapes of its arguments:
    `torch.utils.flop_counter.register_flop_formula`, without importing that module.
    """

    def register_formula(formula: Callable) -> Callable:
        if COUNTER in sys.modules:
            sys.modules[COUNTER].register_flop_formula(op)(formula)
        else:
            _formulas.pending.append((op, formula))
        return formula

    return register_formula


def empty_like(x: Tensor) -> Tensor:
    """Returns an empty contiguous tensor of the shape and dtype of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def register_matrix_state(
    name: str,
    forward: Callable,
    backward: Callable,
    *,
    gates: str = "Tensor? gate",
    by_heads: Callable[[Sequence, Sequence], bool] = lambda arguments, in_dims: False,
    learns_gate: bool = True,
    gate_axes: tuple[int | None, int] = (0, 2),
    flops: Callable,
    backward_flops: Callable,
) -> Op:
    """`register` for an op of q, k, v, gates (decays or what makes them, and more), an initial state or None,
    cu_seqlens or None, scale and return_final_state, which returns o and the final state.

    Args:
        forward, backward: see `register`.
        gates: the schema of the gates.
        by_heads: (arguments, in_dims) -> whether the models of a vmap fold into the heads, as packed documents (B = 1)
            do in any case, and not into the batch.
        learns_gate: whether the gates have gradients.
        gate_axes: the axis of the gates that models fold into, with the batch and with the heads.
    """
    number = gates.count(",") + 1
    initial, documents = 3 + number, 4 + number  # places of arguments

    def shapes(q, k, v, *arguments):
        *_, cu_seqlens, _, return_final_state = arguments
        return empty_like(v), empty_state(q, k, v, cu_seqlens) if return_final_state else None

    def axes(arguments, in_dims):
        if in_dims[documents] is not None:
            return None
        if arguments[documents] is not None or by_heads(arguments, in_dims):
            return (2, 2, 2, *[gate_axes[1]] * number, 1), (2, 1)
        return (0, 0, 0, *[gate_axes[0]] * number, 0), (0, 0)

    return register(
        name,
        f"Tensor q, Tensor k, Tensor v, {gates}, Tensor? initial_state, Tensor? cu_seqlens, float scale, "
        "bool return_final_state=True",
        forward,
        backward,
        outputs=2,
        learned=range(initial + 1) if learns_gate else (0, 1, 2, initial),
        shapes=shapes,
        like=2,
        axes=axes,
        flops=flops,
        backward_flops=backward_flops,
    )


def empty_state(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns an empty state [N, H, K, V], H the heads of v, in the dtype of states."""
    shape = (count_states(cu_seqlens, q.shape[0]), v.shape[2], q.shape[3], v.shape[3])
    return q.new_empty(shape, dtype=state_dtype(q, k, v))


def register_plain(name: str, arguments: str, results: int, run: Callable, shapes: Callable) -> Callable:
    """Registers `linnet::<name>`, tensors made without a gradient, and returns the function that bypasses the
    dispatcher.

    Args:
        arguments: the schema, tensors first.
        results: the number of tensors, which `run` returns (with autocast off), and `shapes` for fake tensors.
    """

    def run_exactly(*arguments):
        with exact(arguments[0]):
            return run(*arguments)

    schema = f"({arguments}) -> " + ("Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})")
    op = torch.library.custom_op(f"linnet::{name}", run_exactly, mutates_args=(), schema=schema)
    op.register_fake(shapes)
    return make_fast_path(op)


def register_step(name: str, arguments: str, kernel: str, like: str | Callable = "x") -> Callable:
    """Registers `linnet::<name>`, one token in one launch, and returns the function that bypasses the dispatcher.

    Args:
        arguments: the schema; "Tensor(a!) state" is written in place.
        kernel: "module.function" under `linnet.ops` for one step; imported at the first call, because it needs
            Triton.
        like: the name of the argument that has the shape and dtype of the output, or a function of the arguments that
            returns an empty output.
    """
    module, _, function = f"linnet.ops.{kernel}".rpartition(".")
    names = [part.split()[1] for part in arguments.split(", ")]
    mutated = [argument for argument, part in zip(names, arguments.split(", "), strict=True) if "!" in part]

    def run(*arguments):
        return getattr(importlib.import_module(module), function)(*arguments)

    op = torch.library.custom_op(f"linnet::{name}", run, mutates_args=mutated, schema=f"({arguments}) -> Tensor")
    op.register_fake(like if callable(like) else lambda *arguments: empty_like(arguments[names.index(like)]))
    return make_fast_path(op)


def fold(x: Tensor | None, dim: int | None, size: int, axis: int) -> Tensor | None:
    """Merges the model axis of x into the axis that is `axis` for one model; the models come first in the merged axis.

    Args:
        x: a batched argument, None or `no_state`.
        dim: the place of its model axis; None if all models share it.
        size: number of models.
        axis: for one model, the axis to merge into (0 for the batch; 2 for the heads of [B, T, H, D]).
    """
    if x is None or x.shape == (0,):  # `no_state` stands for all models
        return x
    x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:]) if dim is None else x.movedim(dim, axis)
    return x.flatten(axis, axis + 1)


def lead(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Returns a view of x with the model axis first; `dim` is its place, or None if all models share x."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def unfold(x: Tensor, size: int, axis: int) -> Tensor:
    """The inverse of `fold` for a result: splits the merged axis, leaving the model axis at `axis` (its out-dim)."""
    return x.unflatten(axis, (size, x.shape[axis] // size))


def run_folded(
    op: Callable,
    size: int,
    in_dims: Sequence[int | None],
    arguments: Sequence,
    into: Sequence[int | None],
    outputs: Sequence[int | None],
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Runs `op` once for all models: (outputs, out_dims) as a vmap rule returns them.

    Args:
        into: the axis that each argument's models fold into; None for an argument that stays as it is.
        outputs: the axis that the models of each output are folded into. An empty output is shared by all models.
    """
    folded = [
        x if axis is None else fold(x, dim, size, axis) for x, dim, axis in zip(arguments, in_dims, into, strict=True)
    ]
    results = op(*folded)
    results = (results,) if isinstance(results, Tensor) else results
    axes = tuple(None if x.numel() == 0 else axis for x, axis in zip(results, outputs, strict=True))
    return tuple(x if axis is None else unfold(x, size, axis) for x, axis in zip(results, axes, strict=True)), axes


def run_each(
    op: Callable, size: int, in_dims: Sequence[int | None], arguments: Sequence
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The last resort: runs `op` for every model and stacks the results, where folding cannot express a call."""
    calls = []
    for i in range(size):
        outputs = op(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
        calls.append((outputs,) if isinstance(outputs, Tensor) else outputs)
    outputs = tuple(torch.stack(models) for models in zip(*calls, strict=True))
    return outputs, (0,) * len(outputs)


def is_mapped(*tensors: Tensor | None) -> bool:
    """Whether a call is under one `torch.vmap` and no other transform or mode, so that `Mapped` can take it."""
    return not torch.compiler.is_compiling() and compat_torch.in_one_vmap(tensors)


class Mapped(torch.autograd.Function):
    """Brings vmap to the kernel of a function that is otherwise a composition of PyTorch's operations.

    `Mapped.apply(rule, *arguments)`, where `is_mapped`, gives what `rule(size, dims, *arguments)` gives for all models
    at once: outputs and their dims. The rule calls plain functions, which have gradients of their own.
    """

    @staticmethod
    def forward(rule, *arguments):
        raise RuntimeError("Mapped is for arguments under vmap")

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, rule, *arguments):
        return rule(info.batch_size, in_dims[1:], *arguments)
