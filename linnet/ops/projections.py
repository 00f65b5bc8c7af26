"""Projections of one input, whose products sum the gradient of that input.

A layer multiplies its input by several weights: q, k, v, gates. Autograd computes the gradient of each product by
itself and adds them up, one pass over memory for each. Here each product of the backward adds to the sum of those
before it, as matrix multiplication does at no extra pass.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.ops.chunks import product_dtype
from linnet.ops.compat_torch import is_plain

LEAST = 2**22  # numbers of an input from which a pass over its gradient takes longer than the host needs for this


class Sum:
    """The gradient of an input so far, of those products that the backward has reached.

    Attributes:
        total: [rows, D], None before the first product.
        input: the tensor [..., D] that products read, weakly: its graph holds this sum.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.input: Callable[[], Tensor | None] = lambda: None

    def add(self, dy: Tensor, weight: Tensor) -> None:
        """Adds the gradient dy W of a product with a weight [N, D], of which dy is [rows, N]."""
        if self.total is None:
            self.total = dy @ weight
        else:
            self.total.addmm_(dy, weight)

    def take(self, rest: Tensor | None, shape: torch.Size) -> Tensor | None:
        """Returns the sum with `rest`, the gradient from what read the input in another way, and starts anew."""
        total, self.total = self.total, None
        if total is None:
            return rest
        return total.view(shape) if rest is None else total.view(shape).add_(rest)


class Entry:
    """The way into a layer in training: hooks around its forward, and the forward of its linear layers.

    The linear layers that multiply the layer's own input sum its gradient. All others, and everything but eager
    training on a GPU with inputs of at least `LEAST` numbers, compute as before.
    """

    def __init__(self) -> None:
        self.sum: Sum | None = None

    def enter(self, layer: nn.Module, arguments: tuple) -> tuple | None:
        """Hook before the forward of a layer."""
        x = arguments[0]
        if torch.compiler.is_compiling() or not sums(x):
            return None
        self.sum = total = Sum()
        x = _Enter.apply(x, total)
        total.input = weakref.ref(x)
        return x, *arguments[1:]

    def leave(self, *_) -> None:
        """Hook after it: no graph outlives its step."""
        self.sum = None

    def multiply(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Forward of a linear layer inside."""
        if self.sum is None or x is not self.sum.input():
            return F.linear(x, linear.weight, linear.bias)
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return _Project.apply(x, linear.weight.to(x.dtype), bias, self.sum)


def sums(x: Tensor) -> bool:
    """Returns whether the products that read an input x of a layer sum its gradient."""
    return (
        on_gpu(x)
        and x.requires_grad
        and x.numel() >= LEAST
        and torch.is_grad_enabled()
        and is_plain((x,))
        and x.dtype == product_dtype(x, x.dtype)
    )


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def prepare(layers: Iterable[nn.Module]) -> None:
    """Makes layers sum the gradients of their inputs in products, in training on a GPU.

    Call it before recomputation, compilation and FSDP. Layers that tensor parallelism splits have a way of their own.

    Args:
        layers: of a model (`linnet.layers.base.layers_of`), a layer before those inside it.
    """
    for layer in layers:
        linears = [module for module in layer.modules() if type(module) is nn.Linear and "forward" not in vars(module)]
        if layer.tp is not None or len(linears) < 2:
            continue
        entry = Entry()
        layer.register_forward_pre_hook(entry.enter)
        layer.register_forward_hook(entry.leave, always_call=True)
        for linear in linears:
            linear.forward = partial(entry.multiply, linear)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, total):
        ctx.sum, ctx.shape = total, x.shape
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx):
        return ctx.sum.take(dx, ctx.shape), None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, total):
        ctx.save_for_backward(x, weight)
        ctx.sum = total
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        ctx.sum.add(dy, weight)
        dw = dy.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return None, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, None
