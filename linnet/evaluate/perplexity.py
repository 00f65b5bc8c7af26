"""Held-out loss: nats per token, perplexity, and bits per byte, which does not depend on the tokenizer."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from linnet.evaluate.mode import evaluating
from linnet.models.causal_lm import IGNORE


@dataclass(frozen=True)
class Score:
    """Loss over fixed held-out tokens.

    Attributes:
        loss: mean negative log-likelihood in nats per token.
        bits_per_byte: sum of negative log-likelihoods in bits, divided by the bytes of the scored tokens' text.
        tokens: number of scored tokens.
    """

    loss: float
    bits_per_byte: float
    tokens: int

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
) -> Score:
    """Scores a causal language model.

    Args:
        model: runs on the device of its parameters.
        batches: (tokens, targets), int64 [B, T], and further arguments of `loss`; targets of -100 are not scored.
        byte_lengths: bytes per token, int [vocab], or their mean over the text if single tokens have no length.
        autocast: precision of the forward pass; None is that of the parameters.
        loss: batch -> (sum of negative log-likelihoods in nats, count); None is `model.loss`.

    Raises:
        ValueError: there is no target to score.
    """
    device = next(model.parameters()).device
    lengths = torch.as_tensor(np.asarray(byte_lengths, dtype=np.float64))
    total, tokens, size = torch.zeros((), dtype=torch.float64, device=device), 0, 0.0
    with evaluating(model):
        for batch in batches:
            targets = batch[1]
            scored = targets[targets != IGNORE]
            with autocast or contextlib.nullcontext():
                nll, _ = (loss or model.loss)(*(tensor.to(device) for tensor in batch))
            total += nll.double()
            tokens += scored.numel()
            size += scored.numel() * lengths.item() if lengths.ndim == 0 else lengths[scored].sum().item()
    if tokens == 0:
        raise ValueError("there is nothing to score: no batch has a target")
    nats = total.item()
    return Score(nats / tokens, nats / math.log(2) / size if size else math.nan, tokens)
