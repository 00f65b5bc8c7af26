"""A masked language model: every token sees all others, and hidden ones are predicted (Devlin et al. 2018).

The mask token is one row more than the vocabulary; the head, usually the embedding, has no logit for it. Logits are
computed at masked places only, a quarter of the tokens: at every token the head of `bert-crammed` would cost 27 % of
the work of its layers (Geiping and Goldstein 2022, arXiv:2212.14034, do the same).
"""

import torch
from torch import Tensor, nn

from linnet.encoders.config import MaskedConfig
from linnet.models.backbone import Backbone
from linnet.models.causal_lm import IGNORE
from linnet.models.kinds import Kind
from linnet.ops.cross_entropy import cross_entropy_reference, is_whole, linear_cross_entropy
from linnet.ops.matvec import linear


class MaskedLM(nn.Module):
    """Maps tokens int64 [B, T], of which some have the id `vocab_size` (the mask token), to logits [B, T, vocab]."""

    def __init__(self, config: MaskedConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.backbone = build_encoder(config)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)

    @property
    def mask_token(self) -> int:
        """Id of the mask token, one above those of the vocabulary."""
        return self.config.vocab_size

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns the logits of every position.

        Args:
            tokens: int64 [B, T].
            cu_seqlens: int32 [N+1], boundaries of documents or sentences with B = 1; none sees another.
        """
        x, _ = self.backbone(embed(self, tokens), cu_seqlens=cu_seqlens)
        return linear(x, self.weight())

    def loss(
        self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, answers: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the summed negative log-likelihood (nats, at least float32) and the number of targets except -100.

        Args:
            tokens: int64 [B, T], as the model sees them.
            targets: int64 [B, T], the token at each masked place and -100 elsewhere.
            cu_seqlens: as in `forward`.
            answers: largest number of targets of a row, if it is known: shapes are then fixed, and the host does not
                wait for a GPU to count them.
        """
        wanted = targets != IGNORE
        if answers is None:
            rows, columns = wanted.nonzero(as_tuple=True)
        else:
            columns = wanted.int().topk(answers, dim=1).indices.sort(1).values
            rows = torch.arange(len(targets), device=targets.device)[:, None].expand_as(columns).flatten()
            columns = columns.flatten()
        x, _ = self.backbone(embed(self, tokens), cu_seqlens=cu_seqlens, keep=(rows, columns))
        found, weight = targets[rows, columns], self.weight()
        if is_whole(weight):
            nll = linear_cross_entropy(x, weight, found, ignore_index=IGNORE)
        else:
            nll = cross_entropy_reference(linear(x, weight), found, IGNORE)
        return nll, wanted.sum()

    def log_likelihoods(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns the log-likelihood of each target in nats, at least float32 [n], in the order of rows and places.

        Args:
            tokens, targets, cu_seqlens: as in `loss`.
        """
        rows, columns = (targets != IGNORE).nonzero(as_tuple=True)
        x, _ = self.backbone(embed(self, tokens), cu_seqlens=cu_seqlens, keep=(rows, columns))
        logits = linear(x, self.weight())
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.log_softmax(-1).gather(-1, targets[rows, columns][:, None])[:, 0]

    def weight(self) -> Tensor:
        """Returns the rows of the head, [vocab, D]."""
        return self.embedding.weight[: self.config.vocab_size] if self.head is None else self.head.weight

    def head_flops(self, positions: int) -> float:
        """Returns the forward FLOPs of the head for the logits at a number of positions of a sequence."""
        return 2.0 * positions * self.config.d_model * self.config.vocab_size


def build_encoder(config: MaskedConfig) -> Backbone:
    """Returns the layers of a bidirectional text model."""
    return Backbone(config, causal=False)


def embed(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the input of the layers of a model with an `embedding`: int64 [...] -> [..., D]."""
    x = model.embedding(tokens)
    return x if model.config.embedding_scale == 1.0 else x * model.config.embedding_scale


KIND = Kind("masked_lm", MaskedConfig, MaskedLM, "linnet evaluate masked")
