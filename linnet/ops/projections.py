"""Projections of one input, whose products sum the gradient of that input.

A layer multiplies its input by several weights: q, k, v, gates. Autograd computes the gradient of each product by
itself and adds them up, one pass over memory for each. Here each product of the backward adds to the sum of those
before it, as matrix multiplication does at no extra pass, and the gradient of a float32 weight is not rounded to the
dtype of the product. Narrow weights are joined to one (`project`): a product with each reads as much memory as one with
all.
"""

from collections.abc import Iterable, Sequence
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
    as before, and so do layers that tensor parallelism splits.

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


def project(x: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Returns the products [..., N] of x [..., D] with each of several narrow linear layers.

    It is one product where their layer sums the gradient of x, and they have no hooks and the same options; the
    products are then views of one tensor.
    """
    first = linears[0]
    total = None if torch.compiler.is_compiling() else sum_of(x)  # a compiler does not read a graph
    joins = total is not None and sums(x)
    if not (joins and all(_is_bare(linear) and _options(linear) == _options(first) for linear in linears)):
        return [linear(x) for linear in linears]
    weight = torch.cat([linear.weight for linear in linears])
    bias = None if first.bias is None else torch.cat([linear.bias for linear in linears])
    return _Project.apply(x, weight, bias, total).split([linear.out_features for linear in linears], -1)


def _is_bare(linear: nn.Linear) -> bool:
    hooks = linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks
    return type(linear) is nn.Linear and is_prepared(linear) and not any(hooks)


def _options(linear: nn.Linear) -> list[tuple | None]:
    """Of the weight and the bias: what they must share with those of other layers."""
    tensors = linear.weight, linear.bias
    return [None if x is None else (type(x), x.dtype, x.device, x.requires_grad) for x in tensors]


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
    return _Project.apply(x, linear.weight, linear.bias, total)


def _multiply_into(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a b in `dtype`; on a GPU a float32 product of narrower factors is not rounded to their dtype before."""
    if a.is_cuda and torch.version.hip is None and dtype == torch.float32 != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


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
        ctx.sum, ctx.dtypes = total, (weight.dtype, None if bias is None else bias.dtype)
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        rows, dx = dy.reshape(-1, dy.shape[-1]), None
        if is_watched(x):
            dx = dy @ weight
        else:
            ctx.sum.add(rows, weight)
        of_weight, of_bias = ctx.dtypes
        dw = _multiply_into(rows.T, x.reshape(-1, x.shape[-1]), of_weight) if ctx.needs_input_grad[1] else None
        return dx, dw, rows.sum(0, dtype=of_bias) if ctx.needs_input_grad[2] else None, None
