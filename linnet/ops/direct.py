"""The short way into a registered op: in plain eager use a call skips the dispatcher, which costs the host more than
all the rest of it (some hundred microseconds for a forward and backward, where a kernel may take fifty).

Beside an op's registration, in its module:

    op.register_autograd(_backward, setup_context=_setup_context)
    direct = shorten(op, _setup_context, _backward)     # what the public function calls
    direct_backward = shorten(op_backward)              # what _backward calls
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef
from torch.nn import Parameter

_TENSORS = frozenset((Tensor, Parameter))
_OTHERS = frozenset((type(None), bool, int, float, str))
_is_legacy, _is_wrapped = torch._C._functorch.is_legacy_batchedtensor, torch._C._functorch.is_functorch_wrapped_tensor


def shorten(
    op: CustomOpDef,
    setup_context: Callable | None = None,
    backward: Callable | None = None,
    implementation: Callable | None = None,
) -> Callable:
    """`op` as a function of the same positional arguments, fast where nobody could tell the difference.

    It calls the registered op where a compiler, a transform of functorch, forward-mode differentiation or a dispatch or
    function mode (FLOP counting, fake tensors, selective recomputation) looks on, and for meta tensors and subclasses.
    Else it calls what the op was made of, through a `torch.autograd.Function` if a gradient is asked for.

    Args:
        op: what `torch.library.custom_op` returned. Its tensors are arguments of their own, not in lists.
        setup_context, backward: as given to `op.register_autograd`; None for an op that has no gradient, as a backward
            itself, which goes through the registered op (and is refused there) when its own gradient is asked for.
        implementation: what to call in the op's place; it may return None where the op, which returns tensors, returns
            `no_state`.
    """
    implementation = implementation or op._init_fn
    mutated = [i for i, x in enumerate(op._opoverload._schema.arguments) if x.alias_info and x.alias_info.is_write]
    apply = None if backward is None else _make_apply(op, implementation, setup_context, backward)

    def call(*arguments):
        if not is_plain(arguments):
            if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
                _refuse_tangents(op, arguments)
            return op(*arguments)
        if torch.is_grad_enabled() and _wants_gradient(arguments):
            return op(*arguments) if apply is None else apply(*arguments)
        for i in mutated:  # as the registered op does, lest a graph that saved the tensor takes it for unchanged
            if not arguments[i].is_inference():
                torch.autograd.graph.increment_version(arguments[i])
        return implementation(*arguments)

    return call


def no_state(like: Tensor) -> Tensor:
    """Empty, for a state that nobody wants: where states are large beside the sequences, writing them costs."""
    return like.new_empty(0, dtype=torch.float32)


def is_plain(arguments: tuple) -> bool:
    """Whether a call with these arguments is eager, on ordinary tensors, and seen by no mode or transform."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return False
    for x in arguments:  # a loop, since a generator takes half as long again
        kind = type(x)
        if kind in _TENSORS:
            # The vmap of `torch.autograd.grad(..., is_grads_batched=True)` is an older one, which shows in its tensors
            # alone; and a tensor of a transform may outlive it.
            if x.is_meta or _is_legacy(x) or _is_wrapped(x):
                return False
        elif kind not in _OTHERS:
            return False
    return True


def _refuse_tangents(op: CustomOpDef, arguments: tuple) -> None:
    # A registered op lets go of them without a word, so that derivatives would be 0.
    for x in arguments:
        while isinstance(x, Tensor) and torch._C._functorch.is_batchedtensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{op._name} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian); "
                "differentiate in reverse, or call it under linnet.ops.use_backend('reference')"
            )


def find_apply(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` for a call that `is_plain`, without its handling of transforms."""
    return super(torch.autograd.Function, function).apply


def _wants_gradient(arguments: tuple) -> bool:
    for x in arguments:  # noqa: SIM110  as above
        if type(x) in _TENSORS and x.requires_grad:
            return True
    return False


def _make_apply(op: CustomOpDef, implementation: Callable, setup_context: Callable, backward: Callable) -> Callable:
    # One `forward` with the context in it: given a `setup_context` apart, PyTorch inspects signatures on every call.
    def forward(ctx, *arguments):
        output = implementation(*arguments)
        setup_context(ctx, arguments, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return find_apply(type(f"Direct_{op._name}", (torch.autograd.Function,), members))
