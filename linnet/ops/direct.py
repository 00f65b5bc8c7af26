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


def shorten(op: CustomOpDef, setup_context: Callable | None = None, backward: Callable | None = None) -> Callable:
    """`op` as a function of the same positional arguments, fast where nobody could tell the difference.

    It calls the registered op where a compiler, a transform of functorch, forward-mode differentiation or a dispatch or
    function mode (FLOP counting, fake tensors, selective recomputation) looks on, and for meta tensors and subclasses.
    Else it calls what the op was made of, through a `torch.autograd.Function` if a gradient is asked for.

    Args:
        op: what `torch.library.custom_op` returned. Its tensors are arguments of their own, not in lists.
        setup_context, backward: as given to `op.register_autograd`; None for an op that has no gradient, as a backward
            itself, which goes through the registered op (and is refused there) when its own gradient is asked for.
    """
    implementation = op._init_fn
    mutated = [i for i, x in enumerate(op._opoverload._schema.arguments) if x.alias_info and x.alias_info.is_write]
    function = None if backward is None else _make_function(op, implementation, setup_context, backward)

    def call(*arguments):
        if not is_plain(arguments):
            return op(*arguments)
        if not torch.is_grad_enabled() or not _wants_gradient(arguments):
            for i in mutated:  # as the registered op does, lest a graph that saved the tensor takes it for unchanged
                if not arguments[i].is_inference():
                    torch.autograd.graph.increment_version(arguments[i])
            return implementation(*arguments)
        return op(*arguments) if function is None else function.apply(*arguments)

    return call


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
    return all(_is_concrete(x) if type(x) in _TENSORS else type(x) in _OTHERS for x in arguments)


def _is_concrete(x: Tensor) -> bool:
    # The vmap of `torch.autograd.grad(..., is_grads_batched=True)` is an older one, which shows in its tensors alone.
    return not (x.is_meta or torch._C._functorch.is_legacy_batchedtensor(x))


def _wants_gradient(arguments: tuple) -> bool:
    return any(type(x) in _TENSORS and x.requires_grad for x in arguments)


def _make_function(op: CustomOpDef, implementation: Callable, setup_context: Callable, backward: Callable) -> type:
    # One `forward` with the context in it: given a `setup_context` apart, PyTorch inspects signatures on every call.
    def forward(ctx, *arguments):
        output = implementation(*arguments)
        setup_context(ctx, arguments, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"Direct_{op._name}", (torch.autograd.Function,), members)
