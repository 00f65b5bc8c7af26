"""A model over many ranks, with the initial weights of one process, bit for bit, in every layout.

`build` makes causal language models, of which no rank holds the whole: a model is made without memory (on the meta
device), divided, and then filled part by part (`linnet.models.causal_lm.draw_parts`), of which each rank keeps its
slice. `build_whole` makes any other model as a whole on every rank and divides it.
"""

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

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

    def divide() -> M:
        model = make().to(mesh.device)
        if wrap is not None:
            wrap(model)
        shard(model, mesh, precision, reshard)
        return model

    model = mesh.together(divide)
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
