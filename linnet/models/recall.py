"""A causal language model for tasks that ask at few positions: its loss computes the logits of those alone.

With 8,192 tokens in the vocabulary and 64 questions in 512 positions (MQAR, `linnet.data.synthetic.mqar`) the head is
most of a small model, and all but an eighth of it would be thrown away.
"""

import torch
from torch import Tensor

from linnet.models.causal_lm import IGNORE, CausalLM, draw_weights
from linnet.models.config import ModelConfig
from linnet.ops.cross_entropy import linear_cross_entropy


class RecallLM(CausalLM):
    """A `CausalLM` of the same parameters, for targets of which each row has at most `answers`."""

    def __init__(self, config: ModelConfig, answers: int):
        super().__init__(config)
        self.answers = answers

    def loss(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sum of the negative log-likelihood (nats) over targets but -100, and their number: that of `CausalLM`."""
        x, _ = self.backbone(self.embed(tokens), cu_seqlens=cu_seqlens)
        places = (targets != IGNORE).int().topk(self.answers, dim=1).indices
        x = x.gather(1, places.unsqueeze(-1).expand(*places.shape, x.shape[-1]))
        targets = targets.gather(1, places)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return linear_cross_entropy(x, weight, targets, ignore_index=IGNORE), (targets != IGNORE).sum()


def build_recall(
    config: ModelConfig, answers: int, seed: int = 0, device: torch.device | str | None = None
) -> RecallLM:
    """A model with the weights that `build_model` gives."""
    return draw_weights(lambda: RecallLM(config, answers), config, seed, device)
