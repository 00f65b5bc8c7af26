"""A model over many ranks, with the initial weights of one process, bit for bit, in every layout.

No rank holds the whole model: it is made without memory (on the meta device), divided, and then filled part by part
(`linnet.models.causal_lm.draw_parts`), of which each rank keeps its slice.
"""

import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from linnet.models import CausalLM, ModelConfig, empty_model
from linnet.models.causal_lm import draw_parts
from linnet.ops.tensor_parallel import Split, gather
from linnet.parallel import tensor
from linnet.parallel.mesh import Mesh
from linnet.parallel.shard import shard, sharded_modules
from linnet.parallel.tensor import Cuts

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
    model = empty_model(config, "meta")

    def divide() -> Cuts | None:
        cuts = None
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
        return cuts

    cuts = mesh.together(divide)  # a rank without enough memory must not leave the others waiting in a gather
    for module in sharded_modules(model):  # a first gather: FSDP pads unequal shards, which replaces their memory
        module.unshard()
        module.reshard()
    return model, cuts


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
    found = {}
    for name, own in tensors.items():
        whole = own.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if name in cuts:
            dim, shape = cuts[name]
            whole = gather(whole, dim, Split.over(mesh.tp_group), shape[dim])
        if mesh.main:
            found[name] = whole.to("cpu", copy=True)
        del whole
    return found


def _write(place: Tensor, whole: Tensor, mesh: Mesh) -> None:
    """Copies the rank's rows of a tensor into its place."""
    if not isinstance(place, DTensor):
        place.copy_(whole)
        return
    ranks, number = mesh.fsdp.size(-1), mesh.fsdp.get_local_rank(mesh.fsdp.ndim - 1)
    each = -(-whole.shape[0] // ranks)
    place.to_local().copy_(whole[number * each : (number + 1) * each])
