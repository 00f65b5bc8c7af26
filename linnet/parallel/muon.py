"""Muon over many ranks: each matrix is orthogonalised as a whole, by one rank, its owner.

Muon on shards runs without an error, but its Newton-Schulz iteration needs the whole matrix: on sharded tall matrices
the update is wrong by a tenth of its size. Here the momentum stays in shards. Matrices of one shape are taken P at a
time, P being the ranks that share the model: an all-to-all gives rank i the whole of matrix i, rank i orthogonalises
it, and a second all-to-all returns the rows. Both move bfloat16, the precision of the iteration, so the update has the
bits of `torch.optim.Muon` on the whole matrix. Work and traffic are 1/P of those of gathering all matrices everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from linnet.config import grouped
from linnet.ops import compat_torch
from linnet.parallel.mesh import Mesh


@dataclass(frozen=True)
class Matrix:
    """One matrix of the model and this rank's rows of it.

    Attributes:
        rows: parameter that shares its memory with the rank's shard, [r, columns]; r is 0 on a rank without rows.
        shape: shape of the matrix that FSDP shards: the tensor-parallel slice, if there is one.
        tp_dim: dimension in which tensor parallelism splits the whole matrix; None if it does not.
        rate, decay: factors of the learning rate and of the weight decay.
    """

    rows: nn.Parameter
    shape: tuple[int, int]
    tp_dim: int | None = None
    rate: float = 1.0
    decay: float = 1.0


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` for shards.

    Args:
        matrices: in the same order on all ranks.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        mesh: Mesh,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
    ):
        super().__init__(
            [matrix.rows for matrix in matrices], {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        )
        self._group, self._shards, self._tp = _copy_group(mesh), mesh.fsdp.size(-1), mesh.tp
        self._number = dist.get_rank(self._group)
        by_kind = grouped(((matrix.shape, matrix.tp_dim, matrix.rate, matrix.decay), matrix) for matrix in matrices)
        ranks = self._shards * self._tp
        self._batches = [
            same[start : start + ranks] for same in by_kind.values() for start in range(0, len(same), ranks)
        ]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Updates all matrices. Every rank must call it. A matrix has a gradient on all ranks or on none."""
        settings = self.param_groups[0]
        present = [matrices for batch in self._batches if (matrices := [m for m in batch if m.rows.grad is not None])]
        # The rows of the next batch travel while this batch is orthogonalised.
        ahead = self._collect(present[0], settings["momentum"]) if present else None
        for place, batch in enumerate(present):
            received, work = ahead
            work.wait()
            ahead = self._collect(present[place + 1], settings["momentum"]) if place + 1 < len(present) else None
            updates = self._return(batch, self._orthogonal(batch, received))
            lr, decay = settings["lr"] * batch[0].rate, settings["weight_decay"] * batch[0].decay
            rate = compat_torch.muon_rate(lr, "match_rms_adamw", self._whole(batch[0]))
            for matrix, update in zip(batch, updates, strict=True):
                matrix.rows.mul_(1 - lr * decay)
                matrix.rows.add_(update[: matrix.rows.shape[0]], alpha=-rate)

    def _collect(self, batch: list[Matrix], momentum: float) -> tuple[Tensor, dist.Work]:
        """Sends this rank's rows of each matrix to its owner: [P, rows, columns] of this rank's own matrix, if any."""
        each, columns = self._each(batch[0])
        rows = batch[0].rows.new_zeros((len(batch), each, columns), dtype=torch.bfloat16)
        for place, matrix in enumerate(batch):
            gradient, state = matrix.rows.grad, self.state[matrix.rows]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momenta = state["momentum_buffer"]
            momenta.lerp_(gradient, 1 - momentum)
            rows[place, : gradient.shape[0]] = gradient.lerp(momenta, momentum)
        ranks = self._shards * self._tp
        owns = self._number < len(batch)
        received = rows.new_empty((ranks if owns else 0, each, columns))
        work = dist.all_to_all_single(
            received,
            rows,
            output_split_sizes=[int(owns)] * ranks,
            input_split_sizes=[int(rank < len(batch)) for rank in range(ranks)],
            group=self._group,
            async_op=True,
        )
        return received, work

    def _orthogonal(self, batch: list[Matrix], received: Tensor) -> Tensor:
        """Returns the update of this rank's own matrix, cut as it was received; empty without a matrix."""
        if not len(received):
            return received
        rows, columns = batch[0].shape
        slices = received.unflatten(0, (self._shards, self._tp)).transpose(0, 1).flatten(1, 2)  # [tp, rows, columns]
        whole = slices[0, :rows] if batch[0].tp_dim is None else torch.cat(list(slices[:, :rows]), batch[0].tp_dim)
        update = compat_torch.orthogonalize(
            whole, compat_torch.MUON_COEFFICIENTS, compat_torch.MUON_STEPS, compat_torch.MUON_EPSILON
        )
        parts = [update] * self._tp if batch[0].tp_dim is None else update.chunk(self._tp, batch[0].tp_dim)
        cut = torch.zeros_like(slices)
        for part, place in zip(parts, cut, strict=True):
            place[:rows] = part
        return cut.unflatten(1, (self._shards, -1)).transpose(0, 1).reshape(received.shape)

    def _return(self, batch: list[Matrix], update: Tensor) -> Tensor:
        """Returns this rank's rows of the update of each matrix, [matrices, rows, columns]."""
        each, columns = self._each(batch[0])
        ranks = self._shards * self._tp
        rows = update.new_empty((len(batch), each, columns))
        dist.all_to_all_single(
            rows,
            update,
            output_split_sizes=[int(rank < len(batch)) for rank in range(ranks)],
            input_split_sizes=[int(len(update) > 0)] * ranks,
            group=self._group,
        )
        return rows

    def _each(self, matrix: Matrix) -> tuple[int, int]:
        """Returns the shape of a rank's rows, padded to those of the first rank."""
        return -(-matrix.shape[0] // self._shards), matrix.shape[1]

    def _whole(self, matrix: Matrix) -> tuple[int, int]:
        rows, columns = matrix.shape
        return (
            rows * (self._tp if matrix.tp_dim == 0 else 1),
            columns * (self._tp if matrix.tp_dim == 1 else 1),
        )


def _copy_group(mesh: Mesh) -> dist.ProcessGroup:
    """Returns the ranks that share one copy of the model, numbered shard * tp + tp_rank. Every rank must call it."""
    if mesh.dp_replicate == 1:
        return dist.group.WORLD
    if mesh.tp == 1:
        return mesh.fsdp.get_group(mesh.fsdp.ndim - 1)
    copies = torch.arange(mesh.world).view(mesh.dp_replicate, -1)
    group, _ = dist.new_subgroups_by_enumeration(copies.tolist())
    return group
