"""Layers that many models at once read faster as products of matrices, with the same parameters and results.

For an ensemble on a GPU, whose members are mapped over by `torch.vmap`.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEW_TOKENS = 512  # ids of an embedding that is read by a product
PADDING = 8  # columns that a bias takes, so that rows stay aligned as products in half precision want them


class _Multiplied(nn.Embedding):
    """An embedding read by a product with the tokens as one-hot rows.

    Its gradient is a product as well: with a few ids every row of the table gets a sum over thousands of tokens, for
    which a look-up's gradient sorts them or makes them wait for one another.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        ids = torch.arange(self.num_embeddings, device=tokens.device)
        rows = (tokens.flatten()[:, None] == ids).to(self.weight.dtype)
        pieces = math.gcd(len(rows), 16)  # of the sum over tokens, for more of the GPU to be busy
        with torch.autocast(tokens.device.type, enabled=False):
            x = torch.bmm(rows.unflatten(0, (pieces, -1)), self.weight.expand(pieces, -1, -1))
        return x.view(*tokens.shape, -1)


class _Widened(nn.Linear):
    """A linear layer with its bias as a column of the weight, which a column of ones in the input reads.

    Mapped over, a bias is added to the product in a pass of its own: to a result in float32 under autocast, and with a
    sum over all tokens and a cast for its gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = F.pad(self.bias[:, None], (0, PADDING - 1))
        return F.linear(F.pad(x, (0, PADDING), value=1.0), torch.cat([self.weight, bias], 1))


def multiply(model: nn.Module, biases: bool = True) -> None:
    """Has plain embeddings of few ids, and with `biases` those of plain linear layers from a narrow input to a wide
    output, read by products of matrices."""
    for module in model.modules():
        if type(module) is nn.Embedding and module.padding_idx is None and module.max_norm is None:
            if module.num_embeddings <= FEW_TOKENS:
                module.__class__ = _Multiplied
        elif biases and type(module) is nn.Linear and module.bias is not None:
            if 2 * module.in_features <= module.out_features:  # else what it copies is as much as what it spares
                module.__class__ = _Widened
