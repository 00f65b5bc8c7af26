"""What the objectives on labelled rows share: images, sentences and sequences."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linnet.data.labelled import HeldOut, Labelled, LabelledBatches
from linnet.evaluate.likelihood import evaluating
from linnet.models.kinds import labelled_loss
from linnet.parallel.mesh import Mesh
from linnet.train.objective import Autocast, Batch, RunObjective, Show

# Sums over held-out rows, on one device or on ranks that score together.


@torch.no_grad()
def sum_over_batches(
    model: nn.Module,
    batches: Sequence[Batch],
    rows: int,
    measure: Callable[..., Tensor],
    autocast: Autocast,
    show: Show | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """Returns the sum of what `measure` returns for each batch, in float64 on the device of the model.

    On several ranks batches are dealt to them in turn, and every rank makes the same number of forward passes, because
    each pass communicates: a rank without a batch repeats the last one, which then counts for nothing.

    Args:
        model: is in evaluation mode while `measure` runs.
        batches: the same on all ranks; each is read when it is needed.
        rows: number of rows of all batches together, for `show`.
        measure: tensors of a batch, on the device of the model -> numbers to sum, [K].
        autocast: precision of the forward pass.
        show: called with (rows scored, all rows) before each batch, as if batches had equal numbers of rows.
        mesh: the ranks that score together; all must call this function.
    """
    device = next(model.parameters()).device
    world, rank = (1, 0) if mesh is None else (mesh.dp, mesh.dp_rank)
    total: Tensor | None = None
    with evaluating(model):
        for first in range(0, len(batches), world):
            batch = batches[min(first + rank, len(batches) - 1)]
            if show is not None:
                show(rows * first // len(batches), rows)
            with autocast:
                sums = measure(*(tensor.to(device) for tensor in batch)).double()
            sums = sums if first + rank < len(batches) else torch.zeros_like(sums)
            total = sums if total is None else total + sums
    if total is None:
        raise ValueError("there is nothing to score: no held-out batch")
    if mesh is not None:
        from linnet.parallel.build import settle

        settle(model)
        torch.distributed.all_reduce(total, group=mesh.data_group)
    return total


class LabelledObjective(RunObjective):
    """An objective whose rows have one label each.

    Attributes:
        train: the training rows; by default those of the data.
    """

    SCORES: ClassVar = {"accuracy": "accuracy"}
    targets_per_row = 1

    @property
    def train(self) -> Labelled:
        return self.data.train

    def batches(self) -> LabelledBatches:
        return LabelledBatches(self.train, self.config.batch_sizes, self.config.seed)

    def count(self, *batch: Tensor) -> Tensor:
        return torch.full((), len(batch[0]), device=batch[0].device)  # a copy from the host would wait for a GPU

    def score(
        self,
        model: nn.Module,
        forward: Callable[..., Tensor],
        held_out: HeldOut,
        autocast: Autocast,
        show: Show | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[float, float, int]:
        """Returns the mean loss of held-out rows, the share whose most likely class is right, and their number.

        Args:
            forward: tensors of a batch without its labels -> logits. Others as in `validate`.
        """

        def measure(*batch: Tensor) -> Tensor:
            logits, labels = forward(*batch[:-1]), batch[-1]
            loss, count = labelled_loss(logits, labels)
            return torch.stack([loss, (logits.argmax(-1) == labels).sum(), count])

        sums = sum_over_batches(model, held_out, held_out.size, measure, autocast, show, mesh)
        loss, right, count = sums.tolist()
        return loss / count, right / count, round(count)

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        return super().result_fields(rows, validation) | {f"unique_{self.units}": len(self.data.train)}

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        return super().result_numbers(config) | {f"unique_{cls.units}"}
