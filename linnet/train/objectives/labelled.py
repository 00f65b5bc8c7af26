"""What the objectives on labelled rows share: images, sentences and sequences."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from linnet.data.labelled import HeldOut, Labelled, LabelledBatches
from linnet.models.labelled import labelled_loss
from linnet.train.objective import RunObjective, Show
from linnet.train.scoring import sum_over_batches

if TYPE_CHECKING:
    from linnet.parallel.mesh import Mesh


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
        autocast: contextlib.AbstractContextManager,
        show: Show | None = None,
        mesh: "Mesh | None" = None,
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
