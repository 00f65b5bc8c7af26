"""What gated linear attention tells other ranks of a span of its rows (`linnet.ops.spans`), without running the op."""

import importlib

from torch import Tensor

from linnet.ops import backend
from linnet.ops.chunks import state_dtype
from linnet.ops.gated import chunked
from linnet.ops.gated.reference import forget_gate
from linnet.ops.registration import register_plain


def _summarise(q, k, gate, bound, c, scale: float, reverse: bool) -> tuple[Tensor, Tensor]:
    if backend.use_triton("gated", q.is_cuda):
        kernels = importlib.import_module("linnet.ops.gated.triton")
        if kernels.supports("gated_linear_attention", q, gate if k is None else k, c):
            return kernels.summarise(kernels.Call(q, k, gate, bound, c, None, None, scale), c, reverse)
    if k is None:
        gate, k = forget_gate(gate, bound)
    return chunked.gated_summary(q, k, gate, c, scale, reverse)


def _shapes(q, k, gate, bound, c, scale, reverse):
    sizes, dtype = (q.shape[0], *q.shape[2:]), state_dtype(q, gate if k is None else k, c)
    return q.new_empty((*sizes, c.shape[-1]), dtype=dtype), q.new_empty((*sizes, 1), dtype=dtype)


# With k None, `gate` are logits and `bound` the lower bound of the forget gate, else log-decays. c = v gives the state
# [B, H, K, V] after the span, from zero, and the decay over it [B, H, K, 1]; `reverse` and c = do the gradient of the
# state before the span.
_run = register_plain(
    "summary_gated",
    "Tensor q, Tensor? k, Tensor gate, Tensor? bound, Tensor c, float scale, bool reverse",
    2,
    _summarise,
    _shapes,
)


def summarise(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial, cu_seqlens, scale: float, *_):
    """State and decay of a span, from the arguments of the op."""
    return _run(q, k, log_decay, None, v, scale, False)


def summarise_backward(q, k, v, log_decay, initial, cu_seqlens, scale: float, do: Tensor) -> Tensor:
    """The gradient of the initial state from that of o."""
    return _run(q, k, log_decay, None, do, scale, True)[0]


def summarise_forget(q: Tensor, x: Tensor, v: Tensor, bound: Tensor | None, initial, cu_seqlens, scale: float, *_):
    """As `summarise`, from the arguments of `forget_gated_attention`."""
    return _run(q, None, x, bound, v, scale, False)


def summarise_forget_backward(q, x, v, bound, initial, cu_seqlens, scale: float, do: Tensor) -> Tensor:
    """As `summarise_backward`."""
    return _run(q, None, x, bound, do, scale, True)[0]
