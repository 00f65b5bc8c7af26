"""A model of sentences: a bidirectional encoder with a head, which fine-tuning adds to a masked language model.

Sentences of different lengths are packed into one row, and no token sees another sentence, so there is no padding to
compute or to mask. The head is BERT's: the features of the first token, Linear, tanh, dropout, Linear (Devlin et al.
2018, arXiv:1810.04805, 4.1).
"""

import torch
from torch import Tensor, nn

from linnet.encoders.config import SentenceConfig
from linnet.encoders.models.masked_lm import build_encoder, embed
from linnet.layers.dropout import Dropout, DropoutPosition
from linnet.models.kinds import Kind
from linnet.models.labelled import labelled_loss
from linnet.ops.chunks import exact

HEAD_SITE = 1 << 30  # of the head's dropout, beyond those of all layers


class SentenceModel(nn.Module):
    """Maps packed sentences to classes, or to one number each.

    Its embedding and backbone have the names and shapes of `MaskedLM`, from whose weights fine-tuning starts. `pooler`
    and `head` start anew.
    """

    def __init__(self, config: SentenceConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.backbone = build_encoder(config)
        self.pooler = nn.Linear(config.d_model, config.d_model)
        self.head = nn.Linear(config.d_model, config.outputs)
        self.dropout = Dropout(config.head_dropout, HEAD_SITE) if config.head_dropout else None
        if self.dropout is not None and self.backbone.dropout_position is None:
            self.backbone.dropout_position = DropoutPosition()

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Returns [N, outputs] for N sentences.

        Args:
            tokens: int64 [1, T], the sentences one after another, none of them empty.
            cu_seqlens: int32 [N+1], where each starts, and T.
        """
        pooled = torch.tanh(self.pooler(self.features(tokens, cu_seqlens)))
        if self.dropout is not None and self.training:
            first = cu_seqlens[:-1].long()
            position = self.backbone.dropout_position
            assert position is not None
            keys = position(tokens[..., None], cu_seqlens)[:, first]
            pooled = self.dropout(pooled[None], keys)[0]
        return self.head(pooled)

    def features(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Returns the features of each sentence, [N, D]: those of its first token, or the mean over its tokens."""
        x, first = embed(self, tokens), cu_seqlens[:-1].long()
        if self.config.pool == "first":
            x, _ = self.backbone(x, cu_seqlens=cu_seqlens, keep=(torch.zeros_like(first), first))
            return x
        x, _ = self.backbone(x, cu_seqlens=cu_seqlens)
        # A product with a matrix of 0 and 1, because a sum by index adds in another order in each call on a GPU.
        place = torch.arange(x.shape[1], device=x.device)
        inside = ((place >= cu_seqlens[:-1, None]) & (place < cu_seqlens[1:, None])).to(x.dtype)
        with exact(x):
            return inside @ x[0] / cu_seqlens.diff()[:, None].to(x.dtype)

    def loss(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the summed loss and the number of sentences: cross-entropy in nats, or squared error for one output.

        Args:
            labels: int64 [N], classes; float [N] for one output.
        """
        return labelled_loss(self.forward(tokens, cu_seqlens).float(), labels)

    def head_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the head for one sentence, of any length."""
        return 2.0 * self.config.d_model * (self.config.d_model + self.config.outputs)


KIND = Kind("sentence", SentenceConfig, SentenceModel, "linnet evaluate glue")
