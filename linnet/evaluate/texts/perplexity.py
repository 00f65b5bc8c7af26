"""Held-out loss: nats per token, perplexity, and bits per byte, which does not depend on the tokenizer."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from linnet.evaluate.likelihood import evaluating
from linnet.models.causal_lm import IGNORE
from linnet.ops.sequence import sequence_parallel

if TYPE_CHECKING:
    from linnet.parallel.mesh import Mesh


@dataclass(frozen=True)
class Score:
    """Loss over fixed held-out tokens.

    Attributes:
        loss: mean negative log-likelihood in nats per token.
        bits_per_byte: sum of negative log-likelihoods in bits, divided by the bytes of the scored tokens' text.
        tokens: number of scored tokens.
        bytes: bytes of their text.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    bytes: float

    @classmethod
    def of(cls, nats: float, tokens: int, size: float) -> "Score":
        """Returns the score of a sum of negative log-likelihoods [nats] over tokens with `size` bytes of text."""
        return cls(nats / tokens, nats / math.log(2) / size if size else math.nan, tokens, size)

    @classmethod
    def over(cls, scores: Sequence["Score"]) -> "Score":
        """Returns the score of the tokens of all scores together."""
        nats = sum(score.loss * score.tokens for score in scores)
        return cls.of(nats, sum(score.tokens for score in scores), sum(score.bytes for score in scores))

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def score(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    byte_lengths: np.ndarray | float = 1.0,
    autocast: contextlib.AbstractContextManager | None = None,
    loss: Callable[..., tuple[Tensor, Tensor]] | None = None,
    mesh: "Mesh | None" = None,
) -> Score:
    """Scores a causal language model.

    On several ranks batches are dealt to them in turn, and every rank makes the same number of forward passes, because
    each pass communicates: a rank without a batch scores one whose targets are all ignored.

    Args:
        model: runs on the device of its parameters.
        batches: (tokens, targets), int64 [B, T], and further arguments of `loss`; targets of -100 are not scored.
        byte_lengths: bytes per token, int [vocab], or their mean over the text if single tokens have no length.
        autocast: precision of the forward pass; None is that of the parameters.
        loss: batch -> (sum of negative log-likelihoods in nats, count); None is `model.loss`.
        mesh: ranks that score together; `batches` is then a sequence with len(), the same on all ranks.

    Raises:
        ValueError: there is no target to score.
    """
    device = next(model.parameters()).device
    lengths = torch.as_tensor(np.asarray(byte_lengths, dtype=np.float64))
    total, tokens, size = torch.zeros((), dtype=torch.float64, device=device), 0, 0.0
    rows = contextlib.nullcontext() if mesh is None else sequence_parallel(mesh.sp_group, mesh.sequence_method)
    with evaluating(model), rows:
        for batch in batches if mesh is None else _dealt(batches, mesh):
            targets = batch[1]
            scored = targets[targets != IGNORE]
            with autocast or contextlib.nullcontext():
                nll, _ = (loss or model.loss)(*(tensor.to(device) for tensor in batch))
            total += nll.double()
            tokens += scored.numel()
            size += scored.numel() * lengths.item() if lengths.ndim == 0 else lengths[scored].sum().item()
    if mesh is not None:
        total, tokens, size = _sum_over_ranks(model, total, tokens, size, mesh)
    if tokens == 0:
        raise ValueError("there is nothing to score: no batch has a target")
    return Score.of(total.item(), tokens, size)


def _dealt(batches: Sequence[tuple[Tensor, ...]], mesh: "Mesh") -> Iterator[tuple[Tensor, ...]]:
    """Yields every `mesh.dp`-th batch; where they run out, a last one that counts for nothing."""
    for first in range(0, len(batches), mesh.dp):
        number = first + mesh.dp_rank
        batch = batches[min(number, len(batches) - 1)]
        yield batch if number < len(batches) else (batch[0], torch.full_like(batch[1], IGNORE), *batch[2:])


def _sum_over_ranks(
    model: nn.Module, total: Tensor, tokens: int, size: float, mesh: "Mesh"
) -> tuple[Tensor, int, float]:
    """Returns the sums of all ranks, and frees the weights that the last forward pass gathered."""
    from linnet.parallel.build import settle

    settle(model)
    # The ranks of one row have summed up their spans, but have each counted the targets of the whole row.
    counted = [tokens, size] if mesh.sp_rank == 0 else [0, 0.0]
    sums = torch.cat([total[None], torch.tensor(counted, dtype=torch.float64, device=total.device)])
    torch.distributed.all_reduce(sums, group=mesh.data_group)
    return sums[0], round(sums[1].item()), sums[2].item()
