"""FSDP2: the weights of a model in shards, one per rank, gathered block by block while the model runs.

In bfloat16 the weights of linear layers are gathered in bfloat16 and all other parameters in float32, under the same
autocast as on one device. With one rank the result is then that of training without FSDP, bit for bit. One policy for
all parameters would round the angles of LRPE and the lower bounds of HGRN2, and would put the residual stream into
bfloat16.

A block has one group: one gather forward, one backward, one reduction. The other parameters of blocks (gains, decays,
convolutions) are few, so they join the embedding and the head in the group of the whole model, which is gathered once
per step. A second group per block would add the latency of a small communication to every block.

Gradients are summed over ranks, never averaged: the loss is divided by the number of targets of all ranks.
"""

from collections import Counter

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from linnet.parallel.mesh import Mesh


def shard(model: nn.Module, mesh: Mesh, precision: str = "float32", reshard: bool = True) -> None:
    """Shards the parameters of a model with a `backbone` over `mesh.fsdp`, in place. They become DTensors.

    Args:
        model: on the meta device or the device of `mesh`. Its blocks are already wrapped for recomputation and
            compiled: FSDP's hooks stay outside of them.
        precision: `bfloat16` gathers the weights of linear layers in bfloat16.
        reshard: whether a block's gathered weights are freed after its forward pass and gathered again for the
            backward pass.
    """
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    uses = Counter(parameter for block in model.backbone.blocks for parameter in set(block.parameters()))
    groups = {}
    for block in model.backbone.blocks:
        is_low = precision == "bfloat16" and not any(getattr(m, "indexes_weights", False) for m in block.modules())
        gathered = set(_linear_parameters(block) if is_low else block.parameters())
        groups[block] = ({p for p in gathered if uses[p] == 1}, low if is_low else full)
    shards = mesh.fsdp.size(mesh.fsdp.ndim - 1)
    reshard = reshard and shards > 1  # else it frees copies in bfloat16, which autocast keeps on one device too
    inside = {parameter for parameters, _ in groups.values() for parameter in parameters}
    # The model comes first: a module that is already sharded keeps all of its parameters, and these share the blocks.
    fully_shard(model, mesh=mesh.fsdp, mp_policy=full, ignored_params=inside)
    for block, (parameters, policy) in groups.items():
        others = {parameter for parameter in block.parameters() if parameter not in parameters}
        fully_shard(block, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard, ignored_params=others)
    # FSDP's hooks run around `forward`; other methods that use parameters must be registered.
    for method in ("loss", "prefill", "features"):
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)
    for module in sharded_modules(model):
        if mesh.fsdp.size() > 1:  # on one rank a factor would cost a pass over the gradients
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    if mesh.device.type == "cuda":  # the next block's gather is launched before this block, not after it
        chain = [model, *model.backbone.blocks]
        for module, following in zip(chain, chain[1:], strict=False):
            module.set_modules_to_forward_prefetch([following])


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Returns the modules that have a group of parameters: the model, then its blocks."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def settle(model: nn.Module) -> None:
    """Frees gathered weights after a forward pass without a backward pass, so that all parameters are shards again."""
    for module in sharded_modules(model):
        module.reshard()


def _linear_parameters(block: nn.Module) -> list[nn.Parameter]:
    return [p for module in block.modules() if type(module) is nn.Linear for p in module.parameters(recurse=False)]
