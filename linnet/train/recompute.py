"""Recomputation: saves activation memory by computing activations again in the backward pass.

`block` stores only the input of each block. `selective` also stores the outputs of matrix products, of attention and of
Linnet's own ops, which are expensive to compute and small to store; norms, gates and the rest are computed again. Both
give the same gradients as `none`.
"""

from functools import partial
from typing import Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from linnet.ops import compat_torch, sequence

Recompute = Literal["none", "block", "selective"]

_KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}


def apply(model: nn.Module, mode: Recompute, exchanges: bool = False, keep: bool = False) -> None:
    """Makes every block of `model.backbone.blocks` recompute its activations in the backward pass.

    Args:
        exchanges: whether blocks exchange states with other ranks (sequence parallelism). `block` repeats an exchange
            of states, which is short, but never a send of the state-passing ring, for which the other rank waits once.
        keep: whether `block` stores what all blocks received instead. This takes a dispatch mode, in which eager code
            runs without its fused kernels, so it is for compiled blocks, and for a ring of all mixers.
    """
    if mode == "none":
        return
    for block in model.backbone.blocks:
        options = {"use_reentrant": False}
        policy = _policy if mode == "selective" else _exchange_policy
        if mode == "selective" or (exchanges and (keep or _is_in_ring(block))):
            options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        block.forward = partial(checkpoint, block.forward, **options)


def _is_in_ring(block: nn.Module) -> bool:
    """Returns whether the mixer's state goes from rank to rank, because the mixer knows nothing of spans."""
    mixer = getattr(block, "mixer", None)
    return mixer is not None and not mixer.sequence_parallel


def _policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _exchange_policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op.name().startswith(sequence.KEPT_NAMES)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(op: compat_torch.OpOverload) -> bool:
    """Returns whether `selective` keeps the outputs of an op."""
    name = op.name().split(".")[0]
    return name.startswith("linnet::") or name in _KEPT
