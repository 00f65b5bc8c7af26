"""The last projection and the cross-entropy with the vocabulary split over ranks (Megatron-LM, arXiv:1909.08053).

Each rank holds some rows of the head and makes their logits, a block of tokens at a time. Per block the ranks exchange
the largest of their log-sums, then [sum of exponentials, the target's logit]. The gradients are made in the same
pass, as in `chunked`.
"""

import importlib

import torch
import torch.distributed as dist
from torch import Tensor

from linnet.ops import backend, compat_torch
from linnet.ops.chunks import exact, product_dtype
from linnet.ops.cross_entropy import chunked
from linnet.ops.cross_entropy.chunked import BLOCK_LOGITS, add_product
from linnet.ops.registration import flop_formula
from linnet.ops.tensor_parallel import Split, enter

__all__ = ["split_cross_entropy"]


def split_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, split: Split, vocab: int, *, ignore_index: int = -100
) -> Tensor:
    """Returns `linear_cross_entropy` of a head of `vocab` rows, of which each rank holds its part.

    Args:
        x: [..., D], the same on all ranks; its gradient is summed over them.
        weight: [rows, D], this rank's part (`Split.part`) of the head.
        targets: int64 [...], the same on all ranks.

    Returns:
        A scalar, the same on all ranks, as `linear_cross_entropy`.
    """
    dtype = product_dtype(x, torch.promote_types(x.dtype, weight.dtype))
    if backend.debugging(targets):
        wrong = targets[((targets < 0) | (targets >= vocab)) & (targets != ignore_index)]
        if wrong.numel():
            raise ValueError(f"split_cross_entropy: targets hold {wrong[0].item()}; give 0 to {vocab - 1}")
    compiling = torch.compiler.is_compiling()
    needed = [torch.is_grad_enabled() and (compiling or tensor.requires_grad) for tensor in (x, weight)]
    x = enter(x.reshape(-1, x.shape[-1]), split)
    first, _ = split.part(vocab)
    rows = max(1, BLOCK_LOGITS // -(-vocab // split.size))  # from the longest part, so that all ranks make equal blocks
    rows = rows - rows % 128 if rows >= 128 else rows
    settings = (ignore_index, dtype, *needed, first, rows, split.group)
    total, _, _ = split_cross_entropy_blocks(x, weight, targets.flatten(), *settings)
    return total


@torch.library.custom_op(
    "linnet::split_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, int ignore_index, ScalarType dtype, bool x_gradient, "
    "bool weight_gradient, int first, int rows, str group) -> (Tensor, Tensor, Tensor)",
)
def split_cross_entropy_blocks(
    x, weight, targets, ignore_index, dtype, x_gradient, weight_gradient, first, rows, group
):
    """Returns the sum, and this rank's part of the gradient of x and the gradient of its rows (empty if not needed).

    Args:
        first: number of the first row of `weight`. rows: tokens per block.
    """
    total_dtype, process_group = torch.promote_types(dtype, torch.float32), compat_torch.group_of(group)
    gradients, form = x_gradient or weight_gradient, chunked
    if backend.use_triton("cross_entropy", x.is_cuda) and not backend.is_wide("linear_cross_entropy", x, weight):
        form = importlib.import_module("linnet.ops.cross_entropy.triton")
    nll = x.new_empty(x.shape[0], dtype=total_dtype)
    dx = torch.empty_like(x) if x_gradient else x.new_empty(0)
    with exact(x):
        narrow = _aligned(weight, dtype)
        dweight = x.new_zeros(narrow.shape if weight_gradient else 0, dtype=total_dtype)
        for start in range(0, x.shape[0], rows):
            block = slice(start, start + rows)
            tokens = x[block].to(dtype)
            kept = targets[block] != ignore_index
            index = targets[block] - first
            index = index.where(kept & (index >= 0) & (index < weight.shape[0]), -1)
            logits = tokens @ narrow.T
            own_sum, of_target = form.log_sums(logits, index, weight.shape[0])
            highest = own_sum.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=process_group)
            sums = torch.stack([(own_sum - highest).exp(), of_target])
            dist.all_reduce(sums, group=process_group)
            log_sum = highest + sums[0].log()
            nll[block] = (log_sum - sums[1]).where(kept, 0.0)
            if not gradients:
                continue
            dlogits = form.share_in_place(logits, index, log_sum.where(kept, torch.inf), weight.shape[0])
            if x_gradient:
                dx[block] = dlogits @ narrow
            if weight_gradient:
                add_product(dweight, dlogits.T, tokens)
            del logits, dlogits  # before the next block's logits are made
    return nll.sum(), dx, dweight[: weight.shape[0]].to(weight.dtype)


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight in `dtype`, with rows of zeros up to a multiple of 64 unless 8 divides their number.

    Parts of a vocabulary often have an odd number of rows, and products with those take three times as long on a GPU.
    """
    if weight.shape[0] % 8 == 0:
        return weight.to(dtype)
    padded = weight.new_zeros(-(-weight.shape[0] // 64) * 64, weight.shape[1], dtype=dtype)
    padded[: weight.shape[0]] = weight
    return padded


split_cross_entropy_blocks.register_fake(chunked.shapes)
split_cross_entropy_blocks.register_autograd(chunked.scale_gradients, setup_context=chunked.keep_gradients)
flop_formula(torch.ops.linnet.split_cross_entropy)(chunked.flops)
