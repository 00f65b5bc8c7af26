"""A causal language model for tasks with few targets per row: its loss computes logits at those positions only.

MQAR (`linnet.data.synthetic.mqar`) has 8,192 tokens and targets at 64 of 512 positions. Computing the logits of all
positions would be most of the work of a small model, and seven eighths of them would not be used.
"""

from torch import Tensor

from linnet.models.causal_lm import IGNORE, CausalLM
from linnet.models.config import ModelConfig
from linnet.ops import sequence


class RecallLM(CausalLM):
    """A `CausalLM` with the same parameters, for rows with at most `answers` targets each."""

    def __init__(self, config: ModelConfig, answers: int):
        super().__init__(config)
        self.answers = answers

    def loss(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the loss of `CausalLM.loss`, from the logits of the targets only."""
        if sequence.span() is not None:  # the targets of a row may all be in one span
            return super().loss(tokens, targets, cu_seqlens)
        x, _ = self.backbone(self.embed(tokens), cu_seqlens=cu_seqlens)
        places = (targets != IGNORE).int().topk(self.answers, dim=1).indices
        x = x.gather(1, places.unsqueeze(-1).expand(*places.shape, x.shape[-1]))
        targets = targets.gather(1, places)
        return self.nll(x, targets), (targets != IGNORE).sum()

    def head_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the head for one sequence: the logits of `answers` tokens."""
        return super().head_flops(self.answers)
