"""A model over many ranks, with the initial weights of one process, bit for bit, in every layout.

`build` makes causal language models, of which no rank holds the whole: a model is made without memory (on the meta
device), divided, and then filled part by part (`linnet.models.causal_lm.draw_parts`), of which each rank keeps its
slice. `build_whole` makes any other model as a whole on every rank and divides it.

FSDP2 holds the weights of a model in shards, one per rank, gathered block by block while the model runs. In bfloat16
the weights of linear layers are gathered in bfloat16 and all other parameters in float32, under the same autocast as on
one device. With one rank the result is then that of training without FSDP, bit for bit. One policy for all parameters
would round the angles of LRPE and the lower bounds of HGRN2, and would put the residual stream into bfloat16.

A block has one group: one gather forward, one backward, one reduction. The other parameters of blocks (gains, decays,
convolutions) are few, so they join the embedding and the head in the group of the whole model, which is gathered once
per step. A second group per block would add the latency of a small communication to every block.

Gradients are summed over ranks, never averaged: the loss is divided by the number of targets of all ranks.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from linnet.models import CausalLM, ModelConfig, empty_model
from linnet.models.causal_lm import draw_parts
from linnet.ops.tensor_parallel import Split, gather
from linnet.parallel import tensor
from linnet.parallel.mesh import Mesh
from linnet.parallel.tensor import Cuts


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
    return [p for module in block.modules() if isinstance(module, nn.Linear) for p in module.parameters(recurse=False)]


M = TypeVar("M", bound=nn.Module)

DRAWN = 8  # most matrices that a rank draws at the same time


def build(
    config: ModelConfig,
    seed: int,
    mesh: Mesh,
    *,
    precision: str = "float32",
    reshard: bool = True,
    wrap: Callable[[nn.Module], None] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[CausalLM, Cuts | None]:
    """Returns this rank's part of the model that `build_model(config, seed)` returns, on the device of `mesh`.

    Args:
        precision, reshard: as in `shard`.
        wrap: is called with the model before it is sharded, to add recomputation and to compile its blocks.
        dtype: of the parameters and of floating-point buffers; None is float32.

    Returns:
        The model, and what tensor parallelism has cut (`tensor.cuts`), None without it.
    """
    model, cuts = empty_model(config, "meta"), None
    with mesh.together():  # a rank without enough memory must not leave the others waiting in a gather
        if dtype is not None:
            model.to(dtype)
        if mesh.tp > 1:
            tensor.split(model, mesh.tp_group)
            cuts = tensor.cuts(model)
        if wrap is not None:
            wrap(model)
        shard(model, mesh, precision, reshard)
        model.to_empty(device=mesh.device)
        fill(model, config, seed, mesh)
    _gather_once(model)
    return model, cuts


def build_whole(
    make: Callable[[], M],
    mesh: Mesh,
    *,
    precision: str = "float32",
    reshard: bool = True,
    wrap: Callable[[nn.Module], None] | None = None,
) -> M:
    """Returns this rank's shards of the model that `make` returns. Every rank makes the whole model and keeps its part.

    For models that one device holds: the layers of a `backbone` are sharded, and the rest of the model together.

    Args:
        make: returns the model with its initial weights, the same on all ranks.
        precision, reshard: as in `shard`.
        wrap: as in `build`.

    Raises:
        ValueError: the mesh has spans of rows or parts of layers, which need `build`.
    """
    if mesh.sp * mesh.tp > 1:
        raise ValueError(f"sp {mesh.sp} and tp {mesh.tp} must be 1 for a model that is made as a whole")
    with mesh.together():
        model = make().to(mesh.device)
        if wrap is not None:
            wrap(model)
        shard(model, mesh, precision, reshard)
    _gather_once(model)
    return model


def _gather_once(model: nn.Module) -> None:
    """Gathers and frees all weights: FSDP pads unequal shards at the first gather, which replaces their memory."""
    for module in sharded_modules(model):
        module.unshard()
        module.reshard()


@torch.no_grad()
def fill(model: CausalLM, config: ModelConfig, seed: int, mesh: Mesh) -> None:
    """Writes this rank's slices of the initial weights, and its buffers."""
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world)))
    for name, part in draw_parts(config, seed, min(threads, DRAWN)):
        _fill_from(part, name, model, places, mesh)
        del part  # before the next one is drawn
    if places:
        raise AssertionError(f"no part of the model holds {', '.join(places)}")


def _fill_from(part: nn.Module, name: str, model: CausalLM, places: dict[str, Tensor], mesh: Mesh) -> None:
    """Writes the tensors of a part with the name `name` and takes them out of `places`."""
    for key, whole in (*part.named_parameters(prefix=name), *part.named_buffers(prefix=name)):
        place = places.pop(key, None)
        if place is not None:  # else a shared module that a layer also owns; it was filled under its first name
            _write(place, tensor.slice_of(model, key, whole), mesh)


@torch.no_grad()
def whole_tensors(tensors: Mapping[str, Tensor], mesh: Mesh, cuts: Cuts) -> dict[str, Tensor]:
    """Returns the whole tensors on the host of rank 0, and {} on other ranks. Every rank must call it.

    One tensor at a time is gathered, so a device needs the memory of the largest one.

    Args:
        tensors: name -> DTensor of a sharded model, or a tensor that each rank has, in the same order on all ranks.
        cuts: what tensor parallelism has cut.
    """
    host_tensors = {}
    for name, part in tensors.items():
        whole = part.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if name in cuts:
            dim, shape = cuts[name]
            whole = gather(whole, dim, Split.over(mesh.tp_group), shape[dim])
        if mesh.main:
            host_tensors[name] = whole.to("cpu", copy=True)
        del whole
    return host_tensors


def _write(place: Tensor, whole: Tensor, mesh: Mesh) -> None:
    """Copies the rank's rows of a tensor into its place."""
    if not isinstance(place, DTensor):
        place.copy_(whole)
        return
    ranks, number = mesh.fsdp.size(-1), mesh.fsdp.get_local_rank(mesh.fsdp.ndim - 1)
    each = -(-whole.shape[0] // ranks)
    place.to_local().copy_(whole[number * each : (number + 1) * each])
