"""Gated activations act(gate) * x, the middle of a gated linear unit; log-decays from a sigmoid or a softplus; what
HGRN's recurrence reads."""

import importlib
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.chunks import at_least_float32
from linnet.ops.compat_torch import is_plain
from linnet.ops.fast_path import find_apply
from linnet.ops.gated.reference import forget_gate
from linnet.ops.registration import Mapped, is_mapped, lead

__all__ = ["ACTIVATIONS", "forget_inputs", "gated_activation", "log_sigmoid", "softplus_decay", "softplus_steps"]

ACTIVATIONS = {"none": lambda x: x, "silu": F.silu, "sigmoid": F.sigmoid, "gelu": F.gelu, "relu": F.relu}
ACTIVATIONS["relu2"] = lambda x: F.relu(x).square()


def gated_activation(gate: Tensor, x: Tensor, activation: str = "none") -> Tensor:
    """act(gate) * x, element by element.

    On a GPU in eager mode one kernel does it and one its backward, which keep nothing but gate and x; elsewhere, and
    for a compiler (which fuses it with its neighbours), it is a composition of PyTorch's functions.

    Args:
        gate, x: [...], of one shape.
        activation: none, silu, sigmoid, gelu, relu, or relu2, the square of relu.

    Returns:
        A tensor of that shape.

    Raises:
        ValueError: different shapes, an unknown activation.
    """
    if gate.shape != x.shape:
        raise ValueError(f"gated_activation: gate has shape {list(gate.shape)}; give that of x, {list(x.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_activation: activation {activation!r} is unknown; use {', '.join(ACTIVATIONS)}")
    if is_plain((gate, x)) and backend.use_triton("activation", x.is_cuda):
        kernels = importlib.import_module("linnet.ops.activation.triton")
        if kernels.supports(gate, x, activation):
            return _apply_activation(gate, x, activation)
    if is_mapped(gate, x) and backend.use_triton("activation", x.is_cuda):
        return Mapped.apply(_activation_rule, gate, x, activation)
    return gated_reference(gate, x, activation)


def gated_reference(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    """As `gated_activation`: the composition of PyTorch's functions."""
    return ACTIVATIONS[activation](gate) * x


def _activation_rule(size, dims, gate, x, activation):
    return gated_activation(lead(gate, dims[0], size), lead(x, dims[1], size), activation), 0


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, x, activation):
        kernels = importlib.import_module("linnet.ops.activation.triton")
        ctx.save_for_backward(gate, x)
        ctx.constants = kernels, activation
        return kernels.gated_forward(gate, x, activation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        kernels, activation = ctx.constants
        return *kernels.gated_backward(*ctx.saved_tensors, dy, activation), None


_apply_activation = find_apply(_GatedActivation)


def log_sigmoid(x: Tensor, divisor: float = 1.0) -> Tensor:
    """log(sigmoid(x)) / divisor in float32 (float64 stays), whatever the dtype of x.

    On a GPU in eager mode one kernel does it and one its backward, which keep nothing but x; elsewhere, and for a
    compiler, it is a composition of PyTorch's functions.
    """
    plain = is_plain((x,))
    if (plain or is_mapped(x)) and backend.use_triton("activation", x.is_cuda) and x.numel() > 0:
        if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
            return _apply_log_sigmoid(x, float(divisor)) if plain else Mapped.apply(_log_sigmoid_rule, x, divisor)
        backend.is_wide("log_sigmoid", x)
    return log_sigmoid_reference(x, divisor)


def log_sigmoid_reference(x: Tensor, divisor: float) -> Tensor:
    """As `log_sigmoid`: the composition of PyTorch's functions."""
    return F.logsigmoid(x if x.dtype == torch.float64 else x.float()) / divisor


def _log_sigmoid_rule(size, dims, x, divisor):
    return log_sigmoid(lead(x, dims[0], size), divisor), 0


class _LogSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, divisor):
        kernels = importlib.import_module("linnet.ops.activation.triton")
        ctx.save_for_backward(x)
        ctx.constants = kernels, divisor
        return kernels.log_sigmoid_forward(x, divisor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        kernels, divisor = ctx.constants
        return kernels.log_sigmoid_backward(*ctx.saved_tensors, dy, divisor), None


_apply_log_sigmoid = find_apply(_LogSigmoid)


def softplus_decay(x: Tensor, rates: Tensor, bias: Tensor) -> Tensor:
    """Returns the log-decays of `softplus_steps` alone."""
    return _softplus_steps(x, rates, bias, (0.0, math.inf), False)[1]


def softplus_steps(
    x: Tensor, rates: Tensor, bias: Tensor, limits: tuple[float, float] = (0.0, math.inf)
) -> tuple[Tensor, Tensor]:
    """Returns steps d = softplus(x + bias), clamped to `limits`, and log-decays -exp(rates) d, at least in float32.

    The discretisation of Mamba (arXiv:2312.00752). On a GPU in eager mode one kernel does it and one its backward,
    which keep nothing but the arguments; elsewhere, and for a compiler, it is a composition of PyTorch's functions.

    Args:
        x: [..., H] or [..., H, K].
        rates: [H], the logarithms of the rates of decay.
        bias: [H] or [H, K], as x.
        limits: least and largest step.

    Raises:
        ValueError: shapes that do not go together.
    """
    return _softplus_steps(x, rates, bias, limits, True)


def _softplus_steps(x, rates, bias, limits: tuple[float, float], keeps_steps: bool) -> tuple[Tensor, Tensor]:
    """As `softplus_steps`; without `keeps_steps` the kernel returns None for the steps."""
    if bias.ndim not in (1, 2) or x.shape[-bias.ndim :] != bias.shape or rates.shape != bias.shape[:1]:
        shapes = ", ".join(f"{name} {list(y.shape)}" for name, y in {"x": x, "rates": rates, "bias": bias}.items())
        raise ValueError(f"softplus_steps: {shapes}; give x [..., H] or [..., H, K], rates [H], a bias as x")
    plain = is_plain((x, rates, bias)) and backend.use_triton("activation", x.is_cuda) and x.numel() > 0
    if plain and not backend.is_wide("softplus_steps", x, rates, bias):
        return _apply_softplus_steps(x, rates, bias, limits, keeps_steps)
    return softplus_steps_reference(x, rates, bias, limits)


def softplus_steps_reference(x, rates, bias, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """As `softplus_steps`: the composition of PyTorch's functions."""
    steps = F.softplus(at_least_float32(x) + at_least_float32(bias))
    if limits != (0.0, math.inf):
        steps = steps.clamp(*limits)
    rates = at_least_float32(rates).exp()
    return steps, -(rates if bias.ndim == 1 else rates[:, None]) * steps


class _SoftplusSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rates, bias, limits, keeps_steps):
        kernels = importlib.import_module("linnet.ops.activation.triton")
        ctx.save_for_backward(x, rates, bias)
        ctx.constants = kernels, limits
        ctx.set_materialize_grads(False)
        return kernels.softplus_steps_forward(x, rates, bias, limits, keeps_steps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dsteps, dlog_decay):
        kernels, limits = ctx.constants
        if dsteps is None and dlog_decay is None:
            return (None,) * 5
        return *kernels.softplus_steps_backward(*ctx.saved_tensors, limits, dsteps, dlog_decay), None, None


_apply_softplus_steps = find_apply(_SoftplusSteps)


def forget_inputs(c: Tensor, x: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (1 - f) silu(c), in the dtype of c, and log f of the forget gate f = beta + (1 - beta) sigmoid(x).

    On a GPU in eager mode one kernel does it and one its backward, which keep nothing but the arguments; elsewhere, and
    for a compiler, it is a composition of PyTorch's functions.

    Args:
        c: [..., D] or [..., D, 2], the candidates before their activation: of a complex state both parts.
        x: [..., D], gate logits; log f is float32 (float64 for float64 logits).
        beta: [D], lower bound in (0, 1); None for 0.

    Raises:
        ValueError: shapes that do not go together.

    Source: HGRN, as paper 002 recalls it (section 2.2).
    """
    if c.shape not in (x.shape, (*x.shape, 2)) or beta is not None and beta.shape != x.shape[-1:]:
        shapes = ", ".join(
            f"{name} {list(y.shape)}" for name, y in {"c": c, "x": x, "beta": beta}.items() if y is not None
        )
        raise ValueError(f"forget_inputs: {shapes}; give c [..., D] or [..., D, 2], x [..., D], beta [D] or None")
    plain = is_plain((c, x, beta)) and backend.use_triton("activation", x.is_cuda) and x.numel() > 0
    if plain and not backend.is_wide("forget_inputs", c, x, *(() if beta is None else (beta,))):
        return _apply_forget_inputs(c, x, beta)
    return forget_inputs_reference(c, x, beta)


def forget_inputs_reference(c: Tensor, x: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `forget_inputs`: the composition of PyTorch's functions."""
    log_f, k = forget_gate(x, beta)
    return (F.silu(c) * (k if c.ndim == x.ndim else k.unsqueeze(-1))).to(c.dtype), log_f


class _ForgetInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, c, x, beta):
        kernels = importlib.import_module("linnet.ops.activation.triton")
        ctx.save_for_backward(c, x, beta)
        ctx.kernels = kernels
        return kernels.forget_inputs_forward(c, x, beta)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dinputs, dlog_f):
        return ctx.kernels.forget_inputs_backward(*ctx.saved_tensors, dinputs, dlog_f)


_apply_forget_inputs = find_apply(_ForgetInputs)
