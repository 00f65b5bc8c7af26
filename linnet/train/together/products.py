"""Layers rewritten as matrix products, with the same parameters and results, for speed with many models at once.

They serve ensembles on a GPU, whose members are mapped over by `torch.vmap`.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEW_TOKENS = 512  # largest number of ids of an embedding that is read by a product
PADDING = 8  # columns added for a bias, so that rows stay aligned as half-precision products need them


class _Multiplied(nn.Embedding):
    """An embedding read by a product with the tokens as one-hot rows.

    Its gradient is a product as well. With few ids, each row of the table gets a sum over thousands of tokens; the
    gradient of a look-up computes this sum by sorting the tokens or with atomics.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        ids = torch.arange(self.num_embeddings, device=tokens.device)
        rows = (tokens.flatten()[:, None] == ids).to(self.weight.dtype)
        pieces = math.gcd(len(rows), 16)  # splits the sum over tokens, so that more of the GPU is busy
        with torch.autocast(tokens.device.type, enabled=False):
            x = torch.bmm(rows.unflatten(0, (pieces, -1)), self.weight.expand(pieces, -1, -1))
        return x.view(*tokens.shape, -1)


class _Widened(nn.Linear):
    """A linear layer with its bias as a column of the weight, which is multiplied by a column of ones in the input.

    Under vmap, a separate bias costs an extra pass: an addition to a float32 result under autocast, and for its
    gradient a sum over all tokens and a cast.
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = F.pad(self.bias[:, None], (0, PADDING - 1))
        return F.linear(F.pad(x, (0, PADDING), value=1.0), torch.cat([self.weight, bias], 1))


def multiply(model: nn.Module, biases: bool = True) -> None:
    """Makes plain embeddings with few ids use matrix products; with `biases`, also the biases of plain linear layers
    from a narrow input to a wide output."""
    for module in model.modules():
        if type(module) is nn.Embedding and module.padding_idx is None and module.max_norm is None:
            if module.num_embeddings <= FEW_TOKENS:
                module.__class__ = _Multiplied
        elif biases and type(module) is nn.Linear and module.bias is not None:
            if 2 * module.in_features <= module.out_features:  # otherwise the copies cost as much as they save
                module.__class__ = _Widened
