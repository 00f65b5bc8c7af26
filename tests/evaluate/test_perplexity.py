"""Held-out loss and bits per byte, against sums done by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from linnet.evaluate import score


class Bigram(nn.Module):
    """Logits that depend on the last token only: small, and not uniform."""

    def __init__(self, vocab: int = 5):
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(0)))

    def loss(self, tokens, targets, cu_seqlens=None):
        logits = self.table[tokens]
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return nll, (targets != -100).sum()


def batches(seed: int, sizes: list[tuple[int, int]]) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(5, size, generator=generator) for _ in range(2)) for size in sizes]


def test_is_the_mean_over_tokens_not_over_batches():
    model, data = Bigram(), batches(1, [(2, 3), (1, 7)])
    nll = sum(model.loss(*batch)[0].item() for batch in data)
    result = score(model, data)
    assert result.tokens == 13
    assert result.loss == pytest.approx(nll / 13, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(nll / 13), rel=1e-6)


def test_bits_per_byte_weighs_tokens_by_their_bytes():
    model, data = Bigram(), batches(2, [(4, 6)])
    lengths = np.array([0, 1, 2, 3, 4])
    size = lengths[data[0][1].numpy()].sum()
    nll = model.loss(*data[0])[0].item()
    assert score(model, data, lengths).bits_per_byte == pytest.approx(nll / math.log(2) / size, rel=1e-6)
    assert score(model, data, 2.5).bits_per_byte == pytest.approx(nll / math.log(2) / (24 * 2.5), rel=1e-6)


def test_ignored_targets_do_not_count():
    model, [(tokens, targets)] = Bigram(), batches(3, [(2, 5)])
    masked = targets.clone()
    masked[:, 3:] = -100
    lengths = np.arange(5) + 1
    assert score(model, [(tokens, masked)], lengths) == score(model, [(tokens[:, :3], targets[:, :3])], lengths)
    with pytest.raises(ValueError, match="to score"):
        score(model, [(tokens, torch.full_like(targets, -100))])


def test_leaves_the_model_as_it_was():
    model = Bigram()
    model.train()
    score(model, batches(4, [(1, 2)]))
    assert model.training and model.table.grad is None
