"""Checkpoints of a training on many ranks: each rank writes and reads its own slices.

    checkpoints/step-00000100/
        model/shard-00003.safetensors, optimizer/..., random/...     the slices of rank 3 (linnet.runs.slices)
        state.json      format 2: as format 1, and the layout that wrote it; its sums name every shard

`torch.distributed.checkpoint` plans who writes what: a copy that several ranks hold is written once, and the slices
cover each tensor exactly once. The plan depends on the layout alone, so it is made at the first save: collecting the
plans of 64 ranks takes seconds. When all ranks have written, rank 0 writes state.json and renames the folder, so a
checkpoint is whole or absent, as on one process (`linnet.runs.checkpoint`). Plans travel between ranks as pickles;
nothing on the disk is one.

A tensor's place in the whole model follows from its layout: FSDP's shards are DTensors, and tensor parallelism has cut
the model before FSDP did. So any layout reads what any other wrote. A checkpoint of one process (format 1) has whole
tensors, which are read in the same way; one process reads format 2 through `checkpoint.load`.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor, Shard

from linnet.config import ConfigError, gather
from linnet.ops.tensor_parallel import Split
from linnet.parallel.mesh import Mesh, PeerError, on_main, together
from linnet.parallel.tensor import Cuts
from linnet.runs import checkpoint, slices
from linnet.runs.checkpoint import CheckpointError, Tensors
from linnet.runs.files import sync_folder
from linnet.runs.model import CONFIG, WEIGHTS, mismatches
from linnet.runs.slices import Slice

Placed = dict[str, dict[str, Slice]]  # group -> name -> slice


def plan(placed: Placed, group: dist.ProcessGroup) -> set[str]:
    """Returns which slices this rank writes, as `<group>/<name>`: of equal slices of several ranks, one rank's.

    All ranks call it. The plan holds as long as the layout and the names stay.

    Args:
        placed: this rank's slices, as `placed` returns them.
        group: gloo group of all ranks, which no other thread uses.

    Raises:
        ValueError: the slices of all ranks overlap, or leave a part of a tensor out.
    """
    planner = _Planner({f"{kind}/{name}": part for kind, named in placed.items() for name, part in named.items()})
    local_plan, plans = planner.create_local_plan(), [None] * dist.get_world_size(group)
    dist.gather_object(local_plan, plans if dist.get_rank() == 0 else None, dst=0, group=group)

    def divide() -> list[list[str]]:
        divided, _ = planner.create_global_plan(plans)
        return [[item.index.fqn for item in rank_plan.items] for rank_plan in divided]

    return set(on_main(divide, group)[dist.get_rank()])


def save(
    folder: Path,
    step: int,
    placed: Placed,
    mine: set[str],
    meta: dict,
    mesh: Mesh,
    group: dist.ProcessGroup,
    keep: int | None,
    best: int | None = None,
) -> None:
    """Writes a checkpoint of all ranks into `folder`, then rank 0 deletes all but the last `keep`.

    Args:
        placed: this rank's slices, as `placed` returns them.
        mine: the slices that this rank writes, as `plan` returns them.
        group: gloo group of all ranks, which no other thread uses.
        best: step of an older checkpoint that stays; rank 0's counts.

    Raises:
        CheckpointError: a rank cannot write. It is raised on all ranks; earlier checkpoints are untouched.
    """
    target = checkpoint.place(folder, step)
    temporary = folder / f".{target.name}.tmp"
    sums: dict[str, dict] = {}
    try:
        with together(group), _writing(target):
            if mesh.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
                for kind in placed:
                    (temporary / kind).mkdir(parents=True)
        with together(group), _writing(target):
            for kind, named in placed.items():
                if parts := {name: part for name, part in named.items() if f"{kind}/{name}" in mine}:
                    file = f"{kind}/shard-{mesh.rank:05d}.safetensors"
                    sums[file] = slices.write(temporary / file, parts)
        files = dict(sorted(total for rank_sums in _gathered(sums, group) for total in rank_sums.items()))
        with together(group), _writing(target):
            if mesh.rank == 0:
                for kind in placed:
                    sync_folder(temporary / kind)
                checkpoint.complete(temporary, target, step, files, meta, _layout(mesh))
                checkpoint.keep_last(folder, keep, best)
    except (ConfigError, PeerError):
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def latest_good(
    folder: Path, mesh: Mesh, refuse: Callable[[dict], str | None] = lambda meta: None
) -> tuple[Path | None, dict, list[str]]:
    """Returns the newest checkpoint that verifies, the same on all ranks: (path, meta, problems).

    Rank 0 chooses the candidates, and each rank verifies its share of the files; one bad file makes a checkpoint bad.
    The arguments and results are those of `checkpoint.latest_good`, without the tensors; only rank 0 calls `refuse`.

    Raises:
        CheckpointError: a rank does not see the folder, on all ranks.
    """
    problems: list[str] = []
    paths = mesh.on_main(lambda: [path.name for path in reversed(checkpoint.listed(folder))])
    if paths and (blind := [rank for rank, seen in enumerate(_gathered(folder.is_dir(), mesh.host)) if not seen]):
        shown = ", ".join(map(str, blind))
        message = f"{folder}: ranks {shown} do not see it; put runs on storage that all machines share"
        raise CheckpointError([message])
    refused = []
    for name in paths:
        state, reason = mesh.on_main(functools.partial(_candidate, folder / name, refuse))
        if state is None or reason:
            problems += reason
            refused += [] if state is None else [(folder / name, state)]
        elif bad := _verdicts(folder / name, state, mesh):
            problems += bad
        else:
            return folder / name, state["meta"], problems
    for path, state in refused:  # better than none, as on one process
        if not _verdicts(path, state, mesh):
            return path, state["meta"], problems
    return None, {}, problems


def load(path: Path, tensors: Tensors, mesh: Mesh, split: Cuts | None = None) -> dict[str, Tensor]:
    """Fills this rank's tensors in place from a checkpoint of any layout, or a model folder. Verify it first.

    Optimizer state that the checkpoint does not have for a parameter at all (no step was made with it) is left as it
    is.

    Args:
        tensors: group -> name -> tensor, those that `Session.state` gives, without `random`.
        split: what tensor parallelism has cut, as `linnet.parallel.tensor.cuts` returns it.

    Returns:
        The random states that the rank of this number saved; with more ranks than then, they start again at rank 0.

    Raises:
        CheckpointError: the checkpoint belongs to another model or optimizer, or a file cannot be read.
    """
    # A model folder has its weights under the name of a checkpoint's, and nothing else.
    state = {"sha256": {WEIGHTS: ""}} if (path / CONFIG).is_file() else checkpoint.read_state(path)

    def reader(group: str) -> slices.Reader:
        return slices.Reader(path / name for name in checkpoint.files_of(state, group))

    problems: list[str] = []
    try:
        for group, named in placed(tensors, mesh, split or {}).items():
            saved = reader(group)
            fresh = _without_state(named, saved.shapes) if group == "optimizer" else set()
            named = {name: part for name, part in named.items() if name not in fresh}
            conflicts = mismatches({name: part.shape for name, part in named.items()}, saved.shapes)
            if conflicts:
                problems += [f"{path}: {group}: {problem}" for problem in conflicts]
                continue
            with torch.no_grad():
                for name, part in named.items():
                    saved.fill(name, part)
        states = reader("random")
        if not problems:
            return checkpoint.random_of({name: states.whole(name) for name in states.shapes}, mesh.rank)
    except (OSError, slices.SafetensorError, ValueError) as error:
        problems.append(f"{path}: cannot be read on rank {mesh.rank} ({error})")
    raise CheckpointError(problems)


def placed(tensors: Tensors, mesh: Mesh, split: Cuts) -> Placed:
    """Returns this rank's slices of tensors, as views of their memory, with their places in the whole tensors.

    Random states get the rank's name, because each rank has its own.
    """
    parts: Placed = {}
    for group, named in tensors.items():
        for name, tensor in named.items():
            if group == "random":
                parts.setdefault(group, {})[f"{mesh.rank}.{name}"] = Slice.whole(tensor)
                continue
            parameter = name.rpartition(".")[0] if group == "optimizer" else name
            cut = split.get(parameter) if tensor.ndim else None  # a step of an optimizer has no dimension
            parts.setdefault(group, {})[name] = _slice(tensor, mesh, cut)
    return parts


def _slice(tensor: Tensor, mesh: Mesh, cut: tuple[int, tuple[int, ...]] | None) -> Slice:
    """Returns this rank's slice of a tensor. FSDP shards what tensor parallelism has cut."""
    offset, sizes = [0] * tensor.ndim, list(tensor.shape)
    shape = tuple(tensor.shape)
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()

    if cut is not None:
        dim, shape = cut
        offset[dim], sizes[dim] = Split("", mesh.tp_rank, mesh.tp).part(shape[dim])
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                # As torch.chunk cuts: the last shards may be smaller, or empty.
                dim, ranks, rank = placement.dim, tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
                each = -(-sizes[dim] // ranks)
                start = min(rank * each, sizes[dim])
                offset[dim] += start
                sizes[dim] = min(each, sizes[dim] - start)
    if tuple(sizes) != tuple(local.shape):
        raise AssertionError(f"a shard of {tuple(local.shape)} where {tuple(sizes)} was expected")
    return Slice(local.detach(), tuple(offset), shape)


def _without_state(named: Mapping[str, Slice], saved: Mapping[str, tuple]) -> set[str]:
    known = {name.rpartition(".")[0] for name in saved}
    return {name for name in named if name.rpartition(".")[0] not in known}


class _Planner(DefaultSavePlanner):
    """Plans the writing of slices. The base class leaves each copy to one rank and checks that nothing is missing."""

    def __init__(self, named: Mapping[str, Slice]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.named = named

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, part.offset),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(torch.Size(part.offset), part.tensor.shape),
                        TensorProperties.create_from_tensor(part.tensor),
                        torch.Size(part.shape),
                    ),
                )
                for name, part in self.named.items()
                if part.tensor.numel() or not all(part.shape)
            ]
        )
        return self.plan


def _layout(mesh: Mesh) -> dict[str, int]:
    degrees = {name: getattr(mesh, name) for name in ("dp_replicate", "dp_shard", "sp", "tp")}
    return {"world": mesh.world, **degrees}


def _candidate(path: Path, refuse: Callable[[dict], str | None]) -> tuple[dict | None, list[str]]:
    """Returns the state of a checkpoint, None if it is damaged, and why it is damaged or refused."""
    try:
        state = checkpoint.read_state(path)
    except CheckpointError as error:
        return None, list(error.problems)
    reason = refuse(state["meta"])
    return state, [] if reason is None else [f"{path.name}: {reason}"]


def _verdicts(path: Path, state: dict, mesh: Mesh) -> list[str]:
    """Verifies the files of a checkpoint, shared among the ranks. Returns all problems, on each rank."""
    problems: list[str] = []
    for name in list(state["sha256"])[mesh.rank :: mesh.world]:
        with gather(problems):
            checkpoint.verify(path / name, state["sha256"][name])
    return [problem for rank_problems in _gathered(problems, mesh.host) for problem in rank_problems]


def _gathered(value: object, group: dist.ProcessGroup) -> list:
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Raises CheckpointError for an OSError inside it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError([checkpoint.cannot_write(target, error)]) from error
