"""Pads the vocabulary of a small model, so that models of several vocabularies have one shape and train together.

Embedding and head get rows of zeros up to the larger vocabulary, and the logits of these rows are -inf. No input has
such a token and no target is one, so the function is the same, and the new rows get no gradient.
"""

import torch
from torch import Tensor, nn

from linnet.models.causal_lm import CausalLM
from linnet.models.synthetic.autoencoder import AutoEncoder


@torch.no_grad()
def pad_vocabulary(model: CausalLM | AutoEncoder, size: int) -> None:
    """Widens embedding and head of a model to `size` tokens, in place; `config` keeps the tokens that it had.

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
