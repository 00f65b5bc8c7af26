"""A row of the kernel benchmarks: what is called on what, what it must cost at least, and how it is checked."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops import use_backend

TOKENS = 65_536
HEADS = 16


class Cost(NamedTuple):
    """The least that a forward and a backward can cost: each input read once, each output written once."""

    forward_bytes: float
    backward_bytes: float
    forward_flops: float = 0.0
    backward_flops: float = 0.0


class Case(NamedTuple):
    """One row: `run(*inputs())` gives a tensor, and gradients for those inputs that are floating-point.

    `check` gives the largest relative RMS error against float64 on a short sequence; None for a peer.
    """

    op: str
    shape: dict[str, int]
    inputs: Callable[[], list[Tensor]]
    run: Callable[..., Tensor]
    cost: Cost
    check: Callable[[], float] | None = None


class Shape(NamedTuple):
    length: int
    batch: int
    heads: int = HEADS
    key: int = 128
    value: int = 128

    @classmethod
    def of(cls, length: int, tokens: int = TOKENS, key: int = 128, value: int = 128) -> "Shape":
        return cls(length, max(1, tokens // length), HEADS, key, value)

    def short(self) -> "Shape":
        """A shape of the same kind on which float64 takes moments; its length is odd."""
        return self._replace(length=min(self.length, 4096) - 5, batch=min(self.batch, 2))


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def draw_qkv(shape: Shape) -> list[Tensor]:
    T, B, H, K, V = shape
    return [draw(B, T, H, width) for width in (K, K, V)]


def draw_state(shape: Shape, key: int = 0) -> Tensor:
    return draw(shape.batch, shape.heads, key or shape.key, shape.value, dtype=torch.float32)


def decays() -> Tensor:
    """Rates 2^(-8h/H), from half a token to 256 tokens of memory."""
    return -(2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1, device="cuda")))


def compare(
    call: Callable[..., tuple], inputs: list[Tensor], exact: Callable[..., tuple] | None = None, most: float = 0.005
) -> float:
    """The largest relative RMS error of the outputs of `call` and of the gradients of all inputs.

    The truth is `exact`, or `call` itself in the chunked form, on the same numbers in float64.

    Raises:
        AssertionError: an error is over `most`, or no number.
    """
    found, cotangents = differentiate(call, inputs, None)
    with use_backend("chunked"):
        doubles = [x.double() if x.is_floating_point() else x for x in inputs]
        wanted, _ = differentiate(exact or call, doubles, cotangents)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
    assert all(error <= most for error in errors), f"relative errors {errors}"
    return max(errors)


def differentiate(call: Callable[..., tuple], inputs: list[Tensor], cotangents: list[Tensor] | None):
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = call(*leaves)
    cotangents = cotangents or [torch.randn_like(x) for x in outputs]
    wanted = [x for x in leaves if x.requires_grad]
    matching = [c.to(x.dtype) for c, x in zip(cotangents, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, wanted, matching)], cotangents


def attention_cost(shape: Shape, widen: int = 1) -> Cost:
    """Linear attention in chunks of 64: q, k, v in and o out; backward q, k, v, do in and three gradients out.

    `widen` is the factor by which the op widens its keys (2 with LRPE), which costs products and no bytes.
    """
    T, B, H, K, V = shape
    tokens, wide = B * T * H, widen * K
    return Cost(
        tokens * 2 * (2 * K + 2 * V),
        tokens * 2 * (4 * K + 3 * V),
        tokens * (64 * (wide + V) + 4 * wide * V),
        tokens * (64 * (3 * wide + 2 * V) + 10 * wide * V),
    )
