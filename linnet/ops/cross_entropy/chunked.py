"""The last projection and the cross-entropy in blocks of tokens: only the logits of one block exist at a time.

The gradients are made in the same pass, while a block's logits are there: with p = softmax(x W^T), each token adds
(p - onehot) W to the gradient of x and (p - onehot)^T x to that of W. The backward then only multiplies them by the
gradient of the sum, and no product is taken twice.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Logits of a block: 256 MiB of bfloat16. Smaller blocks add to the gradient of W more often than the products hide.
BLOCK_LOGITS = 2**27


def cross_entropy_blocks(
    x, weight, targets, ignore_index, dtype, x_gradient, weight_gradient, softmax: Callable
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sum of the negative log-likelihoods, and its gradients of x and weight (empty if not needed).

    Args:
        x: [N, D]. weight: [V, D]. targets: int64 [N].
        x_gradient, weight_gradient: what is needed; a frozen head costs no gradient of its own.
        dtype: of the products' operands and of the logits.
        softmax: (logits, targets, ignore_index, needs_gradients) -> nll [N], and what to put in place of the logits.
    """
    total_dtype = torch.promote_types(dtype, torch.float32)
    narrow = weight.to(dtype)
    vocab = weight.shape[0]
    rows = max(1, BLOCK_LOGITS // vocab)
    rows = rows - rows % 128 if rows >= 128 else rows
    nll = x.new_empty(x.shape[0], dtype=total_dtype)
    dx = torch.empty_like(x) if x_gradient else x.new_empty(0)
    dweight = x.new_zeros(weight.shape if weight_gradient else 0, dtype=total_dtype)
    for start in range(0, x.shape[0], rows):
        block = slice(start, start + rows)
        tokens = x[block].to(dtype)
        nll[block], dlogits = softmax(tokens @ narrow.T, targets[block], ignore_index, x_gradient or weight_gradient)
        if x_gradient:
            dx[block] = dlogits @ narrow
        if weight_gradient:
            add_product(dweight, dlogits.T, tokens)
        del dlogits  # before the next block's logits are made
    return nll.sum(), dx, dweight.to(weight.dtype)


# Shared by the ops of whole and of split vocabularies: results, FLOPs and backward passes.


def shapes(x, weight, targets, ignore_index, dtype, x_gradient, weight_gradient, *_) -> tuple[Tensor, Tensor, Tensor]:
    """Returns empty results, for fake tensors."""
    total = x.new_empty((), dtype=torch.promote_types(dtype, torch.float32))
    dx = torch.empty_like(x) if x_gradient else x.new_empty(0)
    return total, dx, torch.empty_like(weight) if weight_gradient else weight.new_empty(0)


def flops(x_shape, weight_shape, targets_shape, ignore_index, dtype, x_gradient, weight_gradient, *_, **__) -> int:
    """2 D V a token for the logits, and as many for the gradient of x and for that of W; V is of this rank."""
    return (1 + x_gradient + weight_gradient) * 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


def keep_gradients(ctx, inputs, output) -> None:
    """Keeps the gradients that the forward pass made."""
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.inputs = len(inputs)


def scale_gradients(ctx, dtotal, *_) -> tuple[Tensor | None, ...]:
    """Returns the kept gradients of x and weight, times that of the sum."""
    if dtotal is None:
        return (None,) * ctx.inputs
    grads = [gradient * dtotal if gradient.numel() else None for gradient in ctx.saved_tensors]
    return *grads, *(None,) * (ctx.inputs - len(grads))


def softmax_in_place(
    logits: Tensor, targets: Tensor, ignore_index: int, needs_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """nll [N] (0 where ignored), and softmax - onehot (0 where ignored) in the dtype of the logits."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    kept = targets != ignore_index
    index = targets.where(kept, 0)[:, None]
    logs = torch.log_softmax(logits, -1, dtype=dtype)
    nll = -logs.gather(-1, index)[:, 0].where(kept, 0.0)  # not a product: an ignored row may have no finite loss
    if not needs_gradients:
        return nll, None
    share = logs.exp_()
    share.scatter_add_(-1, index, share.new_full(index.shape, -1.0))
    return nll, share.masked_fill_(~kept[:, None], 0.0).to(logits.dtype)


def log_sums(logits: Tensor, index: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Returns the log-sum-exp of the first `vocab` logits of each row, and the logit at `index` (0 for -1)."""
    wide = logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32))
    valid = index >= 0
    return wide.logsumexp(-1), wide.gather(-1, index.where(valid, 0)[:, None])[:, 0].where(valid, 0.0)


def share_in_place(logits: Tensor, index: Tensor, log_sum: Tensor, vocab: int) -> Tensor:
    """Writes exp(logits - log_sum) over the first `vocab` logits of each row, less 1 at `index` unless that is -1.

    Rows with a log_sum of +inf become 0.
    """
    valid = index >= 0
    share = (logits[:, :vocab].to(log_sum.dtype) - log_sum[:, None]).exp_()
    share.scatter_add_(-1, index.where(valid, 0)[:, None], -valid.to(share.dtype)[:, None])
    logits[:, :vocab] = share.masked_fill_(log_sum.isposinf()[:, None], 0.0)
    return logits


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in the dtype of total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
