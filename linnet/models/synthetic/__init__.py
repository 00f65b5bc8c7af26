"""Models for synthetic tasks: the auto-encoder of compression, losses at few targets, vocabularies padded to a size."""

import torch
from torch import Tensor, nn

from linnet.models.causal_lm import IGNORE, CausalLM
from linnet.models.config import ModelConfig
from linnet.models.synthetic.autoencoder import AutoEncoder
from linnet.ops import sequence


class RecallLM(CausalLM):
    """A `CausalLM` with the same parameters, for rows with at most `answers` targets each, whose logits alone it has.

    MQAR (`linnet.data.synthetic.mqar`) has 8,192 tokens and targets at 64 of 512 positions. Computing the logits of all
    positions would be most of the work of a small model, and seven eighths of them would not be used.
    """

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


@torch.no_grad()
def pad_vocabulary(model: CausalLM | AutoEncoder, size: int) -> None:
    """Widens embedding and head of a model to `size` tokens, in place; `config` keeps the tokens that it had.

    Models of several vocabularies then have one shape and train together. The new rows are zeros and their logits -inf.
    No input has such a token and no target is one, so the function is the same, and the new rows get no gradient.
    The model gets a buffer `logit_mask` [size], also if `size` is its own vocabulary.

    Raises:
        ValueError: `size` is less than the vocabulary of the model, or a tensor-parallel part of it.
    """
    own = model.config.vocab_size
    if size < own or model.embedding.weight.shape[0] != own:
        raise ValueError(f"size: {size} is less than the vocabulary of {own} tokens, or the model is split or padded")
    model.embedding.weight = nn.Parameter(_rows(model.embedding.weight, size))
    model.embedding.num_embeddings = size
    if model.head is not None:
        model.head.weight = nn.Parameter(_rows(model.head.weight, size))
        model.head.out_features = size
        if model.head.bias is not None:
            model.head.bias = nn.Parameter(_rows(model.head.bias, size))
    mask = torch.zeros(size, device=model.embedding.weight.device)
    mask[own:] = float("-inf")
    model.logit_mask = mask


def _rows(x: Tensor, size: int) -> Tensor:
    return torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])
