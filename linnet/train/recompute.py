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
    "aten::_scaled_mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}


def apply(model: nn.Module, mode: Recompute, exchanges: bool = False, compiled: bool = False) -> None:
    """Makes every block of `model.backbone.blocks` recompute its activations in the backward pass.

    Args:
        exchanges: whether blocks exchange states with other ranks (sequence parallelism). `block` then stores what they
            received, because repeating an exchange takes time, and `selective` does so anyway. It repeats all-to-alls,
            which return activations.
        compiled: whether torch.compile traces the blocks; it needs a policy in place of a record.
    """
    if mode == "none":
        return
    options = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    elif exchanges and compiled:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _exchange_policy)
    elif exchanges:
        options["context_fn"] = _record
    for block in model.backbone.blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def _record():
    return sequence.Record().contexts()


def _policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _exchange_policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    name = op.name()
    if name.startswith(sequence.REPEATED_NAMES):  # not a choice, which a compiler may make differently on each rank
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if name.startswith(sequence.KEPT_NAMES) else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(op: compat_torch.OpOverload) -> bool:
    """Returns whether `selective` keeps the outputs of an op."""
    name = op.name().split(".")[0]
    return (name.startswith("linnet::") and name != "linnet::layer_norm") or name in _KEPT
