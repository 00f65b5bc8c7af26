"""The fast path into a registered op: in plain eager use a call bypasses the dispatcher, which costs the host some
hundred microseconds for a forward and backward, more than all the rest; a kernel may take fifty."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import CustomOpDef

from linnet.ops import compat_torch
from linnet.ops.compat_torch import is_plain


def make_fast_path(
    op: CustomOpDef,
    setup_context: Callable | None = None,
    backward: Callable | None = None,
    implementation: Callable | None = None,
    dispatch: Callable | None = None,
) -> Callable:
    """Returns `op` as a function of the same positional arguments, faster in plain eager use.

    It calls the registered op under a compiler, a transform of functorch, forward-mode differentiation, a dispatch or
    function mode (FLOP counting, fake tensors, selective recomputation), and for meta tensors and subclasses. Otherwise
    it calls the op's implementation, through a `torch.autograd.Function` if an argument requires a gradient.

    Args:
        op: the result of `torch.library.custom_op`. Its tensors are arguments of their own, not in lists.
        setup_context, backward: as given to `op.register_autograd`; None for an op without a gradient. If such an op's
            gradient is requested, the registered op is called and refuses.
        implementation: the function to call in the op's place; it may return None where the op, which returns tensors,
            returns `no_state`.
    """
    implementation = implementation or compat_torch.implementation_of(op)
    mutated = compat_torch.mutated_arguments(op)
    apply = None if backward is None else _make_apply(op, implementation, setup_context, backward)

    dispatch = dispatch or make_dispatch(op, setup_context, backward)

    def call(*arguments):
        if not is_plain(arguments):
            return dispatch(*arguments)
        if torch.is_grad_enabled() and _requires_grad(arguments):
            return op(*arguments) if apply is None else apply(*arguments)
        for i in mutated:  # as the registered op does, so that a graph that saved the tensor notices the change
            if arguments[i] is not None and not arguments[i].is_inference():
                torch.autograd.graph.increment_version(arguments[i])
        return implementation(*arguments)

    return call


def make_dispatch(op: CustomOpDef, setup_context: Callable | None = None, backward: Callable | None = None) -> Callable:
    """Returns `op` as a function that names the derivatives that it lacks, and that `torch.func.grad` differentiates.

    A gradient that `torch.library` registers is refused there, so the op is called through a `torch.autograd.Function`.

    Args:
        setup_context, backward: as for `make_fast_path`.
    """

    def refuse_tangents(*_):
        raise NotImplementedError(
            f"{compat_torch.name_of(op)} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian); "
            "differentiate in reverse, or call it under linnet.ops.use_backend('reference')"
        )

    def vmap(info, in_dims, *arguments):
        return compat_torch.vmap_rule_of(op)(info, in_dims, *arguments)

    members = dict(forward=op, setup_context=setup_context, backward=backward, jvp=refuse_tangents, vmap=vmap)
    name = f"Transformed_{compat_torch.name_of(op)}"
    function = type(name, (torch.autograd.Function,), {key: staticmethod(f) for key, f in members.items()})

    def dispatch(*arguments):
        if torch.compiler.is_compiling():
            return op(*arguments)
        if any(map(compat_torch.has_tangent, arguments)):
            refuse_tangents()  # the registered op drops them without an error, so that derivatives would be 0
        return function.apply(*arguments) if backward and compat_torch.in_gradient() else op(*arguments)

    return dispatch


def no_state(like: Tensor) -> Tensor:
    """Returns the empty placeholder of a state, or of a gradient, that does not exist or was not requested."""
    return like.new_empty(0, dtype=torch.float32)


def find_apply(function: type[torch.autograd.Function]) -> Callable:
    """Returns `function.apply` for a call that `is_plain`, without its handling of transforms."""
    return super(torch.autograd.Function, function).apply


def _requires_grad(arguments: tuple) -> bool:
    for x in arguments:  # noqa: SIM110  a generator takes half as long again
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def _make_apply(op: CustomOpDef, implementation: Callable, setup_context: Callable, backward: Callable) -> Callable:
    # One `forward` that has the context: PyTorch inspects signatures on every call if `setup_context` is apart.
    def forward(ctx, *arguments):
        output = implementation(*arguments)
        setup_context(ctx, arguments, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return find_apply(type(f"FastPath_{compat_torch.name_of(op)}", (torch.autograd.Function,), members))
