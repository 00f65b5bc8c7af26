"""The softmax between the two products of the last projection on a GPU: in place, in one launch a block of tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import launch

BLOCK, WARPS = 4096, 16


def softmax_in_place(
    logits: Tensor, targets: Tensor, ignore_index: int, needs_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """nll [N] (0 where ignored), and softmax - onehot (0 where ignored) in the memory of the logits."""
    nll = logits.new_empty(logits.shape[0], dtype=torch.float32)
    block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
    constants = logits.shape[1], ignore_index, needs_gradients, block
    tensors = logits, targets.contiguous(), nll
    launch(softmax_kernel, logits.shape[0], tensors, (), constants, num_warps=WARPS)
    return nll, logits if needs_gradients else None


@triton.jit
def softmax_kernel(logits, targets, nll, vocab, ignore_index, NEEDS_GRADIENTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    target = tl.load(targets + row)
    column = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(nll + row, 0.0)
        if NEEDS_GRADIENTS:
            for start in range(0, vocab, BLOCK):
                zero = tl.zeros([BLOCK], logits.dtype.element_ty)
                tl.store(logits + start + column, zero, mask=start + column < vocab)
    else:
        # Each lane keeps its own running maximum and sum, so that the loop has no reduction over the block.
        most = tl.full([BLOCK], -1e30, tl.float32)  # finite, so that a logit of -inf counts for nothing
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = tl.load(logits + start + column, mask=start + column < vocab, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(most, x)
            total = total * tl.exp(most - higher) + tl.exp(x - higher)
            most = higher
        top = tl.max(most, 0)
        log_sum = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
        tl.store(nll + row, log_sum - tl.load(logits + target).to(tl.float32))
        if NEEDS_GRADIENTS:
            tl.debug_barrier()  # the target's logit has been read
            for start in range(0, vocab, BLOCK):
                at = start + column
                x = tl.load(logits + at, mask=at < vocab, other=0.0).to(tl.float32)
                share = tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)
                tl.store(logits + at, share.to(logits.dtype.element_ty), mask=at < vocab)
