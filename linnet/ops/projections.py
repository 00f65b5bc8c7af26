"""Projections of one input, whose products sum the gradient of that input.

A layer multiplies its input by several weights: q, k, v, gates. Autograd computes the gradient of each product by
itself and adds them up, one pass over memory for each. Here each product of the backward adds to the sum of those
before it, as matrix multiplication does at no extra pass.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.ops.chunks import exact, product_dtype
from linnet.ops.compat_torch import current_backward, is_plain

LEAST = 2**22  # numbers of an input from which a pass over its gradient takes longer than the host needs for this


class Sum:
    """The gradient of an input so far, of those products that the backward has reached.

    Attributes:
        total: [rows, D], None before the first product.
        backward: number of the backward that `total` is of. One that fails, or is asked for gradients of weights
            alone, leaves its total here.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.backward = -1

    def add(self, dy: Tensor, weight: Tensor) -> None:
        """Adds the gradient dy W of a product with a weight [N, D], of which dy is [rows, N]."""
        backward = current_backward()
        with exact(dy):
            if self.total is None or self.backward != backward:
                self.total, self.backward = dy @ weight, backward
            else:
                self.total.addmm_(dy, weight)

    def take(self, rest: Tensor | None, shape: torch.Size) -> Tensor | None:
        """Returns the sum with `rest`, the gradient from what read the input in another way, and starts anew."""
        total, self.total = self.total, None
        if total is None or self.backward != current_backward():
            return rest
        return total.view(shape) if rest is None else total.view(shape).add_(rest)


def prepare(layers: Iterable[nn.Module]) -> None:
    """Makes layers sum the gradients of their inputs in products, in eager training on a GPU.

    Call it before recomputation and FSDP, and not for a model that is compiled: each block would be compiled anew.
    The linear layers that multiply a layer's own input of at least `LEAST` numbers sum its gradient; all others compute
    as before. Layers that tensor parallelism splits have a way of their own.

    Args:
        layers: of a model (`linnet.layers.base.layers_of`).
    """
    for layer in layers:
        linears = [module for module in layer.modules() if type(module) is nn.Linear]
        if layer.tp is not None or len(linears) < 2:
            continue
        layer.register_forward_pre_hook(_enter)
        for linear in linears:
            if "forward" not in vars(linear):
                linear.forward = partial(_multiply, linear)


def is_prepared(linear: nn.Linear) -> bool:
    """Returns whether the forward of a linear layer is that of `prepare`, which gives the same product."""
    return getattr(vars(linear).get("forward"), "func", None) is _multiply


def sums(x: object) -> bool:
    """Returns whether the products that read an input x of a layer sum its gradient."""
    return (
        isinstance(x, Tensor)
        and on_gpu(x)
        and x.requires_grad
        and x.is_floating_point()
        and x.numel() >= LEAST
        and torch.is_grad_enabled()
        and is_plain((x,))
        and x.dtype == product_dtype(x, x.dtype)
    )


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def sum_of(x: Tensor) -> Sum | None:
    """Returns the sum of the gradient of x, if x entered a layer and is unchanged since.

    It is found in the graph: an operation in place, `detach_` or a view gives another node, and a recomputed forward
    that starts inside a layer gets the input of its first run.
    """
    return getattr(x.grad_fn, "input_sum", None)


def is_watched(x: Tensor) -> bool:
    """Returns whether something asks for the gradient of x itself: a hook, or `retain_grad`."""
    return x.retains_grad or bool(x._backward_hooks)


def _enter(layer: nn.Module, arguments: tuple) -> tuple | None:
    """Hook before the forward of a layer. A layer inside another, of the same input, has the sum of the outer one."""
    if torch.compiler.is_compiling() or not arguments or not sums(arguments[0]) or sum_of(arguments[0]) is not None:
        return None
    return _Enter.apply(arguments[0]), *arguments[1:]


def _multiply(linear: nn.Linear, x: Tensor) -> Tensor:
    """Forward of a linear layer inside. One whose class was changed since computes as its class does."""
    if torch.compiler.is_compiling() or type(linear) is not nn.Linear:
        return type(linear).forward(linear, x)
    total = sum_of(x)
    if total is None or not sums(x):
        return F.linear(x, linear.weight, linear.bias)
    bias = None if linear.bias is None else linear.bias.to(x.dtype)
    return _Project.apply(x, linear.weight.to(x.dtype), bias, total)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.input_sum, ctx.shape = Sum(), x.shape
        ctx.set_materialize_grads(False)
        return x.detach()  # a view of an input could not be changed in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx):
        return ctx.input_sum.take(dx, ctx.shape)


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
        rows, dx = dy.reshape(-1, dy.shape[-1]), None
        if is_watched(x):
            dx = dy @ weight
        else:
            ctx.sum.add(rows, weight)
        dw = rows.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dw, rows.sum(0) if ctx.needs_input_grad[2] else None, None
