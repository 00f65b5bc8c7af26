"""The softmax between the two products of the last projection on a GPU: in place, in one launch a block of tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops.launching import launch, next_power_of_2

BLOCK, WARPS = 4096, 16


def softmax_in_place(
    logits: Tensor, targets: Tensor, ignore_index: int, needs_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """nll [N] (0 where ignored), and softmax - onehot (0 where ignored) in the memory of the logits."""
    nll = logits.new_empty(logits.shape[0], dtype=torch.float32)
    block = min(BLOCK, next_power_of_2(logits.shape[1]))
    constants = logits.shape[1], ignore_index, needs_gradients, block
    tensors = logits, targets.contiguous(), nll
    launch(softmax_kernel, logits.shape[0], tensors, (), constants, num_warps=WARPS)
    return nll, logits if needs_gradients else None


def log_sums(logits: Tensor, index: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """As `chunked.log_sums`, in one reading of the logits."""
    log_sum, of_target = logits.new_empty(2, logits.shape[0], dtype=torch.float32).unbind()
    tensors, constants = (logits, index.contiguous(), log_sum, of_target), (logits.shape[1], vocab, _block(vocab))
    launch(log_sum_kernel, logits.shape[0], tensors, (), constants, num_warps=WARPS)
    return log_sum, of_target


def share_in_place(logits: Tensor, index: Tensor, log_sum: Tensor, vocab: int) -> Tensor:
    """As `chunked.share_in_place`, in one launch."""
    tensors, constants = (logits, index.contiguous(), log_sum.contiguous()), (logits.shape[1], vocab, _block(vocab))
    launch(share_kernel, logits.shape[0], tensors, (), constants, num_warps=WARPS)
    return logits


def _block(vocab: int) -> int:
    return min(BLOCK, next_power_of_2(vocab))


@triton.jit
def log_sum_kernel(logits, index, log_sum, of_target, stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    tl.store(log_sum + row, sum_up(logits, vocab, BLOCK))
    own = tl.load(index + row)
    tl.store(of_target + row, tl.load(logits + own, mask=own >= 0, other=0.0).to(tl.float32))


@triton.jit
def share_kernel(logits, index, log_sum, stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    own, total = tl.load(index + row), tl.load(log_sum + row)
    column = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        at = start + column
        x = tl.load(logits + at, mask=at < vocab, other=0.0).to(tl.float32)
        share = tl.exp(x - total) - tl.where(at == own, 1.0, 0.0)
        share = tl.where(total == float("inf"), 0.0, share)
        tl.store(logits + at, share.to(logits.dtype.element_ty), mask=at < vocab)


@triton.jit
def sum_up(logits, vocab, BLOCK: tl.constexpr):
    """The log-sum-exp of one row. Each lane keeps its own maximum and sum, so that the loop has no reduction."""
    column = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -1e30, tl.float32)  # finite, so that a logit of -inf counts for nothing
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, x)
        total = total * tl.exp(most - higher) + tl.exp(x - higher)
        most = higher
    top = tl.max(most, 0)
    return top + tl.log(tl.sum(total * tl.exp(most - top), 0))


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
        log_sum = sum_up(logits, vocab, BLOCK)
        tl.store(nll + row, log_sum - tl.load(logits + target).to(tl.float32))
        if NEEDS_GRADIENTS:
            tl.debug_barrier()  # the target's logit has been read
            for start in range(0, vocab, BLOCK):
                at = start + column
                x = tl.load(logits + at, mask=at < vocab, other=0.0).to(tl.float32)
                share = tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)
                tl.store(logits + at, share.to(logits.dtype.element_ty), mask=at < vocab)
