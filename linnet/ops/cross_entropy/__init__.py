"""Linear projection and cross-entropy together, without ever holding all logits."""

import importlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.ops import backend, compat_torch
from linnet.ops.arguments import check_devices
from linnet.ops.chunks import exact, product_dtype
from linnet.ops.cross_entropy import chunked
from linnet.ops.registration import flop_formula, run_each

__all__ = ["cross_entropy_reference", "is_whole", "linear_cross_entropy"]

FEW_LOGITS = 2**25  # 128 MiB of float32; as many are made at once


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Sum of -log softmax(x W^T)[target] in nats over all targets but `ignore_index`.

    Where the logits are many, they are made in blocks of tokens, with the gradients of x and W in the same pass, so
    that memory does not grow with tokens x vocabulary. Few logits, and calls under transforms of functorch, take the
    plain way, `cross_entropy_reference`. Products run in autocast's dtype if it is on, the softmax in float32.

    Args:
        x: [..., D].
        weight: [V, D]; whole (`is_whole`).
        targets: int64 [...], the shape of x without D.

    Returns:
        A scalar, float32 (float64 for float64 inputs), with gradients to x and weight.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together; in `linnet.ops.debug()` also a target outside the
            vocabulary, which a GPU does not see.
    """
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1] or targets.shape != x.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: x has shape {list(x.shape)}, weight {list(weight.shape)} and targets "
            f"{list(targets.shape)}; give [..., D], [V, D] and [...]"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"linear_cross_entropy: targets have dtype {targets.dtype}; give int64: targets.long()")
    check_devices("linear_cross_entropy", x=x, weight=weight, targets=targets)
    if backend.debugging(targets):
        _check_targets(targets, weight.shape[0], ignore_index)
    compiling = torch.compiler.is_compiling()
    transformed = not compiling and compat_torch.in_transform()
    if x.is_meta or transformed or targets.numel() * weight.shape[0] <= FEW_LOGITS or backend.use_reference():
        return cross_entropy_reference(nn.functional.linear(x, weight), targets, ignore_index)
    dtype = product_dtype(x, torch.promote_types(x.dtype, weight.dtype))
    # Under vmap, a compiler does not show whether a tensor needs a gradient.
    needed = [torch.is_grad_enabled() and (compiling or tensor.requires_grad) for tensor in (x, weight)]
    total, _, _ = cross_entropy(x.reshape(-1, x.shape[-1]), weight, targets.flatten(), ignore_index, dtype, *needed)
    return total


def _check_targets(targets: Tensor, vocab: int, ignore_index: int) -> None:
    wrong = targets[((targets < 0) | (targets >= vocab)) & (targets != ignore_index)]
    if wrong.numel():
        raise ValueError(
            f"linear_cross_entropy: targets hold {wrong[0].item()}; give 0 to {vocab - 1}, or {ignore_index} to ignore "
            "one"
        )


def is_whole(weight: Tensor) -> bool:
    """Whether a weight is an ordinary tensor; a sharded one needs its module's own call."""
    return type(weight) in (Tensor, nn.Parameter)


@torch.library.custom_op(
    "linnet::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, SymInt ignore_index, ScalarType dtype, bool x_gradient, "
    "bool weight_gradient) -> (Tensor, Tensor, Tensor)",
)
def cross_entropy(x, *arguments):
    form = chunked
    if backend.use_triton("cross_entropy", x.is_cuda) and not backend.is_wide("linear_cross_entropy", x, arguments[0]):
        form = importlib.import_module("linnet.ops.cross_entropy.triton")
    with exact(x):
        return chunked.cross_entropy_blocks(x, *arguments, form.softmax_in_place)


cross_entropy.register_fake(chunked.shapes)
cross_entropy.register_autograd(chunked.scale_gradients, setup_context=chunked.keep_gradients)


@cross_entropy.register_vmap
def _(info, in_dims, *arguments):
    return run_each(cross_entropy, info.batch_size, in_dims, arguments)


flop_formula(torch.ops.linnet.linear_cross_entropy)(chunked.flops)


def cross_entropy_reference(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Returns the sum of -log softmax(logits)[target] over targets but `ignore_index`, float32 (float64 for float64).

    The definition: all logits at once. It also runs where they are few, under transforms, and on sharded weights.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.flatten(), ignore_index=ignore_index, reduction="sum"
    )
