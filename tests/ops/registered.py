"""What PyTorch asks of a registered op, and what the tests of ops on channels ask of each one under its transforms.

A call is a mapping from the names of arguments to their values, and `run` a function from a call to the outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from precision import assert_same
from torch import Tensor

Call = dict[str, Any]
Run = Callable[[Call], Sequence[Tensor]]

QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def check_op(op, arguments: Sequence, symbolic: bool) -> None:
    """`torch.library.opcheck`. symbolic: sizes are symbols too, where nearly all of its time goes."""
    torch.library.opcheck(op, tuple(arguments), test_utils=(*QUICK, *["test_aot_dispatch_dynamic"] * symbolic))


def leaves(call: Call) -> list[Tensor]:
    """Returns the arguments that require a gradient."""
    return [x for x in call.values() if x is not None and x.requires_grad]


def with_gradients(outputs: Sequence[Tensor], call: Call) -> list[Tensor]:
    """Returns the outputs, and the gradients of a random function of all of them to every leaf."""
    generator = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, leaves(call))]


def permuted(x: Any) -> Any:
    """Returns a tensor, or each of a tuple, with its last axis outermost in memory."""
    if isinstance(x, tuple):
        return tuple(permuted(y) for y in x)
    if not isinstance(x, Tensor) or x.ndim < 2:
        return x
    return x.detach().movedim(-1, 0).contiguous().movedim(0, -1).requires_grad_()


def check_compiled(run: Run, call: Call) -> None:
    """Asserts that torch.compile makes one graph of `run`, with the same outputs and gradients."""
    outputs = [torch.compile(run, fullgraph=True, backend="aot_eager")(call), run(call)]
    assert_same(*outputs, 1e-12)
    assert_same(*(torch.autograd.grad(sum(x.sin().sum() for x in group), leaves(call)) for group in outputs))


def share_documents(call: Call, dims: dict[str, int | None], shared: str) -> None:
    """Adds documents of 11 tokens to the stacked calls of three models.

    Args:
        shared: "documents": one for all models; "documents apart": two per model, of other lengths in each, without an
            initial state. Other words add nothing.
    """
    if shared == "documents":
        call["cu_seqlens"], dims["cu_seqlens"] = torch.tensor([0, 11], dtype=torch.int32), None
    elif shared == "documents apart":
        call.pop("initial_state", None), dims.pop("initial_state", None)
        call["cu_seqlens"] = torch.tensor([[0, 4, 11], [0, 1, 11], [0, 0, 11]], dtype=torch.int32)
        dims["cu_seqlens"] = 0


def check_vmap(run: Run, call: Call, dims: dict[str, int | None]) -> None:
    """Asserts that vmap over the stacked calls of three models has the outputs and gradients of one model at a time.

    Args:
        dims: for each argument its axis of models, or None if they share it.
    """
    names, in_dims = list(call), tuple(dims[name] for name in call)
    tensors = [x.requires_grad_(x.is_floating_point()) for x in call.values()]

    def function(*tensors):
        return run(dict(zip(names, tensors, strict=True)))

    def grads(outputs):
        return torch.autograd.grad(sum((x + 1).sin().sum() for x in outputs), [x for x in tensors if x.requires_grad])

    together = torch.vmap(function, in_dims)(*tensors)
    apart = [
        function(*(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims, strict=True)))
        for i in range(3)
    ]
    apart = [torch.stack(parts) for parts in zip(*apart, strict=True)]
    assert_same(together, apart)
    assert_same(grads(together), grads(apart))


def check_vmap_of_backward(run: Run, call: Call) -> None:
    """Asserts that batched cotangents have the gradients of one cotangent at a time."""
    outputs = run(call)
    cotangents = [torch.randn(3, *x.shape, dtype=x.dtype) for x in outputs]
    together = torch.autograd.grad(outputs, leaves(call), cotangents, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(outputs, leaves(call), [x[i] for x in cotangents], retain_graph=True)
        assert_same([x[i] for x in together], alone)
