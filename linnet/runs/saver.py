"""Saves the checkpoints of a training, on one process or many, at once or in the background."""

import contextlib
import copy
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from linnet.runs import checkpoint
from linnet.runs.checkpoint import CheckpointError, Tensors
from linnet.runs.slices import Slice

if TYPE_CHECKING:  # importing PyTorch's distributed checkpoints takes seconds, which one process need not wait
    from linnet.parallel.mesh import Mesh
    from linnet.parallel.tensor import Cuts
    from linnet.runs.sharded import Placed

# Longest that ranks wait for one that still writes. A rank that dies ends the waiting at once.
PATIENCE = timedelta(hours=2)


class Saver:
    """Saves the checkpoints of one training, on one process or on all ranks of a mesh.

    Attributes:
        failed: whether a background save has failed on this rank; `wait` raises its error.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        mesh: "Mesh | None" = None,
        split: "Cuts | None" = None,
        background: bool = False,
    ):
        """
        Args:
            folder: the run's folder of checkpoints, on storage that all ranks share.
            keep: number of checkpoints that stay; None keeps all.
            mesh: ranks that hold the model; None is one process, which writes format 1.
            split: what tensor parallelism has cut, as `linnet.parallel.tensor.cuts` returns it.
            background: `save` returns once the tensors are copied to the host; a thread writes them.
        """
        self._folder, self._keep, self._mesh, self._split = folder, keep, mesh, split or {}
        self._background = background
        self._group: dist.ProcessGroup | None = None if mesh is None or background else mesh.host
        self._host: dict[tuple[str, str], Tensor] = {}  # kept, because pinning memory takes long
        self._planned: set[str] = set()  # the slices of this rank, and those of them that it writes
        self._mine: set[str] = set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Tensors, meta: dict, best: int | None = None) -> None:
        """Saves a checkpoint. All ranks call it at the same step.

        A background save waits for the one before it first.

        Args:
            tensors: group -> name -> tensor of this rank; `random` has states that each rank keeps for itself.
            meta: plain values, the same on all ranks; rank 0 writes them.
            best: step of an older checkpoint that stays, beside the newest; rank 0's counts.

        Raises:
            CheckpointError: a rank cannot write, or the background save before this one failed. It is raised on all
                ranks; earlier checkpoints are untouched.
        """
        self.wait()
        if self._mesh is not None and self._group is None:
            # The thread must not share a group with the steps, whose order of calls is another.
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        placed = self._placed(tensors)
        if not self._background:
            self._write(step, placed, meta, best)
            return
        placed, meta = self._copied(placed), copy.deepcopy(meta)
        self._thread = threading.Thread(target=self._try, args=(step, placed, meta, best), name="linnet-checkpoint")
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self) -> None:
        """Waits until a background save is on the disk. Raises its error, a `CheckpointError` on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def join(self) -> str | None:
        """Waits as `wait` does. Under a mesh, rank 0 then adds the weights of the newest checkpoint to it as one file.

        Returns:
            Why there is no such file, on rank 0: too little memory on the host, or on the disk. Else None.
        """
        self.wait()
        if self._mesh is None or self._mesh.rank != 0:
            return None
        if not (saved := checkpoint.listed(self._folder)):
            return None  # the run diverged before its first checkpoint
        path, state = saved[-1], checkpoint.read_state(saved[-1])
        if "model.safetensors" in state["sha256"]:
            return None
        size = sum(total["bytes"] for name, total in state["sha256"].items() if checkpoint.group_of(name) == "model")
        if (free := free_memory()) is not None and 2 * size > free:  # safetensors copies what it writes
            return (
                f"{path}: joining its weights needs {2 * size / 1e9:.1f} GB of host memory, {free / 1e9:.1f} are free"
            )
        try:
            checkpoint.add_whole(path, "model", checkpoint.load(path, ["model"])[0]["model"])
        except (OSError, SafetensorError, CheckpointError) as error:
            return f"{path}: its weights were not joined into one file ({error})"
        return None

    def close(self) -> None:
        """Waits as `wait` does, but raises nothing."""
        with contextlib.suppress(Exception):
            self.wait()

    def _placed(self, tensors: Tensors) -> "Placed":
        if self._mesh is None:
            return {
                group: {name: Slice.whole(tensor.detach()) for name, tensor in named.items()}
                for group, named in tensors.items()
            }
        from linnet.runs import sharded

        placed = sharded.placed(tensors, self._mesh, self._split)
        names = {f"{group}/{name}" for group, named in placed.items() for name in named}
        if names != self._planned:  # on all ranks: they have the same names, but for those of their random states
            self._planned, self._mine = names, sharded.plan(placed, self._group)
        return placed

    def _copied(self, placed: "Placed") -> "Placed":
        """Copies slices to the host; buffers are pinned if the tensors are on a GPU."""
        copies: Placed = {group: {} for group in placed}  # the optimizer has no state before the first step
        on_gpu = False
        for group, named in placed.items():
            for name, part in named.items():
                buffer = self._host.get((group, name))
                if buffer is None or buffer.shape != part.tensor.shape or buffer.dtype != part.tensor.dtype:
                    buffer = torch.empty(part.tensor.shape, dtype=part.tensor.dtype, pin_memory=part.tensor.is_cuda)
                    self._host[group, name] = buffer
                buffer.copy_(part.tensor, non_blocking=True)
                on_gpu = on_gpu or part.tensor.is_cuda
                copies[group][name] = part._replace(tensor=buffer)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _try(self, step: int, placed: "Placed", meta: dict, best: int | None) -> None:
        try:
            self._write(step, placed, meta, best)
        except BaseException as error:  # raised by `wait`, in the thread that trains
            self._error = error

    def _write(self, step: int, placed: "Placed", meta: dict, best: int | None) -> None:
        if self._mesh is None:
            tensors = {group: {name: part.tensor for name, part in named.items()} for group, named in placed.items()}
            checkpoint.save(self._folder, step, tensors, meta, self._keep, best)
            return
        from linnet.runs import sharded

        sharded.save(self._folder, step, placed, self._mine, meta, self._mesh, self._group, self._keep, best)


def free_memory() -> int | None:
    """Returns the bytes of host memory that a process can take without swapping; None if the system does not tell."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    return None
