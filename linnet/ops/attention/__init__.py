"""Causal softmax attention: PyTorch's, and kernels for the narrow heads that it is slow for."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from linnet.ops import backend
from linnet.ops.chunks import exact
from linnet.ops.direct import shorten
from linnet.ops.folding import Mapped, fold, fold_all, is_mapped, unfold

__all__ = ["causal_attention"]

# Of sequences and heads in kernels of Linnet; longer and wider ones were not measured.
LONGEST, WIDEST = 1024, 32


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """o_t = sum_{s <= t} softmax_s(q_t k_s / sqrt(D)) v_s in every head.

    Heads of up to 32 and up to 1,024 tokens run in kernels of Linnet on a GPU, all else in PyTorch's
    scaled_dot_product_attention.

    Args:
        q: [B, T, H, D].
        k, v: [B, T, G, D]; G divides H, neighbouring heads share.

    Returns:
        o [B, T, H, D] in the dtype of q. Gradients reach every argument.

    Raises:
        ValueError: shapes that do not go together.
    """
    if q.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"causal_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; give q [B, T, H, D] and k, v "
            "[B, T, G, D]"
        )
    if backend.use_triton("attention", q.is_cuda):
        if _suits_kernels(q, k, v):
            return _direct(q, k, v)[0]
        if is_mapped(q, k, v):  # PyTorch's own rule fails for some lengths
            return Mapped.apply(_rule, q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _suits_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    alike = q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype
    known = q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return alike and known and q.shape[1] <= LONGEST and q.shape[3] <= WIDEST and 0 not in q.shape


def _rule(size, dims, *tensors):
    return unfold(causal_attention(*(fold(x, dim, size, 0) for x, dim in zip(tensors, dims, strict=True))), size, 0), 0


@torch.library.custom_op("linnet::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """o and what the backward keeps of the scores."""
    with exact(q):
        return importlib.import_module("linnet.ops.attention.triton").attend_forward(q, k, v)


@torch.library.custom_op("linnet::attend_backward", mutates_args=())
def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with exact(q):
        return importlib.import_module("linnet.ops.attention.triton").attend_backward(q, k, v, o, lse, do)


@attend.register_fake
def _(q, k, v):
    return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@attend_backward.register_fake
def _(q, k, v, o, lse, do):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, _):
    q, k, v, o, lse = ctx.saved_tensors
    return _direct_backward(q, k, v, o, lse, torch.zeros_like(o) if do is None else do)


attend.register_autograd(_backward, setup_context=_setup_context)
_direct = shorten(attend, _setup_context, _backward)
_direct_backward = shorten(attend_backward)


def _register_rule(op):
    @op.register_vmap
    def _(info, in_dims, *tensors):
        outputs = op(*fold_all(tensors, in_dims, info.batch_size, (0,) * len(tensors)))
        return tuple(unfold(x, info.batch_size, 0) for x in outputs), (0,) * len(outputs)


_register_rule(attend)
_register_rule(attend_backward)


# FLOPs: 2 a multiply-add, of the pairs of tokens whether seen or not, as PyTorch counts its own.


@register_flop_formula(torch.ops.linnet.attend)
def attend_flops(q_shape, *_, **__) -> int:
    """4 D a pair and head."""
    B, T, H, D = q_shape
    return 4 * B * H * T * T * D


@register_flop_formula(torch.ops.linnet.attend_backward)
def attend_backward_flops(q_shape, *_, **__) -> int:
    """10 D a pair and head: five products."""
    B, T, H, D = q_shape
    return 10 * B * H * T * T * D
